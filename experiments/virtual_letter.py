"""VIRTUAL as it is written, beside the default: ``python -m experiments.virtual_letter --data har.npz``.

Some of HAR's subjects with six activities, 25 % of their windows for testing. *letter* is `Virtual.paper`: temperature
1, the prior in every refinement, factors that multiply to where training begins; *once* is the same with the prior
counted once. *default* is `Virtual`; *cold* is the default at a temperature of 0.01. All draw as often, with the same
noise (``--noise flipout`` is the letter's), and train as long. Printed is the accuracy, mean over clients, after
every round of refinements; then, with the last posterior pruned by its ratio of signal to noise, for every share of
parameters left out. A CSV keeps every result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import mocha_jax as mj
from experiments import images
from experiments.rows import append, read

# How each way is made, and what of it is changed.
WAYS: dict[str, tuple[Callable[..., mj.Virtual], dict[str, Any]]] = {
    "letter": (mj.Virtual.paper, {}),
    "once": (mj.Virtual.paper, {"prior": "once"}),
    "default": (mj.Virtual, {}),
    "cold": (mj.Virtual, {"temperature": 0.01}),
}


class Row(NamedTuple):
    """One way on one split; the CSV's columns."""

    settings: str
    way: str
    accuracy: str  # in % after every round of refinements
    pruned: str  # in % for every share
    silent: float  # share of the shared parameters whose ratio of signal to noise is below 0.1
    seconds: float


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.virtual_letter", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, help="har.npz; default a synthetic set")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--clients", type=int, default=10, help="subjects (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=100, help="of a refinement (default %(default)s, the paper's)")
    parser.add_argument("--draws", type=int, default=20, help="Monte-Carlo samples in training (default %(default)s)")
    parser.add_argument("--noise", choices=("shared", "flipout", "local"), default="local")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=50, help="width of both hidden layers (default %(default)s)")
    parser.add_argument("--refinements", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.5, 0.75, 0.9, 0.95, 0.98])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/letter"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    print("\n" + table(rows, options))


def study(options: argparse.Namespace) -> list[Row]:
    """All ways, but for those that the CSV has already."""
    path, key = options.out / "letter.csv", jax.random.key(options.seed)
    given = ("clients", "epochs", "draws", "noise", "batch", "hidden", "refinements", "shares", "seed")
    settings = " ".join(f"{name}={getattr(options, name)}" for name in given)
    known = {row.way: row for row in read(path, Row) if row.settings == settings}
    data, classes = federation(options, key)
    train, test = data.split(jax.random.fold_in(key, 0), 0.75)
    problem = mj.Prediction(train, test=test)
    model = mj.networks.Lateral(train.num_features, classes, (options.hidden,) * 2, dropout=0.3)
    for way in options.ways:
        if way not in known:
            make, changes = WAYS[way]
            algorithm = make(
                model, _ADAM, local_epochs=options.epochs, samples=options.draws, noise=options.noise,
                batch_size=options.batch, seed=options.seed,
            ).replace(draws=20, **changes)  # fmt: skip
            known[way] = judged(problem, algorithm, key, settings, way, options)
            append(path, known[way])
    return [known[way] for way in options.ways]


_ADAM = optax.adam(1e-3)


def federation(options: argparse.Namespace, key: jax.Array) -> tuple[mj.TaskData, int]:
    """Some subjects of HAR, or bumps."""
    if options.data is None:
        blobs = images.blobs(key, 400, 16, 4)[0]
        return images.deal(key, blobs, options.clients, 400 // options.clients, iid=True), 4
    file = np.load(options.data, allow_pickle=False)
    chosen = np.isin(file["subject"], np.unique(file["subject"])[: options.clients])
    x, y = file["X"][chosen].astype(np.float32), file["y"][chosen].astype(int) - 1
    return mj.pack_tasks(x, y, file["subject"][chosen]), 6


def judged(
    problem: mj.Prediction, algorithm: mj.Virtual, key: jax.Array, settings: str, way: str, options: argparse.Namespace
) -> Row:
    """Train and judge one way."""
    began = time.perf_counter()
    clients = problem.data.num_nodes
    state, history = mj.run(
        problem, algorithm, key, num_rounds=options.refinements * clients, record_every=clients
    )  # fmt: skip
    accuracy = 100 * (1 - np.asarray(history.error))
    seconds = time.perf_counter() - began
    shares = jax.numpy.asarray(options.shares, problem.data.dtype)
    pruned = jax.lax.map(lambda share: algorithm.certify(state.pruned(share), problem).error, shares)
    noise = np.asarray(state.posterior.signal_to_noise)
    row = Row(settings, way, _numbers(accuracy), _numbers(100 * (1 - np.asarray(pruned))), float((noise < 0.1).mean()),
              seconds)  # fmt: skip
    print(f"{way:<8} {row.accuracy}   pruned {row.pruned}   {seconds:.0f} s", flush=True)
    return row


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def table(rows: list[Row], options: argparse.Namespace) -> str:
    """Accuracy by refinement and by the share left out."""
    rounds = [f"round {i + 1}" for i in range(options.refinements)]
    heads = ["way", *rounds, "silent %", *(f"-{100 * share:g} %" for share in options.shares)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.way, *row.accuracy.split(), f"{100 * row.silent:.1f}", *row.pruned.split()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
