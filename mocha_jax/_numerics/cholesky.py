"""Cholesky factors of many small matrices, by products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax.linalg import cholesky, triangular_solve

from mocha_jax._core.platform import platform_dependent
from mocha_jax._numerics.math import EXACT

# Rows of the blocks that LAPACK factorises. Beyond it a product is 10 to 50 times as fast, on a CPU and on a GPU.
_BLOCK = 16

# JAX 0.10 divides a batch among a CPU's threads and lets one of them wait for the others: where two programs, or two
# parts of one, factorise at a time, all may wait for ever.
_BATCHES_WAIT = jax.__version_info__ < (0, 11)


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
    count, n = a.shape[:2]
    if n <= _BLOCK:
        return platform_dependent(a, default=_by_library, cpu=_one_by_one) if _BATCHES_WAIT else _by_library(a)
    half = -(-n // _BLOCK) // 2 * _BLOCK
    first = inverse_factor(a[:, :half, :half])
    below = _product("kij,klj->kil", a[:, half:, :half], first)
    second = inverse_factor(a[:, half:, half:] - _product("kij,klj->kil", below, below))
    corner = -_product("kij,kjl->kil", second, _product("kij,kjl->kil", below, first))
    above = jnp.concatenate([first, jnp.zeros((count, half, n - half), a.dtype)], axis=2)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=2)], axis=1)


def _by_library(a: Array) -> Array:
    factor = cholesky(a, symmetrize_input=False)
    unit = jnp.broadcast_to(jnp.eye(a.shape[1], dtype=a.dtype), a.shape)
    return triangular_solve(factor, unit, left_side=True, lower=True)


def _one_by_one(a: Array) -> Array:
    return lax.map(lambda one: _by_library(one[None])[0], a)


def _product(which: str, a: Array, b: Array) -> Array:
    return jnp.einsum(which, a, b, precision=EXACT)
