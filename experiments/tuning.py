"""Many hyperparameters by gradient: ``python -m experiments.tuning --data school.npz landmine_full.npz vehicle.npz``.

Models with few numbers and with many, chosen in three ways on the same folds of the training rows: the best of a grid,
the best of as many random draws, and descent (`tune`) from the best of a coarse grid, a third of the fine one, with as
many steps as make up for the rest. All train the same number of times: 24 candidates, without each of five folds. The
error on new rows (RMSE of numbers, mean logistic loss of classes) is a mean over tasks; differences from the grid are
paired, over tasks and trials. `--ways` adds other settings of descent. A CSV keeps every trial; a run that was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mocha_jax as mj
from experiments.defaults import Split, trials
from experiments.rows import append, read
from mocha_jax._selection.preparation import FREE_INTERCEPT, frees_intercept, usual

R = mj.regularizers
FOLDS, CANDIDATES, COARSE = 5, 24, 8
LARGEST, LEAST = 10.0, 1e-4  # lambda
STRONG, WEAK = 100.0, 0.1  # pull towards the mean, as a share of lambda
SPREAD = 1.0  # standard deviation of random draws about a common level, on a natural log scale


def _descent(rate: float, **options: Any) -> dict[str, Any]:
    steps = CANDIDATES - COARSE
    rule = optax.novograd(optax.cosine_decay_schedule(rate, steps), b1=0.5, b2=0.9)
    return {"optimizer": rule, **options}


# Ways to choose: a grid, random draws, and descent with these settings.
WAYS: dict[str, dict[str, Any] | None] = {
    "grid": None,
    "random": None,
    "descent": {},
    "rate 0.1": _descent(0.1),
    "rate 1": _descent(1.0),
    "Adam 0.3": {"optimizer": optax.adam(optax.cosine_decay_schedule(0.3, CANDIDATES - COARSE))},
    "prior 0.3": {"prior": 0.3},
    "prior 3": {"prior": 3.0},
    "no prior": {"prior": np.inf},
    "no stopping": {"stopping": 0},
    "neither": {"prior": np.inf, "stopping": 0},
}
USUAL = "grid", "random", "descent"


class Model(NamedTuple):
    """A family of regularizers of some hyperparameters."""

    make: Callable[[Any], mj.regularizers.Regularizer]
    grid: list[Any]  # hyperparameters to try
    coarse: list[Any]
    draw: Callable[[np.random.Generator], Any]
    descends: bool = True


class Row(NamedTuple):
    """One way in one trial; the CSV's columns."""

    tasks: str
    rows: int
    trial: int
    model: str
    way: str
    errors: str  # of every task
    value: float  # mean loss of the folds
    trainings: int
    seconds: float  # of this process


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tuning", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files of flat X, y and task")
    parser.add_argument("--only", nargs="+", help="names of task sets; default those of the files, and levels")
    parser.add_argument("--rows", type=int, nargs="+", default=[20], help="for training, of every task")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--models", nargs="+", help="names of models; default all")
    parser.add_argument("--ways", nargs="+", default=USUAL, choices=list(WAYS), help="default %(default)s")
    parser.add_argument("--short", action="store_true", help="one made task set, one trial, one model")
    parser.add_argument("--out", type=Path, default=Path("experiments/tuning"), help="folder of the CSV")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "trials.csv"
    if options.short:
        options.only, options.trials, options.models = ["near a mean"], 1, ["local, a lambda a task"]
    names = options.only or [*(file.stem for file in options.data), "levels"]
    done = {(row.tasks, row.rows, row.trial, row.model, row.way) for row in read(path, Row)}
    for name, kind, count, trial, part in trials(options.data, names, options.rows, options.trials):
        if kind == "classes":
            continue
        study = Study(part, kind, trial)
        for model in options.models or study.models:
            for way in options.ways:
                if (name, count, trial, model, way) in done or not study.has(model, way):
                    continue
                began = time.process_time()
                errors, value, trainings = study.chosen(model, way)
                seconds, shown = time.process_time() - began, " ".join(f"{e:.6g}" for e in errors)
                row = Row(name, count, trial, model, way, shown, value, trainings, seconds)
                append(path, row)
                print(f"{name:>14} {count:3d} rows, trial {trial} {model:>26} {way:>12}: "
                      f"{np.nanmean(errors):8.4f} {value:8.4f} {row.seconds:6.1f} s", flush=True)  # fmt: skip
    print("\n" + table(read(path, Row)))


class Study:
    """A trial: what to train with, and how."""

    def __init__(self, part: Split, kind: str, trial: int) -> None:
        self.loss: mj.losses.Loss = mj.losses.Squared() if kind == "numbers" else mj.losses.Logistic()
        self.by, self.trial = usual(self.loss), trial
        intercept = 0.0 if frees_intercept(self.by, self.loss) else FREE_INTERCEPT
        part = Split(*([a.astype(np.float32) for a in each] for each in part))
        self.train = mj.pack_tasks(part.xs, part.ys, loss_scaling="task_mean", intercept=intercept)
        self.test = mj.pack_tasks(part.test_xs, part.test_ys, intercept=True)
        self.models = models(self.train.num_tasks, self.train.num_features)

    def has(self, model: str, way: str) -> bool:
        """Tell whether a model is chosen in that way: a large one only by its grid, for comparison."""
        return self.models[model].descends or way == "grid"

    def chosen(self, name: str, way: str) -> tuple[np.ndarray, float, int]:
        """The test error of every task, the loss of the folds, and how often the model was trained for it."""
        model, settings = self.models[name], WAYS[way]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if settings is None:
                rng = np.random.default_rng(self.trial)
                tried = model.grid if way == "grid" else [model.draw(rng) for _ in range(CANDIDATES)]
                best, value = self.best_of(model, tried)
                solution = mj.solve(self.problem(model, best, self.train.standardized(**self.scaling)), tol=1e-4)
                count = FOLDS * len(tried)
            else:
                start, _ = self.best_of(model, model.coarse)
                settings = {"steps": CANDIDATES - COARSE, **settings}
                tuned = mj.tune(
                    self.problem(model, start, self.train), make=making(name, self.train), start=start, folds=FOLDS,
                    standardize=self.by, key=jax.random.key(self.trial), tol=1e-3, max_rounds=200, **settings,
                )  # fmt: skip
                solution, value = tuned.solution, float(tuned.history.losses[tuned.best].mean())
                count = FOLDS * (len(model.coarse) + len(tuned.history.value))
        if self.loss.binary:
            errors = mj.metrics.mean_loss(solution.model, self.test, self.loss, per_task=True)
        else:
            errors = mj.metrics.rmse(solution.model, self.test, per_task=True)
        return np.asarray(errors, float), value, count

    @property
    def scaling(self) -> dict[str, Any]:
        """How samples are standardised, as searches do it."""
        return {"by": self.by, "labels": not self.loss.binary}

    def problem(self, model: Model, h: Any, data: mj.TaskData) -> mj.Problem:
        """The problem with some hyperparameters."""
        return mj.Problem(data, self.loss, model.make(h))

    def best_of(self, model: Model, tried: list[Any]) -> tuple[Any, float]:
        """The best of some candidates by cross-validation, and its loss."""
        made = [self.problem(model, h, self.train).regularizer for h in tried]
        candidates = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
        found = mj.cross_validate(
            mj.Problem(self.train, self.loss, made[0]), candidates, folds=FOLDS, standardize=self.by, refit=False,
            keep_rare=False, metric="mean_loss", key=jax.random.key(self.trial), tol=1e-3,
        )  # fmt: skip
        return tried[found.best], float(np.nanmin(found.mean))


_made: dict[tuple[str, int, int], Callable[[mj.Problem, Any], mj.Problem]] = {}


def making(name: str, data: mj.TaskData) -> Callable[[mj.Problem, Any], mj.Problem]:
    """A function for `tune`, the same again for the same shapes: what was compiled for it serves all trials."""
    shape = name, data.num_tasks, data.num_features
    if shape not in _made:
        model = models(*shape[1:])[name]
        _made[shape] = lambda problem, h: problem.replace(regularizer=model.make(h))
    return _made[shape]


def models(m: int, d: int) -> dict[str, Model]:
    """Families of regularizers for that many tasks and features."""
    fine, coarse = (np.geomspace(LARGEST, LEAST, n) for n in (CANDIDATES, COARSE))

    def lam(rng: np.random.Generator) -> float:
        return float(np.exp(rng.uniform(np.log(LEAST), np.log(LARGEST))))

    def spread(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.exp(SPREAD * rng.normal(size=n))

    def pulled(lams: np.ndarray, pulls: np.ndarray) -> list[Any]:
        return [{"lam1": pull * lam, "lam2": lam} for pull in pulls for lam in lams]

    def pair(rng: np.random.Generator) -> dict[str, float]:
        (found,) = pulled(np.array([lam(rng)]), np.exp(rng.uniform(np.log(WEAK), np.log(STRONG), 1)))
        return found

    two = pulled(np.geomspace(LARGEST, LEAST, 6), np.geomspace(STRONG, WEAK, 4))
    two_coarse = pulled(np.geomspace(LARGEST, LEAST, 4), np.geomspace(STRONG, WEAK, 4)[1::2])
    factors = [{**h, "factor": np.ones(d)} for h in two]
    return {
        "local": Model(R.Independent, list(fine), list(coarse), lam),
        "local, a lambda a task": Model(
            R.Independent, [np.full(m, a) for a in fine], [np.full(m, a) for a in coarse],
            lambda rng: lam(rng) * spread(rng, m),
        ),
        "local, a lambda a feature": Model(
            lambda h: R.PerFeature(R.Independent(h["lam"]), h["factor"]),
            [{"lam": a, "factor": np.ones(d)} for a in fine], [{"lam": a, "factor": np.ones(d)} for a in coarse],
            lambda rng: {"lam": lam(rng), "factor": spread(rng, d)},
        ),
        "(11)": Model(lambda h: R.MeanRegularized(**h), two, two_coarse, pair),
        "(11), a factor a feature": Model(
            lambda h: R.PerFeature(R.MeanRegularized(h["lam1"], h["lam2"]), h["factor"]),
            factors, [{**h, "factor": np.ones(d)} for h in two_coarse],
            lambda rng: {**pair(rng), "factor": spread(rng, d)},
        ),
        "(14)": Model(
            lambda h: R.Probabilistic(h["lam"], h["sigma2"]),
            [{"lam": a, "sigma2": s} for s in (0.1, 1.0, 10.0, np.inf) for a in np.geomspace(LARGEST, LEAST, 6)], [],
            lambda rng: {"lam": lam(rng), "sigma2": np.inf}, descends=False,
        ),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """The error of every model and way, and its difference from the grid with a 95 % interval."""
    cells: dict[tuple[str, int, str], dict[str, np.ndarray]] = {}
    seconds: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.trial):
        known = cells.setdefault((row.tasks, row.rows, row.model), {})
        known[row.way] = np.concatenate([known.get(row.way, np.zeros(0)), np.array(row.errors.split(), float)])
        seconds.setdefault(row.way, []).append(row.seconds)
    ways = [way for way in WAYS if way in seconds]
    lines = ["| tasks | rows | model | " + " | ".join(ways) + " |", "|---|---:|---|" + "---:|" * len(ways)]
    worse, better = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    excess: dict[str, list[float]] = {way: [] for way in ways}
    for (name, n, model), found in cells.items():
        base, shown = found.get("grid"), []
        for way in ways:
            if way not in found or base is None or len(found[way]) != len(base):
                shown.append("")
                continue
            off = found[way] - base
            off = off[np.isfinite(off)]
            mean, error = off.mean(), off.std(ddof=1) / len(off) ** 0.5
            if way == "grid":
                shown.append(f"{np.nanmean(base):.4g}")
                continue
            worse[way] += mean > error
            better[way] += mean < -error
            excess[way].append(mean / np.nanmean(base))
            shown.append(f"{mean:+.3f} [{mean - 1.96 * error:+.3f}, {mean + 1.96 * error:+.3f}]")
        lines.append(f"| {name} | {n} | {model} | " + " | ".join(shown) + " |")
    others = [way for way in ways if way != "grid"]
    for title, each in (
        ("worse than the grid by more than a standard error", worse), ("better by more than that", better),
    ):  # fmt: skip
        lines.append(f"| {title} | | | | " + " | ".join(str(each[way]) for way in others) + " |")
    shares = [f"{np.mean(excess[way]):+.2%}" if excess[way] else "" for way in others]
    lines.append("| difference, mean | | | | " + " | ".join(shares) + " |")
    lines.append("| CPU s, median | | | " + " | ".join(f"{np.median(seconds[way]):.2g}" for way in ways) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
