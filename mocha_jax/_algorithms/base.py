"""The contract of every algorithm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, Pytree, Relation
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import BucketSizes
from mocha_jax._problem.problem import Federated, Problem, Quality
from mocha_jax.networks import Network
from mocha_jax.systems import System
from mocha_jax.systems._base import Info, Request, Work


class State(Pytree):
    """Base class of the states of algorithms between rounds."""

    round: Array  # [] int32 rounds done

    @property
    def duals(self) -> Array | None:
        """The dual variables ``[m, n]``; None for algorithms without."""
        return None

    @property
    def settled(self) -> Array | bool:
        """True where rounding lets no further round of full work gain anything, [] bool. Default: never known."""
        return False


class Draws(Pytree):
    """Random numbers of a round that were drawn before it began."""

    orders: tuple[Array, ...]  # of rows: those of each bucket, or of all


Kind = TypeVar("Kind", bound=Federated)  # of problem

# Types that every algorithm chooses for itself, so that the contract can name no narrower ones.
OwnState = Any  # its subclass of `State`
Drawn = Any  # from `Algorithm.draw`: a random key, `Draws` or whatever its rounds need


class Algorithm(Pytree, Generic[Kind]):
    """`init` makes a state, `step` is one federated round; loops live in the drivers.

    A state, a `State`, is whatever the next round needs; which one, a subclass says by the types of its methods. It
    has a field ``round``, the rounds done: the drivers derive each round's randomness from it. All methods are pure
    and may be jitted, mapped and, where no loop has an open end, differentiated; an algorithm's own settings are
    static fields or array leaves. So a whole tuning grid is one call: `jax.vmap` over an algorithm whose leaves have
    a leading axis.
    """

    solves: ClassVar[type[Federated]] = Problem  # the kind of problem

    @property
    def name(self) -> str:
        """The algorithm's name in messages. Default: its class's."""
        return type(self).__name__

    def expect(self, problem: object) -> None:
        """Raise if the problem is not of this kind."""
        example = "Problem(data, loss, regularizer)" if self.solves is Problem else f"{self.solves.__name__}(data)"
        check.instance(self.name, "problem", problem, self.solves, example)

    def check(self, problem: Kind) -> None:
        """Raise if the algorithm cannot solve the problem; drivers call it for concrete values. Default: no check."""

    def select_nodes(self, systems: System) -> System:
        """Select the nodes that the server asks, on top of how they behave. Default: all."""
        return systems

    def by_loops(self, problem: Kind) -> Self | None:
        """Return this algorithm without the kernel it would choose for the problem. Default: None, it has none."""
        return None

    def bucketing(self, data: TaskData) -> BucketSizes:
        """Choose by the sizes of nodes how `prepare` is to lay out their rows. Default: (), as they are."""
        return ()

    @property
    def lays_out(self) -> bool:
        """True if `prepare` changes anything where sizes are alike, too. Default: False."""
        return False

    def prepare(self, problem: Kind, bucketing: BucketSizes = ()) -> Kind:
        """Lay out the data for the rounds, by the choice of `bucketing`; drivers call it. Default: as they are."""
        return problem

    def to_layout(self, state: OwnState, problem: Kind) -> State:
        """Arrange a state's rows as `prepare` has arranged the problem's; drivers call it. Default: as they are."""
        return state

    def from_layout(self, state: OwnState, problem: Kind) -> State:
        """Arrange a state's rows as users know them, the reverse of `to_layout`."""
        return state

    @abstractmethod
    def init(self, problem: Kind) -> State:
        """The state before the first round."""

    @abstractmethod
    def resume(self, state: OwnState, problem: Kind) -> State:
        """Continue a state, perhaps of another problem of the same shape, on this one."""

    def settle(self, state: OwnState, problem: Kind) -> State:
        """Make the state exact after the last round, on the same problem; drivers call it. Default: `resume`."""
        return self.resume(state, problem)

    def warm_start(self, state: OwnState, problem: Kind) -> State:
        """Begin this problem from the solution of one with other hyperparameters."""
        return self.resume(state, problem)

    @abstractmethod
    def step(self, key: Drawn, state: OwnState, problem: Kind, work: Work) -> tuple[State, Info]:
        """Do one round; `key` is a JAX random key, which is consumed, or the result of `draw` for it."""

    def draw(self, key: Array | Draws, problem: Kind) -> Drawn:
        """Draw a round's random numbers before it begins; drivers do so for many rounds at once.

        The key is consumed. Default: what it is given, for an algorithm whose `step` draws.
        """
        return key

    @abstractmethod
    def full_work(self, problem: Kind) -> Array:
        """Steps of a full round of each node, ``[m]`` int32, which systems reduce."""

    @abstractmethod
    def step_flops(self, problem: Kind) -> Array | float:
        """Floating-point operations of one step of a node, [] or ``[m]``."""

    def fixed_flops(self, problem: Kind) -> Array | float:
        """Floating-point operations of a node's round besides its steps, at most, [] or ``[m]``."""
        return 0.0

    def request(self, problem: Kind, round: Array | int = 0) -> Request:
        """Return what a full round asks of the nodes. A message is one vector of d numbers each way."""
        self.expect(problem)
        check.scalar(type(self).__name__, round=round)
        check.integers(type(self).__name__, 0, round=round)
        dtype, d = problem.data.dtype, problem.data.num_features
        numbers = jnp.asarray(d, dtype)
        step, fixed = (jnp.asarray(a, dtype) for a in (self.step_flops(problem), self.fixed_flops(problem)))
        return Request(jnp.asarray(round, jnp.int32), self.full_work(problem), step, fixed, numbers, numbers)

    def measure_theta(
        self, key: Array, before: OwnState, after: OwnState, problem: Kind, tol: Array
    ) -> tuple[Array, Array]:
        r"""Measure how far each node is from solving its subproblem after a round, $\theta_t^h$ of eq. (5).

        Returns:
          theta ``[m]`` in [0, 1], and a bound on its error ``[m]``, at most `tol` where that could be reached.
        """
        raise ValueError(f"{type(self).__name__} has no local subproblem (4) of which theta could be measured.")

    @abstractmethod
    def certify(self, state: OwnState, problem: Kind) -> Quality:
        """Say how good the state is; of a convex problem, bound its distance from the optimum."""

    def prove(self, state: OwnState, problem: Kind) -> Quality:
        """`certify` with an allowance for rounding; drivers call it once, at the end of a solve. Default: the same."""
        return self.certify(state, problem)

    @abstractmethod
    def weights(self, state: OwnState) -> PyTree:
        """The model, ``[num_tasks, d]``; a network's parameters."""

    @property
    def network(self) -> Network | None:
        """The network whose parameters `weights` are; None for a linear model."""
        return None

    def relation(self, state: OwnState, problem: Kind) -> Relation:
        """The regularizer's record of Omega; None where Omega is given."""
        return None
