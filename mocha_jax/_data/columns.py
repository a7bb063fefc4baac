"""Samples as arrays of numbers, from data frames and Python objects; errors name the column and row."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.dense import check_no_dates


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


def is_missing(label: Any) -> bool:
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


def _fits(value: Any) -> bool:
    """Tell whether one thing, or all of a column, can be made numbers."""
    try:
        np.asarray(value, object).astype(float)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
