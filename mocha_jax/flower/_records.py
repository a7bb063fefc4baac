"""Messages as Flower's records and as bytes: plain values and arrays, never pickles."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

# Names of the two records of a message, and what begins the name of a dtype among the plain values.
HEADER, ARRAYS, DTYPE = "mocha", "arrays", "dtype of "

_LENGTH = struct.Struct("<Q")

Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


def to_record(header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> RecordDict:
    """Make Flower's record of a message.

    Args:
      header: texts and numbers by name.
      arrays: of any dtype but objects.
    """
    plain: Header = {name: _plain(value) for name, value in header.items()}
    known, dtypes = as_known(arrays or {})
    plain |= {DTYPE + name: dtype for name, dtype in dtypes.items()}
    stored = ArrayRecord({name: Array(array) for name, array in known.items()})
    return RecordDict({HEADER: ConfigRecord(plain), ARRAYS: stored})


def from_record(content: RecordDict) -> tuple[Header, Arrays]:
    """Return header and arrays of a message.

    Raises:
      ValueError: it is not one of these messages.
    """
    header, stored = content.get(HEADER), content.get(ARRAYS)
    if not isinstance(header, ConfigRecord) or not isinstance(stored, ArrayRecord):
        raise ValueError(f"message: it must have the records {HEADER!r} and {ARRAYS!r}.")
    plain = {name: value for name, value in header.items() if not name.startswith(DTYPE)}
    dtypes = {name.removeprefix(DTYPE): value for name, value in header.items() if name.startswith(DTYPE)}
    try:
        arrays = {name: array.numpy() for name, array in stored.items()}
    except Exception as error:
        raise ValueError("message: an array in it cannot be read.") from error
    return plain, as_they_were(arrays, dtypes)


def to_bytes(header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Make the bytes of a message; equal messages have equal bytes."""
    known, dtypes = as_known(arrays or {})
    order = sorted(known)
    shapes = [[name, known[name].dtype.str, list(known[name].shape)] for name in order]
    text = {"header": {name: _plain(value) for name, value in header.items()}, "arrays": shapes, "dtypes": dtypes}
    head = json.dumps(text, sort_keys=True).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(known[name].tobytes() for name in order)])


def from_bytes(data: bytes) -> tuple[Header, Arrays]:
    """Return header and arrays of a message from its bytes.

    Raises:
      ValueError: they are not those of a message.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        text = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        place, arrays = _LENGTH.size + length, {}
        for name, dtype, shape in text["arrays"]:
            kind = np.dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            arrays[name] = np.frombuffer(data[place : place + size], kind).reshape(shape)
            place += size
        if place != len(data):
            raise ValueError("its end is missing")
        return text["header"], as_they_were(arrays, text["dtypes"])
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise ValueError("message: these bytes are not those of a message.") from error


def as_known(arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, dict[str, str]]:
    """Return arrays of NumPy's own dtypes, and the names of the dtypes that are others, e.g. bfloat16."""
    known, dtypes = {}, {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.isbuiltin != 1:
            dtypes[name] = array.dtype.name
            array = array.view(f"u{array.dtype.itemsize}")
        known[name] = array
    return known, dtypes


def as_they_were(arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, object]) -> Arrays:
    """Undo `as_known`.

    Raises:
      ValueError: there is no such dtype.
    """
    restored = dict(arrays)
    for name, dtype in dtypes.items():
        import ml_dtypes  # comes with JAX

        kind = getattr(ml_dtypes, str(dtype), None)
        if (
            name not in restored
            or not isinstance(kind, type)
            or restored[name].dtype.itemsize != np.dtype(kind).itemsize
        ):
            raise ValueError("message: an array in it has a dtype that is not known here.")
        restored[name] = restored[name].view(kind)
    return restored


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
