"""Checks of what a person hands in: one sentence, naming the culprit and the remedy.

Values that JAX is tracing cannot be looked at; the checks let them pass.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def concrete(value: Any) -> np.ndarray | None:
    """The value as a NumPy array, or None where it is traced, abstract, or partly with other processes."""
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        return None
    array = np.asarray(value)
    return None if array.dtype == object else array


def _numbers(owner: str, name: str, value: Any) -> np.ndarray | None:
    """The value as an array of numbers, or None where it is traced."""
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{owner}: {name} must be a number or an array of numbers, got {value!r}.")
    return array


def integer(owner: str, least: int, /, **values: Any) -> None:
    """Every value a whole number, at least `least`."""
    for name, value in values.items():
        try:
            ok = operator.index(value) >= least
        except TypeError:
            ok = False
        if not ok:
            raise ValueError(f"{owner}: {name} must be an integer >= {least}, got {value!r}.")


def indices(owner: str, name: str, value: Any) -> None:
    """An array of integers >= 0."""
    if (a := concrete(value)) is not None and (a.dtype.kind not in "iu" or (a.size and a.min() < 0)):
        raise ValueError(f"{owner}: {name} must be integers >= 0, got {a}.")


def key(owner: str, value: Any) -> None:
    """One random key of JAX, of either kind."""
    dtype, shape = getattr(value, "dtype", None), np.shape(value)
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and shape == ():
            return
        if dtype == np.uint32 and len(shape) == 1:
            return
    got = repr(value) if dtype is None else f"an array {dtype}{list(shape)}"
    raise ValueError(f"{owner}: key must be one JAX random key such as jax.random.key(0), got {got}.")


def seed(owner: str, value: Any) -> None:
    """An integer that a random key can be made of, or an array of them."""
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
        return
    known = np.asarray(value)
    if known.dtype.kind not in "iu" or (known.size and not 0 <= known.min() <= known.max() < 2**31):
        raise ValueError(f"{owner}: seed must be an integer from 0 to 2**31 - 1, got {value!r}.")


def widths(owner: str, name: str, value: Any, example: str) -> tuple[int, ...]:
    """A sequence of integers from 1, as a tuple."""
    if not isinstance(value, tuple | list | np.ndarray):
        raise ValueError(f"{owner}: {name} must be a tuple such as {example}, got {value!r}.")
    for one in value:
        integer(owner, 1, **{name: one})
    return tuple(int(one) for one in value)


def scalar(owner: str, **values: Any) -> None:
    """Every value a single number."""
    for name, value in values.items():
        if np.shape(value) != ():
            raise ValueError(f"{owner}: {name} must be a single number, got shape {np.shape(value)}.")


def instance(owner: str, name: str, value: Any, kind: type, example: str) -> None:
    """The value an object of that class, not the class itself."""
    if not isinstance(value, kind):
        raise ValueError(f"{owner}: {name} must be a {kind.__name__} such as {example}, got {value!r}.")


def _require(ok: bool, owner: str, name: str, value: np.ndarray, rule: str) -> None:
    if not ok:
        shown = value.item() if value.size == 1 else value
        raise ValueError(f"{owner}: {name} must be {rule}, got {shown}.")


def positive(owner: str, **values: Any) -> None:
    """Every value finite and > 0."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(np.isfinite(v) & (v > 0))), owner, name, v, "finite and > 0")


def positive_or_infinite(owner: str, **values: Any) -> None:
    """Every value > 0; infinity is a value."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(v > 0)), owner, name, v, "> 0 (infinity is allowed)")


def nonnegative(owner: str, **values: Any) -> None:
    """Every value finite and >= 0."""
    at_least(owner, 0.0, **values)


def representable(owner: str, tree: Any, dtype: Any) -> None:
    """No number that is 0 or infinite in that float type only; small entries of a matrix may well be 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if (v := concrete(leaf)) is None:
            continue
        with np.errstate(over="ignore", under="ignore"):
            cast = v.astype(dtype)
        if np.any(np.isfinite(v) & ~np.isfinite(cast)) or (v.ndim == 0 and v != 0 and cast == 0):
            name, limits = jax.tree_util.keystr(path).lstrip("."), np.finfo(dtype)
            raise ValueError(
                f"{owner}: {name} must be from {limits.tiny:.2g} to {limits.max:.2g}, as numbers of {np.dtype(dtype)} "
                f"are, got {v.item() if v.size == 1 else v}."
            )


def at_least(owner: str, least: float, **values: Any) -> None:
    """Every value finite and at least `least`."""
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            _require(bool(np.all(np.isfinite(v) & (v >= least))), owner, name, v, f"finite and >= {least:g}")


def in_unit_interval(owner: str, *, open_left: bool = False, open_right: bool = False, **values: Any) -> None:
    """Every value in [0, 1]; either end can be left out."""
    rule = f"in {'(' if open_left else '['}0, 1{')' if open_right else ']'}"
    for name, value in values.items():
        if (v := _numbers(owner, name, value)) is not None:
            low = v > 0 if open_left else v >= 0
            high = v < 1 if open_right else v <= 1
            _require(bool(np.all(low & high)), owner, name, v, rule)


def positive_semidefinite(owner: str, name: str, matrix: Any) -> None:
    """Square, finite, symmetric and without an eigenvalue below rounding."""
    shape = np.shape(matrix)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{owner}: {name} must be a square matrix [m, m], got shape {shape}.")
    if (a := concrete(matrix)) is None:
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


def one_of(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """The value is one of a few words."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
