"""A coupling of the tasks' mean by one number, and of their deviations from it by a factor of few columns."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.coupling._base import Coupling, Parts
from mocha_jax.coupling._low_rank import LowRank


class AboutMean(Coupling):
    r"""$\bar M = a\,\tfrac1m 11^\top + P(bI + FF^\top)P$ with $P = I - \tfrac1m 11^\top$ and $F^\top 1 = 0$."""

    common: Array  # [] a, on the mean
    deviations: LowRank  # b and F, whose columns add up to 0, on the rest

    def __post_init__(self) -> None:
        check.number("AboutMean", "common", self.common)
        check.instance("AboutMean", "deviations", self.deviations, LowRank, "coupling.LowRank(base, factor)")

    @property
    def _off(self) -> Array:
        """The entry of every pair that F does not give."""
        return (self.common - self.deviations.base) / len(self.deviations.factor)

    def apply(self, v: Array) -> Array:
        return self.parts(v).together(v)

    def parts(self, v: Array) -> Parts:
        within = self.deviations.parts(v)
        mix = jnp.pad(within.mix, ((0, 0), (0, 1)))  # type: ignore[arg-type]
        rows = jnp.concatenate([within.rows, jnp.sum(v, axis=0, keepdims=True)])
        return Parts(within.scale, mix.at[:, -1].set(self._off), rows)

    def diagonal(self) -> Array:
        return self.deviations.diagonal() + self._off

    def gradient(self, w: Array) -> Array:
        mean, aside = apart(w)
        return self.deviations.gradient(aside) + mean / self.common

    def energy(self, w: Array) -> Array:
        r"""$\tfrac12\mathrm{tr}(W^\top\bar M^{-1}W)$, a scalar; infinite where deviations leave the range of F."""
        mean, aside = apart(w)
        unit = jnp.finfo(w.dtype).eps
        # What rounding leaves of a large mean is no deviation.
        noise = w.size * (4.0 * unit * jnp.max(jnp.abs(mean))) ** 2
        return self.deviations.energy(aside, noise) + 0.5 * len(w) * jnp.sum(mean**2) / self.common

    def project_to_range(self, w: Array) -> Array:
        mean, aside = apart(w)
        return mean + self.deviations.project_to_range(aside)

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> AboutMean:
        pull = rho * self.common
        return AboutMean(pull / (1.0 + pull), self.deviations.resolvent(rho))

    def row_sums(self, nodes: Array) -> Array:
        return self.deviations.row_sums(nodes, self._off)

    def spectral_bound(self, nodes: Array) -> Array:
        # Again of a sum: the mean has one direction.
        scale = safe_ratio(nodes, self.diagonal())
        return self.deviations.largest(scale) + jnp.maximum(self._off, 0.0) * jnp.sum(scale)


def apart(w: Array) -> tuple[Array, Array]:
    """The mean of the tasks ``[1, d]``, and their deviations from it, whose mean is 0 to the last bits."""
    mean = jnp.mean(w, axis=0, keepdims=True)
    aside = w - mean
    lost = jnp.mean(aside, axis=0, keepdims=True)
    return mean + lost, aside - lost
