"""Messages come out of Flower's records and of bytes as they went in; nothing in them is a pickle."""

import json
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from mocha_jax.flower import _records
from tests.flower import world

HEADER = {"what": "down", "round": 3, "held": -1, "federation": "mocha", "kind": "DualDown", "seed": np.int64(5)}
ARRAYS: dict[str, Any] = {
    "start": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), "terms.size": np.float64(0.1), "steps": np.int32(-1),
    "none": np.zeros((0, 4), np.float32), "half": np.arange(3, dtype=ml_dtypes.bfloat16), "tiny": np.arange(4, dtype=np.int8),
    "scalar": np.asarray(1.5, ml_dtypes.bfloat16), "eighth": np.arange(3).astype(ml_dtypes.float8_e4m3fn), "columns": np.asfortranarray(np.eye(3)[:, :2]),
}  # fmt: skip
WAYS = {
    "records": lambda h, a: _records.from_record(_records.to_record(h, a)),
    "bytes": lambda h, a: _records.message_from_bytes(_records.message_bytes(h, a)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_message_comes_out_as_it_went_in(way):
    header, arrays = WAYS[way](HEADER, ARRAYS)
    assert header == HEADER
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)


def test_equal_messages_have_equal_bytes():
    turned = dict(reversed(ARRAYS.items()))
    assert _records.message_bytes(HEADER, ARRAYS) == _records.message_bytes(dict(reversed(HEADER.items())), turned)
    assert _records.message_bytes(HEADER, ARRAYS) != _records.message_bytes(HEADER | {"round": 4}, ARRAYS)


@pytest.mark.parametrize("way", WAYS)
def test_objects_are_refused(way):
    with pytest.raises((ValueError, TypeError)):
        WAYS[way]({}, {"a": np.array([{}], object)})


def test_messages_of_the_library_go_through(tmp_path):
    down = world.make_server().down(world.make_server().init(), 0)
    header, arrays = _records.from_record(_records.to_record(down.header, down.arrays))
    assert header == down.header
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        name: (a.shape, a.dtype) for name, a in down.arrays.items()
    }


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(), RecordDict({"mocha": ConfigRecord({})}), RecordDict({"mocha": ArrayRecord()}),
        RecordDict({"mocha": ArrayRecord({"a": Array(np.zeros(2))})}),
        RecordDict({"mocha": ArrayRecord({"mocha": Array(np.frombuffer(_records.message_bytes({}), np.uint8)), "a": Array(np.zeros(2))})}),
        RecordDict({"mocha": ArrayRecord({"mocha": Array("uint8", (1,), "numpy.ndarray", pickle.dumps([1]))})}),
        RecordDict({"mocha": ArrayRecord({"mocha": Array(np.zeros(2))})}),
    ],
)  # fmt: skip
def test_other_records_are_refused(content):
    with pytest.raises(ValueError, match="^message: "):
        _records.from_record(content)


def bad_bytes():
    good = _records.message_bytes(HEADER, ARRAYS)
    yield from (b"", b"abc", good[:-1], good + b"0", good[:30], pickle.dumps([1]))
    one: dict[str, Any] = {"header": {}, "arrays": [["a", "<f8", [1]]], "dtypes": {}}
    texts: list[Any] = [
        [], {}, 3, one | {"arrays": 3}, one | {"arrays": [["a", "O", [1]]]}, one | {"arrays": [["a", "<f8", [-1]], ["b", "<f8", [2]]]},
        one | {"arrays": [["a", "<f8", [10**30]]]}, one | {"arrays": [["a", "<f8", [1.0]]]}, one | {"dtypes": [1]},
        one | {"dtypes": {"a": "dtype"}}, one | {"dtypes": {"b": "bfloat16"}}, one | {"dtypes": {"a": "bfloat16"}},
        one | {"header": []}, one | {"header": {"round": None}}, one | {"header": {"round": [1]}},
    ]  # fmt: skip
    for head in (*(json.dumps(text).encode() for text in texts), b"[" * 100_000, b'{"header"'):
        yield len(head).to_bytes(8, "little") + head + b"12345678"


@pytest.mark.parametrize("data", list(bad_bytes()))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="^message: "):
        _records.message_from_bytes(data)
