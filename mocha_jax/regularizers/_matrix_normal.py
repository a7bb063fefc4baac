r"""The matrix normal prior (13), with the logarithm of the determinant that (14) leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter, Pytree, static
from mocha_jax.coupling import LowRank, as_matrix
from mocha_jax.regularizers._base import Learned, OptimalityConditions, rounded
from mocha_jax.regularizers._singular_values import as_wide_as, coupling_of, is_low_rank, with_average_tasks
from mocha_jax.spectral import left_spectral_map, matrix_sqrt, safe_sqrt, singular_values, spectral_map


class MatrixNormal(Learned):
    r"""Tasks drawn from a Gaussian of unknown covariance $\Omega$, the prior (13) of the paper; not convex.

    $$
    R(W, \Omega) = \lambda\left(\tfrac{1}{\sigma^2}\|W\|_F^2 + \mathrm{tr}(W^\top\Omega^{-1}W) + d\log|\Omega|\right),
    \qquad \Omega \succeq \epsilon I
    $$

    The paper goes on to (14), which drops the last term for the constraint tr Omega = 1. What can be said of it:

    - **It needs the floor** $\epsilon$: at W = 0 and $\Omega = \epsilon I$ it is $\lambda\,md\log\epsilon$, which has
      no lower bound without one, whatever the data. With it that is the least that R can be.
    - **The update of Omega is in closed form**: for W with singular values s, Omega has its left singular vectors and
      eigenvalues $\max(s_i^2/d, \epsilon)$, that is $WW^\top/d$ raised to the floor. (The only stationary point of
      $s^2/\omega + d\log\omega$ is its minimum, and no other basis is better.)
    - **Alternation descends.** R is convex in W for a given Omega and in $\Omega^{-1}$ for a given W, not in both: it
      is (15) without its 1-norms and with $\Omega^{-1} \preceq I/\epsilon$. A solve ends where neither block alone can
      be improved; which of several such points it is depends on where it began (``Mocha(initial_omega=...)``).
    - **The certificate is for the Omega at hand.** There is no joint gap. A solve stops by the gap of the weights and
      what the last update of Omega gained.
    - Minimised over Omega a singular value costs $\lambda s^2/\epsilon$ up to $\sqrt{d\epsilon}$, and no more than
      $\lambda d\log s^2$ beyond, besides the ridge: few directions survive, and these are hardly shrunk.

    Args:
      lam: $\lambda > 0$.
      sigma2: $\sigma^2 > 0$; infinity drops the ridge.
      floor: $\epsilon > 0$, the least variance of any combination of tasks. Small: W has low rank, and W = 0 is a point
        where a solve may stay.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = MatrixNormal(lam=0.5, sigma2=jnp.inf, floor=0.125)
      >>> w = jnp.diag(jnp.array([2.0, 0.1]))
      >>> r.relationship(2, r.update_relation(None, w)).tolist()  # 2^2 / 2, and the floor
      [[2.0, 0.0], [0.0, 0.125]]

    References:
      - [Zhang and Yeung, A Convex Formulation for Learning Task Relationships](https://arxiv.org/abs/1203.3536), 2010.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    jointly_convex: ClassVar[bool] = False
    domains: ClassVar[Mapping[str, domains.Domain]] = {
        "lam": domains.POSITIVE,
        "sigma2": domains.POSITIVE_OR_INFINITE,
        "floor": domains.POSITIVE,
    }

    lam: Hyperparameter
    sigma2: Hyperparameter
    floor: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("MatrixNormal", lam=self.lam, sigma2=self.sigma2, floor=self.floor)

    def curvature_of(self, eigenvalues: Array) -> Array:
        r"""Eigenvalues of $\bar M$ from those of Omega."""
        return 0.5 / jnp.asarray(self.lam) * eigenvalues / (1.0 + eigenvalues / jnp.asarray(self.sigma2))

    def fit_eigenvalues(self, s: Array, num_features: int) -> Array:
        """Eigenvalues of the best Omega along the singular vectors of W."""
        return jnp.maximum(s**2 / num_features, jnp.asarray(self.floor))

    def value(self, weights: Array, relation: LowRank | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        return self.penalty(weights, relation) + self.offset(relation, weights.shape[1])

    def penalty(self, weights: Array, relation: LowRank | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        return coupling_of(self, relation).energy(weights)

    def offset(self, relation: LowRank, num_features: int) -> Array:
        return jnp.asarray(self.lam) * num_features * jnp.sum(jnp.log(_eigenvalues(relation)))

    def value_error(self, weights: Array, relation: LowRank | None = None) -> Array:
        relation = self.update_relation(None, weights) if relation is None else relation
        values, d = _eigenvalues(relation), weights.shape[1]
        # An eigenvalue is known to a few roundings of the largest, and its logarithm to as many of their ratio.
        logs = jnp.asarray(self.lam) * d * jnp.sum(jnp.abs(jnp.log(values)) + 4.0 * jnp.max(values) / values)
        return super().value_error(weights, relation) + rounded(logs, 16.0 + 4.0 * len(values) ** 0.5)

    def curvatures(self, num_tasks: int, relation: LowRank | None = None) -> tuple[Array, Array]:
        values = _eigenvalues(self.initial_relation(num_tasks, 1) if relation is None else relation)
        steep = 2.0 * jnp.asarray(self.lam) * (1.0 / jnp.min(values) + 1.0 / jnp.asarray(self.sigma2))
        return steep, self.curvature_of(jnp.max(values))

    def initial_relation(self, num_tasks: int, num_features: int) -> LowRank:
        base = jnp.maximum(jnp.asarray(self.floor), 1.0)
        return LowRank(base, jnp.zeros((num_tasks, min(num_tasks, num_features)), base.dtype))

    def update_relation(
        self, relation: LowRank | None, weights: Array, smoothing: Array | float = 0.0
    ) -> LowRank:  # no use for smoothing: the floor keeps every direction alive
        m, d = weights.shape
        apply = spectral_map if m >= d else left_spectral_map
        factor = apply(_factor_values, weights, _MatrixNormalFit(self, d))
        return LowRank(jnp.asarray(self.floor, weights.dtype), as_wide_as(relation, factor))

    def relation_of(self, omega: Array, num_features: int) -> LowRank:
        floor = jnp.asarray(self.floor, omega.dtype)
        above = 0.5 * (omega + omega.T) - floor * jnp.eye(len(omega), dtype=omega.dtype)
        return LowRank(floor, matrix_sqrt(above))

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        super().check_omega(owner, name, omega, num_tasks)
        a, floor = check.concrete(omega), check.concrete(self.floor)
        if a is not None and floor is not None and not (least := np.linalg.eigvalsh(a)[0]) >= 0.999 * floor:
            raise ValueError(
                f"{owner}: {name} must have no eigenvalue below the floor {floor:g} of MatrixNormal, got {least:.3g}."
            )

    def is_relation(self, relation: object, num_tasks: int, num_features: int) -> bool:
        return is_low_rank(relation, num_tasks, num_features)

    def restart_relation(self, relation: LowRank) -> LowRank:
        return LowRank(jnp.maximum(relation.base, jnp.asarray(self.floor, relation.base.dtype)), relation.factor)

    def extend_relation(self, relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
        return with_average_tasks(relation, num_tasks, num_features)

    def coupling(self, num_tasks: int, relation: LowRank | None = None) -> LowRank:
        return coupling_of(self, self.initial_relation(num_tasks, 1) if relation is None else relation)

    def relationship(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        return jnp.asarray(as_matrix(self.initial_relation(num_tasks, 1) if relation is None else relation))

    def covariance(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        return self.relationship(num_tasks, relation)

    def optimality(self, num_tasks: int, num_features: int) -> _Stationary:
        return _Stationary(self)


class _MatrixNormalFit(Pytree):
    """The arguments of functions of singular values besides these."""

    regularizer: MatrixNormal
    num_features: int = static()


def _factor_values(s: Array, fit: _MatrixNormalFit) -> Array:
    return safe_sqrt(fit.regularizer.fit_eigenvalues(s, fit.num_features) - jnp.asarray(fit.regularizer.floor))


def _slope_values(s: Array, fit: _MatrixNormalFit) -> Array:
    """The derivative of R minimised over Omega, along the singular vectors."""
    r = fit.regularizer
    stiffness = 1.0 / jnp.asarray(r.sigma2) + 1.0 / r.fit_eigenvalues(s, fit.num_features)
    return 2.0 * jnp.asarray(r.lam) * stiffness * s


def _eigenvalues(relation: LowRank) -> Array:
    """All eigenvalues of Omega ``[m]``."""
    along = singular_values(relation.factor) ** 2
    return relation.base + jnp.pad(along, (0, len(relation.factor) - len(along)))


class _Stationary(OptimalityConditions[Array]):
    """The condition that V is the derivative of R minimised over Omega; the unknown is W ``[num_tasks, d]``.

    Its derivative is symmetric and need not be definite.
    """

    regularizer: MatrixNormal

    def unknown(self, weights: Array, v: Array, relation: LowRank) -> Array:
        return weights

    def weights(self, unknown: Array) -> Array:
        return unknown

    def relation(self, unknown: Array) -> LowRank:
        return self.regularizer.update_relation(None, unknown)

    def residual(self, unknown: Array, v: Array) -> Array:
        return spectral_map(_slope_values, unknown, _MatrixNormalFit(self.regularizer, unknown.shape[1])) - v

    def stiffness(self, unknown: Array) -> Array:
        own = self.regularizer.coupling(len(unknown), self.relation(unknown)).diagonal()
        return jnp.broadcast_to(1.0 / own[:, None], unknown.shape)
