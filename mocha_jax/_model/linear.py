"""A linear model for every task, that predicts by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._model.base import HowTrained, WeightsModel, check_names, checked_numbers, finite
from mocha_jax._model.file import write

# What a prediction stands for: itself, one of two classes, or a level of some that are ordered.
DECISIONS = ("value", "sign", "level")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LinearModel(WeightsModel):
    r"""Weights of every task, with the names of tasks, features and classes; from ``solution.model``.

    It holds NumPy arrays and plain values, and none of the samples that it was trained on.

    Args:
      weights: ``[num_tasks, d]``, without the intercept.
      intercept: ``[num_tasks]``.
      names: of tasks, features and classes, as far as there are some.
      decides: of every task what its predictions stand for, one of ``"value"``, ``"sign"`` and ``"level"``.
      thresholds: ``[num_tasks, levels - 1]`` where predictions stand for levels.
      logistic: whether a prediction z is the logarithm of the odds, so that there are probabilities.
      trained: how, and how well: texts and numbers.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> x, group = rng.normal(size=(60, 2)).astype("f"), np.repeat(["oak", "elm"], 30)
      >>> y = np.where(group == "oak", x[:, 0], -2 * x[:, 0])
      >>> data = mj.pack_tasks(x, y, group, loss_scaling="task_mean", intercept=True)
      >>> model = mj.solve(mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1e-3))).model
      >>> model.predict([[1.0, 0.0], [1.0, 0.0]], task=["oak", "elm"]).round(1).tolist()
      [1.0, -2.0]
    """

    weights: np.ndarray
    intercept: np.ndarray
    names: Names = NAMELESS
    decides: tuple[str, ...] = ()
    thresholds: np.ndarray | None = None
    logistic: bool = False
    trained: HowTrained = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = finite("LinearModel", "weights", self.weights, ("num_tasks", "d"))
        m = len(weights)
        object.__setattr__(self, "weights", weights)
        intercept = finite("LinearModel", "intercept", self.intercept, ("num_tasks",))
        if len(intercept) != m:
            raise ValueError(
                f"LinearModel: weights has {m} rows and intercept {len(intercept)} numbers; give one a task."
            )
        object.__setattr__(self, "intercept", intercept)
        if self.thresholds is not None:
            object.__setattr__(
                self, "thresholds", checked_numbers("LinearModel", "thresholds", self.thresholds, (m, "levels - 1"))
            )
        check.flag("LinearModel", logistic=self.logistic)
        check.instance("LinearModel", "trained", self.trained, Mapping, "{}")
        listed = isinstance(self.decides, list | tuple)
        decides = (tuple(self.decides) or ("value",) * m) if listed else ()
        if len(decides) != m or not all(isinstance(each, str) and each in DECISIONS for each in decides):
            raise ValueError(
                f"LinearModel: decides must name one of {', '.join(DECISIONS)} for each of the {m} tasks, got "
                f"{check.shown(self.decides)}."
            )
        object.__setattr__(self, "decides", decides)
        check_names("LinearModel", self.names, tasks=m, features=weights.shape[1], classes=self._num_classes())

    def predict(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        r"""Predict labels ``[k]``: numbers, or names of classes if there are any.

        Args:
          x: samples ``[k, d]`` without the intercept, or a data frame with the features among its columns, in any order
            and of the types that `pack_tasks` takes.
          task: whose samples they are: the name of a task, one name a sample, or the name of the frame's column that
            has them (a task of that name comes first); of a global model left out.
          unseen: what to do for a task that was not there in training: ``"error"``, or ``"mean"``, the mean of all
            tasks' weights. That is the Bayesian estimate under a learned covariance C, if the new task is related to
            the others as the average task is: $c^\top C^{-1}W = 1^\top W/m$ for $c = C1/m$.
        """
        z, tasks = self._scored(x, task, unseen)
        if len(set(self.decides)) > 1 and (tasks < 0).any():
            raise ValueError(
                "predict: tasks decide in different ways here, so that a new one has no label; see decision_function."
            )
        kind, labels = np.asarray(self.decides)[tasks], z.astype(float if self.names.classes is None else object)
        if (signs := kind == "sign").any():
            labels[signs] = self._classes((z[signs] > 0).astype(int), (-1.0, 1.0))
        if (levels := kind == "level").any():
            assert self.thresholds is not None
            begins = np.concatenate([self.thresholds, self.thresholds.mean(axis=0, keepdims=True)])[tasks[levels]]
            level = np.sum(z[levels, None] > begins, axis=1)
            labels[levels] = self._classes(level, range(self.thresholds.shape[1] + 1))
        return labels if labels.dtype != object or (kind == "value").any() else np.array(labels.tolist())

    def decision_function(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """The predictions w'x + b themselves ``[k]``; arguments as `predict`."""
        return self._scored(x, task, unseen)[0]

    def predict_proba(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """The probabilities of both classes ``[k, 2]``, of the logistic loss; arguments as `predict`."""
        if not self.logistic:
            raise ValueError(
                f"predict_proba: a model trained with {self.trained.get('loss', 'this loss')} has no probabilities; "
                f"train with losses.Logistic()."
            )
        z = self.decision_function(x, task, unseen=unseen)
        positive = np.exp(np.minimum(z, 0.0)) / (1.0 + np.exp(-np.abs(z)))  # no exponential of a large number
        return np.stack([1.0 - positive, positive], axis=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to one file of NumPy arrays and JSON, to be read by `load_model`, or by NumPy alone."""
        arrays = {"weights": self.weights, "intercept": self.intercept}
        if self.thresholds is not None:
            arrays["thresholds"] = self.thresholds
        same = len(set(self.decides)) == 1
        write(path, "linear", arrays, {
            "tasks": self.names.tasks, "features": self.names.features, "classes": self.names.classes,
            "decides": self.decides[0] if same else self.decides, "logistic": self.logistic,
            "trained": dict(self.trained),
        })  # fmt: skip

    def _num_classes(self) -> int | None:
        """The number of classes that predictions stand for; None where they stand for themselves."""
        if self.thresholds is not None and "level" in self.decides:
            return self.thresholds.shape[1] + 1
        return 2 if "sign" in self.decides else None

    def _classes(self, place: np.ndarray, codes: Sequence[float]) -> np.ndarray:
        """Labels by their place: names where there are some."""
        return np.asarray(codes if self.names.classes is None else self.names.classes)[place]
