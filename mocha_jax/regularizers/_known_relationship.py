"""Regularizers whose relationship between the tasks is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import matmul
from mocha_jax._numerics.twofold import additions
from mocha_jax.coupling import Coupling, Dense, Diagonal, Exchangeable
from mocha_jax.regularizers._base import Regularizer, rounded, twice_rounded


class Independent(Regularizer):
    r"""$R(W) = \lambda\|W\|_F^2$: every task on its own.

    With all data on one task (`TaskData.pooled`) it is the global model.

    Args:
      lam: $\lambda > 0$; a number, or one per task ``[m]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> float(Independent(0.5).value(jnp.ones((2, 3))))
      3.0
    """

    separate: ClassVar[bool] = True
    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam": domains.POSITIVE}

    lam: Hyperparameter

    def value(self, weights: Array, relation: None = None) -> Array:
        return jnp.sum(jnp.asarray(self.lam) * jnp.sum(weights**2, axis=1))

    def bracket(self, v: Array, error: Array, weights: Array, relation: None = None) -> Array:
        # R(W - M V): nothing of it is lost in a difference of large numbers.
        scale = self.coupling(len(v)).diagonal()[:, None]
        implied = scale * v
        off = jnp.abs(weights - implied) + rounded(implied, 8.0) + scale * error
        return twice_rounded(self.value(off))

    def value_error(self, weights: Array, relation: None = None) -> Array:
        return rounded(self.value(weights), 8.0 + 2.0 * additions(weights.size))

    def coupling(self, num_tasks: int, relation: None = None) -> Coupling:
        return Diagonal(jnp.broadcast_to(0.5 / jnp.asarray(self.lam), (num_tasks,)))

    def relationship(self, num_tasks: int, relation: None = None) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def check_tasks(self, num_tasks: int) -> None:
        if np.shape(self.lam) not in ((), (num_tasks,)):
            raise ValueError(
                f"Independent: lam must be a number or one per task [{num_tasks}], got shape {np.shape(self.lam)}."
            )


class MeanRegularized(Regularizer):
    r"""Tasks near their mean, eq. (11): $\Omega = (I - 11^\top/m)^2$.

    $$
    R(W) = \lambda_1 \sum_t \|w_t - \bar w\|^2 + \lambda_2 \|W\|_F^2
    $$

    Args:
      lam1: pull towards the mean, >= 0.
      lam2: ridge, > 0.

    References:
      - Evgeniou and Pontil, Regularized Multi-Task Learning, 2004.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam1": domains.NONNEGATIVE, "lam2": domains.POSITIVE}

    lam1: Hyperparameter
    lam2: Hyperparameter

    def value(self, weights: Array, relation: None = None) -> Array:
        deviation = weights - jnp.mean(weights, axis=0, keepdims=True)
        lam1, lam2 = jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return lam1 * jnp.sum(deviation**2) + lam2 * jnp.sum(weights**2)

    def bracket(self, v: Array, error: Array, weights: Array, relation: None = None) -> Array:
        # R(W - M V), as the norm that R is: of what is seen, of errors of their own in every entry, and of what the
        # mean of V may have lost, which all tasks share.
        m, both, lam2 = len(v), jnp.asarray(self.lam1) + jnp.asarray(self.lam2), jnp.asarray(self.lam2)
        of_deviations, common = 0.5 / both, 0.5 / lam2
        mean, more = jnp.mean(v, axis=0, keepdims=True), common - of_deviations
        off = weights - (of_deviations * v + more * mean)
        size = rounded(jnp.abs(of_deviations * v) + common * jnp.abs(mean) + jnp.abs(weights) + jnp.abs(off), 8.0)
        own = jnp.sum((size + of_deviations * error) ** 2)
        sizes, errors = (jnp.mean(a, axis=0, keepdims=True) for a in (jnp.abs(v), error))
        lost = rounded(sizes, 2.0 + additions(m)) + errors
        shared = m * jnp.sum((more * lost) ** 2)
        norm = jnp.sqrt(self.value(off)) + jnp.sqrt(both * own) + jnp.sqrt(lam2 * shared)
        return twice_rounded(norm**2)

    def value_error(self, weights: Array, relation: None = None) -> Array:
        deviation, lam1 = weights - jnp.mean(weights, axis=0, keepdims=True), jnp.asarray(self.lam1)
        size = rounded(jnp.abs(weights) + jnp.abs(deviation), 4.0 + additions(len(weights)))
        moved = lam1 * jnp.sum(2.0 * jnp.abs(deviation) * size + size**2)
        return rounded(self.value(weights), 8.0 + additions(weights.size)) + moved

    def curvatures(self, num_tasks: int, relation: None = None) -> tuple[Array, Array]:
        lam1, lam2 = jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return 2.0 * (lam1 + lam2), 0.5 / lam2

    def coupling(self, num_tasks: int, relation: None = None) -> Coupling:
        lam1, lam2 = jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return Exchangeable(0.5 / (lam1 + lam2), 0.5 / lam2, num_tasks)

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("MeanRegularized", lam1=self.lam1, lam2=self.lam2)

    def relationship(self, num_tasks: int, relation: None = None) -> Array:
        dtype = jnp.result_type(self.lam1)
        return jnp.eye(num_tasks, dtype=dtype) - jnp.full((num_tasks, num_tasks), 1.0 / num_tasks, dtype)


class Graph(Regularizer):
    r"""A known relationship, eq. (2), e.g. the Laplacian of a graph of tasks.

    $$
    R(W) = \lambda_1 \mathrm{tr}(W^\top \Omega W) + \lambda_2 \|W\|_F^2
    $$

    Args:
      omega: $\Omega$ ``[m, m]``, symmetric positive semi-definite. Large entries
        *penalise*: for a Laplacian the first term is
        $\lambda_1\sum_{t<t'} a_{tt'}\|w_t - w_{t'}\|^2$.
      lam1: weight of the relationship, >= 0.
      lam2: ridge, > 0.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    frozen_fields: ClassVar[tuple[str, ...]] = ("omega",)
    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam1": domains.NONNEGATIVE, "lam2": domains.POSITIVE}

    omega: Array | np.ndarray
    lam1: Hyperparameter
    lam2: Hyperparameter

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_semidefinite("Graph", "omega", self.omega)

    def value(self, weights: Array, relation: None = None) -> Array:
        omega, lam1, lam2 = jnp.asarray(self.omega), jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return lam1 * jnp.sum(weights * matmul(omega, weights)) + lam2 * jnp.sum(weights**2)

    def bracket(self, v: Array, error: Array, weights: Array, relation: None = None) -> Array:
        # R*(r) of the residual r = grad R(W) - V, as the norm that it is.
        precision, coupling = self._precision(len(v)), self.coupling(len(v))
        residual = matmul(precision, weights) - v
        seen = jnp.abs(residual) + matmul(jnp.abs(precision), jnp.abs(weights)) + jnp.abs(v)
        lost = rounded(seen, 4.0 + len(v)) + error
        norm = jnp.sqrt(coupling.conjugate_bound(residual, precision)) + jnp.sqrt(
            jnp.asarray(self.lam2) * jnp.sum((0.5 * lost / jnp.asarray(self.lam2)) ** 2)
        )
        return twice_rounded(norm**2)

    def value_error(self, weights: Array, relation: None = None) -> Array:
        size = jnp.abs(weights)
        related = jnp.asarray(self.lam1) * jnp.sum(size * matmul(jnp.abs(jnp.asarray(self.omega)), size))
        return rounded(related, 4.0 + len(weights)) + rounded(self.value(weights), 8.0 + additions(weights.size))

    def curvatures(self, num_tasks: int, relation: None = None) -> tuple[Array, Array]:
        return jnp.max(jnp.sum(jnp.abs(self._precision(num_tasks)), axis=1)), 0.5 / jnp.asarray(self.lam2)

    def coupling(self, num_tasks: int, relation: None = None) -> Dense:
        a = self._precision(num_tasks)
        inverse = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), jnp.eye(num_tasks, dtype=a.dtype))
        return Dense(0.5 * (inverse + inverse.T))

    def _precision(self, num_tasks: int) -> Array:
        """The matrix A of R = tr(W' A W)/2."""
        omega, lam1, lam2 = jnp.asarray(self.omega), jnp.asarray(self.lam1), jnp.asarray(self.lam2)
        return 2.0 * (lam1 * omega + lam2 * jnp.eye(num_tasks, dtype=omega.dtype))

    def relationship(self, num_tasks: int, relation: None = None) -> Array:
        return jnp.asarray(self.omega)

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("Graph", lam1=self.lam1, lam2=self.lam2)
        if np.shape(self.omega) != (num_tasks, num_tasks):
            raise ValueError(
                f"Graph: omega is {np.shape(self.omega)} but the data has {num_tasks} tasks; it must be "
                f"[{num_tasks}, {num_tasks}]."
            )
