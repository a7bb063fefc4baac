r"""Samples dealt over nodes of few rows: what depends on sums over samples alone needs no padding to the largest node.

Padded to the largest node, m nodes cost m n_max whatever they hold. Gradients and Hessians are sums over samples, so a
node may as well be several that share its task, each with a part of its rows: $\sum_t\lceil n_t/r\rceil$ nodes of r
rows. The number of rows is a static choice (`dealt_sizes`), made where sizes are known; which rows a part has follows
from the data. Coordinate ascent, whose steps follow one another, has buckets instead (`mocha_jax._node.buckets`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.devices import beside, namespace_of, on_host
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._data.layouts import AsStored, Layout, NodeByNode
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import BucketSizes, extents
from mocha_jax._problem.problem import Problem

# A part costs what so many rows more would: its matrix is added to the others of its task. Measured at 10 to 101
# features.
_PART_ROWS = 8

# What dealing must save: a share of the rows, and at least so many numbers.
_LEAST_SHARE, _LEAST_NUMBERS = 0.15, 2**19

# The number of parts is rounded up to so many binary digits, so that data of similar sizes share programs.
_DIGITS = 4

_FEWEST_ROWS = 16


class Places(Pytree):
    """The places of rows of nodes in parts, and the reverse."""

    node: Array  # [b] int32 of which node the rows of each part are
    begin: Array  # [b] int32 the first of them there
    first: Array  # [m] int32 the first part of each node
    extent: Array  # [m] int32 rows of each node, up to the last real one


# Places, the numbers of samples of the nodes, and the arrays of the parts.
_Parts = tuple[Places, Array, Array, Array, Array, Array]


class Dealt(NodeByNode):
    """The samples of all nodes, and beside them the same on nodes of few rows."""

    data: TaskData  # the parts: nodes ``[b, r]`` that share tasks
    places: Places
    counts: Array  # [m] int32 real samples of each node
    rows: int = static()  # n, to which the nodes are padded

    def sizes(self, weight: Array) -> Array:
        return self.counts

    def deal(self, by_row: Array, fill: float | np.ndarray = 0.0) -> Array:
        """Deal what is per row: ``[m, n, ...]`` to ``[b, r, ...]``, with `fill` where no sample is."""
        return _dealt(self.data.y.shape[1], fill, self.places, by_row)

    def gather(self, by_row: Array, fill: float | np.ndarray = 0.0) -> Array:
        """The reverse of `deal`."""
        return _gathered(self.rows, fill, self.places, by_row)


def to_parts(layout: Layout, by_node: Array) -> Array:
    """Give each part its node's entry, ``[m, ...]`` to ``[b, ...]``, where rows are dealt."""
    return by_node[layout.places.node] if isinstance(layout, Dealt) else by_node


def add_parts(layout: Layout, by_part: Array) -> Array:
    """Add up the parts of each node, ``[b, ...]`` to ``[m, ...]``, where rows are dealt."""
    if not isinstance(layout, Dealt):
        return by_part
    return jax.ops.segment_sum(by_part, layout.places.node, len(layout.places.first))


def deal(data: TaskData, sizes: BucketSizes) -> TaskData:
    """Lay out the data so, over as many parts and of as many rows as `dealt_sizes` has chosen."""
    [(count, rows)] = sizes
    x = data.x
    if isinstance(data.layout, AsStored) and data.layout.rows is not None:
        x = jnp.swapaxes(data.layout.rows[0], 0, 1)
    arrays = x, data.y, data.weight, data.task
    if views := on_host(data.x, *arrays[1:]):  # where there is nothing to compile
        places, counts, *dealt = beside(data.x, jax.device_put(_parts(count, rows, *views)))
    else:
        places, counts, *dealt = _parts(count, rows, *arrays)
    x, y, weight, task = dealt
    parts = data.exchange(x=x, y=y, weight=weight, task=task, shared=True, layout=AsStored())
    return data.exchange(layout=Dealt(parts, places, counts, data.y.shape[1]))


def of_parts(problem: Problem) -> Problem:
    """Return the problem on the parts over which its samples are dealt; where they are not, the problem itself."""
    layout = problem.data.layout
    return problem.exchange(data=layout.data) if isinstance(layout, Dealt) else problem


def _parts(count: int, rows: int, x: Array, y: Array, weight: Array, task: Array) -> _Parts:
    xp = namespace_of(weight)
    extent = extents(weight)
    parts = -(-extent // np.int32(rows))
    last = xp.cumsum(parts, dtype=np.int32)
    first, number = last - parts, xp.arange(count, dtype=np.int32)
    # Those beyond the last one begin behind all rows of the last node.
    node = xp.minimum(xp.searchsorted(last, number, side="right").astype(np.int32), np.int32(len(extent) - 1))
    places = Places(node, (number - first[node]) * np.int32(rows), first, extent)
    counts = xp.sum(weight > 0, axis=1, dtype=np.int32)
    x, weight = (_dealt(rows, 0.0, places, a) for a in (x, weight))
    return places, counts, x, _dealt(rows, None, places, y), weight, task[node]


def _dealt(rows: int, fill: float | np.ndarray | None, places: Places, by_row: Array) -> Array:
    row = places.begin[:, None] + np.arange(rows, dtype=np.int32)[None, :]
    xp = namespace_of(by_row)
    taken = _at(by_row, places.node[:, None], xp.minimum(row, np.int32(by_row.shape[1] - 1)))
    return taken if fill is None else _where(row < places.extent[places.node][:, None], taken, fill)


def _gathered(rows: int, fill: float | np.ndarray, places: Places, by_row: Array) -> Array:
    part, place = np.divmod(np.arange(rows, dtype=np.int32), np.int32(by_row.shape[1]))
    last = np.int32(len(by_row) - 1)
    taken = _at(by_row, jnp.minimum(places.first[:, None] + part[None, :], last), place[None, :])
    return _where(jnp.arange(rows, dtype=jnp.int32)[None, :] < places.extent[:, None], taken, fill)


def _at(array: Array, i: Array, j: Array | np.ndarray) -> Array:
    if not isinstance(array, np.ndarray):
        return array.at[i, j].get(mode="promise_in_bounds")
    m, n, *rest = array.shape  # to take along one axis is faster
    if array.flags.c_contiguous:
        return np.take(array.reshape(m * n, *rest), i.astype(np.intp) * n + j, axis=0)
    return np.take(np.swapaxes(array, 0, 1).reshape(m * n, *rest), j.astype(np.intp) * m + i, axis=0)


def _where(there: Array, taken: Array, fill: float | np.ndarray) -> Array:
    if isinstance(taken, np.ndarray):
        taken[~there] = fill
        return taken
    return jnp.where(there[(..., *[None] * (taken.ndim - 2))], taken, np.asarray(fill, taken.dtype))


def dealt_sizes(data: TaskData) -> BucketSizes:
    """Choose how many parts there are, and their rows; () where that saves little or sizes are unknown.

    On one CPU: there the parts of a task are added up in order. Other machines have time for padding, and many of them
    would add in an order that changes.
    """
    m, n, d = data.x.shape
    padded = m * (n + _PART_ROWS)
    # With fewer rows than features the systems are of the size of the rows, and there is one for every node.
    wide = n < d and not data.shared
    if wide or padded * d <= _LEAST_NUMBERS or isinstance(data.weight, jax.ShapeDtypeStruct):
        return ()
    if not (views := on_host(data.weight)):  # traced, elsewhere, or on several devices
        return ()
    extent = extents(views[0])
    choices = [(_count(extent, rows), rows) for rows in _rows_of_parts(n, d)]
    if not choices:
        return ()
    count, rows = min(choices, key=lambda choice: choice[0] * (choice[1] + _PART_ROWS))
    saved = padded - count * (rows + _PART_ROWS)
    return ((count, rows),) if saved * d > _LEAST_NUMBERS and saved > _LEAST_SHARE * padded else ()


def _rows_of_parts(n: int, d: int) -> list[int]:
    """Powers of two; of a part's matrix no more than twice as many numbers as of its samples."""
    fewest = max(_FEWEST_ROWS, d // 2)
    return [2**i for i in range(n.bit_length()) if fewest <= 2**i < n]


def _count(extent: Array, rows: int) -> int:
    """Return the number of parts, rounded up."""
    count = max(int((-(-extent // rows)).sum()), 1)
    unit = 2 ** max(count.bit_length() - _DIGITS, 0)
    return -(-count // unit) * unit
