"""The probabilistic model (14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.coupling import LowRank
from mocha_jax.regularizers._singular_values import TraceLimited
from mocha_jax.spectral import safe_sqrt


class Probabilistic(TraceLimited):
    r"""Tasks drawn from a Gaussian of unknown covariance $\Omega$, eq. (14); positive and negative relations.

    $$
    R(W, \Omega) = \lambda\left(\tfrac{1}{\sigma^2}\|W\|_F^2 + \mathrm{tr}(W^\top\Omega^{-1}W)\right),
    \qquad \Omega \succeq 0,\; \mathrm{tr}\,\Omega = 1
    $$

    Minimised over $\Omega = (WW^\top)^{1/2}/\mathrm{tr}$ it is
    $\lambda(\|W\|_F^2/\sigma^2 + \|W\|_*^2)$, the squared nuclear norm (W is ``[m, d]``).

    Args:
      lam: $\lambda > 0$. Large: all weights go to 0. The $\tfrac{\lambda'}{2}$ of code that minimises
        $\tfrac{\lambda'}{2}\mathrm{tr}(W^\top\Omega^{-1}W)$ is ``lam = lambda' / 2``, ``sigma2 = inf``.
      sigma2: $\sigma^2 > 0$; infinity drops the ridge, and tiny leaves nothing but a ridge
        $\lambda/\sigma^2$: independent tasks. Tune it along with $\lambda$: with the default, which leaves
        independent tasks out, tasks that have nothing in common do worse than each on its own.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = Probabilistic(lam=0.5, sigma2=jnp.inf)
      >>> w = jnp.diag(jnp.array([3.0, 1.0]))
      >>> float(r.value(w))  # 0.5 * (3 + 1)^2
      8.0
      >>> bool(jnp.allclose(r.relationship(2, r.update_relation(None, w)), w / 4))
      True

    References:
      - [Zhang and Yeung, A Convex Formulation for Learning Task Relationships](https://arxiv.org/abs/1203.3536), 2010.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {
        "lam": domains.POSITIVE,
        "sigma2": domains.POSITIVE_OR_INFINITE,
    }

    prox_by_sums: ClassVar[bool] = True

    lam: Hyperparameter
    sigma2: Hyperparameter = jnp.inf

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("Probabilistic", lam=self.lam, sigma2=self.sigma2)

    def curvatures(self, num_tasks: int, relation: LowRank | None = None) -> tuple[Array, Array]:
        lam, sigma2 = jnp.asarray(self.lam), jnp.asarray(self.sigma2)
        return 2.0 * lam * (num_tasks + 1.0 / sigma2), self.curvature_of(jnp.ones_like(lam))

    def strong_convexity(self, num_tasks: int) -> Array | None:
        ridge = np.asarray(self._ridge)  # the rest is convex, and flat in some directions
        return jnp.eye(num_tasks, dtype=ridge.dtype) / ridge if ridge > 0 else None

    def covariance(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        return self.relationship(num_tasks, relation)

    @property
    def _ridge(self) -> Array:
        return 2.0 * jnp.asarray(self.lam) / jnp.asarray(self.sigma2)

    def trace(self) -> Array:
        return jnp.ones_like(jnp.asarray(self.lam))

    def fit_eigenvalues(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        # Minimises tr((W'W + smoothing I) inv(Omega)): an Omega of full rank, which can grow into directions W lacks.
        roots, least = safe_sqrt(s**2 + smoothing), safe_sqrt(smoothing)
        trace = jnp.sum(roots) + (num_tasks - len(s)) * least
        return jnp.where(trace > 0, safe_ratio(roots, trace), 1.0 / num_tasks), jnp.where(
            trace > 0, safe_ratio(least, trace), 1.0 / num_tasks
        )

    def curvature_of(self, eigenvalues: Array) -> Array:
        lam, sigma2 = jnp.asarray(self.lam), jnp.asarray(self.sigma2)
        return 0.5 / lam * eigenvalues / (1.0 + eigenvalues / sigma2)  # never an inverse of Omega

    def spectral_value(self, s: Array) -> Array:
        return 0.5 * self._ridge * jnp.sum(s**2) + jnp.asarray(self.lam) * jnp.sum(s) ** 2

    def spectral_conjugate(self, v: Array) -> Array:
        # max over s >= 0 of v's - ridge |s|^2 / 2 - lam (sum s)^2; s_i = max(v_i - 2 lam T, 0) / ridge, T = sum s.
        lam = jnp.asarray(self.lam)
        total = self._trace_norm(v, self._ridge)
        excess = jnp.maximum(v - 2.0 * lam * total, 0.0)
        return lam * total**2 + 0.5 * safe_ratio(jnp.sum(excess**2), self._ridge)

    def spectral_prox(self, y: Array, rho: Array) -> Array:
        stiffness = rho + self._ridge
        return self._shrunk(rho * y, stiffness, self._trace_norm(rho * y, stiffness))

    def spectral_prox_by_sums(self, y: Array, rho: Array) -> Array:
        stiffness = rho + self._ridge
        return self._shrunk(rho * y, stiffness, self._trace_norm_by_sums(rho * y, stiffness))

    def _shrunk(self, v: Array, stiffness: Array, total: Array) -> Array:
        return jnp.maximum(v - 2.0 * jnp.asarray(self.lam) * total, 0.0) / stiffness

    def _trace_norm(self, v: Array, stiffness: Array) -> Array:
        """T with sum_i max(v_i - 2 lam T, 0) = stiffness T: the largest of its values for the k largest v alone."""
        k = jnp.arange(1, len(v) + 1, dtype=v.dtype)
        return jnp.max(jnp.cumsum(v) / (stiffness + 2.0 * jnp.asarray(self.lam) * k))

    def _trace_norm_by_sums(self, v: Array, stiffness: Array) -> Array:
        """T by Newton's method, which rises to it from 0: the sum is convex in T, and linear between two of the v."""
        slope = 2.0 * jnp.asarray(self.lam)

        def step(slopes: tuple[Array, Array]) -> tuple[Array, Array]:
            above = v > slope * slopes[0]
            count = jnp.sum(jnp.where(above, jnp.ones_like(v), 0.0))
            return jnp.sum(jnp.where(above, v, 0.0)) / (stiffness + slope * count), slopes[0]

        return lax.while_loop(lambda slopes: slopes[0] > slopes[1], step, (0.0 * stiffness, -stiffness))[0]
