"""One local epoch of all tasks: this library on one and on all CPU devices, liblinear, and a hand-written numba loop.

    python -m benchmarks.local_epoch [--repeats 15] [--turns 3] [--json FILE]

All three do one pass of dual coordinate ascent for the hinge loss over the same samples. The library and
the numba loop visit rows in one random order and do the same arithmetic in float32 (the results are
compared); the numba loop uses all cores, a task each; so does the library where `mocha_jax.shard` deals the
nodes out to a CPU device per core. liblinear (by way of scikit-learn's wrapper)
works in float64, it has no float32, in its own random order, task after task, and is timed as the difference
of a fit with 21 passes and a fit with 1, over 20. All solve the same problem: C = 100, that is
lambda = 1/(200 n) with task means. A much smaller C would let liblinear's shrinking skip most
rows after a few passes, and the time of a pass would no longer be that of an epoch.

Each competitor runs in a process of its own, since idle threads of one slow down the others; they
take turns, so that a noisy moment does not hit one alone. The gap printed is the
relative duality gap after 20 epochs of the library: speed is never shown without accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from mocha_jax._node.buckets import time_major
from mocha_jax._node.local_solver import ascend, visiting_order, visiting_orders

SHAPES = [(32, 256, 576), (24, 1408, 100), (40, 512, 180), (1000, 64, 64), (4096, 32, 32)]
COMPETITORS = ("library", "sharded", "liblinear", "numba")
C = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions in a turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each competitor; the median over all is printed")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--only", choices=COMPETITORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        if options.only == "sharded":
            jax.config.update("jax_num_cpu_devices", os.cpu_count())
        measure = globals()[f"measure_{options.only}"]
        results = [measure(Task(*shape), options.repeats) for shape in SHAPES]
        os.write(int(os.environ["RESULTS"]), json.dumps(results).encode())
        return

    device = jax.devices()[0]
    print(f"{device.device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, numba {_version('numba')}")
    print(f"milliseconds per local epoch of all tasks, median of {options.turns} x {options.repeats}")
    rows: list[dict[str, Any]] = [dict(zip("mnd", shape, strict=True)) for shape in SHAPES]
    times: dict[str, list[Any]] = {who: [[] for _ in SHAPES] for who in COMPETITORS}
    for _ in range(options.turns):
        for who in COMPETITORS:
            for row, into, result in zip(rows, times[who], _child(who, options.repeats), strict=True):
                into += result.pop("ms")
                row.update(result)
    print(
        f"{'m, n, d':>16} {'library':>8} {'sharded':>8} {'liblinear':>10} {'numba':>7} | "
        f"{'/liblinear':>10} {'sharded':>7} | {'/numba':>7} {'sharded':>7} | {'compile s':>9} {'gap at 20':>9}"
    )
    for i, row in enumerate(rows):
        row |= {f"{who}_ms": float(np.median(times[who][i])) for who in COMPETITORS}
        shape = ", ".join(str(row[letter]) for letter in "mnd")
        print(
            f"{shape:>16} {row['library_ms']:8.2f} {row['sharded_ms']:8.2f} {row['liblinear_ms']:10.2f} "
            f"{row['numba_ms']:7.2f} | {row['library_ms'] / row['liblinear_ms']:10.2f} "
            f"{row['sharded_ms'] / row['liblinear_ms']:7.2f} | {row['library_ms'] / row['numba_ms']:7.2f} "
            f"{row['sharded_ms'] / row['numba_ms']:7.2f} | "
            f"{row['compile_s']:9.2f} {row['gap']:9.1e}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "device": device.device_kind, "rows": rows}, file, indent=1)


class Task:
    """The data of one shape, the same in every process."""

    def __init__(self, m: int, n: int, d: int) -> None:
        self.key = jax.random.key(0)
        weights = jax.random.normal(jax.random.fold_in(self.key, 0), (m, d))
        sizes = np.full(m, n)
        data = mj.datasets.classification(jax.random.fold_in(self.key, 1), weights, sizes, label_noise=0.1)
        self.problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1 / (2 * C * n)))
        self.state = mj.Mocha(sigma_prime="per_task").init(self.problem)
        self.q = self.state.server.sigma * self.state.server.coupling.diagonal()


def measure_library(task: Task, repeats: int) -> dict[str, Any]:
    return _epoch(task, task.problem, repeats)


def measure_sharded(task: Task, repeats: int) -> dict[str, Any]:
    measured = _epoch(task, mj.shard(task.problem), repeats)
    return {f"sharded_{name}" if name != "ms" else name: value for name, value in measured.items()}


def one_pass(key: jax.Array, loss: mj.losses.Loss, data: mj.TaskData, *state: jax.Array) -> tuple[jax.Array, ...]:
    """A pass over the rows, with the drawing of their order."""
    return ascend(visiting_orders(key, data, 1), loss, data, *state)


def _epoch(task: Task, problem: mj.Problem, repeats: int) -> dict[str, Any]:
    def arguments(problem: mj.Problem) -> tuple[Any, ...]:
        data = problem.data
        state = mj.Mocha(sigma_prime="per_task").init(problem)
        w, q = (data.to_nodes(a) for a in (state.w, state.server.sigma * state.server.coupling.diagonal()))
        return problem.loss, time_major(data), state.beta, w, q, data.sizes

    given = jax.block_until_ready(jax.jit(arguments)(problem))
    began = time.perf_counter()
    compiled = jax.jit(one_pass).lower(task.key, *given).compile()
    compile_s = time.perf_counter() - began
    ms = timed(lambda: jax.block_until_ready(compiled(task.key, *given)), repeats)
    _, history = mj.run(problem, mj.Mocha(sigma_prime="per_task"), task.key, num_rounds=20)
    return dict(ms=ms, compile_s=compile_s, gap=float(history.relative_gap[-1]))


def measure_numba(task: Task, repeats: int) -> dict[str, Any]:
    from benchmarks._numba_epoch import epoch

    data = task.problem.data
    x, y, c = (np.array(a) for a in (data.x, data.y, data.weight))
    norm2 = np.einsum("mnd,mnd->mn", x, x)
    order = np.asarray(visiting_order(jax.random.fold_in(task.key, 0), x.shape[1]))  # that of pass 0
    q, beta, r = np.array(task.q), np.zeros_like(y), np.zeros((len(x), x.shape[2]), np.float32)

    def once() -> None:
        beta[:], r[:] = 0, 0
        epoch(x, y, c, norm2, beta, r, q, order)

    once()
    given = task.state.beta, task.state.w, task.q, data.sizes
    ours, *_ = one_pass(task.key, task.problem.loss, time_major(data), *given)
    np.testing.assert_allclose(ours, jnp.asarray(beta), atol=2e-3)  # the same work
    return dict(ms=timed(once, repeats))


def measure_liblinear(task: Task, repeats: int) -> dict[str, Any]:
    from sklearn.svm import _liblinear

    x, y = np.array(task.problem.data.x, np.float64), np.array(task.problem.data.y, np.float64)
    ones = np.ones(x.shape[1])

    def fit(passes: int) -> float:
        began = time.perf_counter()
        for t in range(len(x)):  # solver 3: L2-regularised hinge, dual
            _liblinear.train_wrap(x[t], y[t], 0, 3, 1e-30, -1.0, C, np.ones(2), passes, 0, 0.1, ones)
        return time.perf_counter() - began

    fit(1)
    return dict(ms=[1e3 * (fit(21) - fit(1)) / 20 for _ in range(max(repeats // 3, 1))])


def timed(work: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each repetition, after three that do not count."""
    times = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return times[3:]


def _child(who: str, repeats: int) -> list[dict[str, Any]]:
    """Measure one competitor in a process of its own; liblinear prints a lot, so results have their own pipe."""
    read, write = os.pipe()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.local_epoch", "--only", who, "--repeats", str(repeats)]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(
        command, stdout=quiet, stderr=quiet, pass_fds=[write], env={**os.environ, "RESULTS": str(write)}
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if child.wait() != 0:
        raise SystemExit(f"the {who} process failed; run it by hand: {' '.join(command)}")
    return json.loads(text)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    main()
