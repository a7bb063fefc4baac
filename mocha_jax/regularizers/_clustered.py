"""The clustered model (12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.coupling import LowRank
from mocha_jax.regularizers._singular_values import TraceLimited, mixed_with_identity
from mocha_jax.spectral import singular_values, water_fill


class Clustered(TraceLimited):
    r"""Tasks in k clusters, relaxed to a convex set, eq. (12).

    $$
    R(W, \Omega) = \lambda\,\mathrm{tr}(W^\top(\eta I + \Omega)^{-1}W), \qquad
    0 \preceq \Omega \preceq I,\; \mathrm{tr}\,\Omega = k
    $$

    Minimised over $\Omega$ it is $\lambda\sum_i s_i^2/(\eta + \omega_i)$ with the singular
    values s of W and $\omega_i = \mathrm{clip}(c s_i - \eta, 0, 1)$, $\sum_i\omega_i = k$.

    Args:
      lam: $\lambda > 0$.
      eta: $\eta > 0$, how far tasks may leave the k shared directions. Large: independent tasks with ridge
        $\lambda/\eta$. Tiny: W of rank about k.
      k: number of clusters, in (0, number of tasks]; need not be whole. With k = m every eigenvalue is 1:
        independent tasks with ridge $\lambda/(1+\eta)$.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = Clustered(lam=1.0, eta=0.5, k=1)
      >>> w = jnp.diag(jnp.array([4.0, 0.1]))
      >>> r.relationship(2, r.update_relation(None, w)).round(3).tolist()
      [[1.0, 0.0], [0.0, 0.0]]

    References:
      - [Jacob et al., Clustered Multi-Task Learning](https://arxiv.org/abs/0809.2085), 2009.
      - Zhou et al., Clustered Multi-Task Learning via Alternating Structure Optimization, 2011.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    frozen_fields: ClassVar[tuple[str, ...]] = ("k",)
    domains: ClassVar[Mapping[str, domains.Domain]] = {
        "lam": domains.POSITIVE,
        "eta": domains.POSITIVE,
        "k": domains.POSITIVE,
    }

    lam: Hyperparameter
    eta: Hyperparameter
    k: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("Clustered", lam=self.lam, eta=self.eta, k=self.k)
        if (k := check.concrete(self.k)) is not None and k > num_tasks:
            raise ValueError(
                f"Clustered: k = {k:g} clusters need at least as many tasks, but the data has {num_tasks}."
            )

    def fits(self, num_tasks: int) -> Array:
        return jnp.asarray(self.k) <= num_tasks

    def curvatures(self, num_tasks: int, relation: LowRank | None = None) -> tuple[Array, Array]:
        zero = jnp.zeros((), self.trace().dtype)
        return 1.0 / self.curvature_of(zero), self.curvature_of(zero + 1.0)

    def covariance(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        omega = self.relationship(num_tasks, relation)
        return omega + jnp.asarray(self.eta) * jnp.eye(num_tasks, dtype=omega.dtype)

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        super().check_omega(owner, name, omega, num_tasks)
        if (a := check.concrete(omega)) is not None and (largest := np.linalg.eigvalsh(a)[-1]) > 1.0 + 1e-3:
            raise ValueError(
                f"{owner}: {name} must have no eigenvalue above 1, as Clustered asks, got {largest:.3g}; mix in some "
                f"of the identity."
            )

    def restart_relation(self, relation: LowRank) -> LowRank:
        # Put the trace right, then mix in as much of the identity as brings the largest eigenvalue down to 1.
        relation = self._rescaled(relation)
        mean = jnp.asarray(self.trace()) / len(relation.factor)
        largest = relation.base + jnp.max(singular_values(relation.factor)) ** 2
        share = jnp.clip(safe_ratio(largest - 1.0, largest - mean), 0.0, 1.0)
        return mixed_with_identity(relation, share, self.trace())

    def extend_relation(self, relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
        return self.restart_relation(super().extend_relation(relation, num_tasks, num_features))

    def trace(self) -> Array:
        return jnp.asarray(self.k, jnp.result_type(self.lam))

    def fit_eigenvalues(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        # No use for smoothing: eta keeps every direction alive.
        values = water_fill(s, jnp.asarray(self.eta), self.trace())
        positive = values > 0
        others = num_tasks - jnp.sum(positive, dtype=s.dtype)
        rest = jnp.maximum(safe_ratio(self.trace() - jnp.sum(values), others), 0.0)
        return jnp.where(positive, values, rest), rest

    def curvature_of(self, eigenvalues: Array) -> Array:
        return 0.5 * (jnp.asarray(self.eta) + eigenvalues) / jnp.asarray(self.lam)

    def spectral_value(self, s: Array) -> Array:
        s = jnp.where(s > jnp.finfo(s.dtype).eps * jnp.max(s, initial=0.0), s, 0.0)  # what is noise gets no Omega
        filled = water_fill(s, jnp.asarray(self.eta), self.trace())
        return jnp.asarray(self.lam) * jnp.sum(s**2 / (jnp.asarray(self.eta) + filled))

    def spectral_conjugate(self, v: Array) -> Array:
        first_k = jnp.clip(self.trace() - jnp.arange(len(v), dtype=v.dtype), 0.0, 1.0)
        return jnp.sum(self.curvature_of(first_k) * v**2) / 2.0

    def spectral_prox(self, y: Array, rho: Array) -> Array:
        lam, eta = jnp.asarray(self.lam), jnp.asarray(self.eta)
        filled = water_fill(y, eta + 2.0 * lam / rho, self.trace())
        pull = rho * (eta + filled)
        return y * pull / (2.0 * lam + pull)
