"""What the central node asks of the nodes in a round, and what they do of it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._pytree import Pytree


class Request(Pytree):
    """What a full round asks of every node, before anything goes wrong.

    ``Algorithm.request`` makes it; systems cut from it, and their deadlines and costs are worked out from it.
    """

    round: Array  # [] int32 rounds done before this one
    steps: Array  # [m] int32 steps of a full round
    step_flops: Array  # [] or [m] floating-point operations of one step
    fixed_flops: Array  # [] or [m] and of everything else in the round, at most
    down: Array  # [] numbers a node receives
    up: Array  # [] numbers a node sends


class Work(Pytree):
    """What every node does in one round. No steps, or not active: dropped (theta = 1).

    An algorithm does at most its own full round, whatever it is given.
    """

    steps: Array  # [m] int32 steps, e.g. coordinate updates
    active: Array  # [m] bool whether the node answers at all

    def __post_init__(self) -> None:
        _check.array("Work", "steps", self.steps, ("m",), "iu")
        _check.array("Work", "active", self.active, np.shape(self.steps), "b")
        if (steps := _check.concrete(self.steps)) is not None and (steps < 0).any():
            node = int(np.argmax(steps < 0))
            raise ValueError(f"Work: node {node} is given {steps[node]} steps; a node that does nothing has 0.")

    def budget(self, request: Array) -> Array:
        """Steps of the nodes that answer, at most those of a full round, `request`; 0 for the others, ``[m]``."""
        _check.array("Work.budget", "request", request, ("m",), "iu")
        if self.steps.shape != np.shape(request):
            raise ValueError(f"Work: request is for {len(request)} nodes, but there are steps for {len(self.steps)}.")
        return jnp.where(
            self.active, jnp.minimum(self.steps, jnp.asarray(_check.leaf("Work.budget", "request", request))), 0
        )
