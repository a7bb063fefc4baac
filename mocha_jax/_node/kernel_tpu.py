"""A pass over the rows as one kernel on a TPU, by Mosaic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from mocha_jax._node.kernel import Result, per_node, step
from mocha_jax.losses import Loss

if TYPE_CHECKING:
    from jax import Ref

_LONGEST = 3000  # features; a block of 128 nodes fits on the chip up to about so many
_MOST = 2**17  # rows; the order in which they are visited takes half of the chip's memory for scalars

# How many numbers of X one step takes: 1 MiB, and the chip's 16 MiB hold six of it (x, w and u, each twice).
_NUMBERS = 2**18
_LANES = 128  # the last axis of a block is a multiple of it, or the whole axis


def fits(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Tell whether the kernel takes samples of this shape ``[n, m, d]``."""
    del dtype
    n, _, d = shape
    return n <= _MOST and d <= _LONGEST


def epoch(loss: Loss, *arrays: Array, nodes: int | None = None, interpret: bool = False) -> Result:
    """One pass over the rows of every node.

    The nodes lie along the lanes: what is one number per node then fills whole registers, the sum over features
    needs no exchange between lanes, and no length d wastes memory. X is transposed for it, which costs nothing
    where XLA stores it so anyway, as it does where padding to whole tiles is least then.

    Args:
      loss: see `mocha_jax._node.kernel`.
      *arrays: the other arguments, see there.
      nodes: nodes of one block, a multiple of 128 or all of them.
      interpret: run as plain JAX.
    """
    x, y, weight, norm2, beta, w, q, steps, order, *earlier = arrays
    n, m, d = x.shape
    if x.dtype == jnp.float16:  # a TPU has none
        x = x.astype(w.dtype)
    nodes = min(nodes or max(_NUMBERS // d // _LANES, 1) * _LANES, m)
    # An index must be an int32 also where Python's numbers are int64.
    zero = np.int32(0)
    matrix = pl.BlockSpec((d, nodes), lambda b, i, order: (zero, b))
    numbers = pl.BlockSpec((1, nodes), lambda b, i, order: (zero, b))
    row = pl.BlockSpec((None, d, nodes), lambda b, i, order: (order[i], zero, b))
    numbers_of_row = pl.BlockSpec((None, 1, nodes), lambda b, i, order: (order[i], zero, b))
    hyperparameters = [a[None] for a in per_node(loss, w)]
    of_node = w, q, steps, *earlier
    beta, u, done = pl.pallas_call(
        partial(_kernel, jax.tree.structure(loss), len(earlier)),
        out_shape=(
            jax.ShapeDtypeStruct((n, 1, m), beta.dtype),
            jax.ShapeDtypeStruct((d, m), w.dtype),
            jax.ShapeDtypeStruct((1, m), steps.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(m, nodes), n),
            in_specs=[row, *[numbers_of_row] * 4, matrix, numbers, numbers]
            + [matrix, numbers][: len(earlier)]
            + [numbers] * len(hyperparameters),
            out_specs=(numbers_of_row, matrix, numbers),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="epoch_on_tpu",
    )(
        order,
        jnp.swapaxes(x, 1, 2),
        *(a[:, None] for a in (y, weight, norm2, beta)),
        *(numbers_of_nodes.T if numbers_of_nodes.ndim == 2 else numbers_of_nodes[None] for numbers_of_nodes in of_node),
        *hyperparameters,
    )
    return beta[:, 0], u.T, done[0]


def _kernel(structure: jax.tree_util.PyTreeDef, earlier: int, order: Ref, x: Ref, *refs: Ref) -> None:
    """One row of many nodes; the arguments are references to blocks. Those of u and done stay for all rows."""
    y, weight, norm2, beta, w, q, steps, *more, beta_out, u_out, done_out = refs
    before, hyperparameters = more[:earlier], more[earlier:]
    del order  # the pipeline has used it

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for out, earlier_one in zip((u_out, done_out), before or (None, None), strict=True):
            out[...] = jnp.zeros_like(out) if earlier_one is None else earlier_one[...]

    loss = jax.tree.unflatten(structure, [h[...] for h in hyperparameters])
    block = (ref[...] for ref in (x, y, weight, norm2, beta, w, q, u_out, done_out, steps))
    beta_out[...], u_out[...], done_out[...] = step(
        loss, partial(jnp.sum, axis=0, keepdims=True), lambda numbers: numbers, *block
    )
