"""How many rounds to a relative gap of 1e-3: ``python -m benchmarks.rounds_to_gap [--data landmine.npz har.npz ...]``.

One update of W by rounds of one local epoch, for an Omega that (14) has learned and that is then held, or for tasks
near their mean (11), or each for itself; all nodes answering, and every node missing a round with probability 0.3.
Compared are Algorithm 1 with its safe rules for sigma', the adaptive one, and the proximal server, which is for
learning Omega but takes a given one too. Draws the gaps without drops.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common, tasksets
from mocha_jax import plotting

TARGET = 1e-3
DROPS = (0.0, 0.3)
METHODS = {
    "lemma9": mj.Mocha(server="dual", sigma_prime="lemma9"),
    "per_task": mj.Mocha(server="dual", sigma_prime="per_task"),
    "proximal": mj.Mocha(server="proximal"),
    "adaptive": mj.Mocha(server="dual", sigma_prime="adaptive"),
}


def main() -> None:
    """Run every method on every problem, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds_to_gap", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help=".npz files; absent ones are skipped")
    parser.add_argument("--rounds", type=int, default=600, help="rounds at most (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to save to")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder of the picture")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; rounds to a relative gap of {TARGET:g}, at most "
          f"{options.rounds}; gap after 300 rounds")  # fmt: skip
    print(f"{'problem':<26} {'drops':>5}  " + "  ".join(f"{m:>16}" for m in METHODS) + "  ms a round")
    results, panels = [], {}
    for name, problem in problems(options.data):
        for drop in DROPS:
            rows = {m: measure(problem, a, drop, options.rounds) for m, a in METHODS.items()}
            cells = (f"{r['rounds'] or '> ' + str(options.rounds):>7} {r['gap_300']:>8.1e}" for r in rows.values())
            times = "/".join(f"{r['ms']:.2g}" for r in rows.values())
            print(f"{name:<26} {drop:>5}  " + "  ".join(cells) + f"  {times}", flush=True)
            results += [{"problem": name, "drop": drop, "method": m} | r for m, r in rows.items()]
            if not drop:
                panels[name] = {m: r["gap"] for m, r in rows.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(panels).savefig(options.out / "rounds_to_gap.png", dpi=150)
    if options.json:
        options.json.write_text(json.dumps(results))


def problems(files: list[Path]) -> Iterator[tuple[str, mj.Problem]]:
    """The problems by name. Lambda is the paper's: R(W) = lambda / 2 tr(W inv(Omega) W')."""
    sets = {path.stem: tasksets.load(path) for path in files if path.exists()}
    sets["clusters"] = tasksets.synthetic(jax.random.key(0))
    lambdas = {"landmine": (1e-1, 1e-2, 1e-3), "har": (1e-2, 1e-3)}
    for name, tasks in sets.items():
        for lam in lambdas.get(name, (1e-2,)):
            yield f"{name}, learned, {lam:g}", held(tasks.data, tasks.loss, lam)
        if name in ("har", "clusters"):
            near = mj.regularizers.MeanRegularized(1e-2, 1e-2)
            yield f"{name}, mean, 0.01", mj.Problem(tasks.data, tasks.loss, near)
            alone = mj.regularizers.Independent(0.005)
            yield f"{name}, each alone, 0.01", mj.Problem(tasks.data, tasks.loss, alone)
        if name == "landmine":
            yield f"{name}, logistic, 0.01", held(tasks.data, mj.losses.Logistic(), 1e-2)


def held(data: mj.TaskData, loss: mj.losses.Loss, lam: float) -> mj.Problem:
    """The update of W for the Omega that (14) learns, mixed with 1 % of I / m to be invertible."""
    learned = mj.Problem(data, loss, mj.regularizers.Probabilistic(lam / 2, np.inf))
    omega = np.asarray(mj.solve(learned, tol=1e-3, max_rounds=3000).omega, np.float64)
    mixed = 0.99 * omega / np.trace(omega) + 0.01 * np.eye(len(omega)) / len(omega)
    precision = np.linalg.inv(mixed)
    least = 0.99 * float(np.linalg.eigvalsh(precision)[0])  # what the graph model (2) calls lambda2
    rest = 0.5 * (precision + precision.T) - least * np.eye(len(omega))
    return mj.Problem(data, loss, mj.regularizers.Graph(rest, lam / 2, lam / 2 * least))


def measure(problem: mj.Problem, algorithm: mj.Mocha, drop: float, rounds: int) -> dict[str, Any]:
    """Rounds to the target (None where it was not reached), the gaps, and milliseconds of a round."""
    key, systems = jax.random.key(0), mj.systems.Dropout(drop)

    def run() -> mj.History:
        return jax.block_until_ready(mj.run(problem, algorithm, key, num_rounds=rounds, systems=systems)[1])

    gap = np.asarray(run().relative_gap, float)
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    hit = np.flatnonzero(gap <= TARGET)
    return {
        "rounds": int(hit[0]) + 1 if len(hit) else None, "gap_300": float(gap[min(299, rounds - 1)]),
        "ms": 1e3 * seconds / rounds, "gap": gap.tolist(),
    }  # fmt: skip


def draw(panels: dict[str, dict[str, list[float]]]) -> Figure:
    """A panel per problem."""
    columns = 3
    figure = Figure(figsize=(10.5, 2.8 * -(-len(panels) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // columns), columns, sharey=True, squeeze=False).ravel()
    for axes, (name, methods) in zip(grid, panels.items(), strict=False):
        for (method, gap), colour in zip(methods.items(), plotting.COLOURS, strict=False):
            axes.plot(np.arange(1, len(gap) + 1), gap, color=colour, lw=1.6, label=method)
        axes.axhline(TARGET, color="0.6", lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.set_ylim(1e-6, 1.5)
        common.style(axes, name, "rounds", "relative gap" if axes in grid[::columns] else None)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    grid[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
