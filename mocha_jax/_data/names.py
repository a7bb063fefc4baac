"""Names of tasks, features and classes, as the user's table has them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mocha_jax._core import check

DataFrame: TypeAlias = Any  # of pandas, polars or another library, none of which has to be installed

# Names that a message shows of many.
_SHOWN = 5


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True)  # so that no hash is part of a fingerprint
class Names:
    """Names of tasks, features and classes; None where there are none.

    They are compared by value, and hashed once: a data set may have many.
    """

    tasks: tuple[Hashable, ...] | None = None  # [num_tasks]
    features: tuple[str, ...] | None = None  # [d], without an appended intercept
    classes: tuple[Hashable, ...] | None = None  # those that labels -1 and 1, or 0, 1, ... stand for

    _hash: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for what in ("tasks", "features", "classes"):
            names = getattr(self, what)
            if names is None:
                continue
            if not isinstance(names, list | tuple) or not all(isinstance(name, Hashable) for name in names):
                raise ValueError(f"Names: {what} must be a list of names, got {check.shown(names)}.")
            object.__setattr__(self, what, tuple(names))
            if repeated := duplicates(names):
                raise ValueError(f"Names: {what} must differ, but {listed(repeated)} occur more than once.")
        object.__setattr__(self, "_hash", hash((self.tasks, self.features, self.classes)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Names) and hash(self) == hash(other) and self._all == other._all

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Names], tuple[object, ...]]:
        return Names, self._all  # hashes of strings differ between processes

    def __repr__(self) -> str:
        kinds = zip(("tasks", "features", "classes"), self._all, strict=True)
        return f"Names({', '.join(f'{what}: {listed(names)}' for what, names in kinds if names is not None)})"

    @property
    def _all(self) -> tuple[tuple[Hashable, ...] | None, ...]:
        return self.tasks, self.features, self.classes

    def replace(self, **changes: object) -> Names:
        """A copy with some of them changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def task(self, number: int) -> str:
        """A task for a message: by its name where it has one."""
        return f"task {number}" if self.tasks is None else f"task {self.tasks[number]!r}"


NAMELESS = Names()


class Named:
    """An array whose columns have names, as `columns_of` finds those of data frames."""

    ndim = 2

    def __init__(self, array: np.ndarray, columns: Sequence[str]) -> None:
        self.array, self.columns = array, list(columns)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


def duplicates(names: Sequence[Hashable]) -> list[Hashable]:
    """List the names that occur more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def listed(names: Sequence[Hashable]) -> str:
    """The first few names, for a message, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in list(names)[:_SHOWN]) + more


def columns_of(owner: str, table: object) -> tuple[str, ...] | None:
    """The names of a data frame's columns; of what has none, None."""
    columns = getattr(table, "columns", None)
    if columns is None or getattr(table, "ndim", 2) != 2:
        return None
    names = tuple(str(name) for name in columns)
    if repeated := duplicates(names):
        raise ValueError(f"{owner}: column names must differ, but {listed(repeated)} occur more than once.")
    return names


def columns_in_order(owner: str, names: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """The place of every feature that is wanted among those given."""
    place_of = {name: j for j, name in enumerate(names)}
    if missing := [name for name in wanted if name not in place_of]:
        raise ValueError(f"{owner} lacks {'feature' if len(missing) == 1 else 'features'} {listed(missing)}.")
    return np.array([place_of[name] for name in wanted], int)


def places(owner: str, what: str, wanted: Sequence[Hashable], known: Sequence[Hashable]) -> np.ndarray:
    """The place of every name among those that are known; `what` says in one word what one of them is."""
    place_of = {name: i for i, name in enumerate(known)}
    if missing := [name for name in dict.fromkeys(wanted) if name not in place_of]:
        whats, verb = (what, "is") if len(missing) == 1 else (what + ("es" if what.endswith("s") else "s"), "are")
        raise ValueError(
            f"{owner}: {whats} {listed(missing)} {verb} not among the {len(known)} that are known: {listed(known)}."
        )
    return np.array([place_of[name] for name in wanted], int)
