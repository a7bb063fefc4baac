"""The language model of the slides: ``python -m experiments.shakespeare --data shakespeare.npz``.

FedSGD and FedAvg of a character LSTM, every speaking role a client or the same rows dealt at random. The model is the
slides' (embedding 8, two layers of 256), or a small one (one layer of 64). A row has 80 characters to predict, and the
accuracy is that of all characters of the test rows. Every setting is run for every rate of its grid and the best
counts; a round is where the running best, interpolated, crosses an accuracy. A CSV keeps every run; one that was
interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments import roles
from experiments.fedavg_rounds import Row, best_rates, crossing, kept
from experiments.rows import read
from mocha_jax import plotting

# Rounds to 54 % on the slides, by E, B (0: all), IID or not; C = 0.1.
SLIDES = {
    (1, 0, 1): 2488, (1, 0, 0): 3906, (1, 10, 1): 460, (1, 10, 0): 164, (5, 10, 1): 192, (5, 10, 0): 41,
    (1, 50, 1): 1635, (1, 50, 0): 549, (5, 50, 1): 401, (5, 50, 0): 152,
}  # fmt: skip
SETTINGS = {"fedsgd": (1, 0), "e1": (1, 10), "e5": (5, 10)}  # E and B
MODELS = {"small": {"hidden": 64, "layers": 1}, "full": {"hidden": 256, "layers": 2}}


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.shakespeare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, help="shakespeare.npz or a folder of LEAF; default roles that babble")
    parser.add_argument("--model", choices=tuple(MODELS), default="small", help="(default %(default)s)")
    parser.add_argument("--settings", choices=tuple(SETTINGS), nargs="*", default=list(SETTINGS))
    parser.add_argument("--parts", choices=("iid", "roles"), nargs="*", default=["iid", "roles"])
    parser.add_argument("--rates", type=float, nargs="*", default=[4.0, 8.0], help="of FedAvg (default %(default)s)")
    parser.add_argument(
        "--sgd-rates", type=float, nargs="*", default=[8.0, 16.0], help="of FedSGD (default %(default)s)"
    )
    parser.add_argument("--fraction", type=float, default=0.1, help="C (default %(default)s)")
    parser.add_argument("--target", type=float, default=0.54, help="accuracy to stop at (default %(default)s)")
    parser.add_argument(
        "--marks", type=float, nargs="*", default=[0.4, 0.44], help="accuracies to count rounds to, too"
    )
    parser.add_argument("--passes", type=int, default=300, help="rounds times E, at most (default %(default)s)")
    parser.add_argument("--clients", type=int, default=100, help="roles, at random (default %(default)s)")
    parser.add_argument("--most", type=int, default=10**6, help="training rows of a role, at most (default all)")
    parser.add_argument("--length", type=int, default=80, help="characters a row predicts (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/shakespeare"), help="folder of CSV and picture")
    options = parser.parse_args()
    if min(options.passes, options.clients, options.length, options.most) < 1:
        parser.error("--passes, --clients, --length and --most must be 1 or more")
    if options.data is not None and not options.data.exists():
        print(f"{options.data} is not here: skipped")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows, samples = study(options)
    print("\n" + table(rows, samples, options))
    draw(rows, options)


def study(options: argparse.Namespace) -> tuple[list[Row], float]:
    """All settings and rates, but for those that the CSV has already; and the mean number of rows of a client."""
    key = jax.random.key(options.seed)
    if options.data is None:
        every = roles.babble(key, options.clients, options.length)
    else:
        every = roles.shakespeare(options.data, options.length).chosen(key, options.clients)
    every = every.shortened(options.most)
    model = mj.networks.LSTM(every.symbols, **MODELS[options.model])
    samples = float(np.mean([len(role[0]) for role in every.train]))
    characters = [int(sum(role[1].sum() for role in part)) for part in (every.train, every.test)]
    print(f"{len(every.train)} roles, {samples:.1f} rows each on average, {every.symbols} symbols; {characters[0]} "
          f"characters for training, {characters[1]} for testing", flush=True)  # fmt: skip
    path = options.out / "rounds.csv"
    settings = (f"clients={options.clients} length={options.length} most={options.most} passes={options.passes} "
                f"seed={options.seed} target={options.target:g} data={options.data and options.data.stem}")  # fmt: skip
    known = {row[:7]: row for row in read(path, Row)}
    rows, began = [], time.perf_counter()
    for setting in options.settings:
        epochs, batch = SETTINGS[setting]
        for iid in (part == "iid" for part in options.parts):
            problem = every.problem(jax.random.fold_in(key, 1), iid)
            for rate in options.rates if batch else options.sgd_rates:
                name = options.model, epochs, batch, options.fraction, int(iid), rate, settings
                if name not in known:
                    if time.perf_counter() - began > 60.0 * options.minutes:
                        continue
                    once = argparse.Namespace(
                        seed=options.seed,
                        target=options.target,
                        rounds=-(-options.passes // epochs),
                        every=tested_every(epochs),
                    )
                    known[name] = kept(path, problem, model, name, once)
                rows.append(known[name])
    return rows, samples


def tested_every(epochs: int) -> int:
    """Rounds between tests, so that their number is about that of the passes."""
    return max(5 // epochs, 1)


def table(rows: list[Row], samples: float, options: argparse.Namespace) -> str:
    """Rounds to every accuracy, and what the slides' took to 54 %."""
    marks = [*options.marks, options.target]
    lines = [
        f"rounds to accuracies on the test characters, C = {options.fraction:g}; at most {options.passes} / E rounds",
        f"{'model':<7}{'':<8}{'E':>3}{'B':>5}{'u':>7}  {'data':<9}{'rate':>6}"
        + "".join(f"{100 * mark:>7g} %" for mark in marks)
        + f"{'slides, 54 %':>14}{'best %':>8}{'s':>7}",
    ]
    for (model, epochs, batch, _, iid), row in best_rates(rows).items():
        accuracy = np.array(row.curve.split(), float) / 100
        rounds = tested_every(epochs) * np.arange(1, len(accuracy) + 1)
        reached = [crossing(rounds, accuracy, mark) for mark in marks]
        lines.append(
            f"{model:<7}{'FedAvg' if batch else 'FedSGD':<8}{epochs:>3}{batch or 'all':>5}"
            f"{epochs * (samples / batch if batch else 1.0):>7.1f}  {'IID' if iid else 'by role':<9}{row.rate:>6g}"
            + "".join(f"{f'{r:.0f}' if np.isfinite(r) else f'> {rounds[-1]}':>9}" for r in reached)
            + f"{SLIDES.get((epochs, batch, iid), ''):>14}{100 * row.best:>8.2f}{row.seconds:>7.0f}"
        )
    return "\n".join(lines)


def draw(rows: list[Row], options: argparse.Namespace) -> None:
    """Test accuracy against rounds, best rates."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, iid in zip(panels, (1, 0), strict=True):
        chosen = [row for row in best_rates(rows).values() if row.iid == iid]
        for row, colour in zip(chosen, plotting.COLOURS * len(chosen), strict=False):
            accuracy = np.array(row.curve.split(), float)
            label = f"FedAvg, E={row.epochs}, B={row.batch}" if row.batch else "FedSGD"
            axes.plot(
                tested_every(row.epochs) * np.arange(1, len(accuracy) + 1), accuracy, color=colour, lw=1.4, label=label
            )
        axes.axhline(100 * options.target, color="0.5", lw=0.8, ls="--")
        axes.set_title("IID" if iid else "by role", fontsize=11)
        axes.set_xlabel("rounds")
        axes.set_xscale("log")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if chosen:
            axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("test accuracy, % of characters")
    figure.savefig(options.out / "shakespeare.png", dpi=150)
    print(options.out / "shakespeare.png")


if __name__ == "__main__":
    main()
