"""Every file of the library has one form, in which nothing is executed and no damage goes unnoticed."""

import io
import pickle
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mocha_jax._files import container
from mocha_jax._files.container import Container, Unreadable
from tests.files.rewriting import closed, opened, rewritten

ARRAYS = {
    "a": np.arange(30.0), "b/c": np.ones((2, 3), np.int32), "": np.array(True), "none": np.zeros((0, 4)),
    "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "low": np.asarray(jnp.arange(4).astype(jnp.bfloat16)),
}  # fmt: skip
ABOUT = {"names": ["Ålesund", None], "depth": {"x": 0.1}}


def content():
    return Container.of("thing", ARRAYS, ABOUT).to_bytes()


def read(data, kind="thing", **more):
    return container.read(io.BytesIO(data), kind, "it", **more)


def test_a_file_gives_back_what_it_was_made_of():
    found = read(content())
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found.arrays[name], array)
    assert {name: found.about[name] for name in ABOUT} == ABOUT
    assert found.about == Container.of("thing", ARRAYS, ABOUT).about


def test_numpy_reads_a_file_whose_first_entry_says_what_it_is():
    about, arrays = opened(content())
    assert (about["format"], about["version"], about["kind"]) == ("mocha_jax", 1, "thing")
    assert about["arrays"]["low"] == ["bfloat16", [4]]
    np.testing.assert_array_equal(arrays["b/c"], ARRAYS["b/c"])
    assert zipfile.ZipFile(io.BytesIO(content())).namelist()[0] == "about.json"


def test_a_part_is_read_without_the_others():
    damaged = bytearray(content())
    damaged[damaged.index(ARRAYS["a"].tobytes()) + 100] ^= 1
    found = read(bytes(damaged), wanted=lambda name: name == "low")
    assert list(found.arrays) == ["low"]
    with pytest.raises(Unreadable, match="^it is no file of this library, or it is damaged$"):
        read(bytes(damaged))


def test_no_flipped_bit_goes_unnoticed():
    whole, refused = content(), 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        try:
            found = read(bytes(damaged))
        except Unreadable:
            refused += 1
        else:  # a date, for one
            assert found.about == read(whole).about
            assert all(np.array_equal(found.arrays[name], ARRAYS[name]) for name in ARRAYS)
    assert refused > 0.7 * len(whole)


class Trace:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_a_hostile_sender_writes_is_refused(tmp_path):
    about, arrays = opened(content())
    trace = Trace(tmp_path / "trace")
    foreign = io.BytesIO()
    np.savez(foreign, a=arrays["a"])
    damaged = "no file of this library, or it is damaged"
    for data, message in (
        (content() + b"\n", damaged), (b"\n" + content(), damaged), (content()[:-1], damaged), (b"", damaged),
        (pickle.dumps(trace), damaged), (closed(about, arrays | {"a": np.array([trace])}), damaged),
        (closed(about, arrays, zipfile.ZIP_DEFLATED), damaged), (foreign.getvalue(), damaged),
        (closed("[" * 100_000, arrays), damaged), (closed([], {}), damaged),
        (closed(about, {**arrays, "more": np.ones(2)}), damaged),
        (closed(about, {name: array for name, array in arrays.items() if name != "a"}), damaged),
        (closed(about, arrays | {"a": arrays["a"][:3]}), damaged),
        (closed(about, arrays | {"a": arrays["a"] + 1}), "damaged: its digest does not match"),
        (closed(about | {"depth": 2}, arrays), "damaged: its digest does not match"),
        (rewritten(content(), lambda said, _: said["arrays"].update(a=["object", [30]]), forms=False), damaged),
        (rewritten(content(), lambda said, _: said.update(format="another")), damaged),
        (rewritten(content(), lambda said, _: said.update(version=2)), "of version 2, and this library reads up to 1"),
        (rewritten(content(), lambda said, _: said.update(version=10**4000)), "of version 1000"),
        (rewritten(content(), lambda said, _: said.update(kind="a\nb")), r"of the kind 'a\\nb', and 'thing' is wanted"),
    ):  # fmt: skip
        with pytest.raises(Unreadable, match=f"^it is {message}") as error:
            read(data)
        assert len(str(error.value)) < 200
    assert not trace.path.exists()
    with pytest.raises(Unreadable, match="of the kind 'thing', and 'model' is wanted"):
        read(content(), "model")


def test_what_json_has_no_number_for_is_not_written():
    for about in ({"gap": float("nan")}, {"names": {1, 2}}):
        with pytest.raises((TypeError, ValueError)):
            Container.of("thing", {}, about)
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        Container({"a": np.array([{}])}, {}).to_bytes()
