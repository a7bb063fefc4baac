"""Rounds to a target accuracy, the tables of the slides: ``python -m experiments.fedavg_rounds --data mnist.npz``.

FedSGD and FedAvg on 100 clients of 600 digits, IID or with two shards of the sorted digits each (mostly two classes),
for the 2NN of 199,210 parameters or the CNN of 1,663,370. A setting is E epochs, batches of B and a fraction C of the
clients; u = E n / (K B) is how often a client moves in a round. Every setting is run for every rate of the grid, and
the best counts, as in the paper. The round is where the running best of the test accuracy, interpolated, crosses the
target. A CSV keeps every run; one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import images
from experiments.rows import append, read
from mocha_jax import plotting

# Rounds on the slides, by model, E, B (0: all), C, IID or not.
SLIDES = {
    ("2nn", 1, 0, 0.0, True): 1455, ("2nn", 1, 10, 0.0, True): 316,
    ("2nn", 1, 0, 0.0, False): 4278, ("2nn", 1, 10, 0.0, False): 3275,
    ("2nn", 1, 0, 0.1, True): 1474, ("2nn", 1, 10, 0.1, True): 87,
    ("2nn", 1, 0, 0.1, False): 1796, ("2nn", 1, 10, 0.1, False): 664,
    ("2nn", 1, 0, 0.2, True): 1658, ("2nn", 1, 10, 0.2, True): 77,
    ("2nn", 1, 0, 0.2, False): 1528, ("2nn", 1, 10, 0.2, False): 619,
    ("2nn", 1, 10, 0.5, True): 75, ("2nn", 1, 10, 0.5, False): 443,
    ("2nn", 1, 10, 1.0, True): 70, ("2nn", 1, 10, 1.0, False): 380,
    ("cnn", 5, 0, 0.0, True): 387, ("cnn", 5, 10, 0.0, True): 50,
    ("cnn", 5, 0, 0.0, False): 1181, ("cnn", 5, 10, 0.0, False): 956,
    ("cnn", 5, 0, 0.1, True): 339, ("cnn", 5, 10, 0.1, True): 18,
    ("cnn", 5, 0, 0.1, False): 1100, ("cnn", 5, 10, 0.1, False): 206,
    ("cnn", 5, 0, 0.2, True): 337, ("cnn", 5, 10, 0.2, True): 18,
    ("cnn", 5, 0, 0.2, False): 978, ("cnn", 5, 10, 0.2, False): 200,
    ("cnn", 5, 0, 0.5, True): 164, ("cnn", 5, 10, 0.5, True): 18,
    ("cnn", 5, 0, 0.5, False): 1067, ("cnn", 5, 10, 0.5, False): 261,
    ("cnn", 5, 0, 1.0, True): 246, ("cnn", 5, 10, 1.0, True): 16, ("cnn", 5, 10, 1.0, False): 97,
    ("cnn", 1, 0, 0.1, True): 626, ("cnn", 1, 0, 0.1, False): 483,
    ("cnn", 5, 50, 0.1, True): 29, ("cnn", 5, 50, 0.1, False): 334,
    ("cnn", 1, 50, 0.1, True): 65, ("cnn", 1, 50, 0.1, False): 600,
    ("cnn", 20, 0, 0.1, True): 234, ("cnn", 20, 0, 0.1, False): 672,
    ("cnn", 1, 10, 0.1, True): 34, ("cnn", 1, 10, 0.1, False): 350,
    ("cnn", 20, 50, 0.1, True): 32, ("cnn", 20, 50, 0.1, False): 426,
    ("cnn", 20, 10, 0.1, True): 18, ("cnn", 20, 10, 0.1, False): 173,
}  # fmt: skip
TARGETS = {"2nn": 0.97, "cnn": 0.99}

# Cells of the CNN that `experiments/README.md` has.
MEASURED = {
    ("cnn", 1, 10, 0.1, True), ("cnn", 1, 10, 0.1, False), ("cnn", 5, 10, 0.0, True), ("cnn", 5, 10, 0.1, True),
    ("cnn", 5, 50, 0.1, True), ("cnn", 1, 50, 0.1, True),
}  # fmt: skip


class Row(NamedTuple):
    """One run; the CSV's columns."""

    model: str
    epochs: int
    batch: int  # 0: all
    fraction: float
    iid: int
    rate: float
    settings: str
    rounds: float  # to the target; infinite where it was not reached
    best: float  # accuracy
    seconds: float  # of the last call, where a kill came between
    curve: str  # accuracy at every record, in %


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fedavg_rounds", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, help="mnist.npz; default a synthetic set with a small network")
    parser.add_argument("--model", choices=("2nn", "cnn"), default="2nn")
    parser.add_argument("--epochs", type=int, nargs="*", default=[1], help="E (default %(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[0, 10], help="B, 0 for all (default %(default)s)")
    parser.add_argument("--fraction", type=float, nargs="*", default=[0.1], help="C (default %(default)s)")
    parser.add_argument("--parts", choices=("iid", "shards"), nargs="*", default=["iid", "shards"])
    parser.add_argument("--slides", action="store_true", help="all their cells of the model, the cheapest first, "
                        "in place of E, B, C and parts")  # fmt: skip
    parser.add_argument("--missing", action="store_true", help="of the slides' cells only those not measured before")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.05, 0.1, 0.2], help="of the clients' SGD")
    parser.add_argument("--target", type=float, help="accuracy (default 0.97 for 2nn, 0.99 for cnn)")
    parser.add_argument("--rounds", type=int, default=1000, help="at most (default %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="rounds between tests (default %(default)s)")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=600, help="of each client (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/fedavg"), help="folder of CSV and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if min(options.rounds, options.every, options.clients, options.samples) < 1:
        parser.error("--rounds, --every, --clients and --samples must be 1 or more")
    options.target = TARGETS[options.model] if options.target is None else options.target
    rows = study(options)
    print("\n" + table(rows, options))
    draw(rows, options)


def study(options: argparse.Namespace) -> list[Row]:
    """All settings and rates, but for those that the CSV has already."""
    key = jax.random.key(options.seed)
    if options.data is None:
        train, test = images.blobs(key)
        options.samples = min(options.samples, len(train.y) // options.clients)
        model: mj.networks.Network = mj.networks.MLP(train.x.shape[1], 10, (32,))
    else:
        train, test = images.mnist(options.data)
        model = mj.networks.MLP(784, 10, (200, 200)) if options.model == "2nn" else mj.networks.CNN()
    path, held = options.out / "rounds.csv", images.pooled(test)
    settings = (f"clients={options.clients} samples={options.samples} rounds={options.rounds} every={options.every} "
                f"seed={options.seed} target={options.target:g} data={options.data and options.data.stem}")  # fmt: skip
    known = {row[:7]: row for row in read(path, Row)}
    rows = []

    @functools.cache
    def problem(iid: bool) -> mj.Prediction:
        data = images.deal(jax.random.fold_in(key, int(iid)), train, options.clients, options.samples, iid)
        return mj.Prediction(data, test=held)

    for epochs, batch, fraction, iid in cells(options):
        for rate in options.rates:
            name = options.model, epochs, batch, fraction, int(iid), rate, settings
            if name not in known:
                known[name] = kept(path, problem(iid), model, name, options)
            rows.append(known[name])
    return rows


class Cell(NamedTuple):
    """A setting of the tables."""

    epochs: int
    batch: int  # 0: all
    fraction: float
    iid: bool


def cells(options: argparse.Namespace) -> list[Cell]:
    """The settings asked for; of the slides' in the order of the passes over a client's samples that theirs took."""
    if not options.slides:
        parts = [part == "iid" for part in options.parts]
        return [Cell(e, b, c, iid) for iid, e, b, c in
                itertools.product(parts, options.epochs, options.batch, options.fraction)]  # fmt: skip
    wanted = {name: rounds for name, rounds in SLIDES.items() if not (options.missing and name in MEASURED)}
    found = {Cell(*name[1:]): rounds for name, rounds in wanted.items() if name[0] == options.model}
    return sorted(found, key=lambda cell: found[cell] * cell.epochs * max(cell.fraction * options.clients, 1.0))


def kept(
    path: Path, problem: mj.Prediction, model: mj.networks.Network, name: tuple[Any, ...], options: argparse.Namespace
) -> Row:
    """Run one setting and append it to the CSV.

    A checkpoint is named by all that the run depends on, and kept until its row is.
    """
    checkpoint = path.parent / f"run_{hashlib.blake2b(repr(name).encode(), digest_size=8).hexdigest()}.npz"
    row = _one(problem, model, name, options, checkpoint)
    append(path, row)
    checkpoint.unlink(missing_ok=True)
    return row


def _one(
    problem: mj.Prediction, model: mj.networks.Network, name: tuple[Any, ...], options: argparse.Namespace,
    checkpoint: Path,
) -> Row:  # fmt: skip
    _, epochs, batch, fraction, iid, rate, _ = name
    # The rate is a leaf, so all rates share one program.
    algorithm = mj.FedAvg(model, _SGD, local_epochs=epochs, batch_size=batch or None, fraction=fraction, rate=rate)
    began = time.perf_counter()
    solution = mj.solve(
        problem, algorithm, key=jax.random.key(options.seed), tol=1.0 - options.target, max_rounds=options.rounds,
        record_every=options.every, chunk=10 * options.every, checkpoint=checkpoint,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    accuracy = 1.0 - np.asarray(solution.history.error, float)
    rounds = crossing(np.asarray(solution.history.round), accuracy, options.target)
    print(f"E {epochs:<3} B {batch or 'all':<4} C {fraction:<4g} {'IID' if iid else 'non-IID':<8} rate {rate:<6g} "
          f"rounds {rounds:>6.0f} best {100 * accuracy.max():.2f} % {seconds:6.1f} s", flush=True)  # fmt: skip
    curve = " ".join(f"{100 * a:.2f}" for a in accuracy)
    return Row._make((*name, rounds, float(accuracy.max()), seconds, curve))


_SGD = optax.sgd(1.0)


def crossing(rounds: np.ndarray, accuracy: np.ndarray, target: float) -> float:
    """Where the best so far, interpolated, reaches the target."""
    best = np.maximum.accumulate(accuracy)
    reached = np.flatnonzero(best >= target)
    if not len(reached):
        return float("inf")
    i = int(reached[0])
    if i == 0:
        return float(rounds[0])
    share = (target - best[i - 1]) / (best[i] - best[i - 1])
    return float(rounds[i - 1] + share * (rounds[i] - rounds[i - 1]))


def best_rates(rows: list[Row]) -> dict[tuple, Row]:
    """Of every setting the run with the fewest rounds; where none got there, the most accurate."""
    found: dict[tuple, Row] = {}
    for row in rows:
        old = found.get(row[:5])
        if old is None or (row.rounds, -row.best) < (old.rounds, -old.best):
            found[row[:5]] = row
    return found


def table(rows: list[Row], options: argparse.Namespace) -> str:
    """Ours beside the slides'."""
    lines = [
        f"rounds to {100 * options.target:g} % on the test set, at most {options.rounds}; best rate of {options.rates}",
        f"{'model':<6}{'E':>4}{'B':>6}{'C':>6}{'u':>8}  {'data':<9}{'rate':>7}{'rounds':>9}{'slides':>8}"
        f"{'best %':>9}{'s':>8}",
    ]
    for (model, epochs, batch, fraction, iid), row in best_rates(rows).items():
        u = epochs * (options.samples / batch if batch else 1.0)
        slides = SLIDES.get((model, epochs, batch, fraction, bool(iid)), "")
        rounds = f"{row.rounds:.0f}" if np.isfinite(row.rounds) else f"> {options.rounds}"
        lines.append(
            f"{model:<6}{epochs:>4}{batch or 'all':>6}{fraction:>6g}{u:>8g}  {'IID' if iid else 'non-IID':<9}"
            f"{row.rate:>7g}{rounds:>9}{slides:>8}{100 * row.best:>9.2f}{row.seconds:>8.0f}"
        )
    return "\n".join(lines)


def draw(rows: list[Row], options: argparse.Namespace) -> None:
    """Test accuracy against rounds, best rates."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, iid in zip(panels, (1, 0), strict=True):
        chosen = [(name, row) for name, row in best_rates(rows).items() if name[4] == iid]
        for (name, row), colour in zip(chosen, plotting.COLOURS * len(chosen), strict=False):
            accuracy = np.array(row.curve.split(), float)
            label = f"E={name[1]}, B={name[2] or 'all'}, C={name[3]:g}"
            axes.plot(options.every * np.arange(1, len(accuracy) + 1), accuracy, color=colour, lw=1.2, label=label)
        axes.axhline(100 * options.target, color="0.5", lw=0.8, ls="--")
        axes.set_title("IID" if iid else "two shards each", fontsize=11)
        axes.set_xlabel("rounds")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if chosen:
            axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("test accuracy, %")
    low = 100 * options.target
    panels[0].set_ylim(low - 12, 100)
    figure.savefig(options.out / "fedavg_rounds.png", dpi=150)
    print(options.out / "fedavg_rounds.png")


if __name__ == "__main__":
    main()
