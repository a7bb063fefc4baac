"""Channels between nodes and the central node, which lose answers, bring them late or twice."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax.costs import Cost
from mocha_jax.systems._base import Request, of_nodes, per_node


class Fate(Pytree):
    """The fate of the answers of a round."""

    arrives: Array  # [m] int32 rounds until a node's answer arrives, 0: in this one; below 0: never
    again: Array  # [m] int32 the same of a second copy of it


class Channel(Pytree):
    """Base class of channels. Unlike in a `System`, the work of a lost answer has been done."""

    waits: ClassVar[bool] = False  # whether a node is left alone until its answer has arrived

    most: int = static(default=5, kw_only=True)  # rounds that an answer is late at most

    @abstractmethod
    def fate(self, key: Array, data: TaskData, request: Request) -> Fate:
        """Decide on the answers of a round.

        Args:
          key: of this round.
          data: for the nodes' sizes.
          request: what the nodes are asked for, with the steps that they do.
        """


class Unreliable(Channel):
    """Answers are lost, late or doubled at random, each on its own.

    Args:
      lost: probability that an answer never arrives, in [0, 1].
      late: probability that it is late, if it arrives.
      duplicated: probability that it arrives a second time, later than the first.
      most: how many rounds it is late at most, an integer >= 1.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> channel = Unreliable(lost=0.3, late=0.3, most=5, duplicated=0.05)
      >>> channel.fate(jax.random.key(1), data, mj.Mocha().request(problem)).arrives.shape
      (6,)
    """

    lost: Hyperparameter = 0.0
    late: Hyperparameter = 0.0
    duplicated: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        check.in_unit_interval("Unreliable", lost=self.lost, late=self.late, duplicated=self.duplicated)
        check.integer("Unreliable", 1, most=self.most)

    def fate(self, key: Array, data: TaskData, request: Request) -> Fate:
        dtype = data.dtype
        lost, late, by, twice, again = (per_node(jax.random.fold_in(key, i), request, dtype) for i in range(5))
        p, q, r = (
            jnp.asarray(of_nodes("Unreliable", name, getattr(self, name), data), dtype)
            for name in ("lost", "late", "duplicated")
        )
        arrives = jnp.where(late < q, 1 + jnp.floor(by * self.most).astype(jnp.int32), 0)
        arrives = jnp.where(lost < p, -1, jnp.minimum(arrives, self.most))
        copy = jnp.minimum(arrives + 1 + jnp.floor(again * self.most).astype(jnp.int32), self.most)
        return Fate(arrives, jnp.where((twice < r) & (arrives >= 0), copy, -1))


class Clock(Channel):
    r"""Asynchronous rounds: the central node acts once a cycle on the answers that have arrived, without waiting.

    A node that takes longer than a cycle, eq. (30), finishes its work; its answer counts in the cycle in which it
    arrives, and the node then begins again with the current model. A cycle is a round: after h of them
    $h \cdot \mathrm{cycle}$ seconds have passed.

    Args:
      cycle: seconds, > 0.
      cost: clock rates and networks, where they differ one per node ``[m]``, from `mocha_jax.costs`.
      most: cycles that an answer takes at most; more are counted as that many. An integer >= 1.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 2, 50, smallest=300, largest=400).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> phones = mj.costs.Cost(flops_per_second=np.array([1e6, 1e5]), latency=0.1)  # one ten times slower
      >>> Clock(0.4, phones).fate(jax.random.key(1), data, mj.Mocha().request(problem)).arrives.tolist()
      [0, 4]
    """

    cycle: Hyperparameter
    cost: Cost

    waits = True

    def __post_init__(self) -> None:
        check.positive("Clock", cycle=self.cycle)
        check.scalar("Clock", cycle=self.cycle)
        check.instance("Clock", "cost", self.cost, Cost, "mocha_jax.costs.lte()")
        check.integer("Clock", 1, most=self.most)

    def fate(self, key: Array, data: TaskData, request: Request) -> Fate:
        cost = data.pad_settings(self.cost)
        steps = request.steps.astype(data.dtype)
        seconds = cost.seconds(steps * request.step_flops + request.fixed_flops, request.down, request.up)
        # Ten roundings less, or a node that fills its cycle to the last bit would take two.
        cycles = jnp.ceil(seconds / jnp.asarray(self.cycle, data.dtype) * (1.0 - 10.0 * jnp.finfo(data.dtype).eps))
        arrives = jnp.clip(cycles.astype(jnp.int32) - 1, 0, self.most)
        return Fate(jnp.broadcast_to(arrives, steps.shape), jnp.full(steps.shape, -1, jnp.int32))
