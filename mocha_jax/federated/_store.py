"""Files and blobs of what a node or a server carries from round to round: NumPy's npz, never a pickle."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mocha_jax._core import check
from mocha_jax._core.transfers import on_purpose
from mocha_jax._driver.fingerprint import native, plain
from mocha_jax._driver.owned_file import CheckpointError, OwnedFile

Record = TypeVar("Record")
Place = str | os.PathLike[str] | IO[bytes]

_FORMAT, _VERSION = "mocha_jax federated", 1


def save(file: Place, record: object) -> None:
    """Write what a node keeps, or a server's state, whole or not at all.

    It goes to a new file beside the old one, which it then replaces: whenever the process or the machine stops, one of
    the two is there.

    Args:
      file: path of the file, whose folder is made where there is none; or a file that is open to be written to.
      record: a record of arrays.

    Raises:
      OSError: it cannot be written, or another process is writing it; what was there before still is.
    """
    data = to_bytes(record, owner="save")
    if (write := getattr(file, "write", None)) is not None:
        write(data)
        return
    owned = OwnedFile(Path(os.path.realpath(_path("save", file))))
    try:
        owned.claim()
        owned.replace(lambda to: to.write(data))
    except CheckpointError as error:
        raise OSError(
            f"save: {owned.path} is being written by another process; give each node a file of its own."
        ) from (error)
    except OSError as error:
        raise OSError(f"save: {owned.path} cannot be written: {error.strerror or error}.") from error
    finally:
        owned.release()


def load(file: Place, like: Record) -> Record:
    """Read what `save` wrote.

    A server that goes on from an earlier state than its last one needs another life, `Server.restarted`: nodes
    refuse a second message of a round.

    Args:
      file: its path, or a file that is open to be read.
      like: a record of the same shapes and dtypes, such as ``node.init()`` or ``server.init()``.
    """
    if (read := getattr(file, "read", None)) is not None:
        return _record("load", "the file", read(), like)
    path = _path("load", file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"load: {path} cannot be read: {error.strerror or error}.") from error
    return _record("load", str(path), data, like)


@on_purpose
def to_bytes(record: object, *, owner: str = "to_bytes") -> bytes:
    """Return what `save` writes, for a store of blobs.

    Args:
      record: a record of arrays.
      owner: whoever is named in errors.

    Examples:
      >>> import jax.numpy as jnp
      >>> blob = to_bytes({"v": jnp.ones(3)})
      >>> from_bytes(blob, {"v": jnp.zeros(3)})["v"].tolist()
      [1.0, 1.0, 1.0]
    """
    arrays = {name: np.asarray(leaf) for name, leaf in _arrays(owner, "record", record).items()}
    said = {"format": _FORMAT, "version": _VERSION, "leaves": {name: _form(array) for name, array in arrays.items()}}
    about = np.frombuffer(json.dumps(said).encode(), np.uint8)
    out = io.BytesIO()
    contents: dict[str, Any] = {f"leaf {i}": plain(array) for i, array in enumerate(arrays.values())}
    np.savez(out, allow_pickle=False, about=about, **contents)
    return out.getvalue()


def from_bytes(data: bytes, like: Record) -> Record:
    """Read what `to_bytes` made.

    Args:
      data: the blob.
      like: as in `load`.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"from_bytes: data must be bytes, got {check.shown(data)}.")
    return _record("from_bytes", "the blob", data, like)


@on_purpose
def _record(owner: str, source: str, data: bytes | bytearray | memoryview, like: Record) -> Record:
    """Check names, shapes and dtypes of all leaves before anything is made of them."""
    wanted = {name: _form(leaf) for name, leaf in _arrays(owner, "like", like).items()}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            said = json.loads(file["about"].tobytes().decode())
            known, version, found = said["format"] == _FORMAT, int(said["version"]), dict(said["leaves"])
            arrays = [file[f"leaf {i}"] for i in range(len(found))] if known and version <= _VERSION else []
    except Exception as error:  # whatever readers of zip, npy and JSON make of garbage
        raise ValueError(f"{owner}: {source} is nothing that federated.save wrote, or it is damaged.") from error
    if not known:
        raise ValueError(f"{owner}: {source} is nothing that federated.save wrote.")
    if version > _VERSION:
        raise ValueError(f"{owner}: {source} is of version {version}, and this library reads up to {_VERSION}.")
    _compare(owner, source, found, wanted)
    dtypes = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(like)]
    leaves = [native(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    if any(_form(leaf) != form for leaf, form in zip(leaves, wanted.values(), strict=True)):
        raise ValueError(f"{owner}: {source} does not hold what it says it holds.")
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(leaf) for leaf in leaves])


def _compare(owner: str, source: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in [*wanted, *found]:
        if name not in found or name not in wanted:
            has = "has no" if name not in found else "has a"
            raise ValueError(f"{owner}: {source} {has} {name}, unlike the record that is wanted.")
        if found[name] != wanted[name]:
            raise ValueError(
                f"{owner}: {source} holds {name} as {_text(found[name])}, and {_text(wanted[name])} is wanted; it "
                f"belongs to another node or federation."
            )
    if list(found) != list(wanted):
        raise ValueError(f"{owner}: {source} has its arrays in another order than the record that is wanted.")


def _arrays(owner: str, what: str, record: object) -> dict[str, Any]:
    """The leaves of a record, all of them arrays of numbers or booleans, by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    for path, leaf in leaves:
        dtype: Any = getattr(leaf, "dtype", None)
        plain = isinstance(leaf, np.ndarray | np.generic | jax.Array) and not isinstance(leaf, np.ma.MaskedArray)
        if not plain or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            where = jax.tree_util.keystr(path).lstrip(".")
            raise ValueError(
                f"{owner}: {what} must be a record of arrays of numbers, such as node.init() makes, got "
                f"{check.shown(leaf)}{f' at {where}' if where else ''}."
            )
    return {jax.tree_util.keystr(path).lstrip(".") or "record": leaf for path, leaf in leaves}


def _form(leaf: Any) -> list[Any]:
    """Dtype and shape, as JSON gives them back."""
    return [np.dtype(leaf.dtype).name, list(leaf.shape)]


def _text(form: Any) -> str:
    return "".join(map(str, form)) if isinstance(form, list) else str(form)


def _path(owner: str, file: object) -> Path:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file) or isinstance(os.fspath(file), bytes):
        raise ValueError(
            f'{owner}: file must be the path of a file such as "node.npz", or an open file, got {check.shown(file)}.'
        )
    return Path(file)
