"""Table 2 of the VIRTUAL paper: ``python -m experiments.virtual_table2 --data mnist.npz har.npz``.

Four federations: MNIST dealt at random to 10 clients, the same with the pixels of every client in an order of its own
(P-MNIST), the digits of 10 writers (in place of FEMNIST), and HAR's 30 subjects with 6 activities; with the folder of
the vehicle sensors' raw files also these (VSN: 23 sensors, two kinds of vehicle). Every client's samples are split at
random, 25 % for testing; mean over clients of the accuracy, mean and standard deviation over splits.

Methods: one network for all data in one place (Global), one for each client (Local), FedAvg (C = 0.2, E = 1, as many
epochs in all), VIRTUAL (3 refinements of every client, in order), and MOCHA one class against the rest with (14).
MOCHA's lambda, FedAvg's rate and VIRTUAL's temperature are chosen on a fifth of the training samples. Networks have
two hidden layers of 100 and dropout 0.3; Adam at 1e-3, of FedAvg's clients SGD; batches are the paper's, VSN's 64. The
paper has 100 or 200 epochs a refinement and 20 draws: here flags say how much to do. A CSV keeps every result; a run
that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import images
from experiments.rows import append, read
from mocha_jax import plotting

METHODS = ("Global", "Local", "FedAvg", "VIRTUAL", "MOCHA")
PAPER = {
    "MNIST": ("0.968", "0.951", "0.968", "0.967", ""),
    "P-MNIST": ("0.919", "0.950", "0.905", "0.949", ""),
    "HAR": ("0.797", "0.940", "0.944", "0.944", ""),
    "VSN": ("0.926", "0.960", "0.916", "0.960", ""),
}
REFINEMENTS = 3
LAMBDAS, RATES, TEMPERATURES = (1e-2, 1e-3, 1e-4), (0.03, 0.1, 0.3, 1.0), (1.0, 0.1, 0.01)
BATCH = {"MNIST": 256, "P-MNIST": 256, "writers": 64, "HAR": 16, "VSN": 64, "synthetic": 50}


class Row(NamedTuple):
    """One method on one split; the CSV's columns."""

    tasks: str
    settings: str
    split: int
    method: str
    accuracy: float
    seconds: float


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.virtual_table2", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--data",
        type=Path,
        nargs="*",
        default=[],
        help="mnist.npz, har.npz, the vehicles' folder; default a synthetic set",
    )
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=("MNIST", "P-MNIST", "writers", "HAR", "VSN", "synthetic"),
        help="of MNIST P-MNIST writers HAR VSN; default all there are files for",
    )
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6000, help="digits of each MNIST client (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="of a refinement (default %(default)s)")
    parser.add_argument(
        "--batch", type=int, help="samples (default: the paper's, 256 for MNIST, 64 writers, 16 HAR; 64 VSN)"
    )
    parser.add_argument("--draws", type=int, default=1, help="Monte-Carlo samples in training (default %(default)s)")
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=list(TEMPERATURES),
        help="of VIRTUAL's divergences, to choose from (default 1, the paper's, 0.1 and 0.01)",
    )
    parser.add_argument("--hidden", type=int, default=100, help="width of both hidden layers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/table2"), help="folder of CSV, table and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    if not rows:
        parser.error("there are no files for any of the tasks")
    print("\n" + table(rows, options))
    (options.out / "table.md").write_text(table(rows, options))
    draw(rows, options)


def federations(options: argparse.Namespace) -> Iterable[tuple[str, Callable[[], mj.TaskData], int]]:
    """Name, data and number of classes of each."""
    key = jax.random.key(options.seed)
    for path in options.data:
        if not path.exists():
            print(f"{path} is not here: skipped", file=sys.stderr)
    paths = [path for path in options.data if path.exists()]
    deal = partial(images.deal, key, clients=10, samples=options.samples, iid=True)
    if not options.data:
        blobs = images.blobs(key)[0]
        yield "synthetic", partial(images.deal, key, blobs, 6, min(options.samples, 500), iid=True), 10
    for path in paths:
        if path.is_dir():
            yield "VSN", partial(vehicles, path), 2
        elif "subject" in np.load(path, allow_pickle=False).files:
            yield "HAR", partial(activities, path), 6
        else:
            digits = images.mnist(path)[0]
            yield "MNIST", partial(deal, digits), 10
            yield "P-MNIST", partial(deal, digits, permute=True), 10
            yield "writers", partial(images.writers, key, digits, 10), 10


def activities(path: Path) -> mj.TaskData:
    """HAR with its six activities as classes 0 to 5."""
    file = np.load(path, allow_pickle=False)
    return mj.pack_tasks(file["X"].astype(np.float32), file["y"].astype(int) - 1, file["subject"])


def vehicles(path: Path) -> mj.TaskData:
    """The vehicle sensors with classes 0 and 1."""
    sensors = mj.datasets.vehicle(path)
    return mj.pack_tasks([x.astype(np.float32) for x in sensors.xs], [(y > 0).astype(int) for y in sensors.ys])


def study(options: argparse.Namespace) -> list[Row]:
    """All federations, splits and methods, but for those that the CSV has already."""
    path = options.out / "splits.csv"
    given = ("samples", "epochs", "batch", "draws", "temperatures", "hidden", "seed")
    settings = " ".join(f"{name}={getattr(options, name)}" for name in given)
    rows = [row for row in read(path, Row) if row.settings == settings]
    for name, load, classes in federations(options):
        if options.tasks and name not in options.tasks:
            continue
        data, done = load(), {(row.split, row.method) for row in rows if row.tasks == name}
        print(f"{name}: {data.num_nodes} clients, {np.asarray(data.sizes).mean():.0f} samples each", flush=True)
        for split in range(options.splits):
            key = jax.random.fold_in(jax.random.key(options.seed), split)
            train, test = data.split(jax.random.fold_in(key, 0), 0.75)
            for method in options.methods:
                if (split, method) in done:
                    continue
                began = time.perf_counter()
                accuracy = trained(method, key, train, test, classes, options.batch or BATCH[name], options)
                row = Row(name, settings, split, method, accuracy, time.perf_counter() - began)
                print(f"  split {split} {method:>8} {100 * accuracy:6.2f} % {row.seconds:6.1f} s", flush=True)
                append(path, row)
                rows.append(row)
    return rows


def trained(
    method: str, key: jax.Array, train: mj.TaskData, test: mj.TaskData, classes: int, size: int,
    options: argparse.Namespace,
) -> float:  # fmt: skip
    """The accuracy of one method, mean over clients."""
    if method == "MOCHA":
        error = partial(_mocha, key, classes)
        return 1.0 - error(_chosen(key, error, LAMBDAS, train), train, test)
    epochs, hidden = REFINEMENTS * options.epochs, (options.hidden,) * 2
    mlp = mj.networks.MLP(train.num_features, classes, hidden, dropout=0.3)
    problem = mj.Prediction(train, test=test)
    batch = dict(batch_size=size, seed=options.seed)
    if method == "FedAvg":

        def fedavg(rate: float, train: mj.TaskData, test: mj.TaskData) -> float:
            algorithm = mj.FedAvg(mlp, _SGD, fraction=0.2, rate=rate, **batch)
            return _error(key, algorithm, mj.Prediction(train, test=test), 5 * epochs)

        return 1.0 - fedavg(_chosen(key, fedavg, RATES, train), train, test)
    if method == "VIRTUAL":
        model = mj.networks.Lateral(train.num_features, classes, hidden, dropout=0.3)

        def virtual(temperature: float, train: mj.TaskData, test: mj.TaskData) -> float:
            algorithm = mj.Virtual(model, _ADAM, temperature=temperature, first_scale=0.02, samples=options.draws,
                                   noise="local", draws=20, local_epochs=options.epochs, **batch)  # fmt: skip
            return _error(key, algorithm, mj.Prediction(train, test=test), REFINEMENTS * train.num_nodes)

        return 1.0 - virtual(_chosen(key, virtual, tuple(options.temperatures), train), train, test)
    problem = problem.merged() if method == "Global" else problem
    return 1.0 - _error(key, mj.Local(mlp, _ADAM, **batch), problem, epochs)


_ADAM, _SGD = optax.adam(1e-3), optax.sgd(1.0)


def _error(key: jax.Array, algorithm: mj.Algorithm, problem: mj.Prediction, rounds: int) -> float:
    """After so many rounds, mean over clients."""
    _, history = mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds)
    return float(history.error[-1])


def _chosen(key: jax.Array, error: Callable[..., float], values: tuple[float, ...], train: mj.TaskData) -> float:
    """The value with the least error on a fifth of the training samples."""
    if len(values) == 1:
        return values[0]
    fit, held = train.split(jax.random.fold_in(key, 1), 0.8)
    best = min(values, key=lambda value: np.nan_to_num(error(value, fit, held), nan=np.inf))
    print(f"    {best:g} of {', '.join(f'{value:g}' for value in values)}", flush=True)
    return best


def _mocha(key: jax.Array, classes: int, lam: float, train: mj.TaskData, test: mj.TaskData) -> float:
    """The error of (14), one class against the rest."""

    def make(data: mj.TaskData) -> mj.Problem:
        return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.5 * lam))

    found = mj.one_vs_rest(with_intercept(train), make, classes=classes, key=key, tol=1e-2, max_rounds=200)
    return float(found.error_rate(with_intercept(test)))


def with_intercept(data: mj.TaskData) -> mj.TaskData:
    """Task means, and a constant feature."""
    one = (data.weight > 0).astype(data.x.dtype)[..., None]
    return data.replace(x=jnp.concatenate([data.x, one], axis=2), loss_scaling="task_mean")


def summary(rows: list[Row], tasks: str, method: str) -> tuple[float, float, int]:
    """Mean and standard deviation over splits, and how many there are."""
    values = [row.accuracy for row in rows if (row.tasks, row.method) == (tasks, method)]
    if not values:
        return float("nan"), float("nan"), 0
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan"), len(values)


def table(rows: list[Row], options: argparse.Namespace) -> str:
    """Ours beside the paper's."""
    names = list(dict.fromkeys(row.tasks for row in rows))
    lines = ["| method | " + " | ".join(f"{n} | paper" for n in names) + " |", "|---" * (1 + 2 * len(names)) + "|"]
    for i, method in enumerate(METHODS):
        cells = []
        for name in names:
            mean, spread, count = summary(rows, name, method)
            ours = f"{mean:.3f}" + (f" ± {spread:.3f}" if count > 1 else "") if count else ""
            cells += [ours, PAPER.get(name, ("",) * 5)[i]]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], options: argparse.Namespace) -> None:
    """Bars with the splits' spread."""
    names = list(dict.fromkeys(row.tasks for row in rows))
    figure = Figure(figsize=(1.6 + 2.0 * len(names), 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(METHODS)
    for i, (method, colour) in enumerate(zip(METHODS, plotting.COLOURS, strict=False)):
        stats = [summary(rows, name, method) for name in names]
        at = np.arange(len(names)) + (i - 2) * width
        axes.bar(at, [100 * s[0] for s in stats], width, yerr=[100 * s[1] for s in stats], color=colour, label=method)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("test accuracy, %")
    lowest = min((100 * row.accuracy for row in rows), default=0.0)
    axes.set_ylim(max(lowest - 5.0, 0.0), 100)
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(options.out / "table2.png", dpi=150)
    print(options.out / "table2.png")


if __name__ == "__main__":
    main()
