"""Values of options: numbers in their range, columns of a table, and files to read and to write."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mocha_jax._data.names import listed
from mocha_jax._files import atomic
from mocha_jax.datasets import Table


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an option that takes an integer in some range."""

    def parse(text: str) -> int:
        with_sign = re.fullmatch(r"[-+]?\d{1,18}", text)
        if with_sign is None or not least <= int(text) <= most:
            above = "" if most == 2**31 - 1 else f" and <= {most}"
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}{above}, got {text!r}.")
        return int(text)

    return parse


def number(text: str) -> float:
    """The type of an option that takes a number above 0."""
    value = _float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}.")
    return value


def probability(text: str) -> float:
    """The type of an option that takes a probability."""
    value = _float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}.")
    return value


def delimiter(text: str) -> str:
    """The type of an option that takes the character between fields."""
    if not re.fullmatch(r'[^\w"\r\n]|_', text):
        raise argparse.ArgumentTypeError(f'must be one character such as ";", got {text!r}.')
    return text


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_columns(table: Table, **options: Sequence[str]) -> None:
    """Refuse an option that names a column which is not there."""
    for option, names in options.items():
        if missing := [name for name in names if name not in table.columns]:
            raise ValueError(
                f"--{option}: {table.path} has no column {listed(missing)}; its columns are {listed(table.columns)}."
            )


def check_inputs(*paths: Path) -> None:
    """Refuse what is no file to read."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file.")
        if not path.is_file():
            raise ValueError(f"{path}: is no file, but {'a folder' if path.is_dir() else 'a device or a pipe'}.")


def check_outputs(outputs: Mapping[str, Path], inputs: Sequence[Path], force: bool) -> None:
    """Refuse, before hours of work, files that cannot be written, or that hold something already.

    Args:
      outputs: files to write, by their options. Their folders are made.
      inputs: files that are read, and must not be written.
      force: whether files that are there may be replaced.
    """
    taken = {os.path.realpath(path): f"{path} is read" for path in inputs}
    for option, path in outputs.items():
        place = os.path.realpath(path)
        if place in taken:
            raise ValueError(f"{option}: {taken[place]}; give another file.")
        if os.path.isfile(place):
            taken[place] = f"{path} is written by {option}"
            if not force:
                raise ValueError(f"{option}: {path} is there already; --force replaces it, or name another file.")
        elif not os.path.exists(place):  # unlike /dev/null, which may take both
            taken[place] = f"{path} is written by {option}"
        try:
            atomic.make_writable(path)
        except OSError as error:
            raise OSError(f"{option}: {path} cannot be written: {error.strerror}.") from error
