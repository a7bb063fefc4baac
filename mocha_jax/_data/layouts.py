"""Storage of samples: their order in memory, and layouts, by which products with them and work on rows are done.

The order in memory is row i of all nodes side by side, as rounds read them. An array has the same shape and numbers in
any order. In this one the local solver, certificates and gradients read the samples where they are; stored node by
node, every program would begin with a copy. A TPU has nodes along the lanes of its registers, so there features come
before nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from mocha_jax._core.devices import NodeSharding, each_device, format_of, in_order, on_host, order_of
from mocha_jax._core.pytree import Pytree, Tree
from mocha_jax._core.values import is_traced
from mocha_jax._numerics.math import Terms, combine, in_blocks, lengths, nodes_of, part_of, times, totals, with_part

# Axes of ``[m, n, d]``, the one whose neighbours are farthest apart first.
_ORDER, _ORDER_ON_TPU = (1, 0, 2), (1, 2, 0)

Stored = TypeVar("Stored")  # ``[m, n, d]``, or what stands for them

# Bytes below which no program notices its copy.
_SMALL = 2**20


def _order_on(sharding: Sharding) -> tuple[int, ...]:
    device: jax.Device = next(iter(sharding.device_set))
    return _ORDER_ON_TPU if device.platform == "tpu" else _ORDER


def in_format(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of samples, in order as `row_by_row` puts them if it is known on which machines."""
    small = np.prod(x.shape) * x.dtype.itemsize < _SMALL
    if small or isinstance(getattr(x.sharding, "mesh", None), AbstractMesh):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=format_of(_order_on(x.sharding), x.sharding))


def row_by_row(x: Stored) -> Stored | Array:
    """Put samples ``[m, n, d]`` in order, if they are an array that lies otherwise and is not small."""
    if not isinstance(x, jax.Array | np.ndarray) or is_traced(x) or x.nbytes < _SMALL:
        return x
    array = jnp.asarray(x)
    wanted = _order_on(array.sharding)
    return array if order_of(array) in (None, wanted) else in_order(array, wanted)


def seen_by_rows(x: object) -> Array | None:
    """Return the same memory as an array ``[1, n, m, d]``, where it lies so on one CPU; else None.

    XLA for CPUs copies what it gets in any order but its own. Other compilers read it as it lies.
    """
    if not isinstance(x, jax.Array) or is_traced(x) or x.nbytes < _SMALL or order_of(x) != _ORDER:
        return None
    if not (views := on_host(x)):
        return None
    [device] = x.devices()
    return cast(Array, jax.device_put(np.swapaxes(views[0], 0, 1)[None], device, may_alias=True))


def collect(pieces: Iterable[np.ndarray], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Put pieces ``[k, n, d]`` of samples, one after the other, in order on the default device."""
    if np.prod(shape) * jnp.dtype(dtype).itemsize < _SMALL:
        return jax.device_put(np.concatenate(list(pieces)))
    [device] = jnp.zeros(()).devices()
    wanted = format_of(_order_on(sharding := SingleDeviceSharding(device)), sharding)
    x = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=wanted)()
    put = jax.jit(_put, donate_argnums=0, out_shardings=wanted)
    begin = 0
    for piece in pieces:
        x = put(x, piece, np.int32(begin))
        begin += len(piece)
    return x


def _put(x: Array, piece: Array, begin: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, piece, begin, 0)


class Layout(Pytree):
    """Base class of layouts; ``x [m, n, d]`` are always the samples as `TaskData` stores them."""

    by_rows: ClassVar[bool]  # whether a local solver can read one row after the other

    def slim(self) -> Self:
        """Leave out what ``TaskData.x`` holds already, to be handed from one program to the next."""
        return self

    def whole(self, x: Array, rows: Array | None = None) -> Self:
        """Restore what `slim` left out; from `rows` ``[1, n, m, d]`` if given."""
        return self

    @abstractmethod
    def sizes(self, weight: Array) -> Array:
        """Count the real samples of each node, ``[m]`` int32: those of positive weight ``[m, n]``."""

    @abstractmethod
    def node_predictions(self, x: Array, weights: Array) -> Array:
        """Multiply every sample by its node's weights: ``[m, d]`` to ``[m, n]``."""

    @abstractmethod
    def weighted_sums(self, x: Array, factors: Array) -> Array:
        """Add up each node's samples times their factors: ``[m, n]`` to ``[m, d]``."""

    @abstractmethod
    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        """See `TaskData.renewed`."""

    @abstractmethod
    def map_samples(
        self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], by_node: tuple[Array, ...],
        *by_row: Array,
    ) -> Tree:  # fmt: skip
        """See `TaskData.map_samples`."""

    @abstractmethod
    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        """Return the length of each node's longest sample, ``[m]``."""

    @abstractmethod
    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        """See `TaskData.map_rows`."""

    @abstractmethod
    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        """See `TaskData.sum_over_rows`."""


# Numbers of the samples that `TaskData.map_samples` takes at once.
PART = 2**23


class NodeByNode(Layout):
    """Base class of layouts by which samples are read node by node, as they are stored."""

    by_rows = False

    def node_predictions(self, x: Array, weights: Array) -> Array:
        return times(x, weights)

    def weighted_sums(self, x: Array, factors: Array) -> Array:
        return combine(x, factors)

    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        def work(part: Array, x: Array, factors: Array, sums: Array) -> Array:
            begin, width = part_of(min(real, len(x)), part, parts)
            exact = combine(*(nodes_of(a, begin, width) for a in (x, factors)))
            return with_part(sums, exact, begin)

        return each_device(sharding, work, part, x, factors, sums)

    def map_samples(
        self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], by_node: tuple[Array, ...],
        *by_row: Array,
    ) -> Tree:  # fmt: skip
        return each_device(sharding, lambda _, x, *arrays: _in_parts(work, x, *arrays), (), x, *(*by_node, *by_row))

    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        return lengths(jnp.max(jnp.sum(x.astype(dtype) ** 2, axis=2), axis=1))

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        return work(given, by_node, *by_row)

    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        return totals(terms, given, times(x, weights), y, weight, *rows)


class AsStored(NodeByNode):
    """The samples as they are stored."""

    rows: Array | None = None  # [1, n, m, d] the same row by row, if available

    def sizes(self, weight: Array) -> Array:
        return jnp.sum(weight > 0, axis=1, dtype=jnp.int32)


def _in_parts(work: Callable[..., Tree], x: Array, *by_node: Array) -> Tree:
    def part(first: Array | int, width: int) -> Tree:
        return work(*(nodes_of(a, first, width) for a in (x, *by_node)))

    return in_blocks(part, len(x), x[0].size, PART)
