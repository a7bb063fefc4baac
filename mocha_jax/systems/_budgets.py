"""Stragglers: how many steps the nodes that answer do, and a central node that chooses how far they go."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax.costs import Cost
from mocha_jax.systems._base import Request, System, Work, of_nodes, per_node

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


# Each keeps two thirds of an interval of logarithms: to a millionth of it.
_SEARCHES = 34


class Controller(System):
    r"""A controller that sets the clock cycle, and so every node's $\theta_t$, from clocks, networks and data.

    A node whose pass over its $n_t$ samples solves its subproblem to $\theta_1$ solves it to
    $\theta_t = \theta_1^{k_t/n_t}$ by $k_t$ steps. In a cycle of T seconds it has time for as many as `Deadline` says,
    and Theorem 1 asks for rounds in proportion to $1/(1-\bar\Theta)$. So the cycle with the least time to any accuracy
    is

    $$
    T = \arg\max_T \frac{\min_t\,(1 - \theta_t(T))}{T + \mathrm{server}} .
    $$

    Where messages take long nodes go far between them, where computing does they stop early; no node is waited for
    longer than its progress is worth to all, and none is left out (Assumption 2). A node that is done before the
    others goes on until the cycle ends. Of what a full round asks no node does more: give the algorithm more
    ``local_epochs`` than will be used.

    Args:
      cost: clock rates and networks, where they differ one per node ``[m]``, from `mocha_jax.costs`.
      epoch_theta: $\theta_1$ in (0, 1), a number or one per node ``[m]``, as `Watch` measures it.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 3, 50, smallest=300, largest=400).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
      >>> request = mj.algorithm1(100.0).request(problem)
      >>> for network in (mj.costs.wifi, mj.costs.cellular_3g):
      ...     controller = Controller(network(np.array([1e8, 1e8, 1e7])))  # one phone is ten times slower
      ...     work = controller.work(jax.random.key(0), data, request)
      ...     print(round(float(controller.cycle(data, request)), 3), (work.steps // data.sizes).tolist())
      0.041 [23, 20, 1]
      0.255 [52, 45, 3]

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    cost: Cost
    epoch_theta: Hyperparameter = 0.5

    def __post_init__(self) -> None:
        check.instance("Controller", "cost", self.cost, Cost, "mocha_jax.costs.lte()")
        check.in_unit_interval("Controller", open_left=True, open_right=True, epoch_theta=self.epoch_theta)

    def cycle(self, data: TaskData, request: Request) -> Array:
        """The seconds that the central node waits for the nodes in a round, []."""
        check.instance("Controller.cycle", "data", data, TaskData, "problem.data")
        check.instance("Controller.cycle", "request", request, Request, "algorithm.request(problem)")
        cost, dtype = data.pad_settings(self.cost), data.dtype
        present, rows = data.sizes > 0, jnp.maximum(data.sizes, 1).astype(dtype)
        rate = jnp.asarray(cost.flops_per_second, dtype)
        before = cost.message_seconds(request.down, request.up) + request.fixed_flops / rate  # the first step
        epochs = request.steps.astype(dtype) / rows
        pace = jnp.broadcast_to(rows * request.step_flops / rate, rows.shape)  # seconds an epoch
        decay = -jnp.log(jnp.asarray(of_nodes("Controller", "epoch_theta", self.epoch_theta, data), dtype))

        def worth(log_cycle: Array) -> Array:
            done = jnp.clip((jnp.exp(log_cycle) - before) / pace, 0.0, epochs)
            gained = jnp.min(jnp.where(present, -jnp.expm1(-decay * done), 1.0))
            return gained / (jnp.exp(log_cycle) + jnp.asarray(cost.server, dtype))

        def narrow(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
            # Progress is concave in time, so that its ratio to it rises and then falls.
            low, high = interval
            third = (high - low) / 3.0
            rising = worth(low + third) < worth(high - third)
            return jnp.where(rising, low + third, low), jnp.where(rising, high, high - third)

        ends = jnp.max(jnp.where(present, before, 0.0)), jnp.max(jnp.where(present, before + epochs * pace, 0.0))
        tiny = jnp.finfo(dtype).tiny
        low, high = lax.fori_loop(0, _SEARCHES, narrow, tuple(jnp.log(jnp.maximum(end, tiny)) for end in ends))
        return jnp.exp(0.5 * (low + high))

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        return Deadline(self.cycle(data, request), self.cost).work(key, data, request)
