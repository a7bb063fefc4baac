"""Rounds that learn Omega, against the number of tasks: ``python -m benchmarks.many_tasks``.

Model (14) on 1,000 to 100,000 tasks of about 20 samples and 32 features, float32. Omega is kept as factors and
updated in every round (the proximal server) or every tenth (the dual one). Each size runs in a process of its
own, for its peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj

FEATURES, SMALLEST, LARGEST, ROUNDS = 32, 15, 25, 100


def problem(m: int, seed: int = 0) -> mj.Problem:
    """Tasks whose weights mix four hidden directions."""
    rng = np.random.default_rng(seed)
    truth = (rng.normal(size=(m, 4)) @ rng.normal(size=(4, FEATURES)) / FEATURES**0.5).astype("f")
    x = rng.standard_normal((m, LARGEST, FEATURES), dtype="f")
    z = np.einsum("mnd,md->mn", x, truth) + 0.3 * rng.standard_normal((m, LARGEST), dtype="f")
    y = np.where(z > 0, 1, -1).astype("f")
    sizes = rng.integers(SMALLEST, LARGEST + 1, size=m)
    weight = ((np.arange(LARGEST) < sizes[:, None]) / sizes[:, None]).astype("f")
    data = mj.TaskData(
        jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), jnp.arange(m, dtype=jnp.int32), loss_scaling="task_mean"
    )
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))


def measure(m: int, server: str, repeats: int = 3) -> dict[str, Any]:
    """Seconds per round (median), what was reached, and peak memory of this process."""
    this, key = problem(m), jax.random.key(0)
    algorithm = mj.Mocha(server=server, sigma_prime="spectral")

    def timed() -> Any:
        return jax.block_until_ready(mj.run(key, algorithm, this, num_rounds=20, record_every=20))

    began = time.perf_counter()
    timed()
    first = time.perf_counter() - began
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        timed()
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    solution = mj.solve(this, algorithm, tol=1e-2, max_rounds=ROUNDS, record_every=5)
    return {
        "m": m,
        "server": server,
        "round_ms": 1e3 * float(np.median(times)) / 20,
        "compile_s": first - float(np.median(times)),
        "rounds": solution.rounds,
        "joint_gap": solution.relative_joint_gap,
        "solve_s": time.perf_counter() - began,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main() -> None:
    """Measure every size in a fresh process; print; save."""
    parser = argparse.ArgumentParser(prog="benchmarks.many_tasks", description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--servers", nargs="+", default=["proximal", "dual"])
    parser.add_argument("--json", type=Path, help="save the numbers here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.tasks[0], options.servers[0])))
        return
    results = []
    columns = "server", "tasks", "ms a round", "us a task", "peak GB", "rounds", "joint gap", "solve s", "compile s"
    print("".join(f"{c:>11}" for c in columns))
    for server in options.servers:
        for m in options.tasks:
            command = [sys.executable, "-m", "benchmarks.many_tasks", "--one", "--tasks", str(m), "--servers", server]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            r = json.loads(run.stdout.splitlines()[-1])
            results.append(r)
            print(
                f"{server:>11}{m:>11}{r['round_ms']:>11.1f}{1e3 * r['round_ms'] / m:>11.2f}{r['peak_gb']:>11.2f}"
                f"{r['rounds']:>11}{r['joint_gap']:>11.1e}{r['solve_s']:>11.1f}{r['compile_s']:>11.1f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
