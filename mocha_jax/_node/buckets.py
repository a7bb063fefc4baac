r"""The samples as the loops of the local solver read them.

**Time-major.** All nodes visit their rows in one common random order, so a step takes row i of every node: stored
in that order it is one contiguous slice. `TaskData` keeps its samples in memory so where it can
(`mocha_jax._data.layouts`), and then there is no copy of them.

**Buckets.** Padded to the largest node, m nodes cost m n_max whatever they hold. Where sizes differ much, nodes of
similar size are put into buckets, each padded to its own largest. Which sizes go together is a static choice
(`bucket_sizes`), made where sizes are known; which nodes these are follows from the data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.devices import NodeSharding, each_device, fetched, namespace_of, on_host
from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._core.values import is_traced
from mocha_jax._data.layouts import PART, AsStored, Layout
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.row_products import combine, times
from mocha_jax._numerics.math import Terms, in_blocks, lengths, nodes_of, part_of, totals, with_part

Numbers = TypeVar("Numbers")  # a tree of arrays and numbers, such as a loss

BucketSizes = tuple[tuple[int, int], ...]  # (nodes on a device, their rows) of every bucket, the longest first

# What works through the rows: loops that XLA compiles, a Pallas kernel a pass, or the better one for the device.
BACKENDS = ("auto", "xla", "pallas")

# What one step costs besides its numbers, in numbers. What a bucket must save: a share of a pass without padding, and
# at least so many numbers, which take a CPU half a millisecond a round. A bucket more compiles for 1.5 to 2 s (measured
# on schools and vehicles).
_STEP_NUMBERS, _BUCKET_SHARE, _BUCKET_NUMBERS = 1024, 0.02, 2**19

# Sizes at which a bucket may end.
_CUTS = 48


class Bucket(Pytree):
    """Nodes of similar size, c of them on each device, and their n rows. The first axis counts devices."""

    node: Array | None  # [c] which; None: all in their order
    x: Array | None  # [1, n, c, d]; None between programs, where it is `TaskData.x` with its first axes swapped
    y: Array  # [1, n, c]
    weight: Array  # [1, n, c]
    norm2: Array  # [1, n, c] squared length of each row

    @property
    def rows(self) -> int:
        """The number of rows of the largest node."""
        return self.y.shape[1]

    @property
    def samples(self) -> Array:
        """The samples of its nodes, ``[n, c, d]``."""
        assert self.x is not None
        return self.x[0]

    def take(self, by_node: Array) -> Array:
        """Take the entries of these nodes: ``[m, ...]`` to ``[c, ...]``."""
        return by_node if self.node is None else by_node[self.node]

    def take_numbers(self, numbers: Numbers) -> Numbers:
        """Take what holds for these nodes of a tree of arrays ``[m, ...]``, and of numbers that hold for all."""
        return jax.tree.map(lambda a: self.take(a) if jnp.ndim(a) else a, numbers)

    def take_rows(self, *by_row: Array) -> tuple[Array, ...]:
        """Take this bucket's part of what is per row: each ``[m, n, ...]`` to ``[c, rows, ...]``."""
        if self.node is None:
            return by_row
        return tuple(a.at[self.node, : self.rows].get(mode="promise_in_bounds") for a in by_row)

    def put(self, into: Array, part: Array) -> Array:
        """The reverse, ``[c, ...]`` into ``[m, ...]``; along further axes as many numbers as there are."""
        if self.node is None:
            return part
        return into.at[self.node, *map(slice, part.shape[1:])].set(part)


class TimeMajor(Layout):
    """The samples of all nodes, row by row."""

    buckets: tuple[Bucket, ...]
    counts: Array  # [m] int32 real samples of each node
    backend: str = static(default="auto")  # see `BACKENDS`
    sharding: NodeSharding | None = static(default=None)  # where the nodes are; a bucket holds nodes of one device

    by_rows = True

    def slim(self) -> Self:
        return self.replace(buckets=tuple(b if b.node is not None else b.replace(x=None) for b in self.buckets))

    def whole(self, x: Array, rows: Array | None = None) -> Self:
        if all(bucket.x is not None for bucket in self.buckets):
            return self
        [bucket] = self.buckets
        by_row = each_device(self.sharding, _by_row, (), x) if rows is None else rows
        return self.replace(buckets=(bucket.replace(x=by_row),))

    def sizes(self, weight: Array) -> Array:
        return self.counts

    def node_predictions(self, x: Array, weights: Array) -> Array:
        return self._everywhere(_times, x, weights)

    def weighted_sums(self, x: Array, factors: Array) -> Array:
        return self._everywhere(_combine, x, factors)

    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        return each_device(sharding, partial(_renewed, parts, real), part, self, factors, sums)

    def map_samples(
        self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], by_node: tuple[Array, ...],
        *by_row: Array,
    ) -> Tree:  # fmt: skip
        return each_device(sharding, partial(_of_samples, work), (), self, x, by_node, *by_row)

    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        return each_device(self.sharding, lambda _, rows, x: _longest(rows, x), (), self, x)

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        return each_device(self.sharding, partial(_each_row, work), (), given, self, by_node, *by_row)

    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        return each_device(self.sharding, partial(_totals, terms), (), given, self, x, weights, *rows)

    def _everywhere(self, work: Callable[[TimeMajor, Array, Array], Array], x: Array, by_node: Array) -> Array:
        return each_device(self.sharding, lambda _, *arrays: work(*arrays), (), self, x, by_node)


def _by_row(_: tuple[()], x: Array) -> Array:
    """Swap the axes of nodes and rows. It is no work where that is how they lie in memory."""
    return jnp.swapaxes(x, 0, 1)[None]


def _times(rows: TimeMajor, x: Array, weights: Array) -> Array:
    z = jnp.zeros(x.shape[:2], weights.dtype)
    for bucket in rows.buckets:
        z = bucket.put(z, times(bucket.samples, bucket.take(weights)))
    return z


def _combine(rows: TimeMajor, x: Array, factors: Array) -> Array:
    v = jnp.zeros((len(x), x.shape[2]), factors.dtype)
    for bucket in rows.buckets:
        v = bucket.put(v, combine(bucket.samples, *bucket.take_rows(factors)))
    return v


def _renewed(parts: int, real: int, part: Array, rows: TimeMajor, factors: Array, sums: Array) -> Array:
    for bucket in rows.buckets:
        (of_rows,), of_nodes = bucket.take_rows(factors), bucket.take(sums)
        begin, width = part_of(min(real, len(of_nodes)), part, parts)
        exact = combine(bucket.samples, nodes_of(of_rows, begin, width), begin)
        sums = bucket.put(sums, with_part(of_nodes, exact, begin))
    return sums


def _of_samples(
    work: Callable[..., Tree], _: tuple[()], rows: TimeMajor, x: Array, by_node: tuple[Array, ...], *by_row: Array
) -> Tree:
    if rows.buckets[0].node is None:
        return _in_parts(work, rows.buckets[0].samples, *by_node, *by_row)
    shapes = jax.eval_shape(work, x, *by_node, *by_row)
    results = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    for bucket in rows.buckets:
        taken = *map(bucket.take, by_node), *bucket.take_rows(*by_row)
        results = jax.tree.map(bucket.put, results, _in_parts(work, bucket.samples, *taken))
    return results


def _in_parts(work: Callable[..., Tree], x: Array, *by_node: Array) -> Tree:
    def part(first: Array | int, width: int) -> Tree:
        return work(jnp.swapaxes(nodes_of(x, first, width, 1), 0, 1), *(nodes_of(a, first, width) for a in by_node))

    n, count, d = x.shape
    return in_blocks(part, count, n * d, PART)


def _longest(rows: TimeMajor, x: Array) -> Array:
    squared = jnp.zeros(len(x), rows.buckets[0].norm2.dtype)
    for bucket in rows.buckets:
        squared = bucket.put(squared, jnp.max(bucket.norm2[0], axis=0))
    return lengths(squared)


def _each_row(
    work: Callable[..., Array],
    _: tuple[()],
    given: Tree,
    rows: TimeMajor,
    by_node: tuple[Array, ...],
    first: Array,
    *more: Array,
) -> Array:
    for bucket in rows.buckets:
        numbers, of_nodes = bucket.take_numbers(given), tuple(map(bucket.take, by_node))
        # The first array is read and written in turns: the buckets are disjoint, and to keep the old one were a copy.
        first = bucket.put(first, work(numbers, of_nodes, *bucket.take_rows(first, *more)))
    return first


def _totals(
    terms: Callable[..., Terms],
    _: tuple[()],
    given: Tree,
    rows: TimeMajor,
    x: Array,
    weights: Array,
    *arrays: Array,
) -> Terms:
    sums = None
    for bucket in rows.buckets:
        z, y, weight = times(bucket.samples, bucket.take(weights)), bucket.y[0].T, bucket.weight[0].T
        of_bucket = totals(terms, bucket.take_numbers(given), z, y, weight, *bucket.take_rows(*arrays))
        if sums is None:
            sums = jax.tree.map(lambda a: jnp.zeros(len(weights), a.dtype), of_bucket)
        sums = jax.tree.map(bucket.put, sums, of_bucket)
    return cast(Terms, sums)


def time_major(data: TaskData, bucketing: BucketSizes = (), backend: str = "auto") -> TaskData:
    """Lay out the data for `ascend`, before the loops over rounds."""
    x = data.x
    if isinstance(data.layout, AsStored) and data.layout.rows is not None:
        x = jnp.swapaxes(data.layout.rows[0], 0, 1)
    rows: TimeMajor = each_device(data.sharding, partial(_time_major, bucketing), (), x, data.y, data.weight)
    return data.replace(layout=rows.replace(backend=backend, sharding=data.sharding))


def _time_major(bucketing: BucketSizes, _: tuple[()], x: Array, y: Array, weight: Array) -> TimeMajor:
    counts = AsStored().sizes(weight)
    if len(bucketing) < 2:
        return TimeMajor((_bucket(None, x, y, weight),), counts)
    order, buckets, start = jnp.argsort(-extents(weight)), [], 0
    for count, rows in bucketing:
        buckets.append(_bucket(order[start : start + count], x[:, :rows], y[:, :rows], weight[:, :rows]))
        start += count
    return TimeMajor(tuple(buckets), counts)


def _bucket(node: Array | None, *arrays: Array) -> Bucket:
    x, y, weight = (jnp.swapaxes(a if node is None else a[node], 0, 1) for a in arrays)
    return Bucket(node, x[None], y[None], weight[None], jnp.sum(x.astype(y.dtype) ** 2, axis=-1)[None])


def extents(weight: Array) -> Array:
    """Rows up to the last real one of each node: weights ``[m, n]`` to ``[m]`` int32."""
    xp, number = namespace_of(weight), np.arange(1, weight.shape[1] + 1, dtype=np.int32)
    return cast(Array, xp.max(xp.where(weight > 0, number[None, :], np.int32(0)), axis=1, initial=0))


def _known_extents(data: TaskData) -> np.ndarray:
    if views := on_host(data.weight):
        return np.asarray(extents(views[0]))
    with jax.ensure_compile_time_eval():
        return fetched(_extents(data.weight))


_extents = jax.jit(extents)  # one program


def bucket_sizes(data: TaskData) -> BucketSizes:
    """Choose which sizes to put together, so that padding costs little; () where sizes are alike or unknown."""
    if is_traced(data.weight) or isinstance(data.weight, jax.ShapeDtypeStruct):
        return ()
    devices = 1 if data.sharding is None else data.sharding.devices
    m, n, d = data.x.shape
    if n * (m // devices * d + _STEP_NUMBERS) <= _BUCKET_NUMBERS:  # all that there is to save
        return ()
    sizes = np.sort(_known_extents(data).reshape(devices, -1), axis=1)
    # Every device has the same buckets: enough for the one with the largest nodes.
    bucketing = _cheapest(sizes[:, ::-1].max(axis=0), data.num_features)
    return bucketing if len(bucketing) > 1 else ()


def _cheapest(sizes: np.ndarray, d: int) -> BucketSizes:
    """Cut a descending list of sizes, by dynamic programming over some candidates."""
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return ()
    tops = np.unique(sizes)
    if len(tops) > _CUTS:
        grid = np.geomspace(tops[0], tops[-1], _CUTS)
        tops = np.unique(tops[np.searchsorted(tops, grid.round(), side="right") - 1])
    # below[j]: nodes up to size tops[j - 1]; a bucket from i to j holds the sizes in (tops[i - 1], tops[j - 1]].
    below = np.r_[0, np.searchsorted(sizes[::-1], tops, side="right")]
    fixed = max(_BUCKET_SHARE * float(sizes.sum()) * d, _BUCKET_NUMBERS)
    best, cut = np.r_[0.0, np.full(len(tops), np.inf)], np.zeros(len(tops) + 1, int)
    for j in range(1, len(tops) + 1):
        cost = best[:j] + tops[j - 1] * ((below[j] - below[:j]) * d + _STEP_NUMBERS) + fixed
        cut[j], best[j] = int(np.argmin(cost)), cost.min()
    bucketing, j = [], len(tops)
    while j:
        bucketing.append((int(below[j] - below[cut[j]]), int(tops[j - 1])))
        j = cut[j]
    return tuple(bucketing)
