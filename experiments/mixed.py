"""A federation whose tasks have different losses: ``python -m experiments.mixed --data school.npz``.

Half of the tasks, drawn anew in every trial, know their labels as numbers and take the squared loss; the other half
know only whether these are above the median of all and take a smoothed hinge. *joint* is (14) with `losses.PerTask`
over all of them, *apart* is (14) for each half by itself, *local* are models of their own, and *all known* is (14) as
if every task knew its numbers, judged on the first half alone. Lambda is chosen by 5-fold cross-validation of the mean
loss. A CSV keeps every trial; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj
from experiments.rows import append, read
from experiments.tasksets import load

LAMBDAS = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)
MODELS = ("local", "apart", "joint", "all known")


class Row(NamedTuple):
    """One model in one trial; the CSV's columns."""

    settings: str
    trial: int
    model: str
    lam: str
    rmse: float  # of the tasks that know numbers, in the unit of the labels
    error: float  # of the others, in %
    residual: float  # the larger relative gap of the final solves
    seconds: float


class Half(NamedTuple):
    """Some tasks, with their training and test samples and loss."""

    train: mj.TaskData
    test: mj.TaskData
    loss: mj.losses.Loss


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.mixed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, help="a file of regression tasks, such as school.npz; default synthetic")
    parser.add_argument("--training", type=float, default=0.5, help="share of samples (default %(default)s)")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=300, help="for each candidate at most (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/mixed"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    xs, ys, scale = _tasks(options)
    settings = f"data={options.data and options.data.stem} training={options.training} seed={options.seed}"
    rows = [row for row in read(path, Row) if row.settings == settings]
    done = {(row.trial, row.model) for row in rows}
    print(f"{len(xs)} tasks, {sum(map(len, ys))} samples", flush=True)
    for trial in range(options.trials):
        for model in MODELS:
            if (trial, model) in done:
                continue
            row = _trained(options, xs, ys, scale, settings, trial, model)
            append(path, row)
            rows.append(row)
            print(f"  trial {trial} {model:>9}: lambda {row.lam:<12} RMSE {row.rmse:6.3f} error {row.error:6.2f} % gap "
                  f"{row.residual:.0e} {row.seconds:5.1f} s", flush=True)  # fmt: skip
    print("\n" + table(rows))


def _tasks(options: argparse.Namespace) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Samples with an intercept, standardised labels, and the unit of these."""
    if options.data is None:
        data, scale = _synthetic(options.seed), 1.0
    else:
        found = load(options.data)
        data, scale = found.data, found.scale
    real = np.asarray(data.weight) > 0
    xs, ys = (
        [np.asarray(a[t], np.float32)[real[t]] for t in range(data.num_tasks)] for a in (data.x, data.y)
    )  # fmt: skip
    return xs, ys, scale


def _synthetic(seed: int) -> mj.TaskData:
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(20, 3)) @ rng.normal(size=(3, 8))
    xs = [rng.normal(size=(24, 8)).astype("f") for _ in truth]
    ys = [(x @ w + rng.normal(size=24)).astype("f") for x, w in zip(xs, truth, strict=True)]
    return mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True)


def _trained(
    options: argparse.Namespace, xs: list[np.ndarray], ys: list[np.ndarray], scale: float, settings: str, trial: int,
    model: str,
) -> Row:  # fmt: skip
    key, began = jax.random.fold_in(jax.random.key(options.seed), trial), time.perf_counter()
    numbers = np.asarray(jax.random.permutation(jax.random.fold_in(key, 0), len(xs))) < len(xs) // 2
    median = np.median(np.concatenate(ys))
    known = numbers | (model == "all known")
    labels = [y if k else np.where(y > median, 1.0, -1.0).astype(y.dtype) for y, k in zip(ys, known, strict=True)]
    order = np.arange(len(xs))
    groups = [order[known], order[~known]] if model == "apart" else [order]
    whole = _half(key, xs, labels, known, order, options.training)
    weights, lams, residual = np.zeros((len(xs), xs[0].shape[1]), whole.test.dtype), [], 0.0
    for tasks in groups:
        half = whole if len(tasks) == len(xs) else _half(key, xs, labels, known, tasks, options.training)
        kind = mj.regularizers.Independent if model == "local" else mj.regularizers.Probabilistic
        found = mj.cross_validate(
            mj.Problem(half.train, half.loss, kind(1.0)), mj.grid(kind, lam=[0.5 * lam for lam in LAMBDAS]),
            key=jax.random.fold_in(key, 2), metric="mean_loss", tol=1e-3, max_rounds=options.rounds, record_every=10,
        )  # fmt: skip
        assert found.solution is not None
        weights[tasks] = found.solution.weights
        lams.append(f"{LAMBDAS[found.best]:g}")
        residual = max(residual, float(found.solution.certificate.residual))
    rmse = np.asarray(mj.metrics.rmse(weights, whole.test, per_task=True))[numbers]
    error = np.asarray(mj.metrics.error_rate(weights, whole.test, per_task=True))[~numbers]
    wrong = float("nan") if model == "all known" else 100.0 * float(np.nanmean(error))
    return Row(settings, trial, model, " ".join(lams), scale * float(np.nanmean(rmse)), wrong, residual,
               time.perf_counter() - began)  # fmt: skip


def _half(
    key: jax.Array, xs: list[np.ndarray], labels: list[np.ndarray], known: np.ndarray, tasks: np.ndarray, share: float
) -> Half:  # fmt: skip
    """Some of the tasks. How a task's samples are split depends on the trial and the task alone."""
    parts = []
    for training in (True, False):
        chosen = [_rows(key, int(t), len(labels[t]), share, training) for t in tasks]
        samples, answers = (
            [a[t][rows] for t, rows in zip(tasks, chosen, strict=True)] for a in (xs, labels)
        )  # fmt: skip
        parts.append(mj.pack_tasks(samples, answers, loss_scaling="task_mean"))
    losses = mj.losses.Squared(), mj.losses.SmoothedHinge(0.5)
    if known[tasks].all() or not known[tasks].any():
        return Half(parts[0], parts[1], losses[0 if known[tasks].all() else 1])
    return Half(parts[0], parts[1], mj.losses.PerTask(list(losses), which=[0 if k else 1 for k in known[tasks]]))


def _rows(key: jax.Array, task: int, count: int, share: float, training: bool) -> np.ndarray:
    order = np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, 1), task), count))
    cut = min(max(round(share * count), 1), count - 1)
    return np.sort(order[:cut] if training else order[cut:])


def table(rows: list[Row]) -> str:
    """Means and standard errors over trials."""
    lines = ["| model | numbers known, RMSE | the others, error % |", "|---|---|---|"]
    for model in MODELS:
        found = [row for row in rows if row.model == model]
        cells = [_mean([getattr(row, name) for row in found]) for name in ("rmse", "error")]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    if not values or np.isnan(values).any():
        return ""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{np.mean(values):.3f} ({error:.3f})"


if __name__ == "__main__":
    main()
