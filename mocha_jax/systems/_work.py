"""Requests of the central node, and the nodes' work in a round."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree


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
