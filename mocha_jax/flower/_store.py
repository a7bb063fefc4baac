"""Records in files, whole or not at all."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def arrays_in(record: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a record by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def save(path: str | os.PathLike[str], record: Any) -> None:
    """Write a record to a file; when this returns, it is on the disk."""
    with open(f"{path}.new", "wb") as file:
        np.savez(file, allow_pickle=False, **arrays_in(record))
        flush(file)
    put(f"{path}.new", path)


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a record.

    Args:
      path: of the file.
      like: a record whose leaves have its shapes and dtypes.

    Raises:
      ValueError: it is another record.
    """

    def one(place: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        if name not in found:
            raise ValueError(f"load: {path} has no {name}; it is a record of another kind.")
        array, wanted = found[name], np.dtype(leaf.dtype)
        if array.dtype.kind == "V" and array.dtype.itemsize == wanted.itemsize:
            array = array.view(wanted)  # e.g. bfloat16, of which files know nothing
        if array.shape != np.shape(leaf) or array.dtype != wanted:
            raise ValueError(f"load: {name} in {path} is {array.dtype}{list(array.shape)}, another record's.")
        return jnp.asarray(array)

    with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
        found = {name: file[name] for name in file}
    return jax.tree_util.tree_map_with_path(one, like)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file; when this returns, they are on the disk."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        flush(file)
    put(f"{path}.new", path)


def flush(file: Any) -> None:
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
