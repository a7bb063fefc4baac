"""Tasks whose samples are elsewhere: the data as the server knows it."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.devices import NodeSharding
from mocha_jax._core.pytree import Tree
from mocha_jax._data.layouts import Layout
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import Terms


class Absent(Layout):
    """The number of samples of every node, without the samples."""

    counts: Array  # [m] int32

    by_rows = True

    def sizes(self, weight: Array) -> Array:
        return self.counts

    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        return jnp.zeros(self.counts.shape, dtype)

    def node_predictions(self, x: Array, weights: Array) -> Array:
        raise _elsewhere()

    def weighted_sums(self, x: Array, factors: Array) -> Array:
        raise _elsewhere()

    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        return sums

    def map_samples(
        self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], by_node: tuple[Array, ...],
        *by_row: Array,
    ) -> Tree:  # fmt: skip
        raise _elsewhere()

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        raise _elsewhere()

    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        raise _elsewhere()


def _elsewhere() -> ValueError:
    return ValueError(
        "Server: this needs samples or dual variables, and those are with the nodes; a server of a federation works "
        "with what nodes report."
    )


def absent(counts: Array, num_features: int, dtype: DTypeLike, loss_scaling: str = "sum") -> TaskData:
    """Data without a sample, of tasks with a node each.

    Args:
      counts: how many samples every node says it has ``[num_tasks]`` int32.
      num_features: d.
      dtype: of the arithmetic.
      loss_scaling: how the nodes weigh their samples.
    """
    (m,) = counts.shape
    one = TaskData(
        x=jnp.zeros((m, 1, num_features), dtype), y=jnp.ones((m, 1), dtype), weight=jnp.ones((m, 1), dtype),
        task=jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling=loss_scaling,
    )  # fmt: skip
    none = jnp.zeros((m, 0), dtype)
    return one.exchange(x=jnp.zeros((m, 0, num_features), dtype), y=none, weight=none, layout=Absent(counts))
