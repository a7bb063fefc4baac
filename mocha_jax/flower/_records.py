"""Messages as bytes, and as Flower's records of these: plain values and arrays, never pickles."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

RECORD = "mocha"  # the name of a message's record, and of its one array

_LENGTH = struct.Struct("<Q")

Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


def to_record(header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> RecordDict:
    """Make Flower's record of a message: one array of bytes, for Flower spends some 150 bytes on every array.

    Args:
      header: texts and numbers by name.
      arrays: of any dtype but objects.
    """
    data = np.frombuffer(message_bytes(header, arrays), np.uint8)
    return RecordDict({RECORD: ArrayRecord({RECORD: Array(data)})})


def from_record(content: RecordDict) -> tuple[Header, Arrays]:
    """Return header and arrays of a message.

    Raises:
      ValueError: it is not one of these messages.
    """
    stored = content.get(RECORD)
    if not isinstance(stored, ArrayRecord) or list(stored) != [RECORD]:
        raise ValueError(f"message: it must have the record {RECORD!r} with one array of that name.")
    try:
        data = stored[RECORD].numpy().tobytes()
    except Exception as error:
        raise ValueError("message: its array cannot be read.") from error
    return message_from_bytes(data)


def message_bytes(header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Make the bytes of a message; equal messages have equal bytes."""
    known, dtypes = as_known(arrays or {})
    order = sorted(known)
    shapes = [[name, known[name].dtype.str, list(known[name].shape)] for name in order]
    text = {"header": {name: _plain(value) for name, value in header.items()}, "arrays": shapes, "dtypes": dtypes}
    head = json.dumps(text, sort_keys=True).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(known[name].tobytes() for name in order)])


def message_from_bytes(data: bytes) -> tuple[Header, Arrays]:
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
            if min(shape, default=0) < 0:
                raise ValueError("a length is below 0")
            size = math.prod(shape) * kind.itemsize
            arrays[name] = np.frombuffer(data[place : place + size], kind).reshape(shape)
            place += size
        if place != len(data):
            raise ValueError("its end is missing")
        header = text["header"]
        if not all(isinstance(value, str | int | float) for value in header.values()):
            raise ValueError("something in its header is no text and no number")
        return header, as_they_were(arrays, text["dtypes"])
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
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
