"""The commands of saved models: ``predict``, ``compare`` and ``inspect``."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

import mocha_jax as mj
from mocha_jax.datasets import Table


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands and their options."""
    predict = commands.add_parser("predict", help="predict the rows of a CSV file by a saved model")
    predict.add_argument("model", type=Path, help="file that fit saved")
    predict.add_argument("--unseen", choices=("error", "mean"), default="error",
                         help="what to do with groups that the model does not know (default %(default)s)")  # fmt: skip
    predict.add_argument("--probabilities", action="store_true", help="of both classes, in place of the likelier one")
    predict.add_argument("--out", type=Path, help="CSV file (default: printed)")
    predict.set_defaults(run=predict_table)
    compare = commands.add_parser("compare", help="score saved models on the rows of a CSV file with labels")
    compare.add_argument("models", type=Path, nargs="+", help="files that fit saved; the first is the baseline")
    compare.add_argument("--label", help="the column to predict (default: as in training)")
    compare.set_defaults(run=compare_models)
    for command in (predict, compare):
        command.add_argument("table", type=Path, help="CSV file")
        command.add_argument("--group", help="the column that names the group of every row (default: as in training)")
        command.add_argument("--delimiter", help="between fields (default: found)")
    inspect = commands.add_parser("inspect", help="print what a saved model is, and how it was trained")
    inspect.add_argument("model", type=Path, help="file that fit saved")
    inspect.add_argument("--task", help="print the weights of this group")
    inspect.set_defaults(run=inspect_model)


def predict_table(options: argparse.Namespace) -> int:
    """Write the group and the prediction of every row."""
    model = _load(options.model)
    table, x, groups = _rows(model, options, None if options.unseen == "mean" else model.names.tasks)
    task = None if model.names.tasks is None else groups
    if options.probabilities:
        if not model.logistic:
            raise ValueError(f"predict: --probabilities needs a model of two classes, and {options.model} is none.")
        found = model.predict_proba(x, task, unseen=options.unseen)
        classes = model.names.classes or (-1, 1)
        heads, columns = [f"probability of {name}" for name in classes], [found[:, k] for k in range(found.shape[1])]
    else:
        heads, columns = ["prediction"], [model.predict(x, task, unseen=options.unseen)]
    group = options.group or model.trained.get("group", "group")
    rows = zip(table.texts(group), *(column.tolist() for column in columns), strict=True)
    if options.out is None:
        _write(sys.stdout, [group, *heads], rows)
    else:
        with open(options.out, "w", newline="", encoding="utf-8") as file:
            _write(file, [group, *heads], rows)
        print(f"{len(table)} predictions: {options.out}")
    return 0


def compare_models(options: argparse.Namespace) -> int:
    """Score every model on every group."""
    scores, kinds, tasks, sizes = {}, set(), None, None
    for path in options.models:
        if str(path) in scores:
            raise ValueError(f"compare: {path} is named twice.")
        model = _load(path)
        label = options.label or model.trained.get("label")
        if label is None:
            raise ValueError("compare: say which column holds the labels, --label NAME.")
        named = (label,) if model.names.classes is not None and isinstance(model.names.classes[0], str) else ()
        table, x, groups = _rows(model, options, model.names.tasks, named)
        kinds.add(kind := "error rate" if set(model.decides) == {"sign"} else "root mean squared error")
        predicted = model.predict(x, None if model.names.tasks is None else groups)
        truth = np.asarray(table.texts(label)) if named else table.numbers([label])[:, 0]
        tasks, where, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        wrong = (predicted != truth) if kind == "error rate" else (predicted - truth) ** 2
        means = np.bincount(where, weights=wrong.astype(float)) / sizes
        scores[str(path)] = means if kind == "error rate" else np.sqrt(means)
    if len(kinds) > 1:
        raise ValueError("compare: some of these models predict classes and some numbers.")
    baseline = str(options.models[0]) if len(scores) > 1 else None
    print(f"{kinds.pop()} on {options.table}:\n")
    print(mj.metrics.compare(scores, sizes, baseline=baseline, tasks=None if tasks is None else tasks.tolist()))
    return 0


def inspect_model(options: argparse.Namespace) -> int:
    """Print names and how the model was trained; of one group its weights."""
    model = _load(options.model)
    print(f"{options.model}: {model}")
    for name, value in model.trained.items():
        print(f"  {name}: {value}")
    for what, names in (("groups", model.tasks), ("features", model.names.features), ("classes", model.names.classes)):
        if names is not None:
            print(f"  {what} ({len(names)}): {', '.join(map(str, names[:12]))}{', ...' if len(names) > 12 else ''}")
    if options.task is not None:
        place = {str(name): t for t, name in enumerate(model.tasks)}
        if options.task not in place:
            raise ValueError(f"inspect: task must be one of the model's groups, got {options.task!r}.")
        t = place[options.task]
        features = model.names.features or tuple(f"feature {j}" for j in range(model.weights.shape[1]))
        width = max(map(len, features))
        for name, weight in zip(features, model.weights[t], strict=True):
            print(f"  {name:<{width}}  {weight: .6g}")
        print(f"  {'intercept':<{width}}  {model.intercept[t]: .6g}")
    return 0


def _load(path: Path) -> mj.LinearModel:
    model = mj.load_model(path)
    if not isinstance(model, mj.LinearModel):
        raise ValueError(f"{path}: this command knows models of numbers and of two classes, no {type(model).__name__}.")
    return model


def _rows(
    model: mj.LinearModel, options: argparse.Namespace, known: tuple[object, ...] | None, texts: tuple[str, ...] = ()
) -> tuple[Table, np.ndarray, np.ndarray]:
    """The table, its samples in the model's order, and the group of every row."""
    group = options.group or model.trained.get("group")
    if group is None:
        raise ValueError("say which column names the groups, --group NAME.")
    if model.names.features is None:
        raise ValueError("this model has no names of features, so that columns cannot be found.")
    encoded = tuple(name for name in model.names.features if "=" in name)
    table = mj.datasets.read_table(options.table, delimiter=options.delimiter, texts=(group, *texts, *encoded))
    return table, table.numbers(model.names.features), table.names(group, known)


def _write(file: object, heads: list[str], rows: object) -> None:
    writer = csv.writer(file, lineterminator="\n")  # type: ignore[arg-type]
    writer.writerow(heads)
    writer.writerows(rows)  # type: ignore[arg-type]
