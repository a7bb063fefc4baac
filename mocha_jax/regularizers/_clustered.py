"""The clustered model (12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax import _check, _domains
from mocha_jax._math import safe_ratio
from mocha_jax._pytree import Hyperparameter
from mocha_jax.coupling import LowRank
from mocha_jax.regularizers._trace import TraceLimited, mixed
from mocha_jax.spectral import singular_values, water_fill


class Clustered(TraceLimited):
    r"""Tasks in k clusters, relaxed to a convex set, eq. (12).

    .. math:: R(W, \Omega) = \lambda\,\mathrm{tr}(W^\top(\eta I + \Omega)^{-1}W), \qquad
       0 \preceq \Omega \preceq I,\; \mathrm{tr}\,\Omega = k

    Minimised over :math:`\Omega` it is :math:`\lambda\sum_i s_i^2/(\eta + \omega_i)` with the singular
    values s of W and :math:`\omega_i = \mathrm{clip}(c s_i - \eta, 0, 1)`, :math:`\sum_i\omega_i = k`.

    Args:
      lam: :math:`\lambda > 0`.
      eta: :math:`\eta > 0`, how far tasks may leave the k shared directions. Large: independent tasks with ridge
        :math:`\lambda/\eta`. Tiny: W of rank about k.
      k: number of clusters, in (0, number of tasks]; need not be whole. With k = m every eigenvalue is 1:
        independent tasks with ridge :math:`\lambda/(1+\eta)`.

    >>> import jax.numpy as jnp
    >>> r = Clustered(lam=1.0, eta=0.5, k=1)
    >>> w = jnp.diag(jnp.array([4.0, 0.1]))
    >>> r.relationship(2, r.update_omega(None, w)).round(3).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """

    not_tuned: ClassVar[tuple[str, ...]] = ("k",)
    domains: ClassVar[Mapping[str, _domains.Domain]] = {
        "lam": _domains.POSITIVE,
        "eta": _domains.POSITIVE,
        "k": _domains.POSITIVE,
    }

    lam: Hyperparameter
    eta: Hyperparameter
    k: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("Clustered", lam=self.lam, eta=self.eta, k=self.k)
        if (k := _check.concrete(self.k)) is not None and k > num_tasks:
            raise ValueError(
                f"Clustered: k = {k:g} clusters need at least as many tasks, but the data has {num_tasks}."
            )

    def fits(self, num_tasks: int) -> Array:
        return jnp.asarray(self.k) <= num_tasks

    def curvatures(self, num_tasks: int, omega: Any = None) -> tuple[Array, Array]:
        zero = jnp.zeros((), self._total().dtype)
        return 1.0 / self._curvature(zero), self._curvature(zero + 1.0)

    def covariance(self, num_tasks: int, omega: Any = None) -> Array:
        omega = self.relationship(num_tasks, omega)
        return omega + jnp.asarray(self.eta) * jnp.eye(num_tasks, dtype=omega.dtype)

    def restart_omega(self, omega: LowRank) -> LowRank:
        # Put the trace right, then mix in as much of the identity as brings the largest eigenvalue down to 1.
        omega = self._rescaled(omega)
        mean = jnp.asarray(self._total()) / len(omega.factor)
        largest = omega.base + jnp.max(singular_values(omega.factor)) ** 2
        share = jnp.clip(safe_ratio(largest - 1.0, largest - mean), 0.0, 1.0)
        return mixed(omega, share, self._total())

    def extend_omega(self, omega: LowRank, num_tasks: int, num_features: int) -> LowRank:
        return self.restart_omega(super().extend_omega(omega, num_tasks, num_features))

    def _total(self) -> Array:
        return jnp.asarray(self.k, jnp.result_type(self.lam))

    def _fit(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        # No use for smoothing: eta keeps every direction alive.
        values = water_fill(s, jnp.asarray(self.eta), self._total())
        positive = values > 0
        others = num_tasks - jnp.sum(positive, dtype=s.dtype)
        rest = jnp.maximum(safe_ratio(self._total() - jnp.sum(values), others), 0.0)
        return jnp.where(positive, values, rest), rest

    def _curvature(self, omega: Array) -> Array:
        return 0.5 * (jnp.asarray(self.eta) + omega) / jnp.asarray(self.lam)

    def _value(self, s: Array) -> Array:
        s = jnp.where(s > jnp.finfo(s.dtype).eps * jnp.max(s, initial=0.0), s, 0.0)  # what is noise gets no Omega
        filled = water_fill(s, jnp.asarray(self.eta), self._total())
        return jnp.asarray(self.lam) * jnp.sum(s**2 / (jnp.asarray(self.eta) + filled))

    def _conjugate(self, v: Array) -> Array:
        first_k = jnp.clip(self._total() - jnp.arange(len(v), dtype=v.dtype), 0.0, 1.0)
        return jnp.sum(self._curvature(first_k) * v**2) / 2.0

    def _prox(self, y: Array, rho: Array) -> Array:
        lam, eta = jnp.asarray(self.lam), jnp.asarray(self.eta)
        filled = water_fill(y, eta + 2.0 * lam / rho, self._total())
        pull = rho * (eta + filled)
        return y * pull / (2.0 * lam + pull)
