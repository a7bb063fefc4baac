r"""The sparse precision model (15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array

from mocha_jax import _check, _domains
from mocha_jax._graphical_lasso import graphical_lasso
from mocha_jax._lasso import Lasso
from mocha_jax._math import matmul
from mocha_jax._pytree import Hyperparameter
from mocha_jax._stationary import Stationary
from mocha_jax._twofold import additions
from mocha_jax.regularizers._base import Regularizer, rounded


class SparsePrecision(Regularizer):
    r"""Tasks related by a sparse precision matrix :math:`\Omega`, eq. (15), with sparse weights.

    .. math:: R(W, \Omega) = \lambda\left(\tfrac{1}{\sigma^2}\|W\|_F^2 + \mathrm{tr}(W^\top\Omega W)
       - d\log|\Omega|\right) + \lambda_1\|W\|_1 + \lambda_2\|\Omega\|_1

    :math:`\Omega_{tt'} = 0` says that two tasks are unrelated given all others. The best Omega for given
    weights is the graphical lasso of :math:`WW^\top/d` with penalty :math:`\lambda_2/(\lambda d)` on all
    entries, W is ``[m, d]``; the weights for given V are d lasso problems. Not convex in both at once: a
    solve ends where neither block alone can be improved.

    Args:
      lam: :math:`\lambda > 0`.
      sigma2: :math:`\sigma^2 > 0`; infinity drops the ridge.
      lam1: :math:`\lambda_1 \ge 0`, sparsity of the weights; 0 makes them linear in V.
      lam2: :math:`\lambda_2 > 0`, sparsity of Omega. At 0 the update would have no solution where tasks outnumber
        features, or before any weight differs from 0. Large: Omega is diagonal, tasks are independent.

    >>> import jax.numpy as jnp
    >>> r = SparsePrecision(lam=1.0, sigma2=1.0, lam1=0.0, lam2=1.0)
    >>> omega = r.update_omega(None, jnp.array([[1.0, 1.0], [1.0, 1.0]]))
    >>> bool(jnp.allclose(omega, jnp.array([[0.75, -0.25], [-0.25, 0.75]])))
    True
    """

    learned: ClassVar[bool] = True
    jointly_convex: ClassVar[bool] = False
    domains: ClassVar[Mapping[str, _domains.Domain]] = {
        "lam": _domains.POSITIVE,
        "sigma2": _domains.POSITIVE_OR_INFINITE,
        "lam1": _domains.NONNEGATIVE,
        "lam2": _domains.POSITIVE,
    }

    lam: Hyperparameter
    sigma2: Hyperparameter
    lam1: Hyperparameter
    lam2: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("SparsePrecision", lam=self.lam, sigma2=self.sigma2, lam1=self.lam1, lam2=self.lam2)

    def value(self, weights: Array, omega: Array | None = None) -> Array:
        if omega is None:
            omega = self.update_omega(None, weights)
        return self.penalty(weights, omega) + self.offset(omega, weights.shape[1])

    def penalty(self, weights: Array, omega: Any = None) -> Array:
        lam, sigma2, lam1 = jnp.asarray(self.lam), jnp.asarray(self.sigma2), jnp.asarray(self.lam1)
        quadratic = jnp.sum(weights**2) / sigma2 + jnp.sum(weights * matmul(omega, weights))
        return lam * quadratic + lam1 * jnp.sum(jnp.abs(weights))

    def value_error(self, weights: Array, omega: Array | None = None) -> Array:
        omega = self.update_omega(None, weights) if omega is None else omega
        m, d = weights.shape
        lam, sigma2, lam1, lam2 = (jnp.asarray(a) for a in (self.lam, self.sigma2, self.lam1, self.lam2))
        size = jnp.abs(weights)
        related = lam * (jnp.sum(size**2) / sigma2 + jnp.sum(size * matmul(jnp.abs(omega), size)))
        # A backward stable factorisation changes the logarithm of the determinant by that of a nearby matrix.
        inverse = jnp.abs(_inverse(omega))
        logs = jnp.sum(jnp.abs(jnp.log(jnp.diagonal(jnp.linalg.cholesky(omega))))) + m * jnp.sum(
            inverse * jnp.abs(omega)
        )
        parts = related + lam1 * jnp.sum(size) + lam2 * jnp.sum(jnp.abs(omega)) + 2.0 * lam * d * logs
        return rounded(parts, 16.0 + m + 2.0 * additions(weights.size))

    def curvatures(self, num_tasks: int, omega: Array | None = None) -> tuple[Array, Array]:
        coupling = self.coupling(num_tasks, omega)
        steep, flat = (jnp.max(jnp.sum(jnp.abs(a), axis=1)) for a in (coupling.precision, coupling.matrix))
        return steep, flat

    def offset(self, omega: Array, num_features: int) -> Array:
        log_determinant = 2.0 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(omega))))
        size = jnp.sum(jnp.abs(omega))
        return jnp.asarray(self.lam2) * size - jnp.asarray(self.lam) * num_features * log_determinant

    def bracket(self, v: Array, error: Array, weights: Array, omega: Array | None = None) -> Array:
        coupling = self.coupling(len(v), omega)
        return coupling.slack_bound(v, error, weights)

    def initial_omega(self, num_tasks: int, num_features: int) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def update_omega(self, omega: Array | None, weights: Array, smoothing: Array | float = 0.0) -> Array:
        d = weights.shape[1]
        penalty = jnp.asarray(self.lam2) / (jnp.asarray(self.lam) * d)
        return graphical_lasso(matmul(weights, weights.T) / d, penalty, start=omega).precision

    def extend_omega(self, omega: Array, num_tasks: int, num_features: int) -> Array:
        # Among precisions, unrelated is the neutral choice: it keeps the matrix positive definite.
        new = num_tasks - len(omega)
        return jsl.block_diag(omega, jnp.mean(jnp.diagonal(omega)) * jnp.eye(new, dtype=omega.dtype))

    def coupling(self, num_tasks: int, omega: Array | None = None) -> Lasso:
        omega = self.initial_omega(num_tasks, 1) if omega is None else omega
        eye = jnp.eye(num_tasks, dtype=omega.dtype)
        a = 2.0 * jnp.asarray(self.lam) * (omega + eye / jnp.asarray(self.sigma2))
        inverse = jsl.cho_solve(jsl.cho_factor(a), eye)
        return Lasso(0.5 * (inverse + inverse.T), a, jnp.asarray(self.lam1, a.dtype))

    def relationship(self, num_tasks: int, omega: Any = None) -> Array:
        return self.initial_omega(num_tasks, 1) if omega is None else omega

    def covariance(self, num_tasks: int, omega: Any = None) -> Array:
        return _inverse(self.relationship(num_tasks, omega))

    def stationary(self, num_tasks: int, num_features: int) -> _BothBlocks:
        return _BothBlocks(self)


class _BothBlocks(Stationary):
    """The conditions for W and Omega, each given the other, where they differ from 0; see `Stationary`.

    The derivative is symmetric, for both are derivatives of one function; not definite, for it is not convex.
    """

    regularizer: Any

    def unknown(self, weights: Array, v: Array, omega: Array) -> tuple[Array, Array]:
        # Each as the best for the other, so that what is 0 there is 0 here.
        r = self.regularizer
        omega = r.update_omega(omega, weights)
        return r.coupling(len(weights), omega).apply(v), omega

    def weights(self, unknown: tuple[Array, Array]) -> Array:
        return jnp.where(self._free(unknown)[0], unknown[0], 0.0)

    def omega(self, unknown: tuple[Array, Array]) -> Array:
        omega = jnp.where(self._free(unknown)[1], unknown[1], 0.0)
        return 0.5 * (omega + omega.T)

    def residual(self, unknown: tuple[Array, Array], v: Array) -> tuple[Array, Array]:
        r, w, omega = self.regularizer, self.weights(unknown), self.omega(unknown)
        lam, sigma2, lam1, lam2 = (jnp.asarray(a) for a in (r.lam, r.sigma2, r.lam1, r.lam2))
        of_w = 2.0 * lam * (matmul(omega, w) + w / sigma2) + lam1 * jnp.sign(w) - v
        of_omega = lam * (matmul(w, w.T) - w.shape[1] * _inverse(omega)) + lam2 * jnp.sign(omega)
        of_omega = 0.5 * (of_omega + of_omega.T)  # nothing that no symmetric Omega could mend
        free = self._free(unknown)
        return jnp.where(free[0], of_w, 0.0), jnp.where(free[1], of_omega, 0.0)

    def stiffness(self, unknown: tuple[Array, Array]) -> tuple[Array, Array]:
        w, omega = unknown
        lam, sigma2 = jnp.asarray(self.regularizer.lam), jnp.asarray(self.regularizer.sigma2)
        of_w = 2.0 * lam * (jnp.diagonal(omega) + 1.0 / sigma2)
        variance = jnp.diagonal(_inverse(omega))
        return jnp.broadcast_to(of_w[:, None], w.shape), lam * w.shape[1] * variance[:, None] * variance[None, :]

    def _free(self, unknown: tuple[Array, Array]) -> tuple[Array, Array]:
        """Where a small change of the hyperparameters changes the entry."""
        w, omega = unknown
        return (w != 0) | (jnp.asarray(self.regularizer.lam1) == 0), omega != 0


def _inverse(positive: Array) -> Array:
    return jsl.cho_solve(jsl.cho_factor(positive), jnp.eye(len(positive), dtype=positive.dtype))
