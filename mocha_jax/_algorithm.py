"""The contract of every algorithm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from jax import Array

from mocha_jax._objective import Certificate
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree
from mocha_jax.systems import Work


class Info(Pytree):
    """What a round reports besides its new state."""

    steps: Array  # [m] int32 coordinate updates each node really did


class Algorithm(Pytree):
    """`init` makes a state, `step` is one federated round; loops live in the drivers.

    A state is whatever the next round needs, and has a field ``round``, the rounds done: the
    drivers derive each round's randomness from it. All methods are pure and may be jitted, mapped
    and differentiated; an algorithm's own settings are static fields or array leaves.
    """

    def prepare(self, problem: Problem) -> Problem:
        """Lay out the data for the rounds; drivers call it once. Default: leave it."""
        return problem

    @abstractmethod
    def init(self, problem: Problem) -> Any:
        """The state before the first round."""

    @abstractmethod
    def adopt(self, state: Any, problem: Problem) -> Any:
        """Continue a state, perhaps of another problem of the same shape, on this one."""

    @abstractmethod
    def step(self, key: Array, state: Any, problem: Problem, work: Work) -> tuple[Any, Info]:
        """One round; the key is consumed."""

    @abstractmethod
    def full_work(self, problem: Problem) -> Array:
        """Steps of a full round of each node, ``[m]`` int32: what systems cut from."""

    @abstractmethod
    def certify(self, state: Any, problem: Problem) -> Certificate:
        """How far the state is from the optimum."""

    @abstractmethod
    def weights(self, state: Any) -> Array:
        """The model, ``[num_tasks, d]``."""

    def omega(self, state: Any, problem: Problem) -> Any:
        """The regularizer's record of Omega; None where Omega is given."""
        return None
