"""The two sides of an algorithm in a federation: a node's and the server's part of a round.

Both are pure functions of arrays with a leading axis of nodes: a simulation calls them with all nodes, a `Node` with
one. An algorithm joins a federation by one `register` call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Algorithm, Drawn
from mocha_jax._core.pytree import Pytree, Relation, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Quality

State = TypeVar("State")  # that a node or the server keeps between rounds
DownRecord = TypeVar("DownRecord")  # record of a message from the server to a node
UpRecord = TypeVar("UpRecord")  # record of a message from a node to the server


class Header(Pytree):
    """The part of a message that every algorithm has."""

    round: Array  # [m] int32 the round that it belongs to, from 1
    incarnation: Array  # [m] int32 of the server: another number after each of its restarts
    # [m] int32. Down: the round of the node's last answer that the server holds, 0 before the first. Up: the same where
    # the node had gone no further than that when the message came, otherwise below 0.
    held: Array
    task: Array  # [m] int32 the tasks of the nodes, their numbers among all


class NodeSide(Pytree, Generic[State, DownRecord, UpRecord]):
    """Base class of the node's side. Records have a leading axis m of nodes."""

    @abstractmethod
    def init(self) -> State:
        """Return what a node keeps between rounds, before the first one."""

    @abstractmethod
    def like_down(self) -> Mapping[str, Tree]:
        """Return records of the shapes and dtypes of what may come down, by their names."""

    @abstractmethod
    def work(self, key: Drawn, state: State, header: Header, down: DownRecord) -> tuple[State, Array, UpRecord]:
        """Do a round's work.

        Args:
          key: of the round's draws, the same for all nodes, or what the algorithm's `draw` made of it.
          state: what the nodes kept.
          header: of the message that came down.
          down: the rest of it.

        Returns:
          What the nodes keep now, `Header.held` of their answers ``[m]``, and the rest of these.
        """

    def own_key(self, key: Array) -> Array:
        """Return the key of the work, made of the caller's; it runs on the host. Default: that one."""
        return key

    @abstractmethod
    def weights(self, state: State, down: DownRecord) -> Tree:
        """Return the nodes' models as a message has them, arrays with a leading axis of nodes."""

    def held_vectors(self, state: State, header: Header) -> tuple[Array, Array]:
        """Return the vectors that the server holds of nodes ``[m, d]``, and whether these know them ``[m]`` bool.

        For a `Sending`, as is `with_decoded`. Default: there is no such vector.
        """
        raise ValueError(f"Node: sending is for answers with one vector, and a {type(self).__name__} sends other ones.")

    def with_decoded(self, state: State, header: Header, up: UpRecord, v: Array) -> tuple[State, UpRecord]:
        """Return what nodes keep, and their answers, where the server decodes the vectors ``up.v`` as `v`."""
        raise ValueError(f"Node: sending is for answers with one vector, and a {type(self).__name__} sends other ones.")

    def outgoing(self, up: UpRecord) -> Tree:
        """Return the part of one node's answer that travels; it is on the host. Default: all."""
        return up

    def reject_reason(self, state: State, header: Header, down: DownRecord) -> str:
        """Say what is wrong with a message to one node whose form is right; empty: nothing. All is on the host.

        It must refuse a second message of a round: of two answers to one round a node could not know which one is held.
        """
        return ""


class ReceivedAnswers(Pytree):
    """The answers of which a server's round knows."""

    any: Array  # [m] bool an answer came
    now: Array  # [m] bool and it is to this round's message
    exact: Array  # [m] bool and the node had gone no further than the server knew
    ever: Array  # [m] bool an answer of the node is held, this one or an earlier one that it has not denied
    late: Array  # [m] int32 rounds since the message that is answered
    denied: Array  # [m] bool the node has denied the answer that is held, and none has come since


# The mark of an answer that puts the earlier answer of the node in doubt, too: one of the two is false.
DENIES = "sent terms of a gap that are not those of the vector that it began with"


class ServerSide(Pytree, Generic[State, UpRecord]):
    """Base class of the server's side. Records have a leading axis of tasks."""

    # How many rounds late an answer may be, and whether it must go on from the node's answer that the server holds.
    patience: ClassVar[int] = 2**31 - 1
    from_held: ClassVar[bool] = False
    # Whether a round is of the nodes asked alone, however few of them answer.
    only_asked: ClassVar[bool] = False
    # Whether answers judge the model that was sent down, which is the one before their round.
    judges: ClassVar[bool] = True

    @abstractmethod
    def init(self, counts: Array) -> State:
        """Return the state before the first round, of nodes with so many samples ``[m]``."""

    def renewed(self, state: State) -> State:
        """Draw the secrets of a state anew, before its first round and before every combination. Default: it has none.

        Not traced.
        """
        return state

    @abstractmethod
    def resume(self, state: State, counts: Array) -> State:
        """Continue a state with other nodes: those that left have no samples."""

    def asked(self, key: Array, state: State) -> Array | None:
        """Mark the nodes that are asked in the next round ``[m]`` bool, those of a simulation with this key.

        Default: None, all are.
        """
        return None

    @abstractmethod
    def down(self, state: State) -> Pytree:
        """Return what goes down to all nodes; its field `steps` ``[m]`` int32 is -1, for all those of a round.

        The leading axis of an array is of tasks, or 1 where it is the same for all.
        """

    @abstractmethod
    def like_up(self) -> UpRecord:
        """Return a record of the shapes and dtypes of an answer."""

    def held_vectors(self, state: State) -> Array:
        """Return the vectors of the nodes' last answers ``[m, d]``, for a `Sending`. Default: none."""
        raise ValueError(f"Server: receiving is for answers with one vector, and a {type(self).__name__} holds none.")

    @abstractmethod
    def combine(self, state: State, round: Array, up: UpRecord, received: ReceivedAnswers) -> tuple[State, Quality]:
        """Combine answers.

        Args:
          state: the state before.
          round: the number of this round, from 1, [].
          up: the answers; of nodes without one anything.
          received: which of them there are.

        Returns:
          The state after, and what the answers say of the model that was sent down.
        """

    @abstractmethod
    def weights(self, state: State) -> Tree:
        """Return the model."""

    def relation(self, state: State) -> Relation:
        """Return Omega as the regularizer keeps it; None where it is given. Default: None."""
        return None

    def omega(self, state: State) -> Array:
        """Return Omega ``[m, m]``. Default: an AttributeError."""
        raise AttributeError(f"Server: a {type(self).__name__} has no matrix Omega.")

    def implausible(self, state: State, up: UpRecord, received: ReceivedAnswers) -> Mapping[str, Array]:
        """Mark impossible answers, as far as they can be detected here. Default: none.

        Args:
          state: the state before the round.
          up: the answers; of nodes without one anything.
          received: which of them there are.

        Returns:
          Marks ``[m]`` bool by what is wrong, in words of which the node is the subject.
        """
        return {}

    def norms(self, up: UpRecord) -> Array:
        """Return how large answers are ``[m]``, for `Server`'s ``max_norm``. Default: the norm of all their floats."""
        floats: list[Array] = [leaf for leaf in jax.tree.leaves(up) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        dtype = max((leaf.dtype for leaf in floats), key=lambda dtype: dtype.itemsize)
        floats = [leaf.astype(dtype) for leaf in floats]
        return jnp.sqrt(sum(jnp.sum(leaf.reshape(len(leaf), -1) ** 2, axis=1) for leaf in floats))


OwnAlgorithm = TypeVar("OwnAlgorithm", bound=Algorithm)
Criterion = TypeVar("Criterion")  # what samples are judged by, a loss or a likelihood
Penalty = TypeVar("Penalty")  # a regularizer; of networks none


class Sides(NamedTuple, Generic[OwnAlgorithm, Criterion, Penalty]):
    """Makers of both sides of an algorithm."""

    node: Callable[[OwnAlgorithm, TaskData, Criterion], NodeSide]  # of algorithm, data and loss
    # Of algorithm, regularizer, m, d, dtype and loss_scaling.
    server: Callable[[OwnAlgorithm, Penalty, int, int, DTypeLike, str], ServerSide]


_SIDES: dict[type, Sides] = {}


def register(algorithm: type, sides: Sides) -> None:
    """Register how an algorithm and its subclasses are divided between nodes and server."""
    _SIDES[algorithm] = sides


def sides_of(owner: str, algorithm: Algorithm) -> Sides:
    for kind in type(algorithm).__mro__:
        if kind in _SIDES:
            return _SIDES[kind]
    divided = ", ".join(sorted(kind.__name__ for kind in _SIDES))
    raise ValueError(
        f"{owner}: {type(algorithm).__name__} is not divided between nodes and a server; those that are: {divided}."
    )


def where(mask: Array, new: Array, old: Array) -> Array:
    """Take the new rows of some nodes, and the old ones of the others."""
    return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
