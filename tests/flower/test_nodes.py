"""A node answers in the message's own process or by its worker, and keeps what it must."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from mocha_jax.flower import _worker_socket, client_app
from mocha_jax.flower._node_store import NodeStore
from mocha_jax.flower._records import from_record, to_record
from tests.files.rewriting import rewritten
from tests.flower import world

MAKE = "tests.flower.world:make_node"


def message(what=None, task=0, kind="train", round=1, **more):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    if what is not None:
        return Message(to_record({"what": what}), 1, kind)
    down = world.make_server().down(world.make_server().init(7), task)
    header = {"what": "down", **down.header, "round": round, "seed": world.SEED, **more}
    return Message(to_record(header, down.arrays), 1, kind, ttl=120.0)


def answered(app, asked, folder, **config):
    return from_record(app(asked, world.context(**{"task": 0, "state": str(folder)} | config)).content)


def right():
    node = world.make_node({"task": 0})
    down = world.make_server().down(world.make_server().init(7), 0)
    return node.step(jax.random.key(world.SEED), node.init(), down)


def same(found, up):
    header, arrays = found
    assert header == {"what": "up", **up.header}
    for name, array in up.arrays.items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-5, atol=1e-6)


def test_a_node_says_its_task(tmp_path):
    assert answered(client_app(MAKE), message("task?", kind="query"), tmp_path, task=3)[0] == {
        "what": "task",
        "task": 3,
    }


@pytest.mark.slow
def test_a_message_s_own_process_does_the_work_and_keeps_it(tmp_path):
    app = client_app(world.make_node, worker=False)
    context = world.context(task=0, state=str(tmp_path))
    mine, up = right()
    same(from_record(app(message(), context).content), up)
    kept = context.state["mocha"]
    np.testing.assert_allclose(kept["dual.beta"].numpy(), mine.dual.beta, rtol=1e-5, atol=1e-6)
    folder = tmp_path / "task-0"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # The same message once more, in another process: the answer is the one on the disk.
    kept = (folder / "node.npz").read_bytes()
    same(from_record(app(message(), world.context(task=0, state=str(tmp_path))).content), up)
    assert (folder / "node.npz").read_bytes() == kept
    # The file for people is written again as well.
    (folder / "weights.npz").unlink()
    app(message(), world.context(task=0, state=str(tmp_path)))
    with np.load(folder / "weights.npz") as file:
        np.testing.assert_array_equal(file["weights"], world.make_server().weights(world.make_server().init(7))[0])
    # Another message goes on from there.
    assert (
        from_record(app(message(round=2, held=1), world.context(task=0, state=str(tmp_path))).content)[0]["round"] == 2
    )
    assert (folder / "node.npz").read_bytes() != kept


@pytest.mark.parametrize(
    ("config", "asked", "kind"),
    [
        ({"broken": True}, {}, "KeyError"), ({"task": -1}, {}, "ValueError"), ({"state": ""}, {}, "ValueError"),
        ({}, {"task": 1}, "Refused"), ({}, {"seed": -1}, "Refused"), ({}, {"version": 9}, "Refused"), ({}, {"what": "else"}, "Refused"),
    ],
)  # fmt: skip
def test_of_an_exception_its_class_alone_goes_up(tmp_path, config, asked, kind):
    header, arrays = answered(client_app(MAKE, worker=False), message(**asked), tmp_path, **config)
    assert (header, arrays) == ({"what": "failed", "kind": kind}, {})


def test_make_node_must_be_a_function_of_a_module():
    for bad in ("module", ":f", "module:", "module:1"):
        with pytest.raises(ValueError, match="client_app: make_node must be a text"):
            client_app(bad)
    with pytest.raises(ValueError, match="client_app: idle_seconds"):
        client_app(MAKE, idle_seconds=0)


def test_the_client_needs_no_jax():
    code = "import sys; from mocha_jax.flower import client_app; client_app('a.b:c'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_samples_begin_anew(tmp_path):
    node = world.make_node({"task": 0})
    asked = from_record(message().content)
    NodeStore(str(tmp_path), node, 0).answer(*asked)
    before = NodeStore(str(tmp_path), node, 0)
    assert before._message
    other = NodeStore(str(tmp_path), world.make_node({"task": 1}), 0)
    assert not other._message
    np.testing.assert_array_equal(other.state_arrays()["dual.beta"], 0.0)


def test_a_broken_file_begins_anew(tmp_path):
    node = world.make_node({"task": 0})
    NodeStore(str(tmp_path), node, 0).answer(*from_record(message().content))
    assert {path.name for path in tmp_path.iterdir()} == {"node.npz", "weights.npz"}
    kept = (tmp_path / "node.npz").read_bytes()
    assert NodeStore(str(tmp_path), node, 0)._message

    def no_state(_, arrays):
        del arrays["state/dual.beta"]

    for broken in (
        kept[:100],
        b"",
        rewritten(kept, lambda about, _: about.update(version=2)),
        rewritten(kept, no_state),
    ):
        (tmp_path / "node.npz").write_bytes(broken)
        store = NodeStore(str(tmp_path), node, 0)
        assert not store._message
        np.testing.assert_array_equal(store.state_arrays()["dual.beta"], 0.0)


here = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists() or not _worker_socket.possible(), reason="no Unix sockets and no /proc here"
)


def pids(folder):
    """Workers of a folder that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"_worker\0{folder}" in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def ended(folder):
    """Wait for the end of all workers."""
    end = time.monotonic() + 30
    while pids(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not pids(folder)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for pid in pids(tmp_path / "task-0"):
        os.kill(pid, signal.SIGKILL)


@here
@pytest.mark.slow
def test_a_worker_does_the_work(folder):
    app, (_, up) = client_app(MAKE), right()
    same(answered(app, message(), folder), up)
    (first,) = pids(folder / "task-0")
    line = Path(_worker_socket.address(str(folder / "task-0")))
    assert stat.S_IMODE(line.stat().st_mode) == 0o600
    assert stat.S_IMODE(line.parent.stat().st_mode) == 0o700
    same(answered(app, message(), folder), up)
    assert pids(folder / "task-0") == [first]
    # Killed, the next one repeats the answer and goes on from the files.
    os.kill(first, signal.SIGKILL)
    kept = (folder / "task-0" / "node.npz").read_bytes()
    same(answered(app, message(), folder), up)
    assert (folder / "task-0" / "node.npz").read_bytes() == kept
    (second,) = pids(folder / "task-0")
    assert second != first
    # A node-config that is another one has a worker of its own; there the node's function fails.
    assert answered(app, message(), folder, broken=True)[0] == {"what": "failed", "kind": "KeyError"}
    assert "the patient's name" in (folder / "task-0" / "worker.log").read_text()
    # Without a worker the one there is ends.
    same(answered(app, message(), folder), up)
    same(answered(client_app(MAKE, worker=False), message(), folder), up)
    assert ended(folder / "task-0")


@here
@pytest.mark.slow
def test_a_worker_ends_when_it_is_idle(folder):
    answered(client_app(MAKE, idle_seconds=0.5), message(), folder)
    assert ended(folder / "task-0")
    assert not os.path.exists(_worker_socket.address(str(folder / "task-0")))


@here
@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_a_failure(folder):
    header, _ = answered(client_app("tests.flower.nowhere:make_node"), message(), folder)
    assert header == {"what": "failed", "kind": "ModuleNotFoundError"}
