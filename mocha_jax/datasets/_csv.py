"""A CSV file with a column that names the task of every row."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.typing import DTypeLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.names import Named, Names, duplicates, listed, places
from mocha_jax._data.pack import pack_tasks
from mocha_jax._data.task_data import TaskData
from mocha_jax.datasets._column_types import decimal_commas, no_categories
from mocha_jax.datasets._tables import Table, columns_asked_for, read

_CATEGORIES = ("refuse", "encode")


@on_purpose
def csv(
    path: str | os.PathLike[str],
    label: str,
    group: str,
    *,
    features: Sequence[str] | None = None,
    categories: str | Sequence[str] = "refuse",
    delimiter: str | None = None,
    like: TaskData | None = None,
    loss_scaling: str = "sum",
    intercept: bool | float = False,
    dtype: DTypeLike | None = None,
) -> TaskData:
    r"""Read a CSV file with a column that names the task of every row; see `read_table` for what it may look like.

    Groups that are all integers are integers as names, else texts. Labels that are texts are classes, see `pack_tasks`.
    What is missing or no number is refused, by file, line and column. Samples and labels are read in full: pandas,
    polars or a database do more to a table before it goes to `pack_tasks`.

    Args:
      path: of the file.
      label: the column to predict.
      group: the column whose values name the tasks.
      features: the columns to predict from; default all others.
      categories: what to do with columns of texts among them: ``"refuse"``; ``"encode"``, a feature ``town=Oslo`` for
        every value of column ``town``, 1 where it is that and else 0, where dates, numbers with decimal commas, and
        more values than ten and a fifth of the rows, as names and ids have, are refused; or a list of columns to
        encode, whatever they hold.
      delimiter: between fields; default see `read_table`.
      like: other data, e.g. for training, see `pack_tasks`. Its features are read, encoded as there, and other columns
        passed over.
      loss_scaling: see `pack_tasks`.
      intercept: see `pack_tasks`.
      dtype: see `pack_tasks`; default JAX's float, without a warning.

    Examples:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "school.csv"
      >>> _ = path.write_text("school,hours,town,score\nA,1.5,Oslo,3\nB,2,Bergen,4\nA,0,Oslo,1\n")
      >>> data = csv(path, "score", "school", categories="encode")
      >>> data.names, data.sizes.tolist(), data.x[1, 0].tolist()
      (Names(tasks: 'A', 'B', features: 'hours', 'town=Bergen', 'town=Oslo'), [2, 1], [2.0, 1.0, 0.0])
    """
    for name, value in (("label", label), ("group", group)):
        if not isinstance(value, str) or not value:
            raise ValueError(f"csv: {name} must be the name of a column, got {check.shown(value)}.")
    if label == group:
        raise ValueError(f"csv: label and group must be two columns, got {label!r} for both.")
    wanted = None if features is None else columns_asked_for("csv", "features", features)
    encoded = _encoded(categories)
    names = Names()
    if like is not None:
        check.instance("csv", "like", like, TaskData, "the training data")
        names = like.names
        wanted = names.features if wanted is None else wanted
    texts = [group, *encoded, *(name for name in wanted or () if "=" in name)]
    if names.classes is not None:
        texts.append(label)
    table = read("csv", path, delimiter, list(dict.fromkeys(texts)))
    if like is None and dtype is None:
        dtype = canonicalize_dtype(np.float64)
    return packed(
        table, label, group, wanted, categories, like=like, loss_scaling=loss_scaling, intercept=intercept, dtype=dtype
    )


def packed(
    table: Table, label: str, group: str, features: Sequence[str] | None, categories: str | Sequence[str], *,
    like: TaskData | None = None, **options: Any,
) -> TaskData:  # fmt: skip
    """The rows of a table as samples of the tasks that a column names; arguments as `csv`."""
    like_names, encoded = Names() if like is None else like.names, _encoded(categories)
    places(table.path, "column", [label, group, *encoded], table.columns)
    columns = [name for name in table.columns if name not in (label, group)] if features is None else list(features)
    if taken := [name for name in columns if name in (label, group)]:
        raise ValueError(f"csv: features must not hold the label or the group, but {listed(taken)} is one of them.")
    names = columns if like is not None else _spelled(table, columns, categories, encoded)
    samples = Named(table.numbers(names), names)
    y = _labels(table, label, like_names)
    return pack_tasks(samples, y, table.names(group, like_names.tasks), like=like, **options)


def _encoded(categories: object) -> tuple[str, ...]:
    """The columns to encode that are given by name."""
    if isinstance(categories, str):
        check.one_of("csv", "categories", categories, _CATEGORIES)
        return ()
    return columns_asked_for("csv", "categories", categories)


def _spelled(table: Table, columns: list[str], categories: str | Sequence[str], encoded: Sequence[str]) -> list[str]:
    """The names of features, with one for every value of a column to encode."""
    names: list[str] = []
    every, table_columns = isinstance(categories, str) and categories == "encode", set(table.columns)
    for name in columns:
        if not name:
            raise ValueError(
                f"{table.path}, line 1: column {table.columns.index(name) + 1} has no name, as row numbers that pandas "
                f"writes have none; pass features=[...], or write the file with index=False."
            )
        if name in encoded or (every and name in table_columns and table.holds_texts(name)):
            texts = table.texts(name)
            if name not in encoded and (what := no_categories(texts)) is not None:
                raise ValueError(
                    f"{table.path}, column {name!r}: {what}; leave it out by features=[...], write it as numbers, or "
                    f"encode it all the same by categories=[{name!r}, ...]."
                )
            names += [f"{name}={level}" for level in sorted(set(texts))]
        else:
            names.append(name)
    if repeated := duplicates(names):
        raise ValueError(f"{table.path}: features must differ, but {listed(repeated)} occur more than once.")
    if not names:
        raise ValueError(f"{table.path}: has no column besides the label and the group; there are no features.")
    return names


def _labels(table: Table, label: str, names: Names) -> np.ndarray:
    """Numbers, or names of classes."""
    if names.classes is not None:
        return table.names(label, names.classes)
    if table.holds_texts(label):
        texts = table.texts(label)
        if decimal_commas(texts):
            raise ValueError(
                f"{table.path}, column {label!r}: {no_categories(texts)}; write them with a decimal point."
            )
        return np.array(texts)
    return table.numbers([label])[:, 0]
