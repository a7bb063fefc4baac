r"""The interface of servers, and their common helpers."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, Relation
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax.systems._base import Info, Request

# The rounds before every update, or before the first, the second and so on; the last number holds on.
Schedule = int | tuple[int, ...]


def checked_schedule(owner: str, value: object) -> Schedule:
    """Return the schedule that is meant: a number of rounds, or a sequence of such."""
    many = tuple(value) if isinstance(value, range) else value
    numbers = (
        check.widths(owner, "omega_every", many, "(5, 10, 20)") if isinstance(many, tuple | list | np.ndarray) else ()
    )
    if not numbers:
        check.integer(owner, 1, omega_every=value)
        return int(value)  # type: ignore[call-overload]
    check.integer(owner, 1, **{"the sum of omega_every": sum(numbers)})
    return numbers


def every_round(every: Schedule) -> bool:
    """Tell whether Omega is updated after every round."""
    return every == 1 if isinstance(every, int) else set(every) == {1}


def is_due(every: Schedule, round: Array) -> Array:
    """Tell whether Omega is updated after this round, counted from 1, [] bool."""
    if isinstance(every, int):
        return round % every == 0
    ends = jnp.asarray(tuple(itertools.accumulate(every)), jnp.int32)
    past = round - ends[-1]
    return jnp.any(round == ends) | ((past > 0) & (past % every[-1] == 0))


# Rounds between two recomputations of V from beta. Adding a round's change to V costs one rounding error; this keeps
# their sum below what a certificate in float32 can see, also where the weights are V over a tiny lambda (after 64
# rounds it did not), for a fiftieth of a local epoch a round.
REFRESH_EVERY = 8

Record = TypeVar("Record")


def cast(record: Record, dtype: DTypeLike) -> Record:
    """Cast every real number to the given precision."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, record)


def same_kind(a: object, b: object) -> bool:
    return str(jax.tree.structure(a)) == str(jax.tree.structure(b))


def first_relation(problem: Problem, omega: Hyperparameter | None) -> Relation:
    """A record of Omega_0 ``[m, m]``; of the regularizer's own where there is none."""
    data, learned = problem.data, problem.regularizer.learned
    if learned is None:
        return None
    if omega is None:
        return learned.initial_relation(data.num_tasks, data.num_features)
    # Feasible to the last bit, which a user's matrix is not.
    return learned.restart_relation(learned.relation_of(jnp.asarray(omega, data.dtype), data.num_features))


def keep_relation(problem: Problem, relation: Relation, omega: Hyperparameter | None = None) -> Relation:
    """A record of Omega for this problem: a given one as far as it fits, otherwise the first one."""
    data, learned = problem.data, problem.regularizer.learned
    if learned and learned.is_relation(relation, data.num_tasks, data.num_features):
        return learned.restart_relation(cast(relation, data.dtype))
    return first_relation(problem, omega)  # of another kind of regularizer, nothing of Omega can be kept


def gain_of_updating(problem: Problem, w: Array, relation: Relation) -> Array:
    """The decrease of the objective by the best Omega for these weights; infinite where the joint gap says more."""
    regularizer = problem.regularizer
    if not regularizer.learned or regularizer.jointly_convex:
        return jnp.full((), jnp.inf, w.dtype)
    better = regularizer.value(w, regularizer.learned.update_relation(relation, w))
    return jnp.maximum(regularizer.value(w, relation) - better, 0.0)


class ServerState(Protocol):
    """The fields that every server's state has; besides that it is whatever the server needs."""

    @property
    def model(self) -> Array:
        """W, ``[num_tasks, d]``."""

    @property
    def broadcast(self) -> Array:
        """The weights that the nodes start their next round from, ``[num_tasks, d]``."""


OwnState = Any  # the `ServerState` that a server chooses for itself: the interface can name no narrower type


class NodeUpdate(Pytree):
    """The message of the nodes after their local work of a round."""

    beta: Array  # [m, n] duals, feasible
    dv: Array  # [m, d] change of each node's dual vector
    share: Array  # [m] how much of its full work each node did, 0 to 1
    info: Info


class Aggregator(Pytree):
    r"""Base class of the rules by which the server of a dual method combines what nodes answer.

    A node's work is the same for every server: it improves a quadratic model of R* around the current V, whose gradient
    is ``state.broadcast`` and whose curvature is `curvature`. A state is whatever the server needs, with the fields of
    `ServerState`; which one, a subclass says by the types of its methods. All methods are pure. Of the arguments,
    `beta` are the duals of all nodes ``[m, n]`` and `v` the dual vectors that belong to them, ``[num_tasks, d]``.
    """

    holds_omega: ClassVar[bool] = False  # whether it begins with an Omega and holds it for some rounds

    @abstractmethod
    def init(self, problem: Problem, beta: Array, v: Array) -> ServerState:
        """Return the state before the first round."""

    @abstractmethod
    def resume(self, state: OwnState, problem: Problem, beta: Array, v: Array) -> ServerState:
        """Continue a state, perhaps of another problem of the same shape: keep what was learned, derive the rest."""

    @abstractmethod
    def add_tasks(self, state: OwnState, problem: Problem, beta: Array, v: Array) -> ServerState:
        """Continue a state on a problem with new tasks after the old ones."""

    @abstractmethod
    def curvature(self, state: OwnState, data: TaskData) -> Array:
        """Return the curvature q of every node's subproblem in the next round, ``[m]``."""

    @abstractmethod
    def aggregate(
        self, problem: Problem, state: OwnState, round: Array, before: Array, update: NodeUpdate, v: Array
    ) -> tuple[Array, Array, ServerState]:
        """Combine the nodes' updates into the next duals, dual vectors and state.

        Args:
          problem: the problem.
          state: the state that the nodes started from.
          round: the number of this round, from 1, [] int32.
          before: the duals that the nodes started from ``[m, n]``.
          update: what the nodes send.
          v: the dual vectors of ``update.beta`` ``[num_tasks, d]``.
        """

    @abstractmethod
    def certify(self, problem: Problem, state: OwnState, beta: Array, v: Array) -> Certificate:
        """Certify the state's model by these duals, as plain floats compute it."""

    @abstractmethod
    def relation(self, problem: Problem, state: OwnState) -> Relation:
        """Return Omega as the regularizer keeps it; None where it is given."""

    def can_resume(self, state: object) -> bool:
        """Tell whether a state is one that `resume` and `add_tasks` take. Default: any."""
        return True

    def omega_updates(self, state: OwnState) -> tuple[Array | float, Array | float]:
        """Return by how much the last update of Omega lowered the objective, and the gap just before it.

        Default: Omega is not updated now and then, but part of every round or given.
        """
        return 0.0, math.inf

    def local_duals(self, state: OwnState, before: Array, after: Array) -> Array:
        """Return the duals that the nodes found themselves in the last round. Default: the ones there are."""
        return after

    def node_flops(self, problem: Problem) -> Array | float:
        """Count what a round costs a node for the server's sake, [] or ``[m]``. Default: nothing."""
        return 0.0

    def message(self, request: Request) -> Request:
        """Add the numbers that go down and up besides one vector of d each. Default: none."""
        return request

    def differentiated(self, state: OwnState) -> tuple[Aggregator, ServerState]:
        """Return the server and state whose round has the derivative that this one is given. Default: itself."""
        return self, state

    def tangent(self, still: OwnState, change: OwnState, d_vectors: Array) -> ServerState:
        """Return the state's tangent from that of the state of `differentiated`; needed where that is another server.

        Args:
          still: a tangent of zeros.
          change: the tangent of the other server's state.
          d_vectors: the tangent of the nodes' dual vectors ``[m, d]``.
        """
        return change
