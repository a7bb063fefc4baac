"""Fault tolerance: which nodes answer in a round."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import uniform_bits
from mocha_jax.systems._base import Request, System, Work, of_nodes, per_node

_GOLDEN = (5**0.5 - 1) / 2


class Dropout(System):
    r"""Nodes miss a round at random, each on its own: $p_t^h$ of Assumption 2.

    Args:
      p: probability of missing a round, in [0, 1]: a number, one per task ``[num_tasks]``, or one per round and
        task ``[rounds, num_tasks]``, whose last row holds ever after.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    p: Hyperparameter

    def __post_init__(self) -> None:
        check.in_unit_interval("Dropout", p=self.p)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        p, tasks = jnp.asarray(self.p, data.dtype), data.num_tasks
        if p.ndim > 2 or (p.ndim and (p.shape[-1] != tasks or not len(p))):
            raise ValueError(
                f"Dropout: p must be a number, one per task [{tasks}] or one per round and task [rounds, {tasks}], "
                f"got shape {p.shape}."
            )
        if p.ndim == 2:
            p = p[jnp.minimum(request.round, len(p) - 1)]
        p = data.to_nodes(jnp.broadcast_to(p, (tasks,)))
        return Work(request.steps, per_node(key, request, p.dtype) >= p)


class Outages(System):
    """Nodes drop together and for a while: a cell tower without power, a train in a tunnel.

    Nodes of one group fail together. Time is cut into windows of `length` rounds, which begin at another
    moment for every group; a group is silent for a whole window with probability `p`. So a node misses a share
    p of all rounds, and two rounds that are k apart lie in one window with probability 1 - k / length.

    Args:
      p: probability that a window is lost, in [0, 1]; a number.
      groups: group of each node ``[m]``, integers >= 0; default every node on its own.
      length: rounds in a window, >= 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> everyone_at_once = Outages(0.2, groups=jnp.zeros(30, int))
    """

    p: Hyperparameter
    groups: Array | np.ndarray | None = None
    length: int = static(default=1)

    def __post_init__(self) -> None:
        check.in_unit_interval("Outages", p=self.p)
        check.integer("Outages", 1, length=self.length)
        if self.groups is not None:
            check.integers("Outages", 0, groups=self.groups)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        numbers = jnp.arange(data.num_nodes, dtype=jnp.int32) if self.groups is None else data.pad_settings(self.groups)
        groups = jnp.asarray(numbers, jnp.int32)
        if groups.shape != (data.num_nodes,):
            raise ValueError(f"Outages: groups must be one per node [{data.num_nodes}], got shape {groups.shape}.")
        check.scalar("Outages", p=self.p)
        p = jnp.asarray(self.p, data.dtype)

        def draw(key: Array, number: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, number), dtype=p.dtype)

        begins, luck = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        shift = jnp.floor(self.length * jax.vmap(partial(draw, begins))(groups)).astype(jnp.int32)
        window = (request.round + shift) // self.length
        lost = jax.vmap(lambda w, g: draw(jax.random.fold_in(luck, w), g))(window, groups) < p
        return Work(request.steps, ~lost)


class NeverAnswers(System):
    """Some nodes never answer: the case that Assumption 2 rules out.

    Args:
      nodes: indices of the silent nodes.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    nodes: tuple[int, ...] = static()

    def __post_init__(self) -> None:
        listed = np.atleast_1d(as_array) if (as_array := check.concrete(self.nodes)) is not None else None
        whole = listed is not None and listed.ndim == 1 and (listed.dtype.kind in "iu" or not listed.size)
        if listed is None or not whole or not 0 <= listed.min(initial=0) <= listed.max(initial=0) < 2**31:
            raise ValueError(
                f"NeverAnswers: nodes are indices, integers counted from 0, got {check.shown(self.nodes)}."
            )
        object.__setattr__(self, "nodes", tuple(int(k) for k in listed))

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        if self.nodes and max(self.nodes) >= data.num_nodes:
            raise ValueError(f"NeverAnswers: node {max(self.nodes)} does not exist; there are {data.num_nodes} nodes.")
        silent = np.zeros(data.num_nodes, bool)
        silent[list(self.nodes)] = True
        return Work(request.steps, jnp.asarray(~silent))


class Sampled(System):
    """The central node asks only some nodes in every round, drawn without replacement from those with data.

    Args:
      fraction: share of the nodes asked, in (0, 1]; at least one is.
    """

    fraction: Hyperparameter

    def __post_init__(self) -> None:
        check.in_unit_interval("Sampled", open_left=True, fraction=self.fraction)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        check.scalar("Sampled", fraction=self.fraction)
        dtype, present = data.dtype, data.sizes > 0
        draws = uniform_bits(jax.random.fold_in(key, request.round), data.num_nodes)
        asked = jnp.round(jnp.asarray(self.fraction, dtype) * jnp.sum(present).astype(dtype))
        asked = jnp.maximum(asked, 1.0).astype(jnp.int32)

        # Those whose draw is among the `asked` least. Bisection for that bound is much cheaper than sorting.
        def halve(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = interval
            middle = low + (high - low) // 2
            enough = jnp.sum(present & (draws <= middle), dtype=jnp.int32) >= asked
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        bounds = jnp.zeros((), draws.dtype), jnp.full((), jnp.iinfo(draws.dtype).max)
        bound = lax.fori_loop(0, jnp.iinfo(draws.dtype).bits, halve, bounds)[1]
        return Work(request.steps, present & (draws <= bound))


class Trace(System):
    """Recorded availability: who answered when, played back, and from the start again after its end.

    Args:
      table: ``[rounds, m]``; a node answers where it is not 0.
    """

    table: Array | np.ndarray

    def __post_init__(self) -> None:
        check.array("Trace", "table", self.table, ("rounds", "nodes"), "fiub")
        check.leaves("Trace", "table", self.table)
        if (table := check.concrete(self.table)) is not None and not np.isfinite(table).all():
            raise ValueError("Trace: table has a NaN or infinite entry; write 0 where a node did not answer.")

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        table = jnp.asarray(data.pad_settings(self.table))
        if table.shape[1] != data.num_nodes:
            raise ValueError(f"Trace: table has {table.shape[1]} nodes, the data {data.num_nodes}.")
        return Work(request.steps, table[request.round % len(table)].astype(bool))


class DayNight(System):
    """Nodes that answer in a part of every day only, e.g. while they charge over night.

    Args:
      period: rounds in a day, > 0.
      share: part of the day in which a node answers, in [0, 1].
      phase: where in the day a node is in round 0, as a part of it in [0, 1]: a number, or one per node ``[m]``,
        e.g. time zones. Default: spread evenly over the day.
    """

    period: Hyperparameter
    share: Hyperparameter = 0.5
    phase: Hyperparameter | None = None

    def __post_init__(self) -> None:
        check.positive("DayNight", period=self.period)
        check.in_unit_interval("DayNight", share=self.share)
        if self.phase is not None:
            check.in_unit_interval("DayNight", phase=self.phase)

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        dtype, m = data.dtype, data.num_nodes
        # Multiples of the golden ratio spread evenly, however many there are.
        spread = jnp.mod(jnp.arange(m, dtype=dtype) * _GOLDEN, 1.0)
        phase = spread if self.phase is None else jnp.asarray(of_nodes("DayNight", "phase", self.phase, data), dtype)
        period, share = (of_nodes("DayNight", name, getattr(self, name), data) for name in ("period", "share"))
        time = request.round.astype(dtype) + phase * jnp.asarray(period, dtype)
        hour = jnp.mod(time, jnp.asarray(period, dtype))
        awake = hour < jnp.asarray(share * period, dtype)
        return Work(request.steps, jnp.broadcast_to(awake, (m,)))
