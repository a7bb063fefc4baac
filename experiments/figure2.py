"""Figure 2 of the paper, systems heterogeneity: ``python -m experiments.figure2 [--data har.npz ...]``.

In every round each node has a budget drawn from [0.9, 1] (low variability) or [0.1, 1] (high) times the smallest
node's number of samples: coordinate steps of MOCHA, samples of the mini-batch methods. The central node waits one
clock cycle on an LTE network, the same for all; CoCoA, whose theta is fixed, is not disturbed but takes as long as it
takes. Rivals are tuned under the conditions of each panel.
"""

from __future__ import annotations

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common
from mocha_jax import plotting

TARGET = 1e-2
VARIABILITY = {"low": 0.9, "high": 0.1}
METHODS = ("MOCHA", "CoCoA", "Mb-SDCA", "Mb-SGD")


def main() -> None:
    """Parse the command line, train, print, draw."""
    options = common.command_line("experiments.figure2", __doc__)
    key = jax.random.key(options.seed)
    table, curves = [], []
    for tasks in common.task_sets(options):
        print(f"{tasks.name}: {tasks.data.num_tasks} tasks, lambda {options.lam:g}", flush=True)
        problem = common.w_step(tasks, options.lam)
        best = common.optimum(problem, 1e-5)
        panels = {}
        for label, low in VARIABILITY.items():
            settings = train(key, problem, best, low, options.scale)
            chosen = {m: common.tuned(settings[m], 0, TARGET) for m in METHODS}
            panels[label] = {m: (s[1][0], s[2]) for m, s in chosen.items()}
            seconds = [common.time_to(TARGET, s[1][0], s[2]) for s in chosen.values()]
            table.append((tasks.name, label, *seconds, *(s[0] for s in chosen.values())))
            curves += [
                (tasks.name, label, m, s[0], float(t), float(e))
                for m, s in chosen.items() for t, e in zip(s[1][0], s[2], strict=True)
            ]  # fmt: skip
        name = "figure2.png" if tasks.name in ("har", "synthetic") else f"figure2_{tasks.name}.png"
        draw(panels, tasks.name).savefig(options.out / name, dpi=150)
        print(f"  {options.out / name}")
    print(f"\nsimulated seconds on LTE until P <= {1 + TARGET:g} P*")
    print(f"{'tasks':<10} {'variability':<12} " + " ".join(f"{m:>9}" for m in METHODS) + "  tuned settings")
    for name, label, *rest in table:
        print(f"{name:<10} {label:<12} " + " ".join(f"{t:>9.3g}" for t in rest[:4]) + f"  {', '.join(rest[4:])}")
    header = ("tasks", "variability", "method", "setting", "time", "excess")
    common.write(options.out / "figure2.csv", header, common.thin(curves))


def train(key: jax.Array, problem: mj.Problem, best: float, low: float, scale: float) -> dict[str, list]:
    """Every method under one kind of variability."""
    data, lte = problem.data, mj.costs.lte()
    smallest, d = int(data.sizes.min()), data.num_features
    budgets = mj.systems.UniformBudget(low, 1.0)

    def run(algorithms, names, rounds, every, flops, systems=budgets):
        # One cycle: a full budget's arithmetic and the messages.
        cycle = 0.0 if systems is None else float(lte.seconds(flops * d * smallest, d, d))
        cost = lte.replace(cycle=cycle)
        rounds = max(int(rounds * scale) // every * every, every)
        return common.run_grid(
            key, problem, best, algorithms, names, [cost], rounds=rounds, record_every=every, systems=systems
        )

    mocha = mj.grid(mj.Mocha, gamma=[1.0])
    thetas = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03]
    cocoa = mj.grid(lambda theta: mj.Cocoa(theta, max_epochs=30), theta=thetas)
    total = smallest * data.num_tasks
    betas = total * 2.0 ** -np.arange(1, 9)
    sdca = mj.grid(lambda beta: mj.MiniBatchSdca(smallest, beta), beta=betas)
    steps, powers = np.geomspace(1e-3, 10.0, 9), (0.0, 0.5)
    sgd = mj.grid(lambda power, step_size: mj.MiniBatchSgd(smallest, step_size, power, horizon=100.0),
                  power=powers, step_size=steps)  # fmt: skip
    parts = (
        run(mocha, ["one epoch"], 600, 1, 6.0),
        run(cocoa, [f"theta={t}" for t in thetas], 200, 1, 6.0, systems=None),
        run(sdca, [f"beta={b:.0f}" for b in betas], 2000, 10, 4.0),
        run(sgd, [f"step={s:.2g} power={p}" for p in powers for s in steps], 2000, 10, 4.0),
    )
    return {m: common.joined([c]) for m, c in zip(METHODS, parts, strict=True)}


def draw(panels: dict[str, dict], name: str) -> Figure:
    """A panel for low and one for high variability."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    for axes, (label, methods) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for (method, (t, e)), colour in zip(methods.items(), plotting.COLOURS, strict=False):
            axes.plot(t, e, color=colour, lw=1.6, label=method)
        axes.axhline(TARGET, color="0.6", lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.set_ylim(1e-4, 10.0)
        common.style(axes, f"{name}, {label} variability", "simulated seconds (LTE)")
    figure.axes[0].set_ylabel("P / P* - 1")
    figure.axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
