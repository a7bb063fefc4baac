"""Clients that train networks: one after the other, some at once, on one device or on many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._core.devices import each_device
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.training import in_random_order

# Clients trained together where it is not said: a CPU's caches suit one best, an accelerator wants more.
_AT_ONCE = 16


# Folded into the key of random orders of clients.
_TURNS = np.uint32(2**32 - 2)

# Trees of arrays: what all clients need, what is each one's own, and what each adds to a sum.
Given = TypeVar("Given")
Own = TypeVar("Own")
Part = TypeVar("Part")


def at_once(wanted: int | None) -> int:
    """Choose how many clients to train together."""
    if wanted is not None:
        return wanted
    return 1 if jax.default_backend() == "cpu" else _AT_ONCE


def whose_turn(real: Array, round: Array, order: tuple[int, ...] | str | None, seed: ArrayLike) -> Array:
    """Mark the one client that works in a round, ``[m]`` bool.

    Args:
      real: ``[m]`` bool which have data.
      round: [] int32.
      order: clients, again and again; None: those with data, as they come; ``"random"``: those in a new order in every
        cycle.
      seed: of the random orders.
    """
    nodes = jnp.arange(len(real), dtype=jnp.int32)
    if isinstance(order, tuple):
        given = jnp.asarray(order, jnp.int32)
        return nodes == given[round % len(order)]
    count = jnp.maximum(jnp.sum(real, dtype=jnp.int32), 1)
    if order is None:
        return real & (jnp.cumsum(real, dtype=jnp.int32) - 1 == round % count)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), _TURNS), round // count)
    return real & (nodes == in_random_order(key, real)[round % count])


def over_clients(
    data: TaskData, budget: Array, together: int,
    work: Callable[[Given, TaskData, Array, Array, Array, Own], tuple[Own, Part]],
    given: Given, own: Own, zero: Part,
) -> tuple[Own, Part]:  # fmt: skip
    """Map over the clients with a budget and sum their contributions; other clients cost nothing.

    Args:
      data: of all clients.
      budget: ``[m]`` int32 steps of each; clients without any are skipped.
      together: how many to map over at once; the rest in turn.
      work: ``work(given, data, place, node, budget, own)``, a client's new `own` and its contribution; its samples
        are those at `place` of the data it is given, and `node` is its number among all.
      given: what all clients need.
      own: a tree of arrays ``[m, ...]``, each client's own.
      zero: a tree like a contribution, of zeros.

    Returns:
      The changed `own` and the total.
    """
    sharding, nodes = data.sharding, jnp.arange(data.num_nodes, dtype=jnp.int32)

    def some(given: Given, data: TaskData, budget: Array, nodes: Array, own: Own) -> tuple[Own, Part]:
        m = len(nodes)
        order = jnp.argsort(budget <= 0, stable=True).astype(jnp.int32)
        count = jnp.sum(budget > 0, dtype=jnp.int32)
        size = min(together, m)

        def chunk(j: Array, carry: tuple[Own, Part]) -> tuple[Own, Part]:
            own, total = carry
            turn = j * size + jnp.arange(size, dtype=jnp.int32)
            live, place = turn < count, order[jnp.minimum(turn, m - 1)]

            def one(live: Array, place: Array) -> tuple[Own, Part]:
                steps = jnp.where(live, budget[place], 0)
                return work(given, data, place, nodes[place], steps, jax.tree.map(lambda a: a[place], own))

            if size == 1:
                new, more = jax.tree.map(lambda a: a[None], one(live[0], place[0]))
            else:
                new, more = jax.vmap(one)(live, place)
            to = jnp.where(live, place, m)
            own = jax.tree.map(lambda a, b: a.at[to].set(b, mode="drop"), own, new)
            return own, jax.tree.map(lambda t, c: t + _sum(live, c), total, more)

        own, total = lax.fori_loop(0, -(-count // size), chunk, (own, zero))
        return own, jax.tree.map(lambda t: t[None], total)  # one row for each device

    local = data.replace(sharding=None) if sharding is not None else data
    own, totals = each_device(sharding, some, given, local, budget, nodes, own)
    return own, jax.tree.map(lambda t: jnp.sum(t, axis=0, dtype=t.dtype), totals)


def _sum(live: Array, parts: Array) -> Array:
    mask = live.reshape(-1, *(1,) * (parts.ndim - 1))
    return jnp.sum(jnp.where(mask, parts, jnp.zeros_like(parts)), axis=0, dtype=parts.dtype)
