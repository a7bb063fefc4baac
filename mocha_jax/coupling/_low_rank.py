"""Couplings by a factor of few columns: with a multiple of the identity, or of deviations from the tasks' mean."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from mocha_jax._core import check
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.coupling._base import Coupling, Parts
from mocha_jax.spectral import singular_values, spectral_map

# Up to so many tasks the row sums of a low-rank coupling are exact, a few rows at a time; beyond, bounded.
_EXACT_ROWS, _ROWS_AT_ONCE = 4096, 64

# In units of the largest one's rounding, the singular values of F whose left vectors may be shorter than 1.
_NOISE = 128.0


class LowRank(Coupling):
    r"""$\bar M = b I + F F^\top$ with F of few columns: O(m r) numbers, O(m r d) work, never m x m."""

    base: Array  # [] b >= 0
    factor: Array  # [m, r] F

    def __post_init__(self) -> None:
        check.number("LowRank", "base", self.base)
        check.array("LowRank", "factor", self.factor, ("m", "r"))
        check.number("LowRank", "factor", self.factor)

    def apply(self, v: Array) -> Array:
        return self.parts(v).together(v)

    def parts(self, v: Array) -> Parts:
        return Parts(jnp.reshape(self.base, 1), self.factor, matmul(self.factor.T, v))

    def diagonal(self) -> Array:
        return self.base + jnp.sum(self.factor**2, axis=1)

    def gradient(self, w: Array) -> Array:
        inverse, rest = spectral_map(_inverse_roots, self.factor, self.base), w - self._inside(w)
        return matmul(inverse, matmul(inverse.T, w)) + jnp.where(self.base > 0, safe_ratio(rest, self.base), 0.0)

    def project_to_range(self, w: Array) -> Array:
        return jnp.where(self.base > 0, w, self._inside(w))

    def energy(self, w: Array, noise: Array | float = 0.0) -> Array:
        r"""$\tfrac12\mathrm{tr}(W^\top\bar M^{-1}W)$, a scalar; infinite where W leaves the range of $\bar M$.

        Args:
          w: W ``[m, d]``.
          noise: the square of what is known to be rounding in W.
        """
        eps, largest = jnp.finfo(w.dtype).eps, self.base + singular_values(self.factor)[0] ** 2
        along = jnp.sum(matmul(spectral_map(_inverse_roots, self.factor, self.base).T, w) ** 2)
        rest = jnp.sum((w - self._inside(w)) ** 2)
        nothing, free = rest <= eps * jnp.sum(w**2) + noise, self.base <= eps * largest
        aside = jnp.where(free, jnp.where(nothing, 0.0, jnp.inf), rest / jnp.where(free, 1.0, self.base))
        return 0.5 * (along + aside)

    def _inside(self, w: Array) -> Array:
        """The part of W along the columns of F, but for those that are noise."""
        along = spectral_map(_told_apart, self.factor, self.base)
        return matmul(along, matmul(along.T, w))

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> LowRank:
        # Woodbury, with c = 1 + rho b: 1 - (c + rho F F')^-1 = rho b / c + (rho / c) F (c + rho F'F)^-1 F'.
        c, f = 1.0 + rho * self.base, self.factor
        root = jnp.linalg.cholesky(c * jnp.eye(f.shape[1], dtype=f.dtype) + rho * matmul(f.T, f))
        factor = jnp.sqrt(rho / c) * solve_triangular(root, f.T, lower=True).T
        return LowRank(rho * self.base / c, factor)

    def row_sums(self, nodes: Array, off: Array | float = 0.0) -> Array:
        r"""Sum the rows of $|\bar M|$, of an operator with `off` added to every entry."""
        f, m = self.factor, len(self.factor)
        if m > _EXACT_ROWS:  # m^2 work would rule: |F F'| <= |F| |F|' entry by entry
            more = jnp.abs(off) * jnp.sum(nodes)
            return nodes * self.base + matmul(jnp.abs(f), matmul(jnp.abs(f).T, nodes)) + more
        rows = jnp.pad(f, ((0, -m % _ROWS_AT_ONCE), (0, 0))).reshape(-1, _ROWS_AT_ONCE, f.shape[1])
        across = lax.map(lambda some: matmul(jnp.abs(matmul(some, f.T) + off), nodes), rows)
        return nodes * self.base + across.reshape(-1)[:m]

    def spectral_bound(self, nodes: Array) -> Array:
        return self.largest(safe_ratio(nodes, self.diagonal()))

    def largest(self, scale: Array) -> Array:
        r"""An upper bound on the largest eigenvalue of $S^{1/2}\bar M S^{1/2}$, S the diagonal matrix of `scale`."""
        # That of a sum is at most the sum of the largest; the second is one of r x r.
        inner = matmul(self.factor.T, scale[:, None] * self.factor)
        return jnp.max(scale) * self.base + jnp.linalg.eigvalsh(inner)[-1]


def _inverse_roots(f: Array, base: Array) -> Array:
    """Inverse roots of the eigenvalues of the operator in the directions of these singular values."""
    kept = _told_apart(f, base) > 0
    return jnp.where(kept, 1.0 / jnp.sqrt(jnp.where(kept, base + f**2, 1.0)), 0.0)


def _told_apart(f: Array, base: Array) -> Array:
    """1 for directions told apart from those outside of F, which the base is for, 0 for noise."""
    eps, curvature = jnp.finfo(f.dtype).eps, base + f**2
    told = (f > _NOISE * eps * jnp.max(f)) & (curvature > eps * jnp.max(curvature))
    return jnp.where(told, 1.0, 0.0).astype(f.dtype)


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
        of_deviations = self.deviations.parts(v)
        mix = jnp.pad(of_deviations.mix, ((0, 0), (0, 1)))  # type: ignore[arg-type]
        rows = jnp.concatenate([of_deviations.rows, jnp.sum(v, axis=0, keepdims=True)])
        return Parts(of_deviations.scale, mix.at[:, -1].set(self._off), rows)

    def diagonal(self) -> Array:
        return self.deviations.diagonal() + self._off

    def gradient(self, w: Array) -> Array:
        mean, aside = mean_and_deviations(w)
        return self.deviations.gradient(aside) + mean / self.common

    def energy(self, w: Array) -> Array:
        r"""$\tfrac12\mathrm{tr}(W^\top\bar M^{-1}W)$, a scalar; infinite where deviations leave the range of F."""
        mean, aside = mean_and_deviations(w)
        unit = jnp.finfo(w.dtype).eps
        # What rounding leaves of a large mean is no deviation.
        noise = w.size * (4.0 * unit * jnp.max(jnp.abs(mean))) ** 2
        return self.deviations.energy(aside, noise) + 0.5 * len(w) * jnp.sum(mean**2) / self.common

    def project_to_range(self, w: Array) -> Array:
        mean, aside = mean_and_deviations(w)
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


def mean_and_deviations(w: Array) -> tuple[Array, Array]:
    """The mean of the tasks ``[1, d]``, and their deviations from it, whose mean is 0 to the last bits."""
    mean = jnp.mean(w, axis=0, keepdims=True)
    aside = w - mean
    lost = jnp.mean(aside, axis=0, keepdims=True)
    return mean + lost, aside - lost
