"""A pass over the rows as one kernel on an NVIDIA GPU, by Mosaic.

A program owns a tile of nodes and features that is spread over the registers of four warps; some neighbouring threads,
the lanes, share a node, so that its sum over features takes few exchanges. Features come in pieces, of which every lane
has one vector. Rows are asked for `depth` steps before they are used. Where the card has a unit for such copies
(Hopper, Blackwell), many nodes are at work and rows are of a size that it takes, it copies a row of all the program's
nodes into one of `depth` slots of shared memory, and what is in flight takes no registers. All other rows, of any
length, are loaded into registers.

Where nodes do not fill the last tile, or features the last piece, it begins earlier, and some are worked on twice, with
the same result. So nothing is padded, no read and no write needs a mask, and the duals that are written are an array of
their own.

Mosaic's other semantics, by warpgroup, take no fewer registers (118 and 96 for 116 and 96 at d = 64 and 10 on an H100,
JAX 0.12.0.1) and find no layout where one node has all four warps (d = 561): so it is by lane.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mocha_jax._core import mosaic
from mocha_jax._core.mosaic import BEFORE_HOPPER, THREADS, generation, load, store
from mocha_jax._node.kernel import Result, per_node, step
from mocha_jax.losses import Loss

if TYPE_CHECKING:
    from jax import Ref

_WARP = 32  # threads
_LOAD = 16  # bytes that a thread reads at once at most; a row that is copied begins at a multiple
_COPIED = 256  # features that one copy takes
_LONGEST = 4096  # features that a program holds without spilling registers
# Of a row a thread holds so many, and as many of w and of u, and of every row that is in flight in registers; with more
# lanes a node's own work is done more often.
_NUMBERS_COPIED, _NUMBERS = 16, 8
_KEPT = THREADS * 16  # longer rows leave no registers for w, which is read again every step, and for so many in flight
# So many fill a card; with fewer it is the length of a step that counts, and a copy waits longer than a load.
_PROGRAMS = 128

_WITH_COPIES = 9  # the generation of cards from which on rows can be copied

Matrix = tuple[Array, ...]  # pieces of a tile
Row = tuple[Array, Array, Array, Array, Array, Matrix]  # its place, labels, weights, squared lengths, duals and samples
Slot = tuple[Row, Array]  # a row, and the place of the one that comes next


class KernelProgram(NamedTuple):
    """The place of a tile in the registers of a program's threads."""

    nodes: int
    lanes: int  # threads that share a node
    vector: int  # features that a thread has side by side
    copied: bool  # rows by the unit for copies, or into registers

    @property
    def width(self) -> int:
        """Features of a piece."""
        return self.lanes * self.vector

    def starts(self, d: int) -> list[int]:
        """The first features of pieces."""
        return [min(start, d - self.width) for start in range(0, d, self.width)]


def fits(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Tell whether the kernel takes samples of this shape ``[n, m, d]``, on the card lowered for."""
    taken = shape[-1] <= _LONGEST and jnp.dtype(dtype).itemsize <= 4 and generation() is not None
    return taken and (BEFORE_HOPPER or program(shape, dtype).copied)


def program(
    shape: tuple[int, ...], dtype: DTypeLike, lanes: int | None = None, copied: bool | None = None
) -> KernelProgram:
    """Choose what is not given of a program for samples of this shape, on the card lowered for."""
    _, m, d = shape
    size = jnp.dtype(dtype).itemsize
    vector = (_LOAD if d <= _KEPT else _LOAD // 2) // size  # long rows find no four registers side by side
    while d % vector:  # rows begin at a multiple of what is loaded at once
        vector //= 2
    by_size = max(min(pl.next_power_of_2(pl.cdiv(d, _NUMBERS_COPIED)), _WARP // 2, _floor(d // vector)), 2)
    if copied is None:
        row = vector * size == _LOAD and d * size >= 2 * _LOAD and d <= _COPIED
        copied = row and m * by_size >= _PROGRAMS * THREADS and (generation() or 0) >= _WITH_COPIES
    if lanes is None and copied:
        lanes = by_size
    elif lanes is None:
        lanes = pl.next_power_of_2(pl.cdiv(d, _NUMBERS))
    lanes = min(lanes, THREADS, _floor(d))
    return KernelProgram(min(THREADS // lanes, _floor(m)), lanes, min(vector, _floor(d // lanes)), copied)


def rows_in_flight(d: int) -> int:
    """Rows that a program has asked for, where it is not given."""
    return 4 if d <= _KEPT else 2


def _floor(number: int) -> int:
    """The largest power of two that is not larger."""
    return pl.next_power_of_2(number + 1) // 2


def epoch(
    loss: Loss,
    *arrays: Array,
    lanes: int | None = None,
    depth: int | None = None,
    copied: bool | None = None,
    interpret: object = False,
) -> Result:
    """One pass over the rows of every node.

    Args:
      loss: see `mocha_jax._node.kernel`.
      *arrays: the other arguments, see there.
      lanes: threads that share a node, a power of two up to 128; a program has 128.
      depth: rows in flight.
      copied: whether rows are copied to shared memory, which not every card and not every row can be.
      interpret: how to interpret it on a CPU, where this version of JAX can.
    """
    x, y, weight, norm2, beta, w, q, steps, order, *earlier = arrays
    tile = program(x.shape, x.dtype, lanes, copied)
    depth = depth or rows_in_flight(x.shape[-1])
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (beta, w, steps)]
    slots = plgpu.SMEM((depth, tile.nodes, x.shape[-1]), x.dtype), plgpu.Barrier(num_barriers=depth)
    return tuple(
        plgpu.kernel(
            partial(_kernel, jax.tree.structure(loss), len(earlier), tile, depth),
            out_type=results,
            scratch_types=[*slots] if tile.copied else [],
            grid=(pl.cdiv(x.shape[1], tile.nodes),),
            grid_names=("tile",),
            # What is read and written at once is ordered below, by one barrier a row.
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            kernel_name="epoch_on_gpu_by_mosaic",
            **mosaic.interpreted(interpret),
        )(order, x, y, weight, norm2, beta, w, q, steps, *earlier, *per_node(loss, w))
    )


def _kernel(
    structure: jax.tree_util.PyTreeDef, earlier: int, tile: KernelProgram, depth: int, order: Ref, x: Ref, *refs: Ref
) -> None:
    """A pass of one tile; the arguments are references to whole arrays, and to the slots and their barriers.

    As in `kernel_triton` a slot is filled again as soon as its row is used. A row that is under way stays in its
    registers: to copy it were to wait for it.
    """
    y, weight, norm2, beta, w, q, steps, *more = refs
    count = earlier + structure.num_leaves
    before, hyperparameters, (beta_out, u_out, done_out, *slots_arrived) = (
        more[:earlier], more[earlier:count], more[count:],
    )  # fmt: skip
    n, m, d = x.shape
    first = jnp.minimum(lax.axis_index("tile") * tile.nodes, m - tile.nodes)
    nodes, starts = pl.ds(first, tile.nodes), tile.starts(d)
    matrix = mosaic.layout(tile.lanes, tile.vector, tile.nodes)
    row, shape = matrix.reduce(1), (tile.nodes, tile.width)
    overlap = len(starts) * tile.width - d  # features of the last piece that the one before has too

    def pieces(ref: Ref, at: tuple[object, ...] = (nodes,)) -> Matrix:
        return tuple(load(ref.at[*at, pl.ds(start, tile.width)], matrix) for start in starts)

    def wide(numbers: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(numbers, shape, (0,)), matrix)

    def total(products: Matrix) -> Array:
        *others, last = products
        if overlap:
            last = jnp.where(new, last, 0)
        return mosaic.total(reduce(add, others, last), 1, len(starts) * tile.vector)

    def place(k: Array | int) -> Array:
        return order[jnp.minimum(k, n - 1)]

    def copy(i: Array, slot: int) -> None:
        """Begin to copy a row."""
        slots, arrived = slots_arrived
        plgpu.copy_gmem_to_smem(x.at[i, nodes], slots.at[slot], arrived.at[slot])

    def look_up(i: Array) -> Row:
        y_i, c_i, norm2_i, beta_i = (load(ref.at[i, nodes], row) for ref in (y, weight, norm2, beta))
        return i, y_i, c_i, norm2_i, beta_i, () if tile.copied else pieces(x, (i, nodes))

    def turn(t: Array, carry: tuple[Matrix, Array, list[Slot]]) -> tuple[Matrix, Array, list[Slot]]:
        moved, spent, rows = carry
        filled = []
        for j, ((i, y_i, c_i, norm2_i, beta_i, x_i), upcoming) in enumerate(rows):
            k = t * depth + j
            if tile.copied:
                slots, arrived = slots_arrived
                plgpu.barrier_wait(arrived.at[j])
                x_i = pieces(slots, (j, slice(None)))

                @pl.when(t < turns - 1)
                def _(upcoming: Array = upcoming, j: int = j) -> None:
                    plgpu.commit_smem()  # all warps have read the slot
                    copy(upcoming, j)

            if n % depth:  # the last turn is not full
                c_i = jnp.where(k < n, c_i, 0)
            beta_i, moved, spent = step(
                loss, total, wide, x_i, y_i, c_i, norm2_i, beta_i, start or pieces(w), curvature, moved, spent, budget
            )

            @pl.when(k < n)
            def _(i: Array = i, beta_i: Array = beta_i) -> None:
                store(beta_out.at[i, nodes], beta_i)

            filled.append((look_up(upcoming), place(k + 2 * depth)))
        return moved, spent, filled

    if overlap:
        new = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), matrix) >= overlap
    start, curvature, budget = pieces(w) if d <= _KEPT else (), load(q.at[nodes], row), load(steps.at[nodes], row)
    loss = jax.tree.unflatten(structure, [load(h.at[nodes], row) for h in hyperparameters])
    turns, rows = pl.cdiv(n, depth), []
    for j in range(depth):
        first_row = place(j)
        if tile.copied:
            copy(first_row, j)
        rows.append((look_up(first_row), place(depth + j)))
    if before:
        moved, spent = pieces(before[0]), load(before[1].at[nodes], row)
    else:
        moved = tuple(plgpu.layout_cast(jnp.zeros(shape, w.dtype), matrix) for _ in starts)
        spent = plgpu.layout_cast(jnp.zeros(tile.nodes, steps.dtype), row)
    moved, spent, _ = lax.fori_loop(np.int32(0), np.int32(turns), turn, (moved, spent, rows))
    for piece, begin in zip(moved, starts, strict=True):
        store(u_out.at[nodes, pl.ds(begin, tile.width)], piece)
    store(done_out.at[nodes], spent)
