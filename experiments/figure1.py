"""Figure 1 of the paper, statistical heterogeneity: ``python -m experiments.figure1 [--data har.npz ...]``.

Algorithm 1 (MOCHA), CoCoA, mini-batch SDCA, mini-batch SGD and the library's default on the update of W, on networks
from WiFi to 3G. Every method is tuned on its grid, for every network anew: the setting that comes within the target
first, in simulated time, equation (30), to which the server's work is added as this machine does it. Draws the curves
of the tuned settings, saves them as CSV, prints the times and their ratios.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common

TARGETS = (1e-1, 1e-2)  # the curves drawn are those tuned for the last


def main() -> None:
    """Parse the command line, train, print, draw."""
    options = common.command_line("experiments.figure1", __doc__)
    key = jax.random.key(options.seed)
    table: list[tuple[Any, ...]] = []
    curves: list[tuple[Any, ...]] = []
    for tasks in common.task_sets(options):
        problem = common.w_step(tasks, options.lam)
        best = common.optimum(problem, 1e-5)
        settings = grids(key, problem, best, options.scale)
        panels = {}
        for i, (server, network) in enumerate(itertools.product(common.SERVERS, common.NETWORKS)):
            for target in TARGETS:
                chosen = common.tuned(settings, i, target)
                seconds = [common.time_to(target, c) for c in chosen.values()]
                ends = [float(c.time[-1]) for c in chosen.values()]
                table.append(
                    (tasks.name, network, server, target, *seconds, *ends, *(c.setting for c in chosen.values()))
                )
            if server == "counted":
                panels[network] = chosen
                curves += common.points(chosen, tasks.name, network)
        common.save(draw(panels, tasks.name), options, tasks, "figure1")
    show(table)
    common.write(
        options.out / "figure1.csv", ("tasks", "network", "method", "setting", "time", "excess"), common.thin(curves)
    )
    names = [f"{m}: {what}" for what in ("time to target", "time trained", "setting") for m in common.METHODS]
    header = ("tasks", "network", "server", "target", *names)
    common.write(options.out / "figure1_times.csv", header, table)


def grids(key: jax.Array, problem: mj.Problem, best: float, scale: float) -> dict[str, list[common.Curve]]:
    """Every method on its grid."""
    own, default = (common.server_seconds(problem, a) for a in (mj.Mocha(sigma_prime="per_task"), mj.Mocha()))
    print(f"  server's work of a round: {1e3 * own:.3g} ms, of the default {1e3 * default:.3g} ms", flush=True)
    costs, bold_costs = (common.served(common.NETWORKS.values(), seconds) for seconds in (own, default))
    smallest = int(problem.data.sizes.min())

    def rounds(n: int, every: int = 1) -> tuple[int, int]:
        return max(int(n * scale) // every * every, every), every

    def run(
        algorithms: mj.Algorithm,
        names: list[str],
        rounds: tuple[int, int],
        costs: list[mj.costs.Cost] = costs,
        **kwargs: Any,
    ) -> common.Curves:
        return common.run_grid(
            key, problem, best, algorithms, names, costs, rounds=rounds[0], record_every=rounds[1], **kwargs
        )

    # H steps on every node, whatever its data, the clock cycle on nodes that are all alike; or whole epochs.
    mocha, recombined = [], []
    alike = mj.costs.Cost(6.0 * problem.data.num_features, latency=0.0, download=1e30, upload=1e30)
    for epochs, shares in ((1, (0.1, 0.3, 1.0)), (4, (2.0, 4.0)), (16, (8.0, 16.0)), (32, (32.0,))):
        h = np.maximum(np.round(np.array(shares) * smallest), 1.0)
        cycles = mj.grid(lambda seconds: mj.systems.Deadline(seconds, alike), seconds=np.append(h + 0.5, 1e9))
        algorithms = mj.grid(
            lambda gamma, e=epochs: mj.Mocha(float(e), gamma=gamma, sigma_prime="per_task"), gamma=np.ones(len(h) + 1)
        )
        names = [*(f"H={int(v)}" for v in h), f"{epochs} epochs"]
        long = rounds(600 if epochs == 1 else 200)
        mocha.append(run(algorithms, names, long, systems=cycles, map_systems=True))
        # The predictions of all rows, for the slopes, are not among the H steps.
        bolder = mj.grid(lambda gamma, e=epochs: mj.Mocha(float(e), gamma=gamma), gamma=np.ones(len(h) + 1))
        fixed = np.append(float(np.max(bolder.fixed_flops(problem))) / (6.0 * problem.data.num_features) + h + 0.5, 1e9)
        cycles = mj.grid(lambda seconds: mj.systems.Deadline(seconds, alike), seconds=fixed)
        recombined.append(run(bolder, names, long, costs=bold_costs, systems=cycles, map_systems=True))

    thetas = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03]
    cocoa = [run(mj.grid(lambda theta: mj.Cocoa(theta, max_epochs=30), theta=thetas), [f"theta={t}" for t in thetas],
                 rounds(200))]  # fmt: skip

    sdca, sgd = [], []
    for batch in sorted({max(smallest // 16, 1), max(smallest // 4, 1), smallest}):
        many = int(2000 * (smallest / batch) ** 0.5)  # small batches are cheap
        total = float(np.minimum(batch, np.asarray(problem.data.sizes)).sum())
        betas = np.unique(np.maximum(total * 2.0 ** -np.arange(1, 9), 1.0))
        sdca.append(run(mj.grid(lambda beta, b=batch: mj.MiniBatchSdca(b, beta), beta=betas),
                        [f"b={batch} beta={v:.0f}" for v in betas], rounds(many, 10)))  # fmt: skip
        steps, powers = np.geomspace(1e-3, 10.0, 9), (0.0, 0.5)
        sgds = mj.grid(lambda power, step_size, b=batch: mj.MiniBatchSgd(b, step_size, power, horizon=100.0),
                       power=powers, step_size=steps)  # fmt: skip
        names = [f"b={batch} step={s:.2g} power={p}" for p in powers for s in steps]
        sgd.append(run(sgds, names, rounds(many, 10)))
    found = mocha, cocoa, sdca, sgd, recombined
    return {m: common.joined(c) for m, c in zip(common.METHODS, found, strict=True)}


def show(table: list[tuple]) -> None:
    """Times to the targets in units of Algorithm 1's; where the target was not reached, more than that."""
    print("\nsimulated time until P / P* - 1 <= target: Algorithm 1's, and how many times longer the others take")
    heads = " ".join(f"{m:>8}" for m in common.METHODS[1:])
    print(f"{'tasks':<10} {'network':<14} {'server':<8} {'target':>6} {'Alg. 1':>10} {heads}  settings")
    count = len(common.METHODS)
    for name, network, server, target, *rest in table:
        seconds, ends, settings = rest[:count], rest[count : 2 * count], rest[2 * count :]
        ratios = [
            f"{t / seconds[0]:>8.2f}" if np.isfinite(t) else f"{f'> {end / seconds[0]:.1f}':>8}"
            for t, end in zip(seconds[1:], ends[1:], strict=True)
        ]
        print(
            f"{name:<10} {network:<14} {server:<8} {target:>6g} {seconds[0]:>10.4g} {' '.join(ratios)}  "
            f"{', '.join(settings)}"
        )


def draw(panels: dict[str, dict[str, common.Curve]], name: str) -> Figure:
    """A panel per network."""
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    for axes, (network, chosen) in zip(figure.subplots(2, 3, sharey=True).ravel(), panels.items(), strict=True):
        common.panel(axes, f"{name}, {network}", network, chosen, TARGETS[-1])
        ends = [common.time_to(TARGETS[-1], c) for c in chosen.values()]
        slowest = max([t for t in ends if np.isfinite(t)], default=1.0)
        axes.set_xlim(min(c.time[0] for c in chosen.values()) * 0.9, slowest * 3.0)
    figure.axes[0].set_ylabel("P / P* - 1")
    figure.axes[3].set_ylabel("P / P* - 1")
    figure.axes[3].legend(frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    main()
