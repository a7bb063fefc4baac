"""Means and deviations that were taken from the samples of a data set."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jax import Array


class Moments(NamedTuple):
    """Arrays of a scaling, each with a row for all tasks or one for every task; features without the intercept."""

    mean: Array  # [1 or num_tasks, d]
    scale: Array  # [1 or num_tasks, d]
    level: Array  # [1 or num_tasks] what is taken from labels


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True)  # so that no hash is part of a fingerprint
class Scaling:
    """Means and deviations that were taken from the samples of a data set; compared by value."""

    by: str
    mean: np.ndarray  # as in `Moments`
    scale: np.ndarray
    level: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Scaling({self.by})"

    @property
    def _key(self) -> tuple[object, ...]:
        return self.by, *(a.tobytes() for a in self.moments)

    @property
    def moments(self) -> Moments:
        """The arrays alone."""
        return Moments(self.mean, self.scale, self.level)  # type: ignore[arg-type]

    def of(self, order: np.ndarray) -> Scaling:
        """The scaling of some tasks, in that order."""
        return Scaling(self.by, *(np.asarray(a) for a in self.rows(order)))

    def rows(self, order: np.ndarray) -> Moments:
        """The rows of some tasks, in that order; the one row of all tasks as it is."""
        return Moments(*(a if len(a) == 1 else a[order] for a in self.moments))

    def regrouped(self) -> Scaling:
        """Keep what holds where tasks are other ones than they were: a scaling of all samples, or nothing."""
        return self if len(self.mean) == 1 else Scaling(self.by, *(a[:0] for a in self.moments))  # type: ignore[arg-type]

    def raw(self, weights: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights ``[..., num_tasks, d]`` and intercepts ``[..., num_tasks]`` of scaled samples, as of the samples."""
        if len(self.mean) not in (1, weights.shape[-2]):
            raise self.lost()
        w = np.asarray(weights, np.float64) / self.scale
        return w, np.asarray(intercept, np.float64) - np.sum(w * self.mean, axis=-1) + self.level

    def of_raw(self, weights: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights and intercepts of samples as those of scaled ones, the inverse of `raw`.

        An intercept that is no more than rounding of what it is the difference of is 0.
        """
        if not len(self.mean):
            raise self.lost()
        weights = np.asarray(weights, np.float64)
        moved = weights * self.mean
        b = np.asarray(intercept, np.float64) + np.sum(moved, axis=-1) - self.level
        size = np.abs(intercept) + np.sum(np.abs(moved), axis=-1) + np.abs(self.level)
        return weights * self.scale, np.where(np.abs(b) <= 1e-5 * size, 0.0, b)

    def lost(self) -> ValueError:
        """The error of a scaling that is not known any more."""
        return ValueError(
            "model: tasks were standardised each in its own way and then put together, so that there are no "
            'weights in the units of the samples; standardise with by="pooled", or after that.'
        )
