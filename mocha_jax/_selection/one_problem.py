"""One problem as a search trains it."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import NotConverged, silenced
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.by_fold import Fitted
from mocha_jax._selection.learner import Answer, FoldTrainer, Labels, Learner, Way, warn_of_candidates
from mocha_jax._selection.preparation import Preparation, anonymous, of_residuals, prepared, to_score
from mocha_jax._selection.records import Path
from mocha_jax._selection.scoring import METRICS, Metric, Scoring, scored, scoring
from mocha_jax._selection.solves import SolveOptions, candidate, scan_candidates, warm_started
from mocha_jax.regularizers import Regularizer


class _OneTrainer(FoldTrainer):
    problem: Problem

    def fit(
        self, key: Array, candidates: Regularizer, budget: SolveOptions, rows: Array, held_out: TaskData,
        prepare: Preparation | None, metric: Metric,
    ) -> Fitted:  # fmt: skip
        training, seen, for_those = to_score(prepare, self.problem.data.keep(rows), held_out)

        def entry(_: Regularizer, s: Solution[Problem]) -> Fitted:
            return self.score(metric, for_those(s.weights), seen), s.certificate.residual, jnp.asarray(s.rounds)

        return scan_candidates(key, partial(Problem, training, self.problem.loss), candidates, budget, entry)

    def score(self, metric: Metric, weights: Array, data: TaskData) -> Array:
        return scored(metric, weights, data, self.problem.loss)


@dataclasses.dataclass(frozen=True)
class OneProblem(Learner[Solution[Problem], Path]):
    """One problem, of whatever loss."""

    problem: Problem

    @property
    def data(self) -> TaskData:  # type: ignore[override]
        return self.problem.data

    @property
    def centres_labels(self) -> bool:
        return of_residuals(self.problem)

    @property
    def weights(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.data.num_tasks, self.data.num_features), self.data.dtype)

    def scoring(self, owner: str, metric: Metric | str | None) -> Scoring:
        return scoring(owner, self.problem.loss.scored_by if metric is None else metric, METRICS)

    def labels(self, data: TaskData) -> Labels | None:
        return Labels((np.asarray(data.y) > 0).astype(int), ("-1", "+1")) if self.problem.loss.binary else None

    def trainer(self, owner: str, prepare: Preparation | None) -> FoldTrainer:
        return _OneTrainer(self.problem.exchange(data=anonymous(self.data, prepare)))

    def answer(
        self, key: Array, way: Regularizer, budget: SolveOptions, prepare: Preparation | None
    ) -> Solution[Problem]:
        data, state = prepared(prepare, self.data), None
        last = np.shape(jax.tree.leaves(way)[0])[0] - 1
        for i in range(last + 1):
            there = Problem(data, self.problem.loss, candidate(way, i))
            with silenced(NotConverged) if i < last else contextlib.nullcontext():  # only the last one is handed out
                solution = budget.solve(
                    key, there, state if state is None else warm_started(budget.algorithm, state, there)
                )
            state = solution.state
        return solution

    def path(
        self, owner: str, key: Array, candidates: Regularizer, budget: SolveOptions, prepare: Preparation | None
    ) -> Path:
        problem = self.problem.replace(data=prepared(prepare, self.data)).unnamed()
        path = or_by_loops(
            problem, budget.algorithm, lambda by: _path(key, problem, candidates, budget.replace(algorithm=by))
        )
        if not is_traced(path.rounds):
            residuals, rounds = np.asarray(path.certificate.residual), np.asarray(path.rounds)
            warn_of_candidates(owner, residuals, rounds, budget, problem.data)
        return path


def learner_of(owner: str, given: Problem | Learner[Answer, Way]) -> Learner[Answer, Way]:
    """Return the learner that is given, or that of a problem."""
    if isinstance(given, Learner):
        return given
    check.instance(owner, "problem", given, Problem, "Problem(data, loss, regularizer)")
    return cast(Learner[Answer, Way], OneProblem(given))


def _fit_path(key: Array, problem: Problem, candidates: Regularizer, budget: SolveOptions) -> Path:
    def entry(regularizer: Regularizer, s: Solution[Problem]) -> Path:
        return Path(regularizer, s.weights, s.relation, s.certificate, jnp.asarray(s.rounds))

    return scan_candidates(key, partial(Problem, problem.data, problem.loss), candidates, budget, entry)


_path = Program(_fit_path, lambda key, problem, *_: problem.data.x.size, often=True)
