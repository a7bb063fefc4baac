"""Checks of user input; an error is one sentence that names the culprit and the remedy.

Values that JAX is tracing cannot be looked at; the checks let them pass. Only numbers on the host are looked at one by
one; of large arrays on a device, where a check says no more than "numbers", type and shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._core.values import as_array, cut, is_real, shape_of
from mocha_jax._core.values import concrete as concrete
from mocha_jax._core.values import fixed as fixed
from mocha_jax._core.values import hidden as hidden
from mocha_jax._core.values import leaf as leaf
from mocha_jax._core.values import of_this_process as of_this_process
from mocha_jax._core.values import shown as shown
from mocha_jax._core.values import whole as whole

Value = TypeVar("Value")

# What counts rows, rounds and nodes is an int32 on the device.
_MOST = 2**31 - 1


def _numbers(owner: str, name: str, value: object) -> np.ndarray | None:
    """The value as an array of numbers, or None if it is not concrete."""
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    if hidden(value) and not abstract:
        return None
    array = None if abstract else as_array(value)
    if array is None or not is_real(array.dtype) or not array.size:
        raise ValueError(f"{owner}: {name} must be a number or an array of numbers, got {shown(value)}.")
    return array if array.dtype.kind in "fiu" else array.astype(np.float64)


def number(owner: str, name: str, value: Value) -> Value:
    """Check for a number or an array of numbers, nothing abstract, and return it as JAX takes it."""
    return _as_jax_takes_it(owner, name, value, "fiu")


def leaves(owner: str, name: str, tree: Value) -> Value:
    """Check that the leaves of a tree are numbers or arrays of numbers or booleans; return them as JAX takes them."""
    return jax.tree.map(lambda value: _as_jax_takes_it(owner, name, value, "fiub"), tree)


def _as_jax_takes_it(owner: str, name: str, value: Value, kinds: str) -> Value:
    _not_abstract(owner, name, value)
    _of_kinds(owner, name, value, kinds)
    plain = isinstance(value, jax.Array | np.ndarray | np.number | int | float)
    return cast(Value, leaf(owner, name, value if plain else as_array(value)))


def array(owner: str, name: str, value: object, shape: tuple[int | str, ...], kinds: str = "fiu") -> None:
    """An array of that shape; an axis of any length from 1 has a letter. Of numbers, or of other `kinds` of NumPy."""
    own_shape = shape_of(value)
    fits = own_shape is not None and len(own_shape) == len(shape)
    if not fits or any(k != n if isinstance(n, int) else k == 0 for n, k in zip(shape, own_shape or (), strict=True)):
        wanted = ", ".join(map(str, shape))
        got = shown(value) if own_shape is None else f"shape {own_shape}"
        raise ValueError(f"{owner}: {name} must be an array [{wanted}], got {got}.")
    _of_kinds(owner, name, value, kinds)


def _not_abstract(owner: str, name: str, value: object) -> None:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(f"{owner}: {name} must hold numbers, got {shown(value)}.")


def _of_kinds(owner: str, name: str, value: object, kinds: str) -> None:
    """The values of some kinds; of an array no more is looked at than its type."""
    plain = isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    known_array = value if plain and not isinstance(value, np.ma.MaskedArray) else as_array(value)
    dtype = getattr(known_array, "dtype", None)
    if dtype is None or not (getattr(dtype, "kind", "?") in kinds or ("f" in kinds and is_real(dtype))):
        words = {"b": "booleans", "iu": "integers"}.get(kinds, "numbers")
        raise ValueError(f"{owner}: {name} must hold {words}, got {shown(value)}.")


def arrays(owner: str, name: str, values: object) -> list[np.ndarray]:
    """A list of arrays, at least one, or anything that gives one array after the other."""
    listed = sequence(owner, name, values)
    as_arrays = [array for value in listed if (array := as_array(value)) is not None]
    if not as_arrays or len(as_arrays) < len(listed):
        raise ValueError(f"{owner}: {name} must be a list of arrays, got {shown(values)}.")
    return as_arrays


def sequence(owner: str, name: str, values: object) -> list[object]:
    """Return an iterable as a list."""
    try:
        return list(cast(Iterable[object], values))
    except Exception as error:  # whatever keeps it from being gone through
        raise ValueError(f"{owner}: {name} must be a list of arrays, got {shown(values)}.") from error


def marks(owner: str, name: str, value: ArrayLike, shape: tuple[int | str, ...]) -> jax.Array:
    """An array of True and False of that shape; nothing abstract."""
    _not_abstract(owner, name, value)
    array(owner, name, value, shape, "b")
    return jnp.asarray(leaf(owner, name, value))


def integer(owner: str, least: int, most: float = _MOST, /, **values: object) -> None:
    """Check that values are integers of Python or NumPy from `least` to `most`, by default the largest int32."""
    for name, value in values.items():
        number = whole(value)
        if most < _MOST and (number is None or not least <= number <= most):
            raise ValueError(f"{owner}: {name} must be an integer from {least} to {most:g}, got {shown(value)}.")
        if number is None or number < least:
            raise ValueError(f"{owner}: {name} must be an integer >= {least}, got {shown(value)}.")
        if number > most:
            raise ValueError(f"{owner}: {name} must be an integer >= {least} and below 2**31, got {number}.")


def integers(owner: str, least: int, /, **values: object) -> None:
    """Check that values are int32 integers, at least `least`, or arrays of them; they may be traced."""
    for name, value in values.items():
        if isinstance(value, jax.ShapeDtypeStruct) or not hidden(value):
            a = as_array(value)
            if a is None or a.dtype.kind not in "iu" or not a.size or not least <= a.min() <= a.max() <= _MOST:
                raise ValueError(
                    f"{owner}: {name} must be an integer >= {least}, or an array of such, got {shown(value)}."
                )


def flag(owner: str, **values: object) -> None:
    """Check that values are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{owner}: {name} must be True or False, got {shown(value)}.")


def function(owner: str, name: str, value: object, example: str) -> None:
    """Check that the value is callable."""
    if not callable(value):
        raise ValueError(f"{owner}: {name} must be a function such as {example}, got {shown(value)}.")


def key(owner: str, value: object) -> None:
    """Check for one JAX random key, of either kind."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.shape == ():
            return
        if value.dtype == np.uint32 and value.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape:
            return
    raise ValueError(f"{owner}: key must be one JAX random key such as jax.random.key(0), got {shown(value)}.")


def seed(owner: str, value: object) -> None:
    """An integer that a random key can be made of, or an array of them."""
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    if hidden(value) and not abstract:
        return
    number = None if abstract else as_array(value)
    if (
        number is None
        or number.dtype.kind not in "iu"
        or not number.size
        or not 0 <= number.min() <= number.max() <= _MOST
    ):
        raise ValueError(f"{owner}: seed must be an integer from 0 to 2**31 - 1, got {shown(value)}.")


def widths(owner: str, name: str, value: object, example: str) -> tuple[int, ...]:
    """A sequence of integers from 1, as a tuple."""
    if not isinstance(value, tuple | list | np.ndarray) or len(shape_of(value) or ()) != 1:
        raise ValueError(f"{owner}: {name} must be a tuple such as {example}, got {shown(value)}.")
    for one in value:
        integer(owner, 1, **{name: one})
    return tuple(int(one) for one in value)


def scalar(owner: str, **values: object) -> None:
    """Check that values are single numbers."""
    for name, value in values.items():
        if (shape := shape_of(value)) != ():
            got = shown(value) if shape is None else f"shape {shape}"
            raise ValueError(f"{owner}: {name} must be a single number, got {got}.")


def instance(owner: str, name: str, value: object, kind: type, example: str) -> None:
    """The value an object of that class, not the class itself."""
    if not isinstance(value, kind):
        raise ValueError(f"{owner}: {name} must be a {kind.__name__} such as {example}, got {shown(value)}.")


def _require(ok: bool, owner: str, name: str, value: np.ndarray, rule: str) -> None:
    if not ok:
        got = str(value.item()) if value.size == 1 else " ".join(str(value).split())
        raise ValueError(f"{owner}: {name} must be {rule}, got {cut(got)}.")


def positive(owner: str, **values: object) -> None:
    """Check that values are finite and > 0."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(np.isfinite(v) & (v > 0))), owner, name, v, "finite and > 0")


def positive_or_infinite(owner: str, **values: object) -> None:
    """Check that values are > 0; infinity is allowed."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(v > 0)), owner, name, v, "> 0 (infinity is allowed)")


def nonnegative(owner: str, **values: object) -> None:
    """Check that values are finite and >= 0."""
    at_least(owner, 0.0, **values)


def representable(owner: str, tree: object, dtype: DTypeLike) -> None:
    """Refuse numbers too large or too small for the float type; small entries of a matrix may become 0."""
    limits = jnp.finfo(dtype)
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        if (v := concrete(value)) is None:
            continue
        size = np.abs(v.astype(np.float64))
        least, most = float(limits.tiny), 0.125 / float(limits.tiny)  # beyond, they or one over them are taken for 0
        lost = (size != 0) & (size < least) & (v.ndim < 2)
        if np.any(np.isfinite(size) & (size > most) | lost):
            name = jax.tree_util.keystr(path).lstrip(".")
            raise ValueError(
                f"{owner}: {name} must be from {least:.2g} to {most:.2g}, as numbers of {np.dtype(dtype)} "
                f"are, got {cut(str(v.item()) if v.size == 1 else ' '.join(str(v).split()))}."
            )


def at_least(owner: str, least: float, **values: object) -> None:
    """Check that values are finite and at least `least`."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(np.isfinite(v) & (v >= least))), owner, name, v, f"finite and >= {least:g}")


def in_unit_interval(owner: str, *, open_left: bool = False, open_right: bool = False, **values: object) -> None:
    """Check that values are in [0, 1]; either end can be excluded."""
    rule = f"in {'(' if open_left else '['}0, 1{')' if open_right else ']'}"
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            low = v > 0 if open_left else v >= 0
            high = v < 1 if open_right else v <= 1
            _require(bool(np.all(low & high)), owner, name, v, rule)


def floats(owner: str, name: str, value: ArrayLike, shape: tuple[int | str, ...], kinds: str = "fiu") -> jax.Array:
    """An array of that shape, in JAX's default float where it was of integers or of 16 bits; nothing abstract."""
    _not_abstract(owner, name, value)
    array(owner, name, value, shape, kinds)
    as_jax = jnp.asarray(leaf(owner, name, value))
    wide = jnp.issubdtype(as_jax.dtype, jnp.floating) and as_jax.dtype.itemsize > 2
    return as_jax if wide else as_jax.astype(float)


def square(owner: str, name: str, value: ArrayLike) -> jax.Array:
    """A square matrix, in a float type where it was of integers."""
    matrix = floats(owner, name, value, ("m", "m"))
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{owner}: {name} must be a square matrix [m, m], got shape {matrix.shape}.")
    return matrix


def positive_semidefinite(owner: str, name: str, matrix: object) -> None:
    """Square, finite, symmetric and without an eigenvalue below rounding."""
    shape = shape_of(matrix)
    if shape is None or len(shape) != 2 or shape[0] != shape[1]:
        got = shown(matrix) if shape is None else f"shape {shape}"
        raise ValueError(f"{owner}: {name} must be a square matrix [m, m], got {got}.")
    if (a := _numbers(owner, name, matrix)) is None:
        return
    if not np.all(np.isfinite(a)):
        raise ValueError(f"{owner}: {name} has a NaN or infinite entry.")
    # Matrices built in float32 are symmetric and semi-definite up to its rounding only.
    slack = 1e-5 * max(float(np.abs(a).max(initial=0.0)), 1e-30)
    a = a.astype(np.float64)
    if (skew := float(np.abs(a - a.T).max(initial=0.0))) > slack:
        raise ValueError(
            f"{owner}: {name} must be symmetric, but {name} and its transpose differ by up to "
            f"{skew:.3g}; pass ({name} + {name}.T) / 2 if that is what you mean."
        )
    if (lowest := float(np.linalg.eigvalsh(a).min(initial=0.0))) < -slack * len(a):
        raise ValueError(
            f"{owner}: {name} must be positive semi-definite, but its smallest eigenvalue is "
            f"{lowest:.3g}; add that much to its diagonal, or clip its eigenvalues at 0."
        )


def positive_definite(owner: str, name: str, matrix: object) -> None:
    """Square, finite, symmetric, and every eigenvalue is above 0."""
    positive_semidefinite(owner, name, matrix)
    if (a := _numbers(owner, name, matrix)) is not None and not (lowest := np.linalg.eigvalsh(a)[0]) > 0:
        raise ValueError(f"{owner}: {name} must be positive definite, but its smallest eigenvalue is {lowest:.3g}.")


def one_of(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """The value is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}.")
