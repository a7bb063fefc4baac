"""What an argument may be, judged without the library: a kind says of any value whether it is legitimate.

The reasons are the same everywhere: a number may come as Python's or NumPy's, as an array without axes or one of JAX;
an array may come as nested lists, in any real type and byte order; a hyperparameter may have axes to map over.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Kind = Callable[[Any], bool]


def as_real(value):
    """The value as an array of float64, or None where it is no real number or array of such."""
    if isinstance(value, bool | np.bool_ | str | bytes | bytearray | dict | set):
        return None
    if isinstance(value, int):
        return np.asarray(float(value) if value.bit_length() < 1024 else math.copysign(math.inf, value > 0 or -1))
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        return None
    try:
        array = np.asarray(value)
        real = array.dtype.kind in "fiu" or jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(np.float64) if real else None
    except Exception:
        return None


def any_numbers(value):
    """Whichever: what comes of them is arithmetic, of NaN NaN."""
    return as_real(value) is not None


def number(low=-math.inf, high=math.inf, *, above=None, below=None, shapes=None, infinite=False, whole=False):
    """Numbers in a range; of any shape where they may be mapped over, else of one of `shapes`."""

    def allows(value):
        array = as_real(value)
        if array is None or not array.size or (shapes is not None and array.shape not in shapes):
            return False
        if whole and not isinstance(value, int) and np.asarray(value).dtype.kind not in "iu":
            return False
        inside = (array >= low) & (array <= high)
        inside &= True if above is None else array > above
        inside &= True if below is None else array < below
        return bool(np.all(inside & (np.isfinite(array) | infinite)))

    return allows


def count(least=0):
    """One whole number that an int32 can hold."""

    def allows(value):
        array = None if isinstance(value, list | tuple) else as_real(value)
        if array is None or array.shape != () or not (isinstance(value, int) or np.asarray(value).dtype.kind in "iu"):
            return False
        return bool(least <= array < 2**31)

    return allows


def reals(*shape, finite=False, low=-math.inf, high=math.inf, whole=False, flags=False, least=0):
    """An array of numbers; an axis of any length is None."""

    def allows(value):
        array = np.asarray(value, float) if flags and np.asarray(value).dtype == bool else as_real(value)
        if array is None or array.ndim != len(shape) or array.size < least:
            return False
        if whole and np.asarray(value).dtype.kind not in "iu":
            return False
        known = array[~np.isnan(array)]
        fits = all(n in (None, k) for n, k in zip(shape, array.shape, strict=True))
        return fits and bool(np.isfinite(array).all() or not finite) and bool(((known >= low) & (known <= high)).all())

    return allows


def marks(*shape):
    """An array of True and False, or lists of them."""

    def allows(value):
        if not isinstance(value, np.ndarray | jax.Array | list | tuple) or np.ma.is_masked(value):
            return False
        array = np.asarray(value)
        return array.dtype == bool and array.shape == shape

    return allows


def flag(value):
    without_axes = isinstance(value, np.ndarray | jax.Array) and value.shape == () and value.dtype == bool
    return isinstance(value, bool | np.bool_) or without_axes


def word(*choices):
    return lambda value: isinstance(value, str) and value in choices


def instance(kind, fits=lambda value: True):
    return lambda value: isinstance(value, kind) and fits(value)


def optional(kind):
    return lambda value: value is None or kind(value)


def either(*kinds):
    return lambda value: any(kind(value) for kind in kinds)


def anything(value):
    return True


def function(value):
    """What a function does with its arguments is its own affair, errors included."""
    return callable(value)


def key(value):
    if not isinstance(value, np.ndarray | jax.Array):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == np.uint32 and value.shape == (2,)


def covariance(m, finite=True):
    """A symmetric positive semi-definite matrix."""

    def allows(value):
        array = as_real(value)
        if array is None or array.ndim != 2 or array.shape[0] != array.shape[1] or m not in (None, len(array)):
            return False
        if not np.isfinite(array).all() or np.abs(array - array.T).max(initial=0) > 1e-5 * np.abs(array).max(initial=0):
            return False
        return np.linalg.eigvalsh(array).min(initial=0) >= -1e-5 * np.abs(array).max(initial=0) * len(array)

    return allows
