"""Second derivatives of the losses of all tasks, as matrices of the features or of the samples: of the fewer ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import jax.numpy as jnp
from jax import Array
from jax.lax.linalg import cholesky, triangular_solve

from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import EXACT
from mocha_jax.coupling import Curvature, OwnSystems


def curvature(data: TaskData, bend: Array) -> Curvature:
    """Put together the samples and the curvatures ``[m, n]`` of their losses, times c."""
    if data.y.shape[1] < data.num_features and not data.shared:
        return BySamples(data, bend)
    return ByFeatures(data, bend, data.to_tasks(data.map_samples(_hessians, bend)))


class _OfSamples(Curvature):
    """Samples, and the curvatures of their losses."""

    data: TaskData
    bend: Array  # [m, n]

    def sums(self, slopes: Array) -> Array:
        return self.data.to_tasks(self.data.weighted_sums(slopes))

    def left(self, w: Array, slopes: Array) -> Array:
        return slopes - self.bend * self.data.predictions(w)

    def scaled(self, scale: Array) -> Self:
        return self.replace(data=self.data.replace(x=self.data.x * scale[None, None, :].astype(self.data.x.dtype)))


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
        return FeatureSystems(self, scale, cholesky(scale[:, None, None] * self.hessian + unit[None]))


class FeatureSystems(OwnSystems):
    """Systems of the size of the features."""

    of: ByFeatures
    scale: Array
    factor: Array  # [num_tasks, d, d]

    def apply(self, right: Array) -> Array:
        return _solved(self.factor, right)

    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        found = self.apply(right + self.scale[:, None] * self.of.sums(slopes))
        return found, self.of.left(found, slopes)

    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        each = _solved(self.factor, self.of.hessian)
        return jnp.sum(each, axis=0), lambda w: jnp.einsum("mde,me->d", each, w, precision=EXACT)


class BySamples(_OfSamples):
    """A matrix ``[n, n]`` for every task, of one node each."""

    def times(self, w: Array) -> Array:
        return self.sums(self.bend * self.data.predictions(w))

    def own(self, scale: Array) -> SampleSystems:
        data = self.data
        scale = data.to_nodes(jnp.broadcast_to(scale, (data.num_tasks,)))
        root = jnp.sqrt(jnp.maximum(self.bend, jnp.finfo(self.bend.dtype).tiny))
        return SampleSystems(self, scale, root, cholesky(data.map_samples(_gram, root, scale)))


class SampleSystems(OwnSystems):
    r"""Systems of the size of the samples.

    The rows of A are $r_ix_i^\top$, where $r_i^2 = b_i$. The system $(I + sAA^\top)\epsilon = \rho / r - AC$ gives
    $\delta = r\epsilon$, which is $\rho - bXD$, and the solution is $D = C + s\sum_i\delta_ix_i$.
    """

    of: BySamples
    scale: Array  # [m]
    root: Array  # [m, n] r
    factor: Array  # [m, n, n]

    def apply(self, right: Array) -> Array:
        return self.solve(right, jnp.zeros_like(self.root))[0]

    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        data = self.of.data
        left = self.root * _solved(self.factor, slopes / self.root - self.root * data.predictions(right))
        return right + data.to_tasks(self.scale)[:, None] * self.of.sums(left), left

    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        data = self.of.data
        roots = data.map_samples(_rooted, self.root, self.factor)  # [m, n, d], whose products with themselves they are

        def applied(w: Array) -> Array:
            along = jnp.einsum("mnd,md->mn", roots, data.to_nodes(w), precision=EXACT)
            return jnp.einsum("mnd,mn->d", roots, along, precision=EXACT)

        return jnp.einsum("mnd,mne->de", roots, roots, precision=EXACT), applied


def _solved(factor: Array, right: Array) -> Array:
    """Solve small systems ``[m, d, d]``, by their Cholesky factors, of right sides ``[m, d]`` or ``[m, d, k]``."""
    columns = right if right.ndim == factor.ndim else right[..., None]
    for transposed in (False, True):
        columns = triangular_solve(factor, columns, left_side=True, lower=True, transpose_a=transposed)
    return columns.reshape(right.shape)


def _hessians(x: Array, bend: Array) -> Array:
    """Add up samples ``[k, n, d]`` times themselves, ``[k, d, d]``."""
    x = x.astype(bend.dtype)
    return jnp.einsum("knd,kne->kde", bend[:, :, None] * x, x, precision=EXACT)


def _gram(x: Array, root: Array, scale: Array) -> Array:
    """The systems of samples ``[k, n, d]``, ``[k, n, n]``."""
    rows = root[:, :, None] * x.astype(root.dtype)
    unit = jnp.eye(rows.shape[1], dtype=root.dtype)
    return scale[:, None, None] * jnp.einsum("knd,kld->knl", rows, rows, precision=EXACT) + unit[None]


def _rooted(x: Array, root: Array, factor: Array) -> Array:
    return triangular_solve(factor, root[:, :, None] * x.astype(root.dtype), left_side=True, lower=True)
