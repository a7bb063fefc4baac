"""Second derivatives of the losses of all tasks, as matrices of the features or of the samples: of the fewer ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.cholesky import inverse_factor, with_rounding
from mocha_jax._numerics.linear_systems import twice
from mocha_jax._numerics.math import EXACT
from mocha_jax.coupling import Curvature, OwnSystems


def curvature(data: TaskData, bend: Array) -> Curvature:
    """Put together the samples and the curvatures ``[m, n]`` of their losses, times c."""
    if data.y.shape[1] < data.num_features and not data.shared:
        return BySamples(data, bend)
    return ByFeatures(data, bend, data.to_tasks(data.map_samples(_hessians, (), bend)))


class _OfSamples(Curvature):
    """Samples, and the curvatures of their losses."""

    data: TaskData
    bend: Array  # [m, n]

    def sums(self, slopes: Array) -> Array:
        return self.data.to_tasks(self.data.weighted_sums(slopes))

    def left(self, w: Array, slopes: Array) -> Array:
        return slopes - self.bend * self.data.predictions(w)

    def scaled(self, scale: Array) -> Self:
        return self.replace(data=self.data.with_features_scaled(scale))


class ByFeatures(_OfSamples):
    """A matrix ``[d, d]`` for every task."""

    hessian: Array  # [num_tasks, d, d]

    def times(self, w: Array) -> Array:
        return jnp.einsum("mde,me->md", self.hessian, w, precision=EXACT)

    def scaled(self, scale: Array) -> Self:
        squares = (scale[:, None] * scale[None, :])[None]
        return self.replace(data=super().scaled(scale).data, hessian=squares * self.hessian)

    def own(self, scale: Array) -> FeatureSystems:
        unit = jnp.eye(self.hessian.shape[1], dtype=self.hessian.dtype)
        return FeatureSystems(
            self, scale, inverse_factor(with_rounding(scale[:, None, None] * self.hessian) + unit[None])
        )


class FeatureSystems(OwnSystems):
    """Systems of the size of the features."""

    of: ByFeatures
    scale: Array
    factor: Array  # [num_tasks, d, d] inverse of the Cholesky factor

    def apply(self, right: Array) -> Array:
        return _by_factor(self.factor, right)

    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        scale = self.scale[:, None]
        solution = _solved(self.factor, right + scale * self.of.sums(slopes), lambda w: w + scale * self.of.times(w))
        return solution, self.of.left(solution, slopes)

    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        half = jnp.einsum("mde,mef->mdf", self.factor, self.of.hessian, precision=EXACT)
        each = jnp.einsum("mde,mdf->mef", self.factor, half, precision=EXACT)
        return jnp.sum(each, axis=0), lambda w: jnp.einsum("mde,me->d", each, w, precision=EXACT)


class BySamples(_OfSamples):
    """A matrix ``[n, n]`` for every task, of one node each."""

    def times(self, w: Array) -> Array:
        return self.sums(self.bend * self.data.predictions(w))

    def own(self, scale: Array) -> SampleSystems:
        data = self.data
        scale = data.to_nodes(jnp.broadcast_to(scale, (data.num_tasks,)))
        unit = jnp.eye(self.bend.shape[1], dtype=self.bend.dtype)[None]
        root = jnp.sqrt(jnp.maximum(self.bend, jnp.finfo(self.bend.dtype).tiny))
        grams = data.map_samples(partial(_gram, dtype=root.dtype), ())  # not of this round: XLA computes them once
        system = root[:, :, None] * grams * (scale[:, None] * root)[:, None, :]
        return SampleSystems(self, scale, root, inverse_factor(unit + with_rounding(system)))


class SampleSystems(OwnSystems):
    r"""Systems of the size of the samples.

    The rows of A are $r_ix_i^\top$, where $r_i^2 = b_i$. The system $(I + sAA^\top)\epsilon = \rho / r - AC$ gives
    $\delta = r\epsilon$, which is $\rho - bXD$, and the solution is $D = C + s\sum_i\delta_ix_i$.
    """

    of: BySamples
    scale: Array  # [m]
    root: Array  # [m, n] r
    factor: Array  # [m, n, n] inverse of the Cholesky factor

    def apply(self, right: Array) -> Array:
        data, root = self.of.data, self.root
        left = root * _by_factor(self.factor, -root * data.predictions(right))
        return right + data.to_tasks(self.scale)[:, None] * self.of.sums(left)

    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        data, root = self.of.data, self.root

        def system(by_row: Array) -> Array:
            return by_row + self.scale[:, None] * root * data.predictions(self.of.sums(root * by_row))

        left = root * _solved(self.factor, slopes / root - root * data.predictions(right), system)
        return right + data.to_tasks(self.scale)[:, None] * self.of.sums(left), left

    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        data = self.of.data
        # [m, n, d], whose products with themselves they are
        roots = data.map_samples(_rooted, (), self.root, self.factor)

        def applied(w: Array) -> Array:
            along = jnp.einsum("mnd,md->mn", roots, data.to_nodes(w), precision=EXACT)
            return jnp.einsum("mnd,mn->d", roots, along, precision=EXACT)

        return jnp.einsum("mnd,mne->de", roots, roots, precision=EXACT), applied


def _solved(factor: Array, right: Array, system: Callable[[Array], Array]) -> Array:
    """Solve small systems of right sides ``[m, d]`` by the inverses of their Cholesky factors.

    The first solution is corrected by its residual: by inverses alone it is worse than by triangular systems.
    """
    return twice(lambda solution: solution + _by_factor(factor, right - system(solution)), jnp.zeros_like(right))


def _by_factor(factor: Array, right: Array) -> Array:
    half = jnp.einsum("mde,me->md", factor, right, precision=EXACT)
    return jnp.einsum("mde,md->me", factor, half, precision=EXACT)


def _hessians(x: Array, bend: Array) -> Array:
    """Add up samples ``[k, n, d]`` times themselves, ``[k, d, d]``."""
    x = x.astype(bend.dtype)
    return jnp.einsum("knd,kne->kde", bend[:, :, None] * x, x, precision=EXACT)


def _gram(x: Array, dtype: DTypeLike) -> Array:
    """Products of samples ``[k, n, d]`` with each other, ``[k, n, n]``."""
    x = x.astype(dtype)
    return jnp.einsum("knd,kld->knl", x, x, precision=EXACT)


def _rooted(x: Array, root: Array, factor: Array) -> Array:
    factor = factor[:, :, : root.shape[1]]  # that of padded rows is of the unit matrix
    return jnp.einsum("knl,kld->knd", factor, root[:, :, None] * x.astype(root.dtype), precision=EXACT)
