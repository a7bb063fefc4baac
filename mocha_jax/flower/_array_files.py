"""Arrays and bytes in files, whole or not at all."""

from __future__ import annotations

import os
from typing import BinaryIO

import jax
import numpy as np

from mocha_jax._core.pytree import Tree


def arrays_in(record: Tree) -> dict[str, np.ndarray]:
    """Return the leaves of a record by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def export(path: str | os.PathLike[str], record: Tree) -> None:
    """Write the arrays of a record to a file that NumPy reads; an array by itself as ``weights``."""
    record = {"weights": record} if isinstance(record, jax.Array | np.ndarray) else record
    with open(f"{path}.new", "wb") as file:
        np.savez(file, allow_pickle=False, **arrays_in(record))
        flush(file)
    put(f"{path}.new", path)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file; when this returns, they are on the disk."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        flush(file)
    put(f"{path}.new", path)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def put(new: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Put a file in the place of another."""
    os.replace(new, path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
