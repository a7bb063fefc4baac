"""A client's training: some epochs of mini-batches with any optimizer, of one client or of several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio, uniform_bits


class Batch(NamedTuple):
    """Some samples of a client."""

    x: Array  # [b, d]
    y: Array  # [b]
    weight: Array  # [b] 0 where the client has no more samples


class Schedule(NamedTuple):
    """The schedule of a client's epochs; static."""

    epochs: int
    batch: int | None  # None: all at once

    def room(self, data: TaskData) -> int:
        """Rows of a batch."""
        rows = data.y.shape[1]
        return rows if self.batch is None else min(self.batch, rows)

    def per_epoch(self, data: TaskData) -> Array:
        """Steps of an epoch of each client, ``[m]`` int32."""
        return -(-data.sizes // self.room(data))

    def steps(self, data: TaskData) -> Array:
        """Steps of a full round of each client, ``[m]`` int32."""
        return self.epochs * self.per_epoch(data)


Params = TypeVar("Params")  # a tree of arrays


class Trained(NamedTuple, Generic[Params]):
    """The outcome of a client's training."""

    params: Params
    optimizer: optax.OptState  # its state
    loss: Array  # [] mean over the steps done, each before it was done
    steps: Array  # [] int32


def train(
    key: Array, data: TaskData, client: Array, budget: Array, schedule: Schedule,
    optimizer: optax.GradientTransformation, loss: Callable[[Params, Batch, Array], Array], params: Params,
    state: optax.OptState, rate: Array,
) -> Trained[Params]:  # fmt: skip
    """Train on one client's samples; an epoch goes through all of them in random order, the last batch may be short.

    What is missing in a batch are samples of the client again, with weight 0: a model that divides by the norm of a
    sample, or takes statistics of a batch, never sees rows of zeros.

    Args:
      key: of this client in this round.
      data: of all clients; only the rows asked for are read.
      client: [] int32 which one.
      budget: [] int32 steps to do.
      schedule: epochs and size of a batch.
      optimizer: any.
      loss: ``loss(params, batch, key)``, differentiated.
      params: where to begin.
      state: of the optimizer; it draws anew, by this key.
      rate: [] factor of every update.
    """
    room, n = schedule.room(data), data.y.shape[1]
    weight = data.weight[client]
    size = jnp.sum(weight > 0, dtype=jnp.int32)
    per_epoch = jnp.maximum(-(-size // room), 1)
    optimizer = optax.with_extra_args_support(optimizer)  # of which some ask for the loss
    state = with_own_draws(state, key)

    def epoch(e: Array, carry: tuple[Params, optax.OptState, Array]) -> tuple[Params, optax.OptState, Array]:
        here = jax.random.fold_in(key, e)
        every = jnp.arange(n, dtype=jnp.int32)
        order = (
            in_random_order(here, weight > 0)
            if room < n
            else jnp.where(weight > 0, every, jnp.argmax(weight > 0).astype(jnp.int32))
        )

        def step(i: Array, carry: tuple[Params, optax.OptState, Array]) -> tuple[Params, optax.OptState, Array]:
            params, state, total = carry
            places = i * room + jnp.arange(room, dtype=jnp.int32)
            rows = order[places % jnp.maximum(size, 1)] if room < n else order
            real = places < size if room < n else weight > 0
            batch = Batch(
                data.x[client, rows].astype(data.dtype), data.y[client, rows], jnp.where(real, weight[rows], 0.0)
            )
            fold = jax.random.fold_in(here, i)
            value, gradient = jax.value_and_grad(loss)(params, batch, fold)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optimizers assume it
                updates, state = optimizer.update(
                    gradient, state, params, value=value, grad=gradient, value_fn=lambda p: loss(p, batch, fold)
                )
                params = jax.tree.map(lambda p, u: p + (rate * u).astype(p.dtype), params, updates)
            return params, state, total + value

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

    def own(path: tuple[Any, ...], leaf: Any) -> Any:
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
