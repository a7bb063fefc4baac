"""Tables of text files: columns by name, and a line number for whatever is wrong in them."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Hashable, Sequence
from typing import NoReturn

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.names import duplicates, listed, places
from mocha_jax.datasets._column_types import as_numbers, columns_in, is_number, readings, text_file


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Columns of a file by name; from `read_table`.

    Args:
      path: of the file, for messages.
      columns: the names, in the order of the file.
      values: of every column ``[N]`` float64 where all of it is numbers, else texts as Python's.
      lines: the line of the file that a row begins in, ``[N]``; the first is 1, which holds the names.
    """

    path: str
    columns: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return f"Table({self.path}: {len(self)} rows, columns {listed(self.columns)})"

    def column(self, name: str) -> np.ndarray:
        """The numbers of a column ``[N]``, or its texts where not all of it is numbers.

        Args:
          name: of the column.
        """
        if not isinstance(name, str):
            raise ValueError(f"{self.path}: name must be that of a column, got {check.shown(name)}.")
        if name not in self._places:
            places(self.path, "column", [name], self.columns)  # which says what there is
        return self.values[self._places[name]]

    def numbers(self, names: Sequence[str] | None = None) -> np.ndarray:
        """The columns as samples ``[N, d]`` float64; what is missing or no number is refused by line and column.

        Args:
          names: of columns; default all. Where there is no column ``town=Oslo`` but a column ``town``, that is 1 where
            the town is Oslo and else 0; a value for which there is no such name is refused.
        """
        wanted = self.columns if names is None else columns_asked_for(self.path, "names", names)
        x = np.empty((len(self), len(wanted)))
        levels: dict[str, dict[str, int]] = {}
        for j, name in enumerate(wanted):
            if name in self._places:
                x[:, j] = self._numbers(name)
            elif (level := self._level(name)) is not None:
                levels.setdefault(level[0], {})[level[1]] = j
            else:
                places(self.path, "column", [name], self.columns)
        for name, column_of in levels.items():
            texts = self.texts(name)
            for row, text in enumerate(texts):
                if text not in column_of:
                    self._refuse(row, name, f"{text!r} is not among the {len(column_of)} values that are known: "
                                           f"{listed(list(column_of))}")  # fmt: skip
            places_of = np.array([column_of[text] for text in texts], int)
            x[:, list(column_of.values())] = places_of[:, None] == list(column_of.values())
        return x

    def texts(self, name: str) -> list[str]:
        """A column's texts; of numbers the shortest that stand for them. An empty one is refused by its line.

        Args:
          name: of the column. Numbers such as 007 keep their form where `read_table` was told so.
        """
        column = self.column(name)
        if column.dtype.kind == "f":
            if not (finite := np.isfinite(column)).all():
                self._refuse_number(int(np.argmin(finite)), name)
            return [str(int(v)) if v.is_integer() else repr(v) for v in column.tolist()]
        texts = [text.strip() for text in column.tolist()]
        if "" in texts:
            self._refuse(texts.index(""), name, "is empty; fill it in, or leave the row out")
        if (cut := next((row for row, text in enumerate(texts) if text.endswith("\0")), None)) is not None:
            self._refuse(cut, name, f"{texts[cut]!r} ends with a null character, which an array drops; take it out")
        return texts

    def names(self, name: str, known: Sequence[Hashable] | None = None) -> np.ndarray:
        """A column of names of tasks or classes ``[N]``: integers where all of it is such, else texts.

        Args:
          name: of the column.
          known: names of a model or of other data, e.g. ``model.tasks``; they are found by their texts, and others are
            refused by their line.
        """
        texts = self.texts(name)
        several = set(texts)
        if known is None:
            whole = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in several)
            return np.array([int(text) for text in texts] if whole else texts)
        if not isinstance(known, list | tuple) or not all(isinstance(one, Hashable) for one in known):
            raise ValueError(f"{self.path}: known must be a list of names, got {check.shown(known)}.")
        name_of: dict[str, Hashable] = {str(one): one for one in known}
        name_of |= {str(int(one)): one for one in known if isinstance(one, float) and one.is_integer()}
        if not several <= name_of.keys():
            row = next(row for row, text in enumerate(texts) if text not in name_of)
            self._refuse(row, name, f"{texts[row]!r} is not among the {len(known)} that are known: {listed(known)}")
        as_named = [name_of[text] for text in texts]
        return np.array(as_named, None if len({type(one) for one in as_named}) == 1 else object)

    def holds_texts(self, name: str) -> bool:
        """Tell whether no value of a column is a number.

        Args:
          name: of the column.
        """
        column = self.column(name)
        return column.dtype.kind == "O" and not any(is_number(text) for text in set(column.tolist()))

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """The place of every column."""
        return {name: j for j, name in enumerate(self.columns)}

    def _refuse(self, row: int, column: str, what: str) -> NoReturn:
        raise ValueError(f"{self.path}, line {self.lines[row]}, column {column!r}: {what}.")

    def _numbers(self, name: str) -> np.ndarray:
        column = self.column(name)
        if column.dtype.kind == "O":
            if self.holds_texts(name) and (filled := [row for row, text in enumerate(column) if text.strip()]):
                text = column[filled[0]]
                self._refuse(
                    filled[0], name,
                    f"{text!r} is a text; encode the column as categories, or leave it out of the features",
                )  # fmt: skip
            numbers = as_numbers(column.tolist())
            if numbers is None:
                self._refuse_number(next(row for row, text in enumerate(column) if not is_number(text)), name)
            column = numbers
        if not (finite := np.isfinite(column)).all():
            self._refuse_number(int(np.argmin(finite)), name)
        return column

    def _refuse_number(self, row: int, name: str) -> NoReturn:
        value = self.column(name)[row]
        if isinstance(value, str) and not value.strip():
            self._refuse(row, name, "is empty; fill it in, or leave the row out")
        shown = repr(value) if isinstance(value, str) else repr(float(value))
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value):
            self._refuse(row, name, f"{shown} is no number; write it with a decimal point")
        finite = "" if isinstance(value, str) and as_numbers([value]) is None else "finite "
        self._refuse(row, name, f"{shown} is no {finite}number; impute it, or leave the row out")

    def _level(self, name: str) -> tuple[str, str] | None:
        """The column and the value that a name such as ``town=Oslo`` means."""
        return next(((column, level) for column, level in readings(name) if column in self._places), None)


def read_table(
    path: str | os.PathLike[str], *, delimiter: str | None = None, texts: Sequence[str] = ()
) -> Table:  # fmt: skip
    r"""Read a CSV file whose first line names the columns, e.g. of samples without labels to predict for.

    Fields may be quoted, and hold line breaks then; a file whose name ends in ``.gz`` is unpacked. Numbers have a
    decimal point. Blank lines are passed over.

    Args:
      path: of a file in UTF-8, with or without byte order mark.
      delimiter: between fields; default that of comma, semicolon, tabulator and ``|`` which makes most of the header.
      texts: columns to keep as texts even where they look like numbers, e.g. that of the groups: 007 is not 7. A name
        ``town=Oslo`` means column ``town``.

    Examples:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "school.csv"
      >>> _ = path.write_text("school,hours,town\n007,1.5,Oslo\n012,2,Bergen\n")
      >>> table = read_table(path, texts=["school"])
      >>> table.columns, table.names("school").tolist(), table.numbers(["hours", "town=Bergen", "town=Oslo"]).tolist()
      (('school', 'hours', 'town'), ['007', '012'], [[1.5, 0.0, 1.0], [2.0, 1.0, 0.0]])
    """
    return read("read_table", path, delimiter, texts)


def read(owner: str, path: str | os.PathLike[str], delimiter: str | None, texts: Sequence[str]) -> Table:
    """Read a table for a function of some name."""
    place = text_file(owner, path)
    texts = columns_asked_for(owner, "texts", texts)
    if delimiter is not None and not (isinstance(delimiter, str) and re.fullmatch(r'[^\w"\r\n]|_', delimiter)):
        raise ValueError(f'{owner}: delimiter must be one character such as ";", got {check.shown(delimiter)}.')
    columns, values, lines = columns_in(place, delimiter, texts)
    return Table(str(place), columns, values, lines)


def columns_asked_for(owner: str, name: str, asked: object) -> tuple[str, ...]:
    """Names of columns, in a list or the like."""
    row = getattr(asked, "ndim", 1) == 1
    several = row and isinstance(asked, Sequence | np.ndarray) and not isinstance(asked, str | bytes)
    names = [str(one) if isinstance(one, str) else None for one in asked] if several else [None]  # type: ignore[attr-defined]
    if None in names or duplicates(names):
        raise ValueError(f"{owner}: {name} must be a list of different names of columns, got {check.shown(asked)}.")
    return tuple(one for one in names if one is not None)
