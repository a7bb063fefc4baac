"""Two real processes on this machine train together; one is killed, and both go on from the checkpoint."""

import json
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np

import mocha_jax as mj

ROUNDS, KILLED_AT = 40, 15

PROCESS = textwrap.dedent(
    """
    import json, os, signal, sys

    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    port, process, checkpoint, kill, out = json.loads(sys.argv[1])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

    import numpy as np

    import mocha_jax as mj
    from tests.driver.test_processes import ROUNDS, KILLED_AT, problem

    seen = []

    def callback(round, history):
        seen.append(round)
        if kill and process == 1 and round >= KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    assert jax.device_count() == 4 and jax.local_device_count() == 2
    solution = mj.solve(
        mj.shard(problem()), key=jax.random.key(1), tol=None, max_rounds=ROUNDS, chunk=5,
        systems=mj.systems.Dropout(0.2), checkpoint=checkpoint, callback=callback,
    )
    if process == 0:
        np.savez(out, weights=solution.weights, gap=solution.history.gap, utilisation=solution.utilisation, seen=seen)
    """
)


def problem():
    rng = np.random.default_rng(5)
    xs = [rng.normal(size=(n, 4)) for n in rng.integers(3, 12, 10)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0] + 0.2) for x in xs], loss_scaling="task_mean")
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))


def start_two(folder, *, kill):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root = Path(__file__).resolve().parents[2]

    def start(process):
        settings = json.dumps([port, process, str(folder / "run.npz"), kill, str(folder / "out.npz")])
        with open(folder / f"log{process}.txt", "w") as log:
            return subprocess.Popen([sys.executable, "-c", PROCESS, settings], cwd=root, stdout=log, stderr=log)

    return [start(process) for process in (0, 1)]


def test_killed_and_started_again_they_end_where_one_process_does(tmp_path):
    first, second = start_two(tmp_path, kill=True)
    try:
        assert second.wait(timeout=240) == -signal.SIGKILL, (tmp_path / "log1.txt").read_text()
    finally:
        first.kill()
        first.wait()
    assert not (tmp_path / "out.npz").exists()
    with np.load(tmp_path / "run.npz") as checkpoint:
        held = len(checkpoint["history_0"])
    assert held in (KILLED_AT - 5, KILLED_AT)  # the first process may not have come to write the last chunk

    for process in start_two(tmp_path, kill=False):
        try:
            assert process.wait(timeout=240) == 0, (tmp_path / "log0.txt").read_text()
        finally:
            process.kill()
    together = np.load(tmp_path / "out.npz")

    alone = mj.solve(
        problem(), key=jax.random.key(1), tol=None, max_rounds=ROUNDS, chunk=5, systems=mj.systems.Dropout(0.2)
    )
    assert len(together["gap"]) == ROUNDS
    assert together["seen"][0] == held + 5  # what the checkpoint held was not done again
    np.testing.assert_allclose(together["weights"], alone.weights, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(together["gap"], alone.history.gap, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(together["utilisation"][:10], alone.utilisation, rtol=1e-6)
