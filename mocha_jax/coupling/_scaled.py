"""A coupling of tasks whose features are scaled."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax.coupling._base import Coupling
from mocha_jax.coupling._curvature import Curvature


class Scaled(Coupling):
    r"""$V \mapsto \bar M(V S) S$ of another coupling $\bar M$ and $S = \mathrm{diag}(s)$."""

    of: Coupling
    scale: Array  # [d] s

    def __post_init__(self) -> None:
        check.instance("Scaled", "of", self.of, Coupling, "coupling.Dense(matrix)")
        check.array("Scaled", "scale", self.scale, ("d",))

    @property
    def dense(self) -> bool:  # type: ignore[override]
        return self.of.dense

    @property
    def _most(self) -> Array:
        """The largest number for any feature: that one is safe for all."""
        return jnp.max(self.scale**2)

    def apply(self, v: Array) -> Array:
        return self.scale[None, :] * self.of.apply(self.scale[None, :] * v)

    def diagonal(self) -> Array:
        return self._most * self.of.diagonal()

    def row_sums(self, nodes: Array) -> Array:
        return self._most * self.of.row_sums(nodes)

    def spectral_bound(self, nodes: Array) -> Array:
        return self.of.spectral_bound(nodes)

    def gradient(self, w: Array) -> Array:
        return self.of.gradient(w / self.scale[None, :]) / self.scale[None, :]

    def project_to_range(self, w: Array) -> Array:
        return self.scale[None, :] * self.of.project_to_range(w / self.scale[None, :])

    def prox(self, y: Array, rho: Array) -> Array:
        # Of u = w / s the minimiser of R(u) + rho s^2 |u - y / s|^2 / 2, each feature by itself.
        def one(column: Array, s: Array) -> Array:
            return s * self.of.prox(column[:, None] / s, rho * s**2)[:, 0]

        return jax.vmap(one, (1, 0), 1)(y, self.scale)

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        # (I + M S H S) D / s = C / s + M S X' rho: the system of scaled features.
        system = self.of.newton_system(curvature.scaled(self.scale))

        def step(right: Array, slopes: Array) -> tuple[Array, Array]:
            found, left = system(right / self.scale[None, :], slopes)
            return self.scale[None, :] * found, left

        return step
