"""Work on consecutive nodes, some at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Blocks = TypeVar("Blocks")  # a tree of arrays [nodes, ...]


def in_blocks(work: Callable[[Array | int, int], Blocks], count: int, each: int, numbers: int) -> Blocks:
    """``work(first, width)`` for one block of nodes after the other, and its results ``[width, ...]`` put together.

    Where blocks do not divide the nodes the last one begins earlier, and some nodes are worked on twice.

    Args:
      work: makes arrays of the nodes that begin there, so many.
      count: of nodes.
      each: numbers of a node.
      numbers: of a block, about.
    """
    blocks = -(-count // max(numbers // each, 1))
    if blocks < 2:
        return work(0, count)
    width = -(-count // blocks)
    firsts = jnp.minimum(jnp.arange(blocks) * width, count - width)
    parts_of = lax.map(lambda first: work(first, width), firsts)
    before = (blocks - 1) * width

    def together(parts: Array) -> Array:
        flat = parts.reshape(blocks * width, *parts.shape[2:])
        twice = blocks * width - count
        return jnp.concatenate([flat[:before], flat[before + twice :]]) if twice else flat

    return jax.tree.map(together, parts_of)


def part_of(count: int, part: Array, parts: int) -> tuple[Array, int]:
    """Tell where a part of the nodes begins, and how many it has; together the parts are all, some nodes twice."""
    width = -(-count // parts)
    return jnp.minimum(part * width, count - width), width


def with_part(whole: Array, part: Array, begin: Array) -> Array:
    """Return an array ``[m, ...]`` with the entries of some nodes ``[k, ...]`` in place of its own."""
    place = jnp.arange(len(whole), dtype=begin.dtype) - begin
    inside = ((place >= 0) & (place < len(part))).reshape(-1, *[1] * (whole.ndim - 1))
    # Unlike an update in place it is computed together with what makes and takes the array.
    return jnp.where(inside, part.at[jnp.clip(place, 0, len(part) - 1)].get(mode="promise_in_bounds"), whole)


def nodes_of(array: Array, first: Array | int, width: int, axis: int = 0) -> Array:
    """The entries of some nodes, which are counted by an axis."""
    return array if width == array.shape[axis] else lax.dynamic_slice_in_dim(array, first, width, axis)
