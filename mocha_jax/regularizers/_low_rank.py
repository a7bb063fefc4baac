"""The trace norm: tasks whose weights lie in a space of few dimensions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax.spectral import safe_sqrt
from mocha_jax.coupling import LowRank
from mocha_jax.regularizers._sizes import SumOfSizes
from mocha_jax.regularizers._spectral import Spectral, with_average_tasks


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
