"""Answers that are lost, late or doubled, and a server that waits for nobody: ``python -m experiments.channels``.

First the objective of the server's model against the answers that nodes have sent, for given and for learned Omega:
over a channel that loses nothing, over one that loses 30 % of the answers, and over one that also brings 30 % of them
up to five rounds late and 5 % twice. Then seconds of the simulated clock until the objective is within 1 % and 0.1 % of
the optimum, where nodes or their networks differ by a factor of ten: for rounds that wait for everyone, rounds with a
deadline, at which nodes send what they have, and asynchronous ones, in which a server acts once a cycle on what has
arrived, whatever the age of the model that is answered, or if that is at most two cycles. Deadlines and cycles are the
best of a few.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common
from mocha_jax import plotting

CHANNELS = {
    "nothing is lost": mj.systems.Unreliable(),
    "30 % lost": mj.systems.Unreliable(lost=0.3),
    "30 % lost, 30 % late, 5 % twice": mj.systems.Unreliable(lost=0.3, late=0.3, duplicated=0.05, most=5),
}
ALGORITHMS = {"Algorithm 1": mj.Mocha(server="dual", sigma_prime="per_task"), "default": mj.Mocha()}
TARGETS = (1e-2, 1e-3)
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # deadlines and cycles, of the slowest node's time
EVERY, ROUNDS = 1, 400


class Timed(NamedTuple):
    """The seconds that one way of waiting took to reach each target, and at which deadline or cycle."""

    way: str
    seconds: tuple[float, ...]
    at: tuple[float, ...]


def main() -> None:
    """Parse the command line, train, print, draw."""
    options = common.command_line("experiments.channels", __doc__)
    key, table, rows = jax.random.key(options.seed), [], []
    rounds = max(int(ROUNDS * options.scale) // EVERY, 1) * EVERY
    for tasks in common.task_sets(options):
        learned = mj.Problem(tasks.data, tasks.loss, mj.regularizers.Probabilistic(options.lam, 10.0))
        problems = {"given": common.w_step(tasks, options.lam), "learned": learned}
        best = {name: common.optimum(problem, 1e-5) for name, problem in problems.items()}
        panels = {}
        for name, problem in problems.items():
            for method, algorithm in ALGORITHMS.items():
                if name == "learned" and method != "default":
                    continue  # alternation has another end than the joint optimum
                panels[f"{name}, {method}"] = lines = over_channels(key, problem, algorithm, best[name], rounds // 2)
                for channel, (sent, excess) in lines.items():
                    rows += [
                        (tasks.name, name, method, channel, int(s), float(e)) for s, e in zip(sent, excess, strict=True)
                    ]
                for clock, cost in clocks(tasks.data.num_nodes).items():
                    for timed in waiting(key, problem, algorithm, cost, best[name], rounds):
                        table.append((tasks.name, name, method, clock, timed))
        common.save(draw(panels), options, tasks, "channels")
        report(table)
        table.clear()
        jax.clear_caches()  # a process has room for so many programs
    common.write(
        options.out / "channels.csv", ("tasks", "omega", "method", "channel", "answers", "excess"), common.thin(rows)
    )


def report(table: list[tuple]) -> None:
    """Print the seconds of one task set."""
    print(f"simulated seconds until P / P* - 1 <= {', '.join(f'{t:g}' for t in TARGETS)}, at the best of its cycles")
    for name, omega, method, clock, timed in table:
        found = " ".join(f"{s:>10.4g} ({a:.3g})" for s, a in zip(timed.seconds, timed.at, strict=True))
        print(f"{name:<10} {omega:<8} {method:<12} {clock:<14} {timed.way:<13} {found}", flush=True)


def excess_of(history: mj.History, best: float) -> np.ndarray:
    return np.asarray(history.joint_primal, np.float64) / best - 1.0


def over_channels(
    key: jax.Array, problem: mj.Problem, algorithm: mj.SubproblemMethod, best: float, rounds: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The answers sent up to every record, and P / P* - 1 of the server's model."""
    found = {}
    for name, channel in CHANNELS.items():
        over = mj.federated.OverChannel(algorithm, channel)
        history = mj.run(problem, over, key, num_rounds=rounds, record_every=EVERY)[1]
        found[name] = problem.data.num_nodes * np.asarray(history.round), excess_of(history, best)
    return found


def clocks(nodes: int) -> dict[str, mj.costs.Cost]:
    """Clocks on which the slowest of these nodes takes about ten times as long as the quickest."""
    slow = np.random.default_rng(0).permutation(np.geomspace(1.0, 10.0, nodes))
    compute, lte = mj.costs.relative(10.0), mj.costs.lte()
    return {
        "slow nodes": compute.replace(flops_per_second=1.0 / slow),
        "slow networks": lte.replace(latency=0.07 * slow, download=lte.download / slow, upload=lte.upload / slow),
    }


def waiting(
    key: jax.Array, problem: mj.Problem, algorithm: mj.SubproblemMethod, cost: mj.costs.Cost, best: float, rounds: int
) -> Iterator[Timed]:
    """Every way of waiting, at the best of its deadlines or cycles for every target."""
    request = algorithm.request(problem)
    work = np.asarray(request.steps) * np.asarray(request.step_flops) + np.asarray(request.fixed_flops)
    slowest = float(np.max(cost.seconds(work, request.down, request.up)))
    yield best_of("everyone", {slowest: timed(key, problem, algorithm, best, rounds, slowest)})
    deadlines, cycles, bounded = {}, {}, {}
    for share in SHARES:
        cycle = share * slowest
        deadline = mj.systems.Deadline(cycle, cost)
        deadlines[cycle] = timed(key, problem, algorithm, best, rounds, cycle, deadline)
        clock = mj.systems.Clock(cycle, cost, most=7)
        over = mj.federated.OverChannel(algorithm, clock)
        cycles[cycle] = timed(key, problem, over, best, rounds, cycle)
        bounded[cycle] = timed(key, problem, over.replace(max_staleness=2), best, rounds, cycle)
    yield best_of("deadline", deadlines)
    yield best_of("asynchronous", cycles)
    yield best_of("by two cycles", bounded)


def timed(
    key: jax.Array, problem: mj.Problem, algorithm: mj.Algorithm, best: float, rounds: int, cycle: float,
    systems: mj.systems.System | None = None,
) -> tuple[float, ...]:  # fmt: skip
    """Seconds to every target, where a round takes a cycle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=EVERY, systems=systems)[1]
    curve = common.Curve("", cycle * np.asarray(history.round, np.float64), excess_of(history, best))
    return tuple(common.time_to(target, curve) for target in TARGETS)


def best_of(way: str, found: dict[float, tuple[float, ...]]) -> Timed:
    """The least seconds to every target, and the cycles that led to them."""
    of_each = [min((seconds[i], cycle) for cycle, seconds in found.items()) for i in range(len(TARGETS))]
    return Timed(way, *(tuple(column) for column in zip(*of_each, strict=True)))


def draw(panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> Figure:
    """A panel for each problem and server."""
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for (name, (sent, excess)), colour in zip(lines.items(), plotting.COLOURS, strict=False):
            axes.plot(sent, np.maximum(excess, 1e-7), color=colour, lw=1.6, label=name)
        axes.set_ylim(1e-6, 10.0)
        common.style(axes, title, "answers sent")
    grid[0].set_ylabel("P / P* - 1")
    grid[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
