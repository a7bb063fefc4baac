"""Refusal of input that is not numbers in memory: sparse arrays, other kinds of tables, and dates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


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


def check_no_dates(owner: str, frame: Any) -> None:
    """Refuse columns of dates or times, which an array of the frame would turn into numbers."""
    times = (getattr(dtype, "is_temporal", None) for dtype in getattr(frame, "dtypes", ()))
    if (column := next((j for j, is_time in enumerate(times) if is_time is not None and is_time()), -1)) >= 0:
        raise ValueError(
            f"{owner}: column {frame.columns[column]!r} holds dates or times, which are no numbers; say which number "
            f"you mean, e.g. the days since the first, or leave it out."
        )


def _each(value: object) -> tuple[list[Any], bool]:
    """The arrays that a list, tuple or mapping has, or the array itself; and which it was."""
    several = isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes) and not _is_sparse(value)
    if not several:
        return [value], False
    some: Any = value
    return list(some.values() if isinstance(some, Mapping) else some), True


def _is_sparse(value: Any) -> bool:
    if hasattr(value, "tocsr") or type(value).__module__.startswith("jax.experimental.sparse"):
        return isinstance(getattr(value, "shape", None), tuple)
    # Columns of a data frame have types of their own; a single sparse column costs nothing.
    types = getattr(value, "dtypes", None) if getattr(value, "ndim", 0) == 2 else None
    return types is not None and any(type(one).__name__ == "SparseDtype" for one in types)


def _to_dense(value: Any) -> str:
    if hasattr(value, "tocsr"):
        return "toarray()"
    return "todense()" if hasattr(value, "todense") else 'astype("float32")'
