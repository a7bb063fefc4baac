"""Records of searches: solutions along a path, and scores of all candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Generic, TypeVar

import jax
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Relation, summary
from mocha_jax._problem.gap import Certificate
from mocha_jax.regularizers import Regularizer

Answer = TypeVar("Answer")  # what all data is fitted with: a `Solution`, of several classes an `OneVsRest`


class Path(Pytree):
    """Solutions along a list of hyperparameters; every field has a leading axis, one entry for each."""

    regularizer: Regularizer
    weights: Array  # [c, num_tasks, d]
    relation: Relation  # Omega of each; None where it is given
    certificate: Certificate
    rounds: Array  # [c] int32

    def __repr__(self) -> str:
        shown = {"regularizer": self.regularizer, "relative_gap": self.certificate.relative_gap, "rounds": self.rounds}
        return summary(self, {**shown, "weights": self.weights})

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[Path]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int | slice) -> Path:
        """One of them, without the leading axis; or several."""
        if not isinstance(i, slice):
            if (number := check.whole(i)) is None:
                raise ValueError(f"Path: i must be an integer or a slice, got {check.shown(i)}.")
            if not -len(self) <= number < len(self):
                raise IndexError(f"a path of {len(self)} candidates has none with number {number}")
            i = number
        return jax.tree.map(lambda leaf: leaf[i], self)


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
        return of_candidates(self.task_scores)

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of `mean` over folds and trials, ``[c]``; folds share samples, so it is optimistic."""
        flat = self.scores.reshape(-1, self.scores.shape[2])
        count = (~np.isnan(flat)).sum(0)
        squares = _mean((flat - _mean(flat, 0)) ** 2, 0) * _quotient(count, count - 1)
        return np.where(np.isnan(self.mean), np.nan, np.sqrt(_quotient(squares, count)))

    def __repr__(self) -> str:
        score, error = self.mean[self.best], self.standard_error[self.best]
        return (
            f"CrossValidation(best={self.best} of {len(self.mean)}, {self.regularizer}, {self.metric} {score:.4g} +- "
            f"{error:.2g}, of all {np.nanmin(self.mean):.4g} to {np.nanmax(self.mean):.4g})"
        )


def of_candidates(task_scores: np.ndarray) -> np.ndarray:
    """Mean over tasks, folds and trials ``[c]``; NaN for one that lacks a score another has."""
    has_score = ~np.isnan(task_scores)
    lacking = (has_score.any(2, keepdims=True) & ~has_score).any((0, 1, 3))
    return np.where(lacking, np.nan, _mean(_mean(task_scores, 3), (0, 1)))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide; NaN where the divisor is 0."""
    return np.where(b > 0, a / np.maximum(b, 1), np.nan)


def _mean(a: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """The mean of what is a number."""
    is_number = ~np.isnan(a)
    total = np.sum(np.where(is_number, a, 0.0), axis=axis)
    return np.where(is_number.any(axis), total / np.maximum(is_number.sum(axis), 1), np.nan)
