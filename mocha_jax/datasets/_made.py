"""Synthetic federations whose weights and relationship are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import summary
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import matmul
from mocha_jax.spectral import matrix_sqrt

Labels = Callable[[Array, Array, Array], Array]  # of a key, w_t'x of every sample and the noise


class Federation(NamedTuple):
    """Data with the true weights and relationship."""

    data: TaskData
    weights: Array  # [m, d] true W
    covariance: Array  # [m, m] true relationship, unit diagonal up to sampling

    def __repr__(self) -> str:
        return summary(self, self._asdict())


@on_purpose
def clusters(num_tasks: int, num_clusters: int, *, within: Array | float = 0.9, across: Array | float = 0.0) -> Array:
    """Covariance of tasks in equal clusters, neighbours together.

    Args:
      num_tasks: m.
      num_clusters: tasks are cut into that many runs.
      within: correlation of two tasks of one cluster, in [0, 1).
      across: correlation of two tasks of different clusters, below `within`. Negative values
        down to ``-within / (num_clusters - 1)`` or so make rival clusters.

    Examples:
      >>> clusters(4, 2, within=0.5).tolist()[0]
      [1.0, 0.5, 0.0, 0.0]
    """
    check.integer("clusters", 1, num_tasks=num_tasks, num_clusters=num_clusters)
    if num_clusters > num_tasks:
        raise ValueError(f"clusters: num_clusters must be at most num_tasks, {num_tasks}, got {num_clusters}.")
    check.scalar("clusters", within=within, across=across)
    check.in_unit_interval("clusters", open_right=True, within=within)
    num_tasks, num_clusters = int(num_tasks), int(num_clusters)
    within, across = _number("clusters", "within", within), _number("clusters", "across", across)
    covariance = _clusters(num_tasks, num_clusters, within, across)
    check.positive_semidefinite("clusters", "covariance", covariance)
    return covariance


@on_purpose
def low_rank(key: Array, num_tasks: int, rank: int, *, noise: Array | float = 0.05) -> Array:
    """Covariance of tasks that mix a few hidden factors, plus a little of their own; unit diagonal.

    Args:
      key: a JAX random key; the key is consumed.
      num_tasks: m.
      rank: how many factors.
      noise: share of a task's variance that is its own, in [0, 1].
    """
    check.key("low_rank", key)
    check.integer("low_rank", 1, num_tasks=num_tasks, rank=rank)
    check.scalar("low_rank", noise=noise)
    check.in_unit_interval("low_rank", noise=noise)
    num_tasks, rank, noise = int(num_tasks), int(rank), _number("low_rank", "noise", noise)
    factor = jax.random.normal(key, (num_tasks, rank))
    factor = factor / jnp.linalg.norm(factor, axis=1, keepdims=True) * (1.0 - noise) ** 0.5
    return matmul(factor, factor.T) + noise * jnp.eye(num_tasks)


@on_purpose
def sparse_graph(
    key: Array, num_tasks: int, *, degree: Array | float = 3.0, strength: Array | float = 4.0
) -> tuple[Array, Array]:
    r"""A random graph of tasks: its Laplacian, and the covariance with that sparse precision.

    The Laplacian is the $\Omega$ to give to `regularizers.Graph`; the covariance is
    ``inv(strength * laplacian + I)``, scaled to a mean diagonal of 1.

    Args:
      key: a JAX random key; the key is consumed.
      num_tasks: m.
      degree: neighbours of a task on average.
      strength: how much a pair of neighbours agrees, >= 0.
    """
    check.key("sparse_graph", key)
    check.integer("sparse_graph", 1, num_tasks=num_tasks)
    check.scalar("sparse_graph", degree=degree, strength=strength)
    check.nonnegative("sparse_graph", degree=degree, strength=strength)
    num_tasks, degree = int(num_tasks), _number("sparse_graph", "degree", degree)
    strength = _number("sparse_graph", "strength", strength)
    edge = jnp.triu(jax.random.uniform(key, (num_tasks, num_tasks)) < degree / max(num_tasks - 1, 1), 1)
    adjacency = (edge | edge.T).astype(jnp.result_type(float))
    laplacian = jnp.diag(jnp.sum(adjacency, axis=1)) - adjacency
    covariance = jnp.linalg.inv(strength * laplacian + jnp.eye(num_tasks))
    return laplacian, 0.5 * (covariance + covariance.T) / jnp.mean(jnp.diagonal(covariance))


@on_purpose
def sample_weights(key: Array, covariance: Array, num_features: int) -> Array:
    """Weights ``[m, d]`` whose features are independent draws of N(0, covariance)."""
    check.key("sample_weights", key)
    check.integer("sample_weights", 1, num_features=num_features)
    check.positive_semidefinite("sample_weights", "covariance", covariance)
    covariance = check.square("sample_weights", "covariance", covariance)
    return _weights(key, covariance, int(num_features))


@on_purpose
def skewed_sizes(key: Array, num_tasks: int, smallest: int, largest: int) -> np.ndarray:
    """Sample counts spread evenly on a log scale from `smallest` to `largest`, in random order.

    Examples:
      >>> import jax
      >>> sorted(skewed_sizes(jax.random.key(0), 3, 10, 1000).tolist())
      [10, 100, 1000]
    """
    check.key("skewed_sizes", key)
    check.integer("skewed_sizes", 1, num_tasks=num_tasks, smallest=smallest, largest=largest)
    num_tasks, smallest, largest = int(num_tasks), int(smallest), int(largest)
    if smallest > largest:
        raise ValueError(f"skewed_sizes: smallest must be at most largest, {largest}, got {smallest}.")
    sizes = np.round(np.geomspace(smallest, largest, num_tasks)).astype(int)
    return np.asarray(jax.random.permutation(key, jnp.asarray(sizes)))


@on_purpose
def classification(
    key: Array, weights: Array, sizes: np.ndarray, *, label_noise: float = 0.05, loss_scaling: str = "task_mean"
) -> TaskData:
    """Samples with labels sign(w_t'x), some flipped; features are N(0, 1/d).

    Args:
      key: a JAX random key; the key is consumed.
      weights: true W ``[m, d]``.
      sizes: samples of each task ``[m]``.
      label_noise: probability of a flipped label.
      loss_scaling: of the data, see `pack_tasks`.
    """
    weights = _check_samples("classification", key, weights, sizes)
    check.scalar("classification", label_noise=label_noise)
    check.in_unit_interval("classification", label_noise=label_noise)
    noise = _number("classification", "label_noise", label_noise)
    return _data(key, weights, noise, np.asarray(sizes), _sides, int(np.max(sizes)), loss_scaling)


@on_purpose
def regression(
    key: Array, weights: Array, sizes: np.ndarray, *, noise: Array | float = 0.1, loss_scaling: str = "task_mean"
) -> TaskData:
    """Samples with targets w_t'x plus Gaussian noise of deviation `noise`; otherwise as `classification`."""
    weights = _check_samples("regression", key, weights, sizes)
    check.scalar("regression", noise=noise)
    check.nonnegative("regression", noise=noise)
    noise = _number("regression", "noise", noise)
    return _data(key, weights, noise, np.asarray(sizes), _targets, int(np.max(sizes)), loss_scaling)


@on_purpose
def federation(
    key: Array,
    num_tasks: int = 24,
    num_features: int = 30,
    *,
    covariance: Array | None = None,
    smallest: int = 12,
    largest: int = 120,
    label_noise: float = 0.05,
) -> Federation:
    """A classification federation of related tasks with ragged sizes.

    Args:
      key: a JAX random key; the key is consumed.
      num_tasks: m.
      num_features: d.
      covariance: true relationship ``[m, m]``; default four clusters.
      smallest: fewest samples of a task.
      largest: most samples of a task.
      label_noise: probability of a flipped label.

    Examples:
      >>> import jax
      >>> truth = federation(jax.random.key(0), num_tasks=8, num_features=5)
      >>> truth.data.x.shape, truth.weights.shape, int(truth.data.sizes.min())
      ((8, 120, 5), (8, 5), 12)
    """
    check.key("federation", key)
    check.integer("federation", 1, num_tasks=num_tasks, num_features=num_features)
    num_tasks, num_features = int(num_tasks), int(num_features)
    if covariance is not None:
        covariance = check.floats("federation", "covariance", covariance, (num_tasks, num_tasks))
    weight_key, size_key, sample_key = jax.random.split(key, 3)
    covariance = clusters(num_tasks, min(4, num_tasks)) if covariance is None else covariance
    weights = sample_weights(weight_key, covariance, num_features)
    sizes = skewed_sizes(size_key, num_tasks, smallest, largest)
    return Federation(classification(sample_key, weights, sizes, label_noise=label_noise), weights, covariance)


def _number(owner: str, name: str, value: Array | float) -> Array:
    """Convert to JAX's default float and check that the result is finite."""
    number = jnp.asarray(check.number(owner, name, value), float)
    if (numbers := check.concrete(number)) is not None and not np.isfinite(numbers):
        raise ValueError(f"{owner}: {name} must be finite as a number of {number.dtype}, got {check.shown(value)}.")
    return number


def _check_samples(owner: str, key: Array, weights: Array, sizes: np.ndarray) -> Array:
    """The weights as JAX takes them."""
    check.key(owner, key)
    weights = check.floats(owner, "weights", weights, ("m", "d"))
    if (numbers := check.concrete(weights)) is not None and not np.isfinite(numbers).all():
        raise ValueError(f"{owner}: weights must be finite, but hold NaN or infinity in {weights.dtype}.")
    m = len(weights)
    check.array(owner, "sizes", sizes, (m,))
    counts = np.asarray(sizes)
    if counts.dtype.kind not in "iu" or counts.min(initial=1) < 1:
        raise ValueError(f"{owner}: sizes must be integers >= 1, one for each of {m} tasks, got {counts}.")
    return weights


# One program each: every operation by itself would be compiled by itself.


@partial(jax.jit, static_argnums=(0, 1))
def _clusters(num_tasks: int, num_clusters: int, within: Array, across: Array) -> Array:
    label = jnp.arange(num_tasks) * num_clusters // num_tasks
    covariance = jnp.where(label[:, None] == label[None, :], within, across)
    return covariance.at[jnp.diag_indices(num_tasks)].set(1.0)


@partial(jax.jit, static_argnums=2)
def _weights(key: Array, covariance: Array, num_features: int) -> Array:
    return matmul(matrix_sqrt(covariance), jax.random.normal(key, (len(covariance), num_features)))


@partial(jax.jit, static_argnums=(4, 5, 6))
def _data(
    key: Array, weights: Array, noise: Array, sizes: Array, labels: Labels, largest: int, loss_scaling: str
) -> TaskData:
    (m, d), (x_key, label_key) = weights.shape, jax.random.split(key)
    x = jax.random.normal(x_key, (m, largest, d), weights.dtype) / d**0.5
    y = labels(label_key, matmul(x, weights[:, :, None])[:, :, 0], noise)
    real = jnp.arange(largest)[None] < sizes[:, None]
    data = TaskData(
        x=x * real[:, :, None].astype(x.dtype), y=y, weight=real.astype(x.dtype),
        task=jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling=loss_scaling,
    )  # fmt: skip
    return data.replace(weight=data.base_weight())


def _sides(key: Array, z: Array, noise: Array) -> Array:
    return jnp.where((z > 0) ^ jax.random.bernoulli(key, noise, z.shape), 1.0, -1.0).astype(z.dtype)


def _targets(key: Array, z: Array, noise: Array) -> Array:
    return z + noise.astype(z.dtype) * jax.random.normal(key, z.shape, z.dtype)
