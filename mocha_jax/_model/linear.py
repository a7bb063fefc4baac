"""A linear model for every task, that predicts by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.dense import check_dense, check_frames, check_no_dates
from mocha_jax._data.names import NAMELESS, Names, columns_in_order, columns_of, listed, places
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.file import write

UNSEEN = ("error", "mean")

# What a prediction stands for: itself, one of two classes, or a level of some that are ordered.
DECISIONS = ("value", "sign", "level")


@dataclasses.dataclass(frozen=True, eq=False)
class LinearModel:
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
    trained: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = _numbers("weights", self.weights, ("num_tasks", "d"))
        m = len(weights)
        object.__setattr__(self, "weights", weights)
        intercept = _numbers("intercept", self.intercept, ("num_tasks",))
        if len(intercept) != m:
            raise ValueError(
                f"LinearModel: weights has {m} rows and intercept {len(intercept)} numbers; give one a task."
            )
        object.__setattr__(self, "intercept", intercept)
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", _numbers("thresholds", self.thresholds, (m, "levels - 1")))
        check.instance("LinearModel", "names", self.names, Names, "that of pack_tasks(...)")
        check.flag("LinearModel", logistic=self.logistic)
        check.instance("LinearModel", "trained", self.trained, Mapping, "{}")
        known = isinstance(self.decides, list | tuple)
        decides = (tuple(self.decides) or ("value",) * m) if known else ()
        if len(decides) != m or not all(isinstance(each, str) and each in DECISIONS for each in decides):
            raise ValueError(
                f"LinearModel: decides must name one of {', '.join(DECISIONS)} for each of the {m} tasks, got "
                f"{check.shown(self.decides)}."
            )
        object.__setattr__(self, "decides", decides)

    @property
    def num_tasks(self) -> int:
        """The number of tasks; 1 of a global model."""
        return len(self.weights)

    @property
    def tasks(self) -> tuple[Hashable, ...]:
        """The names of the tasks, or their numbers where they have none."""
        return tuple(range(self.num_tasks)) if self.names.tasks is None else self.names.tasks

    def predict(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        r"""Predict labels ``[k]``: numbers, or names of classes where there are some.

        Args:
          x: samples ``[k, d]`` without the intercept, or a data frame with the features among its columns.
          task: whose samples they are: the name of a task, or one name a sample; of a global model left out.
          unseen: what to do for a task that was not there in training: ``"error"``, or ``"mean"``, the mean of all
            tasks' weights. That is the Bayesian estimate under a learned covariance C, if the new task is related to
            the others as the average task is: $c^\top C^{-1}W = 1^\top W/m$ for $c = C1/m$.
        """
        z, where = self._scored(x, task, unseen)
        if len(set(self.decides)) > 1 and (where < 0).any():
            raise ValueError(
                "predict: tasks decide in different ways here, so that a new one has no label; see decision_function."
            )
        kind, labels = np.asarray(self.decides)[where], z.astype(float if self.names.classes is None else object)
        if (signs := kind == "sign").any():
            labels[signs] = self._classes((z[signs] > 0).astype(int), (-1.0, 1.0))
        if (levels := kind == "level").any():
            assert self.thresholds is not None
            begins = np.concatenate([self.thresholds, self.thresholds.mean(axis=0, keepdims=True)])[where[levels]]
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

    def weights_for(self, data: TaskData) -> np.ndarray:
        """The weights of the tasks of a data set, found by their names ``[num_tasks of the data, d + intercept]``."""
        check.instance("model", "data", data, TaskData, "pack_tasks(xs, ys, like=train)")
        names = data.names
        if self.names.tasks is not None and names.tasks is not None:
            order = places("model", "task", names.tasks, self.names.tasks)
        elif self.num_tasks in (1, data.num_tasks):
            order = np.arange(self.num_tasks)
        else:
            raise ValueError(
                f"model: the data has {data.num_tasks} tasks without names, and the model {self.num_tasks}; pack both "
                f"with groups, and the data like those for training."
            )
        columns = np.arange(self.weights.shape[1])
        if self.names.features is not None and names.features is not None:
            columns_in_order("model: the data", names.features, self.names.features)
            columns = places("model", "feature", names.features, self.names.features)
        if np.any(self.intercept) and not data.intercept:
            raise ValueError("model: it has an intercept, and the data was packed without one; pass intercept=True.")
        found = self.weights[order][:, columns]
        return np.concatenate([found, self.intercept[order][:, None]], axis=1) if data.intercept else found

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

    def __repr__(self) -> str:
        how = f", {self.trained['message']}" if "message" in self.trained else ""
        return f"LinearModel({self.num_tasks} tasks, {self.weights.shape[1]} features{how})"

    def _scored(self, x: ArrayLike, task: object, unseen: str) -> tuple[np.ndarray, np.ndarray]:
        """Predictions ``[k]``, and the task of each; -1 of one that is new."""
        check.one_of("predict", "unseen", unseen, UNSEEN)
        samples = self._samples(x)
        where = self._places(task, len(samples), unseen)
        weights, intercept = self.weights, self.intercept
        if (where < 0).any():
            weights, intercept = (np.concatenate([a, a.mean(axis=0, keepdims=True)]) for a in (weights, intercept))
        z = np.einsum("kd,kd->k", samples, weights[where]) + intercept[where]
        return z, where

    def _samples(self, x: ArrayLike) -> np.ndarray:
        check_dense("predict", "x", x)
        check_frames("predict", "x", x)
        columns, known = columns_of("predict", x), self.names.features
        if columns is not None and known is not None:
            frame: Any = x
            order = columns_in_order("predict: x", columns, known)
            x = frame[[frame.columns[i] for i in order]]
            check_no_dates("predict", x)
        samples, width = check.concrete(x), self.weights.shape[1]
        if samples is None or samples.ndim != 2 or samples.shape[1] != width or samples.dtype.kind not in "fiub":
            raise ValueError(f"predict: x must be samples [k, {width}] of numbers, got {check.shown(x)}.")
        return samples.astype(self.weights.dtype)

    def _places(self, task: object, count: int, unseen: str) -> np.ndarray:
        if task is None:
            if self.num_tasks > 1:
                raise ValueError(
                    f"predict: say whose samples they are: task is one of {listed(self.tasks)}, or one for each sample."
                )
            return np.zeros(count, int)
        if self.num_tasks == 1 and self.names.tasks is None:  # a global model
            return np.zeros(count, int)
        wanted = _names_of("predict", task, count)
        if unseen == "error":
            return places("predict", "task", wanted, self.tasks)
        numbers = {name: i for i, name in enumerate(self.tasks)}
        return np.array([numbers.get(name, -1) for name in wanted], int)

    def _classes(self, place: np.ndarray, codes: Sequence[float]) -> np.ndarray:
        """Labels by their place: names where there are some."""
        return np.asarray(codes if self.names.classes is None else self.names.classes)[place]


def _numbers(name: str, value: object, shape: tuple[int | str, ...]) -> np.ndarray:
    """An array of numbers of that shape, as NumPy's."""
    check.array("LinearModel", name, value, shape)
    if (array := check.concrete(value)) is None or array.dtype.kind not in "fiub":
        raise ValueError(f"LinearModel: {name} must be numbers, got {check.shown(value)}.")
    return array


def _names_of(owner: str, task: object, count: int) -> list[Hashable]:
    """The name of the task of every sample."""
    if isinstance(task, str | int | float | np.generic):
        given: list[Any] = [task] * count
    else:  # a list, a column of a data frame, an array
        several = isinstance(task, Iterable) and not isinstance(task, Set | Mapping) and getattr(task, "ndim", 1) > 0
        given = list(task) if several else []  # type: ignore[call-overload]
        if len(given) != count:
            raise ValueError(
                f"{owner}: task must be a name, or one for each of the {count} samples; got {check.shown(task)}."
            )
    plain = [each.item() if isinstance(each, np.generic) else each for each in given]
    if not all(isinstance(each, Hashable) and each == each for each in plain):
        raise ValueError(f"{owner}: task must be names, got {check.shown(task)}.")
    return plain
