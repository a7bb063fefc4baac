"""A linear model for every task and each of several classes, that predicts by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._model.base import HowTrained, WeightsModel, check_names, finite
from mocha_jax._model.file import write

# Ways to train it, which are the kinds of its files: a model for each class, or one for all pairs of classes.
METHODS = ("one_vs_rest", "by_pair")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MulticlassModel(WeightsModel):
    """Weights of every class and task, with names; the class with the largest decision value is predicted.

    From ``one_vs_rest(...).model``, or `multiclass.pair_model`. It holds NumPy arrays and plain values, and none of the
    samples that it was trained on.

    Args:
      weights: ``[classes, num_tasks, d]``, without the intercept.
      intercept: ``[classes, num_tasks]``.
      names: of tasks, features and classes, as far as there are some.
      logistic: whether a decision value z is the logarithm of the odds of its class.
      calibration: ``[classes, 2]``, slope a and offset b of every class with log-odds az + b, from held-out samples.
      method: how it was trained, ``"one_vs_rest"`` or ``"by_pair"``.
      trained: how, and how well: texts and numbers.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> names = mj.Names(tasks=("oak", "elm"), classes=("low", "mid", "high"))
      >>> weights = np.array([[[-1.0], [1.0]], [[0.0], [0.0]], [[1.0], [-1.0]]])
      >>> model = mj.MulticlassModel(weights, np.zeros((3, 2)), names)
      >>> model.predict([[2.0], [2.0]], task=["oak", "elm"]).tolist()
      ['high', 'low']
    """

    weights: np.ndarray
    intercept: np.ndarray
    names: Names = NAMELESS
    logistic: bool = False
    calibration: np.ndarray | None = None
    method: str = "one_vs_rest"
    trained: HowTrained = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        owner = "MulticlassModel"
        weights = finite(owner, "weights", self.weights, ("classes", "num_tasks", "d"))
        intercept = finite(owner, "intercept", self.intercept, ("classes", "num_tasks"))
        if intercept.shape != weights.shape[:2]:
            raise ValueError(
                f"{owner}: intercept must be {list(weights.shape[:2])} numbers, one a class and task of weights, "
                f"got {list(intercept.shape)}."
            )
        check_names(owner, self.names, tasks=weights.shape[1], features=weights.shape[2], classes=len(weights))
        check.flag(owner, logistic=self.logistic)
        check.one_of(owner, "method", self.method, METHODS)
        check.instance(owner, "trained", self.trained, Mapping, "{}")
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "intercept", intercept)
        if self.calibration is not None:
            calibration = finite(owner, "calibration", self.calibration, (len(weights), 2))
            object.__setattr__(self, "calibration", calibration)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.weights)

    def predict(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """Predict classes ``[k]``: their names, or their numbers if they have none.

        Args:
          x: samples ``[k, d]`` without the intercept, or a data frame with the features among its columns, in any order
            and of the types that `pack_tasks` takes.
          task: whose samples they are: the name of a task, one name a sample, or the name of the frame's column that
            has them (a task of that name comes first); of a global model left out.
          unseen: what to do for a task that was not there in training: ``"error"``, or ``"mean"``, the mean of all
            tasks' weights; see `LinearModel.predict`.
        """
        best = np.argmax(self._scored(x, task, unseen)[0], axis=0)
        return best if self.names.classes is None else np.asarray(self.names.classes)[best]

    def decision_function(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """Return what each class says, w'x + b ``[k, classes]``; arguments as `predict`."""
        return self._scored(x, task, unseen)[0].T

    def predict_proba(self, x: ArrayLike, task: object = None, *, unseen: str = "error") -> np.ndarray:
        """Probabilities of the classes ``[k, classes]``, in the order of ``names.classes``; arguments as `predict`.

        Of a model that was calibrated they are those of held-out samples; else the sigmoids of the logistic loss,
        divided by their sum.
        """
        require_probabilities("predict_proba", self.calibration is not None, self.logistic)
        z = self._scored(x, task, unseen)[0]
        if self.calibration is not None:
            z = self.calibration[:, :1] * z + self.calibration[:, 1:]
        log_odds = -np.logaddexp(0.0, -z)
        raised = np.exp(log_odds - log_odds.max(axis=0))  # where all are tiny, their quotients are what counts
        return (raised / raised.sum(axis=0)).T

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to one file of NumPy arrays and JSON, to be read by `load_model`, or by NumPy alone."""
        arrays = {"weights": self.weights, "intercept": self.intercept}
        if self.calibration is not None:
            arrays["calibration"] = self.calibration
        write(path, self.method, arrays, {
            "tasks": self.names.tasks, "features": self.names.features, "classes": self.names.classes,
            "logistic": self.logistic, "trained": dict(self.trained),
        })  # fmt: skip

    def _size(self) -> str:
        return f"{self.num_classes} classes, {super()._size()}"


def require_probabilities(owner: str, calibrated: bool, logistic: bool) -> None:
    """Refuse probabilities of decision values that have none."""
    if not (calibrated or logistic):
        raise ValueError(
            f"{owner}: models of this loss have no probabilities; use one_vs_rest with losses.Logistic(), or "
            f"multiclass.calibrated."
        )
