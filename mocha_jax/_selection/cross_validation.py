"""Choosing hyperparameters by cross-validation, all fits of a fold in one compiled call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.devices import NodeSharding, on_all, on_purpose
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.standardize import advice
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.by_fold import Fitted, alone, fold_by_fold, room, several
from mocha_jax._selection.candidates import SolveOptions, candidate, solve_options, with_first
from mocha_jax._selection.learner import Answer, FoldTrainer, Learner, Way, learner_of
from mocha_jax._selection.preparation import Metric, Preparation, anonymous, preparation
from mocha_jax._selection.results import CrossValidation, of_candidates
from mocha_jax.regularizers import Regularizer


@on_purpose
def cross_validate(
    problem: Problem | Learner[Answer, Way],
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
) -> CrossValidation[Answer]:
    """Choose a regularizer by cross-validation within every task.

    All candidates for one or more folds are one compiled call: the samples are in memory once, a fold is no more than
    other weights, and each candidate starts from the solution of the one before.

    Warnings name candidates that did not converge, a best one at the edge of the grid, and tasks in which a class has
    fewer samples than there are folds.

    Args:
      problem: data and loss; its own regularizer does not matter. For several classes see `multiclass.cross_validate`.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      key: a JAX random key; default ``jax.random.key(0)``. The folds depend on it, on nodes and rows only: with
        the same key all models of the same data are compared on the same folds.
      folds: parts of each node's samples, of which each is held out once; at most the samples of the largest task.
      trials: how often to do that, each time with other parts.
      groups: ``[m, n]`` integers, see `TaskData.folds`.
      metric: ``"error_rate"``, ``"auc"``, ``"rmse"``, ``"mean_loss"``, ``"absolute_error"``, ``"quadratic_kappa"``, or
        any function like those of `metrics`, called as ``metric(weights, data, per_task=True)``. By default the
        metric of the loss: the error rate for losses of the margin, the RMSE for `Squared`, the absolute error for
        `Ordinal`, and for all others, a loss of your own included, its mean.
      maximise: whether more is better; by default only for the AUC and kappa, so set it for a function of your own.
      scored_as: the same rows as other tasks, for a global model: fitted to ``data.pooled()``, it is compared with
        others on the tasks of ``data``.
      standardize: the scaling of features, fitted to the training samples of every fold: ``"pooled"``, ``"task"`` or
        ``"within"``, see `TaskData.standardized`; or a function of your own, pure, from the training samples to a
        function of any samples. By name, labels are centred too where the loss is one of the residual; what is scored
        are predictions of the labels as they are. A function's own labels are scored. It takes memory for the samples
        once more for every fit at the same time.
      keep_rare: never take a sample from training that is alone in its class in its task (of a loss with two classes,
        without `groups`). Otherwise a task is tested on a class that it has never seen, and if that happens in
        many tasks, a model that ignores rare classes seems best. The scores of such samples are those
        of training samples, too good: with many of them, use the choice and not the score. A warning counts them.
      tol: relative gap at which a solve ends.
      max_rounds: the limit for each solve. The gap reached is reported.
      record_every: rounds between tests of the gap.
      chunk: fits that a device does at the same time; more need more memory. Default one on a CPU, all folds of a
        trial elsewhere. Several devices divide the fits.
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
    name, learner = "cross_validate", learner_of("cross_validate", problem)
    prepare = preparation(name, standardize, learner.centres_labels)
    first = with_first(name, learner.problem, candidates)
    options = solve_options(name, first, algorithm, tol, max_rounds, record_every)
    check.integer(name, 1, trials=trials)
    key, data = jax.random.key(0) if key is None else key, learner.data
    check.key(name, key)
    check.integer(name, 2, folds=folds)
    check.flag(
        name, refit=refit, progress=progress, keep_rare=keep_rare, maximise=False if maximise is None else maximise
    )
    score = learner.scoring(name, metric)
    more_is_better = score.more_is_better if maximise is None else maximise
    seen_as = _seen_as(name, learner, scored_as)
    trainer = learner.trainer(name, prepare)
    returned = jax.eval_shape(lambda w: trainer.score(score.metric, w, seen_as), learner.weights)
    if getattr(returned, "shape", None) != (seen_as.num_tasks,):
        raise ValueError(
            f"{name}: metric(weights, data, per_task=True) must return a score for each task, an array "
            f"[{seen_as.num_tasks}]; got {returned}."
        )
    size, sharding = room(name, data, trials, folds, chunk)
    parts = jnp.stack([data.folds(jax.random.fold_in(key, t), folds, groups) for t in range(trials)])
    # Of the tasks that are scored, so that a global model is judged by the same samples.
    rare, stays, labels = None, np.zeros(data.y.shape, bool), learner.labels(seen_as)
    if labels is not None:
        sizes, single = alone(seen_as, labels.number, len(labels.names), groups)
        stays = single & keep_rare & (groups is None)
        rare = caveats.rare_classes(sizes, folds, int(stays.sum()), labels.names)
    inputs = on_all(sharding, (key, trainer, candidates, options, jnp.asarray(stays), anonymous(seen_as, prepare)))
    parts = on_all(sharding, parts)

    def fit(trial: Array, fold: Array) -> Fitted:
        def work(by: Algorithm[Problem]) -> Fitted:
            fitted_by = (*inputs[:3], inputs[3].replace(algorithm=by), *inputs[4:])
            return _fitted(fitted_by, parts[trial], fold, metric=score.metric, sharding=sharding, prepare=prepare)

        return or_by_loops(learner.problem, options.algorithm, work)

    scores, residuals, rounds = fold_by_fold(fit, trials, folds, size, progress)
    hint = "" if prepare else advice(data)
    best = _chosen(name, candidates, scores, residuals, rounds, options, more_is_better, rare, hint)
    way = jax.tree.map(lambda leaf: leaf[: best + 1], candidates)
    answer = learner.answer(key, way, options, prepare) if refit else None
    return CrossValidation(candidates, scores, residuals, rounds, best, candidate(candidates, best), answer, score.name)


def _seen_as(name: str, learner: Learner[Answer, Way], scored_as: TaskData | None) -> TaskData:
    """The rows by the tasks that are scored."""
    if scored_as is None:
        return learner.data
    check.instance(name, "scored_as", scored_as, TaskData, "problem.data")
    shape, tasks = learner.data.y.shape, learner.problem.data.num_tasks
    if scored_as.y.shape != shape:
        raise ValueError(f"{name}: scored_as must have the rows of the problem's data, {shape}.")
    if tasks not in (1, scored_as.num_tasks):
        raise ValueError(f"{name}: scored_as is for a global model, of one task; this one has {tasks}.")
    return scored_as


def _chosen(
    name: str, candidates: Regularizer, scores: np.ndarray, residuals: np.ndarray, rounds: np.ndarray,
    options: SolveOptions, more_is_better: bool, rare: str | None, hint: str = "",
) -> int:  # fmt: skip
    """Choose the best candidate, and warn about reasons against it."""
    mean = of_candidates(scores)
    if np.isnan(mean).all():
        raise ValueError(f"{name}: no candidate has a score in every fold; are there samples of each class to score?")
    if np.isnan(mean).any():
        without = np.flatnonzero(np.isnan(mean)).tolist()
        warn(f"{name}: candidates {without} lack scores that others have and are passed over.")
    best = int(np.nanargmax(mean) if more_is_better else np.nanargmin(mean))
    if (caveat := caveats.unfinished(residuals, rounds, options.tol, options.max_rounds, hint)) is not None:
        warn(f"{name}: {caveat}", NotConverged)
    for caveat in (
        caveats.at_the_edge(candidates, mean, best, more_is_better),
        rare,
    ):
        if caveat is not None:
            warn(f"{name}: {caveat}")
    return best


# The key, what is trained, candidates, how to solve, the samples that stay in every fold, and those that are scored.
Given = tuple[Array, FoldTrainer, Regularizer, SolveOptions, Array, TaskData]


def _fit_folds(
    inputs: Given, parts: Array, fold: Array, *, metric: Metric, sharding: NodeSharding | None,
    prepare: Preparation | None,
) -> Fitted:  # fmt: skip
    """Fit some folds at once: scores of tasks, residuals and rounds of all candidates."""

    def one(inputs: Given, part: Array, fold: Array) -> Fitted:
        key, trainer, candidates, options, stays, seen_as = inputs
        rows, held_out = (part != fold) | stays, seen_as.keep(part == fold)
        return trainer.fit(key, candidates, options, rows, held_out, prepare, metric)

    return several(one, inputs, parts, fold, sharding)


_fitted = Program(
    _fit_folds,
    lambda inputs, parts, fold, **_: max(fold.size, 1) * inputs[-1].x.size,
    often=True,
    static_argnames=("metric", "sharding", "prepare"),
)
