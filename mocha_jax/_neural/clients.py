"""Training of clients: batches and steps of one, and rounds in which all or some of them train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._core.devices import each_device
from mocha_jax._core.pytree import PyTree, SameTree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.trees import difference, inner_product
from mocha_jax._numerics.math import safe_ratio, uniform_bits


class Batch(NamedTuple):
    """Some samples of a client."""

    x: Array  # [b, d]
    y: Array  # [b]
    weight: Array  # [b] 0 where the client has no more samples


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A client's epochs and batches: in an epoch all its samples in random order, the last batch may be short."""

    epochs: int
    batch: int | None  # None: all at once

    def with_settings(self, epochs: int, batch: int | None) -> Schedule:
        """Another schedule of this kind."""
        return Schedule(epochs, batch)

    def size(self, n: int) -> int:
        """Samples of a batch, of clients with at most n; in the mean where chance decides."""
        return n if self.batch is None else min(self.batch, n)

    def rows(self, n: int) -> int:
        """Rows of a batch, of clients with at most n samples."""
        return self.size(n)

    def room(self, data: TaskData) -> int:
        """Rows of a batch."""
        return self.rows(data.y.shape[1])

    def per_epoch(self, data: TaskData) -> Array:
        """Steps of an epoch of each client, ``[m]`` int32."""
        return -(-data.sizes // self.size(data.y.shape[1]))

    def steps(self, data: TaskData) -> Array:
        """Steps of a full round of each client, ``[m]`` int32."""
        return self.epochs * self.per_epoch(data)

    def batches(self, key: Array, real: Array) -> Callable[[Array], tuple[Array, Array]]:
        """Draw an epoch's batches of one client: of a step the rows ``[b]``, and which of them count ``[b]``.

        What is missing in a batch are samples of the client again: a model that divides by the norm of a sample, or
        takes statistics of a batch, never sees rows of zeros.

        Args:
          key: of the epoch.
          real: ``[n]`` which rows of the client are samples.
        """
        n = len(real)
        room = self.rows(n)
        if room == n:
            every = jnp.arange(n, dtype=jnp.int32)
            rows = jnp.where(real, every, jnp.argmax(real).astype(jnp.int32))
            return lambda i: (rows, real)
        order, count = in_random_order(key, real), jnp.sum(real, dtype=jnp.int32)

        def batch(i: Array) -> tuple[Array, Array]:
            places = i * room + jnp.arange(room, dtype=jnp.int32)
            return order[places % jnp.maximum(count, 1)], places < count

        return batch


Params = TypeVar("Params")  # a tree of arrays


class Pull(NamedTuple):
    r"""The term $\tfrac\lambda2\|\theta-\theta_0\|^2$ of a client's objective: its parameters stay near others.

    Its gradient is computed in every step, its value only for an optimizer that asks for it.

    Attributes:
      strength: [] $\lambda$.
      target: the parameters $\theta_0$.
    """

    strength: Array
    target: PyTree

    def value(self, params: PyTree) -> Array:
        """Compute the term, []."""
        off = difference(params, self.target)
        return 0.5 * self.strength * inner_product(off, off)

    def added(self, params: SameTree, gradient: SameTree) -> SameTree:
        """Add the gradient of the term to one."""
        return jax.tree.map(lambda g, p, t: g + self.strength * (p - t), gradient, params, self.target)


class Trained(NamedTuple, Generic[Params]):
    """The outcome of a client's training."""

    params: Params
    optimizer: optax.OptState  # its state
    loss: Array  # [] mean over the steps done, each before it was done
    steps: Array  # [] int32


def train(
    key: Array, data: TaskData, client: Array, weight: Array, budget: Array, schedule: Schedule,
    optimizer: optax.GradientTransformation, gradient: Callable[[Params, Batch, Array], tuple[Array, Params]],
    params: Params, state: optax.OptState, rate: Array, pull: Pull | None = None,
) -> Trained[Params]:  # fmt: skip
    """Train on one client's samples, in batches of a schedule.

    Args:
      key: of this client in this round.
      data: of all clients; only the rows asked for are read.
      client: [] int32 which one.
      weight: [n] of its samples; 0 for padding.
      budget: [] int32 steps to do.
      schedule: epochs and size of a batch.
      optimizer: any.
      gradient: ``gradient(params, batch, key)``, a loss and the direction of ascent that the optimizer takes for its
        gradient.
      params: where to begin.
      state: of the optimizer; it draws anew, by this key.
      rate: [] factor of every update.
      pull: a term of the objective beside the loss.
    """
    count = jnp.sum(weight > 0, dtype=jnp.int32)
    per_epoch = jnp.maximum(-(-count // schedule.size(data.y.shape[1])), 1)
    optimizer = optax.with_extra_args_support(optimizer)  # of which some ask for the loss
    state = with_own_draws(state, key)

    def epoch(e: Array, carry: tuple[Params, optax.OptState, Array]) -> tuple[Params, optax.OptState, Array]:
        epoch_key = jax.random.fold_in(key, e)
        batch_of = schedule.batches(epoch_key, weight > 0)

        def step(i: Array, carry: tuple[Params, optax.OptState, Array]) -> tuple[Params, optax.OptState, Array]:
            params, state, total = carry
            rows, real = batch_of(i)
            batch = Batch(
                data.x[client, rows].astype(data.dtype), data.y[client, rows], jnp.where(real, weight[rows], 0.0)
            )
            fold = jax.random.fold_in(epoch_key, i)
            loss, ascent = gradient(params, batch, fold)
            if pull is not None:
                ascent = pull.added(params, ascent)

            def objective(loss: Array, params: Params) -> Array:
                return loss if pull is None else loss + pull.value(params)

            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optimizers assume it
                updates, state = optimizer.update(
                    ascent, state, params, value=objective(loss, params), grad=ascent,
                    value_fn=lambda p: objective(gradient(p, batch, fold)[0], p),
                )  # fmt: skip
                params = jax.tree.map(lambda p, u: p + (rate * u).astype(p.dtype), params, updates)
            return params, state, total + loss

        return lax.fori_loop(0, jnp.clip(budget - e * per_epoch, 0, per_epoch), step, carry)

    start = params, state, jnp.zeros((), data.dtype)
    params, state, total = lax.fori_loop(0, -(-budget // per_epoch), epoch, start)
    return Trained(params, state, safe_ratio(total, budget.astype(total.dtype)), budget)


def with_own_draws(state: optax.OptState, key: Array) -> optax.OptState:
    """An optimizer's state whose random keys are those of one client in one round.

    Optimizers that draw, as `optax.add_noise` does, keep a key in their state, and begin with the same one at every
    client. Raw keys look like other integers: they are known by the name of their field.

    Args:
      state: of the optimizer.
      key: of this client in this round.
    """
    form = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))

    def folded(old: Array) -> Array:
        for word in jax.random.key_data(key):
            old = jax.random.fold_in(old, word)
        return old

    def own(path: tuple[object, ...], leaf: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True).lower()
        dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        raw = ("key" in name or "rng" in name) and dtype == form.dtype and shape[-1:] == form.shape
        fold = folded
        for _ in range(len(shape) - raw):
            fold = jax.vmap(fold)
        return fold(leaf) if typed or raw else leaf

    return jax.tree_util.tree_map_with_path(own, state)


def in_random_order(key: Array, real: Array) -> Array:
    """The real rows in random order, then padding, ``[n]`` int32; the draw of a row depends on key and row only."""
    draws = uniform_bits(key, len(real)) >> 1
    return jnp.argsort(jnp.where(real, draws, ~jnp.zeros_like(draws))).astype(jnp.int32)


# Clients trained together where it is not said: a CPU's caches suit one best, an accelerator wants more.
_AT_ONCE = 16


# Folded into the key of random orders of clients.
_TURNS = np.uint32(2**32 - 2)

# Trees of arrays: what all clients need, what is each one's own, and what each adds to a sum.
Given = TypeVar("Given")
Own = TypeVar("Own")
Part = TypeVar("Part")


def clients_at_once(wanted: int | None) -> int:
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
        order_of_nodes = jnp.asarray(order, jnp.int32)
        return nodes == order_of_nodes[round % len(order)]
    count = jnp.maximum(jnp.sum(real, dtype=jnp.int32), 1)
    if order is None:
        return real & (jnp.cumsum(real, dtype=jnp.int32) - 1 == round % count)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), _TURNS), round // count)
    return real & (nodes == in_random_order(key, real)[round % count])


def over_clients(
    data: TaskData, budget: Array, together: int,
    work: Callable[[Given, TaskData, Array, Array, Array, Own], tuple[Own, Part]],
    inputs: Given, own: Own, zero: Part,
) -> tuple[Own, Part]:  # fmt: skip
    """Map over the clients with a budget and sum their contributions; other clients cost nothing.

    Args:
      data: of all clients.
      budget: ``[m]`` int32 steps of each; clients without any are skipped.
      together: how many to map over at once; the rest in turn.
      work: ``work(given, data, place, node, budget, own)``, a client's new `own` and its contribution; its samples
        are those at `place` of the data it is given, and `node` is its number among all.
      inputs: what all clients need.
      own: a tree of arrays ``[m, ...]``, each client's own.
      zero: a tree like a contribution, of zeros.

    Returns:
      The changed `own` and the total.
    """
    sharding, nodes = data.sharding, jnp.arange(data.num_nodes, dtype=jnp.int32)

    def some(inputs: Given, data: TaskData, budget: Array, nodes: Array, own: Own) -> tuple[Own, Part]:
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
                # Without the barrier XLA reads the row again after it is replaced, from a copy of those of all clients.
                before = lax.optimization_barrier(jax.tree.map(lambda a: a[place], own))
                return work(inputs, data, place, nodes[place], steps, before)

            if size == 1:  # of those that are live
                new, more = one(live[0], place[0])
                own = jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b, place[0], 0), own, new)
                return own, jax.tree.map(jnp.add, total, more)
            new, more = jax.vmap(one)(live, place)
            to = jnp.where(live, place, m)
            own = jax.tree.map(lambda a, b: a.at[to].set(b, mode="drop"), own, new)
            return own, jax.tree.map(lambda t, c: t + _sum(live, c), total, more)

        own, total = lax.fori_loop(0, -(-count // size), chunk, (own, zero))
        return own, jax.tree.map(lambda t: t[None], total)  # one row for each device

    local = data.replace(sharding=None) if sharding is not None else data
    own, totals = each_device(sharding, some, inputs, local, budget, nodes, own)
    return own, jax.tree.map(lambda t: jnp.sum(t, axis=0, dtype=t.dtype), totals)


def _sum(live: Array, parts: Array) -> Array:
    mask = live.reshape(-1, *(1,) * (parts.ndim - 1))
    return jnp.sum(jnp.where(mask, parts, jnp.zeros_like(parts)), axis=0, dtype=parts.dtype)
