"""The contract of every algorithm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import jax.numpy as jnp
from jax import Array

from mocha_jax import _check
from mocha_jax._problem import Federated, Problem
from mocha_jax._pytree import Pytree
from mocha_jax._quality import Quality
from mocha_jax._rows import Profile
from mocha_jax._work import Request, Work
from mocha_jax.systems import System

Kind = TypeVar("Kind", bound=Federated)


class Info(Pytree):
    """What a round reports besides its new state."""

    steps: Array  # [m] int32 steps each node really did
    flops: Array  # [m] floating-point operations of each node; of length-d vectors, not of single numbers
    capped: Array  # [m] bool whether a node ran out of work before it reached the accuracy asked for


class Algorithm(Pytree, Generic[Kind]):
    """`init` makes a state, `step` is one federated round; loops live in the drivers.

    A state is whatever the next round needs, and has a field ``round``, the rounds done: the
    drivers derive each round's randomness from it. All methods are pure and may be jitted, mapped
    and, where no loop has an open end, differentiated; an algorithm's own settings are static fields or array
    leaves. So a whole tuning grid is one call: `jax.vmap` over an algorithm whose leaves have a leading axis.
    """

    solves: ClassVar[type[Federated]] = Problem  # the kind of problem

    def expect(self, problem: Any) -> None:
        """Raise where that is no problem of the kind."""
        example = "Problem(data, loss, regularizer)" if self.solves is Problem else f"{self.solves.__name__}(data)"
        _check.instance(type(self).__name__, "problem", problem, self.solves, example)

    def check(self, problem: Kind) -> None:
        """Raise where the problem cannot be solved so; drivers call it when they can look at numbers. Default: fine."""

    def asks(self, systems: System) -> System:
        """Which nodes the server asks, on top of how they behave. Default: all."""
        return systems

    def by_loops(self, problem: Kind) -> Any:
        """The same algorithm without the kernel that it would choose for the problem. Default: None, it has none."""
        return None

    def prepare(self, problem: Kind, profile: Profile = ()) -> Kind:
        """Lay out the data for the rounds, sizes put together as `profile` says; drivers call it. Default: leave it."""
        return problem

    @abstractmethod
    def init(self, problem: Kind) -> Any:
        """The state before the first round."""

    @abstractmethod
    def adopt(self, state: Any, problem: Kind) -> Any:
        """Continue a state, perhaps of another problem of the same shape, on this one."""

    def carry(self, state: Any, problem: Kind) -> Any:
        """Begin this problem from the solution of one with other hyperparameters."""
        return self.adopt(state, problem)

    @abstractmethod
    def step(self, key: Array, state: Any, problem: Kind, work: Work) -> tuple[Any, Info]:
        """One round; the key is consumed."""

    @abstractmethod
    def full_work(self, problem: Kind) -> Array:
        """Steps of a full round of each node, ``[m]`` int32: what systems cut from."""

    @abstractmethod
    def step_flops(self, problem: Kind) -> Array | float:
        """Floating-point operations of one step of a node, [] or ``[m]``."""

    def fixed_flops(self, problem: Kind) -> Array | float:
        """Floating-point operations of a node's round besides its steps, at most, [] or ``[m]``."""
        return 0.0

    def request(self, problem: Kind, round: Array | int = 0) -> Request:
        """What a full round asks of the nodes. A message is one vector of d numbers each way."""
        self.expect(problem)
        _check.scalar(type(self).__name__, round=round)
        _check.integers(type(self).__name__, 0, round=round)
        dtype, d = problem.data.dtype, problem.data.num_features
        numbers = jnp.asarray(d, dtype)
        step, fixed = (jnp.asarray(a, dtype) for a in (self.step_flops(problem), self.fixed_flops(problem)))
        return Request(jnp.asarray(round, jnp.int32), self.full_work(problem), step, fixed, numbers, numbers)

    def measure_theta(self, key: Array, before: Any, after: Any, problem: Kind, tol: Array) -> tuple[Array, Array]:
        r"""How far each node is from solving its subproblem after a round, :math:`\theta_t^h` of eq. (5).

        Returns:
          theta ``[m]`` in [0, 1], and a bound on its error ``[m]``, at most `tol` where that could be reached.
        """
        raise ValueError(f"{type(self).__name__} has no local subproblem (4) of which theta could be measured.")

    @abstractmethod
    def certify(self, state: Any, problem: Kind) -> Quality:
        """How good the state is; of a convex problem, how far from the optimum."""

    def prove(self, state: Any, problem: Kind) -> Quality:
        """`certify` with all that rounding may hide; drivers call it once, at the end of a solve. Default: the same."""
        return self.certify(state, problem)

    @abstractmethod
    def weights(self, state: Any) -> Any:
        """The model, ``[num_tasks, d]``; a network's parameters."""

    def omega(self, state: Any, problem: Kind) -> Any:
        """The regularizer's record of Omega; None where Omega is given."""
        return None
