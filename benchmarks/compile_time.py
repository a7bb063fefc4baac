"""How long the first `solve` of a problem compiles, and that a second one of its shape compiles nothing.

    python -m benchmarks.compile_time [--tasks 30] [--json FILE]

For each model a first and a second problem, of the same shape but with other data, are solved for a few rounds; JAX's
caches are emptied before the first. What JAX reports of its compiler is printed beside the wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

import mocha_jax as mj

R = mj.regularizers
CASES: dict[str, tuple[mj.Mocha, Any]] = {
    "near the mean, Algorithm 1": (mj.Mocha(sigma_prime="per_task"), R.MeanRegularized(0.1, 0.1)),
    "near the mean": (mj.Mocha(), R.MeanRegularized(0.1, 0.1)),
    "(14)": (mj.Mocha(), R.Probabilistic(0.1)),
    "(14), alternation": (mj.Mocha(server="dual"), R.Probabilistic(0.1)),
    "(12)": (mj.Mocha(), R.Clustered(0.1, 0.5, 3)),
    "(15)": (mj.Mocha(), R.SparsePrecision(0.1, 1.0, 0.01, 0.01)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    heard = {"programs": 0, "seconds": 0.0}

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            heard["programs"] += 1
            heard["seconds"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; seconds")
    print(
        f"{'model':>28} {'first solve':>12} {'compiler':>9} {'programs':>9} | {'second':>8} {'programs':>9} {'gap':>8}"
    )
    rows = []
    for name, (algorithm, regularizer) in CASES.items():
        jax.clear_caches()
        row: dict[str, Any] = {"model": name}
        for turn in ("first", "second"):
            this = problem(turn == "second", options.tasks, regularizer)
            heard.update(programs=0, seconds=0.0)
            began = time.perf_counter()
            gap = mj.solve(this, algorithm, tol=1e-3, max_rounds=50).relative_gap
            wall = time.perf_counter() - began
            row |= {f"{turn}_s": wall, f"{turn}_programs": heard["programs"], f"{turn}_compiler_s": heard["seconds"]}
        rows.append(row | {"gap": float(gap)})
        print(
            f"{name:>28} {row['first_s']:12.2f} {row['first_compiler_s']:9.2f} {row['first_programs']:9d} | "
            f"{row['second_s']:8.2f} {row['second_programs']:9d} {gap:8.1e}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": rows}, file, indent=1)


def problem(seed: int, tasks: int, regularizer: Any) -> mj.Problem:
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(40, 20)).astype("f") for _ in range(tasks)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
    return mj.Problem(data, mj.losses.Hinge(), regularizer)


if __name__ == "__main__":
    main()
