"""Real processes on this machine train together, each with nodes of its own; some are killed, all go on from there."""

import contextlib
import json
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

ROUNDS, KILLED_AT, CHUNK = 30, 15, 5
SIZES = np.random.default_rng(5).integers(3, 12, 12)
FEATURES = 4


def pack(first, stop, **more):
    """Some nodes of the federation: which samples they hold does not depend on who asks."""
    xs = [np.random.default_rng([7, k]).normal(size=(n, FEATURES)) for k, n in enumerate(SIZES)][first:stop]
    return mj.pack_tasks(xs, [np.sign(x[:, 0] + 0.2) for x in xs], loss_scaling="task_mean", **more)


def problem_of(data):
    # Smooth: where duals of a hinge stand still, weights of their points are rounding, and so is what sigma' learns of them.
    return mj.Problem(data, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.1, 0.1))


def solve(problem, **more):
    nodes = problem.data.num_nodes if problem.data.sharding is None else problem.data.sharding.nodes
    answers = np.random.default_rng(3).random((7, nodes)) < 0.8  # settings of nodes know nothing of processes
    options = dict(key=jax.random.key(1), tol=None, max_rounds=ROUNDS, chunk=CHUNK, systems=mj.systems.Trace(answers))
    return mj.solve(problem, **options | more)


def numbers(solution):
    """What has to be the same to the last bit, as far as it lies in this process."""
    leaves = jax.tree.leaves((solution.state, solution.history, solution.utilisation))
    return [np.asarray(s.data) for a in leaves for s in getattr(a, "addressable_shards", [])] + [
        a for a in leaves if isinstance(a, np.ndarray)
    ]


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(folder, scenario, counts, **settings):
    """Start as many processes as there are counts of nodes; each runs a function of `tests.driver.scenarios`."""
    root, port = Path(__file__).resolve().parents[2], free_port()

    def one(process):
        given = dict(port=port, process=process, counts=counts, folder=str(folder), devices=1) | settings
        with open(folder / f"log{process}.txt", "w") as log:
            code = [sys.executable, "-m", "tests.driver.scenarios", scenario, json.dumps(given)]
            return subprocess.Popen(code, cwd=root, stdout=log, stderr=log)

    return [one(process) for process in range(len(counts))]


def finish(processes, folder, killed=None, limit=240):
    """Wait until all have ended well; or until the one that is to be killed is, then a little, and end the others."""
    until = time.monotonic() + limit
    try:
        for i, process in enumerate(processes):
            if killed in (None, i):
                code = process.wait(timeout=max(until - time.monotonic(), 1.0))
                assert code == (0 if killed is None else -signal.SIGKILL), (folder / f"log{i}.txt").read_text()[-4000:]
        for process in processes if killed is not None else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)  # some are told that one is gone, and clean up
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rounds_held(folder):
    with np.load(folder / "run.npz") as checkpoint:
        return int(checkpoint["history/round"][-1]) if len(checkpoint["history/round"]) else 0


@pytest.mark.slow
def test_two_processes_with_nodes_of_their_own(tmp_path):
    counts = [5, 7]
    finish(start(tmp_path, "killed", counts, kill="part", victim=1), tmp_path, killed=1)
    assert rounds_held(tmp_path) == KILLED_AT - CHUNK  # the last set was not complete
    assert list(tmp_path.glob(".run.npz.1-of-2.*.partial"))
    finish(start(tmp_path, "resumed", counts), tmp_path)
    assert len(list(tmp_path.glob("*.part"))) == 2  # all others were removed
    assert not list(tmp_path.glob(".*.partial"))

    together, alone = np.load(tmp_path / "out.npz"), solve(problem_of(pack(0, 12)))
    assert together["first"] == KILLED_AT  # what the checkpoint held was not done again
    np.testing.assert_allclose(together["weights"], alone.weights, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(together["gap"], alone.history.gap, rtol=1e-6, atol=1e-12)
    real = np.r_[0:5, 7:14]
    np.testing.assert_allclose(together["utilisation"][real], alone.utilisation, rtol=1e-9)
    # Where nodes of both share tasks, a task's samples are counted over both.
    np.testing.assert_allclose(together["shared_weight"][real], pack(0, 12, task=np.arange(12) % 3).weight, rtol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "victim"), [("part", 2), ("file", 0), ("told", 1)])
def test_a_checkpoint_of_four_processes_is_good_for_two_and_for_one(tmp_path, kill, victim):
    finish(start(tmp_path, "killed", [3, 3, 3, 3], kill=kill, victim=victim), tmp_path, killed=victim)
    # Who is killed where the others tell it that the file is written was in time for it to count.
    assert rounds_held(tmp_path) == (KILLED_AT if kill == "told" else KILLED_AT - CHUNK)
    finish(start(tmp_path, "resumed", [3, 3, 3, 3], rounds=20), tmp_path)
    finish(start(tmp_path, "continued", [6, 6], devices=2, rounds=25), tmp_path)
    ended = solve(problem_of(pack(0, 12)), checkpoint=tmp_path / "run.npz")
    assert not list(tmp_path.glob("*.part"))  # one process needs none
    alone = solve(problem_of(pack(0, 12)))
    assert len(ended.history.gap) == ROUNDS
    np.testing.assert_allclose(ended.weights, alone.weights, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(ended.history.gap, alone.history.gap, rtol=1e-6, atol=1e-12)
    finish(start(tmp_path, "continued", [3, 3, 3, 3], rounds=ROUNDS + 5), tmp_path)
