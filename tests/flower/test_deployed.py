"""The example, run by Flower on this machine: SuperLink, SuperNodes, ServerApp and workers in processes of their own."""

import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.flower import _worker_socket

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "flower"

pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the tests are running away from the repository"),
    pytest.mark.skipif(
        not _worker_socket.possible() or not Path("/proc/self/cmdline").exists(),
        reason="no Unix sockets and no /proc here",
    ),
]
TOL = 1e-3


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Return a function that starts a federation."""
    monkeypatch.syspath_prepend(EXAMPLE)
    run_local = importlib.import_module("run_local")
    started = []

    def start(nodes, prepare=lambda federation: None, by_hand=False, **options):
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        found = run_local.Local(tmp_path / "federation", nodes, env={"PYTHONPATH": paths}, **options)
        started.append(found)
        prepare(found)
        if not by_hand:
            found.start()
        return found

    yield start
    for one in started:
        one.stop()
        assert not one.found()
    for name in ("run_local", "make_data", "make_keys"):
        sys.modules.pop(name, None)


def problem_of(local):
    tables = [np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32) for path in local.tables]
    xs, ys = [t[:, :-1] for t in tables], [t[:, -1] for t in tables]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=1.0, dtype=np.float32)
    return mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.Probabilistic(0.1))


def weights_in(path):
    model = mj.load_model(path)
    assert model.names.tasks[0] == "node 0"
    return model, np.column_stack([model.weights, model.intercept])


def rounds(log):
    return [int(number) for number in re.findall(r"round (\d+): gap", log)]


def is_the_simulation(local, path, log):
    model, weights = weights_in(path)
    assert model.trained["converged"]
    assert model.trained["relative_joint_gap"] <= TOL
    done = int(model.trained["rounds"])
    assert rounds(log) == list(range(1, done + 2))  # the last one judged the model
    state, history = mj.run(problem_of(local), mj.Mocha(), jax.random.key(0), num_rounds=done)
    np.testing.assert_allclose(weights, state.w, atol=1e-5 * float(np.abs(state.w).max()))
    np.testing.assert_allclose(model.trained["relative_joint_gap"], history.relative_joint_gap[-1], rtol=0.05)


@pytest.mark.slow
def test_two_nodes_are_the_simulation(local, tmp_path):
    here = local(2)
    run = here.submit(tol=TOL, round_seconds=120.0, max_rounds=3)
    assert here.wait(run) == "finished:completed", here.log(run)
    state, _ = mj.run(problem_of(here), mj.Mocha(), jax.random.key(0), num_rounds=3)
    model, weights = weights_in(here.folder / "model.npz")
    assert model.trained["rounds"] == 3
    np.testing.assert_allclose(weights, state.w, atol=1e-5 * float(np.abs(state.w).max()))


def recipe(title):
    """The commands of a section of the README, paragraph by paragraph."""
    text = (EXAMPLE / "README.md").read_text().partition(f"## {title}\n")[2].partition("```sh\n")[2].partition("```")[0]
    return [re.sub(r"^#.*\n", "", part).replace("\\\n", "") for part in text.strip().split("\n\n")]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def own_name():
    """A name of this machine that a client finds, and no address."""
    try:
        here = socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return "localhost"
    return socket.gethostname() if here else "localhost"


@pytest.mark.extended
def test_the_recipe_for_many_machines_runs_as_it_is_written(local):
    here = local(2, by_hand=True)
    shutil.copy(EXAMPLE / "make_keys.py", here.folder)
    shutil.copytree(EXAMPLE / "app", here.folder / "app")
    one_machine = {"federation.example.org": own_name(), "9190": free_port(), "/srv/model": f"{here.folder}/model"}
    one_machine["num-tasks=2"] = "num-tasks=2 max-rounds=1 round-seconds=300.0"

    def said(command, **also):
        for name, place in {**one_machine, **also}.items():
            command = command.replace(name, place)
        return command

    def run(command):
        return subprocess.run(
            ["bash", "-ec", said(command)], cwd=here.folder, env=here.env, capture_output=True, text=True, timeout=180,
            check=True,
        ).stdout  # fmt: skip

    keys, superlink, flwr, node, app = recipe("On many machines")
    run(keys)
    begin = here._start("superlink", shlex.split(said(superlink)))
    here._wait("superlink", "Application startup complete", begin)
    run(flwr)
    for i in range(2):
        for file in ("ca.crt", f"node{i}"):
            shutil.copy(here.folder / "keys" / file, here.folder)
        own = {"$i": f"{i}", "9194": free_port(), "/srv/table.csv": str(here.tables[i])}
        command = said(node, **own, **{"/var/lib/mocha": f"{here.folder}/node{i}-state"})
        begin = here._start(f"node{i}", shlex.split(command))
        here._wait(f"node{i}", r"SuperNode ID: \d+", begin)
    run(app)
    assert "CERTIFICATE_VERIFY_FAILED" not in (here.folder / "superlink.log").read_text()
    _, weights = weights_in(here.folder / "model.npz")
    state, _ = mj.run(problem_of(here), mj.Mocha(), jax.random.key(0), num_rounds=1)
    np.testing.assert_allclose(weights, state.w, atol=1e-5 * float(np.abs(state.w).max()))


@pytest.mark.extended
def test_a_certificate_holds_for_the_names_given_and_on_the_server_itself(tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    names = ["federation.example.org", "192.0.2.1", "localhost"]
    subprocess.run([sys.executable, EXAMPLE / "make_keys.py", tmp_path, "1", *names], check=True)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["federation.example.org", "localhost"]
    assert {str(place) for place in found.get_values_for_type(x509.IPAddress)} == {"192.0.2.1", "127.0.0.1", "::1"}


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_four_nodes_are_the_simulation(local, secure):
    here = local(4, secure=secure)
    run = here.submit(tol=TOL, round_seconds=300.0)
    assert here.wait(run, 580) == "finished:completed", here.log(run)
    is_the_simulation(here, here.folder / "model.npz", here.log(run))


@pytest.mark.slow
def test_after_kills_it_ends_at_the_same_optimum(local):
    here = local(4)
    checkpoint = str(here.folder / "server.npz")
    how = {"tol": TOL, "round_seconds": 25.0, "message_seconds": 60.0, "checkpoint": checkpoint}
    run = here.submit(**how)
    reached(here, run, 2)
    here.kill("node1")  # another number of Flower's after this
    here.node(1)
    (worker,) = here.found(f"flower._worker\0{here.folder}/node2/")
    os.kill(worker, signal.SIGSTOP)  # node 2 says that it is there, and answers nothing
    reached(here, run, 4)
    os.kill(worker, signal.SIGKILL)  # its message is answered by the next worker
    reached(here, run, 6)
    for pid in here.found("flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)
    before = rounds(here.log(run))
    assert here.wait(run, 120) == "finished:failed"
    again = here.submit(**how)
    assert here.wait(again, 580) == "finished:completed", here.log(again)
    after = rounds(here.log(again))
    assert before[-1] <= after[0] <= before[-1] + 2, (before, after)
    model, weights = weights_in(here.folder / "model.npz")
    best = mj.solve(problem_of(here), mj.Mocha(), tol=1e-5, max_rounds=3000)
    optimum = float(best.certificate.joint_primal)
    assert model.trained["converged"]
    assert model.trained["relative_joint_gap"] <= TOL
    assert model.trained["joint_primal"] <= optimum * (1 + 1.01 * TOL)
    assert model.trained["joint_dual"] <= optimum * (1 + 1e-5)
    # The loss is smooth and its regularizer strongly convex: weights are as near as the root of the gap.
    size = float(np.linalg.norm(best.weights))
    assert float(np.linalg.norm(weights - best.weights)) <= 2.0 * TOL**0.5 * size


@pytest.mark.slow
def test_a_node_that_never_answers_is_left_out(local):
    def hang(federation):  # whoever reads this table waits for ever
        federation.tables[3].unlink()
        os.mkfifo(federation.tables[3])

    here = local(4, hang)
    run = here.submit(tol=TOL, round_seconds=30.0, leave_after=2)
    assert here.wait(run, 580) == "finished:completed", here.log(run)
    assert "the node of task 3 was asked in 2 rounds and did not answer; it is left out" in here.log(run)
    model, weights = weights_in(here.folder / "model.npz")
    assert model.trained["converged"]
    assert model.trained["relative_joint_gap"] <= TOL
    np.testing.assert_array_equal(weights[3], 0.0)


def reached(local, run, number, seconds=300):
    """Wait for a round's end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        log = local.log(run)
        if any(found >= number for found in rounds(log)):
            return
        assert not local.status(run).startswith("finished"), log
        time.sleep(0.5)
    raise AssertionError(f"round {number} was not reached in {seconds} s:\n{log}")
