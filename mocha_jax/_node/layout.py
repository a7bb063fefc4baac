r"""The samples as the loops of the local solver read them.

**Time-major.** All nodes visit their rows in one common random order, so a step takes row i of every node: stored
in that order it is one contiguous slice. Many nodes are taken in blocks whose weights stay in the cache from one
step to the next.

**Buckets.** Padded to the largest node, m nodes cost m n_max whatever they hold. Where sizes differ much, nodes of
similar size are put into buckets, each padded to its own largest. Which sizes go together is a static choice
(`bucket_sizes`), made where sizes are known; which nodes these are follows from the data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.devices import NodeSharding, each_device, fetched
from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._data.layout import Layout
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.products import Terms, combine, lengths, times, totals

BucketSizes = tuple[tuple[int, int], ...]  # (nodes on a device, rows of the largest) of every bucket, largest first

# What works through the rows: loops that XLA compiles, a Pallas kernel a pass, or the better one for the device.
BACKENDS = ("auto", "xla", "pallas")

# Numbers in one row of a block, b times d: large enough to keep two cores busy with one step, small
# enough that w, u and the row stay in their private caches (measured: 2**13 to 2**18 and no limit).
_BLOCK_NUMBERS = 2**16

# What one step costs besides its numbers, in numbers; what a bucket must save, as a share of a pass without padding.
_STEP_NUMBERS, _BUCKET_SHARE = 1024, 0.02

# Sizes at which a bucket may end.
_CUTS = 48


class Group(Pytree):
    """The nodes of a device that a bucket holds, in blocks. Nodes to fill up the last block are inert."""

    node: Array | None  # [k b] which, m where there is none; None: all in their order
    blocks: int = static()  # k
    width: int = static()  # b

    def take(self, by_node: Array) -> Array:
        """Take the entries of these nodes: ``[m, ...]`` to ``[k, b, ...]``."""
        if self.node is None:
            fill = [(0, self.blocks * self.width - len(by_node))] + [(0, 0)] * (by_node.ndim - 1)
            mine = jnp.pad(by_node, fill)
        else:
            mine = by_node.at[self.node].get(mode="fill", fill_value=0)
        return mine.reshape(self.blocks, self.width, *by_node.shape[1:])

    def take_rows(self, by_row: Array, count: int) -> Array:
        """Take the first numbers of every row: ``[m, n]`` to ``[k, b, count]``."""
        if self.node is None:
            return self.take(by_row[:, :count])
        mine = by_row.at[self.node, :count].get(mode="fill", fill_value=0)
        return mine.reshape(self.blocks, self.width, count)

    def put(self, into: Array, mine: Array) -> Array:
        """The reverse, ``[k, b, ...]`` into ``[m, ...]``; of a row of numbers as many as there are."""
        mine = mine.reshape(-1, *mine.shape[2:])
        if self.node is None:
            return mine[: len(into)]
        if mine.ndim == 1:
            return into.at[self.node].set(mine, mode="drop")
        return into.at[self.node, : mine.shape[1]].set(mine, mode="drop")


class Bucket(Pytree):
    """The samples of a group of nodes: row i of a block of them together."""

    group: Group
    x: Array  # [k, n, b, d]
    y: Array  # [k, n, b]
    weight: Array  # [k, n, b]
    norm2: Array  # [k, n, b] squared length of each row
    samples: Array | None  # [k, b, n, d] the same as x, node by node; None: data.x is that already

    def take_rows(self, *by_row: Array) -> tuple[Array, ...]:
        """Take this bucket's part of numbers per row: each ``[m, n]`` to ``[k, b, n]``."""
        return tuple(self.group.take_rows(a, self.y.shape[1]) for a in by_row)


class TimeMajor(Layout):
    """The samples of all nodes, row by row."""

    buckets: tuple[Bucket, ...]
    backend: str = static(default="auto")  # see `BACKENDS`
    sharding: NodeSharding | None = static(default=None)  # where the nodes are; a bucket holds nodes of one device

    by_rows = True

    def node_predictions(self, x: Array, weights: Array) -> Array:
        return self._everywhere(_times, x, weights)

    def weighted_sums(self, x: Array, factors: Array) -> Array:
        return self._everywhere(_combine, x, factors)

    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        return each_device(self.sharding, lambda _, rows, x: _longest(rows, x), (), self, x)

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        return each_device(self.sharding, partial(_each_row, work), given, self, by_node, *by_row)

    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        return each_device(self.sharding, partial(_totals, terms), given, self, x, y, weight, weights, *rows)

    def _everywhere(self, work: Callable[[TimeMajor, Array, Array], Array], x: Array, by_node: Array) -> Array:
        return each_device(self.sharding, lambda _, *mine: work(*mine), (), self, x, by_node)


def _times(rows: TimeMajor, x: Array, weights: Array) -> Array:
    z = jnp.zeros(x.shape[:2], weights.dtype)
    for bucket in rows.buckets:
        if bucket.samples is None:
            return times(x, weights)
        z = bucket.group.put(z, times(bucket.samples, bucket.group.take(weights)))
    return z


def _combine(rows: TimeMajor, x: Array, factors: Array) -> Array:
    v = jnp.zeros((len(x), x.shape[2]), factors.dtype)
    for bucket in rows.buckets:
        if bucket.samples is None:
            return combine(x, factors)
        v = bucket.group.put(v, combine(bucket.samples, *bucket.take_rows(factors)))
    return v


def _longest(rows: TimeMajor, x: Array) -> Array:
    squared = jnp.zeros(len(x), rows.buckets[0].norm2.dtype)
    for bucket in rows.buckets:
        squared = bucket.group.put(squared, jnp.max(bucket.norm2, axis=1))
    return lengths(squared)


def _each_row(
    work: Callable[..., Array], given: Tree, rows: TimeMajor, by_node: tuple[Array, ...], first: Array, *more: Array
) -> Array:
    for bucket in rows.buckets:
        if bucket.samples is None:
            return work(given, by_node, first, *more)
        mine = tuple(map(bucket.group.take, by_node))
        # The first array is read and written in turns: the buckets are disjoint, and to keep the old one were a copy.
        first = bucket.group.put(first, work(given, mine, *bucket.take_rows(first, *more)))
    return first


def _totals(
    terms: Callable[..., Terms],
    given: Tree,
    rows: TimeMajor,
    x: Array,
    y: Array,
    weight: Array,
    weights: Array,
    *arrays: Array,
) -> Terms:
    found = None
    for bucket in rows.buckets:
        if bucket.samples is None:
            return totals(terms, given, x, y, weight, weights, *arrays)
        own = bucket.samples, *(jnp.swapaxes(a, 1, 2) for a in (bucket.y, bucket.weight))
        mine = totals(terms, given, *own, bucket.group.take(weights), *bucket.take_rows(*arrays))
        if found is None:
            found = jax.tree.map(lambda a: jnp.zeros(len(weights), a.dtype), mine)
        found = jax.tree.map(bucket.group.put, found, mine)
    return cast(Terms, found)


def time_major(data: TaskData, bucketing: BucketSizes = (), backend: str = "auto") -> TimeMajor:
    """Lay out the data for `ascend`: one transposition, done before the loops over rounds."""
    rows: TimeMajor = each_device(data.sharding, partial(_time_major, bucketing), (), data.x, data.y, data.weight)
    return rows.replace(backend=backend, sharding=data.sharding)


def _time_major(bucketing: BucketSizes, _: tuple[()], x: Array, y: Array, weight: Array) -> TimeMajor:
    if len(bucketing) < 2:
        return TimeMajor((_bucket(None, x, y, weight),))
    order, buckets, start = jnp.argsort(-extents(weight)), [], 0
    for count, rows in bucketing:
        buckets.append(_bucket(order[start : start + count], x[:, :rows], y[:, :rows], weight[:, :rows]))
        start += count
    return TimeMajor(tuple(buckets))


def _bucket(node: Array | None, x: Array, y: Array, weight: Array) -> Bucket:
    m, _, d = x.shape
    count = m if node is None else len(node)
    blocks = -(-count // max(_BLOCK_NUMBERS // d, 1))
    width = -(-count // blocks)
    if node is not None:
        node = jnp.pad(node, (0, blocks * width - count), constant_values=m)
    group = Group(node, blocks, width)
    samples = group.take(x)
    x, y, weight = (jnp.swapaxes(a, 1, 2) for a in (samples, group.take(y), group.take(weight)))
    norm2 = jnp.sum(x.astype(y.dtype) ** 2, axis=3)
    return Bucket(group, x, y, weight, norm2, None if node is None else samples)


def extents(weight: Array) -> Array:
    """TimeMajor up to the last real one of each node: weights ``[m, n]`` to ``[m]`` int32."""
    n = weight.shape[1]
    return jnp.max(jnp.where(weight > 0, jnp.arange(1, n + 1, dtype=jnp.int32), 0), axis=1, initial=0)


def bucket_sizes(data: TaskData) -> BucketSizes:
    """Choose which sizes to put together, so that padding costs little; one bucket where sizes are alike or unknown."""
    if isinstance(data.weight, jax.core.Tracer | jax.ShapeDtypeStruct):
        return ()
    devices = 1 if data.sharding is None else data.sharding.devices
    with jax.ensure_compile_time_eval():
        sizes = np.sort(fetched(extents(data.weight)).reshape(devices, -1), axis=1)
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
    fixed = _BUCKET_SHARE * float(sizes.sum()) * d
    best, cut = np.r_[0.0, np.full(len(tops), np.inf)], np.zeros(len(tops) + 1, int)
    for j in range(1, len(tops) + 1):
        cost = best[:j] + tops[j - 1] * ((below[j] - below[:j]) * d + _STEP_NUMBERS) + fixed
        cut[j], best[j] = int(np.argmin(cost)), cost.min()
    bucketing, j = [], len(tops)
    while j:
        bucketing.append((int(below[j] - below[cut[j]]), int(tops[j - 1])))
        j = cut[j]
    return tuple(bucketing)
