"""Products with samples that are stored row by row, ``[n, c, d]``: row i of all c nodes together.

An accelerator takes all of it as one operation. A CPU goes through the rows of a block of nodes, whose weights or sums
stay in its cache from one row to the next, as the local solver does (`mocha_jax._node.local_solver`): its own
reductions over features are not vectorised, and over rows they jump through memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._numerics.math import EXACT, in_blocks, matmul, nodes_of

# Numbers in one row of a block of nodes: weights or sums and the row stay in a cache that the cores share (measured:
# 2**16 to 2**20 and no limit).
_BLOCK_NUMBERS = 2**18


def row_of(x: Array, i: Array, first: Array | int, width: int) -> Array:
    """Row i of some nodes, straight from the whole array: a block of it would be a copy; ``[width, d]``."""
    return lax.dynamic_slice(x, (i, first, 0), (1, width, x.shape[2]))[0]


@jax.custom_jvp
def times(x: Array, weights: Array) -> Array:
    """``[n, c, d]`` times ``[c, d]``, in the precision of the latter, ``[c, n]``."""
    whole = dict.fromkeys(("cuda", "rocm", "tpu"), _times_at_once)
    return platform_dependent(x, weights, default=_times_by_rows, **whole)


def _times_at_once(x: Array, weights: Array) -> Array:
    return jnp.einsum("ncd,cd->cn", x.astype(weights.dtype), weights, precision=EXACT)


def _times_by_rows(x: Array, weights: Array) -> Array:
    n, count, d = x.shape

    def block(first: Array | int, width: int) -> Array:
        w, ones = nodes_of(weights, first, width), jnp.ones(d, weights.dtype)
        # A product with ones is a vectorised sum; XLA's own reduction over the last axis is not.
        rows = lax.map(lambda i: matmul(row_of(x, i, first, width).astype(w.dtype) * w, ones), jnp.arange(n))
        return rows.T

    return in_blocks(block, count, d, _BLOCK_NUMBERS)


def combine(x: Array, factors: Array, begin: Array | int = 0) -> Array:
    """``[n, c, d]`` combined by ``[k, n]``, in the precision of the latter, ``[k, d]``: of k nodes from `begin`."""
    return _combine(x, factors, jnp.asarray(begin, int))


@jax.custom_jvp
def _combine(x: Array, factors: Array, begin: Array) -> Array:
    whole = dict.fromkeys(("cuda", "rocm", "tpu"), _combine_at_once)
    return platform_dependent(x, factors, begin, default=_combine_by_rows, **whole)


def _combine_at_once(x: Array, factors: Array, begin: Array) -> Array:
    # A sum rather than a product of matrices: it takes some of the nodes without a copy of them.
    x = nodes_of(x, begin, len(factors), 1)
    return jnp.sum(x.astype(factors.dtype) * factors.T[:, :, None], axis=0)


def _combine_by_rows(x: Array, factors: Array, begin: Array) -> Array:
    count, d = len(factors), x.shape[2]

    def block(first: Array | int, width: int) -> Array:
        of_rows = nodes_of(factors, first, width).T

        def add(total: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
            i, factor = row
            return total + factor[:, None] * row_of(x, i, begin + first, width).astype(total.dtype), None

        start = jnp.zeros((width, d), factors.dtype)
        return lax.scan(add, start, (jnp.arange(len(of_rows)), of_rows))[0]

    return in_blocks(block, count, d, _BLOCK_NUMBERS)


def _derivative(
    product: Callable[..., Array], at_once: Callable[..., Array], primals: tuple[Array, ...],
    tangents: tuple[Array | SymbolicZero, ...],
) -> tuple[Array, Array]:  # fmt: skip
    """The derivative of a product of both; the derivative with respect to the samples only if it is requested."""
    (x, other, *place), (dx, d_other, *_) = primals, tangents
    changes = [] if isinstance(d_other, SymbolicZero) else [at_once(x, d_other, *place)]
    if not isinstance(dx, SymbolicZero):
        changes.append(at_once(dx, other, *place))
    value = product(x, other, *place)
    return value, sum(changes, start=jnp.zeros_like(value))


times.defjvp(partial(_derivative, times, _times_at_once), symbolic_zeros=True)
_combine.defjvp(partial(_derivative, _combine, _combine_at_once), symbolic_zeros=True)
