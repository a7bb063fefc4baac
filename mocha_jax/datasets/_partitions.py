"""Samples that are already partitioned: pairs of arrays, tables, partitioners of data sets."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.frames import check_frames
from mocha_jax._data.names import Named, columns_of, listed, places
from mocha_jax._data.pack import pack_tasks
from mocha_jax._data.read import Tables
from mocha_jax._data.task_data import TaskData
from mocha_jax.datasets._tables import columns_asked_for

TaskPart: TypeAlias = Any  # a pair of arrays, or a table of any library


class Partitioner(Protocol):
    """A division of a data set, as Flower has them."""

    @property
    def num_partitions(self) -> int: ...

    def load_partition(self, number: int, /) -> TaskPart: ...


@on_purpose
def from_partitions(
    parts: Mapping[Any, TaskPart] | Iterable[TaskPart] | Partitioner,
    label: str = "label",
    features: Sequence[str] | None = None,
    *,
    like: TaskData | None = None,
    loss_scaling: str = "sum",
    intercept: bool | float = False,
    dtype: DTypeLike | None = None,
) -> TaskData:
    """Pack samples that are already partitioned, one part per task, from any library.

    A part is a pair of arrays, samples ``[n_t, ...]`` and labels ``[n_t]``; or a table with the columns by name: a
    data set of Hugging Face, a data frame, a mapping of names to arrays. Columns that hold arrays, such as images, are
    flattened: features ``image[0]``, ``image[1]``, ... Class labels of Hugging Face keep their names and
    order: they become 0, 1, ..., or -1 and 1 for two classes.

    Args:
      parts: an iterable of parts; a mapping of names of tasks to them; or a partitioner, with ``num_partitions`` and
        ``load_partition(i)`` as those of Flower have, whose tasks are named by number, or by what it deals by.
      label: the column to predict, where parts are tables.
      features: the columns to predict from; default all others.
      like: other data, e.g. for training, see `pack_tasks`; parts then need names.
      loss_scaling: see `pack_tasks`.
      intercept: see `pack_tasks`.
      dtype: see `pack_tasks`; default JAX's float, without a warning.

    Examples:
      >>> import numpy as np
      >>> parts = ((np.full((n, 2, 2), n), np.ones(n)) for n in (3, 1))
      >>> data = from_partitions(parts)
      >>> data.x.shape, data.sizes.tolist()
      ((2, 3, 4), [3, 1])
      >>> table = {"age": [30.0, 40.0], "image": np.zeros((2, 1, 2)), "label": [1, -1]}
      >>> from_partitions({"Oslo": table}).names
      Names(tasks: 'Oslo', features: 'age', 'image[0]', 'image[1]')
    """
    if not isinstance(label, str) or not label:
        raise ValueError(f"from_partitions: label must be the name of a column, got {check.shown(label)}.")
    wanted = None if features is None else columns_asked_for("from_partitions", "features", features)
    if like is not None:
        check.instance("from_partitions", "like", like, TaskData, "the training data")
    names, partitions = _named(parts)
    if not partitions:
        raise ValueError("from_partitions: parts must be one a task, got none.")
    classes = next(
        (names_of_classes for part in partitions if (names_of_classes := _classes(part, label)) is not None), None
    )
    xs: list[ArrayLike] = []
    ys: list[ArrayLike] = []
    for number, part in enumerate(partitions):
        owner = f"from_partitions: part {number if names is None else repr(names[number])}"
        x, y = _pair(owner, part, label, wanted)
        xs.append(x)
        ys.append(y if classes is None else _coded(owner, part, y, label, classes, like))
    dtype = canonicalize_dtype(np.float64) if like is None and dtype is None else dtype
    tasks: tuple[Tables, Tables] = xs, ys
    if names is not None:
        tasks = dict(zip(names, xs, strict=True)), dict(zip(names, ys, strict=True))
    data = pack_tasks(*tasks, like=like, loss_scaling=loss_scaling, intercept=intercept, dtype=dtype)
    return data if classes is None or like is not None else data.replace(names=data.names.replace(classes=classes))


def _named(parts: Any) -> tuple[list[Hashable] | None, list[TaskPart]]:
    """The parts, and the names of their tasks where they have some."""
    if isinstance(parts, Mapping):
        return list(parts), list(parts.values())
    if hasattr(parts, "load_partition") and hasattr(parts, "num_partitions"):
        check.integer("from_partitions: parts", 1, num_partitions=parts.num_partitions)
        numbers = range(int(parts.num_partitions))
        partitions = [parts.load_partition(i) for i in numbers]
        by = getattr(parts, "partition_id_to_natural_id", None)
        all_named = isinstance(by, Mapping) and all(i in by for i in numbers)
        return [by[i] if all_named else i for i in numbers], partitions  # type: ignore[index]
    if isinstance(parts, str | bytes) or columns_of("from_partitions", parts) is not None or _is_table(parts):
        raise ValueError(
            f"from_partitions: parts must be an iterable of parts, one a task, got {check.shown(parts)}; for one table "
            f"see pack_tasks(table, label, group)."
        )
    try:
        return None, list(parts)
    except Exception as error:  # whatever keeps it from being gone through
        raise ValueError(
            f"from_partitions: parts must be an iterable of parts, one a task, got {check.shown(parts)}."
        ) from error


def _is_table(part: object) -> bool:
    return hasattr(part, "column_names") and hasattr(part, "with_format")  # of Hugging Face


def _pair(owner: str, part: TaskPart, label: str, features: Sequence[str] | None) -> tuple[ArrayLike, ArrayLike]:
    """Samples and labels of a part."""
    if _is_table(part):
        part = part.with_format("numpy")[:]
    check_frames(owner, "part", [part])
    columns = tuple(part) if isinstance(part, Mapping) else columns_of(owner, part)
    if columns is None:
        if not isinstance(part, list | tuple) or len(part) != 2:
            raise ValueError(
                f"{owner} must be a pair of samples and labels, or a table with columns by name; parts has "
                f"{check.shown(part)}."
            )
        x = check.concrete(part[0])
        return (part[0] if x is None or x.ndim < 3 else _flat(x)), part[1]
    wanted = [name for name in columns if name != label] if features is None else list(features)
    places(owner, "column", [label, *wanted], columns)
    if not wanted:
        raise ValueError(f"{owner} has no column besides the label {label!r}; there are no features.")
    arrays = {name: _column(owner, name, part[name]) for name in wanted}
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError(f"{owner} has columns of different lengths: {listed([len(a) for a in arrays.values()])}.")
    names = [n for name, a in arrays.items() for n in ([name] if a.ndim < 2 else _numbered(name, a))]
    flat = np.concatenate([_flat(a) for a in arrays.values()], axis=1)
    return Named(flat, names), part[label]


def _flat(array: np.ndarray) -> np.ndarray:
    """Samples of any shape as rows; there may be none."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))


def _numbered(name: str, array: np.ndarray) -> list[str]:
    return [f"{name}[{k}]" for k in range(int(np.prod(array.shape[1:])))]


def _column(owner: str, name: str, column: object) -> np.ndarray:
    """The numbers of a column, or of the arrays that it holds."""
    array = check.concrete(column)
    if array is None:  # of objects: numbers of data frames, or arrays
        try:
            array = np.stack([np.asarray(one, float) for one in column])  # type: ignore[attr-defined]
        except Exception:  # texts, nothing, arrays of different shapes
            array = None
    if array is None or array.ndim < 1 or array.dtype.kind not in "fiub":
        example = "" if array is None or array.size == 0 else f", e.g. {array.flat[0]!s}"
        raise ValueError(
            f"{owner}: column {name!r} holds what is no number, or arrays of different shapes{example}; encode it, or "
            f"leave it out with features=[...]."
        )
    return array


def _classes(part: TaskPart, label: str) -> tuple[str, ...] | None:
    """The names of classes that a data set of Hugging Face has for its labels."""
    kinds = getattr(part, "features", None) if _is_table(part) else None
    kind = kinds.get(label) if isinstance(kinds, Mapping) else None
    names = getattr(kind, "names", None)
    return tuple(names) if isinstance(names, list | tuple) and len(names) > 1 else None


def _coded(
    owner: str, part: TaskPart, y: ArrayLike, label: str, classes: tuple[str, ...], like: TaskData | None
) -> np.ndarray:
    """Numbers of classes as labels; as names where other data has classes, in whatever order."""
    if _classes(part, label) != classes:
        raise ValueError(f"{owner} has other classes than the first: {listed(_classes(part, label) or ())}.")
    number = check.concrete(y)
    if number is None or number.dtype.kind not in "iu" or not ((number >= 0) & (number < len(classes))).all():
        raise ValueError(f"{owner}: column {label!r} must hold numbers of its {len(classes)} classes.")
    if like is not None and like.names.classes is not None:
        return np.array(classes)[number]
    return 2.0 * number - 1.0 if len(classes) == 2 else number.astype(float)
