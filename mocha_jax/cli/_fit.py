"""The command ``fit``: one model for all groups, one for each, and related ones, compared and saved."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from mocha_jax._core import check

# Strengths of the regularizers that are tried, the strongest first.
_LAMBDAS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    fit = commands.add_parser("fit", help="train on a CSV file with a column that names groups, compare, save the best")
    fit.add_argument("table", type=Path, help="CSV file")
    fit.add_argument("--label", required=True, help="the column to predict: numbers, or two classes")
    fit.add_argument("--group", required=True, help="the column that names the group of every row")
    fit.add_argument("--features", nargs="+", help="the columns to predict from (default: all others)")
    fit.add_argument("--encode", action="store_true", help="a feature for every value of columns of texts")
    fit.add_argument("--delimiter", help="between fields (default: found)")
    fit.add_argument("--standardize", choices=("pooled", "task", "within", "none"),
                     help="of features (default: within for numbers, which leaves levels of groups free; pooled for "
                          "classes)")  # fmt: skip
    fit.add_argument(
        "--lambdas", nargs="+", type=float, default=_LAMBDAS, help="strengths to try (default %(default)s)"
    )
    fit.add_argument("--folds", type=int, default=5, help="of the cross-validation (default %(default)s)")
    fit.add_argument("--seed", type=int, default=0, help="of the folds (default %(default)s)")
    fit.add_argument(
        "--model", type=Path, default=Path("model.npz"), help="file of the best model (default %(default)s)"
    )
    fit.add_argument("--save", choices=("best", "global", "local", "related"), default="best",
                     help="which model to save (default %(default)s)")  # fmt: skip
    fit.add_argument("--picture", type=Path, default=Path("comparison.png"), help="file (default %(default)s)")
    fit.add_argument("--quiet", action="store_true", help="no progress bars")
    fit.set_defaults(run=fit_table)


def fit_table(options: argparse.Namespace) -> int:
    """Read the table, cross-validate three models on the same folds, report, and save the best."""
    check.seed("fit", options.seed)
    data, binary = _read(options)
    loss: mj.losses.Loss = mj.losses.Logistic() if binary else mj.losses.Squared()
    standardize = options.standardize or ("pooled" if binary else "within")
    lambdas = sorted(options.lambdas, reverse=True)
    print(
        f"{options.table}: {int(data.sizes.sum())} rows, {data.num_tasks} groups, {data.num_slopes} features; "
        f"{'two classes' if binary else 'numbers'} to predict. {options.folds}-fold cross-validation within groups."
    )
    found: dict[str, mj.CrossValidation] = {}
    notes: list[str] = []
    for name, (own, regularizer) in _models(data).items():
        if not options.quiet:
            print(f"{name}:")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            found[name] = mj.cross_validate(
                mj.Problem(own, loss, regularizer(lambdas[0])), mj.grid(regularizer, lam=lambdas),
                key=jax.random.key(options.seed), folds=options.folds, scored_as=data, max_rounds=500,
                standardize=None if standardize == "none" else standardize, progress=not options.quiet,
            )  # fmt: skip
        notes += dict.fromkeys(f"{name}: {each.message}" for each in warned)
    scores = {name: each.task_scores[:, :, each.best].reshape(-1, data.num_tasks) for name, each in found.items()}
    compared = mj.metrics.compare(
        scores, np.asarray(data.to_tasks(data.sizes)), baseline="local", tasks=data.names.tasks
    )
    compared = dataclasses.replace(compared, notes=tuple(notes))
    print(f"\n{'Share of wrong classes' if binary else 'Root mean squared error'} of held-out rows:\n\n{compared}\n")
    best = min(found, key=lambda name: compared.summaries[name].mean) if options.save == "best" else options.save
    _save(best, found[best], options)
    _draw(compared, "share of wrong classes" if binary else "root mean squared error", options.picture)
    return 0


def _models(data: mj.TaskData) -> dict[str, tuple[mj.TaskData, Callable[..., mj.regularizers.Regularizer]]]:
    """One model for all groups, one for each, and models whose relationship is learned."""
    return {
        "global": (data.pooled(), mj.regularizers.Independent),
        "local": (data, mj.regularizers.Independent),
        "related": (data, mj.regularizers.Probabilistic),
    }


def _read(options: argparse.Namespace) -> tuple[mj.TaskData, bool]:
    """Samples of every group, and whether their labels are two classes, then -1 and 1."""
    data = mj.datasets.csv(
        options.table, options.label, options.group, features=options.features, delimiter=options.delimiter,
        categories="encode" if options.encode else "refuse", loss_scaling="task_mean", intercept=True,
    )  # fmt: skip
    values = np.unique(np.asarray(data.y)[np.asarray(data.weight) > 0])
    if len(data.names.classes or ()) > 2:
        raise ValueError(
            f"fit: column {options.label!r} has {len(data.names.classes or ())} classes, and fit knows two; in Python "
            f"multiclass.cross_validate does more."
        )
    if data.names.classes is not None or values.tolist() == [-1.0, 1.0]:
        return data, True
    if values.tolist() == [0.0, 1.0]:
        return data.replace(y=2.0 * data.y - 1.0, names=data.names.replace(classes=(0, 1))), True
    return data, False


def _save(name: str, found: mj.CrossValidation, options: argparse.Namespace) -> None:
    assert found.solution is not None
    model = found.solution.model
    lam = float(np.asarray(found.candidates.lam)[found.best])  # type: ignore[attr-defined]
    about: dict[str, Any] = {"label": options.label, "group": options.group, "kind": name, "lambda": lam}
    dataclasses.replace(model, trained={**model.trained, **about}).save(options.model)
    print(f"Model: {options.model} ({name}, lambda = {lam:g}; {model.trained['message']})")


def _draw(compared: mj.metrics.Comparison, score: str, path: Path) -> None:
    try:
        from mocha_jax import plotting
    except ImportError:
        print("No picture: matplotlib is not installed (pip install 'mocha_jax[plots]').")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plotting.compare(compared, score=score).savefig(path, dpi=150)
    print(f"Picture: {path}")
