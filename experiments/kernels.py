"""Kernels against linear models: ``python -m experiments.kernels --data landmine.npz vehicle.npz har.npz``.

Local models and (14), linear and with a Gaussian kernel. In every trial each task's samples are split at random, 75 %
for training; lambda and the kernel's width, one for all tasks, are chosen by 5-fold cross-validation on these; the mean
over tasks of the score on the rest is printed. *kernel* is `features.Nystroem` with all training samples as landmarks,
the kernel method itself, or with as many as ``--landmarks`` says; *random* is `features.RandomFourier` with twice as
many features as landmarks. *SVC* is scikit-learn's, with the same kernel on every task by itself, chosen in the same
way. A CSV keeps every trial; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj
from experiments.protocol import FOLDS, TRAINING, Score, score_of
from experiments.rows import append, read
from experiments.tasksets import TaskSet, each, synthetic

LAMBDAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
WIDTHS = (0.1, 1.0, 10.0)  # gamma, in units of one over the median squared distance of two samples
MODELS = ("linear, local", "linear, MTL", "kernel, local", "kernel, MTL", "random, MTL", "SVC, local")


class Row(NamedTuple):
    """One model in one trial; the CSV's columns."""

    tasks: str
    settings: str
    trial: int
    model: str
    lam: float
    width: float
    validation: float
    test: float
    residual: float  # relative gap of the final solve
    seconds: float


class Chosen(NamedTuple):
    """The best of all candidates."""

    validation: float
    lam: float
    width: float
    test: float
    residual: float


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files as of table 1; default a synthetic set")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--landmarks", type=int, default=1500, help="at most (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="for each candidate at most (default %(default)s)")
    parser.add_argument("--tol", type=float, default=1e-2, help="relative gap at which to stop (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/kernels"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    settings = f"landmarks={options.landmarks} rounds={options.rounds} tol={options.tol:g} seed={options.seed}"
    rows = [row for row in read(path, Row) if row.settings == settings]
    sets = []
    for tasks in each(options.data, synthetic(jax.random.key(options.seed), 6)):
        score = score_of(tasks, None)
        sets.append((tasks.name, score))
        print(f"{tasks.name}: {tasks.data.num_tasks} tasks, {score.title}", flush=True)
        done = {(row.trial, row.model) for row in rows if row.tasks == tasks.name}
        for trial in range(options.trials):
            for model in options.models:
                if (trial, model) in done:
                    continue
                row = _trained(options, tasks, score, settings, trial, model)
                append(path, row)
                rows.append(row)
                print(f"  trial {trial} {model:>14}: lambda {row.lam:<6g} width {row.width:<4g} validation "
                      f"{row.validation:7.3f} test {row.test:7.3f} gap {row.residual:.0e} {row.seconds:6.1f} s",
                      flush=True)  # fmt: skip
    print("\n" + table(rows, sets))


def _trained(
    options: argparse.Namespace, tasks: TaskSet, score: Score, settings: str, trial: int, model: str
) -> Row:  # fmt: skip
    key, began = jax.random.fold_in(jax.random.key(options.seed), trial), time.perf_counter()
    train, test = tasks.data.split(jax.random.fold_in(key, 0), TRAINING, stratify=False)
    of_folds = jax.random.fold_in(key, 1)
    if model == "SVC, local":
        if not tasks.loss.binary:
            found = Chosen(*(float("nan"),) * 5)
        else:
            found = _support_vector_machines(train, test, score, np.asarray(train.folds(of_folds, FOLDS)))
    else:
        found = _solved(options, tasks, train, test, score, model, of_folds)
    return Row(
        tasks.name, settings, trial, model, found.lam, found.width, score.factor * found.validation,
        score.factor * found.test, found.residual, time.perf_counter() - began,
    )  # fmt: skip


def _solved(
    options: argparse.Namespace, tasks: TaskSet, train: mj.TaskData, test: mj.TaskData, score: Score, model: str,
    key: jax.Array,
) -> Chosen:  # fmt: skip
    """This library's model with the best lambda and width."""
    kind = mj.regularizers.Probabilistic if model.endswith("MTL") else mj.regularizers.Independent
    metric = getattr(mj.metrics, score.name)
    best: Chosen | None = None
    for width in (float("nan"),) if model.startswith("linear") else WIDTHS:
        features = _features(options, train, model, width)
        inside = train if features is None else mj.features.transform(train, features, intercept=True)
        problem = mj.Problem(inside, tasks.loss, kind(1.0))
        found = mj.cross_validate(
            problem, mj.grid(kind, lam=[0.5 * lam for lam in LAMBDAS]), key=key, folds=FOLDS, metric=score.name,
            keep_rare=False, tol=options.tol, max_rounds=options.rounds, record_every=10,
        )  # fmt: skip
        value = float(found.mean[found.best])
        if best is None or (value > best.validation if score.maximise else value < best.validation):
            assert found.solution is not None
            there = test if features is None else mj.features.transform(test, features, intercept=True)
            tested = float(metric(found.solution.weights, there))
            residual = float(found.solution.certificate.residual)
            best = Chosen(value, LAMBDAS[found.best], width, tested, residual)
    assert best is not None
    return best


def _features(
    options: argparse.Namespace, train: mj.TaskData, model: str, width: float
) -> Callable[[jax.Array], jax.Array] | None:
    """The map of a model's samples, or none."""
    if model.startswith("linear"):
        return None
    gamma, count = width / _median(train), min(options.landmarks, int(np.sum(train.sizes)))
    key = jax.random.key(options.seed)
    if model.startswith("random"):
        return mj.features.RandomFourier(key, train.num_features, 2 * count, gamma)
    return mj.features.Nystroem(mj.features.GaussianKernel(gamma), mj.features.landmarks(train, count, key))


def _median(data: mj.TaskData) -> float:
    """The median squared distance of two samples."""
    x = np.asarray(mj.features.landmarks(data, min(500, int(np.sum(data.sizes)))), float)
    squared = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    return float(np.median(squared[np.triu_indices(len(x), 1)]))


def _support_vector_machines(
    train: mj.TaskData, test: mj.TaskData, score: Score, folds: np.ndarray
) -> Chosen:  # fmt: skip
    """One of scikit-learn's for every task, with the C and the width that are best for all."""
    median, held = _median(train), range(FOLDS)
    real = np.asarray(train.weight) > 0
    candidates = [(lam, width) for width in WIDTHS for lam in LAMBDAS]
    scores = [
        np.mean([_scored(train, real & (folds != f), train, real & (folds == f), lam, width / median, score)
                 for f in held]) for lam, width in candidates
    ]  # fmt: skip
    best = int(np.nanargmax(scores) if score.maximise else np.nanargmin(scores))
    lam, width = candidates[best]
    tested = _scored(train, real, test, np.asarray(test.weight) > 0, lam, width / median, score)
    return Chosen(float(scores[best]), lam, width, tested, 0.0)


def _scored(
    train: mj.TaskData, fit: np.ndarray, test: mj.TaskData, held: np.ndarray, lam: float, gamma: float, score: Score
) -> float:  # fmt: skip
    """The mean over tasks of the score of machines fitted to some rows, on others."""
    from sklearn.metrics import roc_auc_score
    from sklearn.svm import SVC

    found = []
    for t in range(train.num_tasks):
        x, y, z, labels = (
            np.asarray(a[t])[rows[t]] for a, rows in ((train.x, fit), (train.y, fit), (test.x, held), (test.y, held))
        )
        both = len(set(labels.tolist())) == 2
        if not len(labels) or (score.name == "auc" and not both):
            continue
        if len(set(y.tolist())) < 2:
            decision = np.full(len(labels), y[0] if len(y) else 1.0)
        else:  # lam / 2 |w|^2 + the mean of the losses
            decision = SVC(C=1.0 / (lam * len(y)), gamma=gamma).fit(x, y).decision_function(z)
        found.append(roc_auc_score(labels, decision) if score.name == "auc" else np.mean(decision * labels <= 0))
    return float(np.mean(found))


def table(rows: list[Row], sets: list[tuple[str, Score]]) -> str:
    """Means and standard errors over trials."""
    lines = ["| model | " + " | ".join(f"{name}, {score.title}" for name, score in sets) + " |",
             "|---" * (1 + len(sets)) + "|"]  # fmt: skip
    for model in MODELS:
        cells = []
        for name, _ in sets:
            values = [row.test for row in rows if (row.tasks, row.model) == (name, model)]
            error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            cells.append(f"{np.mean(values):.2f} ({error:.2f})" if values else "")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
