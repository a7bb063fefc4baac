"""Studies whose results survive a kill: a CSV with a line for each, read again by the next run."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import NamedTuple, TypeVar, get_type_hints

Row = TypeVar("Row", bound=NamedTuple)


def read(path: Path, kind: type[Row]) -> list[Row]:
    """What earlier runs have written; a last line that was cut off counts for nothing."""
    if not path.exists():
        return []
    lines = list(csv.reader(_whole(path).splitlines()))
    hints = get_type_hints(kind)
    if lines and tuple(lines[0]) != tuple(hints):
        raise ValueError(f"{path}: has other columns than those of this version; move it away.")
    casts = list(hints.values())
    whole = [line for line in lines[1:] if len(line) == len(casts)]
    return [kind(*(cast(value) for cast, value in zip(casts, line, strict=True))) for line in whole]


def _whole(path: Path) -> str:
    """The lines that were written to their end."""
    with open(path, newline="") as file:
        text = file.read()
    return text[: text.rfind("\n") + 1]


def append(path: Path, row: NamedTuple) -> None:
    """One more line; the header before the first."""
    whole = _whole(path) if path.exists() else ""
    new = not whole
    with open(path, "r+" if path.exists() else "w", newline="") as file:
        file.seek(len(whole.encode()))
        file.truncate()  # of a line that was cut off
        writer = csv.writer(file)
        if new:
            writer.writerow(row._fields)
        writer.writerow(row)


def parser_of(study: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of a study, which says in which folder its results are."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{study}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("experiments") / study, help="folder of the results")
    return parser


def say(table: str, out: Path) -> None:
    """Print a table, and keep it."""
    print("\n" + table)
    (out / "table.md").write_text(table)
