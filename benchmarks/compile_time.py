"""Time to a first result: what a first `solve` and a first gradient compile, and what a next process saves.

    python -m benchmarks.compile_time [--tasks 3 --samples 25 --features 5] [--models ...] [--repeats 3] [--json FILE]

For each model, in a process of its own whose caches are empty: seconds of a first solve to a gap of 1e-3, of a second
one on other data of the same shape, and of a first ``jax.grad`` through a solve with respect to lambda; the programs
that JAX compiled for each, and the seconds that its compiler took of the first. Then once more in a new process that
has what `mocha_jax.keep_programs` kept of the first. Medians of the repeats; importing JAX and the library is apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import mocha_jax as mj

R = mj.regularizers
pack_tasks, Problem, solve = mj.pack_tasks, mj.Problem, mj.solve  # names are imported when they are asked for: here
CASES: dict[str, tuple[mj.Algorithm[Any], Callable[[Any], Any]]] = {
    "local, interior point": (mj.InteriorPoint(), lambda lam: R.Independent(lam)),
    "near the mean, interior point": (mj.InteriorPoint(), lambda lam: R.MeanRegularized(lam, 0.1)),
    "local": (mj.Mocha(), lambda lam: R.Independent(lam)),
    "near the mean, Algorithm 1": (mj.Mocha(sigma_prime="per_task"), lambda lam: R.MeanRegularized(lam, 0.1)),
    "near the mean": (mj.Mocha(), lambda lam: R.MeanRegularized(lam, 0.1)),
    "(14)": (mj.Mocha(), lambda lam: R.Probabilistic(lam)),
    "(14), alternation": (mj.Mocha(server="dual"), lambda lam: R.Probabilistic(lam)),
    "(12)": (mj.Mocha(), lambda lam: R.Clustered(lam, 0.5, 3)),
    "(15)": (mj.Mocha(), lambda lam: R.SparsePrecision(lam, 1.0, 0.01, 0.01)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--no-gradient", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        sizes = options.tasks, options.samples, options.features
        for found in measured(options.models[0], *sizes, gradient=not options.no_gradient):
            print(json.dumps(found), flush=True)
        return
    shape = f"{options.tasks} x {options.samples} x {options.features}"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {shape}; seconds, medians of {options.repeats}")
    print(
        f"{'model':>26} {'solve':>6} {'compiler':>9} {'programs':>9} | {'again':>6} {'programs':>9} | {'grad':>6} "
        f"{'programs':>9} | {'next process: solve':>19} {'grad':>6} | {'gap':>8}"
    )
    rows = []
    for name in options.models:
        runs = [in_processes(name, options) for _ in range(options.repeats)]
        row = {"model": name} | {k: float(np.median([run[k] for run in runs])) for k in runs[0]}
        rows.append(row)
        print(
            f"{name:>26} {row['solve_s']:6.2f} {row['solve_compiler_s']:9.2f} {row['solve_programs']:9.0f} | "
            f"{row['again_s']:6.3f} {row['again_programs']:9.0f} | {row['grad_s']:6.2f} {row['grad_programs']:9.0f} | "
            f"{row['next_solve_s']:19.2f} {row['next_grad_s']:6.2f} | {row['gap']:8.1e}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "shape": shape, "rows": rows}, file, indent=1)


def in_processes(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure in a new process, and in another one that finds what the first compiled."""
    with tempfile.TemporaryDirectory() as cache:
        command, keep = alone(name, options.tasks, options.samples, options.features, cache)
        first, after = (
            json.loads(
                subprocess.run(
                    [sys.executable, *command], env=os.environ | keep, capture_output=True, check=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )  # fmt: skip
    return first | {"next_solve_s": after["solve_s"], "next_grad_s": after["grad_s"]}


def alone(
    name: str, tasks: int, samples: int, features: int, cache: str, *, gradient: bool = True
) -> tuple[list[str], dict[str, str]]:
    """Arguments of Python and variables of a process that measures a model and keeps what it compiles in a folder.

    It prints what it has found so far after every measurement.
    """
    keep = {name: cache for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA")} | {"JAX_COMPILATION_CACHE_DIR": ""}
    sizes = {"tasks": tasks, "samples": samples, "features": features}
    given = [f"--{size}={count}" for size, count in sizes.items()] + ([] if gradient else ["--no-gradient"])
    return ["-m", "benchmarks.compile_time", "--alone", "--models", name, *given], keep


def measured(name: str, *shape: int, gradient: bool = True) -> Iterator[dict[str, float]]:
    """Measure in this process: a first solve, a second one, a gradient. All that is known after each."""
    heard: dict[str, float] = {}
    mj.keep_programs()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            heard["programs"] += 1
            heard["compiler_s"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    algorithm, regularizer = CASES[name]
    raw = [samples(seed, *shape) for seed in range(2)]

    def solved(lam: Any, seed: int) -> mj.Solution:
        data = pack_tasks(*raw[seed], loss_scaling="task_mean")
        return solve(Problem(data, mj.losses.Hinge(), regularizer(lam)), algorithm, tol=1e-3, max_rounds=200)

    def of_strength() -> jax.Array:
        return jax.grad(lambda lam: (solved(lam, 0).weights ** 2).sum())(0.1)

    found: dict[str, float] = {"grad_s": np.nan, "grad_programs": np.nan}
    kinds: dict[str, Callable[[], Any]] = {"solve": lambda: solved(0.1, 0), "again": lambda: solved(0.1, 1)}
    if gradient and name != "(15)":  # which is not convex in both
        kinds["grad"] = of_strength
    for what, work in kinds.items():
        heard.update(programs=0, compiler_s=0.0)
        began = time.perf_counter()
        answer = jax.block_until_ready(work())
        found[f"{what}_s"] = time.perf_counter() - began
        found |= {f"{what}_{k}": v for k, v in heard.items()}
        if what == "solve":
            found["gap"] = float(answer.relative_gap)
        yield found


def samples(seed: int, tasks: int, rows: int, features: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(rows, features)).astype("f") for _ in range(tasks)]
    return xs, [np.sign(x[:, 0]) for x in xs]


if __name__ == "__main__":
    main()
