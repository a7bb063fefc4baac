"""Rules that make one vector of those of all clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._numerics.math import safe_ratio


class Rule(ABC):
    """Base class of rules, which are static. The rules of the papers give every client the same weight."""

    @abstractmethod
    def combine(self, vectors: Array, weights: Array) -> Array:
        """Make one vector ``[p]``.

        Args:
          vectors: ``[m, p]``, a row for each client; rows of clients with weight 0 may hold anything.
          weights: ``[m]`` of their samples; 0 of clients that did not answer.
        """


@dataclass(frozen=True)
class Mean(Rule):
    """The average by the weights, as `FedAvg` has it: one client can move it anywhere."""

    def combine(self, vectors: Array, weights: Array) -> Array:
        known = jnp.where(weights[:, None] > 0, vectors, 0.0)
        return safe_ratio(jnp.sum(weights[:, None] * known, axis=0), jnp.sum(weights))


@dataclass(frozen=True)
class Median(Rule):
    """The median of every coordinate (Yin et al. 2018). Of an even number of clients the mean of the middle two."""

    def combine(self, vectors: Array, weights: Array) -> Array:
        return _trimmed(vectors, weights > 0, lambda count: (count - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The mean of every coordinate without a share of the largest and of the smallest (Yin et al. 2018, definition 2).

    Args:
      share: beta, at least that of the hostile clients, below 1/2; beta times the number of clients is rounded down.

    References:
      - [Yin et al., Byzantine-Robust Distributed Learning](https://arxiv.org/abs/1803.01498), 2018.
    """

    share: float

    def __post_init__(self) -> None:
        check.scalar("TrimmedMean", share=self.share)
        check.in_unit_interval("TrimmedMean", share=self.share)
        if not self.share < 0.5:
            raise ValueError(f"TrimmedMean: share must be below 0.5, or nothing is left; got {self.share}.")

    def combine(self, vectors: Array, weights: Array) -> Array:
        share = float(self.share) + 1e-6  # a tenth of ten is one
        return _trimmed(
            vectors, weights > 0, lambda count: jnp.floor(share * count.astype(vectors.dtype)).astype(jnp.int32)
        )


@dataclass(frozen=True)
class GeometricMedian(Rule):
    r"""The point with the least sum of distances to all, by smoothed Weiszfeld steps (Pillutla et al. 2022, RFA).

    The steps begin at the median of every coordinate, which few far vectors cannot move far. The paper's begin at the
    mean, and divide the pull of f such vectors by about $k / f - 1$ each.

    Args:
      steps: of the iteration.
      smallest: $\nu$, distances below it count as it.

    References:
      - [Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning](https://arxiv.org/abs/1912.13445),
        2022, Algorithm 2.
    """

    steps: int = 10
    smallest: float = 1e-6

    def __post_init__(self) -> None:
        check.integer("GeometricMedian", 1, steps=self.steps)
        check.scalar("GeometricMedian", smallest=self.smallest)
        check.positive("GeometricMedian", smallest=self.smallest)

    def combine(self, vectors: Array, weights: Array) -> Array:
        there = weights > 0
        known, alike = jnp.where(there[:, None], vectors, 0.0), there.astype(vectors.dtype)

        def mean(by: Array) -> Array:
            return safe_ratio(by @ known, jnp.sum(by))

        def step(_: Array, point: Array) -> Array:
            distance = jnp.linalg.norm(known - point[None, :], axis=1)
            return mean(alike / jnp.maximum(distance, float(self.smallest)))

        return lax.fori_loop(0, int(self.steps), step, Median().combine(vectors, weights))


@dataclass(frozen=True)
class Krum(Rule):
    r"""The vectors that are nearest to their neighbours (Blanchard et al. 2017).

    A vector's score is the sum of the squared distances to the $k - f - 2$ nearest of the other k - 1. The result is
    the mean of those with the lowest scores.

    Args:
      hostile: f, how many clients may be.
      keep: of how many vectors the mean is taken: 1 is Krum, more multi-Krum.

    References:
      - [Blanchard et al., Machine Learning with Adversaries](https://arxiv.org/abs/1703.02757), 2017.
    """

    hostile: int
    keep: int = 1

    def __post_init__(self) -> None:
        check.integer("Krum", 0, hostile=self.hostile)
        check.integer("Krum", 1, keep=self.keep)

    def combine(self, vectors: Array, weights: Array) -> Array:
        there = weights > 0
        known = jnp.where(there[:, None], vectors, 0.0)
        scores = _krum_scores(_squared_distances(known), there, int(self.hostile))
        place = jnp.argsort(jnp.argsort(scores, stable=True), stable=True).astype(jnp.int32)
        chosen = (there & (place < int(self.keep))).astype(vectors.dtype)
        return safe_ratio(chosen @ known, jnp.sum(chosen))


@dataclass(frozen=True)
class Bulyan(Rule):
    r"""Krum again and again, then a mean near the median of every coordinate (El Mhamdi et al. 2018).

    Krum chooses $\theta = k - 2f$ vectors, one after another; of each coordinate the $\theta - 2f$ numbers that are
    nearest to the median of the chosen ones are averaged. It is meant for $k \ge 4f + 3$ clients.

    Args:
      hostile: f, how many clients may be.

    References:
      - [El Mhamdi, Guerraoui, Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium](
        https://arxiv.org/abs/1802.07927), 2018.
    """

    hostile: int

    def __post_init__(self) -> None:
        check.integer("Bulyan", 0, hostile=self.hostile)

    def combine(self, vectors: Array, weights: Array) -> Array:
        hostile, there = int(self.hostile), weights > 0
        known, count = jnp.where(there[:, None], vectors, 0.0), jnp.sum(there, dtype=jnp.int32)
        distances, m = _squared_distances(known), len(weights)
        theta = jnp.maximum(count - 2 * hostile, 1)

        def choose(i: Array, chosen: Array) -> Array:
            scores = _krum_scores(distances, there & ~chosen, hostile)
            best = jnp.arange(m, dtype=jnp.int32) == jnp.argmin(scores).astype(jnp.int32)
            return chosen | (best & (i < theta))

        chosen = lax.fori_loop(0, m, choose, jnp.zeros((m,), bool))
        median = _trimmed(known, chosen, lambda count: (count - 1) // 2)
        off = jnp.where(chosen[:, None], jnp.abs(known - median[None, :]), jnp.inf)
        place = jnp.argsort(jnp.argsort(off, axis=0, stable=True), axis=0, stable=True).astype(jnp.int32)
        near = place < jnp.maximum(theta - 2 * hostile, 1)
        return jnp.sum(jnp.where(near, known, 0.0), axis=0) / jnp.sum(near, axis=0).astype(known.dtype)


def _trimmed(vectors: Array, there: Array, cut: Callable[[Array], Array]) -> Array:
    """Average every coordinate without the `cut(count)` smallest and as many of the largest."""
    count = jnp.sum(there, dtype=jnp.int32)
    ordered = jnp.sort(jnp.where(there[:, None], vectors, jnp.inf), axis=0)
    away = jnp.maximum(cut(count), 0)
    place = jnp.arange(len(there), dtype=jnp.int32)
    middle = ((place >= away) & (place < count - away))[:, None]
    total = jnp.sum(jnp.where(middle, ordered, 0.0), axis=0)
    return safe_ratio(total, (count - 2 * away).astype(vectors.dtype))


def _squared_distances(vectors: Array) -> Array:
    """Square the distances of all pairs ``[m, m]``, a row at a time: in products large numbers would cancel."""
    return lax.map(lambda v: jnp.sum((vectors - v[None, :]) ** 2, axis=1), vectors)


def _krum_scores(distances: Array, there: Array, hostile: int) -> Array:
    """The sums of squared distances to the nearest others ``[m]``; infinite where there is no vector."""
    m, count = len(there), jnp.sum(there, dtype=jnp.int32)
    others = there[None, :] & ~jnp.eye(m, dtype=bool)
    ordered = jnp.sort(jnp.where(others, distances, jnp.inf), axis=1)
    near = jnp.arange(m, dtype=jnp.int32) < jnp.clip(count - hostile - 2, 1, jnp.maximum(count - 1, 1))
    return jnp.where(there, jnp.sum(jnp.where(near[None, :], ordered, 0.0), axis=1), jnp.inf)
