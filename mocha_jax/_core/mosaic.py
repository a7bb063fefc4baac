"""What kernels by Mosaic GPU share: the cards they are for, matrices spread over threads, loads and stores.

A program of such a kernel is four warps. A matrix of nodes and features lies in their registers: some neighbouring
threads, the lanes, share a node, and each of them holds some features side by side, the vector, of every so many.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.backend import get_default_device

THREADS, _WARP = 128, 32  # of a program

_OLDEST = 8  # generation of cards, Ampere

# Until JAX 0.12 to write to memory was an assignment.
_LOAD: Any = plgpu.load
_STORE: Any = getattr(plgpu, "store", None)


def is_for_this_card() -> bool:
    """Tell whether the card that a program is lowered for is not known to be older than Ampere."""
    here: Any = get_default_device()
    named: Any = jax.sharding.get_abstract_mesh().abstract_device  # by its name alone
    capability = getattr(here, "compute_capability", None)
    if capability is None or (named is not None and named.device_kind != here.device_kind):
        return True
    generation = str(capability).partition(".")[0]
    return not generation.isdigit() or int(generation) >= _OLDEST


def parameters(numbers: int = 0) -> Any:
    """How to compile a kernel that orders its accesses to memory itself.

    Args:
      numbers: of a thread that are added up over warps at once.
    """
    made: Any = plgpu.CompilerParams
    return made(
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=4 * THREADS * max(numbers, 4),
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        # Devices share no memory here: none has to wait until all others have come to the same kernel.
        skip_device_barrier=True,
    )


def layout(lanes: int, vector: int) -> Any:
    """A matrix ``[nodes, features]`` over warps, threads and registers, of ``THREADS / lanes`` nodes or times as many.

    Args:
      lanes: threads that share a node, a power of two from 2 to 128.
      vector: features that a thread holds side by side, a power of two.
    """
    inside = min(lanes, _WARP)  # lanes of one warp
    across, rows = lanes // inside, _WARP // inside
    of_warp = (rows, inside * vector) if rows > 1 else (inside * vector,)
    tiling = plgpu.Tiling(((THREADS // lanes, lanes * vector), of_warp, (vector,)))
    last = -2 - len(of_warp)
    warps = (last - 1, last) if rows == 1 else (last - 1,)
    sizes = (THREADS // _WARP // across, across)
    warp_dims = tuple(dim for dim, size in zip(warps, sizes, strict=False) if size > 1)
    return plgpu.Layout.TILED(tiling, warp_dims=warp_dims, lane_dims=(-3, -2)[-len(of_warp) :], vector_dim=-1)


def load(ref: Any, layout: Any) -> Array:
    """An array in registers, from any memory."""
    return cast(Array, _LOAD(ref, layout=layout, optimized=False))


def store(ref: Any, value: Array) -> None:
    """Write an array in registers to any memory."""
    if value.size == 1:  # a single number is not written from a layout
        value = jnp.full(value.shape, jnp.sum(value))
    if _STORE is None:
        ref[...] = value
    else:
        _STORE(ref, value, optimized=False)


def spread(part: Array, shape: tuple[int, int], axis: int, layout: Any) -> Array:
    """Repeat numbers of nodes (axis 0) or features (1) along the other axis of a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(part, shape, (axis,)), layout)


def zeros(shape: tuple[int, ...], layout: Any) -> Array:
    """An array that a loop may carry, which a constant may not be."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
