"""A pass over the rows as one Triton kernel on a GPU, only with JAX 0.10 and where Mosaic does not support it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from mocha_jax._node.kernel import Result, per_node, step
from mocha_jax.losses import Loss

if TYPE_CHECKING:
    from jax import Ref

_LONGEST = 4096  # features that a program holds without spilling registers

# Short rows are put together until a thread has four of their numbers, long ones divided until it has eight: it also
# holds as many of w, of u and of every row in flight. More nodes of a warp exchange theirs through shared memory.
_NUMBERS_TOGETHER, _NUMBERS_OF_A_WARP = 2**7, 2**8
_NODES_OF_A_WARP = 2**3
_WARPS = 2**4  # of a program at most; they share 2**16 registers


Found = tuple[Array, Array]  # a row's number and its weights
Slot = tuple[Found, tuple[Array, ...], Found]  # a row, what is read of it, and the row that comes next


def fits(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Tell whether the kernel takes samples of this shape ``[n, m, d]``."""
    del dtype
    return shape[-1] <= _LONGEST


def program(d: int, nodes: int | None = None, warps: int | None = None) -> tuple[int, int]:
    """Choose the nodes and warps of a program, where they are not given."""
    width = pl.next_power_of_2(d)
    nodes = nodes or max(min(_NUMBERS_TOGETHER // width, _NODES_OF_A_WARP), 1)
    return nodes, warps or max(min(nodes * width // _NUMBERS_OF_A_WARP, _WARPS), 1)


def epoch(
    loss: Loss,
    *arrays: Array,
    nodes: int | None = None,
    warps: int | None = None,
    depth: int = 4,
    interpret: bool = False,
) -> Result:
    """One pass over the rows of every node.

    Args:
      loss: see `mocha_jax._node.kernel`.
      *arrays: the other arguments, see there.
      nodes: nodes of one program, a power of two.
      warps: warps of one program, a power of two; several meet in shared memory at every step.
      depth: rows in flight.
      interpret: run as plain JAX.
    """
    x, y, weight, norm2, beta, w, q, steps, order, *earlier = arrays
    _, m, d = x.shape
    width = pl.next_power_of_2(d)  # Triton's arrays have no other sizes; what is beyond d is masked
    nodes, warps = program(d, nodes, warps)
    inputs = order, x, y, weight, norm2, beta, w, q, steps, *earlier, *per_node(loss, w)
    return pl.pallas_call(
        partial(_kernel, jax.tree.structure(loss), len(earlier), nodes, width, depth),
        out_shape=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (beta, w, steps)),
        grid=(pl.cdiv(m, nodes),),
        compiler_params=pltriton.CompilerParams(num_warps=warps),
        interpret=interpret,
        name="epoch_on_gpu",
    )(*inputs)


def _kernel(
    structure: jax.tree_util.PyTreeDef, earlier: int, nodes: int, width: int, depth: int, order: Ref, x: Ref, *refs: Ref
) -> None:
    """A pass of a few nodes; the arguments are references to whole arrays.

    Each of `depth` slots holds one row. As soon as a row is used its slot is filled again, with the row that will
    be used `depth` steps later: a load has that long to arrive, and, since a slot is never copied, stays in the same
    registers. The row's number and weight came one turn before, so that no load waits for another one, and of rows
    that will not be visited (padding, or the budget spent) nothing is read but the duals, which stay as they are.
    """
    y, weight, norm2, beta, w, q, steps, *more, beta_out, u_out, done_out = refs
    before, hyperparameters = more[:earlier], more[earlier:]
    n, m, d = x.shape

    # Numbers of the nodes have one axis and are widened where they meet features, no sooner.
    def wide(numbers: Array) -> Array:
        return numbers[:, None]

    def total(matrix: Array) -> Array:
        return jnp.sum(matrix, axis=1)

    node = pl.program_id(0) * nodes + lax.iota(jnp.int32, nodes)
    feature = lax.iota(jnp.int32, width)[None]
    real = node < m
    inside = wide(real) & (feature < d)

    def of_node(ref: Ref) -> Array:
        return pltriton.load(ref.at[node], mask=real, other=0)

    def matrix(ref: Ref) -> Array:
        return pltriton.load(ref.at[wide(node), feature], mask=inside, other=0)

    def look_up(k: Array) -> Found:
        i = pltriton.load(order.at[k], mask=k < n, other=0)
        return i, pltriton.load(weight.at[i, node], mask=real & (k < n), other=0)

    def fetch(found: Found, done: Array) -> tuple[Array, ...]:
        i, c_i = found
        wanted = (c_i > 0) & (done < budget)
        y_i, norm2_i = (pltriton.load(ref.at[i, node], mask=wanted, other=0) for ref in (y, norm2))
        beta_i = pltriton.load(beta.at[i, node], mask=real, other=0)
        return pltriton.load(x.at[i, wide(node), feature], mask=wide(wanted) & inside, other=0), y_i, norm2_i, beta_i

    def turn(t: Array, carry: tuple[Array, Array, tuple[Slot, ...]]) -> tuple[Array, Array, tuple[Slot, ...]]:
        u, done, slots = carry
        filled = []
        for j, ((i, c_i), (x_i, y_i, norm2_i, beta_i), upcoming) in enumerate(slots):
            beta_i, u, done = step(loss, total, wide, x_i, y_i, c_i, norm2_i, beta_i, start, curvature, u, done, budget)
            pltriton.store(beta_out.at[i, node], beta_i, mask=real & (t * depth + j < n))
            filled.append((upcoming, fetch(upcoming, done), look_up((t + 2) * depth + j)))
        return u, done, tuple(filled)

    start, curvature, budget = matrix(w), of_node(q), of_node(steps)
    loss = jax.tree.unflatten(structure, [of_node(h) for h in hyperparameters])
    moved, spent = jnp.zeros_like(start), jnp.zeros_like(budget)
    if before:
        moved, spent = matrix(before[0]), of_node(before[1])
    slots = []
    for j in range(depth):
        first = look_up(jnp.int32(j))
        slots.append((first, fetch(first, spent), look_up(jnp.int32(depth + j))))
    turns = pl.cdiv(n, depth)
    moved, spent, _ = lax.fori_loop(np.int32(0), np.int32(turns), turn, (moved, spent, tuple(slots)))
    pltriton.store(u_out.at[wide(node), feature], moved, mask=inside)
    pltriton.store(done_out.at[node], spent, mask=real)
