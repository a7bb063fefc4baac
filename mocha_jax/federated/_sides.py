"""The two sides of an algorithm in a federation: what a node does in a round, and what the server does.

Both are pure functions of arrays with a leading axis of nodes: a simulation calls them with all nodes, a `Node` with
one. An algorithm joins a federation by one `register` call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core.pytree import Pytree, Relation, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.quality import Quality


class Header(Pytree):
    """The part of a message that every algorithm has."""

    round: Array  # [m] int32 the round that it belongs to, from 1
    life: Array  # [m] int32 of the server: another number after each of its restarts
    # [m] int32. Down: the round of the node's last answer that the server holds, 0 before the first. Up: the same where
    # the node had gone no further than that when the message came, otherwise below 0.
    held: Array
    task: Array  # [m] int32 the tasks of the nodes, their numbers among all


class NodeSide(Pytree):
    """Base class of what nodes do. Records have a leading axis m of nodes."""

    @abstractmethod
    def init(self) -> Any:
        """Return what a node keeps between rounds, before the first one."""

    @abstractmethod
    def like_down(self) -> Mapping[str, Tree]:
        """Return records of the shapes and dtypes of what may come down, by their names."""

    @abstractmethod
    def work(self, key: Array, mine: Any, header: Header, down: Any) -> tuple[Any, Array, Any]:
        """Do a round's work.

        Args:
          key: the run's key, the same in all rounds and for all nodes; what is drawn in a round folds in its number.
          mine: what the nodes kept.
          header: of the message that came down.
          down: the rest of it.

        Returns:
          What the nodes keep now, `Header.held` of their answers ``[m]``, and the rest of these.
        """


class Heard(Pytree):
    """The answers of which a server's round knows."""

    any: Array  # [m] bool an answer came
    now: Array  # [m] bool and it is to this round's message
    exact: Array  # [m] bool and the node had gone no further than the server knew
    ever: Array  # [m] bool an answer of the node is held, this one or an earlier one


class ServerSide(Pytree):
    """Base class of what the server does. Records have a leading axis of tasks."""

    @abstractmethod
    def init(self, counts: Array) -> Any:
        """Return the state before the first round, of nodes with so many samples ``[m]``."""

    @abstractmethod
    def resume(self, state: Any, counts: Array) -> Any:
        """Continue a state with other nodes: who has left has no samples."""

    @abstractmethod
    def down(self, state: Any) -> Any:
        """Return what goes down to all nodes; its field `steps` ``[m]`` int32 is -1, for all those of a round.

        The leading axis of an array is of tasks, or 1 where it is the same for all.
        """

    @abstractmethod
    def like_up(self) -> Tree:
        """Return a record of the shapes and dtypes of what comes up."""

    @abstractmethod
    def combine(self, state: Any, round: Array, up: Any, heard: Heard) -> tuple[Any, Quality]:
        """Combine answers.

        Args:
          state: the state before.
          round: the number of this round, from 1, [].
          up: the answers; of those that are not heard anything.
          heard: which of them there are.

        Returns:
          The state after, and what the answers say of the model that was sent down.
        """

    @abstractmethod
    def weights(self, state: Any) -> Any:
        """Return the model."""

    def relation(self, state: Any) -> Relation:
        """Return Omega as the regularizer keeps it; None where it is given. Default: None."""
        return None

    def omega(self, state: Any) -> Array:
        """Return Omega ``[m, m]``. Default: there is none."""
        raise AttributeError(f"Server: a {type(self).__name__} has no matrix Omega.")

    def doubts(self, state: Any, task: int, current: bool, arrays: Any) -> str:
        """Say what is wrong with an answer whose shape is right, for all that can be known here; empty: nothing."""
        return ""


class Sides(NamedTuple):
    """Makers of both sides of an algorithm."""

    node: Callable[[Any, TaskData, Any], NodeSide]  # of algorithm, data and loss
    # Of algorithm, regularizer, m, d, dtype and loss_scaling.
    server: Callable[[Any, Any, int, int, DTypeLike, str], ServerSide]


_SIDES: dict[type, Sides] = {}


def register(algorithm: type, sides: Sides) -> None:
    """Tell how an algorithm, and those derived from it, is divided between nodes and server."""
    _SIDES[algorithm] = sides


def sides_of(owner: str, algorithm: Algorithm[Any]) -> Sides:
    for kind in type(algorithm).__mro__:
        if kind in _SIDES:
            return _SIDES[kind]
    known = ", ".join(sorted(kind.__name__ for kind in _SIDES))
    raise ValueError(
        f"{owner}: {type(algorithm).__name__} is not divided between nodes and a server; those that are: {known}."
    )


def where(mask: Array, new: Array, old: Array) -> Array:
    """Take the new rows of some nodes, and the old ones of the others."""
    return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
