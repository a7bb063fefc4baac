r"""Lasso problems that share one quadratic form: the weights of (15) from V.

One column of W, one feature of all tasks, is one problem in m unknowns; the d of them are solved side by side.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._numerics.math import matmul

_MAX_SWEEPS = 1000


def soft_threshold(x: Array, by: Array) -> Array:
    """Numbers moved towards 0 by `by`, and no further than 0."""
    return x - jnp.clip(x, -by, by)


def lasso(a: Array, v: Array, lam1: Array, start: Array) -> Array:
    r"""Coordinate descent on d problems at once.

    $$
    \arg\min_W \tfrac12\mathrm{tr}(W^\top A W) - \langle V, W\rangle + \lambda_1\|W\|_1
    $$

    Args:
      a: positive definite ``[m, m]``.
      v: ``[m, d]``; every column is a problem of its own.
      lam1: penalty, a scalar.
      start: where to begin ``[m, d]``; where it is optimal already, it is returned.

    Sweeps until the subgradient of least length is as small as rounding lets it be.
    """
    diagonal = jnp.diagonal(a)
    tolerance = 20.0 * jnp.finfo(v.dtype).eps * jnp.max(jnp.abs(v))

    def update(j: Array, w: Array) -> Array:
        rest = v[j] - matmul(a[j], w) + diagonal[j] * w[j]
        return w.at[j].set(soft_threshold(rest, lam1) / diagonal[j])

    def unfinished(carry: tuple[Array, Array]) -> Array:
        sweep, w = carry
        r = v - matmul(a, w)
        residual = jnp.where(w == 0, jnp.abs(soft_threshold(r, lam1)), jnp.abs(r - lam1 * jnp.sign(w)))
        return (sweep < _MAX_SWEEPS) & (jnp.max(residual) > tolerance)

    def one_sweep(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sweep, w = carry
        return sweep + 1, lax.fori_loop(0, len(a), update, w)

    return lax.while_loop(unfinished, one_sweep, (jnp.zeros((), jnp.int32), start))[1]
