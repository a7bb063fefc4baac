"""Differentially private training of clients: batches by chance, clipped gradients of samples, noise on their sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, PyTree, Pytree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Batch, Schedule, in_random_order
from mocha_jax._numerics.math import safe_ratio, uniform_bits
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params

# Folded into a step's key: for noise, for the draw of a batch, and for the order of its rows.
_NOISE, _CHANCE, _ORDER = np.uint32(2**32 - 4), np.uint32(2**32 - 5), np.uint32(2**32 - 6)


class ExampleLevel(Pytree):
    r"""DP-SGD at every client: what a client sends hardly depends on any one of its samples.

    A step of a client with n samples draws each of them with probability $q = \min(1, B/n)$, by itself (Poisson
    sampling), clips the gradients $g_i$ of the samples drawn to length C, and adds Gaussian noise:

    $$
    g = \frac{1}{qn}\Bigl(\sum_i \min\bigl(1, C/\lVert g_i\rVert\bigr)\,g_i + \mathcal N(0, z^2C^2 I)\Bigr).
    $$

    It takes the place of the gradient of the mean loss of a batch in every method whose clients read their samples by
    that gradient alone, once a step: pulls towards other models, corrections and personal layers are computed of what
    it gives, and cost no privacy. A client that compares models (`personalized.ifca`) spends a step on it, of which
    the losses of a sample by all models, less their mean, take the place of its gradient. A client that has taken the
    steps that it may trains no more. Losses of the training are withheld: the history has NaN.

    One sample more or less in a client's data changes the distribution of all that it ever sends as much as `steps`
    Poisson-sampled Gaussian mechanisms with noise z do, whatever the other clients do; its number of samples is taken
    to be public, and its samples to have the same weight: drivers and nodes refuse others, but see no weights inside
    a transformation. `PrivateSdca` takes the same settings for its own mechanism. `with_budget` chooses noise and steps
    for an $(\varepsilon, \delta)$, and `spent` says what a run has used.

    Args:
      noise: z, of all clients or ``[m]`` of each.
      steps: gradients that a client may compute in all, int32; of all clients or ``[m]`` of each.
      clip: C.

    References:
      - [Abadi et al., Deep Learning with Differential Privacy](https://arxiv.org/abs/1607.00133), 2016, Algorithm 1.
    """

    noise: Hyperparameter
    steps: Array | np.ndarray | int
    clip: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        check.nonnegative("ExampleLevel", noise=self.noise)
        check.integers("ExampleLevel", 0, steps=self.steps)
        check.positive("ExampleLevel", clip=self.clip)
        check.scalar("ExampleLevel", clip=self.clip)

    def client(self, number: int) -> ExampleLevel:
        """The settings of one client, for its `federated.Node`; ``client(0)`` where there is one.

        A node takes its own numbers alone: a server that chose among those of all could choose the weakest.
        """
        check.integer("ExampleLevel.client", 0, number=number)
        noise, steps = (np.asarray(value) for value in (self.noise, self.steps))
        few = min((len(value) for value in (noise, steps) if value.ndim), default=number + 1)
        if number >= few:
            raise ValueError(f"ExampleLevel: there is no client {number}; they are 0 to {few - 1}.")
        return self.replace(
            **{name: value[number] for name, value in (("noise", noise), ("steps", steps)) if value.ndim}
        )

    def left(self, spent: Array, nodes: Array) -> Array:
        """The steps that clients of these numbers may still take, int32."""
        return jnp.maximum(_of(self.steps, nodes).astype(jnp.int32) - spent, 0)

    def noise_of(self, nodes: Array, dtype: DTypeLike) -> Array:
        """The noise z of clients of these numbers."""
        return _of(self.noise, nodes).astype(dtype)

    def of(self, node: Array, dtype: DTypeLike, expected: Array, largest: Array) -> OfClient:
        """The settings of one client."""
        return OfClient(jnp.asarray(self.clip, dtype), self.noise_of(node, dtype), expected, largest)


class Spent(Pytree):
    """The steps that clients have taken, the least noise of any, and the largest share of samples in a batch."""

    steps: Array  # [m] int32
    noise: Array  # [m] float32 infinite before the first
    share: Array  # [m] float32

    @classmethod
    def nothing(cls, m: int) -> Spent:
        zero = jnp.zeros((m,), jnp.float32)
        return cls(jnp.zeros((m,), jnp.int32), zero + jnp.inf, zero)

    def after(self, steps: Array, noise: Array, share: Array) -> Spent:
        """After so many more steps of each ``[m]``, with this noise and share."""
        some, noise, share = steps > 0, noise.astype(jnp.float32), share.astype(jnp.float32)
        return Spent(
            self.steps + steps, jnp.where(some, jnp.minimum(self.noise, noise), self.noise),
            jnp.where(some, jnp.maximum(self.share, share), self.share),
        )  # fmt: skip


def check_same_weights(owner: str, data: TaskData) -> None:
    """Raise where samples of a client have different weights, which are told from one another by the largest."""
    weight = check.concrete(data.weight)
    if weight is None:
        return
    # Weights that differ by a millionth are alike but for rounding.
    least = np.where(weight > 0, weight, np.inf).min(axis=1, initial=np.inf)
    if (uneven := weight.max(axis=1, initial=0.0) > 1.000001 * least).any():
        raise ValueError(
            f"{owner}: samples of client {int(uneven.argmax())} have different weights; privacy is proven for samples "
            f"that count the same."
        )


class OfClient(NamedTuple):
    """Settings of one client."""

    clip: Array  # [] C
    noise: Array  # [] z
    expected: Array  # [] q n, samples of a batch in the mean
    largest: Array  # [] weight of a sample


def _of(value: ArrayLike, nodes: Array) -> Array:
    """The value of some clients, of one for all or one for each."""
    value = jnp.asarray(value)
    return value[nodes] if value.ndim else jnp.broadcast_to(value, jnp.shape(nodes))


def headroom(batch: int) -> int:
    """Count the rows for a batch of so many samples in the mean: more are drawn with a chance below 1e-13."""
    return batch + math.ceil(8.0 * math.sqrt(batch)) + 16


class ByChance(Schedule):
    """Batches to which every sample belongs with the same chance, by itself."""

    def with_settings(self, epochs: int, batch: int | None) -> Schedule:
        return ByChance(epochs, batch)

    def rows(self, n: int) -> int:
        return n if self.batch is None else min(headroom(self.batch), n)

    def batches(self, key: Array, real: Array) -> Callable[[Array], tuple[Array, Array]]:
        room, count = self.rows(len(real)), jnp.sum(real, dtype=jnp.uint32)
        size = np.uint32(min(self.size(len(real)), 2**31))
        # Rounded down: a sample is not drawn more often than the accountant believes.
        share = np.uint32(2**32 - 1) // jnp.maximum(count, 1) * size

        def batch(i: Array) -> tuple[Array, Array]:
            of_step = jax.random.fold_in(key, i)
            chance = uniform_bits(jax.random.fold_in(of_step, _CHANCE), len(real))
            drawn = real & ((chance < share) | (count <= size))
            order = in_random_order(jax.random.fold_in(of_step, _ORDER), drawn)[:room]
            taken = jnp.arange(room, dtype=jnp.int32) < jnp.sum(drawn, dtype=jnp.int32)
            return jnp.where(taken, order, jnp.argmax(real).astype(jnp.int32)), taken

        return batch


def private_mean_loss(
    loss: Callable[[Network, Likelihood, PyTree, Batch, Array], Array], network: Network, likelihood: Likelihood,
    params: Params, batch: Batch, key: Array | None, how: OfClient,
) -> Array:  # fmt: skip
    """Stand for the mean loss of a batch: 0, with the private gradient of the parameters.

    Args:
      loss: mean loss of a batch.
      network: of the client.
      likelihood: of the labels.
      params: of the network.
      batch: by chance.
      key: of this step.
      how: settings.
    """
    if key is None:
        raise ValueError("ExampleLevel: mean_loss needs the key that the objective was given, for the noise.")
    gradient = jax.grad(partial(loss, network, likelihood))
    found = lax.stop_gradient(_noisy_mean(partial(gradient, lax.stop_gradient(params)), batch, key, how))
    # Its gradient is `found`, its value 0 whatever the samples are.
    terms = jax.tree.map(lambda p, g: jnp.sum((p - lax.stop_gradient(p)) * g), params, found)
    return jnp.asarray(sum(jax.tree.leaves(terms)))


def private_losses(
    loss: Callable[[Network, Likelihood, PyTree, Batch, Array], Array], network: Network, likelihood: Likelihood,
    models: Params, batch: Batch, key: Array, how: OfClient,
) -> Array:  # fmt: skip
    """Compute by how much each of several models is worse than their mean in a batch, with noise, ``[k]``.

    What all models find hard in a sample would only make its vector longer. Arguments as `private_mean_loss`.
    """

    def by_all(one: Batch, key: Array) -> Array:
        losses = jax.vmap(lambda params: loss(network, likelihood, params, one, key))(models)
        return losses - jnp.mean(losses)

    return jnp.asarray(_noisy_mean(by_all, batch, key, how))


def _noisy_mean(of_sample: Callable[[Batch, Array], Tree], batch: Batch, key: Array, how: OfClient) -> Tree:
    """Clip the vector of every sample, sum, add noise, and divide by the size of a batch in the mean."""
    places = jnp.arange(len(batch.weight), dtype=jnp.uint32)

    def vector(x: Array, y: Array, place: Array) -> Tree:
        one = Batch(x[None], y[None], jnp.ones((1,), batch.weight.dtype))
        return of_sample(one, jax.random.fold_in(key, place))

    each = jax.vmap(vector)(batch.x, batch.y, places)
    length = jnp.sqrt(sum(jnp.sum(g.reshape(len(places), -1) ** 2, axis=1) for g in jax.tree.leaves(each)))
    counts = (batch.weight > 0) & jnp.isfinite(length)
    shorter = jnp.minimum(1.0, safe_ratio(how.clip, length))
    factor = jnp.where(counts, safe_ratio(batch.weight, how.largest) * shorter, 0.0)
    leaves, form = jax.tree.flatten(each)
    noise = how.noise * how.clip

    def released(i: int, g: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, _NOISE), np.uint32(i))
        clipped = jnp.where(counts.reshape(-1, *(1,) * (g.ndim - 1)), g, jnp.zeros_like(g))
        total = jnp.tensordot(factor, clipped, axes=1)
        return (total + noise * jax.random.normal(own, total.shape, total.dtype)) / how.expected

    return jax.tree.unflatten(form, [released(i, g) for i, g in enumerate(leaves)])
