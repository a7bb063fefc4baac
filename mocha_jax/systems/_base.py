"""The contract of every system: requests of the central node, and the nodes' work; two systems combined."""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree
from mocha_jax._data.task_data import TaskData


class Request(Pytree):
    """The work that a full round asks of every node, before failures.

    ``Algorithm.request`` makes it; systems cut from it, and their deadlines and costs are worked out from it.
    """

    round: Array  # [] int32 rounds done before this one
    steps: Array  # [m] int32 steps of a full round
    step_flops: Array  # [] or [m] floating-point operations of one step
    fixed_flops: Array  # [] or [m] and of everything else in the round, at most
    down: Array  # [] numbers a node receives
    up: Array  # [] numbers a node sends


class Work(Pytree):
    """The work of every node in one round. No steps, or not active: dropped (theta = 1).

    An algorithm does at most its own full round, whatever it is given.
    """

    steps: Array  # [m] int32 steps, e.g. coordinate updates
    active: Array  # [m] bool whether the node answers at all

    def __post_init__(self) -> None:
        check.array("Work", "steps", self.steps, ("m",), "iu")
        check.array("Work", "active", self.active, np.shape(self.steps), "b")
        if (steps := check.concrete(self.steps)) is not None and (steps < 0).any():
            node = int(np.argmax(steps < 0))
            raise ValueError(f"Work: node {node} is given {steps[node]} steps; a node that does nothing has 0.")

    def budget(self, request: Array) -> Array:
        """Steps of the nodes that answer, at most those of a full round, `request`; 0 for the others, ``[m]``."""
        check.array("Work.budget", "request", request, ("m",), "iu")
        if self.steps.shape != np.shape(request):
            raise ValueError(f"Work: request is for {len(request)} nodes, but there are steps for {len(self.steps)}.")
        return jnp.where(
            self.active, jnp.minimum(self.steps, jnp.asarray(check.leaf("Work.budget", "request", request))), 0
        )


class Info(Pytree):
    """The report of a round besides its new state."""

    steps: Array  # [m] int32 steps each node really did
    flops: Array  # [m] floating-point operations of each node; of length-d vectors, not of single numbers
    capped: Array  # [m] bool whether a node ran out of work before it reached the accuracy asked for


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
    padded = data.pad_settings(setting)
    if np.shape(padded) not in ((), (data.num_nodes,)):
        raise ValueError(
            f"{owner}: {name} must be a number or one per node [{data.num_nodes}], got shape {np.shape(padded)}."
        )
    return padded


def per_node(key: Array, request: Request, dtype: jnp.dtype) -> Array:
    """Uniform draws in [0, 1), one a node, new in every round, ``[m]``.

    As with `uniform_bits`, a node's draw does not depend on how many there are.

    Returns:
      The draws, ``[m]``.
    """
    return jax.random.uniform(jax.random.fold_in(key, request.round), request.steps.shape, dtype)
