"""A step of the weighing as one kernel by Mosaic, on a GPU of Ampere's generation or later.

A program owns a tile of nodes, and goes through their vectors twice, some features at a time: for what the nodes are
asked, and for the way that they go. What is between, every node's quadratic program, is done by all threads of a node,
each for itself. The second time the vectors come from the first cache: held in registers meanwhile they would leave
none for the program.

Where nodes do not fill the last tile it begins earlier, and some nodes are worked on twice, with the same result. So no
access needs a mask, and only sums over nodes have to tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mocha_jax._core import mosaic
from mocha_jax._core.mosaic import THREADS, load, spread, store
from mocha_jax.servers._quadratic_programs import Programs, answer, total
from mocha_jax.servers._quadratic_programs_kernels import KernelPlan

if TYPE_CHECKING:
    from jax import Ref

Features = slice | pl.Slice  # some of all features
Carry = TypeVar("Carry")

# Numbers of all points' vectors that a thread works on at once; and of one vector in all, if others can share its node.
_AT_ONCE, _OF_A_LANE = 40, 16

# Threads that take some features side by side add no more features than that share.
_ADDED = 0.25

# Rows of others, or tiles of them, that are asked for at once.
_ROWS = 4

# Arguments of the first step, which takes nothing from an earlier one; its results, and what is kept between passes.
_GIVEN, _MADE = 4, 5


def is_for_this_card() -> bool:
    """Tell whether the kernel is known to compile for the card that a program is lowered for."""
    return mosaic.generation() is not None


def plan(m: int, d: int, p: int) -> KernelPlan:
    """Choose so many nodes a program that there are more programs: their sums are rows of a tile to the next step."""
    lanes = 2
    while lanes < THREADS and (lanes * _OF_A_LANE < d or (THREADS // lanes) ** 2 > m):
        lanes *= 2
    widths = {vector: pl.cdiv(d, lanes * vector) * lanes * vector for vector in (4, 2)}
    vector = next((vector for vector, width in widths.items() if width <= (1.0 + _ADDED) * d), 1)
    parts = pl.cdiv(d, lanes * vector)
    turns = pl.cdiv(parts, max(_AT_ONCE // (vector * p), 1))
    at_once = lanes * vector * pl.cdiv(parts, turns)
    return KernelPlan(THREADS // lanes, pl.cdiv(d, at_once) * at_once, lanes, vector, at_once)


@partial(jax.jit, static_argnums=(0, 1, 2))
def step(plan: KernelPlan, relaxation: float | None, interpret: object, *arrays: Array) -> list[Array]:
    """See `mocha_jax.servers._quadratic_programs_kernels.Kernel`."""
    m, p, width = arrays[0].shape
    count, first = pl.cdiv(m, plan.nodes), len(arrays) == _GIVEN
    shapes = (m, width), (m, p), (count, width), *([(m, p * (p + 1) // 2)] if first else [])
    return plgpu.kernel(
        partial(_kernel, plan, relaxation),
        out_type=[jax.ShapeDtypeStruct(shape, arrays[0].dtype) for shape in shapes],
        scratch_types=[plgpu.SMEM((plan.nodes, width), arrays[0].dtype)],
        grid=(count,),
        grid_names=("tile",),
        compiler_params=mosaic.parameters(plan.at_once // plan.lanes),
        kernel_name="weigh_on_gpu",
        **mosaic.interpreted(interpret),
    )(*arrays)


def _kernel(
    plan: KernelPlan, relaxation: float | None, along: Ref, slope: Ref, free: Ref, stiffness: Ref, *refs: Ref
) -> None:
    """A step of a tile; the arguments are references to whole arrays, and to what is kept from one pass to the next."""
    (m, p, width), nodes, first_step = along.shape, plan.nodes, len(refs) == _MADE
    points, layout = range(p), mosaic.layout(plan.lanes, plan.vector)
    of_node, of_feature = layout.reduce(1), layout.reduce(0)
    program = lax.axis_index("tile")
    first = jnp.minimum(program * nodes, m - nodes)
    tile, all_nodes = pl.ds(first, nodes), pl.ds(0 * first, nodes)
    size = plan.at_once
    line = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (nodes, size), 0), layout)

    def wide(numbers: Array) -> Array:
        return spread(numbers, (nodes, size), 0, layout)

    def along_features(row: Array) -> Array:
        return spread(row, (nodes, size), 1, layout)

    def numbers(ref: Ref) -> Array:
        if ref.shape[0] == 1:
            return plgpu.layout_cast(jnp.full((nodes,), ref[0]), of_node)
        return load(ref.at[tile], of_node)

    def by_point(ref: Ref) -> list[Array]:
        return [load(ref.at[tile, j], of_node) for j in range(ref.shape[1])]

    def vector(j: int, some: Features) -> Array:
        return load(along.at[tile, j, some], layout)

    def by_features(work: Callable[[Features, Carry], Carry], carry: Carry) -> Carry:
        """Go through some features after the other."""

        def turn(k: Array | int, carry: Carry) -> Carry:
            return work(pl.ds(k * size, size), carry)

        return _turns(width // size, turn, carry)

    def against(z: Callable[[Features], Array], count: int) -> list[Array]:
        """Products of the first points' vectors with one of every node, times the stiffness."""

        def add(some: Features, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            factor = z(some)
            return tuple(each + vector(j, some) * factor for j, each in enumerate(sums))

        sums = by_features(add, (mosaic.zeros((nodes, size), layout),) * count)
        return [numbers(stiffness) * mosaic.total(each, 1, size // plan.lanes) for each in sums]

    def added_up(rows: Ref, some: Features) -> Array:
        """The sum of some rows, one or at least a tile of them."""
        count = rows.shape[0]
        if count == 1:
            return load(rows.at[0, some], of_feature)

        def add(t: Array | int, sums: Array) -> Array:
            for k in range(_ROWS):
                begin = (t * _ROWS + k) * nodes
                start = jnp.minimum(begin, count - nodes)
                some_rows = load(rows.at[pl.ds(start, nodes), some], layout)
                sums = sums + jnp.where(line >= begin - start, some_rows, 0.0)
            return sums

        none = mosaic.zeros((nodes, size), layout)
        return jnp.sum(_turns(pl.cdiv(count, nodes * _ROWS), add, none), axis=0)

    def mixed(rows: Ref, mix: Ref, some: Features) -> Array:
        """Mix rows, a few at a time."""
        if mix.shape == (1, 1):
            return mix[0, 0] * along_features(added_up(rows, some))
        count = rows.shape[0]

        def add(t: Array | int, sums: Array) -> Array:
            for k in range(_ROWS):
                row = jnp.minimum(t * _ROWS + k, count - 1)
                much = load(mix.at[tile, row], of_node)
                if count % _ROWS:
                    much = jnp.where(t * _ROWS + k < count, much, 0.0)
                sums = sums + wide(much) * along_features(load(rows.at[row, some], of_feature))
            return sums

        return _turns(pl.cdiv(count, _ROWS), add, mosaic.zeros((nodes, size), layout))

    if first_step:
        h_out, a_out, sums_out, gram_out, kept = refs
        products = [product for i in points for product in against(partial(vector, i), i + 1)]
        for k, product in enumerate(products):
            store(gram_out.at[tile, k], product)
        weights = asked = [mosaic.zeros((nodes,), of_node)] * p
    else:
        gram_in, h_in, a_in, scale, rows, *mix, h_out, a_out, sums_out, kept = refs
        own = numbers(scale)

        def way(some: Features) -> Array:
            """Work out what the nodes are to go against; keep where they are without their answer."""
            h = load(h_in.at[tile, some], layout)
            others = mixed(rows, mix[0], some) if mix else load(rows.at[tile, some], layout)
            pulled = wide(own) * h + others
            if relaxation is not None:
                store(kept.at[all_nodes, some], h - relaxation * (h - pulled))
            return h - 2.0 * pulled

        asked = against(way, p)
        products, weights = by_point(gram_in), by_point(a_in)
    gram = tuple(tuple(products[i * (i + 1) // 2 :][: i + 1]) for i in points)
    new_weights = answer(Programs(tuple(by_point(slope)), gram, numbers(free)), asked, weights)
    for j, weight in enumerate(new_weights):
        store(a_out.at[tile, j], weight)

    def go(some: Features, nothing: np.int32) -> np.int32:
        after = total(wide(weight) * vector(j, some) for j, weight in enumerate(new_weights))
        if relaxation is not None:
            after = relaxation * after
            if not first_step:
                after = after + load(kept.at[all_nodes, some], layout)
        store(h_out.at[tile, some], after)
        # Those that an earlier tile has count there.
        new = jnp.where(line >= program * nodes - first, after, 0.0) if m % nodes else after
        store(sums_out.at[program, some], mosaic.total(new, 0, 1))
        return nothing

    by_features(go, np.int32(0))


def _turns(count: int, turn: Callable[[Array | int, Carry], Carry], carry: Carry) -> Carry:
    """Go so many turns; a single one is no loop."""
    return turn(0, carry) if count == 1 else lax.fori_loop(np.int32(0), np.int32(count), turn, carry)
