"""The sum of the features' norms: tasks that use the same few features."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._numerics.math import safe_ratio
from mocha_jax.spectral import safe_sqrt
from mocha_jax.coupling import PerFeature
from mocha_jax.regularizers._base import fenchel_young_bound
from mocha_jax.regularizers._sizes import SumOfSizes


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

    def coupling(self, num_tasks: int, relation: Array | None = None) -> PerFeature:
        relation = self.initial_relation(num_tasks, 1) if relation is None else relation
        return PerFeature(self.curvature_of(relation), num_tasks)

    def relationship(self, num_tasks: int, relation: Array | None = None) -> Array:
        return jnp.eye(num_tasks, dtype=jnp.result_type(self.lam))

    def covariance(self, num_tasks: int, relation: Array | None = None) -> Array:
        return self.relationship(num_tasks)

    def conjugate(self, v: Array) -> Array:
        return self.conjugate_of(_norms(v))

    def joint_bracket(self, v: Array, error: Array, weights: Array) -> Array:
        of_error = self.conjugate_bound(jnp.sqrt(jnp.sum(error**2)), *v.shape)
        return fenchel_young_bound(self.value(weights), self.conjugate(v), v, weights, error, of_error)

    def prox(self, y: Array, rho: Array) -> Array:
        norms = _norms(y)
        return y * safe_ratio(self.shrunk(norms, rho), norms)[None, :]


def _norms(w: Array) -> Array:
    """The norm of every column ``[d]``; of entries too small to be squared, too."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(w), axis=0))
    return largest * safe_sqrt(jnp.sum(safe_ratio(w, largest[None, :]) ** 2, axis=0))
