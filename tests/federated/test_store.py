"""What nodes and a server keep is written whole or not at all, and goes on bit for bit."""

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests.federated import world
from tests.files.rewriting import closed, opened, rewritten

F = mj.federated
WAYS = {
    "dual": (mj.Mocha(server="dual", sigma_prime="per_task"), mj.regularizers.MeanRegularized(0.2, 0.05)),
    "learned": (mj.Mocha(server="dual", sigma_prime="per_task"), mj.regularizers.Probabilistic(0.05)),
    "proximal": (mj.Mocha(server="proximal", omega_every=3), mj.regularizers.Probabilistic(0.05)),
}


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def rounds(server, nodes, state, mine, count):
    mine = list(mine)
    for _ in range(count):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(jax.random.key(0), mine[task], server.down(state, task))
        state, report = server.step(state, ups)
        assert not report.refused, report.refused
    return state, mine


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thin(1)
def test_who_is_restored_goes_on_bit_for_bit(way, tmp_path):
    algorithm, regularizer = WAYS[way]
    xs, ys = world.tables()

    def new():
        return world.server_of(algorithm, regularizer), world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)

    server, nodes = new()
    state, mine = rounds(server, nodes, server.init(incarnation=3), [node.init() for node in nodes], 5)
    F.save(tmp_path / "folder" / "server", state)
    for task, kept in enumerate(mine):
        F.save(str(tmp_path / f"{task}.npz"), kept)
    there = rounds(server, nodes, state, mine, 4)
    server, nodes = new()
    state = F.load(tmp_path / "folder" / "server", server.init())
    mine = [F.load(tmp_path / f"{task}.npz", node.init()) for task, node in enumerate(nodes)]
    assert equal(rounds(server, nodes, state, mine, 4), there)
    assert sorted(os.listdir(tmp_path)) == [*(f"{task}.npz" for task in range(world.M)), "folder"]


def test_bytes_and_open_files_hold_the_same(tmp_path):
    record = {"a": jnp.arange(3.0), "b.c": [jnp.zeros((0, 2), jnp.int32), jnp.ones((), bool)], "d": None}
    record["low"] = jnp.arange(4).astype(jnp.bfloat16)
    blob, file = F.to_bytes(record), io.BytesIO()
    F.save(file, record)
    F.save(tmp_path / "it", record)
    assert blob == file.getvalue() == (tmp_path / "it").read_bytes()
    like = jax.tree.map(jnp.zeros_like, record)
    for found in (F.from_bytes(blob, like), F.load(io.BytesIO(blob), like), F.load(tmp_path / "it", like)):
        assert equal(found, record)
    assert equal(F.from_bytes(F.to_bytes(jnp.ones(2)), jnp.zeros(2)), jnp.ones(2))
    assert not F.from_bytes(F.to_bytes(()), ())


def test_messages_travel_as_bytes_and_files(tmp_path):
    algorithm, regularizer = WAYS["dual"]
    xs, ys = world.tables()
    server, nodes = world.server_of(algorithm, regularizer), world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)
    state, mine = server.init(), [node.init() for node in nodes]

    def travelled(message):
        F.save(tmp_path / "message", message)
        found = F.from_bytes(F.to_bytes(message), type(message))
        for one in (found, F.load(tmp_path / "message", type(message))):
            assert type(one) is type(message)
            assert one.header == message.header
            assert list(one.arrays) == list(message.arrays)
            assert equal(dict(one.arrays), dict(message.arrays))
        return found

    for _ in range(2):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], up = node.step(jax.random.key(0), mine[task], travelled(server.down(state, task)))
            ups[task] = travelled(up)
        state, report = server.step(state, ups)
        assert not report.refused, report.refused


@pytest.mark.parametrize("more", [lambda blob: blob + b"\n", lambda blob: b"\n" + blob, lambda blob: blob[:-1]])
def test_bytes_around_a_blob_are_refused(more):
    record = {"w": jnp.arange(3.0)}
    blob = mj.federated.to_bytes(record)
    np.testing.assert_array_equal(mj.federated.from_bytes(blob, record)["w"], record["w"])
    with pytest.raises(ValueError, match="or it is damaged"):
        mj.federated.from_bytes(more(blob), record)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="cannot be written: a device or a pipe"):
        mj.federated.save(tmp_path / "pipe", {"w": jnp.arange(3.0)})
    assert [(p.name, p.is_fifo()) for p in tmp_path.iterdir()] == [("pipe", True)]


def test_bytes_that_are_no_message_are_refused():
    server = world.server_of(*WAYS["dual"], dtype=np.float32)
    state = server.init()
    down = server.down(state, 0)
    low = dataclasses.replace(down, arrays={"a": np.asarray(jnp.arange(4).astype(jnp.bfloat16)), "": np.bool_(True)})
    assert equal(dict(F.from_bytes(F.to_bytes(low), F.Down).arrays), dict(low.arrays))
    blob = F.to_bytes(down)
    for end in (0, 1, 10, len(blob) // 2, len(blob) - 1):
        refused("no file of this library, or it is damaged", F.from_bytes, blob[:end], F.Down)
    for at in range(30, len(blob), 97):  # of one bit that is another the sums of the archive know, or it is no matter
        spoilt = bytearray(blob)
        spoilt[at] ^= 1
        with contextlib.suppress(ValueError):
            found = F.from_bytes(bytes(spoilt), F.Down)
            assert found.header == down.header
            assert equal(dict(found.arrays), dict(down.arrays))
    refused("of the kind 'Down', and 'Up' is wanted", F.from_bytes, blob, F.Up)
    refused("of the kind 'state', and 'Down' is wanted", F.from_bytes, F.to_bytes(state), F.Down)
    refused("of the kind 'Down', and 'state' is wanted", F.from_bytes, blob, state)
    refused("must be an integer", F.to_bytes, dataclasses.replace(down, round="1"))
    refused("must fit in 32 bits", F.to_bytes, dataclasses.replace(down, round=2**31))
    refused("where a federated.Down is wanted", F.to_bytes, F.Message(**down.header, arrays={}))
    refused("to_bytes: message must be a record of arrays", F.to_bytes, dataclasses.replace(down, arrays={"a": ["b"]}))


def test_what_a_hostile_sender_writes_is_refused():
    server = world.server_of(*WAYS["dual"], dtype=np.float32)
    down = server.down(server.init(), 0)
    blob = F.to_bytes(down)
    for pattern, change in {
        "must be an integer": lambda said: said["header"].update(round=[1]),
        "must be a text": lambda said: said["header"].update(kind=None),
        "another header": lambda said: said["header"].update(more=1),
        "with another header": lambda said: said["header"].pop("task"),
        "another header ": lambda said: said.update(header=3),
        "a Down with another header": lambda said: said.pop("header"),
        "speaks version 9": lambda said: said["header"].update(version=9),
        "of version 7, and this library reads up to 1": lambda said: said.update(version=7),
        "of the kind 'Up', and 'Down' is wanted": lambda said: said.update(kind="Up"),
        "or it is damaged": lambda said: said["arrays"].update(model=["float32", [9]]),
        "or it is damaged ": lambda said: said["arrays"].update(model=["object", [5]]),
        "or it is damaged  ": lambda said: said["arrays"].update(another=["float32", [5]]),
    }.items():
        about, arrays = opened(blob)
        change(about)
        refused(pattern.strip(), F.from_bytes, rewritten(closed(about, arrays), lambda *_: None, forms=False), F.Down)
    about, arrays = opened(blob)
    refused("or it is damaged", F.from_bytes, closed(about, arrays | {"model": np.array([{}], object)}), F.Down)
    # A megabyte of it would be a gigabyte.
    refused("or it is damaged", F.from_bytes, closed(about, arrays, zipfile.ZIP_DEFLATED), F.Down)
    assert F.from_bytes(rewritten(blob, lambda *_: None), F.Down).header == down.header


def refused(pattern, call, *args):
    with pytest.raises((ValueError, OSError), match=pattern) as found:
        call(*args)
    text = str(found.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert text.split(":")[0] in ("save", "load", "to_bytes", "from_bytes")


def test_a_damaged_file_is_refused(tmp_path):
    record = {"a": jnp.arange(30.0), "b": jnp.ones((2, 2), jnp.int32)}
    blob = F.to_bytes(record)
    for end in (0, 1, 10, len(blob) // 2, len(blob) - 30, len(blob) - 1):
        (tmp_path / "cut").write_bytes(blob[:end])
        refused("no file of this library, or it is damaged", F.load, tmp_path / "cut", record)
    spoilt = bytearray(blob)
    spoilt[blob.index(np.arange(30.0).tobytes()) + 100] ^= 1  # one bit of a number
    refused("damaged", F.from_bytes, bytes(spoilt), record)
    for junk in (b"", b"junk" * 100, np.zeros(3).tobytes()):
        refused("no file of this library", F.from_bytes, junk, record)
    out = io.BytesIO()
    np.savez(out, a=np.arange(30.0), b=np.ones((2, 2), np.int32))
    refused("no file of this library", F.from_bytes, out.getvalue(), record)
    refused("cannot be read", F.load, tmp_path / "none", record)
    refused("cannot be read", F.load, tmp_path, record)
    for place in (None, 3, "", b"path", [1]):
        refused("file must be the path", F.load, place, record)
        refused("file must be the path", F.save, place, record)
    refused("data must be bytes", F.from_bytes, "text", record)
    refused("data must be bytes", F.load, io.StringIO("text"), record)
    for odd in ({"a": 3.0}, {"a": jax.random.key(0)}, {"a": "text"}):
        refused("to_bytes: record must be a record of arrays", F.to_bytes, odd)
        refused("save: record must be a record of arrays", F.save, tmp_path / "odd", odd)
    assert not (tmp_path / "odd").exists()


def test_the_file_of_another_federation_is_refused(tmp_path):
    algorithm, regularizer = WAYS["dual"]
    server = world.server_of(algorithm, regularizer)
    larger = F.Server(algorithm, regularizer, world.M + 1, world.D, dtype=np.float64, loss_scaling=world.SCALING)
    narrow = world.server_of(algorithm, regularizer, dtype=np.float32)
    proximal = world.server_of(*WAYS["proximal"])
    F.save(tmp_path / "state", server.init())
    refused(r"holds held as int32\[5\], and int32\[6\] is wanted", F.load, tmp_path / "state", larger.init())
    refused("float64.* and float32.* is wanted", F.load, tmp_path / "state", narrow.init())
    refused("has (no|a) ", F.load, tmp_path / "state", proximal.init())
    xs, ys = world.tables()
    (node, *_) = world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)
    refused("has (no|a) ", F.load, tmp_path / "state", node.init())
    F.save(tmp_path / "node", node.init())
    (longer, *_) = world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm, rows=40)
    refused("holds beta as .*another node or federation", F.load, tmp_path / "node", longer.init())


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.thin(1)
@pytest.mark.extended
def test_who_is_killed_before_the_end_leaves_the_old_file(there, tmp_path):
    path = tmp_path / "node.npz"
    if there:
        F.save(path, {"a": jnp.zeros(3)})
    program = f"""
        import os, signal
        import jax.numpy as jnp
        import mocha_jax as mj

        def killed(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        os.replace = os.link = os.rename = killed
        mj.federated.save({str(path)!r}, {{"a": jnp.ones(3)}})
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=300)
    assert ended.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1 + there  # with what it had written so far
    assert path.exists() == there
    if there:
        assert F.load(path, {"a": jnp.ones(3)})["a"].tolist() == [0.0, 0.0, 0.0]
    F.save(path, {"a": jnp.full(3, 2.0)})
    assert F.load(path, {"a": jnp.ones(3)})["a"].tolist() == [2.0, 2.0, 2.0]
    assert os.listdir(tmp_path) == ["node.npz"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "node.npz"
    F.save(path, {"a": jnp.zeros(3)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused("cannot be written: No space left on device", F.save, path, {"a": jnp.ones(3)})
    monkeypatch.undo()
    assert F.load(path, {"a": jnp.ones(3)})["a"].tolist() == [0.0, 0.0, 0.0]
    assert os.listdir(tmp_path) == ["node.npz"]
    (tmp_path / "link").symlink_to(path)
    F.save(tmp_path / "link", {"a": jnp.ones(3)})
    assert (tmp_path / "link").is_symlink()
    assert F.load(path, {"a": jnp.ones(3)})["a"].tolist() == [1.0, 1.0, 1.0]
