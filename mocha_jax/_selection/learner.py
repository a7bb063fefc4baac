"""Learners: the interface of the models that a search trains.

One problem is one, and so are the problems of several classes (`multiclass`); the searches know nothing of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple

import jax
import numpy as np
from jax import Array

from mocha_jax._core.pytree import Pytree
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.standardize import advice
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.by_fold import Fitted
from mocha_jax._selection.preparation import Preparation
from mocha_jax._selection.records import Path
from mocha_jax._selection.scoring import Metric, Scoring
from mocha_jax._selection.solves import SolveOptions
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
        self, key: Array, candidates: Regularizer, budget: SolveOptions, rows: Array, held_out: TaskData,
        prepare: Preparation | None, metric: Metric,
    ) -> Fitted:  # fmt: skip
        """Train on some rows with each candidate, and score samples that are held out.

        Args:
          key: a JAX random key.
          candidates: with a leading axis.
          budget: options of each solve.
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
    def answer(self, key: Array, way: Regularizer, budget: SolveOptions, prepare: Preparation | None) -> Answer:
        """Train on all data through some candidates, and return what the last one gives."""

    @abstractmethod
    def path(
        self, owner: str, key: Array, candidates: Regularizer, budget: SolveOptions, prepare: Preparation | None
    ) -> Way:
        """Train on all data with every candidate, and warn of those that did not reach the tolerance."""


def warn_of_candidates(
    owner: str, residuals: np.ndarray, rounds: np.ndarray, budget: SolveOptions, data: TaskData
) -> None:
    """Warn of candidates of a path that did not reach the tolerance."""
    caveat = caveats.unfinished(
        residuals, rounds, budget.tol, budget.max_rounds, advice(data), "are as far as they got"
    )
    if caveat is not None:
        warn(f"{owner}: {caveat}", NotConverged)
