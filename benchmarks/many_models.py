"""Very many small models at once, beside scikit-learn in a process pool on all cores.

    python -m benchmarks.many_models [--models 100000] [--kinds ridge logistic ...] [--sample 4000] [--json FILE]

So many models of 16 samples and 32 features each, `Independent`, solved together to a certified relative gap of 1e-3 of
their sum: seconds of the first solve, which compiles, and the median of three more. scikit-learn, with the quickest of
its solvers for such models, fits a sample of the same ones, each to its own default tolerance, one thread a process,
and its seconds are scaled to all of them. The excess is by how much the objective of the sample is above
scikit-learn's, in float64. scikit-learn has no quantile regression with a ridge.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from benchmarks.card._sklearn_models import KINDS, LAM, objectives
from benchmarks.card.many import FEATURES, LOSSES, SAMPLES, TOL, made

ALL: dict[str, mj.losses.Loss] = {**LOSSES, "quantile": mj.losses.Quantile(0.9)}
_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100_000)
    parser.add_argument("--kinds", nargs="+", choices=ALL, default=[*ALL])
    parser.add_argument("--sample", type=int, default=4000, help="models that scikit-learn fits")
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    size = f"{options.models:,} models of {SAMPLES} x {FEATURES}"
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}; {size}; seconds")
    ours = f"{'':>10} {'first':>7} {'again':>7} {'by':>13} {'rounds':>6} {'gap':>8}"
    print(f"{ours} | {'scikit-learn':>12} {'over first':>10} {'over again':>10} {'excess':>8}")
    rows = []
    for kind in options.kinds:
        rows.append(one(kind, options.models, options.sample))
        jax.clear_caches()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "models": options.models, "rows": rows}, file, indent=1)


def one(kind: str, models: int, sample: int) -> dict[str, Any]:
    """Measure and print the models of one kind."""
    data = jax.block_until_ready(made("ridge" if kind == "quantile" else kind, models))
    problem = mj.Problem(data, ALL[kind], mj.regularizers.Independent(LAM))
    taken = []
    for turn in range(_TURNS + 1):
        begin = time.perf_counter()
        solution = mj.solve(problem, tol=TOL, key=jax.random.key(turn))
        jax.block_until_ready(solution.weights)
        taken.append(time.perf_counter() - begin)
    row: dict[str, Any] = {
        "kind": kind, "first_s": taken[0], "again_s": float(np.median(taken[1:])), "rounds": solution.rounds,
        "by": type(mj.default_algorithm(problem)).__name__, "gap": float(solution.relative_gap),
    }  # fmt: skip
    shown = (
        f"{kind:>10} {row['first_s']:7.2f} {row['again_s']:7.2f} {row['by']:>7} {row['rounds']:6} {row['gap']:8.1e} |"
    )
    if kind in KINDS:
        theirs, excess = beside(kind, data, solution, sample)
        row |= {"sklearn_s": theirs * models, "excess": excess}
        ratios = (row["sklearn_s"] / row[what] for what in ("first_s", "again_s"))
        shown += f" {row['sklearn_s']:12.1f} " + " ".join(f"{ratio:10.1f}" for ratio in ratios) + f" {excess:8.1e}"
    print(shown, flush=True)
    return row


def beside(kind: str, data: mj.TaskData, solution: mj.Solution[mj.Problem], sample: int) -> tuple[float, float]:
    """Seconds a model that scikit-learn takes, and how far our objective of the sample is above its own."""
    x, y, ours = (np.asarray(a[:sample]) for a in (data.x, data.y, solution.weights))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        source, to = Path(folder) / "sample.npz", Path(folder) / "weights.npz"
        np.savez(source, x=x, y=y)
        command = [sys.executable, "-m", "benchmarks.card._sklearn_models", kind, str(source), str(to)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | one_thread).stdout
        weights = np.load(to)["weights"]
    mine, others = (float(objectives(kind, x, y, w).sum()) for w in (ours, weights))
    return json.loads(said)["seconds"] / len(x), mine / others - 1.0


if __name__ == "__main__":
    main()
