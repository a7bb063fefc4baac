"""Choosing hyperparameters by cross-validation, all fits of a fold in one compiled call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.typing import ArrayLike

from mocha_jax import metrics
from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, each_device, on_all
from mocha_jax._core.transfers import on_purpose
from mocha_jax._core.warnings import NotConverged, silenced, warn
from mocha_jax._data.splits import class_sizes
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.progress import Bar
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.path import SolveOptions, scan_candidates, solve_options, warm_started
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


@dataclasses.dataclass(frozen=True)
class CrossValidation:
    """Scores of all candidates and the best one, from `cross_validate`."""

    candidates: Regularizer  # with a leading axis [c]
    task_scores: np.ndarray  # [trials, folds, c, num_tasks] NaN where a task has no sample in a fold
    residuals: np.ndarray  # [trials, folds, c] relative gaps at which the solves ended
    rounds: np.ndarray  # [trials, folds, c]
    best: int  # of the candidates
    regularizer: Regularizer  # the best one
    solution: Solution[Problem] | None  # for all data with it; None with ``refit=False``
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
    keep_rare: bool = True,
    tol: float = 1e-3,
    max_rounds: int = 200,
    record_every: int = 5,
    chunk: int | None = None,
    refit: bool = True,
    progress: bool = False,
) -> CrossValidation:
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
    budget, count = solve_options(name, problem, candidates, algorithm, tol, max_rounds, record_every)
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
    # On a CPU one fit keeps a core busy, and several at once only push one another out of its cache.
    chunk = (1 if jax.default_backend() == "cpu" else folds) if chunk is None else chunk
    check.integer(name, 1, chunk=chunk)
    # Each device does its own fits, unless all of them share the samples already.
    devices = 1 if data.sharding is not None else min(jax.local_device_count(), -(-trials * folds // chunk))
    parts = jnp.stack([data.folds(jax.random.fold_in(key, t), folds, groups) for t in range(trials)])
    # Of the tasks that are scored, so that a global model is judged by the same samples.
    sizes, alone = _rare(problem.replace(data=seen_as), groups)
    stays = alone & keep_rare & (groups is None)
    sharding = _over(devices)
    given = on_all(sharding, (key, problem.unnamed(), candidates, budget, jnp.asarray(stays), seen_as.unnamed()))
    parts = on_all(sharding, parts)
    found = []
    with Bar(progress, total=trials * folds, done=0) as bar:
        for trial, fold in _chunks(trials * folds, folds, chunk * devices):
            out = or_by_loops(
                problem, budget.algorithm,
                lambda by: _scores(
                    (*given[:3], given[3].replace(algorithm=by), *given[4:]), parts[trial], fold,  # noqa: B023
                    score=score, sharding=sharding,
                ),
            )  # fmt: skip
            found.append(jax.tree.map(np.asarray, out))
            bar.show(min(len(found) * len(fold), trials * folds), float(np.nanmean(found[-1][1])))
    scores, residuals, rounds = (
        np.concatenate(a)[: trials * folds].reshape(trials, folds, count, *a[0].shape[2:])
        for a in zip(*found, strict=True)
    )
    mean = _of_candidates(scores)
    if np.isnan(mean).all():
        raise ValueError(f"{name}: no candidate has a score in every fold; are there samples of each class to score?")
    if np.isnan(mean).any():
        without = np.flatnonzero(np.isnan(mean)).tolist()
        warn(f"{name}: candidates {without} lack scores that others have and are passed over.")
    best = int(np.nanargmax(mean) if more_is_better else np.nanargmin(mean))
    if (caveat := caveats.unfinished(residuals, rounds, budget.tol, budget.max_rounds)) is not None:
        warn(f"{name}: {caveat}", NotConverged)
    for caveat in (
        caveats.at_the_edge(candidates, mean, best, more_is_better),
        caveats.rare_classes(sizes, folds, int(stays.sum())),
    ):
        if caveat is not None:
            warn(f"{name}: {caveat}")
    regularizer = jax.tree.map(lambda leaf: leaf[best], candidates)
    solution = _refitted(key, problem, candidates, budget, best) if refit else None
    return CrossValidation(candidates, scores, residuals, rounds, best, regularizer, solution, metric_name)


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


def _over(devices: int) -> NodeSharding | None:
    """Fits over so many of this process's devices; None: one after the other."""
    if devices == 1:
        return None
    mesh = jax.make_mesh((devices,), ("fits",), (AxisType.Auto,), devices=jax.local_devices()[:devices])
    return NodeSharding(mesh, ("fits",), False, devices)


@partial(jax.jit, static_argnames=("score", "sharding"))
def _scores(
    given: Given, parts: Array, fold: Array, *, score: Metric, sharding: NodeSharding | None
) -> tuple[Array, Array, Array]:
    """Fit some folds at once: scores of tasks, residuals and rounds of all candidates."""

    def one(given: Given, part: Array, fold: Array) -> tuple[Array, Array, Array]:
        key, problem, candidates, budget, stays, seen_as = given
        held_out = seen_as.keep(part == fold)

        def entry(_: Regularizer, s: Solution[Problem]) -> tuple[Array, Array, Array]:
            return _scored(score, s.weights, held_out, problem.loss), s.certificate.residual, jnp.asarray(s.rounds)

        training = problem.data.keep((part != fold) | stays)
        return scan_candidates(key, problem.replace(data=training), candidates, budget, entry)

    def some(given: Given, parts: Array, fold: Array) -> tuple[Array, Array, Array]:
        if len(fold) == 1:  # without the cost of mapping
            return jax.tree.map(lambda a: a[None], one(given, parts[0], fold[0]))
        return jax.vmap(partial(one, given))(parts, fold)

    return each_device(sharding, some, given, parts, fold)


def _chunks(total: int, folds: int, size: int) -> Iterator[tuple[Array, Array]]:
    """Trial and fold of each fit, so many at a time; the last ones are repeated where a chunk would be shorter."""
    for start in range(0, total, size):
        which = np.minimum(np.arange(start, start + size), total - 1)
        yield jnp.asarray(which // folds, jnp.int32), jnp.asarray(which % folds, jnp.int32)


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


def _rare(problem: Problem, groups: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Count each class in each task ``[num_tasks, 2]``, and mark the samples that are alone in theirs ``[m, n]``."""
    data = problem.data
    y, real, task = np.asarray(data.y), np.asarray(data.weight) > 0, np.asarray(data.task)
    if not problem.loss.binary:
        return np.zeros((data.num_tasks, 2), int), np.zeros(real.shape, bool)
    sizes = class_sizes(y, real, task, data.num_tasks, None if groups is None else np.asarray(groups))
    # Of two samples, one of each class, neither is rare.
    alone = (np.take_along_axis(sizes[task], (y > 0).astype(int), 1) == 1) & (sizes[task].sum(1, keepdims=True) > 2)
    return sizes, real & alone


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
