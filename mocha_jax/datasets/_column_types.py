"""Fields of text files: rows split at a delimiter, and columns of numbers, categories or texts made of them."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.names import duplicates, listed

# Texts are names or ids rather than categories where there are more of them, and fewer rows for each.
_HANDFUL, _ROWS_EACH = 10, 5

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_TIME = r"(?:[T ]\d{1,2}:\d{2}.*)?"
_DATE = re.compile(
    rf"(?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{4}}|\d{{2}})"
    rf"|{_MONTH}[-/. ]\d{{1,2}}[-/., ]+\d{{2,4}}|\d{{1,2}}[-/. ]+{_MONTH}[-/. ]\d{{2,4}}){_TIME}",
    re.IGNORECASE,
)
_COMMA = re.compile(r"[-+]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][-+]?\d+)?")


def decimal_commas(texts: Sequence[str]) -> bool:
    """Tell whether texts are numbers with a decimal comma; whole ones may lack it."""
    several = set(texts)
    return any("," in text for text in several) and all(_COMMA.fullmatch(text.strip()) for text in several)


def no_categories(texts: Sequence[str]) -> str | None:
    """Say what a column holds that should not become a feature for every value; of categories None.

    Args:
      texts: of all rows, none of them empty.
    """
    several = dict.fromkeys(texts)
    first = next(iter(several), "")
    if decimal_commas(texts):
        return f"holds numbers with decimal commas such as {first!r}"
    if several and all(_DATE.fullmatch(text.strip()) for text in several):
        return f"holds dates such as {first!r}"
    if len(several) > max(_HANDFUL, len(texts) / _ROWS_EACH):
        return f"holds {len(several)} different texts in {len(texts)} rows, as names or ids do, such as {first!r}"
    return None


# Delimiters that are looked for in the header.
_DELIMITERS = ",;\t|"

# Rows to find out by which columns are numbers, lines to read at a time, texts of a column that are kept once.
_FIRST, _LINES, _TEXTS = 100, 10_000, 50_000

Columns = tuple[tuple[str, ...], tuple[np.ndarray, ...], np.ndarray]  # names, of each its values ``[N]``, lines ``[N]``


def text_file(owner: str, path: object) -> Path:
    """The path of an existing file."""
    try:
        if isinstance(path, str | os.PathLike) and str(path) and Path(path).is_file():
            return Path(path)
    except ValueError:  # of a null byte
        pass
    raise ValueError(f"{owner}: path must be that of a file, got {check.shown(path)}.")


def opened(path: Path) -> TextIO:
    """Open a text file, packed or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1."""
    try:
        with opened(path) as file:
            yield from enumerate(file, 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {_undecodable(path)}: is no UTF-8; save the file as UTF-8.") from error
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read, {error}.") from error


def columns_in(path: Path, delimiter: str | None, texts: Sequence[str]) -> Columns:
    """The columns of a file: float64 where all of one is numbers, else texts; those asked for as texts remain so."""
    try:
        columns, late = _read(path, delimiter, texts)
        return columns if not late else _read(path, delimiter, (*texts, *late))[0]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {_undecodable(path)}: is no UTF-8; save the file as UTF-8.") from error
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read, {error}.") from error


def as_numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Texts as numbers, including NaN and infinity; None if one of them is not a number."""
    try:
        numbers = np.fromiter(map(float, cells), float, len(cells))
    except ValueError:
        return None
    return None if "_" in "".join(cells) else numbers  # to Python 1_000 is a number


def is_number(text: str) -> bool:
    """Tell whether a text is a finite number."""
    numbers = as_numbers([text])
    return numbers is not None and bool(np.isfinite(numbers[0]))


def readings(name: str) -> Iterator[tuple[str, str]]:
    """The columns and values that a name such as ``town=Oslo`` may mean, the longest name of a column first."""
    place = len(name)
    while (place := name.rfind("=", 0, place)) >= 0:
        yield name[:place], name[place + 1 :]


def _undecodable(path: Path) -> int:
    """The number of the first line that is no UTF-8."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


class _Columns:
    """Columns as they are read, block by block."""

    def __init__(self, names: tuple[str, ...], texts: Sequence[str]) -> None:
        self.names = names
        asked = {*texts, *(column for name in texts for column, _ in readings(name))}
        self.texts = {j for j, name in enumerate(names) if name in asked}
        self.late: set[int] = set()  # that began as numbers; what is known of them is incomplete
        self.lines: list[np.ndarray] = []
        self.parts: list[list[np.ndarray]] = [[] for _ in names]
        self._once: list[dict[str, str]] = [{} for _ in names]

    def add(self, lines: np.ndarray, columns: Iterable[Sequence[str] | np.ndarray]) -> None:
        """Append a block of rows, given by columns."""
        self.lines.append(lines)
        for j, cells in enumerate(columns):
            numbers: np.ndarray | None = None
            if isinstance(cells, np.ndarray):
                numbers = cells
            elif not (j in self.texts or j in self.late) and (numbers := as_numbers(cells)) is None:
                (self.late if self.parts[j] else self.texts).add(j)
            if j not in self.late:
                self.parts[j].append(self._objects(j, cells) if numbers is None else numbers)

    def split(self, lines: list[str], delimiter: str) -> list[Sequence[str] | np.ndarray] | None:
        """The columns of lines that are as simple as can be, much faster than one by one; None of others."""
        breaks = len(self.names) - 1  # without any a blank line is no row
        if not breaks or '"' in "".join(lines) or any(line.count(delimiter) != breaks for line in lines):
            return None
        numbers = sorted({*range(len(self.names))} - self.texts - self.late)
        numbers_of: dict[int, np.ndarray] = {}
        if numbers:
            try:
                table = np.loadtxt(lines, delimiter=delimiter, comments=None, usecols=numbers, ndmin=2)
            except ValueError:
                return None
            numbers_of = {j: table[:, k].copy() for k, j in enumerate(numbers)}
        return [
            numbers_of[j] if j in numbers_of else [line.split(delimiter, j + 1)[j].strip() for line in lines]
            for j in range(len(self.names))
        ]  # fmt: skip

    def _objects(self, j: int, cells: Sequence[str] | np.ndarray) -> np.ndarray:
        """Texts as an array, those that occur often kept once."""
        once, array = self._once[j], np.empty(len(cells), object)
        array[:] = [once.setdefault(cell, cell) for cell in cells] if len(once) < _TEXTS else cells
        return array


def _read(path: Path, delimiter: str | None, texts: Sequence[str]) -> tuple[Columns, list[str]]:
    """The columns; and those that turned out to be texts late, whose values are then incomplete."""
    with opened(path) as file:
        sample = file.read(2**16)
        file.seek(0)
        delimiter = _delimiter_of(sample) if delimiter is None else delimiter
        reader = _reader(file, delimiter)
        records = _records(path, reader, 0)
        line, header = next(records, (1, []))
        collected = _Columns(_names(path, line, header), texts)

        def one_by_one(chunk: list[tuple[int, list[str]]]) -> None:
            for line, row in chunk:
                if len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {line}: has {len(row)} fields, where the header has {len(header)}; quote what "
                        f"holds a delimiter, which is {delimiter!r}."
                    )
            collected.add(np.array([line for line, _ in chunk]), zip(*(row for _, row in chunk), strict=True))

        if not (chunk := list(itertools.islice(records, _FIRST))):
            raise ValueError(f"{path}: has no rows below the names of its columns.")
        one_by_one(chunk)
        before = reader.line_num
        while lines := list(itertools.islice(file, _LINES)):
            if (columns := collected.split(lines, delimiter)) is None:
                break
            collected.add(before + 1 + np.arange(len(lines)), columns)
            before += len(lines)
        records = _records(path, _reader(itertools.chain(lines, file), delimiter), before)
        while chunk := list(itertools.islice(records, _LINES)):
            one_by_one(chunk)
    late = [collected.names[j] for j in collected.late]
    values = tuple(np.concatenate(part) if part else np.zeros(0) for part in collected.parts)
    return (collected.names, values, np.concatenate(collected.lines)), late


class _Reader(Protocol):
    """A reader as `csv.reader` makes it; its class has no public name."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...


def _reader(lines: Iterable[str], delimiter: str) -> _Reader:
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)


def _records(path: Path, reader: _Reader, before: int) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, with the line that each begins in; so many lines have been read before."""
    begin = before + 1
    try:
        for row in reader:
            if row:
                yield begin, row
            begin = before + reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {begin}: cannot be read, {error}.") from error


def _delimiter_of(sample: str) -> str:
    """The delimiter that makes most fields of the first line that is not blank."""

    def fields(delimiter: str) -> int:
        try:
            reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter, skipinitialspace=True)
            return len(next((row for row in reader if row), []))
        except csv.Error:
            return 0

    return max(_DELIMITERS, key=fields)


def _names(path: Path, line: int, header: list[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in header)
    if not names:
        raise ValueError(f"{path}: is empty; its first line must name the columns.")
    if all(is_number(name) for name in names):
        raise ValueError(f"{path}, line {line}: must name the columns, and holds numbers only: {listed(names)}.")
    if repeated := duplicates(names):
        raise ValueError(f"{path}, line {line}: column names must differ, but {listed(repeated)} occur more than once.")
    return names
