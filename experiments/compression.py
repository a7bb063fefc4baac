"""Bytes up to a certified gap, and against errors of a network: ``python -m experiments.compression --data FILE ...``.

First the default relation that is learned, `regularizers.Probabilistic`, on task sets from files (a synthetic one
without any): the rounds, and the kilobytes that each node sends, until a relative duality gap of 1e-3 is certified, for
vectors as they are and in six forms of `mocha_jax.compression`. Then federated averaging of a network with 32 hidden
units on scikit-learn's digits, dealt to 20 clients by Dirichlet(0.5): the error of held-out samples after 60 rounds of
the same forms. Bytes are those of the vectors' codes; what else an answer has is the same in every form.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import common, robust
from experiments.rows import append, parser_of, read, say
from experiments.tasksets import TaskSet, each, synthetic
from mocha_jax import plotting

C = mj.compression
FORMS: dict[str, C.Sending | None] = {
    "as they are": None,
    "8 bits": C.Quantized(),
    "3 bits": C.Quantized(3),
    "4 bits by chance": C.Stochastic(4),
    "1 bit, rotated": C.Rotated(C.Quantized(1)),
    "largest tenth": C.TopK(0.1),
    "random quarter": C.RandomK(0.25),
}
TOL, LAM, MOST, NETWORK = 1e-3, 0.01, 3000, "digits, network"


class Row(NamedTuple):
    """One run; the CSV's columns."""

    tasks: str
    form: str
    seed: int
    rounds: int
    kilobytes: float  # that a node has sent
    reached: float  # certified gap, or error
    curve: str  # kilobytes and the same, "1.5:0.2 3.0:0.1 ..."


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = parser_of("compression", __doc__)
    parser.add_argument("--data", nargs="*", type=Path, default=[], metavar="FILE", help="e.g. vehicle.npz")
    parser.add_argument("--rounds", type=int, default=60, help="of the network")
    parser.add_argument("--seeds", type=int, default=3, help="of the network")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    say(report(rows), options.out)
    draw([row for row in rows if row.seed == 0]).savefig(options.out / "compression.png", dpi=120)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows."""
    path = options.out / "runs.csv"
    rows = [row for row in read(path, Row) if row.tasks != NETWORK or row.rounds == options.rounds]
    done = {(row.tasks, row.form, row.seed) for row in rows}
    asked = {(NETWORK, seed) for seed in range(options.seeds)}

    def add(row: Row) -> None:
        rows.append(row)
        append(path, row)
        print(
            f"{row.tasks:<16} {row.form:<17} {row.rounds:5} rounds {row.kilobytes:9.2f} kB {row.reached:.2e}",
            flush=True,
        )

    for tasks in each(options.data, synthetic(jax.random.key(0))):
        asked.add((tasks.name, 0))
        for name, form in FORMS.items():
            if (tasks.name, name, 0) not in done:
                add(certified(tasks, name, form))
        jax.clear_caches()
    for seed in range(options.seeds):
        for name, form in FORMS.items():
            if (NETWORK, name, seed) not in done:
                add(of_network(name, form, seed, options.rounds))
    return [row for row in rows if (row.tasks, row.seed) in asked]


def certified(tasks: TaskSet, name: str, form: C.Sending | None) -> Row:
    """Solve to the gap."""
    loss = mj.losses.SmoothedHinge(0.5) if isinstance(tasks.loss, mj.losses.Hinge) else tasks.loss
    problem = mj.Problem(tasks.data, loss, mj.regularizers.Probabilistic(LAM))
    algorithm = mj.federated.OverChannel(mj.Mocha(server="proximal"), mj.systems.Unreliable(), sending=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mj.NotConverged)
        solution = mj.solve(problem, algorithm, tol=TOL, max_rounds=MOST)
    each_round = 4e-3 * float(algorithm.request(problem).up)
    quality = solution.history.quality
    assert isinstance(quality, mj.Certificate)
    return row(
        tasks.name, name, 0, np.asarray(solution.history.round), each_round, np.asarray(quality.relative_joint_gap)
    )


def of_network(name: str, form: C.Sending | None, seed: int, rounds: int) -> Row:
    """Train, and judge held-out samples."""
    problem = robust.federation("Dirichlet(0.5)", seed, 0)
    algorithm = mj.FedAvg(mj.networks.MLP(64, 10, (32,)), optax.sgd(0.5), batch_size=10)
    few = algorithm if form is None else C.compressed(algorithm, form)
    _, history = mj.run(problem, few, jax.random.key(seed), num_rounds=rounds)
    return row(
        NETWORK, name, seed, np.asarray(history.round), 4e-3 * few.message(problem)[1], np.asarray(history.error)
    )


def row(tasks: str, form: str, seed: int, rounds: np.ndarray, each_round: float, values: np.ndarray) -> Row:
    """A row of the CSV, of a history."""
    curve = " ".join(f"{each_round * at:.4g}:{value:.4g}" for at, value in zip(rounds, values, strict=True))
    return Row(tasks, form, seed, int(rounds[-1]), each_round * int(rounds[-1]), float(values[-1]), curve)


def report(rows: list[Row]) -> str:
    """Tables in Markdown: rounds and kilobytes up to the gap, and the network's errors."""
    sets = [name for name in dict.fromkeys(row.tasks for row in rows) if name != NETWORK]
    found = {(row.tasks, row.form): row for row in rows if row.tasks != NETWORK}
    lines = [
        f"| vectors | {' | '.join(f'{name}: rounds | kB' for name in sets)} |",
        "|---" + "|---:|---:" * len(sets) + "|",
    ]
    for form in FORMS:
        cells = []
        for name in sets:
            one = found[name, form]
            cells += [str(one.rounds) if one.reached <= TOL else f"gap {one.reached:.1e}", f"{one.kilobytes:.1f}"]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    lines += ["", "| changes | error, % | kB of a client |", "|---|---:|---:|"]
    for form in FORMS:
        own = [row for row in rows if (row.tasks, row.form) == (NETWORK, form)]
        error = 100 * np.array([row.reached for row in own])
        lines.append(f"| {form} | {error.mean():.1f} ± {error.std():.1f} | {own[0].kilobytes:.0f} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row]) -> Figure:
    """A panel for each task set, a line for each form."""
    sets = list(dict.fromkeys(row.tasks for row in rows))
    figure = Figure(figsize=(3.6 * len(sets), 3.6), layout="constrained")
    grid = figure.subplots(1, len(sets), squeeze=False)[0]
    for axes, name in zip(grid, sets, strict=True):
        for form, colour in zip(FORMS, (*plotting.COLOURS, "0.5"), strict=False):
            one = next(row for row in rows if (row.tasks, row.form) == (name, form))
            points = np.array([point.split(":") for point in one.curve.split()], float)
            axes.plot(*points[1:].T, color=colour, lw=1.6, label=form)
        common.style(axes, name, "kB that a node has sent")
        axes.set_xscale("log")
    grid[0].set_ylabel("certified relative gap; error")
    grid[0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
