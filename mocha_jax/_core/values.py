"""Inspection of user input: its numbers and shape if they are known, and a description.

Values that JAX is tracing cannot be looked at, nor those that lie with other processes.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Value = TypeVar("Value")


def is_traced(value: object) -> bool:
    """Tell whether JAX is tracing this value: it has a shape and a dtype, but no numbers."""
    return isinstance(value, jax.core.Tracer)


def concrete(value: object) -> np.ndarray | None:
    """The value as a NumPy array, or None where it is traced, abstract, partly with other processes, or no array."""
    return None if hidden(value) else as_array(value)


def of_this_process(value: object) -> np.ndarray | None:
    """The value as a NumPy array; of one that processes share the rows that lie here; None as of `concrete`."""
    if not isinstance(value, jax.Array) or is_traced(value) or not hidden(value):
        return concrete(value)
    rows = {shard.index[0].start or 0: shard.data for shard in value.addressable_shards}
    return np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])


def hidden(value: object) -> bool:
    """Tell whether there are numbers that cannot be looked at: traced, abstract, or partly with other processes."""
    if is_traced(value) or isinstance(value, jax.ShapeDtypeStruct):
        return True
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


def as_array(value: object) -> np.ndarray | None:
    """The value as a NumPy array, or None if it is not one: ragged, of objects, a random key, partly masked, sparse."""
    if type(value).__module__.startswith("jax.experimental.sparse"):  # NumPy would read it number by number
        return None
    if isinstance(value, bytearray | memoryview) or (isinstance(value, np.ma.MaskedArray) and value.mask.any()):
        return None
    if isinstance(value, int) and value.bit_length() > 63:  # more than NumPy's integers hold
        value = float(value) if value.bit_length() < 1024 else np.inf if value > 0 else -np.inf
    try:
        array = np.asarray(value)
    except Exception:  # a user's `__array__` may raise anything
        return None
    return None if array.dtype == object else array


def shape_of(value: object) -> tuple[int, ...] | None:
    """The shape of an array or of what makes one; None where nothing does."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return shape
    return getattr(as_array(value), "shape", None)


def is_real(dtype: DTypeLike) -> bool:
    """Tell whether a type is one of real numbers, bfloat16 and its like included."""
    return getattr(dtype, "kind", "?") in "fiu" or jnp.issubdtype(dtype, jnp.floating)


def shown(value: object) -> str:
    """Describe a value in a few words on one line."""
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is not None and shape != () and isinstance(shape, tuple):
        return f"an array {dtype}{list(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's `__repr__` may raise anything
        text = f"a {type(value).__name__}"
    return cut(text)


def cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}..."


def leaf(owner: str, name: str, value: Value) -> Value | np.ndarray | float:
    """A list, tuple or range of numbers as the array that it stands for, an array as JAX takes it; else as it is."""
    raw: object = value
    if (type(raw) is tuple or type(raw) is range) and all(
        type(one) in (tuple, list, bool, int, float) or isinstance(one, np.number) for one in raw
    ):
        converted = as_array(value)
        return converted if converted is not None and converted.size else value
    if isinstance(value, list) and as_array(value) is None:
        raise ValueError(f"{owner}: {name} must be an array, or a list that makes one, got {shown(value)}.")
    odd = isinstance(value, np.ndarray) and not (type(value) is np.ndarray and value.dtype.isnative)
    wide = type(raw) is int and raw.bit_length() > 31
    if not (isinstance(value, list) or odd or wide) or (converted := as_array(value)) is None:
        return value
    return float(converted) if wide else converted.astype(converted.dtype.newbyteorder("="))


def fixed(value: Value) -> Value | float:
    """An array without axes as the number that it is, which can be hashed; anything else as it is."""
    if not isinstance(value, np.ndarray | jax.Array) or hidden(value) or value.shape != ():
        return value
    return value.item() if getattr(value.dtype, "kind", "?") in "biuf" else value


def whole(value: object) -> int | None:
    """The integer that a value is; None if it is not one."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(SupportsIndex, value))
    except Exception:  # TypeError for other types; a user's `__index__` may raise anything
        return None
