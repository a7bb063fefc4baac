r"""The sparse precision model (15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.graphical_lasso import graphical_lasso
from mocha_jax._numerics.lasso import lasso
from mocha_jax._numerics.math import matmul
from mocha_jax._numerics.twofold import additions
from mocha_jax.coupling import Coupling, Dense
from mocha_jax.regularizers._base import Learned, OptimalityConditions, rounded


class Lasso(Coupling):
    r"""$R(W) = \tfrac12\mathrm{tr}(W^\top A W) + \lambda_1\|W\|_1$, whose $\nabla R^*$ is not linear.

    $R^*$ is as smooth as without the penalty, so sigma' of $\bar M = A^{-1}$ is safe here too.
    """

    inverse: Dense  # the operator without the penalty
    precision: Array  # [m, m] A
    lam1: Array  # []

    dense = True

    def apply(self, v: Array) -> Array:
        return lasso(self.precision, v, self.lam1, self.inverse.apply(v))

    def quadratic_majorizer(self) -> Dense:
        return self.inverse

    def diagonal(self) -> Array:
        return self.inverse.diagonal()

    def row_sums(self, nodes: Array) -> Array:
        return self.inverse.row_sums(nodes)

    def spectral_bound(self, nodes: Array) -> Array:
        return self.inverse.spectral_bound(nodes)

    def gradient(self, w: Array) -> Array:
        return matmul(self.precision, w) + self.lam1 * jnp.sign(w)

    def prox(self, y: Array, rho: Array) -> Array:
        stiff = self.precision + rho * jnp.eye(len(y), dtype=y.dtype)
        return lasso(stiff, rho * y, self.lam1, y)

    def conjugate(self, v: Array) -> Array:
        w = self.apply(v)
        return jnp.sum(v * w) - self.value(v, w)

    def value(self, v: Array, w: Array) -> Array:
        return 0.5 * jnp.sum(w * matmul(self.precision, w)) + self.lam1 * jnp.sum(jnp.abs(w))

    def slack_bound(self, v: Array, error: Array, w: Array) -> Array:
        """An upper bound on `slack` for all V within `error` of v that allows for rounding."""
        m, unit = len(v), 0.5 * jnp.finfo(v.dtype).eps
        r = v - matmul(self.precision, w)
        lost = error + unit * ((m + 8.0) * matmul(jnp.abs(self.precision), jnp.abs(w)) + 2.0 * jnp.abs(v) + jnp.abs(r))
        p = jnp.clip(r, -self.lam1, self.lam1)
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0) + (lost + 4.0 * unit * self.lam1) * jnp.abs(w)
        # What is off by at most its size plus the error, as the norm that the quadratic form is.
        norm = jnp.sqrt(self.inverse.conjugate_bound(r - p, self.precision))
        row = jnp.max(jnp.sum(jnp.abs(self.inverse.matrix), axis=1))
        return (norm + jnp.sqrt(row * jnp.sum(lost**2))) ** 2 + jnp.sum(penalty)

    def slack(self, v: Array, w: Array) -> Array:
        # With the nearest subgradient p of the penalty, R*(v) <= |v - p|^2 / 2 in the metric of M: two terms >= 0.
        r = v - matmul(self.precision, w)
        p = jnp.clip(r, -self.lam1, self.lam1)
        off = r - p
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0)
        return jnp.maximum(0.5 * jnp.sum(off * matmul(self.inverse.matrix, off)), 0.0) + jnp.sum(penalty)


class SparsePrecision(Learned):
    r"""Tasks related by a sparse precision matrix $\Omega$, eq. (15), with sparse weights.

    $$
    R(W, \Omega) = \lambda\left(\tfrac{1}{\sigma^2}\|W\|_F^2 + \mathrm{tr}(W^\top\Omega W)
    - d\log|\Omega|\right) + \lambda_1\|W\|_1 + \lambda_2\|\Omega\|_1
    $$

    $\Omega_{tt'} = 0$ says that two tasks are unrelated given all others. The best Omega for given
    weights is the graphical lasso of $WW^\top/d$ with penalty $\lambda_2/(\lambda d)$ on all
    entries, W is ``[m, d]``; the weights for given V are d lasso problems. Not convex in both at once: a
    solve ends where neither block alone can be improved.

    Args:
      lam: $\lambda > 0$.
      sigma2: $\sigma^2 > 0$; infinity drops the ridge.
      lam1: $\lambda_1 \ge 0$, sparsity of the weights; 0 makes them linear in V.
      lam2: $\lambda_2 > 0$, sparsity of Omega. At 0 the update would have no solution where tasks outnumber
        features, or before any weight differs from 0. Large: Omega is diagonal, tasks are independent.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = SparsePrecision(lam=1.0, sigma2=1.0, lam1=0.0, lam2=1.0)
      >>> relation = r.update_relation(None, jnp.array([[1.0, 1.0], [1.0, 1.0]]))
      >>> bool(jnp.allclose(relation, jnp.array([[0.75, -0.25], [-0.25, 0.75]]), atol=1e-4))
      True

    References:
      - Gonçalves et al., Multi-Task Sparse Structure Learning with Gaussian Copula Models, 2016.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    jointly_convex: ClassVar[bool] = False
    domains: ClassVar[Mapping[str, domains.Domain]] = {
        "lam": domains.POSITIVE,
        "sigma2": domains.POSITIVE_OR_INFINITE,
        "lam1": domains.NONNEGATIVE,
        "lam2": domains.POSITIVE,
    }

    lam: Hyperparameter
    sigma2: Hyperparameter
    lam1: Hyperparameter
    lam2: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("SparsePrecision", lam=self.lam, sigma2=self.sigma2, lam1=self.lam1, lam2=self.lam2)

    def value(self, weights: Array, relation: Array | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        return self.penalty(weights, relation) + self.offset(relation, weights.shape[1])

    def penalty(self, weights: Array, relation: Array | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        lam, sigma2, lam1 = jnp.asarray(self.lam), jnp.asarray(self.sigma2), jnp.asarray(self.lam1)
        quadratic = jnp.sum(weights**2) / sigma2 + jnp.sum(weights * matmul(relation, weights))
        return lam * quadratic + lam1 * jnp.sum(jnp.abs(weights))

    def value_error(self, weights: Array, relation: Array | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        m, d = weights.shape
        lam, sigma2, lam1, lam2 = (jnp.asarray(a) for a in (self.lam, self.sigma2, self.lam1, self.lam2))
        size = jnp.abs(weights)
        related = lam * (jnp.sum(size**2) / sigma2 + jnp.sum(size * matmul(jnp.abs(relation), size)))
        # A backward stable factorisation changes the logarithm of the determinant by that of a nearby matrix.
        inverse = jnp.abs(_inverse(relation))
        logs = jnp.sum(jnp.abs(jnp.log(jnp.diagonal(jnp.linalg.cholesky(relation))))) + m * jnp.sum(
            inverse * jnp.abs(relation)
        )
        parts = related + lam1 * jnp.sum(size) + lam2 * jnp.sum(jnp.abs(relation)) + 2.0 * lam * d * logs
        return rounded(parts, 16.0 + m + 2.0 * additions(weights.size))

    def curvatures(self, num_tasks: int, relation: Array | None = None) -> tuple[Array, Array]:
        coupling = self.coupling(num_tasks, relation)
        steep, flat = (jnp.max(jnp.sum(jnp.abs(a), axis=1)) for a in (coupling.precision, coupling.inverse.matrix))
        return steep, flat

    def offset(self, relation: Array, num_features: int) -> Array:
        log_determinant = 2.0 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(relation))))
        size = jnp.sum(jnp.abs(relation))
        return jnp.asarray(self.lam2) * size - jnp.asarray(self.lam) * num_features * log_determinant

    def bracket(self, v: Array, error: Array, weights: Array, relation: Array | None = None) -> Array:
        coupling = self.coupling(len(v), relation)
        return coupling.slack_bound(v, error, weights)

    def initial_relation(self, num_tasks: int, num_features: int) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def relation_of(self, omega: Array, num_features: int) -> Array:
        return 0.5 * (omega + omega.T)

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        super().check_omega(owner, name, omega, num_tasks)
        check.positive_definite(owner, name, omega)

    def update_relation(self, relation: Array | None, weights: Array, smoothing: Array | float = 0.0) -> Array:
        m, d = weights.shape
        penalty = jnp.asarray(self.lam2) / (jnp.asarray(self.lam) * d)
        omega = graphical_lasso(matmul(weights, weights.T) / d, penalty, start=relation).precision
        # Of one that is nearly singular rounding would make one that is not positive definite.
        return jnp.where(jnp.eye(m, dtype=bool), (1.0 + m * jnp.finfo(omega.dtype).eps) * omega, omega)

    def extend_relation(self, relation: Array, num_tasks: int, num_features: int) -> Array:
        # Among precisions, unrelated is the neutral choice: it keeps the matrix positive definite.
        new = num_tasks - len(relation)
        return jsl.block_diag(relation, jnp.mean(jnp.diagonal(relation)) * jnp.eye(new, dtype=relation.dtype))

    def coupling(self, num_tasks: int, relation: Array | None = None) -> Lasso:
        relation = self.initial_relation(num_tasks, 1) if relation is None else relation
        eye = jnp.eye(num_tasks, dtype=relation.dtype)
        a = 2.0 * jnp.asarray(self.lam) * (relation + eye / jnp.asarray(self.sigma2))
        inverse = jsl.cho_solve(jsl.cho_factor(a), eye)
        return Lasso(Dense(0.5 * (inverse + inverse.T)), a, jnp.asarray(self.lam1, a.dtype))

    def relationship(self, num_tasks: int, relation: Array | None = None) -> Array:
        return self.initial_relation(num_tasks, 1) if relation is None else relation

    def covariance(self, num_tasks: int, relation: Array | None = None) -> Array:
        return _inverse(self.relationship(num_tasks, relation))

    def optimality(self, num_tasks: int, num_features: int) -> _BothBlocks:
        return _BothBlocks(self)


class _BothBlocks(OptimalityConditions[tuple[Array, Array]]):
    """The conditions for W and Omega, each given the other, where they differ from 0; see `OptimalityConditions`.

    The derivative is symmetric, for both are derivatives of one function; not definite, for it is not convex.
    """

    regularizer: SparsePrecision

    def unknown(self, weights: Array, v: Array, relation: Array) -> tuple[Array, Array]:
        # Each as the best for the other, so that what is 0 there is 0 here.
        r = self.regularizer
        relation = r.update_relation(relation, weights)
        return r.coupling(len(weights), relation).apply(v), relation

    def weights(self, unknown: tuple[Array, Array]) -> Array:
        return jnp.where(self._free(unknown)[0], unknown[0], 0.0)

    def relation(self, unknown: tuple[Array, Array]) -> Array:
        relation = jnp.where(self._free(unknown)[1], unknown[1], 0.0)
        return 0.5 * (relation + relation.T)

    def residual(self, unknown: tuple[Array, Array], v: Array) -> tuple[Array, Array]:
        r, w, relation = self.regularizer, self.weights(unknown), self.relation(unknown)
        lam, sigma2, lam1, lam2 = (jnp.asarray(a) for a in (r.lam, r.sigma2, r.lam1, r.lam2))
        of_w = 2.0 * lam * (matmul(relation, w) + w / sigma2) + lam1 * jnp.sign(w) - v
        of_omega = lam * (matmul(w, w.T) - w.shape[1] * _inverse(relation)) + lam2 * jnp.sign(relation)
        of_omega = 0.5 * (of_omega + of_omega.T)  # nothing that no symmetric Omega could mend
        free = self._free(unknown)
        return jnp.where(free[0], of_w, 0.0), jnp.where(free[1], of_omega, 0.0)

    def stiffness(self, unknown: tuple[Array, Array]) -> tuple[Array, Array]:
        w, relation = unknown
        lam, sigma2 = jnp.asarray(self.regularizer.lam), jnp.asarray(self.regularizer.sigma2)
        of_w = 2.0 * lam * (jnp.diagonal(relation) + 1.0 / sigma2)
        variance = jnp.diagonal(_inverse(relation))
        return jnp.broadcast_to(of_w[:, None], w.shape), lam * w.shape[1] * variance[:, None] * variance[None, :]

    def _free(self, unknown: tuple[Array, Array]) -> tuple[Array, Array]:
        """Mark the entries that a small change of the hyperparameters changes."""
        w, relation = unknown
        return (w != 0) | (jnp.asarray(self.regularizer.lam1) == 0), relation != 0


def _inverse(positive: Array) -> Array:
    return jsl.cho_solve(jsl.cho_factor(positive), jnp.eye(len(positive), dtype=positive.dtype))
