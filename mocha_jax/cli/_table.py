"""Tables as the commands read them: numbers with decimal commas, and cells without a value."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mocha_jax.cli import _arguments
from mocha_jax.datasets import Table, read_table
from mocha_jax.datasets._fields import decimal_commas, is_number

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
