"""Choosing lambda by its gradient: ``python -m experiments.hypergradients [--data har.npz school.npz]``.

On the left the validation loss of the multi-task model (14) along a path of lambdas, with the slope that implicit
differentiation finds at each, and the steps of gradient descent; on the right local models, one lambda for all tasks
and one for each, found by descent over all of them at once. The table compares descent on one split with 5-fold
cross-validation over the paper's seven lambdas: validation loss, test score, rounds of training.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mocha_jax as mj
from experiments.protocol import LAMBDAS, Score, score_of
from experiments.tasksets import TaskSet, load, synthetic
from mocha_jax import plotting

FINE = np.geomspace(LAMBDAS[0], LAMBDAS[-1], 2 * len(LAMBDAS) - 1)


# Relative residual of the linear system above which a slope is not shown.
WORST = 1e-2


class Curve(NamedTuple):
    """The validation loss along the path."""

    lam: np.ndarray
    value: np.ndarray
    slope: np.ndarray  # with respect to log lambda
    residual: np.ndarray  # of the linear system
    rounds: int  # of the trainings at the paper's lambdas
    seconds: float  # of all of this, times the share of the paper's lambdas


class Way(NamedTuple):
    """A way to choose hyperparameters, and what it led to."""

    name: str
    lam: str
    validation: float  # mean loss
    test: float  # after training on all training samples
    rounds: int  # of all trainings
    seconds: float


def main() -> None:
    """Parse the command line, train, print, draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.hypergradients", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files; default a synthetic federation")
    parser.add_argument("--rounds", type=int, default=600, help="of one training at most (default %(default)s)")
    parser.add_argument("--tol", type=float, default=1e-5, help="relative gap of a training (default %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="of descent (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="folder of the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.data:
        if not path.exists():
            print(f"{path} is not here: skipped", file=sys.stderr)
    sets = [load(path) for path in options.data if path.exists()] or [synthetic(jax.random.key(options.seed))]
    figure = Figure(figsize=(9.0, 3.4 * len(sets)), layout="constrained")
    panels = np.asarray(figure.subplots(len(sets), 2)).reshape(len(sets), 2)
    for tasks, (left, right) in zip(sets, panels, strict=True):
        study(tasks, options, left, right)
    figure.savefig(options.out / "hypergradients.png", dpi=150)
    print(f"{options.out / 'hypergradients.png'}")


def study(tasks: TaskSet, options: argparse.Namespace, left: Axes, right: Axes) -> None:
    """One task set."""
    key, score = jax.random.key(options.seed), score_of(tasks, None)
    train, test = tasks.data.split(jax.random.fold_in(key, 0), 0.75, stratify=True)
    part = train.folds(jax.random.fold_in(key, 1), 5) == 0  # a fifth that validates
    fit, held = train.keep(~part), train.keep(part)
    once: dict[str, Any] = {"folds": np.where(part, 0, -1), "stopping": 0, "prior": np.inf, "steps": options.steps}
    once["optimizer"] = optax.adam(optax.cosine_decay_schedule(0.7, options.steps))
    budget = dict(tol=options.tol, max_rounds=options.rounds, record_every=10)
    joint = mj.Problem(fit, tasks.loss, mj.regularizers.Probabilistic(0.5 * 1e-2))
    print(f"{tasks.name}: {tasks.data.num_tasks} tasks", flush=True)

    curve = along(joint, held, key, budget)
    coarse = curve.value[::2]
    at = int(np.argmin(coarse))
    began = time.perf_counter()
    tuned = mj.tune(joint.replace(data=train), key=key, **once, **budget)
    seconds = time.perf_counter() - began
    lam = float(2.0 * tuned.hyperparameters["lam"])
    best = LAMBDAS[at]
    scores = [refitted(train, test, tasks, chosen, score, budget) for chosen in (best, lam)]
    ways = [
        Way("best of 7, one split", f"{best:.3g}", float(coarse[at]), scores[0], curve.rounds, curve.seconds),
        Way("descent, one split", f"{lam:.3g}", tuned.value, scores[1], int(tuned.history.rounds.sum()), seconds),
        crossed(train, test, tasks, key, score, budget),
    ]
    draw_curve(left, tasks.name, curve, tuned)
    ways += per_task(right, tasks, train, test, key, score, once, budget)
    print(
        f"  {'chosen by':<28} {'lambda':>18} {'validation loss':>16} {'test ' + score.title:>14} {'rounds':>7} {'s':>6}"
    )
    for way in ways:
        numbers = f"{way.validation:>16.5f} {way.test:>14.3f} {way.rounds:>7} {way.seconds:>6.1f}"
        print(f"  {way.name:<28} {way.lam:>18} {numbers}")


def along(problem: mj.Problem, held: mj.TaskData, key: jax.Array, budget: dict) -> Curve:
    """The validation loss and its slope at every lambda of the path, each trained from the one before."""

    @jax.jit
    def look(solution: mj.Solution) -> tuple[jax.Array, ...]:
        found = mj.hypergradient(lambda w: mj.metrics.mean_loss(w, held, problem.loss), solution)
        return found.value, found.gradient.regularizer.lam * solution.problem.regularizer.lam, found.residual

    algorithm, state, seen, rounds, began = mj.Mocha(), None, [], [], time.perf_counter()
    warm_start = jax.jit(algorithm.warm_start)
    for lam in FINE:
        there = problem.replace(regularizer=mj.regularizers.Probabilistic(0.5 * lam))
        solution = mj.solve(
            there, algorithm, key=key, state=None if state is None else warm_start(state, there), **budget
        )
        state = solution.state
        rounds.append(int(solution.rounds))
        seen.append([float(a) for a in look(solution)])
    value, slope, residual = np.array(seen).T
    seconds = (time.perf_counter() - began) * len(LAMBDAS) / len(FINE)
    return Curve(FINE, value, slope, residual, sum(rounds[::2]), seconds)


def refitted(train: mj.TaskData, test: mj.TaskData, tasks: TaskSet, lam: float, score: Score, budget: dict) -> float:
    """The test score after training on all training samples."""
    problem = mj.Problem(train, tasks.loss, mj.regularizers.Probabilistic(0.5 * lam))
    return score.factor * float(getattr(mj.metrics, score.name)(mj.solve(problem, **budget).weights, test))


def crossed(train: mj.TaskData, test: mj.TaskData, tasks: TaskSet, key: jax.Array, score: Score, budget: dict) -> Way:
    """The paper's way."""
    began = time.perf_counter()
    problem = mj.Problem(train, tasks.loss, mj.regularizers.Probabilistic(1.0))
    grid = mj.grid(mj.regularizers.Probabilistic, lam=[0.5 * lam for lam in LAMBDAS])
    found = mj.cross_validate(problem, grid, key=key, metric=score.name, keep_rare=False, **budget)
    assert found.solution is not None
    result = score.factor * float(getattr(mj.metrics, score.name)(found.solution.weights, test))
    seconds = time.perf_counter() - began
    return Way(
        "5-fold cross-validation", f"{LAMBDAS[found.best]:.3g}", float("nan"), result, int(found.rounds.sum()), seconds
    )


def per_task(
    axes: Axes, tasks: TaskSet, train: mj.TaskData, test: mj.TaskData, key: jax.Array, score: Score,
    once: dict[str, Any], budget: dict,
) -> list[Way]:  # fmt: skip
    """Local models: one ridge for all tasks, then one for each, from there."""
    m = tasks.data.num_tasks
    local = mj.Problem(train, tasks.loss, mj.regularizers.Independent(0.5 * 1e-2))

    def with_ridges(problem: mj.Problem, lam: jax.Array) -> mj.Problem:
        return problem.replace(regularizer=mj.regularizers.Independent(lam))

    ways, start = [], jnp.asarray(0.5 * 1e-1)
    for name in ("local, one lambda", f"local, {m} lambdas"):
        began = time.perf_counter()
        tuned = mj.tune(local, make=with_ridges, start=start, key=key, **once, **budget)
        result = score.factor * float(getattr(mj.metrics, score.name)(tuned.solution.weights, test))
        lam = 2.0 * np.asarray(tuned.hyperparameters)
        shown = f"{lam:.3g}" if lam.ndim == 0 else f"{lam.min():.2g} to {lam.max():.2g}"
        ways.append(Way(name, shown, tuned.value, result, int(tuned.history.rounds.sum()), time.perf_counter() - began))
        axes.plot(tuned.history.value, "o-", ms=4, color=plotting.COLOURS[len(ways) - 1], label=name)
        start = jnp.full(m, tuned.hyperparameters)
    axes.set_title(f"{tasks.name}, local models", fontsize=11)
    axes.set_xlabel("steps of descent")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return ways


def draw_curve(axes: Axes, name: str, curve: Curve, tuned: mj.Tuned) -> None:
    """Loss against lambda, slopes as short lines, and the steps of descent."""
    axes.plot(curve.lam, curve.value, "-", color="0.7", lw=1.2)
    axes.plot(curve.lam[::2], curve.value[::2], "s", color="0.45", ms=5, label="the paper's grid")
    reach = 0.35  # of a slope's line, on a natural log scale
    solved = curve.residual < WORST
    for lam, value, slope in zip(curve.lam[solved], curve.value[solved], curve.slope[solved], strict=True):
        ends = np.array([-reach, reach])
        axes.plot(lam * np.exp(ends), value + slope * ends, color=plotting.COLOURS[1], lw=1.8)
    axes.plot([], [], color=plotting.COLOURS[1], lw=1.8, label="slope by implicit differentiation")
    steps = 2.0 * np.asarray(tuned.history.hyperparameters["lam"])
    axes.plot(steps, tuned.history.value, "o", color=plotting.COLOURS[0], ms=4, label="steps of descent")
    axes.set_xscale("log")
    finite = curve.value[np.isfinite(curve.value)]
    # Where nearly nothing is regularized the loss may be a hundred times the rest.
    low, high = float(finite.min()), float(min(finite.max(), 1.5 * np.quantile(finite, 0.75)))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_title(f"{name}, (14)", fontsize=11)
    axes.set_xlabel("lambda")
    axes.set_ylabel("validation loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
