"""Choosing one regularizer for all classes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, on_all
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._model.multiclass import require_probabilities
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.by_fold import Fitted, alone, fold_by_fold, room, several
from mocha_jax._selection.cross_validation import CrossValidation, Metric, chosen
from mocha_jax._selection.path import SolveOptions, count_candidates, scan_candidates, solve_options
from mocha_jax.multiclass import _scores
from mocha_jax.multiclass._each_class import EachClass, Make, each_class
from mocha_jax.multiclass._labels import count_classes
from mocha_jax.multiclass._one_vs_rest import OneVsRest, described, of_solution
from mocha_jax.regularizers import Regularizer

METRICS: dict[str, Metric] = {"error_rate": _scores.error_rate, "log_loss": _scores.log_loss}


@on_purpose
def lambda_path(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    key: Array | None = None,
    tol: float = 1e-4,
    max_rounds: int = 1000,
    record_every: int = 5,
) -> list[OneVsRest]:
    """Train each class against the rest with one regularizer after the other; one compiled call for all.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default `Mocha()`.
      classes: how many; default as `one_vs_rest`.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to go on to the next.
      max_rounds: for each at most.
      record_every: rounds between looks at the gap.

    Returns:
      The models of every candidate, each begun from the ones before.
    """
    owner = "lambda_path"
    count = count_classes(owner, data, classes)
    budget = solve_options(owner, algorithm, tol, max_rounds, record_every)
    key = jax.random.key(0) if key is None else key
    check.key(owner, key)
    each, first = each_class(owner, data, make, count)
    return _path(owner, key, each, first, data, candidates, budget)


def _path(
    owner: str,
    key: Array,
    each: EachClass,
    first: Problem,
    data: TaskData,
    candidates: Regularizer,
    budget: SolveOptions,
) -> list[OneVsRest]:
    count = count_candidates(owner, first, candidates)
    found = or_by_loops(
        first, budget.algorithm, lambda by: _solved(key, each, candidates, budget.replace(algorithm=by))
    )

    def at(i: int) -> OneVsRest:
        own = first.replace(regularizer=_candidate(candidates, i))
        return described(jax.tree.map(lambda leaf: leaf[:, i], found), own, data.names)

    return [at(i) for i in range(count)]


@jax.jit
def _solved(key: Array, each: EachClass, candidates: Regularizer, budget: SolveOptions) -> OneVsRest:
    """Models of all classes and candidates, ``[classes, c, ...]``."""

    def of_class(problem: Problem) -> OneVsRest:
        at = partial(Problem, problem.data, problem.loss)
        return scan_candidates(key, at, candidates, budget, lambda _, s: of_solution(s))

    return each.map(of_class)


@on_purpose
def cross_validate(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    key: Array | None = None,
    folds: int = 5,
    trials: int = 1,
    groups: ArrayLike | None = None,
    metric: Metric | str = "error_rate",
    maximise: bool = False,
    keep_rare: bool = True,
    tol: float = 1e-3,
    max_rounds: int = 200,
    record_every: int = 5,
    chunk: int | None = None,
    refit: bool = True,
    progress: bool = False,
) -> CrossValidation[OneVsRest]:
    """Choose one regularizer for the models of all classes, by cross-validation within every task.

    As `mocha_jax.cross_validate` does it: on the same folds, all classes and candidates of a fold in one compiled call,
    with the same warnings. What is scored is the class whose model says most.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default `Mocha()`.
      classes: how many; default as `one_vs_rest`.
      key: a JAX random key; default ``jax.random.key(0)``.
      folds: parts of each node's samples, of which each is held out once.
      trials: how often to do that, each time with other parts.
      groups: ``[m, n]`` integers, see `TaskData.folds`.
      metric: ``"error_rate"``, of the logistic loss ``"log_loss"``, or any function like those, called as
        ``metric(weights, data, per_task=True)`` with weights ``[classes, num_tasks, d]``.
      maximise: whether more is better.
      keep_rare: never take a sample from training that is alone in its class in its task (without `groups`).
      tol: relative gap at which a solve ends.
      max_rounds: of each solve at most. What was reached is reported, of the class that is furthest from it.
      record_every: rounds between looks at the gap.
      chunk: folds that a device does at the same time.
      refit: train for all data, through the candidates up to the chosen one; ``solution`` is an `OneVsRest`.
      progress: show a bar.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(25, 8)).astype("f") * np.array([1] * 3 + [5] * 5, "f") for _ in range(6)]
      >>> ys = [(x[:, :3] + 0.5 * rng.normal(size=(25, 3))).argmax(1) for x in xs]
      >>> data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
      >>> def hinge(data):
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> candidates = mj.grid(mj.regularizers.MeanRegularized, lam1=[1.0], lam2=[1.0, 0.03, 0.001])
      >>> found = mj.multiclass.cross_validate(data, hinge, candidates, folds=3, tol=1e-2)
      >>> found.metric, found.best, found.solution.weights.shape
      ('error_rate', 1, (3, 6, 8))
    """
    owner = "cross_validate"
    classes = count_classes(owner, data, classes)
    budget = solve_options(owner, algorithm, tol, max_rounds, record_every)
    key = jax.random.key(0) if key is None else key
    check.key(owner, key)
    check.integer(owner, 2, folds=folds)
    check.integer(owner, 1, trials=trials)
    check.flag(owner, refit=refit, progress=progress, keep_rare=keep_rare, maximise=maximise)
    each, first = each_class(owner, data, make, classes)
    count_candidates(owner, first, candidates)
    score, metric_name = _metric(metric, first, data, classes)
    size, sharding = room(owner, data, trials, folds, chunk)
    parts = jnp.stack([data.folds(jax.random.fold_in(key, t), folds, groups) for t in range(trials)])
    sizes, single = alone(data, np.asarray(data.y), classes, groups)
    stays = single & keep_rare & (groups is None)
    given = on_all(sharding, (key, each, candidates, budget, jnp.asarray(stays), data.unnamed()))
    parts = on_all(sharding, parts)

    def fit(trial: Array, fold: Array) -> Fitted:
        def work(by: Algorithm[Problem]) -> Fitted:
            fitted_by = (*given[:3], given[3].replace(algorithm=by), *given[4:])
            return _fitted(fitted_by, parts[trial], fold, score=score, sharding=sharding)

        return or_by_loops(first, budget.algorithm, work)

    scores, residuals, rounds = fold_by_fold(fit, trials, folds, size, progress)
    rare = caveats.rare_classes(sizes, folds, int(stays.sum()), data.names.classes or range(classes))
    best = chosen(owner, candidates, scores, residuals, rounds, budget, maximise, rare)
    way = jax.tree.map(lambda leaf: leaf[: best + 1], candidates)
    model = _path(owner, key, each, first, data, way, budget)[-1] if refit else None
    return CrossValidation(
        candidates, scores, residuals, rounds, best, _candidate(candidates, best), model, metric_name
    )


# The key, the problems, candidates, how to solve, the samples that stay in every fold, and the labelled samples.
Given = tuple[Array, EachClass, Regularizer, SolveOptions, Array, TaskData]


@partial(jax.jit, static_argnames=("score", "sharding"))
def _fitted(given: Given, parts: Array, fold: Array, *, score: Metric, sharding: NodeSharding | None) -> Fitted:
    """Fit some folds at once: scores of tasks, residuals and rounds of all candidates."""

    def one(given: Given, part: Array, fold: Array) -> Fitted:
        key, each, candidates, budget, stays, data = given

        def entry(_: Regularizer, s: Solution[Problem]) -> Fitted:
            return s.weights, s.certificate.residual, jnp.asarray(s.rounds)

        def of_class(problem: Problem) -> Fitted:
            training = problem.data.keep((part != fold) | stays)
            return scan_candidates(key, partial(Problem, training, problem.loss), candidates, budget, entry)

        weights, residuals, rounds = each.map(of_class)  # [classes, c, ...]
        held_out = data.keep(part == fold)
        scores = lax.map(lambda w: score(w, held_out, per_task=True), jnp.swapaxes(weights, 0, 1))
        # Of the class that is furthest from its tolerance, as far as that is known.
        last = jnp.argmax(jnp.where(jnp.isfinite(residuals), residuals, -1.0), axis=0)[None]
        return scores, *(jnp.take_along_axis(a, last, axis=0)[0] for a in (residuals, rounds))

    return several(one, given, parts, fold, sharding)


def _metric(metric: Metric | str, first: Problem, data: TaskData, classes: int) -> tuple[Metric, str]:
    """The function and its name; it must have a score for every task."""
    if not callable(metric):
        check.one_of("cross_validate", "metric", metric, tuple(METRICS))
        metric = METRICS[metric]
    if metric is _scores.log_loss:
        tasks = range(first.data.num_tasks)
        require_probabilities("cross_validate", False, all(first.loss.of_task(t).log_odds for t in tasks))
    weights = jax.ShapeDtypeStruct((classes, first.data.num_tasks, first.data.num_features), data.dtype)
    said = jax.eval_shape(lambda w: metric(w, data, per_task=True), weights)
    if getattr(said, "shape", None) != (data.num_tasks,):
        raise ValueError(
            f"cross_validate: metric(weights, data, per_task=True) must return a score for each task, an array "
            f"[{data.num_tasks}]; got {said}."
        )
    return metric, getattr(metric, "__name__", "metric")


def _candidate(candidates: Regularizer, i: int) -> Regularizer:
    return jax.tree.map(lambda leaf: leaf[i], candidates)
