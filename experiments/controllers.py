"""Fixed local work against a controller: ``python -m experiments.controllers [--data vehicle.npz ...]``.

One update of W on phones whose clocks differ by a factor of ten, on 3G, LTE and WiFi. Every node does a fixed number of
epochs; or solves its subproblem to a fixed theta (CoCoA); or what `systems.Controller` chooses from the nodes' clocks,
networks and data. By Algorithm 1 and by the library's default, on a clock that counts the server's work.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from experiments import common

NETWORKS = {"3G": mj.costs.cellular_3g, "LTE": mj.costs.lte, "WiFi": mj.costs.wifi}
TARGET, MOST = 1e-2, 32  # of P / P* - 1, and epochs in a round at most
EPOCHS, THETAS, EPOCH_THETAS = (1, 4, 16, 32), (0.9, 0.5, 0.1), (0.2, 0.5, 0.8)
RULES = {"Algorithm 1": "per_task", "default": "adaptive"}


def main() -> None:
    """Parse the command line, train, print."""
    options = common.command_line("experiments.controllers", __doc__)
    key = jax.random.key(options.seed)
    table: list[tuple[Any, ...]] = []
    for tasks in common.task_sets(options):
        problem = common.w_step(tasks, options.lam)
        best = common.optimum(problem, 1e-5)
        clocks = 10.0 ** np.random.default_rng(options.seed).uniform(8.0, 9.0, tasks.data.num_nodes)
        for method, rule in RULES.items():
            server = common.server_seconds(problem, mj.Mocha(sigma_prime=rule))
            costs = [network(clocks).replace(server=server) for network in NETWORKS.values()]
            for setting, times in compared(key, problem, best, rule, costs, options.scale):
                table.append((tasks.name, method, setting, *times))
    print(f"\nsimulated seconds until P / P* - 1 <= {TARGET:g}")
    print(f"{'tasks':<10} {'method':<12} {'local work':<28}" + "".join(f"{name:>9}" for name in NETWORKS))
    for name, method, setting, *times in table:
        print(f"{name:<10} {method:<12} {setting:<28}" + "".join(f"{t:>9.3g}" for t in times))
    common.write(options.out / "controllers.csv", ("tasks", "method", "local work", *NETWORKS), table)


def compared(
    key: jax.Array, problem: mj.Problem, best: float, rule: str, costs: list[mj.costs.Cost], scale: float
) -> list[tuple[str, list[float]]]:
    """Every way to set the local work, and the times to the target on each network."""
    rows: list[tuple[str, list[float]]] = []

    def run(algorithms: mj.Algorithm, names: list[str], rounds: int, **systems: Any) -> common.Curves:
        return common.run_grid(
            key, problem, best, algorithms, names, costs, rounds=max(int(rounds * scale), 1), **systems
        )

    def add(found: common.Curves, chosen: list[tuple[str, list[tuple[int, int]]]]) -> None:
        """Of every setting, the times on the networks: pairs of a network's clock and a curve."""
        for name, pairs in chosen:
            curves = (common.Curve(name, found.time[i, k], found.excess[k]) for i, k in pairs)
            rows.append((name, [common.time_to(TARGET, curve) for curve in curves]))

    networks = range(len(costs))
    for epochs in EPOCHS:
        method = mj.grid(lambda gamma, e=epochs: mj.Mocha(float(e), gamma=gamma, sigma_prime=rule), gamma=[1.0])
        name = f"{epochs} epochs" if epochs > 1 else "1 epoch"
        add(run(method, [name], 600 if epochs == 1 else 200), [(name, [(i, 0) for i in networks])])
    if rule != "adaptive":
        found = run(mj.grid(lambda theta: mj.Cocoa(theta, max_epochs=MOST), theta=THETAS), [""] * len(THETAS), 200)
        add(found, [(f"CoCoA, theta {t:g}", [(i, k) for i in networks]) for k, t in enumerate(THETAS)])
    pairs = list(itertools.product(EPOCH_THETAS, networks))
    controllers = [mj.systems.Controller(costs[i], theta) for theta, i in pairs]
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *controllers)
    method = mj.grid(lambda gamma: mj.Mocha(float(MOST), gamma=gamma, sigma_prime=rule), gamma=np.ones(len(pairs)))
    found = run(method, [""] * len(pairs), 200, systems=stacked, map_systems=True)
    for theta in EPOCH_THETAS:
        own = [(i, k) for k, (t, i) in enumerate(pairs) if t == theta]
        add(found, [(f"controller, epoch_theta {theta:g}", own)])
    return rows


if __name__ == "__main__":
    main()
