"""Choosing hyperparameters by cross-validation, all fits of a fold in one compiled call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax import metrics
from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, on_all
from mocha_jax._core.transfers import on_purpose
from mocha_jax._core.warnings import NotConverged, silenced, warn
from mocha_jax._data.scaling import advice
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.by_fold import Fitted, alone, fold_by_fold, room, several
from mocha_jax._selection.path import SolveOptions, count_candidates, scan_candidates, solve_options, warm_started
from mocha_jax._selection.preparation import Preparation, anonymous, fitted, preparation, prepared
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Regularizer

Metric = Callable[..., Array]  # metric(weights, data, per_task=True), as in `metrics`

METRICS: dict[str, Metric] = {
    "error_rate": metrics.error_rate,
    "auc": metrics.auc,
    "rmse": metrics.rmse,
    "mean_loss": metrics.mean_loss,
    "absolute_error": metrics.absolute_error,
    "quadratic_kappa": metrics.quadratic_kappa,
    "balanced_error": metrics.balanced_error,
    "f1": metrics.f1,
    "average_precision": metrics.average_precision,
    "ndcg": metrics.ndcg,
    "r2": metrics.r2,
    "explained_variance": metrics.explained_variance,
    "poisson_deviance": metrics.poisson_deviance,
}
_OF_THE_LOSS = metrics.mean_loss, metrics.absolute_error, metrics.quadratic_kappa  # those that need it
_MORE_IS_BETTER = (
    metrics.auc, metrics.quadratic_kappa, metrics.f1, metrics.average_precision, metrics.ndcg, metrics.r2,
    metrics.explained_variance,
)  # fmt: skip


Answer = TypeVar("Answer")  # what all data is fitted with: a `Solution`, of several classes an `OneVsRest`


@dataclasses.dataclass(frozen=True)
class CrossValidation(Generic[Answer]):
    """Scores of all candidates and the best one, from `cross_validate`."""

    candidates: Regularizer  # with a leading axis [c]
    task_scores: np.ndarray  # [trials, folds, c, num_tasks] NaN where a task has no sample in a fold
    residuals: np.ndarray  # [trials, folds, c] relative gaps at which the solves ended
    rounds: np.ndarray  # [trials, folds, c]
    best: int  # of the candidates
    regularizer: Regularizer  # the best one
    solution: Answer | None  # for all data with it; None with ``refit=False``
    metric: str  # the name of what the scores are

    @property
    def scores(self) -> np.ndarray:
        """Mean over tasks, ``[trials, folds, c]``."""
        return _mean(self.task_scores, 3)

    @property
    def mean(self) -> np.ndarray:
        """Mean over tasks, folds and trials of every candidate ``[c]``; NaN for one that lacks a score another has."""
        return _of_candidates(self.task_scores)

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of `mean` over folds and trials, ``[c]``; folds share samples, so it is optimistic."""
        flat = self.scores.reshape(-1, self.scores.shape[2])
        count = (~np.isnan(flat)).sum(0)
        squares = _mean((flat - _mean(flat, 0)) ** 2, 0) * _quotient(count, count - 1)
        return np.where(np.isnan(self.mean), np.nan, np.sqrt(_quotient(squares, count)))

    def __repr__(self) -> str:
        return f"CrossValidation(best={self.best}, {self.metric}={np.array2string(self.mean, precision=4)})"


@on_purpose
def cross_validate(
    problem: Problem,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    key: Array | None = None,
    folds: int = 5,
    trials: int = 1,
    groups: ArrayLike | None = None,
    metric: Metric | str | None = None,
    maximise: bool | None = None,
    scored_as: TaskData | None = None,
    standardize: str | Preparation | None = None,
    keep_rare: bool = True,
    tol: float = 1e-3,
    max_rounds: int = 200,
    record_every: int = 5,
    chunk: int | None = None,
    refit: bool = True,
    progress: bool = False,
) -> CrossValidation[Solution[Problem]]:
    """Choose a regularizer by cross-validation within every task.

    All candidates for one or more folds are one compiled call: the samples are in memory once, a fold is no more than
    other weights, and each candidate starts from the solution of the one before.

    Warnings name candidates that did not converge, a best one at the edge of the grid, and tasks in which a class has
    fewer samples than there are folds.

    Args:
      problem: data and loss; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default `Mocha()`.
      key: a JAX random key; default ``jax.random.key(0)``. The folds depend on it, on nodes and rows only: with
        the same key all models of the same data are compared on the same folds.
      folds: parts of each node's samples, of which each is held out once.
      trials: how often to do that, each time with other parts.
      groups: ``[m, n]`` integers, see `TaskData.folds`.
      metric: ``"error_rate"``, ``"auc"``, ``"rmse"``, ``"mean_loss"``, ``"absolute_error"``, ``"quadratic_kappa"``, or
        any function like those of `metrics`, called as ``metric(weights, data, per_task=True)``. By default what the
        loss is scored by: the error rate for losses of the margin, the RMSE for `Squared`, the absolute error for
        `Ordinal`, and for all others, a loss of your own included, its mean.
      maximise: whether more is better; by default of the AUC and kappa only, so say so of a function of your own.
      scored_as: the same rows as other tasks, for a global model: fitted to ``data.pooled()``, it is compared with
        others on the tasks of ``data``.
      standardize: what to do with features, fitted to the training samples of every fold: ``"pooled"``, ``"task"`` or
        ``"within"``, see `TaskData.standardized`; or a function of your own, pure, from the training samples to a
        function of any samples. Labels are centred too where the loss is one of the residual. It takes memory for the
        samples once more for every fit at the same time.
      keep_rare: never take a sample from training that is alone in its class in its task (of a loss with two classes,
        without `groups`). Otherwise a task is asked about a class that it has never seen, and where that happens in
        many tasks, a model that knows no rare class at all seems to be the best. The scores of such samples are those
        of training samples, too good: with many of them, use the choice and not the score. A warning counts them.
      tol: relative gap at which a solve ends.
      max_rounds: of each solve at most. What was reached is reported.
      record_every: rounds between looks at the gap.
      chunk: fits that a device does at the same time; more need more memory. Default one on a CPU, all folds of a
        trial elsewhere. With several devices each does its own fits.
      refit: solve for all data, through the candidates up to the chosen one.
      progress: show a bar.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(12, 5)).astype("f") for _ in range(6)]
      >>> data = mj.pack_tasks(xs, [x[:, 0] + rng.normal(size=12) for x in xs])
      >>> problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
      >>> found = mj.cross_validate(problem, mj.grid(mj.regularizers.Independent, lam=[100.0, 3.0, 0.01]), folds=3)
      >>> found.scores.shape, found.solution.weights.shape
      ((1, 3, 3), (6, 5))
      >>> found.metric, found.best
      ('rmse', 1)
    """
    name = "cross_validate"
    prepare = preparation(name, standardize, problem)
    count_candidates(name, problem, candidates)
    budget = solve_options(name, algorithm, tol, max_rounds, record_every)
    check.integer(name, 1, trials=trials)
    key, data = jax.random.key(0) if key is None else key, problem.data
    check.key(name, key)
    check.integer(name, 2, folds=folds)
    check.flag(
        name, refit=refit, progress=progress, keep_rare=keep_rare, maximise=False if maximise is None else maximise
    )
    if scored_as is not None:
        check.instance(name, "scored_as", scored_as, TaskData, "problem.data")
    score, metric_name, more_is_better = _metric(metric, problem.loss)
    more_is_better = more_is_better if maximise is None else maximise
    seen_as = data if scored_as is None else scored_as
    if seen_as.y.shape != data.y.shape:
        raise ValueError(f"{name}: scored_as must have the rows of the problem's data, {data.y.shape}.")
    if data.num_tasks not in (1, seen_as.num_tasks):
        raise ValueError(f"{name}: scored_as is for a global model, of one task; this one has {data.num_tasks}.")
    weights = jax.ShapeDtypeStruct((data.num_tasks, data.num_features), data.dtype)
    said = jax.eval_shape(lambda w: _scored(score, w, seen_as, problem.loss), weights)
    if getattr(said, "shape", None) != (seen_as.num_tasks,):
        raise ValueError(
            f"{name}: metric(weights, data, per_task=True) must return a score for each task, an array "
            f"[{seen_as.num_tasks}]; got {said}."
        )
    size, sharding = room(name, data, trials, folds, chunk)
    parts = jnp.stack([data.folds(jax.random.fold_in(key, t), folds, groups) for t in range(trials)])
    # Of the tasks that are scored, so that a global model is judged by the same samples.
    sizes, single = np.zeros((seen_as.num_tasks, 2), int), np.zeros(data.y.shape, bool)
    if problem.loss.binary:
        sizes, single = alone(seen_as, np.asarray(seen_as.y) > 0, 2, groups)
    stays = single & keep_rare & (groups is None)
    nameless = problem.exchange(data=anonymous(data, prepare))
    given = on_all(sharding, (key, nameless, candidates, budget, jnp.asarray(stays), anonymous(seen_as, prepare)))
    parts = on_all(sharding, parts)

    def fit(trial: Array, fold: Array) -> Fitted:
        def work(by: Algorithm[Problem]) -> Fitted:
            fitted_by = (*given[:3], given[3].replace(algorithm=by), *given[4:])
            return _scores(fitted_by, parts[trial], fold, score=score, sharding=sharding, prepare=prepare)

        return or_by_loops(problem, budget.algorithm, work)

    scores, residuals, rounds = fold_by_fold(fit, trials, folds, size, progress)
    rare = caveats.rare_classes(sizes, folds, int(stays.sum()))
    hint = "" if prepare else advice(data)
    best = chosen(name, candidates, scores, residuals, rounds, budget, more_is_better, rare, hint)
    regularizer = jax.tree.map(lambda leaf: leaf[best], candidates)
    solution = _refitted(key, prepared(problem, prepare)[0], candidates, budget, best) if refit else None
    return CrossValidation(candidates, scores, residuals, rounds, best, regularizer, solution, metric_name)


def chosen(
    name: str, candidates: Regularizer, scores: np.ndarray, residuals: np.ndarray, rounds: np.ndarray,
    budget: SolveOptions, more_is_better: bool, rare: str | None, hint: str = "",
) -> int:  # fmt: skip
    """Choose the best candidate, and warn of what speaks against it."""
    mean = _of_candidates(scores)
    if np.isnan(mean).all():
        raise ValueError(f"{name}: no candidate has a score in every fold; are there samples of each class to score?")
    if np.isnan(mean).any():
        without = np.flatnonzero(np.isnan(mean)).tolist()
        warn(f"{name}: candidates {without} lack scores that others have and are passed over.")
    best = int(np.nanargmax(mean) if more_is_better else np.nanargmin(mean))
    if (caveat := caveats.unfinished(residuals, rounds, budget.tol, budget.max_rounds, hint)) is not None:
        warn(f"{name}: {caveat}", NotConverged)
    for caveat in (
        caveats.at_the_edge(candidates, mean, best, more_is_better),
        rare,
    ):
        if caveat is not None:
            warn(f"{name}: {caveat}")
    return best


def _refitted(
    key: Array, problem: Problem, candidates: Regularizer, budget: SolveOptions, best: int
) -> Solution[Problem]:
    """For all data and by the same way as in the folds: through the candidates before it."""
    state = None
    for i in range(best + 1):
        regularizer = jax.tree.map(lambda leaf, i=i: leaf[i], candidates)
        there = Problem(problem.data, problem.loss, regularizer)
        with silenced(NotConverged) if i < best else contextlib.nullcontext():  # only the last one is handed out
            solution = budget.solve(
                key, there, state if state is None else warm_started(budget.algorithm, state, there)
            )
        state = solution.state
    return solution


# The key, the problem, candidates, how to solve, the samples that stay in every fold, and those that are scored.
Given = tuple[Array, Problem, Regularizer, SolveOptions, Array, TaskData]


@partial(jax.jit, static_argnames=("score", "sharding", "prepare"))
def _scores(
    given: Given, parts: Array, fold: Array, *, score: Metric, sharding: NodeSharding | None,
    prepare: Preparation | None,
) -> Fitted:  # fmt: skip
    """Fit some folds at once: scores of tasks, residuals and rounds of all candidates."""

    def one(given: Given, part: Array, fold: Array) -> Fitted:
        key, problem, candidates, budget, stays, seen_as = given

        def entry(_: Regularizer, s: Solution[Problem]) -> Fitted:
            return _scored(score, s.weights, held_out, problem.loss), s.certificate.residual, jnp.asarray(s.rounds)

        training = problem.replace(data=problem.data.keep((part != fold) | stays))
        training, (held_out,) = fitted(training, prepare, seen_as.keep(part == fold))
        return scan_candidates(key, partial(Problem, training.data, problem.loss), candidates, budget, entry)

    return several(one, given, parts, fold, sharding)


def _metric(metric: Metric | str | None, loss: Loss) -> tuple[Metric, str, bool]:
    """The function, its name, and whether more of it is better."""
    metric = loss.scored_by if metric is None else metric
    if not callable(metric):
        check.one_of("cross_validate", "metric", metric, tuple(METRICS))
        metric = METRICS[metric]
    return metric, getattr(metric, "__name__", "metric"), metric in _MORE_IS_BETTER


def _scored(score: Metric, weights: Array, data: TaskData, loss: Loss) -> Array:
    """Score every task."""
    if score in _OF_THE_LOSS:
        return score(weights, data, loss, per_task=True)
    return score(weights, data, per_task=True)


def _of_candidates(task_scores: np.ndarray) -> np.ndarray:
    """Mean over tasks, folds and trials ``[c]``; NaN for one that lacks a score another has."""
    known = ~np.isnan(task_scores)
    lacking = (known.any(2, keepdims=True) & ~known).any((0, 1, 3))
    return np.where(lacking, np.nan, _mean(_mean(task_scores, 3), (0, 1)))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """NaN where nothing is divided by."""
    return np.where(b > 0, a / np.maximum(b, 1), np.nan)


def _mean(a: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """The mean of what is a number."""
    known = ~np.isnan(a)
    total = np.sum(np.where(known, a, 0.0), axis=axis)
    return np.where(known.any(axis), total / np.maximum(known.sum(axis), 1), np.nan)
