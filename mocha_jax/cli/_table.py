"""Tables as the commands read them: numbers with decimal commas, and cells without a value."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.dtypes import canonicalize_dtype

import mocha_jax as mj
from mocha_jax._selection.preparation import FREE_INTERCEPT
from mocha_jax.cli import _arguments
from mocha_jax.datasets import Table, read_table
from mocha_jax.datasets._column_types import decimal_commas, is_number, no_categories
from mocha_jax.datasets._csv import packed

# What stands for no value in a column of numbers, besides an empty cell.
_NONE = ("#n/a", "<na>", "n/a", "na", "nan", "none", "null")

# Columns that a message counts them in.
_SHOWN = 20


def add_to(command: argparse.ArgumentParser, group: str | None = None) -> None:
    """Add the options of a table: its file, the column of the groups, and how it is written."""
    command.add_argument("table", type=Path, help="CSV file")
    default = "" if group is None else f" (default: {group})"
    command.add_argument(
        "--group", required=group is None, help=f"the column that names the group of every row{default}"
    )
    command.add_argument("--delimiter", type=_arguments.delimiter, help="between fields (default: found)")
    command.add_argument("--decimal-comma", action="store_true", help="numbers are written 1,5")


def opened(options: argparse.Namespace, texts: Sequence[str]) -> Table:
    """Read the table, with numbers in columns where some cells have no value, which are NaN.

    Args:
      options: of the command.
      texts: columns to keep as texts.
    """
    _arguments.check_inputs(options.table)
    table = read_table(options.table, delimiter=options.delimiter, texts=tuple(dict.fromkeys(texts)))
    kept = {column for column in table.columns for text in texts if text == column or text.startswith(f"{column}=")}
    return with_columns(
        table,
        {
            name: _numbers(table.column(name), options.decimal_comma)
            for name in table.columns
            if name not in kept and table.column(name).dtype.kind == "O"
        },
    )


def with_columns(table: Table, columns: Mapping[str, np.ndarray]) -> Table:
    """The table with other values in some columns."""
    values = tuple(columns.get(name, old) for name, old in zip(table.columns, table.values, strict=True))
    return dataclasses.replace(table, values=values)


def with_rows(table: Table, rows: np.ndarray) -> Table:
    """The rows of a table that are marked."""
    return dataclasses.replace(table, values=tuple(each[rows] for each in table.values), lines=table.lines[rows])


def lacking(table: Table, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns in which cells have no value, with these cells marked."""
    empty = {}
    for name in names:
        column = table.column(name)
        numbers = column.dtype.kind == "f"
        cells = np.isnan(column) if numbers else np.array([not text.strip() for text in column], bool)
        if cells.any():
            empty[name] = cells
    return empty


def counted(table: Table, cells: Mapping[str, np.ndarray]) -> str:
    """Say how many cells have no value, for a message."""
    rows = int(np.any(list(cells.values()), axis=0).sum())
    columns = ", ".join(f"{name}: {int(marked.sum())}" for name, marked in list(cells.items())[:_SHOWN])
    more = f" and {len(cells) - _SHOWN} more columns" if len(cells) > _SHOWN else ""
    return f"{table.path}: {rows} of {len(table)} rows lack a value ({columns}{more})"


def _numbers(column: np.ndarray, comma: bool) -> np.ndarray:
    """Numbers, with NaN for empty cells, if all other cells are numbers; else the column unchanged."""
    texts = [text.strip() for text in column]
    filled = [text for text in texts if text and text.lower() not in _NONE]
    if comma and decimal_commas(filled):
        filled = [text.replace(",", ".") for text in filled]
    if not all(map(is_number, set(filled))) or (not filled and any(texts)):
        return column
    numbers = np.full(len(texts), np.nan)
    numbers[[bool(text) and text.lower() not in _NONE for text in texts]] = [float(text) for text in filled]
    return numbers


class Samples(NamedTuple):
    data: mj.TaskData
    binary: bool
    absent: np.ndarray | None  # [m, n, d] where a number is missing, of which the data has a 0
    medians: dict[str, float]  # by features of numbers, with --impute


def read_samples(options: argparse.Namespace) -> Samples:
    """Samples of every group, with the labels of two classes as -1 and 1."""
    table = opened(options, (options.group, *options.categories))
    columns = _columns(table, options)
    numbers = [name for name in columns if table.column(name).dtype.kind == "f"]
    table, missing = _without_missing(table, columns, numbers, options)
    _check_groups(table, options)
    for name in columns:
        if name not in numbers and name not in options.categories:
            _check_categories(table, name, options.encode)
    _check_label(table, options.label)
    medians = {name: float(np.nanmedian(table.column(name))) for name in numbers} if options.impute else {}
    table = with_columns(table, {name: np.where(missing[name], 0.0, table.column(name)) for name in missing})
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
    cells = lacking(table, [options.label, options.group, *columns])
    imputed = {name: cells.pop(name) for name in numbers if options.impute and name in cells}
    if cells and not options.drop_missing:
        ways = ["--drop-missing leaves these rows out"]
        if any(name in numbers for name in cells):
            ways.append("--impute median fills in numbers")
        raise ValueError(f"{counted(table, cells)}; {', '.join(ways)}.")
    if cells:
        lost = np.any(list(cells.values()), axis=0)
        table, imputed = with_rows(table, ~lost), {name: cell[~lost] for name, cell in imputed.items()}
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
