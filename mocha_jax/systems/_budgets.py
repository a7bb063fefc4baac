"""Stragglers: how many steps the nodes that answer do."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax.costs import Cost
from mocha_jax.systems._base import System, of_nodes, per_node
from mocha_jax.systems._work import Request, Work

BUDGETS = ("smallest", "own")


class PartialEpochs(System):
    """Each node does a uniformly random fraction of its full work, at least one step.

    Args:
      low: smallest fraction, in [0, 1].
      high: largest fraction, in [low, 1].
    """

    low: Hyperparameter
    high: Hyperparameter

    def __post_init__(self) -> None:
        _check_range("PartialEpochs", self.low, self.high)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        return _between(key, request, request.steps, self, data)


class UniformBudget(System):
    """The paper's stragglers (E.3): steps drawn from [low, high] times the smallest n_t.

    Every node draws from the same range, however much data it has. High variability is
    ``UniformBudget(0.1, 1.0)``, low variability ``UniformBudget(0.9, 1.0)``. The authors' code draws from
    [low, high] times the node's own n_t: ``of="own"``. A step is a sample; where it is a mini-batch, as in the training
    of networks, nearly every draw allows a full round: use `PartialEpochs` there.

    Args:
      low: smallest fraction, in [0, 1].
      high: largest fraction, in [low, 1].
      of: what they are fractions of, ``"smallest"`` for the smallest node's number of samples, or ``"own"``.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    low: Hyperparameter
    high: Hyperparameter
    of: str = static(default="smallest")

    def __post_init__(self) -> None:
        _check_range("UniformBudget", self.low, self.high)
        check.one_of("UniformBudget", "of", self.of, BUDGETS)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        sizes = data.sizes
        if self.of == "smallest":
            smallest = jnp.min(jnp.where(sizes > 0, sizes, jnp.iinfo(jnp.int32).max))
            sizes = jnp.full_like(sizes, smallest)
        return _between(key, request, sizes, self, data)


class Deadline(System):
    r"""A global clock cycle: every node does what it can before the central node stops waiting.

    Of `seconds`, a node spends what its messages take on its network, and the rest on steps at its clock
    rate. A node whose network is too slow for one step in time is dropped.

    $$
    \mathrm{steps}_t = \left\lfloor \frac{(\mathrm{seconds} - \mathrm{Comm}_t)\,\mathrm{Clock\ Rate}_t
    - \mathrm{fixed\ FLOPs}}{\mathrm{FLOPs\ per\ step}} \right\rfloor
    $$

    Args:
      seconds: the cycle, > 0.
      cost: clock rates and networks, where they differ one per node ``[m]``, from `mocha_jax.costs`.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 2, 50, smallest=300, largest=400).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> phones = mj.costs.Cost(flops_per_second=np.array([1e6, 1e5]), latency=0.1)  # one ten times slower
      >>> work = Deadline(0.3, phones).work(jax.random.key(0), data, mj.Mocha(sigma_prime="per_task").request(problem))
      >>> work.steps.tolist()
      [300, 66]

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    seconds: Hyperparameter
    cost: Cost

    def __post_init__(self) -> None:
        check.positive("Deadline", seconds=self.seconds)
        check.instance("Deadline", "cost", self.cost, Cost, "mocha_jax.costs.lte()")

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        cost = data.pad_settings(self.cost)
        left = of_nodes("Deadline", "seconds", self.seconds, data) - cost.message_seconds(request.down, request.up)
        possible = jnp.floor((left * cost.flops_per_second - request.fixed_flops) / request.step_flops)
        full = request.steps.astype(possible.dtype)
        steps = jnp.clip(possible, 0.0, full).astype(request.steps.dtype)
        return Work(steps, steps > 0)


def _check_range(owner: str, low: Hyperparameter, high: Hyperparameter) -> None:
    check.in_unit_interval(owner, low=low, high=high)
    a, b = check.concrete(low), check.concrete(high)
    if a is not None and b is not None and np.any(a > b):
        raise ValueError(f"{owner}: low must not exceed high, got {check.shown(low)} > {check.shown(high)}.")


def _between(key: Array, request: Request, of: Array, system: PartialEpochs | UniformBudget, data: TaskData) -> Work:
    """Steps uniform in [low, high] times `of`, rounded, at least one where there is work, at most all of it."""
    dtype = jnp.result_type(float)
    owner = type(system).__name__
    low, high = (of_nodes(owner, name, getattr(system, name), data) for name in ("low", "high"))
    share = jnp.asarray(low, dtype) + jnp.asarray(high - low, dtype) * per_node(key, request, dtype)
    steps = jnp.round(share * of.astype(dtype)).astype(request.steps.dtype)
    steps = jnp.clip(steps, jnp.minimum(request.steps, 1), request.steps)
    return Work(steps, jnp.ones_like(steps, bool))
