"""Which model to begin with: ``python -m experiments.defaults --data school.npz landmine_full.npz vehicle.npz``.

Models of every task alone, near their mean (11), with a learned covariance (14), and with both (`MeanCovariance`), each
with its numbers chosen by cross-validation within the tasks (the grids that the estimators and the command line use,
prepared as they do), on real task sets and on seven kinds of made ones, with few and many training rows a task. The
error on held-out rows (RMSE of numbers, one minus the AUC of two classes, the share of wrong ones of several) is a mean
over tasks. A model is *near the best* of a set where the best one beats it by no more
than a standard error of their difference, over tasks and trials. A CSV keeps every trial; a run that was interrupted
goes on.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj
from experiments.rows import append, read
from mocha_jax._selection.preparation import FREE_INTERCEPT, frees_intercept, usual
from mocha_jax.regularizers._named import STRENGTHS, maker

MODELS = {"local": "independent", "(11)": "mean", "(14)": "probabilistic", "both": "mean_covariance"}
ROWS = 2, 5, 20, 100, 500  # for training, of every task
TASKS, FEATURES, HELD_OUT, FOLDS = 20, 10, 100, 5
LEAST = 10  # held-out rows of a task that is scored
CLIENTS = 20  # of the digits

Draw = Callable[[np.random.Generator], np.ndarray]


class Row(NamedTuple):
    """One model in one trial; the CSV's columns."""

    tasks: str
    rows: int
    trial: int
    model: str
    errors: str  # of every task
    seconds: float  # of this process
    chosen: str


class Split(NamedTuple):
    """Rows of every task for training, and held out."""

    xs: list[np.ndarray]
    ys: list[np.ndarray]
    test_xs: list[np.ndarray]
    test_ys: list[np.ndarray]


Splitter = Callable[..., Split | None]  # of a generator of random numbers, and rows for training


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.defaults", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files of flat X, y and task (or subject)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="for training, of every task")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of task sets; default all")
    parser.add_argument("--out", type=Path, default=Path("experiments/defaults"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    done = {(row.tasks, row.rows, row.trial, row.model) for row in read(path, Row)}
    for name, kind, count, trial, part in trials(options.data, options.only, options.rows, options.trials):
        for model in MODELS:
            if (name, count, trial, model) not in done:
                began = time.process_time()
                errors, chosen = trained(part, model, kind)
                row = Row(name, count, trial, model, " ".join(f"{e:.6g}" for e in errors),
                          time.process_time() - began, chosen)  # fmt: skip
                append(path, row)
                print(f"{name:>14} {count:4d} rows, trial {trial} {model:>6}: {np.nanmean(errors):8.4f} "
                      f"{row.seconds:6.1f} s {chosen}", flush=True)  # fmt: skip
    print("\n" + table(read(path, Row)))


def trained(part: Split, name: str, kind: str) -> tuple[np.ndarray, str]:
    """Choose a model's numbers by cross-validation, train it, and return the error of every task."""
    loss: mj.losses.Loss = mj.losses.Squared() if kind == "numbers" else mj.losses.Logistic()
    by, m = usual(loss), len(part.xs)
    intercept = 0.0 if frees_intercept(by, loss) else FREE_INTERCEPT
    part = Split(*([a.astype(np.float32) for a in each] for each in part))
    train = mj.pack_tasks(part.xs, part.ys, loss_scaling="task_mean", intercept=intercept)
    test = mj.pack_tasks(part.test_xs, part.test_ys, intercept=True)
    make, tried = maker(MODELS[name], m)
    candidates = mj.grid(make, lam=STRENGTHS, **tried)
    folds = min(FOLDS, max(map(len, part.ys)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if kind == "classes":
            one = jax.tree.map(lambda leaf: leaf[0], candidates)
            found = mj.multiclass.cross_validate(
                train, lambda d: mj.Problem(d, loss, one), candidates, classes=10, folds=folds,
                standardize=by,
            )  # fmt: skip
            assert found.solution is not None
            errors = mj.multiclass.error_rate(found.solution.model, test, per_task=True)
        else:
            found = mj.cross_validate(
                mj.Problem(train, loss, jax.tree.map(lambda leaf: leaf[0], candidates)), candidates, folds=folds,
                standardize=by, metric="rmse" if kind == "numbers" else "auc",
            )  # fmt: skip
            assert found.solution is not None
            model = found.solution.model
            if kind == "numbers":
                errors = mj.metrics.rmse(model, test, per_task=True)
            else:  # of classes of which one may be rare
                errors = 1.0 - mj.metrics.auc(model, test, per_task=True)
    return np.asarray(errors, float), repr(jax.tree.map(lambda leaf: float(f"{float(leaf):.3g}"), found.regularizer))


def trials(
    paths: list[Path], only: list[str] | None, rows: list[int], count: int
) -> Iterator[tuple[str, str, int, int, Split]]:
    """Name, what labels are, rows for training, number and division of every trial; all names where none is given."""
    for name, split, kind in sets(paths):
        if only and name not in only:
            continue
        for each in rows:
            jax.clear_caches()  # a process holds only so many programs
            for trial in range(count):
                part = split(np.random.default_rng([trial, each]), each)
                if part is not None:
                    yield name, kind, each, trial, part


def sets(paths: list[Path]) -> Iterator[tuple[str, Splitter, str]]:
    """Names, how rows are divided, and what labels are: numbers, two classes or several."""
    for name, draw in made().items():
        yield name, partial(_made, draw=draw), "numbers"
    yield "levels", _levels, "numbers"
    yield "digits", _digits, "classes"
    for path in paths:
        file = np.load(path, allow_pickle=False)
        activities = "subject" in file.files
        task, y = file["subject" if activities else "task"], file["y"]
        y = np.where(y == 4, 1.0, -1.0) if activities else y  # sitting against the rest
        x, binary = file["X"].astype(float), set(np.unique(y).tolist()) <= {-1.0, 1.0}
        parts = [(x[task == t], y[task == t].astype(float)) for t in np.unique(task)]
        yield path.stem, partial(_sampled, parts=parts), "two" if binary else "numbers"


def made() -> dict[str, Draw]:
    """Weights of every task ``[m, d]``, of several kinds."""
    m, d = TASKS, FEATURES
    cluster = np.arange(m) * 4 // m
    return {
        "one model": lambda rng: np.tile(rng.normal(size=d), (m, 1)),
        "near a mean": lambda rng: rng.normal(size=d) + 0.5 * rng.normal(size=(m, d)),
        "unrelated": lambda rng: rng.normal(size=(m, d)),
        "clusters": lambda rng: rng.normal(size=(4, d))[cluster] + 0.3 * rng.normal(size=(m, d)),
        "low rank": lambda rng: rng.normal(size=(m, 2)) @ rng.normal(size=(2, d)),
        "mean, low rank": lambda rng: rng.normal(size=d) + rng.normal(size=(m, 1)) @ rng.normal(size=(1, d)),
    }


def _made(rng: np.random.Generator, n: int, draw: Draw) -> Split:
    weights, level = draw(rng), 3.0 * rng.normal(size=TASKS)

    def rows(count: int, t: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, FEATURES))
        return x, x @ weights[t] + level[t] + 2.0 * rng.normal(size=count)

    train, test = ([rows(count, t) for t in range(TASKS)] for count in (n, HELD_OUT))
    return Split(*map(list, zip(*train, strict=True)), *map(list, zip(*test, strict=True)))


def _levels(rng: np.random.Generator, n: int) -> Split:
    """Patients with levels of their own and slopes that matter little, on features that hang together."""
    m, d = 42, 16
    mixing, center = rng.normal(size=(m, 4, d)), 2.0 * rng.normal(size=(m, d))
    slope = 0.25 * rng.normal(size=(m, d)) * (rng.random((m, d)) < 0.4)
    level = 29.0 + 11.0 * rng.normal(size=m)

    def rows(count: int, t: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, 4)) @ mixing[t] + 0.5 * rng.normal(size=(count, d)) + center[t]
        return x, level[t] + (x - center[t]) @ slope[t] + 2.3 * rng.normal(size=count)

    train, test = ([rows(count, t) for t in range(m)] for count in (n, HELD_OUT))
    return Split(*map(list, zip(*train, strict=True)), *map(list, zip(*test, strict=True)))


def _sampled(rng: np.random.Generator, n: int, parts: list[tuple[np.ndarray, np.ndarray]]) -> Split | None:
    """So many rows of every task for training; the task has enough left, or as many as leave a quarter."""
    train, test = [], []
    for x, y in parts:
        order = rng.permutation(len(y))
        count = min(n, len(y) - max(LEAST, len(y) // 4))
        if count < 2:
            continue
        train.append((x[order[:count]], y[order[:count]]))
        test.append((x[order[count:]], y[order[count:]]))
    if len(train) < 2 or max(len(y) for _, y in train) < n:
        return None
    return Split(*map(list, zip(*train, strict=True)), *map(list, zip(*test, strict=True)))


def _digits(rng: np.random.Generator, n: int) -> Split | None:
    """scikit-learn's digits, dealt to clients with skewed shares of the classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    parts = mj.partition.dirichlet(jax.random.key(int(rng.integers(2**31))), y, CLIENTS, 0.3, least=30)
    return _sampled(rng, n, [(x[part] / 16.0, y[part].astype(float)) for part in parts])


def table(rows: list[Row]) -> str:
    """Errors of every set, the best marked, and how often each model was near the best."""
    cells: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    seconds: dict[str, list[float]] = {model: [] for model in MODELS}
    for row in sorted(rows, key=lambda row: row.trial):
        errors = np.array(row.errors.split(), float)
        known = cells.setdefault((row.tasks, row.rows), {})
        known[row.model] = np.concatenate([known.get(row.model, np.zeros(0)), errors])
        seconds[row.model].append(row.seconds)
    lines = ["| tasks | rows | " + " | ".join(MODELS) + " |", "|---|---:|" + "---:|" * len(MODELS)]
    near, count = dict.fromkeys(MODELS, 0), 0
    excess: dict[str, list[float]] = {model: [] for model in MODELS}
    for (name, n), found in cells.items():
        if len(found) < len(MODELS) or len({len(each) for each in found.values()}) > 1:
            continue
        best = min(found, key=lambda model: np.nanmean(found[model]))
        count, shown = count + 1, []
        for model in MODELS:
            off = found[model] - found[best]
            off = off[np.isfinite(off)]
            close = off.mean() <= off.std() / len(off) ** 0.5
            near[model] += close
            excess[model].append(np.nanmean(found[model]) / max(np.nanmean(found[best]), 1e-9) - 1.0)
            value = f"{np.nanmean(found[model]):.4g}"
            shown.append(f"**{value}**" if close else value)
        lines.append(f"| {name} | {n} | " + " | ".join(shown) + " |")
    lines.append(f"| near the best, of {count} | | " + " | ".join(str(near[model]) for model in MODELS) + " |")
    lines.append("| worse than the best, mean | | " + " | ".join(f"{np.mean(excess[m]):.1%}" for m in MODELS) + " |")
    lines.append("| worse than the best, at most | | " + " | ".join(f"{np.max(excess[m]):.0%}" for m in MODELS) + " |")
    lines.append("| CPU s a search, median | | " + " | ".join(f"{np.median(seconds[m]):.2g}" for m in MODELS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
