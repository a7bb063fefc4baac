"""Motley's study of schools beside its authors' own code: ``python -m experiments.published_motley --data school.npz``.

Wu et al. 2022 (Motley, arXiv 2206.09262) predict the scores of 139 schools' pupils, scaled to [0, 1], by linear models,
with 15 % of every school for validation and 15 % for testing; features are standardised by a school's training part.
The error is half the mean square, and tables give its mean and standard deviation over schools. Local models, federated
averaging, Ditto and MR-MTL train by 200 rounds of one epoch, with batches of 32; the validation part chooses a learning
rate, and a strength, from a grid. Beside them stand the certified models near the mean (11) and with a mean and a
learned covariance, whose strengths it chooses, too.

``--code FOLDER`` runs theirs besides (github.com/litian96/p13n_benchmark_cross_silo, vehicle_school; it needs dm-haiku
and scikit-learn): on the same splits, with the rates and strengths that ours chose, and their MOCHA with those that it
chooses. Their epochs leave out the last batch if it is not full, and their MOCHA has Omega in place of its inverse.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from sklearn.model_selection import train_test_split

import mocha_jax as mj
from experiments.private_school import linear
from experiments.rows import append, parser_of, read, say

ROUNDS, BATCH = 200, 32
RATES, STRENGTHS = (0.003, 0.01, 0.03, 0.1), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
TRAINED = {"Local": "local", "FedAvg": "fedavg", "Ditto": "ditto", "MR-MTL": "mrmtl"}
PULLED = ("Ditto", "MR-MTL")
MOCHA, MEAN, COVARIANCE = (
    "MOCHA by primal SGD",
    "near their mean (11), certified",
    "mean and learned covariance, certified",
)
METHODS = (*TRAINED, MOCHA, MEAN, COVARIANCE)
PENALTIES = tuple(10.0 ** np.arange(-3.0, 3.1, 0.5))


class Row(NamedTuple):
    """One model; the CSV's columns."""

    code: str  # ours or theirs
    method: str
    seed: int  # of the split
    rate: float
    strength: float
    validation: float
    error: float  # of the test part, mean over schools
    spread: float  # its standard deviation over schools


class Split(NamedTuple):
    """Samples of all schools."""

    train: mj.TaskData
    validation: mj.TaskData
    test: mj.TaskData


def main() -> None:
    """Parse the command line, train, print."""
    parser = parser_of("published_motley", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="school.npz")
    parser.add_argument("--seeds", type=int, default=3, help="splits (default %(default)s)")
    parser.add_argument("--code", type=Path, help="folder of the authors' code, to run it besides")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    say(table(study(options)), options.out)


def study(options: argparse.Namespace) -> list[Row]:
    """All that the CSV lacks; then its rows."""
    path = options.out / "runs.csv"
    rows = read(path, Row)
    file = np.load(options.data, allow_pickle=False)
    for seed, method in product(range(options.seeds), METHODS):
        for code in ("ours", "theirs") if options.code else ("ours",):
            known = [row for row in rows if (row.code, row.method, row.seed) == (code, method, seed)]
            ours = [row for row in rows if (row.code, row.method, row.seed) == ("ours", method, seed)]
            if known or (method == MOCHA) != (code == "theirs") and (method in (MOCHA, MEAN, COVARIANCE)):
                continue
            found = trained(split(file, seed), method, seed) if code == "ours" else theirs(
                options.code.resolve(), method, seed, ours)  # fmt: skip
            append(path, found)
            rows.append(found)
            print(f"{code}, {method}, split {seed}: {found.error:.5f}", flush=True)
    return rows


def split(file: Any, seed: int) -> Split:
    """Divide every school as their ``data_utils.py`` does."""
    x, y, task = file["X"].astype(float), file["y"].astype(float), file["task"]
    low, high = y.min(), y.max()
    parts: tuple[tuple[list[Any], list[Any]], ...] = tuple(([], []) for _ in range(3))
    for k in np.unique(task):
        rest, test = train_test_split(np.flatnonzero(task == k), test_size=0.15, random_state=root(seed))
        train, validation = train_test_split(rest, test_size=0.15 / 0.85, random_state=root(seed))
        mean, spread = x[train].mean(axis=0), x[train].std(axis=0)
        for (xs, ys), rows in zip(parts, (train, validation, test), strict=True):
            xs.append(((x[rows] - mean) / np.where(spread > 0, spread, 1.0)).astype(np.float32))
            ys.append(((y[rows] - low) / (high - low)).astype(np.float32))
    return Split(*(mj.pack_tasks(xs, ys) for xs, ys in parts))


def root(seed: int) -> int:
    """Their seed."""
    return 100 + 1000 * seed


def trained(parts: Split, method: str, seed: int) -> Row:
    """Train with every rate and strength, and keep what is the best on the validation part."""
    if method in (MEAN, COVARIANCE):
        found = [(np.nan, strength, *certified(parts, method, strength)) for strength in PENALTIES]
    else:
        found = []
        for rate in RATES:
            strengths = jnp.array(STRENGTHS if method in PULLED else (0.0,))
            both = by_sgd(parts, method, rate, seed, strengths)
            found += [(rate, float(s), *errors) for s, errors in zip(strengths, np.asarray(both), strict=True)]
    rate, strength, validation, test = min(found, key=lambda one: np.nan_to_num(np.mean(one[2]), nan=np.inf))
    return Row(
        "ours", method, seed, rate, strength, float(np.mean(validation)), float(np.mean(test)), float(np.std(test))
    )


def by_sgd(parts: Split, method: str, rate: float, seed: int, strengths: Array) -> Array:
    """Train with all strengths: half the mean square on validation and test parts ``[strengths, 2, schools]``."""
    model, sgd = linear(parts.train.num_features, 0.0), optax.sgd(rate)
    make: dict[str, Any] = {
        "Local": mj.Local, "FedAvg": mj.FedAvg, "Ditto": mj.personalized.ditto, "MR-MTL": mj.personalized.mr_mtl,
    }  # fmt: skip
    algorithm = make[method](model, sgd, batch_size=BATCH)
    problems = [mj.Prediction(parts.train, mj.likelihoods.Gaussian(), test=part) for part in parts[1:]]

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def errors(strength: Array, problems: list[mj.Prediction]) -> Array:
        own = algorithm.replace(numbers={"strength": strength}) if method in PULLED else algorithm
        key = jax.random.key(seed)
        state, _ = mj.run(problems[0], own, key, num_rounds=ROUNDS + 1, record_every=ROUNDS + 1)
        return jnp.stack([0.5 * own.scores(state, problem).error for problem in problems])

    return errors(strengths, problems)


def certified(parts: Split, method: str, strength: float) -> list[np.ndarray]:
    """Solve: half the mean square of every school, on validation and test parts."""
    with_ones = [part.replace(x=np.concatenate([part.x, np.ones_like(part.x[..., :1])], axis=2)) for part in parts]
    kind = mj.regularizers
    model = kind.MeanRegularized(strength, 1e-4) if method == MEAN else kind.MeanCovariance(1e-4, strength / 139.0)
    problem = mj.Problem(with_ones[0].replace(loss_scaling="task_mean"), mj.losses.Squared(), model)
    weights = np.asarray(mj.solve(problem, tol=1e-4).weights)
    found = []
    for part in with_ones[1:]:
        squares = (np.einsum("mnd,md->mn", part.x, weights) - np.asarray(part.y)) ** 2
        real = np.asarray(part.weight) > 0
        found.append(0.5 * np.sum(squares * real, axis=1) / real.sum(axis=1))
    return found


def theirs(folder: Path, method: str, seed: int, ours: list[Row]) -> Row:
    """Run their code on the split with the rate and the strength of ours; their MOCHA with some of each."""
    trials = list(product((0.03, 0.1), (0.001, 0.1, 10.0))) if method == MOCHA else [
        (row.rate, row.strength) for row in ours]  # fmt: skip
    found = []
    for rate, strength in trials:
        with tempfile.TemporaryDirectory() as out:
            command = [
                sys.executable, "main.py", "--inner_mode", "epoch", "--inner_epochs", "1", "--dataset", "school",
                "--batch_size", str(BATCH), "--num_rounds", str(ROUNDS), "--eval_every", str(ROUNDS), "--repeat", "1",
                "--trainer", TRAINED.get(method, "mocha"), "--client_lr", str(rate), "--ditto_secret_lr", str(rate),
                "--lambda", str(strength), "--server_opt", "fedavg", "--server_lr", "1", "--seed", str(root(seed)),
                "--quiet", "--outdir", out,
            ]  # fmt: skip
            subprocess.run(command, cwd=folder / "vehicle_school", check=True, capture_output=True)
            last = (Path(out) / "run0" / "client_metrics.txt").read_text().splitlines()[-1]
        validation, test = np.array(ast.literal_eval(last))[:, 1:].T
        found.append(
            Row("theirs", method, seed, rate, strength, float(validation.mean()), float(test.mean()), float(test.std()))
        )
    return min(found, key=lambda row: np.nan_to_num(row.validation, nan=np.inf))


def table(rows: list[Row]) -> str:
    """Markdown: half the mean square, mean and standard deviation over schools, means over splits."""
    lines = ["| model | here | their code |", "|---|---:|---:|"]
    for method in METHODS:
        cells = []
        for code in ("ours", "theirs"):
            own = [row for row in rows if (row.code, row.method) == (code, method)]
            mean, spread = (
                np.mean([getattr(row, name) for row in own]) if own else 0.0 for name in ("error", "spread")
            )
            cells.append(f"{mean:.5f} ({spread:.5f})" if own else "")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
