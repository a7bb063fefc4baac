"""The command ``fit``: one model for all groups, one for each, and related ones, compared and saved."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

import mocha_jax as mj
from mocha_jax._data.scaling import Standardize
from mocha_jax._selection.preparation import FREE_INTERCEPT, usual
from mocha_jax.cli import _options, _picture, _table
from mocha_jax.datasets import Table
from mocha_jax.datasets._csv import packed
from mocha_jax.datasets._fields import is_number
from mocha_jax.datasets._kinds import decimal_commas, no_categories
from mocha_jax.regularizers._named import NAMED, STRENGTHS, maker

# Three that have names of their own on the command line; the others are called as they are in Python.
_ALIASES = {"global": "pooled", "local": "independent", "related": "mean_covariance"}
_MODELS = (*_ALIASES, *(name for name in NAMED if name not in _ALIASES.values()))
_COMPARED = ("global", "local", "mean", "related")

# How exact a solve is, and its rounds at most.
_TOL, _ROUNDS = 1e-3, 500


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    fit = commands.add_parser("fit", help="train on a CSV file with a column that names groups, compare, save the best")
    _table.add_to(fit)
    fit.add_argument("--label", required=True, help="the column to predict: numbers, or two classes")
    fit.add_argument("--features", nargs="+", metavar="COLUMN", help="columns to predict from (default: all others)")
    fit.add_argument("--exclude", nargs="+", metavar="COLUMN", default=[], help="columns to leave out")
    fit.add_argument("--encode", action="store_true", help="a feature for every value of columns of texts")
    fit.add_argument("--categories", nargs="+", metavar="COLUMN", default=[],
                     help="a feature for every value of these columns, whatever they hold")  # fmt: skip
    fit.add_argument("--drop-missing", action="store_true", help="leave out rows that lack a value")
    fit.add_argument("--impute", choices=("median",),
                     help="fill in numbers: the median of the rows that a model is trained on")  # fmt: skip
    fit.add_argument("--models", nargs="+", choices=_MODELS, default=_COMPARED, metavar="MODEL",
                     help=f"what to compare, of {', '.join(_MODELS)} (default: {' '.join(_COMPARED)})")  # fmt: skip
    fit.add_argument("--standardize", choices=("pooled", "task", "within", "none"),
                     help="of features (default: within for numbers, which leaves levels of groups free; pooled for "
                          "classes)")  # fmt: skip
    fit.add_argument("--lambdas", nargs="+", type=_options.number, default=STRENGTHS, metavar="NUMBER",
                     help="strengths to try (default: 10 1 0.1 0.01 0.001 0.0001)")  # fmt: skip
    fit.add_argument("--folds", type=_options.integer(2), default=5, help="of cross-validation (default: %(default)s)")
    fit.add_argument("--seed", type=_options.integer(0), default=0, help="of the folds (default: %(default)s)")
    fit.add_argument("--model", type=Path, default=Path("model.npz"), help="file of the model (default: %(default)s)")
    fit.add_argument("--save", choices=("best", *_MODELS), default="best", metavar="MODEL",
                     help="which model to save (default: %(default)s)")  # fmt: skip
    fit.add_argument("--picture", type=Path, default=Path("comparison.png"), help="file (default: %(default)s)")
    fit.add_argument("--force", action="store_true", help="replace files that are there")
    fit.add_argument("--quiet", action="store_true", help="no progress bars")
    fit.set_defaults(run=fit_table)


def fit_table(options: argparse.Namespace) -> int:
    """Read the table, cross-validate the models on the same folds, report, and save the best."""
    names = tuple(dict.fromkeys(options.models))
    if options.save not in ("best", *names):
        raise ValueError(f"--save: {options.save} is not among the --models {' '.join(names)}.")
    _options.check_inputs(options.table)
    outputs = {"--model": options.model}
    if _picture.installed():
        _picture.check_form("--picture", options.picture)
        outputs["--picture"] = options.picture
    _options.check_outputs(outputs, [options.table], options.force)
    samples = _read(options)
    data, binary = samples.data, samples.binary
    print(
        f"{options.table}: {int(data.sizes.sum())} rows, {data.num_tasks} groups, {data.num_slopes} features; "
        f"{'two classes' if binary else 'numbers'} to predict. {options.folds}-fold cross-validation within groups."
    )
    by = options.standardize or usual(mj.losses.Logistic() if binary else mj.losses.Squared())
    prepare = _Preparation(by, not binary, samples.absent)
    searches: dict[str, _Search] = {}
    notes: list[str] = []
    for name in names:
        if not options.quiet:
            print(f"{name}:")
        with _noted(name, notes):
            searches[name] = _searched(name, samples, prepare, options)
    scores = {name: each.found.task_scores[:, :, each.found.best].reshape(-1, data.num_tasks)
              for name, each in searches.items()}  # fmt: skip
    compared = mj.metrics.compare(
        scores, np.asarray(data.to_tasks(data.sizes)), baseline=_baseline(names), tasks=data.names.tasks
    )
    best = min(names, key=lambda name: compared.summaries[name].mean) if options.save == "best" else options.save
    model = _refitted(searches[best], prepare, options.seed)
    width = str(compared).index("\n")
    lines = [textwrap.fill(note, width, subsequent_indent="  ") for note in dict.fromkeys(notes)]
    compared = dataclasses.replace(compared, notes=tuple(lines))
    print(f"\n{'Share of wrong classes' if binary else 'Root mean squared error'} of held-out rows:\n\n{compared}\n")
    _save(best, searches[best], model, samples.medians, options)
    _draw(compared, "share of wrong classes" if binary else "root mean squared error", options.picture)
    return 0


class _Samples(NamedTuple):
    data: mj.TaskData
    binary: bool
    absent: np.ndarray | None  # [m, n, d] where a number is missing, of which the data has a 0
    medians: dict[str, float]  # by features of numbers, with --impute


class _Search(NamedTuple):
    data: mj.TaskData
    loss: mj.losses.Loss
    axes: dict[str, Sequence[float]]  # what is tried of every number
    found: mj.CrossValidation

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the best candidate."""
        places = np.unravel_index(self.found.best, [len(values) for values in self.axes.values()])
        return {name: float(values[int(i)]) for (name, values), i in zip(self.axes.items(), places, strict=True)}


@dataclasses.dataclass(frozen=True, eq=False)
class _Preparation:
    """Samples whose missing numbers are medians, and whose features are standardised: all by those for training."""

    by: str
    labels: bool
    absent: np.ndarray | None

    def __call__(self, training: mj.TaskData) -> Callable[[mj.TaskData], mj.TaskData]:
        scale = Standardize(self.by, self.labels)(self.filled(training, training)) if self.by != "none" else None

        def apply(data: mj.TaskData) -> mj.TaskData:
            filled = self.filled(data, training)
            return filled if scale is None else scale(filled)

        return apply

    def once(self, data: mj.TaskData) -> mj.TaskData:
        """Prepare samples by themselves, which remember how they were standardised."""
        filled = self.filled(data, data)
        return filled if self.by == "none" else filled.standardized(self.by, labels=self.labels)

    def filled(self, data: mj.TaskData, training: mj.TaskData) -> mj.TaskData:
        """The samples with the median of a feature, over those for training, where it is missing."""
        if self.absent is None:
            return data
        d = training.num_slopes
        known = (training.weight > 0)[..., None] & ~self.absent
        medians = jnp.nanmedian(jnp.where(known, training.x[..., :d], jnp.nan), axis=(0, 1), keepdims=True)
        medians = jnp.where(jnp.isnan(medians), 0.0, medians)  # where no sample for training has a value
        x = jnp.where(self.absent & (data.weight > 0)[..., None], medians, data.x[..., :d])
        return data.replace(x=jnp.concatenate([x, data.x[..., d:]], axis=2))


def _read(options: argparse.Namespace) -> _Samples:
    """Samples of every group, with the labels of two classes as -1 and 1."""
    table = _table.opened(options, (options.group, *options.categories))
    columns = _columns(table, options)
    numbers = [name for name in columns if table.column(name).dtype.kind == "f"]
    table, missing = _without_missing(table, columns, numbers, options)
    _check_groups(table, options)
    for name in columns:
        if name not in numbers and name not in options.categories:
            _check_categories(table, name, options.encode)
    _check_label(table, options.label)
    medians = {name: float(np.nanmedian(table.column(name))) for name in numbers} if options.impute else {}
    table = _table.with_columns(table, {name: np.where(missing[name], 0.0, table.column(name)) for name in missing})
    dtype = canonicalize_dtype(np.float64)
    data = packed(
        table, options.label, options.group, columns, [name for name in columns if name not in numbers],
        loss_scaling="task_mean", intercept=FREE_INTERCEPT, dtype=dtype,
    )  # fmt: skip
    absent = None
    if missing:  # in the places of the samples
        none = np.zeros(len(table), bool)
        marks = np.stack([missing.get(name, none) for name in data.names.features or ()], axis=1)
        groups = table.names(options.group)
        absent = np.asarray(mj.pack_tasks(marks.astype(dtype), none.astype(dtype), groups, dtype=dtype).x) > 0
    return _Samples(*_two_classes(data), absent, medians)


def _columns(table: Table, options: argparse.Namespace) -> list[str]:
    """The columns to predict from."""
    label, group = options.label, options.group
    if label == group:
        raise ValueError(f"--label and --group must be two columns, got {label!r} for both.")
    _options.check_columns(
        table, label=[label], group=[group], features=options.features or [], exclude=options.exclude,
        categories=options.categories,
    )  # fmt: skip
    for option in ("features", "categories"):
        if taken := [name for name in getattr(options, option) or () if name in (label, group)]:
            raise ValueError(
                f"--{option}: {taken[0]!r} is the column of the {'label' if taken[0] == label else 'groups'}."
            )
    left_out = (label, group, *options.exclude)
    columns = [name for name in dict.fromkeys(options.features or table.columns) if name not in left_out]
    if not columns:
        raise ValueError(f"{table.path}: there is no column left to predict from, beside the label and the group.")
    if "" in columns:
        raise ValueError(
            f"{table.path}: column {table.columns.index('') + 1} has no name, as row numbers have none; --exclude '' "
            f"leaves it out."
        )
    return columns


def _without_missing(
    table: Table, columns: list[str], numbers: list[str], options: argparse.Namespace
) -> tuple[Table, dict[str, np.ndarray]]:
    """The rows that have all values but those to impute, and where these are missing."""
    cells = _table.lacking(table, [options.label, options.group, *columns])
    imputed = {name: cells.pop(name) for name in numbers if options.impute and name in cells}
    if cells and not options.drop_missing:
        ways = ["--drop-missing leaves these rows out"]
        if any(name in numbers for name in cells):
            ways.append("--impute median fills in numbers")
        raise ValueError(f"{_table.counted(table, cells)}; {', '.join(ways)}.")
    if cells:
        lost = np.any(list(cells.values()), axis=0)
        table, imputed = _table.with_rows(table, ~lost), {name: cell[~lost] for name, cell in imputed.items()}
        if lost.all():
            raise ValueError(f"{table.path}: no row has all its values; --exclude leaves columns out.")
        print(f"{int(lost.sum())} rows that lack a value are left out.")
    if empty := [name for name, cell in imputed.items() if cell.all()]:
        raise ValueError(f"{table.path}, column {empty[0]!r}: has no value at all; --exclude {empty[0]} leaves it out.")
    return table, {name: cell for name, cell in imputed.items() if cell.any()}


def _check_groups(table: Table, options: argparse.Namespace) -> None:
    """Refuse groups of hardly a row each, and more folds than any group has rows."""
    sizes = Counter(table.texts(options.group))
    if 2 * len(sizes) > len(table):
        raise ValueError(
            f"--group: column {options.group!r} has {len(sizes)} different values in {len(table)} rows, less than two "
            f"rows for each; name a column whose values repeat, such as that of schools or machines."
        )
    if options.folds > (largest := max(sizes.values())):
        raise ValueError(f"--folds: must be at most {largest}, the rows of the largest group, got {options.folds}.")


def _check_categories(table: Table, name: str, encode: bool) -> None:
    """Refuse a column of texts that should not become a feature for every value, by what can be done about it."""
    texts = table.texts(name)
    what, leave = no_categories(texts), f"--exclude {name} leaves it out"
    if decimal_commas(texts):
        raise ValueError(f"{table.path}, column {name!r}: {what}; --decimal-comma reads them.")
    if not table.holds_texts(name):
        row = next(row for row, text in enumerate(texts) if not is_number(text))
        raise ValueError(
            f"{table.path}, line {table.lines[row]}, column {name!r}: {texts[row]!r} is no number; {leave}, "
            f"--categories {name} makes a feature of every value."
        )
    if what is not None:
        raise ValueError(
            f"{table.path}, column {name!r}: {what}; {leave}, --categories {name} encodes it all the same."
        )
    if not encode:
        raise ValueError(
            f"{table.path}, column {name!r}: holds texts such as {texts[0]!r}; --encode makes a feature of every "
            f"value, {leave}."
        )


def _check_label(table: Table, label: str) -> None:
    """Refuse texts that are not the names of two classes."""
    if not table.holds_texts(label):
        return
    texts = table.texts(label)
    if decimal_commas(texts):
        raise ValueError(f"{table.path}, column {label!r}: {no_categories(texts)}; --decimal-comma reads them.")
    if (count := len(set(texts))) != 2:
        raise ValueError(
            f"--label: column {label!r} holds {count} different texts, and fit predicts numbers or two classes; "
            f"in Python multiclass.cross_validate knows more."
        )


def _two_classes(data: mj.TaskData) -> tuple[mj.TaskData, bool]:
    """The data, and whether its labels are two classes, then -1 and 1."""
    values = np.unique(np.asarray(data.y)[np.asarray(data.weight) > 0])
    if data.names.classes is not None or values.tolist() == [-1.0, 1.0]:
        return data, True
    if values.tolist() == [0.0, 1.0]:
        return data.replace(y=2.0 * data.y - 1.0, names=data.names.replace(classes=(0, 1))), True
    return data, False


def _searched(name: str, samples: _Samples, prepare: _Preparation, options: argparse.Namespace) -> _Search:
    """Cross-validate a model of some name."""
    data = samples.data.pooled() if name == "global" else samples.data
    loss: mj.losses.Loss = mj.losses.Logistic() if samples.binary else mj.losses.Squared()
    make, tried = maker(_ALIASES.get(name, name), data.num_tasks)
    axes = {"lam": sorted(options.lambdas, reverse=True), **tried}
    named = None if prepare.by == "none" else prepare.by
    found = mj.cross_validate(
        mj.Problem(data, loss, make(lam=axes["lam"][0])), mj.grid(make, **axes), key=jax.random.key(options.seed),
        folds=options.folds, scored_as=samples.data, max_rounds=_ROUNDS, tol=_TOL, refit=False,
        standardize=named if samples.absent is None else prepare, progress=not options.quiet,
    )  # fmt: skip
    return _Search(data, loss, axes, found)


def _refitted(search: _Search, prepare: _Preparation, seed: int) -> Any:
    """Solve for all rows, through the candidates up to the best one, and return the model."""
    data, algorithm, state = prepare.once(search.data), mj.Mocha(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mj.NotConverged)  # the model says so itself
        for i in range(search.found.best + 1):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], search.found.candidates)
            problem = mj.Problem(data, search.loss, one)
            begin = None if state is None else algorithm.warm_start(state, problem)
            solution = mj.solve(problem, algorithm, key=jax.random.key(seed), tol=_TOL, max_rounds=_ROUNDS, state=begin)
            state = solution.state
    return solution.model


@contextmanager
def _noted(name: str, notes: list[str]) -> Iterator[None]:
    """Keep warnings to be said later."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        yield
    notes += [f"{name}: {str(each.message).removeprefix('cross_validate: ')}" for each in warned]


def _baseline(names: Sequence[str]) -> str | None:
    """The model that others are compared with: that of every group by itself, or the first."""
    if len(names) == 1:
        return None
    return "local" if "local" in names else names[0]


def _save(name: str, search: _Search, model: Any, medians: dict[str, float], options: argparse.Namespace) -> None:
    """Write the model, with what the other commands need to know, and say so."""
    numbers = {"lambda" if key == "lam" else key: value for key, value in search.numbers.items()}
    about: dict[str, Any] = {"label": options.label, "group": options.group, "kind": name, **numbers}
    if medians:
        about["medians"] = medians
    dataclasses.replace(model, trained={**model.trained, **about}).save(options.model)
    said = ", ".join(f"{key} = {value:g}" for key, value in numbers.items())
    print(f"Model: {options.model} ({name}, {said}; {model.trained['message']})")


def _draw(compared: mj.metrics.Comparison, score: str, path: Path) -> None:
    if not _picture.installed():
        print(_picture.missing())
        return
    from mocha_jax import plotting

    _picture.save(plotting.compare(compared, score=score), path)
    print(f"Picture: {path}")
