"""Products in full precision, ratios that stay finite, random bits and blocks of nodes: helpers that all share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core.pytree import Tree

# Accelerators multiply float32 matrices in lower precision unless told otherwise, and a
# certificate computed so would not certify anything.
EXACT = lax.Precision.HIGHEST


def matmul(a: Array, b: Array) -> Array:
    """`a @ b` in the full precision of the inputs, on every device."""
    return jnp.matmul(a, b, precision=EXACT)


def safe_ratio(num: Array, den: Array) -> Array:
    """`num / den` where `den > 0`, else 0; value and gradient are finite."""
    ok = den > 0
    return jnp.where(ok, num / jnp.where(ok, den, 1.0), 0.0)


def saturating_ratio(num: Array, den: Array) -> Array:
    """`num / den`, and `num` times a huge finite number where `den` is 0 or near it.

    A coordinate step that divides by a curvature and clips the result is right in the
    limit of zero curvature too: it moves to the end of the interval that `num` points to.
    """
    info = jnp.finfo(jnp.result_type(num))
    huge = info.max**0.5
    ok = den > info.tiny**0.5  # below it the derivative num / den^2 overflows
    return jnp.where(ok, num / jnp.where(ok, den, 1.0), num * huge)


def total(rows: Iterable[Array]) -> Array:
    """The sum of arrays, one after another: XLA's own reduction over a first axis is slow."""
    return reduce(jnp.add, rows)


def uniform_bits(key: Array, count: int) -> Array:
    """Random bits ``[count]``; entry i depends on the key and on i, never on `count`.

    JAX draws so as long as its option ``jax_threefry_partitionable`` is on, as it is by default.
    """
    return jax.random.bits(key, (count,), jnp.uint32)


def zero_tangent(a: Array) -> Array | np.ndarray:
    """A zero tangent of an array, as derivative rules expect it; integers have the dtype float0."""
    if jnp.issubdtype(jnp.result_type(a), jnp.inexact):
        return jnp.zeros_like(a)
    return np.zeros(jnp.shape(a), jax.dtypes.float0)


Terms = TypeVar("Terms")  # an array, or a tree of some


def times(x: Array, weights: Array) -> Array:
    """``[..., n, d]`` times ``[..., d]``, in the precision of the latter, ``[..., n]``."""
    return jnp.einsum("...nd,...d->...n", x.astype(weights.dtype), weights, precision=EXACT)


def combine(x: Array, factors: Array) -> Array:
    """``[..., n, d]`` combined by ``[..., n]``, in the precision of the latter, ``[..., d]``."""
    return jnp.einsum("...n,...nd->...d", factors, x.astype(factors.dtype), precision=EXACT)


def totals(terms: Callable[..., Terms], setting: Tree, z: Array, y: Array, weight: Array, *rows: Array) -> Terms:
    """See `TaskData.sum_over_rows`; padding is cut off rather than multiplied: 0 times infinity is not 0."""
    per_row = terms(setting, z, y, *rows)
    return jax.tree.map(lambda term: jnp.sum(jnp.where(weight > 0, weight * term, 0.0), axis=-1), per_row)


def lengths(squared: Array) -> Array:
    """Lengths from their squares; none so small that its square was lost."""
    return jnp.sqrt(jnp.maximum(squared, jnp.finfo(squared.dtype).tiny))


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
