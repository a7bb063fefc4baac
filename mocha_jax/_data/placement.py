"""The order of samples in memory: row i of all nodes side by side, as rounds read them.

An array has the same shape and numbers in any order. In this one the local solver, certificates and gradients read the
samples where they are; stored node by node, every program would begin with a copy. A TPU has nodes along the lanes of
its registers, so there features come before nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from mocha_jax._core.devices import format_of, in_order
from mocha_jax._core.values import is_traced

# Axes of ``[m, n, d]``, the one whose neighbours are farthest apart first.
_ORDER, _ORDER_ON_TPU = (1, 0, 2), (1, 2, 0)

# Bytes below which no program notices its copy.
_SMALL = 2**20


def _order_on(sharding: Sharding) -> tuple[int, ...]:
    device: Any = next(iter(sharding.device_set))
    return _ORDER_ON_TPU if device.platform == "tpu" else _ORDER


def in_format(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of samples, in order as `row_by_row` puts them if it is known on which machines."""
    small = np.prod(x.shape) * x.dtype.itemsize < _SMALL
    if small or isinstance(getattr(x.sharding, "mesh", None), AbstractMesh):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cast(Any, format_of(_order_on(x.sharding), x.sharding)))


def row_by_row(x: Any) -> Any:
    """Put samples ``[m, n, d]`` in order, if they are an array that lies otherwise and is not small."""
    if not isinstance(x, jax.Array | np.ndarray) or is_traced(x) or x.nbytes < _SMALL:
        return x
    array: Any = jnp.asarray(x)
    if array.format.layout is None or array.format.layout.major_to_minor == _order_on(array.sharding):
        return array
    return in_order(array, _order_on(array.sharding))


def seen_by_rows(x: object) -> Array | None:
    """Return the same memory as an array ``[1, n, m, d]``, where it lies so on one CPU; else None.

    XLA for CPUs copies what it gets in any order but its own. Other compilers read it as it lies.
    """
    if not isinstance(x, jax.Array) or is_traced(x) or len(x.devices()) != 1 or x.nbytes < _SMALL:
        return None
    [device], array = x.devices(), cast(Any, x)
    if device.platform != "cpu" or array.format.layout.major_to_minor != _ORDER:
        return None
    try:
        view = np.swapaxes(np.from_dlpack(array), 0, 1)[None]
    except Exception:  # of a dtype that NumPy lacks
        return None
    return cast(Array, jax.device_put(view, device, may_alias=True))


def collect(pieces: Iterable[np.ndarray], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Put pieces ``[k, n, d]`` of samples, one after the other, in order on the default device."""
    if np.prod(shape) * jnp.dtype(dtype).itemsize < _SMALL:
        return jax.device_put(np.concatenate(list(pieces)))
    [device] = jnp.zeros(()).devices()
    wanted: Any = format_of(_order_on(sharding := SingleDeviceSharding(device)), sharding)
    x = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=wanted)()
    put = jax.jit(_put, donate_argnums=0, out_shardings=wanted)
    begin = 0
    for piece in pieces:
        x = put(x, piece, np.int32(begin))
        begin += len(piece)
    return x


def _put(x: Array, piece: Array, begin: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, piece, begin, 0)
