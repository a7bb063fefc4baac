"""Files and blobs of messages and of the states of nodes and servers."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._files import container
from mocha_jax._files.container import Arrays, Container, form
from mocha_jax._files.owned_file import CheckpointError, OwnedFile
from mocha_jax.federated._message import Down, Message, Up, check_header

Record = TypeVar("Record")
Way = TypeVar("Way", bound=Message)
Place = str | os.PathLike[str] | IO[bytes]
Leaf = np.ndarray | np.generic | jax.Array

# The kind of what is no message, whose kind is its class.
_STATE = "state"


def save(file: Place, record: object) -> None:
    """Write the state of a node or a server or a message, whole or not at all.

    It goes to a new file beside the old one, which it then replaces: whenever the process or the machine stops, one of
    the two is there.

    Args:
      file: path of the file, whose folder is made if it is missing; or a file that is open for writing.
      record: a record of arrays, or a `Down` or `Up`.

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
        ) from error
    except OSError as error:
        raise OSError(f"save: {owned.path} cannot be written: {error.strerror or error}.") from error
    finally:
        owned.release()


@overload
def load(file: Place, like: type[Way]) -> Way: ...
@overload
def load(file: Place, like: Record) -> Record: ...
def load(file: Place, like: object) -> object:
    """Read what `save` wrote.

    A server that goes on from an earlier state than its last one needs another incarnation, `Server.restarted`: nodes
    refuse a second message of a round.

    Args:
      file: its path, or a file that is open to be read.
      like: a record of the same shapes and dtypes, such as ``node.init()`` or ``server.init()``; of a message its
        class, `Down` or `Up`.
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
    """Return what `save` writes, for a transport of messages or a store of blobs.

    Args:
      record: a record of arrays, or a `Down` or `Up`.
      owner: the name for error messages.

    Examples:
      >>> import jax.numpy as jnp
      >>> blob = to_bytes({"v": jnp.ones(3)})
      >>> from_bytes(blob, {"v": jnp.zeros(3)})["v"].tolist()
      [1.0, 1.0, 1.0]

      Messages store their own shapes; the receiver checks whether they fit.

      >>> import mocha_jax as mj
      >>> server = mj.federated.Server(mj.Mocha(), mj.regularizers.Probabilistic(0.1), 3, 5, dtype="float32")
      >>> blob = to_bytes(server.down(server.init(), 2))
      >>> down = from_bytes(blob, mj.federated.Down)
      >>> down.task, down.round, down.arrays["model"].shape
      (2, 1, (5,))
    """
    if not isinstance(record, Message):
        return Container.of(_STATE, leaves_of(owner, "record", record), {}).to_bytes()
    check_header(owner, "the message", record, Up if type(record) is Up else Down, None)
    header = {name: value if isinstance(value, str) else int(value) for name, value in record.header.items()}
    arrays = _numbers(owner, "message", record.arrays)
    return Container.of(type(record).__name__, arrays, {"header": header}).to_bytes()


@overload
def from_bytes(data: bytes, like: type[Way]) -> Way: ...
@overload
def from_bytes(data: bytes, like: Record) -> Record: ...
def from_bytes(data: bytes, like: object) -> object:
    """Read what `to_bytes` made.

    Args:
      data: the blob.
      like: as in `load`.
    """
    return _record("from_bytes", "the blob", data, like)


@on_purpose
def _record(owner: str, source: str, data: object, like: object) -> object:
    """A record, or a message with a valid header, whose arrays its receiver checks."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"{owner}: data must be bytes, got {check.shown(data)}.")
    way = Down if like is Down else Up if like is Up else None
    try:
        content = container.read(io.BytesIO(data), way.__name__ if way else _STATE, f"{owner}: {source}")
    except container.Unreadable as error:
        raise ValueError(f"{error}.") from error
    if way is None:
        return record_of(owner, source, content.arrays, like)
    try:
        message = way(**content.about["header"], arrays=content.arrays)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{owner}: {source} holds a {way.__name__} with another header.") from error
    check_header(owner, source, message, way, None)
    return message


@on_purpose
def record_of(owner: str, source: str, arrays: Arrays, like: Record) -> Record:
    """Make a record of the arrays of `leaves_of`, where their names, shapes and dtypes are those of another one."""
    wanted = leaves_of(owner, "like", like)
    for name in [*wanted, *arrays]:
        if name not in arrays or name not in wanted:
            has = "has no" if name not in arrays else "has a"
            raise ValueError(f"{owner}: {source} {has} {name}, unlike the record that is wanted.")
        if (found := form(arrays[name])) != (right := form(wanted[name])):
            raise ValueError(
                f"{owner}: {source} holds {name} as {_text(found)}, and {_text(right)} is wanted; it belongs to "
                f"another node or federation."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[name]) for name in wanted])


@on_purpose
def leaves_of(owner: str, what: str, record: object) -> Arrays:
    """Name the leaves of a record, all of them arrays of numbers or booleans, by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    numbers = _numbers(owner, what, {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves})
    return {name or "record": leaf for name, leaf in numbers.items()}


def _numbers(owner: str, what: str, leaves: Mapping[str, Leaf]) -> Arrays:
    """Arrays of numbers or booleans, where all of them are."""
    for place, leaf in leaves.items():
        is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array) and not isinstance(leaf, np.ma.MaskedArray)
        if not is_array or not (jnp.issubdtype(leaf.dtype, jnp.number) or jnp.issubdtype(leaf.dtype, jnp.bool_)):
            raise ValueError(
                f"{owner}: {what} must be a record of arrays of numbers, such as node.init() makes, got "
                f"{check.shown(leaf)}{f' at {place}' if place else ''}."
            )
    return {place: np.asarray(leaf) for place, leaf in leaves.items()}


def _text(form: list[object]) -> str:
    return "".join(map(str, form))


def _path(owner: str, file: object) -> Path:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file) or isinstance(os.fspath(file), bytes):
        raise ValueError(
            f'{owner}: file must be the path of a file such as "node.npz", or an open file, got {check.shown(file)}.'
        )
    return Path(file)
