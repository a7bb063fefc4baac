"""Samples as arrays of numbers, from arrays, data frames and Python objects; errors name the column and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.names import DataFrame


def masked(value: object) -> bool:
    """Tell whether values are masked, in an array or a list of them: NumPy would take what lies beneath for data."""
    if isinstance(value, list | tuple):
        return any(masked(one) for one in value)
    return bool(np.ma.is_masked(value))


def check_unmasked(owner: str, **arrays: object) -> None:
    """Check that arrays have no masked values."""
    for name, array in arrays.items():
        if masked(array):
            raise ValueError(
                f"{owner}: {name} holds masked values, which have no numbers; leave those samples out or impute them."
            )


def samples_of(owner: str, table: object, features: tuple[str, ...] | None) -> np.ndarray | None:
    """The numbers of a table: an array, or a data frame with these features, which may hold them as objects.

    Booleans count as 0 and 1. Of what is no array at all, or holds no numbers at all, None or the array itself.
    """
    if features is not None:
        check_no_dates(owner, table)
    array = array_of(table)
    return array if array is None or array.ndim != 2 else _numbers(owner, array, features)


def array_of(value: object) -> np.ndarray | None:
    """An object as an array of numbers, texts or objects; None if it has no concrete array."""
    array = check.concrete(value)
    return of_objects(value) if array is None and not check.hidden(value) else array


def of_objects(value: object) -> np.ndarray | None:
    """An array of Python objects, as data frames have them for texts; None where it is no array at all."""
    try:
        array = np.asarray(value)
    except Exception:  # any error of a foreign `__array__`
        return None
    if array.dtype != object or np.ma.is_masked(value) or not array.ndim:
        return None
    if all(isinstance(each, str) for each in array.flat):
        return array if any(each.endswith("\0") for each in array.flat) else array.astype(str)  # which drops a last \0
    return None if any(np.ndim(each) for each in array.flat) else array


def missing(labels: np.ndarray) -> np.ndarray:
    """Tell where labels are missing."""
    if labels.dtype.kind == "f":
        return np.isnan(labels)
    if labels.dtype.kind != "O":
        return np.zeros(labels.shape, bool)
    return np.array([is_missing(label) for label in labels.flat], bool).reshape(labels.shape)


def is_missing(label: object) -> bool:
    """Tell whether it is NaN, None, or what data frames have for them."""
    return label is None or type(label).__name__ in ("NAType", "NaTType") or bool(label != label)


def _numbers(owner: str, x: np.ndarray, features: tuple[str, ...] | None) -> np.ndarray:
    """A table of numbers; what else is in it is named by its column."""
    if x.dtype.kind != "O" and (features is None or x.dtype.kind not in "USMm"):
        return x
    for j in range(x.shape[1]):
        if x.dtype.kind not in "Mm" and _fits(x[:, j]):
            continue
        column = f"column {j}" if features is None else f"column {features[j]!r}"
        unknown = missing(x[:, j])
        for row, value in enumerate(x[:, j]):
            if unknown[row]:
                raise ValueError(f"{owner}: {column} has no value in row {row}; impute it, or leave the row out.")
            if x.dtype.kind in "Mm" or not _fits(value):
                dated = x.dtype.kind in "Mm" or isinstance(value, date | timedelta)
                how = "make numbers of it, such as days," if dated else "encode it, e.g. one column for each value,"
                raise ValueError(
                    f"{owner}: {column} holds what is no number, e.g. {_plain(value)!r}; {how} or leave it out."
                )
    return x.astype(float)


def _fits(value: object) -> bool:
    """Tell whether one thing, or all of a column, can be made numbers."""
    try:
        np.asarray(value, object).astype(float)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def check_dense(owner: str, name: str, value: object) -> None:
    """Refuse sparse arrays, also in a list, tuple or mapping: inspecting some of them takes minutes."""
    each, several = _each(value)
    if not (sparse := [one for one in each if _is_sparse(one)]):
        return
    size = sum(4e-9 * float(np.prod(one.shape)) for one in sparse)
    many = f"{len(sparse)} arrays such as {list(sparse[0].shape)} take" if len(sparse) > 1 else None
    what = f"{name}{'[...]' if several else ''}.{_to_dense(sparse[0])}"
    raise ValueError(
        f"{owner}: {name} is sparse, and samples are stored dense: {many or f'{list(sparse[0].shape)} takes'} "
        f"{size:.2g} GB in float32. Pass {what} where that fits; else map the samples to fewer features first, e.g. by "
        f"hashing."
    )


def check_frames(owner: str, name: str, value: object) -> None:
    """Refuse tables that are not data frames yet, also in a list or mapping."""
    each, several = _each(value)
    for one in each:
        kind, remedy = type(one).__name__, None
        if kind == "LazyFrame" and hasattr(one, "collect"):  # of polars
            remedy = "collect()"
        elif hasattr(one, "column_names") and hasattr(one, "to_pandas"):  # of pyarrow, of Hugging Face
            remedy = "to_pandas()"
        if remedy is not None:
            what = f"{name}{'[...]' if several else ''}.{remedy}"
            raise ValueError(f"{owner}: {name} is a {kind}, which is no data frame; pass {what}.")


def check_no_dates(owner: str, frame: DataFrame) -> None:
    """Refuse columns of dates or times, which an array of the frame would turn into numbers."""
    times = (getattr(dtype, "is_temporal", None) for dtype in getattr(frame, "dtypes", ()))
    if (column := next((j for j, is_time in enumerate(times) if is_time is not None and is_time()), -1)) >= 0:
        raise ValueError(
            f"{owner}: column {frame.columns[column]!r} holds dates or times, which are no numbers; say which number "
            f"you mean, e.g. the days since the first, or leave it out."
        )


def _each(value: object) -> tuple[list[Any], bool]:
    """The arrays that a list, tuple or mapping has, or the array itself; and which it was."""
    if not isinstance(value, Mapping | Sequence) or isinstance(value, str | bytes) or _is_sparse(value):
        return [value], False
    return list(value.values() if isinstance(value, Mapping) else value), True


def _is_sparse(value: object) -> bool:
    if hasattr(value, "tocsr") or type(value).__module__.startswith("jax.experimental.sparse"):
        return isinstance(getattr(value, "shape", None), tuple)
    # Columns of a data frame have types of their own; a single sparse column costs nothing.
    types = getattr(value, "dtypes", None) if getattr(value, "ndim", 0) == 2 else None
    return types is not None and any(type(one).__name__ == "SparseDtype" for one in types)


def _to_dense(value: object) -> str:
    if hasattr(value, "tocsr"):
        return "toarray()"
    return "todense()" if hasattr(value, "todense") else 'astype("float32")'
