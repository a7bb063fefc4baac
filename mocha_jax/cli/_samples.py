"""Samples of a table for `fit`: the columns that are asked for, each checked before anything is trained."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import NamedTuple

import numpy as np
from jax.dtypes import canonicalize_dtype

import mocha_jax as mj
from mocha_jax._selection.preparation import FREE_INTERCEPT
from mocha_jax.cli import _arguments, _table
from mocha_jax.datasets import Table
from mocha_jax.datasets._csv import packed
from mocha_jax.datasets._fields import decimal_commas, is_number, no_categories


class Samples(NamedTuple):
    data: mj.TaskData
    binary: bool
    absent: np.ndarray | None  # [m, n, d] where a number is missing, of which the data has a 0
    medians: dict[str, float]  # by features of numbers, with --impute


def read(options: argparse.Namespace) -> Samples:
    """Samples of every group, with the labels of two classes as -1 and 1."""
    table = _table.opened(options, (options.group, *options.categories))
    columns = _columns(table, options)
    numbers = [name for name in columns if table.column(name).dtype.kind == "f"]
    table, missing = _without_missing(table, columns, numbers, options)
    _check_groups(table, options)
    for name in columns:
        if name not in numbers and name not in options.categories:
            _check_categories(table, name, options.encode)
    _check_label(table, options.label)
    medians = {name: float(np.nanmedian(table.column(name))) for name in numbers} if options.impute else {}
    table = _table.with_columns(table, {name: np.where(missing[name], 0.0, table.column(name)) for name in missing})
    dtype = canonicalize_dtype(np.float64)
    data = packed(
        table, options.label, options.group, columns, [name for name in columns if name not in numbers],
        loss_scaling="task_mean", intercept=FREE_INTERCEPT, dtype=dtype,
    )  # fmt: skip
    absent = None
    if missing:  # in the places of the samples
        none = np.zeros(len(table), bool)
        marks = np.stack([missing.get(name, none) for name in data.names.features or ()], axis=1)
        groups = table.names(options.group)
        absent = np.asarray(mj.pack_tasks(marks.astype(dtype), none.astype(dtype), groups, dtype=dtype).x) > 0
    return Samples(*_two_classes(data), absent, medians)


def _columns(table: Table, options: argparse.Namespace) -> list[str]:
    """The columns to predict from."""
    label, group = options.label, options.group
    if label == group:
        raise ValueError(f"--label and --group must be two columns, got {label!r} for both.")
    _arguments.check_columns(
        table, label=[label], group=[group], features=options.features or [], exclude=options.exclude,
        categories=options.categories,
    )  # fmt: skip
    for option in ("features", "categories"):
        if taken := [name for name in getattr(options, option) or () if name in (label, group)]:
            raise ValueError(
                f"--{option}: {taken[0]!r} is the column of the {'label' if taken[0] == label else 'groups'}."
            )
    left_out = (label, group, *options.exclude)
    columns = [name for name in dict.fromkeys(options.features or table.columns) if name not in left_out]
    if not columns:
        raise ValueError(f"{table.path}: there is no column left to predict from, beside the label and the group.")
    if "" in columns:
        raise ValueError(
            f"{table.path}: column {table.columns.index('') + 1} has no name, as row numbers have none; --exclude '' "
            f"leaves it out."
        )
    return columns


def _without_missing(
    table: Table, columns: list[str], numbers: list[str], options: argparse.Namespace
) -> tuple[Table, dict[str, np.ndarray]]:
    """The rows that have all values but those to impute, and where these are missing."""
    cells = _table.lacking(table, [options.label, options.group, *columns])
    imputed = {name: cells.pop(name) for name in numbers if options.impute and name in cells}
    if cells and not options.drop_missing:
        ways = ["--drop-missing leaves these rows out"]
        if any(name in numbers for name in cells):
            ways.append("--impute median fills in numbers")
        raise ValueError(f"{_table.counted(table, cells)}; {', '.join(ways)}.")
    if cells:
        lost = np.any(list(cells.values()), axis=0)
        table, imputed = _table.with_rows(table, ~lost), {name: cell[~lost] for name, cell in imputed.items()}
        if lost.all():
            raise ValueError(f"{table.path}: no row has all its values; --exclude leaves columns out.")
        print(f"{int(lost.sum())} rows that lack a value are left out.")
    if empty := [name for name, cell in imputed.items() if cell.all()]:
        raise ValueError(f"{table.path}, column {empty[0]!r}: has no value at all; --exclude {empty[0]} leaves it out.")
    return table, {name: cell for name, cell in imputed.items() if cell.any()}


def _check_groups(table: Table, options: argparse.Namespace) -> None:
    """Refuse groups of hardly a row each, and more folds than any group has rows."""
    sizes = Counter(table.texts(options.group))
    if 2 * len(sizes) > len(table):
        raise ValueError(
            f"--group: column {options.group!r} has {len(sizes)} different values in {len(table)} rows, less than two "
            f"rows for each; name a column whose values repeat, such as that of schools or machines."
        )
    if options.folds > (largest := max(sizes.values())):
        raise ValueError(f"--folds: must be at most {largest}, the rows of the largest group, got {options.folds}.")


def _check_categories(table: Table, name: str, encode: bool) -> None:
    """Refuse a column of texts that should not become a feature for every value, by what can be done about it."""
    texts = table.texts(name)
    what, leave = no_categories(texts), f"--exclude {name} leaves it out"
    if decimal_commas(texts):
        raise ValueError(f"{table.path}, column {name!r}: {what}; --decimal-comma reads them.")
    if not table.holds_texts(name):
        row = next(row for row, text in enumerate(texts) if not is_number(text))
        raise ValueError(
            f"{table.path}, line {table.lines[row]}, column {name!r}: {texts[row]!r} is no number; {leave}, "
            f"--categories {name} makes a feature of every value."
        )
    if what is not None:
        raise ValueError(
            f"{table.path}, column {name!r}: {what}; {leave}, --categories {name} encodes it all the same."
        )
    if not encode:
        raise ValueError(
            f"{table.path}, column {name!r}: holds texts such as {texts[0]!r}; --encode makes a feature of every "
            f"value, {leave}."
        )


def _check_label(table: Table, label: str) -> None:
    """Refuse texts that are not the names of two classes."""
    if not table.holds_texts(label):
        return
    texts = table.texts(label)
    if decimal_commas(texts):
        raise ValueError(f"{table.path}, column {label!r}: {no_categories(texts)}; --decimal-comma reads them.")
    if (count := len(set(texts))) != 2:
        raise ValueError(
            f"--label: column {label!r} holds {count} different texts, and fit predicts numbers or two classes; "
            f"in Python multiclass.cross_validate knows more."
        )


def _two_classes(data: mj.TaskData) -> tuple[mj.TaskData, bool]:
    """The data, and whether its labels are two classes, then -1 and 1."""
    values = np.unique(np.asarray(data.y)[np.asarray(data.weight) > 0])
    if data.names.classes is not None or values.tolist() == [-1.0, 1.0]:
        return data, True
    if values.tolist() == [0.0, 1.0]:
        return data.replace(y=2.0 * data.y - 1.0, names=data.names.replace(classes=(0, 1))), True
    return data, False
