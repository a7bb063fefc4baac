"""Cholesky factors of many small matrices, by products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.lax.linalg import cholesky, triangular_solve

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._numerics.math import EXACT

# Rows of the blocks that are factorised by themselves. Of larger ones a product is 10 to 50 times as fast; with smaller
# ones a CPU gains nothing and takes longer to compile.
_BLOCK, _BLOCK_ON_CPU = 16, 32

# Matrices that a CPU factorises at a time where there are many: so many stay in its cache.
_AT_ONCE, _MANY = 256, 2048


def inverse_factor(a: Array) -> Array:
    r"""Return $L^{-1}$ of positive definite matrices $A = LL^\top$, ``[k, n, n]``, lower triangular.

    Of two blocks of rows it is

    $$
    \begin{pmatrix} M_1 & 0 \\ -M_2 L_{21} M_1 & M_2 \end{pmatrix}, \qquad L_{21} = A_{21}M_1^\top,
    $$

    where $M_1$ is that of $A_{11}$ and $M_2$ that of $A_{22} - L_{21}L_{21}^\top$. It is NaN where A is not positive
    definite.

    Args:
      a: symmetric; what is above the diagonal is not read.
    """
    by_rows = _by_rows if len(a) < _MANY else _some_at_a_time
    return platform_dependent(
        a, default=partial(_by_blocks, _by_library, _BLOCK), cpu=partial(_by_blocks, by_rows, _BLOCK_ON_CPU)
    )


def with_rounding(a: Array) -> Array:
    """Add to the diagonals of nonnegative matrices ``[k, n, n]`` what keeps them so when they are factorised."""
    n = a.shape[1]
    largest = jnp.max(jnp.diagonal(a, axis1=1, axis2=2), axis=1, initial=0.0)
    return a + (n * jnp.finfo(a.dtype).eps * largest)[:, None, None] * jnp.eye(n, dtype=a.dtype)[None]


def _by_blocks(factorise: Callable[[Array], Array], block: int, a: Array) -> Array:
    count, n = a.shape[:2]
    if n <= block:
        return factorise(a)
    half = -(-n // block) // 2 * block
    first = _by_blocks(factorise, block, a[:, :half, :half])
    below = _product("kij,klj->kil", a[:, half:, :half], first)
    second = _by_blocks(factorise, block, a[:, half:, half:] - _product("kij,klj->kil", below, below))
    corner = -_product("kij,kjl->kil", second, _product("kij,kjl->kil", below, first))
    above = jnp.concatenate([first, jnp.zeros((count, half, n - half), a.dtype)], axis=2)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=2)], axis=1)


def _by_library(a: Array) -> Array:
    factor = cholesky(a, symmetrize_input=False)
    unit = jnp.broadcast_to(jnp.eye(a.shape[1], dtype=a.dtype), a.shape)
    return triangular_solve(factor, unit, left_side=True, lower=True)


def _by_rows(a: Array) -> Array:
    """Do it row after row, for all matrices at once: blocks of a single row.

    On a CPU this is as fast as LAPACK, which JAX 0.10 lets wait for itself for ever where two programs factorise at a
    time, and which takes longer to compile: its first call imports SciPy.
    """
    n = a.shape[1]
    unit, columns = jnp.eye(n, dtype=a.dtype), jnp.arange(n)

    def add(i: Array, rows: Array) -> Array:
        one = lax.dynamic_index_in_dim(unit, i)  # [1, n]
        row = jnp.where(columns[None] <= i, lax.dynamic_index_in_dim(a, i, 1, keepdims=False), 0.0)
        below = _product("kij,kj->ki", rows, row)  # of L, left of the diagonal
        pivot = jnp.sum(one * row, axis=1) - jnp.sum(below**2, axis=1)
        new = (one - _product("ki,kij->kj", below, rows)) / jnp.sqrt(pivot)[:, None]
        return lax.dynamic_update_index_in_dim(rows, new, i, 1)

    return lax.fori_loop(0, n, add, jnp.zeros_like(a))


def _some_at_a_time(a: Array) -> Array:
    return lax.map(lambda one: _by_rows(one[None])[0], a, batch_size=_AT_ONCE)


def _product(which: str, a: Array, b: Array) -> Array:
    return jnp.einsum(which, a, b, precision=EXACT)
