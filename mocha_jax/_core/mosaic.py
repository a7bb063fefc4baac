"""Parts that kernels by Mosaic GPU share: the cards they are for, matrices spread over threads, loads and stores.

A program of such a kernel is four warps. A matrix of nodes and features lies in their registers: some neighbouring
threads, the lanes, share a node, and each of them holds some features side by side, the vector, of every so many.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.backend import get_default_device

RegisterLayout: TypeAlias = Any  # of an array over the registers of threads; Mosaic's own type is not exported

THREADS, _WARP = 128, 32  # of a program

# Cards by the first number of their compute capability. Of a card that is not here its name is all there is.
_CARDS = {8: r"\b(A[18]00|A[134]0|L4|L40S?)\b", 9: r"\bG?H[12]00\b", 10: r"\bG?B[23]00\b"}

# Until JAX 0.11 Mosaic was for Hopper and later cards alone and `load` took an index; until 0.12 to write to memory was
# an assignment.
BEFORE_HOPPER = jax.__version_info__ >= (0, 11)
_INDEX = () if BEFORE_HOPPER else ((),)
_LOAD: Callable[..., Array] = plgpu.load
_STORE: Callable[..., None] | None = getattr(plgpu, "store", None)


def generation() -> int | None:
    """Return the generation of the card that a program is lowered for, if kernels are known to compile for it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = get_default_device()
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return next((number for number, names in _CARDS.items() if re.search(names, device.device_kind)), None)
    first = str(capability).split(".")[0]
    return int(first) if first.isdecimal() and int(first) in _CARDS else None


def parameters(numbers: int = 0) -> plgpu.CompilerParams:
    """Return how to compile a kernel that orders its accesses to memory itself.

    Args:
      numbers: of a thread that are added up over warps at once.
    """
    return plgpu.CompilerParams(
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=4 * THREADS * max(numbers, 4),
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        # Devices share no memory here: none has to wait until all others have come to the same kernel.
        skip_device_barrier=True,
    )


def interpreted(how: object) -> dict[str, Any]:
    """Return the option of a kernel that says how to run on a CPU; versions of JAX that know none are given none."""
    return {"interpret": how} if how else {}


def layout(lanes: int, vector: int, nodes: int = 0) -> RegisterLayout:
    """Lay a matrix ``[nodes, features]`` over warps, threads and registers.

    What threads are left when all nodes have theirs work on the same as others.

    Args:
      lanes: threads that share a node, a power of two from 1 to 128.
      vector: features that a thread holds side by side, a power of two.
      nodes: a power of two; default as many as all threads take. The matrix has so many, or a multiple.
    """
    nodes, width = nodes or THREADS // lanes, lanes * vector
    warps, lanes = max(lanes // _WARP, 1), min(lanes, _WARP)  # that share a node
    of_warp = min(_WARP // lanes, nodes)
    sizes = nodes // of_warp, warps, of_warp, lanes, vector
    tiling = plgpu.Tiling(((nodes, width), (of_warp, lanes * vector), (vector,))).canonicalize()
    # Where these sizes are among the dimensions, from the last one on; some of size 1 are not.
    dimensions = list(tiling.tile_shape((nodes, width))[2:])
    places, axes_left = {}, dimensions.copy()
    for k in reversed(range(len(sizes))):
        if axes_left and axes_left[-1] == sizes[k]:
            places[k] = len(axes_left) - len(dimensions) - 1
            axes_left.pop()

    def over(threads: int, *which: int) -> tuple[plgpu.Replicated | int, ...]:
        copies = threads // prod(sizes[k] for k in which)
        return *[plgpu.Replicated(copies)] * (copies > 1), *(places[k] for k in which if sizes[k] > 1)

    return plgpu.Layout.TILED(
        tiling, warp_dims=over(THREADS // _WARP, 0, 1), lane_dims=over(_WARP, 2, 3), vector_dim=-1
    )


def load(ref: jax.Ref, layout: RegisterLayout) -> Array:
    """Load an array into registers, from any memory."""
    return _LOAD(ref, *_INDEX, layout=layout, optimized=False)


def store(ref: jax.Ref, value: Array) -> None:
    """Write an array in registers to any memory."""
    while value.size == 1 and value.ndim:  # as a scalar; JAX 0.12 knows no other way
        ref, value = ref.at[0], jnp.sum(value, axis=0, dtype=value.dtype)
    if _STORE is None:
        ref[...] = value
    else:
        _STORE(ref, value, optimized=False)


def spread(part: Array, shape: tuple[int, int], axis: int, layout: RegisterLayout) -> Array:
    """Repeat numbers of nodes (axis 0) or features (1) along the other axis of a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(part, shape, (axis,)), layout)


def zeros(shape: tuple[int, ...], layout: RegisterLayout) -> Array:
    """Return an array that a loop may carry, which a constant may not be."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def total(numbers: Array, axis: int, of_a_thread: int) -> Array:
    """Add up products over threads, to the same bits in all of them.

    Threads that share a sum give each other what they have. Of one product a thread has the compiler makes a single
    operation with the first addition, in which it is not rounded, as that of the other thread is: so both would go on
    with another sum, and what they do together, a rotation say, would not be one. A maximum in between prevents it.

    Args:
      numbers: ``[nodes, features]``, products.
      axis: to add up over.
      of_a_thread: how many of a sum a thread has itself.
    """
    if of_a_thread == 1:
        numbers = jnp.maximum(numbers, float(jnp.finfo(numbers.dtype).min))
    return jnp.sum(numbers, axis=axis)
