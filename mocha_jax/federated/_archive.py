"""Files and blobs of messages and of the states of nodes and servers: NumPy's npz, never a pickle."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._files.fingerprint import native, plain
from mocha_jax._files.owned_file import CheckpointError, OwnedFile
from mocha_jax.federated._message import Down, Message, Up, check_header

Record = TypeVar("Record")
Way = TypeVar("Way", bound=Message)
Place = str | os.PathLike[str] | IO[bytes]
Leaf = np.ndarray | np.generic | jax.Array

# How an archive of this kind begins, and where and how its end begins.
_FIRST, _LAST, _END = b"PK\x03\x04", slice(-22, -18), b"PK\x05\x06"

_FORMAT, _VERSION = "mocha_jax federated", 1


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
        ) from (error)
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
    description: dict[str, object] = {"format": _FORMAT, "version": _VERSION}
    if isinstance(record, Message):
        check_header(owner, "the message", record, Up if type(record) is Up else Down, None)
        header = {name: value if isinstance(value, str) else int(value) for name, value in record.header.items()}
        description |= {"message": type(record).__name__, "header": header}
        leaves = dict(_numbers(owner, "message", record.arrays))
    else:
        leaves = _arrays(owner, "record", record)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    description["leaves"] = {name: _form(array) for name, array in arrays.items()}
    contents: dict[str, Any] = {"about": np.frombuffer(json.dumps(description).encode(), np.uint8)}
    contents |= {f"leaf {i}": plain(array) for i, array in enumerate(arrays.values())}
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **contents)
    return out.getvalue()


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
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"from_bytes: data must be bytes, got {check.shown(data)}.")
    return _record("from_bytes", "the blob", data, like)


@on_purpose
def _record(owner: str, source: str, data: bytes | bytearray | memoryview, like: object) -> object:
    """Check names, shapes and dtypes of all leaves before anything is made of them."""
    if like is Down or like is Up:
        return _message(owner, source, data, Down if like is Down else Up)
    wanted = {name: _form(leaf) for name, leaf in _arrays(owner, "like", like).items()}
    _, forms, arrays = _contents(owner, source, data)
    _compare(owner, source, forms, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(array) for array in arrays])


def _message(owner: str, source: str, data: bytes | bytearray | memoryview, kind: type[Way]) -> Way:
    """A message with a valid header; the receiver checks its arrays."""
    description, forms, arrays = _contents(owner, source, data)
    if description.get("message") != kind.__name__:
        raise ValueError(f"{owner}: {source} holds no {kind.__name__}.")
    try:
        message = kind(**description["header"], arrays=dict(zip(forms, arrays, strict=True)))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{owner}: {source} holds a {kind.__name__} with another header.") from error
    check_header(owner, source, message, kind, None)
    return message


def _contents(
    owner: str, source: str, data: bytes | bytearray | memoryview
) -> tuple[dict[str, Any], dict[str, list[object]], list[np.ndarray]]:
    """Return the description of the arrays, their forms by name, and the arrays, which are of these forms."""
    ours, version = False, 0
    try:
        if bytes(data[:4]) != _FIRST or bytes(data[_LAST]) != _END:
            raise ValueError("something stands before it or after it")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            if any(part.compress_type for part in file.zip.infolist()):
                raise ValueError("unpacked it might be of any size")
            description = json.loads(file["about"].tobytes().decode())
            ours, version = description["format"] == _FORMAT, int(description["version"])
            forms = dict(description["leaves"]) if ours and version <= _VERSION else {}
            dtypes = [jnp.dtype(dtype) for dtype, _ in forms.values()]
            arrays = [native(file[f"leaf {i}"], dtype) for i, dtype in enumerate(dtypes)]
    except Exception as error:  # readers of zip, npy and JSON raise many kinds for damaged bytes
        raise ValueError(f"{owner}: {source} is nothing that save or to_bytes wrote, or it is damaged.") from error
    if not ours:
        raise ValueError(f"{owner}: {source} is nothing that save or to_bytes wrote.")
    if version > _VERSION:
        raise ValueError(f"{owner}: {source} is of version {version}, and this library reads up to {_VERSION}.")
    if any(_form(array) != form for array, form in zip(arrays, forms.values(), strict=True)):
        raise ValueError(f"{owner}: {source} does not hold what it says it holds.")
    return description, forms, arrays


def _compare(owner: str, source: str, forms: Mapping[str, list[object]], wanted: Mapping[str, list[object]]) -> None:
    for name in [*wanted, *forms]:
        if name not in forms or name not in wanted:
            has = "has no" if name not in forms else "has a"
            raise ValueError(f"{owner}: {source} {has} {name}, unlike the record that is wanted.")
        if forms[name] != wanted[name]:
            raise ValueError(
                f"{owner}: {source} holds {name} as {_text(forms[name])}, and {_text(wanted[name])} is wanted; it "
                f"belongs to another node or federation."
            )
    if list(forms) != list(wanted):
        raise ValueError(f"{owner}: {source} has its arrays in another order than the record that is wanted.")


def _arrays(owner: str, what: str, record: object) -> dict[str, Leaf]:
    """The leaves of a record, all of them arrays of numbers or booleans, by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    numbers = _numbers(owner, what, {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves})
    return {name or "record": leaf for name, leaf in numbers.items()}


def _numbers(owner: str, what: str, leaves: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
    """Arrays of numbers or booleans, where all of them are."""
    for place, leaf in leaves.items():
        is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array) and not isinstance(leaf, np.ma.MaskedArray)
        if not is_array or not (jnp.issubdtype(leaf.dtype, jnp.number) or jnp.issubdtype(leaf.dtype, jnp.bool_)):
            raise ValueError(
                f"{owner}: {what} must be a record of arrays of numbers, such as node.init() makes, got "
                f"{check.shown(leaf)}{f' at {place}' if place else ''}."
            )
    return leaves


def _form(leaf: Leaf) -> list[object]:
    """Dtype and shape, as JSON gives them back."""
    return [np.dtype(leaf.dtype).name, list(leaf.shape)]


def _text(form: object) -> str:
    return "".join(map(str, form)) if isinstance(form, list) else str(form)


def _path(owner: str, file: object) -> Path:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file) or isinstance(os.fspath(file), bytes):
        raise ValueError(
            f'{owner}: file must be the path of a file such as "node.npz", or an open file, got {check.shown(file)}.'
        )
    return Path(file)
