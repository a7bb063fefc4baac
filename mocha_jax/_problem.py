"""What is to be solved: data, loss and regularizer."""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._data import TaskData
from mocha_jax._pytree import Pytree
from mocha_jax._transfers import on_purpose
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Regularizer


class Federated(Pytree):
    """What a federation is to learn. The drivers know no more of a problem than this."""

    data: TaskData

    @property
    @abstractmethod
    def criterion(self) -> str:
        """The name of what a solve compares with its tolerance."""

    @property
    @abstractmethod
    def value(self) -> str:
        """The name of what must stay finite."""

    def aim(self, tol: Array) -> Array:
        """The recorded residual at which rounds end, so that the answer is within `tol` when everything is counted."""
        return tol


class Problem(Federated):
    r"""The convex problem :math:`\min_W \sum_t\sum_i c_{ti}\,\ell(w_t^\top x_{ti}, y_{ti}) + R(W)`.

    Hyperparameters are cast to the data's dtype here, once, so that a Python number and an
    array of any float type compile to the same program.

    Args:
      data: from `pack_tasks`.
      loss: from `mocha_jax.losses`.
      regularizer: from `mocha_jax.regularizers`.
    """

    loss: Loss
    regularizer: Regularizer

    @property
    def criterion(self) -> str:
        if not self.regularizer.jointly_convex:
            return "residual"
        return "relative joint gap" if self.regularizer.learned else "relative gap"

    @property
    def value(self) -> str:
        return "gap"

    def aim(self, tol: Array) -> Array:
        # Some roundings of the objective may be hidden from a recorded gap; most of a tiny tolerance is not for them.
        return jnp.maximum(tol - 32.0 * jnp.finfo(tol.dtype).eps, 0.5 * tol)

    @property
    def admissible(self) -> Array:
        """Whether all hyperparameters lie where they must, [] bool; without that nothing is certified."""
        return self.loss.admissible & self.regularizer.admissible & self.regularizer.fits(self.data.num_tasks)

    @on_purpose
    def __post_init__(self) -> None:
        _check.instance("Problem", "data", self.data, TaskData, "pack_tasks(xs, ys)")
        _check.instance("Problem", "loss", self.loss, Loss, "Hinge()")
        _check.instance("Problem", "regularizer", self.regularizer, Regularizer, "Independent(0.1)")
        dtype = self.data.dtype
        for name in ("loss", "regularizer"):
            given = getattr(self, name)
            _check.representable(type(given).__name__, given, dtype)
            object.__setattr__(self, name, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), given))
        self.loss.check_numbers()
        self.regularizer.check_tasks(self.data.num_tasks)
        if self.loss.binary:
            _check_signs(self.data, type(self.loss).__name__)


def _check_signs(data: TaskData, loss: str) -> None:
    y, weight = _check.concrete(data.y), _check.concrete(data.weight)
    if y is None or weight is None:
        return
    wrong = (np.abs(y) != 1) & (weight > 0)
    if wrong.any():
        node, row = np.argwhere(wrong)[0]
        raise ValueError(
            f"task {int(data.task[node])}{f' (node {node})' if data.shared else ''}: "
            f"has label {y[node, row]:g}, but {loss} needs labels -1 and +1; map yours, e.g. with "
            f"np.where(y == positive_class, 1, -1)."
        )
