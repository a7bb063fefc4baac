"""A central node that chooses how far the nodes go in a round."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._data.task_data import TaskData
from mocha_jax.costs import Cost
from mocha_jax.systems._base import System, of_nodes
from mocha_jax.systems._budgets import Deadline
from mocha_jax.systems._work import Request, Work

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
