"""The trace norm and the norm of joint sparsity: sums of sizes, and of their squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.coupling import FeatureDiagonal, LowRank
from mocha_jax.regularizers._base import Learned
from mocha_jax.regularizers._singular_values import Spectral, with_average_tasks
from mocha_jax.spectral import safe_sqrt


class SumOfSizes(Learned):
    r"""$\lambda\sum_i s_i + \lambda_2\sum_i s_i^2$ of sizes $s \ge 0$ of W, such as its singular values.

    Every size has a scale $\omega$, learned: $\lambda s = \min_\omega \tfrac{\lambda}{2}(s^2/\omega + \omega)$,
    reached at $\omega = s$. A subclass says what the sizes are, and what maps them back to weights.
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam": domains.POSITIVE, "lam2": domains.POSITIVE}

    lam: Hyperparameter
    lam2: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar(type(self).__name__, lam=self.lam, lam2=self.lam2)

    @property
    def usual(self) -> Array:
        """The size at which both terms are equal."""
        return 0.5 * jnp.asarray(self.lam) / jnp.asarray(self.lam2)

    def curvature_of(self, scales: Array) -> Array:
        r"""Eigenvalues of $\bar M$ from the scales."""
        return scales / (jnp.asarray(self.lam) + 2.0 * jnp.asarray(self.lam2) * scales)

    def curvatures(self, num_tasks: int, relation: LowRank | Array | None = None) -> tuple[Array, Array]:
        return 1.0 / self.curvature_of(self.usual), 0.5 / jnp.asarray(self.lam2)

    def strong_convexity(self, num_tasks: int) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam2)) * (0.5 / jnp.asarray(self.lam2))

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        return self.curvature_of(self.usual)

    def value_of(self, sizes: Array) -> Array:
        """R minimised over the scales."""
        return jnp.asarray(self.lam) * jnp.sum(sizes) + jnp.asarray(self.lam2) * jnp.sum(sizes**2)

    def penalty_of(self, sizes: Array) -> Array:
        """R at the best scales, without the term that is theirs alone."""
        return 0.5 * jnp.asarray(self.lam) * jnp.sum(sizes) + jnp.asarray(self.lam2) * jnp.sum(sizes**2)

    def conjugate_of(self, sizes: Array) -> Array:
        """The conjugate, from the sizes of V."""
        return 0.25 * jnp.sum(jnp.maximum(sizes - jnp.asarray(self.lam), 0.0) ** 2) / jnp.asarray(self.lam2)

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # Also the R* of an error, which may add to what is above lam already: R* is 1/(2 lam2)-smooth.
        return 0.25 * norm**2 / jnp.asarray(self.lam2)

    def shrunk(self, sizes: Array, rho: Array) -> Array:
        """Sizes of the proximal step, from those of its argument."""
        return jnp.maximum(rho * sizes - jnp.asarray(self.lam), 0.0) / (rho + 2.0 * jnp.asarray(self.lam2))


class TraceNorm(SumOfSizes, Spectral):
    r"""Tasks that share few directions: the trace norm, which gives weights of low rank.

    $$
    R(W, \Omega) = \tfrac{\lambda}{2}\left(\mathrm{tr}(W^\top\Omega^{-1}W) + \mathrm{tr}\,\Omega\right)
    + \lambda_2\|W\|_F^2, \qquad \Omega \succeq 0
    $$

    Minimised over $\Omega = (WW^\top)^{1/2}$ it is $\lambda\|W\|_* + \lambda_2\|W\|_F^2$, the sum of W's singular
    values and a ridge. Its conjugate is $\sum_i(\varsigma_i - \lambda)_+^2/(4\lambda_2)$ with the singular values
    $\varsigma$ of V, and its proximal step takes a constant from every singular value. (14) is the *square* of the same
    norm: there scaling the data scales the weights and leaves their rank, here a direction that the data supports by
    less than $\lambda$ is left out.

    Args:
      lam: $\lambda > 0$. Large: W = 0, for all $\lambda \ge \varsigma_1$ of the data's gradient at W = 0.
      lam2: $\lambda_2 > 0$, the ridge. Without one there would be no finite dual value where a singular value of V is
        above $\lambda$, and so no certificate before the optimum; a small one costs rounds.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = TraceNorm(lam=0.5, lam2=0.25)
      >>> w = jnp.diag(jnp.array([3.0, 1.0]))
      >>> float(r.value(w))  # 0.5 * (3 + 1) + 0.25 * (3^2 + 1^2)
      4.5
      >>> r.relationship(2, r.update_relation(None, w)).round(4).tolist()
      [[3.0, 0.0], [0.0, 1.0]]

    References:
      Argyriou et al., Convex Multi-Task Feature Learning, 2008.
    """

    def initial_relation(self, num_tasks: int, num_features: int) -> LowRank:
        return LowRank(self.usual, jnp.zeros((num_tasks, min(num_tasks, num_features)), self.usual.dtype))

    def extend_relation(self, relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
        # A new task may differ from all others, as much as these do on average.
        old = len(relation.factor)
        own = relation.base + jnp.sum(relation.factor**2) / old
        grown = with_average_tasks(relation, num_tasks, num_features)
        return LowRank(grown.base + own * ((num_tasks - old) / num_tasks), grown.factor)

    def offset(self, relation: LowRank, num_features: int) -> Array:
        trace = len(relation.factor) * relation.base + jnp.sum(relation.factor**2)
        return 0.5 * jnp.asarray(self.lam) * trace

    def fit_eigenvalues(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        return safe_sqrt(s**2 + smoothing), safe_sqrt(smoothing)

    def spectral_value(self, s: Array) -> Array:
        return self.value_of(s)

    def spectral_penalty(self, s: Array) -> Array:
        return self.penalty_of(s)

    def spectral_conjugate(self, v: Array) -> Array:
        return self.conjugate_of(v)

    def spectral_prox(self, y: Array, rho: Array) -> Array:
        return self.shrunk(y, rho)


class JointSparse(SumOfSizes):
    r"""Tasks that use the same few features: the norm $\ell_{2,1}$ of the weights.

    $$
    R(W, g) = \tfrac{\lambda}{2}\sum_j\left(\|W_{\cdot j}\|^2/g_j + g_j\right) + \lambda_2\|W\|_F^2, \qquad g \ge 0
    $$

    Minimised over $g_j = \|W_{\cdot j}\|$ it is $\lambda\sum_j\|W_{\cdot j}\| + \lambda_2\|W\|_F^2$, where
    $W_{\cdot j}$ are the weights ``[m]`` of all tasks for feature j: a feature is in use by all of them or by none.
    What is learned are not relations of tasks but the scales g of features; Omega is the identity. Given g, no task
    depends on another.

    The conjugate is $\sum_j(\|V_{\cdot j}\| - \lambda)_+^2/(4\lambda_2)$, and the proximal step shortens every column.

    Args:
      lam: $\lambda > 0$. Large: no feature is used.
      lam2: $\lambda_2 > 0$, the ridge; without one there would be no finite dual value, see `TraceNorm`.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = JointSparse(lam=0.5, lam2=0.25)
      >>> w = jnp.array([[3.0, 0.0], [4.0, 0.0]])
      >>> float(r.value(w))  # 0.5 * 5 + 0.25 * 5^2
      8.75
      >>> r.update_relation(None, w).tolist()
      [5.0, 0.0]

    References:
      Argyriou et al., Convex Multi-Task Feature Learning, 2008.
    """

    def value(self, weights: Array, relation: Array | None = None) -> Array:
        if relation is None:
            return self.value_of(_norms(weights))
        return self.penalty(weights, relation) + self.offset(relation, weights.shape[1])

    def penalty(self, weights: Array, relation: Array | None = None) -> Array:
        if relation is None:
            return self.penalty_of(_norms(weights))
        return self.coupling(len(weights), relation).energy(weights)

    def offset(self, relation: Array, num_features: int) -> Array:
        return 0.5 * jnp.asarray(self.lam) * jnp.sum(relation)

    def initial_relation(self, num_tasks: int, num_features: int) -> Array:
        return jnp.full((num_features,), self.usual)

    def relation_of(self, omega: Array, num_features: int) -> Array:
        return self.initial_relation(len(omega), num_features)

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        raise ValueError(
            f"{owner}: {name} must be left out: JointSparse learns scales of features, and relates no task to another."
        )

    def update_relation(self, relation: Array | None, weights: Array, smoothing: Array | float = 0.0) -> Array:
        return safe_sqrt(_norms(weights) ** 2 + jnp.asarray(smoothing, weights.dtype))

    def extend_relation(self, relation: Array, num_tasks: int, num_features: int) -> Array:
        return relation

    def coupling(self, num_tasks: int, relation: Array | None = None) -> FeatureDiagonal:
        relation = self.initial_relation(num_tasks, 1) if relation is None else relation
        return FeatureDiagonal(self.curvature_of(relation), num_tasks)

    def relationship(self, num_tasks: int, relation: Array | None = None) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def covariance(self, num_tasks: int, relation: Array | None = None) -> Array:
        return self.relationship(num_tasks)

    def conjugate(self, v: Array) -> Array:
        return self.conjugate_of(_norms(v))

    def prox(self, y: Array, rho: Array) -> Array:
        norms = _norms(y)
        return y * safe_ratio(self.shrunk(norms, rho), norms)[None, :]


def _norms(w: Array) -> Array:
    """The norm of every column ``[d]``; of entries too small to be squared, too."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(w), axis=0))
    return largest * safe_sqrt(jnp.sum(safe_ratio(w, largest[None, :]) ** 2, axis=0))
