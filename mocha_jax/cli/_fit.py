"""The command ``fit``: one model for all groups, one for each, and related ones, compared and saved."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from mocha_jax._data.standardize import Standardize
from mocha_jax._selection.preparation import usual
from mocha_jax.cli import _arguments, _picture, _table
from mocha_jax.cli._table import Samples, read_samples
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
    fit.add_argument("--lambdas", nargs="+", type=_arguments.number, default=STRENGTHS, metavar="NUMBER",
                     help="strengths to try (default: 10 1 0.1 0.01 0.001 0.0001)")  # fmt: skip
    fit.add_argument(
        "--folds", type=_arguments.integer(2), default=5, help="of cross-validation (default: %(default)s)"
    )
    fit.add_argument("--seed", type=_arguments.integer(0), default=0, help="of the folds (default: %(default)s)")
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
    _arguments.check_inputs(options.table)
    outputs = {"--model": options.model}
    if _picture.installed():
        _picture.check_form("--picture", options.picture)
        outputs["--picture"] = options.picture
    _arguments.check_outputs(outputs, [options.table], options.force)
    samples = read_samples(options)
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
        has_value = (training.weight > 0)[..., None] & ~self.absent
        medians = jnp.nanmedian(jnp.where(has_value, training.x[..., :d], jnp.nan), axis=(0, 1), keepdims=True)
        medians = jnp.where(jnp.isnan(medians), 0.0, medians)  # where no sample for training has a value
        x = jnp.where(self.absent & (data.weight > 0)[..., None], medians, data.x[..., :d])
        return data.replace(x=jnp.concatenate([x, data.x[..., d:]], axis=2))


def _searched(name: str, samples: Samples, prepare: _Preparation, options: argparse.Namespace) -> _Search:
    """Cross-validate a model of some name."""
    data = samples.data.pooled() if name == "global" else samples.data
    loss: mj.losses.Loss = mj.losses.Logistic() if samples.binary else mj.losses.Squared()
    make, tried = maker(_ALIASES.get(name, name), data.num_tasks)
    axes = {"lam": sorted(options.lambdas, reverse=True), **tried}
    named = None if prepare.by == "none" else prepare.by
    validation = mj.cross_validate(
        mj.Problem(data, loss, make(lam=axes["lam"][0])), mj.grid(make, **axes), key=jax.random.key(options.seed),
        folds=options.folds, scored_as=samples.data, max_rounds=_ROUNDS, tol=_TOL, refit=False,
        standardize=named if samples.absent is None else prepare, progress=not options.quiet,
    )  # fmt: skip
    return _Search(data, loss, axes, validation)


def _refitted(search: _Search, prepare: _Preparation, seed: int) -> mj.LinearModel:
    """Solve for all rows, through the candidates up to the best one, and return the model."""
    data, state = prepare.once(search.data), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mj.NotConverged)  # the model's message reports it
        for i in range(search.found.best + 1):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], search.found.candidates)
            problem = mj.Problem(data, search.loss, one)
            algorithm = mj.default_algorithm(problem)
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


def _save(
    name: str, search: _Search, model: mj.LinearModel, medians: dict[str, float], options: argparse.Namespace
) -> None:
    """Write the model, with what the other commands need to know, and say so."""
    numbers = {"lambda" if key == "lam" else key: value for key, value in search.numbers.items()}
    about: dict[str, object] = {"label": options.label, "group": options.group, "kind": name, **numbers}
    if medians:
        about["medians"] = medians
    dataclasses.replace(model, trained={**model.trained, **about}).save(options.model)
    settings = ", ".join(f"{key} = {value:g}" for key, value in numbers.items())
    print(f"Model: {options.model} ({name}, {settings}; {model.trained['message']})")


def _draw(compared: mj.metrics.Comparison, score: str, path: Path) -> None:
    if not _picture.installed():
        print(_picture.missing())
        return
    from mocha_jax import plotting

    _picture.save(plotting.compare(compared, score=score), path)
    print(f"Picture: {path}")
