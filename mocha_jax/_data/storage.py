"""Layouts of the samples: products with them, and work done on every row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.devices import NodeSharding, each_device
from mocha_jax._core.pytree import Pytree, Tree
from mocha_jax._numerics.blocks import in_blocks, nodes_of, part_of, with_part
from mocha_jax._numerics.math import Terms, combine, lengths, times, totals


class Layout(Pytree):
    """Base class of layouts; ``x [m, n, d]`` are always the samples as `TaskData` stores them."""

    by_rows: ClassVar[bool]  # whether a local solver can read one row after the other

    def slim(self) -> Self:
        """Leave out what ``TaskData.x`` holds already, to be handed from one program to the next."""
        return self

    def whole(self, x: Array, rows: Array | None = None) -> Self:
        """Restore what `slim` left out; from `rows` ``[1, n, m, d]`` if given."""
        return self

    def sizes(self, weight: Array) -> Array:
        """Count the real samples of each node, ``[m]`` int32: those of positive weight ``[m, n]``."""
        return jnp.sum(weight > 0, axis=1, dtype=jnp.int32)

    @abstractmethod
    def node_predictions(self, x: Array, weights: Array) -> Array:
        """Multiply every sample by its node's weights: ``[m, d]`` to ``[m, n]``."""

    @abstractmethod
    def weighted_sums(self, x: Array, factors: Array) -> Array:
        """Add up each node's samples times their factors: ``[m, n]`` to ``[m, d]``."""

    @abstractmethod
    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        """See `TaskData.renewed`."""

    @abstractmethod
    def map_samples(self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], *by_node: Array) -> Tree:
        """See `TaskData.map_samples`."""

    @abstractmethod
    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        """Return the length of each node's longest sample, ``[m]``."""

    @abstractmethod
    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        """See `TaskData.map_rows`."""

    @abstractmethod
    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        """See `TaskData.sum_over_rows`."""


# Numbers of the samples that `TaskData.map_samples` takes at once.
PART = 2**23


class AsStored(Layout):
    """The samples node by node, as they are stored."""

    rows: Array | None = None  # [1, n, m, d] the same row by row, if available

    by_rows = False

    def node_predictions(self, x: Array, weights: Array) -> Array:
        return times(x, weights)

    def weighted_sums(self, x: Array, factors: Array) -> Array:
        return combine(x, factors)

    def renewed(
        self, x: Array, sharding: NodeSharding | None, factors: Array, sums: Array, part: Array, parts: int, real: int
    ) -> Array:
        def work(part: Array, x: Array, factors: Array, sums: Array) -> Array:
            begin, width = part_of(min(real, len(x)), part, parts)
            exact = combine(*(nodes_of(a, begin, width) for a in (x, factors)))
            return with_part(sums, exact, begin)

        return each_device(sharding, work, part, x, factors, sums)

    def map_samples(self, x: Array, sharding: NodeSharding | None, work: Callable[..., Tree], *by_node: Array) -> Tree:
        return each_device(sharding, partial(_in_parts, work), (), x, *by_node)

    def longest(self, x: Array, dtype: DTypeLike) -> Array:
        return lengths(jnp.max(jnp.sum(x.astype(dtype) ** 2, axis=2), axis=1))

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        return work(given, by_node, *by_row)

    def sum_over_rows(
        self, x: Array, y: Array, weight: Array, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array
    ) -> Terms:
        return totals(terms, given, times(x, weights), y, weight, *rows)


def _in_parts(work: Callable[..., Tree], _: tuple[()], x: Array, *by_node: Array) -> Tree:
    def part(first: Array | int, width: int) -> Tree:
        return work(*(nodes_of(a, first, width) for a in (x, *by_node)))

    return in_blocks(part, len(x), x[0].size, PART)
