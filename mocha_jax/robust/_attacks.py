"""Attacks of clients that know all answers of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.robust._rules import Rule


class Attack(ABC):
    """Base class of attacks, which are static."""

    @abstractmethod
    def forged(self, vectors: Array, honest: Array) -> Array:
        """The vectors that hostile clients send in place of their own, ``[m, p]``.

        Args:
          vectors: ``[m, p]`` of all clients, as honest work makes them.
          honest: ``[m]`` bool the clients that answer and are honest.
        """


@dataclass(frozen=True)
class SignFlip(Attack):
    """A client sends its own vector with the other sign, times a number.

    Args:
      scale: that number.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check.scalar("SignFlip", scale=self.scale)
        check.nonnegative("SignFlip", scale=self.scale)

    def forged(self, vectors: Array, honest: Array) -> Array:
        return -float(self.scale) * vectors


@dataclass(frozen=True)
class RandomVectors(Attack):
    """Gaussian noise of the size of an honest vector, times a number.

    Args:
      scale: that number.
      seed: of the noise, the same in every round.
    """

    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check.scalar("RandomVectors", scale=self.scale)
        check.nonnegative("RandomVectors", scale=self.scale)
        check.seed("RandomVectors", self.seed)

    def forged(self, vectors: Array, honest: Array) -> Array:
        squares = jnp.mean(vectors**2, axis=1)
        size = jnp.sqrt(safe_ratio(honest.astype(vectors.dtype) @ squares, jnp.sum(honest).astype(vectors.dtype)))
        drawn = jax.random.normal(jax.random.key(int(self.seed)), vectors.shape, vectors.dtype)
        return float(self.scale) * size * drawn


@dataclass(frozen=True)
class ALittleIsEnough(Attack):
    """All send the honest mean, off by some standard deviations in every coordinate (Baruch et al. 2019).

    Args:
      deviations: z; the paper chooses the largest that is not conspicuous, near 1.

    References:
      - [Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning](
        https://arxiv.org/abs/1902.06156), 2019.
    """

    deviations: float = 1.0

    def __post_init__(self) -> None:
        check.scalar("ALittleIsEnough", deviations=self.deviations)
        check.nonnegative("ALittleIsEnough", deviations=self.deviations)

    def forged(self, vectors: Array, honest: Array) -> Array:
        mean = _mean(vectors, honest)
        spread = jnp.sqrt(_mean((vectors - mean[None, :]) ** 2, honest))
        return jnp.broadcast_to(mean - float(self.deviations) * spread, vectors.shape)


@dataclass(frozen=True)
class InnerProduct(Attack):
    """All send the honest mean with the other sign, times a number (Xie et al. 2020).

    Args:
      scale: that number; a small one is not conspicuous.

    References:
      - [Xie, Koyejo, Gupta, Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation](
        https://arxiv.org/abs/1903.03936), 2020.
    """

    scale: float = 0.5

    def __post_init__(self) -> None:
        check.scalar("InnerProduct", scale=self.scale)
        check.nonnegative("InnerProduct", scale=self.scale)

    def forged(self, vectors: Array, honest: Array) -> Array:
        return jnp.broadcast_to(-float(self.scale) * _mean(vectors, honest), vectors.shape)


@dataclass(frozen=True)
class Attacked(Rule):
    """A rule at a server some of whose clients are hostile, for simulations.

    Args:
      rule: of the server.
      attack: of the clients.
      hostile: their numbers.
    """

    rule: Rule
    attack: Attack
    hostile: tuple[int, ...]

    def __post_init__(self) -> None:
        check.instance("Attacked", "rule", self.rule, Rule, "robust.Median()")
        check.instance("Attacked", "attack", self.attack, Attack, "robust.SignFlip()")
        if not isinstance(self.hostile, tuple):
            raise ValueError(f"Attacked: hostile must be a tuple of clients, got {check.shown(self.hostile)}.")
        check.integers("Attacked", 0, hostile=self.hostile)

    def combine(self, vectors: Array, weights: Array) -> Array:
        bad = jnp.zeros((len(weights),), bool).at[jnp.array(self.hostile, jnp.int32)].set(True, mode="drop")
        there = (weights > 0)[:, None]
        known = jnp.where(there, vectors, 0.0)
        forged = self.attack.forged(known, (weights > 0) & ~bad)
        return self.rule.combine(jnp.where(bad[:, None], forged, known), weights)


def _mean(vectors: Array, chosen: Array) -> Array:
    by = chosen.astype(vectors.dtype)
    return safe_ratio(by @ vectors, jnp.sum(by))
