"""Results that survive a kill: a CSV with a line for each, read again by the next run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple, TypeVar, get_type_hints

Row = TypeVar("Row", bound=NamedTuple)


def read(path: Path, kind: type[Row]) -> list[Row]:
    """What earlier runs have written; a last line that was cut off counts for nothing."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    hints = get_type_hints(kind)
    if lines and tuple(lines[0]) != tuple(hints):
        raise ValueError(f"{path}: has other columns than those of this version; move it away.")
    casts = list(hints.values())
    whole = [line for line in lines[1:] if len(line) == len(casts)]
    return [kind(*(cast(value) for cast, value in zip(casts, line, strict=True))) for line in whole]


def append(path: Path, row: NamedTuple) -> None:
    """One more line; the header before the first."""
    new = not path.exists()
    if not new and not path.read_text().endswith("\n"):  # a line that was cut off is left behind by itself
        with open(path, "a") as file:
            file.write("\n")
    with open(path, "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(row._fields)
        writer.writerow(row)
