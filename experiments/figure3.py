"""Figure 3 of the paper, fault tolerance: ``python -m experiments.figure3 [--data har.npz ...]``.

Every node misses every round with probability p, from 0 to 0.9: for one update of W, with Omega held, and for the whole
method, which learns it (14); by Algorithm 1 and by the library's default. Beside them one node that never answers,
which Assumption 2 rules out.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common
from mocha_jax import plotting

DROPS = (0.0, 0.25, 0.5, 0.75, 0.9)
TARGETS = (1e-1, 1e-2, 1e-3)
EVERY = 5  # rounds between records
SILENT = 0
PARTS = {"update of W": 4000, "whole method": 600}  # rounds
ALGORITHMS = {"Algorithm 1": mj.Mocha(server="dual", sigma_prime="per_task"), "default": mj.Mocha()}


def main() -> None:
    """Parse the command line, train, print, draw."""
    options = common.command_line("experiments.figure3", __doc__)
    key = jax.random.key(options.seed)
    table: list[tuple[Any, ...]] = []
    rows: list[tuple[Any, ...]] = []
    for tasks in common.task_sets(options):
        joint = mj.Problem(tasks.data, tasks.loss, mj.regularizers.Probabilistic(options.lam, 10.0))
        problems = dict(zip(PARTS, (common.w_step(tasks, options.lam), joint), strict=True))
        best, panels = {part: common.optimum(problem, 1e-5) for part, problem in problems.items()}, {}
        for part, name in itertools.product(problems, ALGORITHMS):
            problem, label = problems[part], f"{part}, {name}"
            rounds = max(int(PARTS[part] * options.scale) // EVERY, 1) * EVERY
            panels[label] = curves(key, problem, ALGORITHMS[name], best[part], rounds)
            for name, excess in panels[label].items():
                done = EVERY * np.arange(1.0, len(excess) + 1)
                curve = common.Curve(name, done, excess)
                table.append((tasks.name, label, name, *(common.time_to(t, curve) for t in TARGETS)))
                rows += [(tasks.name, label, name, int(r), float(e)) for r, e in zip(done, excess, strict=True)]
            if name == "default":
                print(f"  {label}, task {SILENT} silent: {silent(key, problem, rounds)}")
        common.save(draw(panels, tasks.name), options, tasks, "figure3")
    print(f"\nrounds of one epoch until P / P* - 1 <= {', '.join(f'{t:g}' for t in TARGETS)}")
    for name, label, drop, *needed in table:
        print(f"{name:<10} {label:<25} {drop:<14} " + " ".join(f"{n:>7.0f}" for n in needed))
    common.write(options.out / "figure3.csv", ("tasks", "part", "drops", "round", "excess"), common.thin(rows))


def curves(
    key: jax.Array, problem: mj.Problem, algorithm: mj.Algorithm, best: float, rounds: int
) -> dict[str, np.ndarray]:
    """P / P* - 1 at every record, the joint objective where Omega is learned."""

    def train(problem: mj.Problem, systems: mj.systems.System) -> jax.Array:
        _, history = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=EVERY, systems=systems)
        return history.joint_primal

    primal = list(jax.jit(jax.vmap(train, (None, 0)))(problem, mj.grid(mj.systems.Dropout, p=DROPS)))
    primal.append(train(problem, mj.systems.NeverAnswers((SILENT,))))
    names = [f"p = {p:g}" for p in DROPS] + [f"task {SILENT} never"]
    return {n: np.maximum(np.asarray(v, float) / best - 1.0, 1e-9) for n, v in zip(names, primal, strict=True)}


def silent(key: jax.Array, problem: mj.Problem, rounds: int) -> str:
    """What a solve says of the node that never answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        systems = mj.systems.NeverAnswers((SILENT,))
        return mj.solve(problem, key=key, tol=1e-4, max_rounds=rounds, systems=systems, record_every=10).message


def draw(panels: dict[str, dict[str, np.ndarray]], name: str) -> Figure:
    """The update of W above the whole method, Algorithm 1 on the left and the default on the right."""
    figure = Figure(figsize=(8.4, 7.0), layout="constrained")
    grid = figure.subplots(2, 2, sharex="row", sharey=True).ravel()
    for axes, (label, lines) in zip(grid, panels.items(), strict=True):
        for (drops, excess), colour in zip(lines.items(), plotting.COLOURS, strict=False):
            never = drops.endswith("never")
            axes.plot(EVERY * np.arange(1, len(excess) + 1), excess, color="0.3" if never else colour, lw=1.6,
                      ls=":" if never else "-", label=drops)  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(1e-5, 10.0)
        common.style(axes, f"{name}, {label}", "rounds")
    for axes in (grid[0], grid[2]):
        axes.set_ylabel("P / P* - 1")
    grid[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
