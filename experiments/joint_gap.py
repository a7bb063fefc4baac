"""How fast different ways of learning Omega reach the joint optimum: ``python -m experiments.joint_gap``.

Prints, for (14) and (12) over a range of lambda, the rounds after which the certified joint gap is small, and
draws the gap against rounds for one of them. Data: an ``.npz`` of flat ``X, y, task`` with labels -1 and +1
(``--data``), or a synthetic federation.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from mocha_jax import plotting

TARGETS = (5e-3, 1e-3)
SCHEMES = ("proximal", "proximal, Omega every 10", "alternation", "alternation, eps 0.01", "alternation, eps falling")


def main() -> None:
    """Parse the command line, measure, print, draw."""
    parser = argparse.ArgumentParser(prog="experiments.joint_gap", description=__doc__)
    parser.add_argument("--data", type=Path, help=".npz with X, y, task")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds of one epoch at most (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="folder of picture and CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    key = jax.random.key(options.seed)
    data = load(options.data) if options.data else mj.datasets.federation(key).data
    models: dict[str, Callable[[float], mj.regularizers.Regularizer]] = {
        f"(14) sigma2 {s:g}": partial(mj.regularizers.Probabilistic, sigma2=s) for s in (10.0, np.inf)
    }
    models["(12) eta 0.1, k 3"] = partial(mj.regularizers.Clustered, eta=0.1, k=3)

    rows, curves = [], {}
    print(f"{'model':<18} {'lambda':>7}  {'scheme':<26} {'rounds to':>9} {'':>7}  {'joint gap':>9}")
    print(f"{'':<18} {'':>7}  {'':<26} {TARGETS[0]:>9g} {TARGETS[1]:>7g}  {f'at {options.rounds}':>9}")
    for name, regularizer in models.items():
        for lam in (1e-3, 1e-2, 1e-1, 1.0):
            problem = mj.Problem(data, mj.losses.Hinge(), regularizer(lam))
            for scheme in SCHEMES if name.startswith("(14)") else SCHEMES[:3]:
                gap = joint_gaps(key, problem, scheme, options.rounds)
                reached = [int(np.argmax(gap <= t)) + 1 if (gap <= t).any() else None for t in TARGETS]
                rows.append((name, lam, scheme, *reached, gap[-1]))
                shown = [f"{r}" if r else f"> {options.rounds}" for r in reached]
                print(f"{name:<18} {lam:>7g}  {scheme:<26} {shown[0]:>9} {shown[1]:>7}  {gap[-1]:>9.1e}", flush=True)
                if name == "(14) sigma2 inf" and lam == 1e-2:
                    curves[scheme] = gap
    with open(options.out / "joint_gap.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "lambda", "scheme", *(f"rounds to {t:g}" for t in TARGETS), "final joint gap"))
        writer.writerows(rows)
    draw(curves, data).savefig(options.out / "joint_gap.png", dpi=150)
    plotting.relationship(learned(data)).savefig(options.out / "relationship.png", dpi=150)


def load(path: Path) -> mj.TaskData:
    """Task means and an intercept, as in the paper's experiments."""
    file = np.load(path, allow_pickle=False)
    return mj.pack_tasks(file["X"], file["y"], file["task"], loss_scaling="task_mean", intercept=True)


def learned(data: mj.TaskData) -> mj.Solution:
    """The model of the second picture."""
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(1e-2))
    return mj.solve(problem, tol=1e-4, max_rounds=5000)


def joint_gaps(key: jax.Array, problem: mj.Problem, scheme: str, rounds: int) -> np.ndarray:
    """The relative joint gap after each round: this round's weights against the best dual bound so far."""
    algorithm = {
        "proximal": mj.Mocha(),
        "proximal, Omega every 10": mj.Mocha(omega_every=10),
        "alternation": mj.Mocha(server="dual", sigma_prime="per_task"),
        "alternation, eps 0.01": mj.Mocha(server="dual", sigma_prime="per_task", smoothing=1e-2),
        "alternation, eps falling": mj.Mocha(server="dual", sigma_prime="per_task", omega_every=3),
    }[scheme]
    if not scheme.endswith("falling"):
        return np.asarray(mj.run(problem, algorithm, key, num_rounds=rounds)[1].relative_joint_gap)
    # Smoothing from 10, less by a factor 0.95 every three rounds.
    state, histories = None, []
    for i in range(-(-rounds // 3)):
        step = algorithm.replace(smoothing=jnp.asarray(10.0 * 0.95**i))
        state, h = mj.run(problem, step, key, num_rounds=3, state=state or algorithm.init(problem))
        histories.append(h)
    primal = np.concatenate([h.joint_primal for h in histories])[:rounds]
    dual = np.maximum.accumulate(np.concatenate([h.joint_dual for h in histories])[:rounds])
    return (primal - dual) / primal


def draw(curves: dict[str, np.ndarray], data: mj.TaskData) -> Figure:
    """The gaps of one problem on a log scale."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for (scheme, gap), colour in zip(curves.items(), plotting.COLOURS, strict=False):
        axes.plot(np.arange(1, len(gap) + 1), np.maximum(gap, 1e-9), color=colour, lw=1.6, label=scheme)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rounds of one epoch")
    axes.set_ylabel("certified relative joint gap")
    axes.set_title(f"(14), {data.num_tasks} tasks, λ = 0.01, σ² = ∞", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
