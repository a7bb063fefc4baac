"""From a thousand to a million tasks: ``python -m benchmarks.scale [--tasks 1000 10000 ...] [--json FILE]``.

Model (14), lambda = 0.1, on m tasks of 16 samples and 32 features, hinge loss, float32. Omega is kept as factors of
rank 32; nothing here is m x m. *proximal* learns weights and Omega together, from nothing. *adaptive* and *spectral*
(Algorithm 1 with a safe sigma') find the weights, from nothing, for the Omega so learned, with 1 % of I/m mixed in.

A solve runs to a relative gap of 1e-2, recorded every fifth round: the joint gap for the proximal server, the gap for
the given Omega for the others. Then a round is timed over 20 rounds with one record (median of 3).
Every size runs in a process of its own, for the peak memory of its solve: of that process,
and where there is an accelerator of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from mocha_jax._data.layouts import collect
from mocha_jax.regularizers._singular_values import mixed_with_identity
from mocha_jax.servers._dual import DualState

SAMPLES, FEATURES, ROUNDS, PIECE = 16, 32, 200, 10_000
METHODS = {
    "proximal": mj.Mocha(server="proximal"),
    "adaptive": mj.Mocha(server="dual", sigma_prime="adaptive", omega_every=1_000_000),
    "spectral": mj.Mocha(server="dual", sigma_prime="spectral", omega_every=1_000_000),
}


def tasks(key: jax.Array, m: int) -> mj.TaskData:
    """Tasks whose weights mix four hidden directions; made where they will be used, for the host may be too small.

    Some at a time, and put in order as they come: besides the samples there is no room for a second copy of them.
    """
    hidden, rest = jax.random.split(key)
    directions, labels = jax.random.normal(hidden, (4, FEATURES)) / FEATURES**0.5, []

    def samples() -> Iterator[Any]:
        for begin in range(0, m, PIECE):
            x, y = some(jax.random.fold_in(rest, begin), directions, min(PIECE, m - begin))
            labels.append(y)
            yield x

    x = collect(samples(), (m, SAMPLES, FEATURES), np.float32)
    y = jnp.concatenate(labels)
    weight = jnp.full((m, SAMPLES), 1.0 / SAMPLES)
    return mj.TaskData(x, y, weight, jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling="task_mean")


@partial(jax.jit, static_argnums=2)
def some(key: jax.Array, directions: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Samples and labels of some tasks."""
    mixing, samples, noise = jax.random.split(key, 3)
    truth = jax.random.normal(mixing, (m, 4)) @ directions
    x = jax.random.normal(samples, (m, SAMPLES, FEATURES))
    z = jnp.einsum("mnd,md->mn", x, truth) + 0.3 * jax.random.normal(noise, (m, SAMPLES))
    return x, jnp.where(z > 0, 1.0, -1.0)


def measure(
    m: int, method: str, repeats: int = 3, alone: contextlib.AbstractContextManager[Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Seconds per round (median, or without repeats the solve's), what was reached, and peak memory.

    What is timed is done within `alone`.
    """
    key, algorithm = jax.random.key(0), METHODS[method]
    problem = mj.Problem(tasks(key, m), mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))
    if jax.device_count() > 1:
        problem = mj.shard(problem)
    joint = method == "proximal"
    start = None if joint else with_omega(problem, algorithm)

    reached: list[tuple[float, float, int]] = []

    def watch(round: int, history: mj.History) -> bool:
        gap = float((history.relative_joint_gap if joint else history.relative_gap)[-1])
        reached.append((time.perf_counter() - began, gap, round))
        return gap <= 1e-2

    began = 0.0

    def solve() -> Any:
        nonlocal began
        reached.clear()
        began = time.perf_counter()
        return mj.solve(
            problem, algorithm, tol=None, max_rounds=ROUNDS, record_every=5, chunk=5, callback=watch, state=start
        ).relative_joint_gap  # fmt: skip

    solve()  # which compiles
    compile_s = time.perf_counter() - began
    with alone or contextlib.nullcontext():
        joint_gap = solve()
    seconds, gap, rounds = reached[-1]
    compile_s, round_s = compile_s - seconds, seconds / rounds
    # What a solve needs.
    host, stats = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, jax.devices()[0].memory_stats() or {}

    def twenty() -> Any:
        return jax.block_until_ready(mj.run(problem, algorithm, key, num_rounds=20, record_every=20, state=start))

    if repeats:
        times = []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            twenty()
            times.append(time.perf_counter() - began)
        round_s = float(np.median(times[1:])) / 20
        compile_s = times[0] - 20 * round_s
    return {
        "m": m,
        "method": method,
        "round_ms": 1e3 * round_s,
        "compile_s": compile_s,
        "rounds": rounds,
        "gap": gap,
        "joint_gap": joint_gap,
        "seconds": seconds,
        "host_gb": host,
        "device_gb": stats.get("peak_bytes_in_use", float("nan")) / 1e9,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }


def with_omega(problem: mj.Problem, algorithm: mj.Mocha) -> mj.MochaState:
    """No weights yet, but the Omega that the proximal server learns for this problem."""
    learned = mj.solve(problem, METHODS["proximal"], tol=1e-2, record_every=5)
    assert isinstance(learned.relation, mj.coupling.LowRank)
    omega = mixed_with_identity(learned.relation, jnp.asarray(0.01), jnp.asarray(1.0))

    @jax.jit
    def start(problem: mj.Problem, omega: Any) -> mj.MochaState:
        state = algorithm.init(problem)
        dual = state.server if isinstance(state.server, DualState) else state.server.dual
        return algorithm.resume(state.replace(server=dual.replace(relation=omega)), problem)

    return start(problem, omega)


def main() -> None:
    """Measure every size in a fresh process; print; save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3, help="timings of twenty rounds (default %(default)s)")
    parser.add_argument("--cpu-devices", type=int, default=1, help="CPU devices to deal the tasks out to")
    parser.add_argument("--json", type=Path, help="save the numbers here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
        print(json.dumps(measure(options.tasks[0], options.methods[0], options.repeats)))
        return
    results: list[dict[str, Any]] = []
    columns = (
        "method",
        "tasks",
        "ms a round",
        "ns a sample",
        "rounds",
        "gap",
        "seconds",
        "compile s",
        "host GB",
        "GPU GB",
    )
    for method in options.methods:
        for m in options.tasks:
            command = [sys.executable, "-m", "benchmarks.scale", "--one", "--tasks", str(m), "--methods", method]
            command += ["--cpu-devices", str(options.cpu_devices), "--repeats", str(options.repeats)]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            r = json.loads(run.stdout.splitlines()[-1])
            if not results:
                print(f"{r['device']}, jax {r['jax']}\n" + "".join(f"{c:>12}" for c in columns))
            results.append(r)
            print(
                f"{method:>12}{m:>12}{r['round_ms']:>12.2f}{1e6 * r['round_ms'] / m / SAMPLES:>12.1f}{r['rounds']:>12}"
                f"{r['gap']:>12.1e}{r['seconds']:>12.2f}{r['compile_s']:>12.1f}{r['host_gb']:>12.2f}"
                f"{r['device_gb']:>12.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
