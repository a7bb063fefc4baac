r"""One pass of the local solver as one kernel, for accelerators.

The kernel does what `mocha_jax._local.ascend` does in one pass over the rows: every node visits its rows in
one common order and moves one coordinate after another,

.. math::
    g = \langle x_i, w + q u\rangle, \qquad
    \beta_i^+ = \arg\min_b\; \ell^*(-b) + (b - \beta_i)\,g + \tfrac{q c_i\|x_i\|^2}{2}(b - \beta_i)^2, \qquad
    u^+ = u + c_i(\beta_i^+ - \beta_i)\,x_i .

Compiled by XLA each of the n steps is a kernel or more of its own, which reads w and u from memory and
writes u back. Here a program owns some nodes for the whole pass: their w and u stay on the chip, and a row
is read once.

The arithmetic is one function, `_step`; the two ways to feed it suit two kinds of machine. A GPU (Triton)
runs thousands of small programs, each a loop over the rows that asks for a row long before it is needed.
A TPU (Mosaic) runs one large program: the rows are the inner axis of its grid, whose pipeline fetches the
next block of rows while this one is at work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from mocha_jax.losses import Loss

Result = tuple[Array, Array, Array]  # beta, u, done

# How many numbers of X one step of a program takes. On a GPU: eight in each thread of a warp, which also holds
# w, u and the rows in flight. On a TPU: 1 MiB, and the chip's 16 MiB hold six of it (x, w and u, each twice).
_NUMBERS_OF_A_WARP = 2**8
_NUMBERS_ON_TPU = 2**18
_LANES = 128  # of a TPU: the last axis of a block is a multiple of it, or the whole axis


def epoch(
    loss: Loss,
    x: Array,
    y: Array,
    weight: Array,
    norm2: Array,
    beta: Array,
    w: Array,
    q: Array,
    u: Array,
    done: Array,
    steps: Array,
    order: Array,
) -> Result:
    """One pass over the rows of every node, on the accelerator it is compiled for; elsewhere as plain JAX, slowly.

    It works under `jit`, `scan`, `vmap` (over all but `order` in one kernel) and `shard_map` (with
    ``check_vma=False``). It has no derivative, and the automatic partitioner cannot split it over devices.

    Args:
      loss: gives the coordinate step; its hyperparameters are scalars, traced or not.
      x: row i of all nodes together ``[n, m, d]``; stored in any floating dtype, computed with in that of `w`.
      y: labels ``[n, m]``.
      weight: ``[n, m]``; zero marks padding, which is not visited.
      norm2: squared length of each row ``[n, m]``.
      beta: dual variables ``[n, m]``.
      w: each node's weights at the start of the round ``[m, d]``.
      q: each node's curvature ``[m]``.
      u: change of each node's dual vector in earlier passes ``[m, d]``.
      done: steps each node did in earlier passes ``[m]`` int32.
      steps: each node's budget ``[m]`` int32.
      order: a permutation of the rows ``[n]`` int32.

    Returns:
      The new duals ``[n, m]``, u ``[m, d]`` and the steps done ``[m]``.
    """
    arrays = x, y, weight, norm2, beta, w, q, u, done, steps, order
    interpreted = partial(epoch_on_gpu, interpret=True)
    return lax.platform_dependent(
        loss, *arrays, cuda=epoch_on_gpu, rocm=epoch_on_gpu, tpu=epoch_on_tpu, default=interpreted
    )


def epoch_on_gpu(
    loss: Loss,
    *arrays: Array,
    nodes: int | None = None,
    warps: int | None = None,
    depth: int = 4,
    interpret: bool = False,
) -> Result:
    """`epoch` by Triton.

    Args:
      loss: see `epoch`.
      *arrays: the other arguments of `epoch`.
      nodes: nodes of one program, a power of two.
      warps: warps of one program, a power of two; several meet in shared memory at every step.
      depth: rows in flight.
      interpret: run as plain JAX.
    """
    x, y, weight, norm2, beta, w, q, u, done, steps, order = arrays
    _, m, d = x.shape
    width = pl.next_power_of_2(d)  # Triton's arrays have no other sizes; what is beyond d is masked
    nodes = nodes or max(min(_NUMBERS_OF_A_WARP // width, 32), 1)
    warps = warps or max(min(nodes * width // _NUMBERS_OF_A_WARP, 8), 1)
    inputs = order, x, y, weight, norm2, beta, w, q, u, done, steps, *_per_node(loss, w)
    return pl.pallas_call(
        partial(_gpu_kernel, jax.tree.structure(loss), nodes, width, depth),
        out_shape=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (beta, u, done)),
        grid=(pl.cdiv(m, nodes),),
        input_output_aliases={5: 0},  # the duals of rows that are not visited stay as they are
        compiler_params=pltriton.CompilerParams(num_warps=warps),
        interpret=interpret,
        name="epoch_on_gpu",
    )(*inputs)


def epoch_on_tpu(loss: Loss, *arrays: Array, nodes: int | None = None, interpret: bool = False) -> Result:
    """`epoch` by Mosaic.

    The nodes lie along the lanes: what is one number per node then fills whole registers, the sum over features
    needs no exchange between lanes, and no length d wastes memory. X is transposed for it, which costs nothing
    where XLA stores it so anyway, as it does where padding to whole tiles is least then. A block of 128 nodes
    fits on the chip up to d of about 3,000; beyond, compilation fails.

    Args:
      loss: see `epoch`.
      *arrays: the other arguments of `epoch`.
      nodes: nodes of one block, a multiple of 128 or all of them.
      interpret: run as plain JAX.
    """
    x, y, weight, norm2, beta, w, q, u, done, steps, order = arrays
    n, m, d = x.shape
    if x.dtype == jnp.float16:  # a TPU has none
        x = x.astype(w.dtype)
    nodes = min(nodes or max(_NUMBERS_ON_TPU // d // _LANES, 1) * _LANES, m)
    # An index must be an int32 also where Python's numbers are int64.
    zero = np.int32(0)
    matrix = pl.BlockSpec((d, nodes), lambda b, i, order: (zero, b))
    numbers = pl.BlockSpec((1, nodes), lambda b, i, order: (zero, b))
    row = pl.BlockSpec((None, d, nodes), lambda b, i, order: (order[i], zero, b))
    numbers_of_row = pl.BlockSpec((None, 1, nodes), lambda b, i, order: (order[i], zero, b))
    per_node = [a[None] for a in _per_node(loss, w)]
    beta, u, done = pl.pallas_call(
        partial(_tpu_kernel, jax.tree.structure(loss)),
        out_shape=(
            jax.ShapeDtypeStruct((n, 1, m), beta.dtype),
            jax.ShapeDtypeStruct((d, m), u.dtype),
            jax.ShapeDtypeStruct((1, m), done.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(m, nodes), n),
            in_specs=[row] + [numbers_of_row] * 4 + [matrix, numbers, matrix] + [numbers] * (2 + len(per_node)),
            out_specs=(numbers_of_row, matrix, numbers),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="epoch_on_tpu",
    )(
        order,
        jnp.swapaxes(x, 1, 2),
        *(a[:, None] for a in (y, weight, norm2, beta)),
        w.T,
        q[None],
        u.T,
        done[None],
        steps[None],
        *per_node,
    )
    return beta[:, 0], u.T, done[0]


def _step(
    loss: Loss,
    features: int,
    x: Array,
    y: Array,
    weight: Array,
    norm2: Array,
    beta: Array,
    w: Array,
    q: Array,
    u: Array,
    done: Array,
    steps: Array,
) -> Result:
    """One coordinate of each node of a block; x, w and u are matrices with axis `features`, which the rest lack."""
    x = x.astype(w.dtype)
    visit = (weight > 0) & (done < steps)
    g = jnp.sum(x * (w + q * u), axis=features, keepdims=True)
    new = jnp.where(visit, loss.dual_step(beta, g, y, q * weight * norm2), beta)
    return new, u + (weight * (new - beta)) * x, done + visit.astype(done.dtype)


def _gpu_kernel(structure: Any, nodes: int, width: int, depth: int, order: Any, x: Any, *refs: Any) -> None:
    """A pass of a few nodes; the arguments are references to whole arrays.

    Each of `depth` slots holds one row. As soon as a row is used its slot is filled again, with the row that will
    be used `depth` steps later: a load has that long to arrive, and, since a slot is never copied, stays in the same
    registers. The row's number and weight came one turn before, so that no load waits for another one, and rows
    that will not be visited (padding, or the budget spent) are not read at all.
    """
    y, weight, norm2, beta, w, q, u, done, steps, *hyperparameters, beta_out, u_out, done_out = refs
    n, m, d = x.shape
    node = pl.program_id(0) * nodes + lax.broadcasted_iota(jnp.int32, (nodes, 1), 0)
    feature = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    real = node < m
    inside = real & (feature < d)

    def of_node(ref: Any) -> Array:
        return pltriton.load(ref.at[node], mask=real, other=0)

    def matrix(ref: Any) -> Array:
        return pltriton.load(ref.at[node, feature], mask=inside, other=0)

    def look_up(k: Array) -> tuple[Array, Array]:
        i = pltriton.load(order.at[k], mask=k < n, other=0)
        return i, pltriton.load(weight.at[i, node], mask=real & (k < n), other=0)

    def fetch(found: tuple[Array, Array], done: Array) -> tuple[Array, ...]:
        i, c_i = found
        wanted = (c_i > 0) & (done < budget)
        numbers = (pltriton.load(ref.at[i, node], mask=wanted, other=0) for ref in (y, norm2, beta))
        return pltriton.load(x.at[i, node, feature], mask=wanted & inside, other=0), *numbers

    def turn(t: Array, carry: Any) -> Any:
        u, done, slots = carry
        filled = []
        for j, ((i, c_i), (x_i, y_i, norm2_i, beta_i), upcoming) in enumerate(slots):
            before = done
            beta_i, u, done = _step(loss, 1, x_i, y_i, c_i, norm2_i, beta_i, start, curvature, u, done, budget)
            pltriton.store(beta_out.at[i, node], beta_i, mask=done > before)
            filled.append((upcoming, fetch(upcoming, done), look_up((t + 2) * depth + j)))
        return u, done, tuple(filled)

    start, curvature, budget = matrix(w), of_node(q), of_node(steps)
    loss = jax.tree.unflatten(structure, [of_node(h) for h in hyperparameters])
    spent = of_node(done)
    slots = []
    for j in range(depth):
        first = look_up(jnp.int32(j))
        slots.append((first, fetch(first, spent), look_up(jnp.int32(depth + j))))
    turns = pl.cdiv(n, depth)
    moved, spent, _ = lax.fori_loop(np.int32(0), np.int32(turns), turn, (matrix(u), spent, tuple(slots)))
    pltriton.store(u_out.at[node, feature], moved, mask=inside)
    pltriton.store(done_out.at[node], spent, mask=real)


def _tpu_kernel(structure: Any, order: Any, x: Any, *refs: Any) -> None:
    """One row of many nodes; the arguments are references to blocks. Those of u and done stay for all rows."""
    y, weight, norm2, beta, w, q, u, done, steps, *hyperparameters, beta_out, u_out, done_out = refs
    del order  # the pipeline has used it

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        u_out[...] = u[...]
        done_out[...] = done[...]

    loss = jax.tree.unflatten(structure, [h[...] for h in hyperparameters])
    block = (ref[...] for ref in (x, y, weight, norm2, beta, w, q, u_out, done_out, steps))
    beta_out[...], u_out[...], done_out[...] = _step(loss, 0, *block)


def _per_node(loss: Loss, w: Array) -> list[Array]:
    """The loss's hyperparameters as numbers of the nodes ``[m]``: one kind of input, batched or not, on any device."""
    return [jnp.broadcast_to(jnp.asarray(leaf, w.dtype), w.shape[:1]) for leaf in jax.tree.leaves(loss)]
