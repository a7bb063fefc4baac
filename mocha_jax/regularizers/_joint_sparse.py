"""The sum of the features' norms: tasks that use the same few features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.coupling import PerFeature
from mocha_jax.regularizers._base import Regularizer, fenchel_young_bound
from mocha_jax.spectral import safe_sqrt


class JointSparse(Regularizer):
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
    """

    learned: ClassVar[bool] = True
    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam": domains.POSITIVE, "lam2": domains.POSITIVE}

    lam: Hyperparameter
    lam2: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("JointSparse", lam=self.lam, lam2=self.lam2)

    @property
    def _usual(self) -> Array:
        """The norm of a feature's weights at which both terms of R are of one size."""
        return 0.5 * jnp.asarray(self.lam) / jnp.asarray(self.lam2)

    def value(self, weights: Array, relation: Array | None = None) -> Array:
        if relation is None:
            return jnp.asarray(self.lam) * jnp.sum(_norms(weights)) + jnp.asarray(self.lam2) * jnp.sum(weights**2)
        return self.penalty(weights, relation) + self.offset(relation, weights.shape[1])

    def penalty(self, weights: Array, relation: Array | None = None) -> Array:
        if relation is None:
            return 0.5 * jnp.asarray(self.lam) * jnp.sum(_norms(weights)) + jnp.asarray(self.lam2) * jnp.sum(weights**2)
        return self.coupling(len(weights), relation).energy(weights)

    def offset(self, relation: Array, num_features: int) -> Array:
        return 0.5 * jnp.asarray(self.lam) * jnp.sum(relation)

    def curvatures(self, num_tasks: int, relation: Array | None = None) -> tuple[Array, Array]:
        return 1.0 / self._curvature_of(self._usual), 0.5 / jnp.asarray(self.lam2)

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        return self._curvature_of(self._usual)

    def _curvature_of(self, scales: Array) -> Array:
        return scales / (jnp.asarray(self.lam) + 2.0 * jnp.asarray(self.lam2) * scales)

    def initial_relation(self, num_tasks: int, num_features: int) -> Array:
        return jnp.full((num_features,), self._usual)

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

    def coupling(self, num_tasks: int, relation: Array | None = None) -> PerFeature:
        relation = self.initial_relation(num_tasks, 1) if relation is None else relation
        return PerFeature(self._curvature_of(relation), num_tasks)

    def relationship(self, num_tasks: int, relation: Array | None = None) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def covariance(self, num_tasks: int, relation: Array | None = None) -> Array:
        return self.relationship(num_tasks)

    def conjugate(self, v: Array) -> Array:
        above = jnp.maximum(_norms(v) - jnp.asarray(self.lam), 0.0)
        return 0.25 * jnp.sum(above**2) / jnp.asarray(self.lam2)

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # Also the R* of an error, which may add to what is above lam already: R* is 1/(2 lam2)-smooth.
        return 0.25 * norm**2 / jnp.asarray(self.lam2)

    def joint_bracket(self, v: Array, error: Array, weights: Array) -> Array:
        of_error = self.conjugate_bound(jnp.sqrt(jnp.sum(error**2)), *v.shape)
        return fenchel_young_bound(self.value(weights), self.conjugate(v), v, weights, error, of_error)

    def prox(self, y: Array, rho: Array) -> Array:
        norms = _norms(y)
        shorter = jnp.maximum(rho * norms - jnp.asarray(self.lam), 0.0) / (rho + 2.0 * jnp.asarray(self.lam2))
        return y * safe_ratio(shorter, norms)[None, :]


def _norms(w: Array) -> Array:
    """The norm of every column ``[d]``; of entries too small to be squared, too."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(w), axis=0))
    return largest * safe_sqrt(jnp.sum(safe_ratio(w, largest[None, :]) ** 2, axis=0))
