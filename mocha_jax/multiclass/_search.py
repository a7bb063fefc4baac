"""The problems of several classes as a search trains them: with one regularizer, and scored together."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core.compiling import Program
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._model.multiclass import require_probabilities
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import cross_validation, path
from mocha_jax._selection.by_fold import Fitted
from mocha_jax._selection.candidates import SolveOptions, candidate, scan_candidates
from mocha_jax._selection.learner import FoldTrainer, Labels, Learner, warn_of_candidates
from mocha_jax._selection.preparation import Metric, Preparation, Scoring, anonymous, prepared, prepared_within, scoring
from mocha_jax._selection.results import CrossValidation
from mocha_jax.multiclass import _scores
from mocha_jax.multiclass._each_class import EachClass, Make, count_classes, each_class
from mocha_jax.multiclass._one_vs_rest import OneVsRest, described, of_solution, warn_of_classes
from mocha_jax.regularizers import Regularizer

METRICS: dict[str, Metric] = {"error_rate": _scores.error_rate, "log_loss": _scores.log_loss}


class _ClassesTrainer(FoldTrainer):
    each: EachClass
    data: TaskData  # with labels 0, 1, ...

    def fit(
        self, key: Array, candidates: Regularizer, options: SolveOptions, rows: Array, held_out: TaskData,
        prepare: Preparation | None, metric: Metric,
    ) -> Fitted:  # fmt: skip
        # The samples of all classes are the same, and so is what is done with them.
        training, seen = prepared_within(prepare, self.data.keep(rows), held_out)

        def entry(_: Regularizer, s: Solution[Problem]) -> Fitted:
            return s.weights, s.certificate.residual, jnp.asarray(s.rounds)

        def of_class(problem: Problem) -> Fitted:
            own = problem.data.keep(rows)
            own = own if prepare is None else own.replace(x=training.x)
            return scan_candidates(key, partial(Problem, own, problem.loss), candidates, options, entry)

        weights, residuals, rounds = self.each.map(of_class)  # [classes, c, ...]
        scores = lax.map(lambda w: self.score(metric, w, seen), jnp.swapaxes(weights, 0, 1))
        # Of the class that is furthest from its tolerance, as far as that is known.
        last = jnp.argmax(jnp.where(jnp.isfinite(residuals), residuals, -1.0), axis=0)[None]
        return scores, *(jnp.take_along_axis(a, last, axis=0)[0] for a in (residuals, rounds))

    def score(self, metric: Metric, weights: Array, data: TaskData) -> Array:
        return metric(weights, data, per_task=True)


@dataclasses.dataclass(frozen=True)
class Classes(Learner[OneVsRest, list[OneVsRest]]):
    """A problem for each of several classes."""

    data: TaskData  # with labels 0, 1, ...
    make: Make
    each: EachClass
    problem: Problem  # of the first class

    centres_labels = False

    @property
    def weights(self) -> jax.ShapeDtypeStruct:
        data = self.problem.data
        return jax.ShapeDtypeStruct((self._count, data.num_tasks, data.num_features), data.dtype)

    def scoring(self, owner: str, metric: Metric | str | None) -> Scoring:
        score = scoring(owner, "error_rate" if metric is None else metric, METRICS)
        if score.metric is _scores.log_loss:
            tasks = range(self.problem.data.num_tasks)
            require_probabilities(owner, False, all(self.problem.loss.of_task(t).log_odds for t in tasks))
        return score

    def labels(self, data: TaskData) -> Labels:
        names = data.names.classes
        return Labels(np.asarray(data.y), range(self._count) if names is None else names)

    def trainer(self, owner: str, prepare: Preparation | None) -> FoldTrainer:
        x = self.each.common.data.x
        if x is None or not (x is self.data.x or np.array_equal(x, self.data.x)):
            raise ValueError(
                f"{owner}: make must leave the samples as they are, for its models are scored by those of data; pass "
                f"standardize=..., or data with other samples."
            )
        return _ClassesTrainer(self.each, anonymous(self.data, prepare))

    def answer(self, key: Array, way: Regularizer, options: SolveOptions, prepare: Preparation | None) -> OneVsRest:
        last = self._solved(key, way, options, prepare)[-1]
        warn_of_classes("cross_validate", last, options)
        return last

    def path(
        self, owner: str, key: Array, candidates: Regularizer, options: SolveOptions, prepare: Preparation | None
    ) -> list[OneVsRest]:
        path = self._solved(key, candidates, options, prepare)
        residuals, rounds = (
            np.stack([np.asarray(a) for a in each], axis=1)
            for each in ([model.certificate.residual for model in path], [model.rounds for model in path])
        )
        warn_of_candidates(owner, residuals, rounds, options, self.data)
        return path

    @property
    def _count(self) -> int:
        return len(self.each.classes)

    def _solved(
        self, key: Array, candidates: Regularizer, options: SolveOptions, prepare: Preparation | None
    ) -> list[OneVsRest]:
        data, each, first = prepared(prepare, self.data), self.each, self.problem
        if prepare is not None:
            each, first = each_class("standardize", data, self.make, self._count)
        models = or_by_loops(
            first, options.algorithm, lambda by: _solved(key, each, candidates, options.replace(algorithm=by))
        )

        def model(i: int) -> OneVsRest:
            own = first.replace(regularizer=candidate(candidates, i))
            return described(jax.tree.map(lambda leaf: leaf[:, i], models), own, data.names)

        return [model(i) for i in range(models.rounds.shape[1])]


def classes_of(owner: str, data: TaskData, make: Make, classes: int | None) -> Classes:
    """The problems of all classes."""
    count = count_classes(owner, data, classes)
    return Classes(data, make, *each_class(owner, data, make, count))


def _solve_each(key: Array, each: EachClass, candidates: Regularizer, options: SolveOptions) -> OneVsRest:
    """Models of all classes and candidates, ``[classes, c, ...]``."""

    def of_class(problem: Problem) -> OneVsRest:
        with_regularizer = partial(Problem, problem.data, problem.loss)
        return scan_candidates(key, with_regularizer, candidates, options, lambda _, s: of_solution(s))

    return each.map(of_class)


_solved = Program(_solve_each, lambda key, each, *_: each.size, often=True)


@on_purpose
def lambda_path(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    **options: Any,
) -> list[OneVsRest]:
    """Train each class against the rest with one regularizer after the other; one compiled call for all.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      classes: how many; default as `one_vs_rest`.
      **options: `standardize`, `key`, `tol`, `max_rounds` and `record_every`, as of `mocha_jax.lambda_path`.

    Returns:
      The models of every candidate, each begun from the ones before.
    """
    return path.lambda_path(classes_of("lambda_path", data, make, classes), candidates, algorithm, **options)


@on_purpose
def cross_validate(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    **options: Any,
) -> CrossValidation[OneVsRest]:
    """Choose one regularizer for the models of all classes, by cross-validation within every task.

    It is `mocha_jax.cross_validate` of the problems of all classes: on the same folds, all classes and candidates of a
    fold in one compiled call, with the same warnings. What is scored is the class whose model says most.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      classes: how many; default as `one_vs_rest`.
      **options: all others of `mocha_jax.cross_validate`: `key`, `folds`, `trials`, `groups`, `metric`, `maximise`,
        `scored_as`, `standardize`, `keep_rare`, `tol`, `max_rounds`, `record_every`, `chunk`, `refit` and `progress`.
        The `metric` is ``"error_rate"``, the default, of the logistic loss ``"log_loss"``, or any function like those
        of `multiclass`, called as ``metric(weights, data, per_task=True)`` with weights ``[classes, num_tasks, d]``.
        Residuals and rounds are those of the class that is furthest from its tolerance. Labels are not centred, and of
        what a function for `standardize` returns the samples count alone.

    Returns:
      The scores and the choice; ``solution`` is an `OneVsRest`.

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
    learner = classes_of("cross_validate", data, make, classes)
    return cross_validation.cross_validate(learner, candidates, algorithm, **options)
