"""Figure 2 of the paper, systems heterogeneity: ``python -m experiments.figure2 [--data har.npz ...]``.

In every round each node has a budget drawn from [0.9, 1] (low variability) or [0.1, 1] (high) times the smallest
node's number of samples: coordinate steps of Algorithm 1 (MOCHA) and of the library's default, samples of the
mini-batch methods. The central node waits one clock cycle, as long as a full budget takes, and then does its own work;
CoCoA, whose theta is fixed, is not disturbed but takes as long as it takes. The network is LTE, as phones have it and
as the authors' code prices it (100 operations a number). Rivals are tuned under the conditions of each panel.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common

TARGET = 1e-2
VARIABILITY = {"low": 0.9, "high": 0.1}
NETWORKS = {"LTE": mj.costs.lte(), "relative 100": mj.costs.relative(100.0)}


def main() -> None:
    """Parse the command line, train, print, draw."""
    options = common.command_line("experiments.figure2", __doc__)
    key = jax.random.key(options.seed)
    table: list[tuple[Any, ...]] = []
    curves: list[tuple[Any, ...]] = []
    for tasks in common.task_sets(options):
        problem = common.w_step(tasks, options.lam)
        best = common.optimum(problem, 1e-5)
        undisturbed, panels = cocoa(key, problem, best, options.scale), {}
        for label, low in VARIABILITY.items():
            settings = train(key, problem, best, low, options.scale) | {"CoCoA": undisturbed}
            for i, (server, network) in enumerate(itertools.product(common.SERVERS, NETWORKS)):
                chosen = common.tuned(settings, i, TARGET)
                seconds = [common.time_to(TARGET, c) for c in chosen.values()]
                table.append((tasks.name, network, server, label, *seconds, *(c.setting for c in chosen.values())))
                if server == "counted":
                    panels[network, label] = chosen
                    curves += common.points(chosen, tasks.name, network, label)
        common.save(draw(panels, tasks.name), options, tasks, "figure2")
    print(f"\nsimulated time until P / P* - 1 <= {TARGET:g}")
    print(
        f"{'tasks':<10} {'network':<13} {'server':<8} {'variability':<12} "
        + " ".join(f"{m:>11}" for m in common.METHODS)
        + "  settings"
    )
    for name, network, server, label, *rest in table:
        count = len(common.METHODS)
        times = " ".join(f"{t:>11.3g}" for t in rest[:count])
        print(f"{name:<10} {network:<13} {server:<8} {label:<12} {times}  {', '.join(rest[count:])}")
    header = ("tasks", "network", "variability", "method", "setting", "time", "excess")
    common.write(options.out / "figure2.csv", header, common.thin(curves))


def cocoa(key: jax.Array, problem: mj.Problem, best: float, scale: float) -> list[common.Curve]:
    """CoCoA on its grid, without disturbance."""
    thetas = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03]
    grid = mj.grid(lambda theta: mj.Cocoa(theta, max_epochs=30), theta=thetas)
    rounds, names = max(int(200 * scale), 1), [f"theta={t}" for t in thetas]
    costs = common.served(NETWORKS.values(), common.server_seconds(problem, mj.Mocha(sigma_prime="per_task")))
    return common.joined([common.run_grid(key, problem, best, grid, names, costs, rounds=rounds)])


def train(key: jax.Array, problem: mj.Problem, best: float, low: float, scale: float) -> dict[str, list[common.Curve]]:
    """The methods that a budget can cut short, under one kind of variability."""
    smallest = int(problem.data.sizes.min())
    budgets = mj.systems.UniformBudget(low, 1.0)
    own, default = (common.server_seconds(problem, a) for a in (mj.Mocha(sigma_prime="per_task"), mj.Mocha()))

    def run(algorithms: mj.Algorithm, names: list[str], rounds: int, server: float = own) -> list[common.Curve]:
        # One cycle: a full budget's arithmetic, what a round asks of a node besides, and the messages.
        asked = jax.vmap(lambda a: a.request(problem))(algorithms)
        flops = float(np.max(asked.step_flops * smallest + np.max(np.asarray(asked.fixed_flops))))
        numbers = float(asked.down[0]), float(asked.up[0])
        clocks = common.served((c.replace(cycle=float(c.seconds(flops, *numbers))) for c in NETWORKS.values()), server)
        rounds = max(int(rounds * scale) // 10, 1) * 10
        return common.joined([common.run_grid(key, problem, best, algorithms, names, clocks, systems=budgets,
                                              rounds=rounds, record_every=10)])  # fmt: skip

    betas = smallest * problem.data.num_tasks * 2.0 ** -np.arange(1, 9)
    steps, powers = np.geomspace(1e-3, 10.0, 9), (0.0, 0.5)
    sgd = mj.grid(lambda power, step_size: mj.MiniBatchSgd(smallest, step_size, power, horizon=100.0),
                  power=powers, step_size=steps)  # fmt: skip
    safe, bold = (mj.grid(partial(mj.Mocha, sigma_prime=rule), gamma=[1.0]) for rule in ("per_task", "adaptive"))
    return {
        "Algorithm 1": run(safe, ["one epoch"], 4000),
        "Mb-SDCA": run(mj.grid(lambda beta: mj.MiniBatchSdca(smallest, beta), beta=betas),
                       [f"beta={b:.0f}" for b in betas], 2000),
        "Mb-SGD": run(sgd, [f"step={s:.2g} power={p}" for p in powers for s in steps], 2000),
        "default": run(bold, ["one epoch"], 4000, default),
    }  # fmt: skip


def draw(panels: dict[tuple[str, str], dict[str, common.Curve]], name: str) -> Figure:
    """Networks from top to bottom, low variability on the left, high on the right."""
    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    grid = figure.subplots(2, 2, sharey=True).ravel()
    for axes, (network, label) in zip(grid, itertools.product(NETWORKS, VARIABILITY), strict=True):
        common.panel(axes, f"{name}, {network}, {label} variability", network, panels[network, label], TARGET)
    grid[0].set_ylabel("P / P* - 1")
    grid[2].set_ylabel("P / P* - 1")
    grid[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
