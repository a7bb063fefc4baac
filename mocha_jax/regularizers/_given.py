"""Regularizers whose relationship between the tasks is given."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._math import matmul
from mocha_jax._pytree import Hyperparameter
from mocha_jax.coupling import Coupling, Dense, Diagonal, Exchangeable
from mocha_jax.regularizers._base import Regularizer


class Independent(Regularizer):
    r""":math:`R(W) = \lambda\|W\|_F^2`: every task on its own.

    With all data on one task (`TaskData.pooled`) it is the global model.

    Args:
      lam: :math:`\lambda > 0`; a number, or one per task ``[m]``.

    >>> import jax.numpy as jnp
    >>> float(Independent(0.5).value(jnp.ones((2, 3))))
    3.0
    """

    lam: Hyperparameter

    def __post_init__(self) -> None:
        _check.positive("Independent", lam=self.lam)

    def value(self, weights: Array, omega: Any = None) -> Array:
        return jnp.sum(jnp.asarray(self.lam) * jnp.sum(weights**2, axis=1))

    def coupling(self, num_tasks: int, omega: Any = None) -> Coupling:
        return Diagonal(jnp.broadcast_to(0.5 / jnp.asarray(self.lam), (num_tasks,)))

    def relationship(self, num_tasks: int, omega: Any = None) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def check_tasks(self, num_tasks: int) -> None:
        if np.shape(self.lam) not in ((), (num_tasks,)):
            raise ValueError(
                f"Independent: lam must be a number or one per task [{num_tasks}], got shape {np.shape(self.lam)}."
            )


class MeanRegularized(Regularizer):
    r"""Tasks near their mean, eq. (11): :math:`\Omega = (I - 11^\top/m)^2`.

    .. math:: R(W) = \lambda_1 \sum_t \|w_t - \bar w\|^2 + \lambda_2 \|W\|_F^2

    Args:
      lam1: pull towards the mean, >= 0.
      lam2: ridge, > 0.
    """

    lam1: Hyperparameter
    lam2: Hyperparameter

    def __post_init__(self) -> None:
        _check.nonnegative("MeanRegularized", lam1=self.lam1)
        _check.positive("MeanRegularized", lam2=self.lam2)

    def value(self, weights: Array, omega: Any = None) -> Array:
        deviation = weights - jnp.mean(weights, axis=0, keepdims=True)
        lam1, lam2 = jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return lam1 * jnp.sum(deviation**2) + lam2 * jnp.sum(weights**2)

    def coupling(self, num_tasks: int, omega: Any = None) -> Coupling:
        lam1, lam2 = jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return Exchangeable(0.5 / (lam1 + lam2), 0.5 / lam2, num_tasks)

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("MeanRegularized", lam1=self.lam1, lam2=self.lam2)

    def relationship(self, num_tasks: int, omega: Any = None) -> Array:
        dtype = jnp.result_type(self.lam1)
        return jnp.eye(num_tasks, dtype=dtype) - jnp.full((num_tasks, num_tasks), 1.0 / num_tasks, dtype)


class Graph(Regularizer):
    r"""A known relationship, eq. (2), e.g. the Laplacian of a graph of tasks.

    .. math:: R(W) = \lambda_1 \mathrm{tr}(W^\top \Omega W) + \lambda_2 \|W\|_F^2

    Args:
      omega: :math:`\Omega` ``[m, m]``, symmetric positive semi-definite. Large entries
        *penalise*: for a Laplacian the first term is
        :math:`\lambda_1\sum_{t<t'} a_{tt'}\|w_t - w_{t'}\|^2`.
      lam1: weight of the relationship, >= 0.
      lam2: ridge, > 0.
    """

    not_tuned: ClassVar[tuple[str, ...]] = ("omega",)

    omega: Array | np.ndarray
    lam1: Hyperparameter
    lam2: Hyperparameter

    def __post_init__(self) -> None:
        _check.positive_semidefinite("Graph", "omega", self.omega)
        _check.nonnegative("Graph", lam1=self.lam1)
        _check.positive("Graph", lam2=self.lam2)

    def value(self, weights: Array, omega: Any = None) -> Array:
        omega, lam1, lam2 = jnp.asarray(self.omega), jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return lam1 * jnp.sum(weights * matmul(omega, weights)) + lam2 * jnp.sum(weights**2)

    def coupling(self, num_tasks: int, omega: Any = None) -> Coupling:
        omega, lam1, lam2 = jnp.asarray(self.omega), jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        identity = jnp.eye(num_tasks, dtype=omega.dtype)
        a = 2.0 * (lam1 * omega + lam2 * identity)
        inverse = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), identity)
        return Dense(0.5 * (inverse + inverse.T))

    def relationship(self, num_tasks: int, omega: Any = None) -> Array:
        return jnp.asarray(self.omega)

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("Graph", lam1=self.lam1, lam2=self.lam2)
        if np.shape(self.omega) != (num_tasks, num_tasks):
            raise ValueError(
                f"Graph: omega is {np.shape(self.omega)} but the data has {num_tasks} tasks; it must be "
                f"[{num_tasks}, {num_tasks}]."
            )
