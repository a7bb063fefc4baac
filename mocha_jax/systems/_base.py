"""The contract of every system, how two combine, and the random draws that all use."""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree
from mocha_jax._data.task_data import TaskData
from mocha_jax.systems._work import Request, Work


class System(Pytree):
    """Base class of systems: how much each node does in a round."""

    @abstractmethod
    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        """The work of one round.

        Args:
          key: the run's key, the same in every round: what is drawn afresh in a round folds in ``request.round``,
            what lasts longer folds in something that changes less often.
          data: for the nodes' sizes and tasks.
          request: what a full round asks of every node.
        """

    def __and__(self, other: System) -> Both:
        return Both(self, other)


class Full(System):
    """All nodes answer and do all of their work."""

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        return Work(request.steps, jnp.ones_like(request.steps, bool))


class Both(System):
    """Two systems at once: the fewer steps, active where both are."""

    first: System
    second: System

    def __post_init__(self) -> None:
        check.instance("&", "the left side", self.first, System, "systems.Dropout(0.3)")
        check.instance("&", "the right side", self.second, System, "systems.Dropout(0.3)")

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        a = self.first.work(jax.random.fold_in(key, 0), data, request)
        b = self.second.work(jax.random.fold_in(key, 1), data, request)
        return Work(jnp.minimum(a.steps, b.steps), a.active & b.active)


def of_nodes(owner: str, name: str, setting: Hyperparameter, data: TaskData) -> Hyperparameter:
    """A setting that is a number, or one per node ``[m]``; of all nodes, those that `shard` added too."""
    found = data.pad_settings(setting)
    if np.shape(found) not in ((), (data.num_nodes,)):
        raise ValueError(
            f"{owner}: {name} must be a number or one per node [{data.num_nodes}], got shape {np.shape(found)}."
        )
    return found


def per_node(key: Array, request: Request, dtype: jnp.dtype) -> Array:
    """Uniform draws in [0, 1), one a node, new in every round, ``[m]``.

    As with `uniform_bits`, a node's draw does not depend on how many there are.

    Returns:
      The draws, ``[m]``.
    """
    return jax.random.uniform(jax.random.fold_in(key, request.round), request.steps.shape, dtype)
