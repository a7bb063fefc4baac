"""Learners: the interface of the models that a search trains, and one problem.

One problem is one, and so are the problems of several classes (`multiclass`); the searches know nothing of either.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.pytree import Pytree
from mocha_jax._core.values import is_traced
from mocha_jax._core.warnings import NotConverged, silenced, warn
from mocha_jax._data.standardize import advice
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.by_fold import Fitted
from mocha_jax._selection.candidates import SolveOptions, candidate, scan_candidates, warm_started
from mocha_jax._selection.preparation import (
    METRICS,
    Metric,
    Preparation,
    Scoring,
    anonymous,
    of_residuals,
    prepared,
    scored,
    scoring,
    to_score,
)
from mocha_jax._selection.results import Path
from mocha_jax.regularizers import Regularizer

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A type checker takes these where a plain `Problem` is searched.
    Answer = TypeVar("Answer", default=Solution[Problem])
    Way = TypeVar("Way", default=Path)
else:
    from typing import TypeVar

    Answer = TypeVar("Answer")  # what all data is fitted with
    Way = TypeVar("Way")  # what all candidates are fitted with, one after the other


class Labels(NamedTuple):
    """The class of every sample."""

    number: np.ndarray  # [m, n] integers from 0
    names: Sequence[Hashable]  # of the classes


class FoldTrainer(Pytree):
    """Arrays of what is trained, as compiled programs have them."""

    @abstractmethod
    def fit(
        self, key: Array, candidates: Regularizer, options: SolveOptions, rows: Array, held_out: TaskData,
        prepare: Preparation | None, metric: Metric,
    ) -> Fitted:  # fmt: skip
        """Train on some rows with each candidate, and score samples that are held out.

        Args:
          key: a JAX random key.
          candidates: with a leading axis.
          options: of each solve.
          rows: marks those to train on ``[m, n]``.
          held_out: samples to score.
          prepare: what to do with samples before, by what the rows say.
          metric: the score.
        """

    @abstractmethod
    def score(self, metric: Metric, weights: Array, data: TaskData) -> Array:
        """Score every task."""


class Learner(ABC, Generic[Answer, Way]):
    """The interface of the models that a search trains."""

    problem: Problem  # that is asked for what all problems have in common
    data: TaskData  # whose samples are dealt to folds

    @property
    @abstractmethod
    def centres_labels(self) -> bool:
        """Tell whether labels are centred where samples are standardised."""

    @property
    @abstractmethod
    def weights(self) -> jax.ShapeDtypeStruct:
        """The shape of the weights for one candidate."""

    @abstractmethod
    def scoring(self, owner: str, metric: Metric | str | None) -> Scoring:
        """The score that was asked for, or the usual one."""

    @abstractmethod
    def labels(self, data: TaskData) -> Labels | None:
        """The class of every sample, where labels are classes."""

    @abstractmethod
    def trainer(self, owner: str, prepare: Preparation | None) -> FoldTrainer:
        """The arrays for compiled programs, without names."""

    @abstractmethod
    def answer(self, key: Array, way: Regularizer, options: SolveOptions, prepare: Preparation | None) -> Answer:
        """Train on all data through some candidates, and return what the last one gives."""

    @abstractmethod
    def path(
        self, owner: str, key: Array, candidates: Regularizer, options: SolveOptions, prepare: Preparation | None
    ) -> Way:
        """Train on all data with every candidate, and warn of those that did not reach the tolerance."""


def warn_of_candidates(
    owner: str, residuals: np.ndarray, rounds: np.ndarray, options: SolveOptions, data: TaskData
) -> None:
    """Warn of candidates of a path that did not reach the tolerance."""
    caveat = caveats.unfinished(
        residuals, rounds, options.tol, options.max_rounds, advice(data), "are as far as they got"
    )
    if caveat is not None:
        warn(f"{owner}: {caveat}", NotConverged)


class _OneTrainer(FoldTrainer):
    problem: Problem

    def fit(
        self, key: Array, candidates: Regularizer, options: SolveOptions, rows: Array, held_out: TaskData,
        prepare: Preparation | None, metric: Metric,
    ) -> Fitted:  # fmt: skip
        training, seen, for_those = to_score(prepare, self.problem.data.keep(rows), held_out)

        def entry(_: Regularizer, s: Solution[Problem]) -> Fitted:
            return self.score(metric, for_those(s.weights), seen), s.certificate.residual, jnp.asarray(s.rounds)

        return scan_candidates(key, partial(Problem, training, self.problem.loss), candidates, options, entry)

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
        self, key: Array, way: Regularizer, options: SolveOptions, prepare: Preparation | None
    ) -> Solution[Problem]:
        data, state = prepared(prepare, self.data), None
        last = np.shape(jax.tree.leaves(way)[0])[0] - 1
        for i in range(last + 1):
            problem = Problem(data, self.problem.loss, candidate(way, i))
            with silenced(NotConverged) if i < last else contextlib.nullcontext():  # only the last one is handed out
                solution = options.solve(
                    key, problem, state if state is None else warm_started(options.algorithm, state, problem)
                )
            state = solution.state
        return solution

    def path(
        self, owner: str, key: Array, candidates: Regularizer, options: SolveOptions, prepare: Preparation | None
    ) -> Path:
        problem = self.problem.replace(data=prepared(prepare, self.data)).unnamed()
        path = or_by_loops(
            problem, options.algorithm, lambda by: _path(key, problem, candidates, options.replace(algorithm=by))
        )
        if not is_traced(path.rounds):
            residuals, rounds = np.asarray(path.certificate.residual), np.asarray(path.rounds)
            warn_of_candidates(owner, residuals, rounds, options, problem.data)
        return path


def learner_of(owner: str, problem: Problem | Learner[Answer, Way]) -> Learner[Answer, Way]:
    """Return the learner that is given, or that of a problem."""
    if isinstance(problem, Learner):
        return problem
    check.instance(owner, "problem", problem, Problem, "Problem(data, loss, regularizer)")
    return cast(Learner[Answer, Way], OneProblem(problem))


def _fit_path(key: Array, problem: Problem, candidates: Regularizer, options: SolveOptions) -> Path:
    def entry(regularizer: Regularizer, s: Solution[Problem]) -> Path:
        return Path(regularizer, s.weights, s.relation, s.certificate, jnp.asarray(s.rounds))

    return scan_candidates(key, partial(Problem, problem.data, problem.loss), candidates, options, entry)


_path = Program(_fit_path, lambda key, problem, *_: problem.data.x.size, often=True)
