"""Arrays of a record by name, in memory and in a file."""

from __future__ import annotations

import io
import os

import jax
import numpy as np

from mocha_jax._core.pytree import Tree
from mocha_jax._files.atomic import write


def arrays_in(record: Tree) -> dict[str, np.ndarray]:
    """Return the leaves of a record by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def export(path: str | os.PathLike[str], record: Tree) -> None:
    """Write the arrays of a record to a file that NumPy reads; an array by itself as ``weights``."""
    record = {"weights": record} if isinstance(record, jax.Array | np.ndarray) else record
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays_in(record))
    write(path, content.getvalue())
