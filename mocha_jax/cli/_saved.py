"""The commands of saved models: ``predict``, ``compare`` and ``inspect``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

import mocha_jax as mj
from mocha_jax._files import atomic
from mocha_jax.cli import _arguments, _table
from mocha_jax.datasets import Table
from mocha_jax.datasets._column_types import decimal_commas, no_categories


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
        _table.add_to(command, group="as in training")
    inspect = commands.add_parser("inspect", help="print what a saved model is, and how it was trained")
    inspect.add_argument("model", type=Path, help="file that fit saved")
    inspect.add_argument("--task", help="print the weights of this group")
    inspect.set_defaults(run=inspect_model)


def predict_table(options: argparse.Namespace) -> int:
    """Write the group and the prediction of every row."""
    if options.out is not None:
        _arguments.check_outputs({"--out": options.out}, [options.model, options.table], force=True)
    model = _load(options.model)
    table, x, groups = _rows(model, options, None if options.unseen == "mean" else model.names.tasks)
    task = None if model.names.tasks is None else groups
    if options.probabilities:
        if not model.logistic:
            raise ValueError(f"--probabilities: needs a model of two classes, and {options.model} is none.")
        probabilities = model.predict_proba(x, task, unseen=options.unseen)
        classes = model.names.classes or (-1, 1)
        heads, columns = (
            [f"probability of {name}" for name in classes],
            [probabilities[:, k] for k in range(probabilities.shape[1])],
        )
    else:
        heads, columns = ["prediction"], [model.predict(x, task, unseen=options.unseen)]
    group = options.group or model.trained.get("group", "group")
    rows = zip(table.texts(group), *(column.tolist() for column in columns), strict=True)
    if options.out is None:
        _write(sys.stdout, [group, *heads], rows)
    else:
        text = io.StringIO()
        _write(text, [group, *heads], rows)
        atomic.write(options.out, text.getvalue().encode())
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
            raise ValueError("--label: say which column holds the labels, for the model does not know.")
        named = model.names.classes is not None and isinstance(model.names.classes[0], str)
        table, x, groups = _rows(model, options, model.names.tasks, [label], (label,) if named else ())
        kinds.add(kind := "error rate" if set(model.decides) == {"sign"} else "root mean squared error")
        predicted = model.predict(x, None if model.names.tasks is None else groups)
        truth = np.asarray(table.texts(label)) if named else table.numbers([label])[:, 0]
        tasks, task_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        wrong = (predicted != truth) if kind == "error rate" else (predicted - truth) ** 2
        means = np.bincount(task_of_row, weights=wrong.astype(float)) / sizes
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
    place = {str(name): t for t, name in enumerate(model.tasks)}
    if options.task not in (None, *place):
        raise ValueError(f"--task: must be one of the model's groups, got {options.task!r}.")
    print(f"{options.model}: {model}")
    for name, value in model.trained.items():
        several = ", ".join(f"{one} {number:g}" for one, number in value.items()) if isinstance(value, dict) else value
        print(f"  {name}: {several}")
    for what, names in (("groups", model.tasks), ("features", model.names.features), ("classes", model.names.classes)):
        if names is not None:
            print(f"  {what} ({len(names)}): {', '.join(map(str, names[:12]))}{', ...' if len(names) > 12 else ''}")
    if options.task is not None:
        t = place[options.task]
        features = model.names.features or tuple(f"feature {j}" for j in range(model.weights.shape[1]))
        width = max(map(len, features))
        for name, weight in zip(features, model.weights[t], strict=True):
            print(f"  {name:<{width}}  {weight: .6g}")
        print(f"  {'intercept':<{width}}  {model.intercept[t]: .6g}")
    return 0


def _load(path: Path) -> mj.LinearModel:
    _arguments.check_inputs(path)
    model = mj.load_model(path)
    if not isinstance(model, mj.LinearModel):
        raise ValueError(f"{path}: this command knows models of numbers and of two classes, no {type(model).__name__}.")
    return model


def _rows(
    model: mj.LinearModel,
    options: argparse.Namespace,
    known_groups: tuple[object, ...] | None,
    label: Sequence[str] = (),
    texts: tuple[str, ...] = (),
) -> tuple[Table, np.ndarray, np.ndarray]:
    """The table, its samples in the model's order, and the group of every row."""
    group = options.group or model.trained.get("group")
    if group is None:
        raise ValueError("--group: say which column names the groups, for the model does not know.")
    features = model.names.features
    if features is None:
        raise ValueError("this model has no names of features, so that columns cannot be found.")
    encoded = tuple(name for name in features if "=" in name)
    table = _table.opened(options, (group, *texts, *encoded))
    _arguments.check_columns(table, group=[group], label=label)
    medians = model.trained.get("medians", {})
    table = _table.with_columns(table, {
        name: np.where(np.isnan(column), medians[name], column)
        for name in table.columns
        if name in medians and (column := table.column(name)).dtype.kind == "f"
    })  # fmt: skip
    cells = _table.lacking(table, [group, *(name for name in table.columns if name in (*features, *label))])
    if cells:
        why = "" if medians else ", or train with --impute median"
        raise ValueError(f"{_table.counted(table, cells)}; fill them in, or leave these rows out{why}.")
    for name in (*features, *(() if texts else label)):
        if name in table.columns and table.column(name).dtype.kind == "O" and decimal_commas(table.texts(name)):
            raise ValueError(
                f"{table.path}, column {name!r}: {no_categories(table.texts(name))}; --decimal-comma reads them."
            )
    return table, table.numbers(features), _groups(table, group, known_groups, options)


def _groups(
    table: Table, group: str, known_groups: tuple[object, ...] | None, options: argparse.Namespace
) -> np.ndarray:
    """The group of every row."""
    try:
        return table.names(group, known_groups)
    except ValueError as error:
        if not hasattr(options, "unseen"):
            raise
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; --unseen mean predicts by the mean of all groups' weights.") from error


def _write(file: TextIO, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
