"""A pass over the rows as one kernel on a GPU of Hopper's generation or later, by Mosaic.

A program owns a tile of nodes and features that is spread over the registers of four warps; some neighbouring threads,
the lanes, share a node, so that its sum over features takes few exchanges. The rows of X come by the tensor memory
accelerator: a copy takes a row of all the program's nodes into one of `depth` slots of shared memory, so what is in
flight takes no registers. Programs are few and large, and all nodes of a usual problem are at work at once.

Where nodes do not fill the last tile it begins earlier, and some nodes are worked on twice, with the same result. So
no write needs a mask, and the duals that are written are an array of their own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mocha_jax._core.mosaic import TYPE, load, on_this_card, store
from mocha_jax._node.kernel import Result, per_node, step
from mocha_jax.losses import Loss

if TYPE_CHECKING:
    from jax import Ref

_THREADS, _WARP = 128, 32  # of a program
_LOAD = 16  # bytes that a thread reads of shared memory at once; a row in memory begins at a multiple
_LONGEST = 256  # features that one copy takes
# Of a row a thread holds so many, and as many of w and of u; with more lanes a node's own work is done more often.
_NUMBERS = 16
# So many fill a card; with fewer it is the length of a step that counts, and small programs spread better.
_PROGRAMS = 128

Row = tuple[Array, ...]  # its place, labels, weights, squared lengths and duals
Slot = tuple[Row, Array]  # a row, and the place of the one that comes next


def fits(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Tell whether the kernel is the one to take samples of this shape ``[n, m, d]``, on the card lowered for."""
    n, m, d = shape
    size = jnp.dtype(dtype).itemsize
    row = d * size % _LOAD == 0 and d * size >= 2 * _LOAD and d <= _LONGEST and size <= 4
    return row and n * m < 2**31 and m * _lanes(d, size) >= _PROGRAMS * _THREADS and on_this_card()


def _lanes(d: int, size: int) -> int:
    """Choose the threads that share a node."""
    lanes = pl.next_power_of_2(pl.cdiv(d, _NUMBERS))
    return max(min(lanes, _WARP // 2, pl.next_power_of_2(d * size // _LOAD + 1) // 2), 2)


def program(d: int, size: int, lanes: int | None = None) -> tuple[int, int, int]:
    """Nodes and features of a tile, and lanes where they are not given; a number of X has so many bytes."""
    lanes = lanes or _lanes(d, size)
    whole = lanes * _LOAD // size
    return _THREADS // lanes, pl.cdiv(d, whole) * whole, lanes


def epoch(
    loss: Loss,
    *arrays: Array,
    lanes: int | None = None,
    depth: int = 4,
    interpret: Any = False,
) -> Result:
    """One pass over the rows of every node.

    Args:
      loss: see `mocha_jax._node.kernel`.
      *arrays: the other arguments, see there.
      lanes: threads that share a node, a power of two from 2 to 16; a program has 128.
      depth: rows in flight.
      interpret: how to interpret it on a CPU, where this version of JAX can.
    """
    x, y, weight, norm2, beta, w, q, steps, order, *earlier = arrays
    n, m, d = x.shape
    nodes, width, lanes = program(d, x.dtype.itemsize, lanes)
    enough = max(m, nodes)

    def numbers(a: Array) -> Array:
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, enough - m)])

    def matrix(a: Array) -> Array:
        return jnp.pad(a, [(0, enough - m), (0, width - d)])

    of_node = [numbers(a) if a.ndim == 1 else matrix(a) for a in (q, steps, *earlier, *per_node(loss, w))]
    of_row = [numbers(a) for a in (y, weight, norm2, beta)]
    results = [((n, enough), beta.dtype), ((enough, width), w.dtype), ((enough,), steps.dtype)]
    options: dict[str, Any] = {
        f"out_{TYPE}": [jax.ShapeDtypeStruct(*result) for result in results],
        f"scratch_{TYPE}s": [plgpu.SMEM((depth, nodes, width), x.dtype), plgpu.Barrier(num_barriers=depth)],
    }
    if interpret:
        options["interpret"] = interpret
    new, moved, spent = plgpu.kernel(
        partial(_kernel, jax.tree.structure(loss), len(earlier), _layout(lanes, _LOAD // x.dtype.itemsize), m),
        grid=(pl.cdiv(m, nodes),),
        grid_names=("tile",),
        # What is read and written at once is ordered below, by one barrier a row.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="epoch_on_gpu_by_mosaic",
        **options,
    )(order, x.reshape(n * m, d), *of_row, matrix(w), *of_node)
    return new[:, :m], moved[:m, :d], spent[:m]


def _layout(lanes: int, vector: int) -> Any:
    """A matrix of nodes and features over warps, threads and registers, `vector` features of one node side by side."""
    program, warp = (threads // lanes for threads in (_THREADS, _WARP))
    tiling = plgpu.Tiling(((program, lanes * vector), (warp, lanes * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _kernel(
    structure: jax.tree_util.PyTreeDef, earlier: int, layout: Any, m: int, order: Ref, x: Ref, *refs: Ref
) -> None:
    """A pass of one tile; the arguments are references to whole arrays, the slots and their barriers.

    As in `kernel_gpu` a slot is filled again as soon as its row is used, and what is on its way stays in its registers:
    to copy it were to wait for it.
    """
    y, weight, norm2, beta, w, q, steps, *more, beta_out, u_out, done_out, slots, arrived = refs
    before, hyperparameters = more[:earlier], more[earlier:]
    (n, enough), (depth, nodes, width) = y.shape, slots.shape
    first = jnp.minimum(lax.axis_index("tile") * nodes, enough - nodes)
    tile, features = pl.ds(first, nodes), pl.ds(0 * first, width)  # a static slice could not be wider than the array
    row = layout.reduce(1)

    def wide(numbers: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(numbers, (nodes, width), (0,)), layout)

    def total(matrix: Array) -> Array:
        return jnp.sum(matrix, axis=1)

    def place(k: Array | int) -> Array:
        return order[jnp.minimum(k, n - 1)]

    def fetch(i: Array, slot: Array | int) -> None:
        """Begin to copy a row; what lies beyond the last node or feature becomes 0, or is another node's."""
        plgpu.copy_gmem_to_smem(x.at[pl.ds(i * m + first, nodes), features], slots.at[slot], arrived.at[slot])

    def look_up(i: Array) -> Row:
        return i, *(load(ref.at[i, tile], row) for ref in (y, weight, norm2, beta))

    start, curvature, budget = load(w.at[tile], layout), load(q.at[tile], row), load(steps.at[tile], row)
    loss = jax.tree.unflatten(structure, [load(h.at[tile], row) for h in hyperparameters])

    def turn(t: Array, carry: tuple[Array, Array, list[Slot]]) -> tuple[Array, Array, list[Slot]]:
        moved, spent, rows = carry
        filled = []
        for j, ((i, y_i, c_i, norm2_i, beta_i), upcoming) in enumerate(rows):
            k = t * depth + j
            plgpu.barrier_wait(arrived.at[j])
            x_i = load(slots.at[j], layout)

            @pl.when(t < turns - 1)
            def _(upcoming: Array = upcoming, j: int = j) -> None:
                plgpu.commit_smem()  # all warps have read the slot
                fetch(upcoming, j)

            if n % depth:  # the last turn is not full
                c_i = jnp.where(k < n, c_i, 0)
            beta_i, moved, spent = step(
                loss, total, wide, x_i, y_i, c_i, norm2_i, beta_i, start, curvature, moved, spent, budget
            )

            @pl.when(k < n)
            def _(i: Array = i, beta_i: Array = beta_i) -> None:
                store(beta_out.at[i, tile], beta_i)

            filled.append((look_up(upcoming), place(k + 2 * depth)))
        return moved, spent, filled

    turns, rows = pl.cdiv(n, depth), []
    for j in range(depth):
        first_row = place(j)
        fetch(first_row, j)
        rows.append((look_up(first_row), place(depth + j)))
    if before:
        moved, spent = load(before[0].at[tile], layout), load(before[1].at[tile], row)
    else:
        moved = plgpu.layout_cast(jnp.zeros((nodes, width), w.dtype), layout)
        spent = plgpu.layout_cast(jnp.zeros((nodes,), steps.dtype), row)
    moved, spent, _ = lax.fori_loop(np.int32(0), np.int32(turns), turn, (moved, spent, rows))
    store(u_out.at[tile], moved)
    store(done_out.at[tile], spent)
