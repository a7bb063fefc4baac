r"""Lasso problems that share one quadratic form: the weights of (15) from V.

One column of W, one feature of all tasks, is one problem in m unknowns; the d of them are solved side by side.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._math import matmul
from mocha_jax.coupling import Dense

_MAX_SWEEPS = 1000


def soft_threshold(x: Array, by: Array) -> Array:
    """Numbers moved towards 0 by `by`, and no further than 0."""
    return x - jnp.clip(x, -by, by)


def lasso(a: Array, v: Array, lam1: Array, start: Array) -> Array:
    r"""Coordinate descent on d problems at once.

    .. math:: \arg\min_W \tfrac12\mathrm{tr}(W^\top A W) - \langle V, W\rangle + \lambda_1\|W\|_1

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


class Lasso(Dense):
    r""":math:`R(W) = \tfrac12\mathrm{tr}(W^\top A W) + \lambda_1\|W\|_1`, whose :math:`\nabla R^*` is not linear.

    :math:`R^*` is as smooth as without the penalty, so sigma' of :math:`\bar M = A^{-1}` is safe here too.
    """

    precision: Array  # [m, m] A
    lam1: Array  # []

    def apply(self, v: Array) -> Array:
        return lasso(self.precision, v, self.lam1, super().apply(v))

    def linear(self) -> Dense:
        return Dense(self.matrix)

    def gradient(self, w: Array) -> Array:
        return matmul(self.precision, w) + self.lam1 * jnp.sign(w)

    def prox(self, y: Array, rho: Array) -> Array:
        stiff = self.precision + rho * jnp.eye(len(y), dtype=y.dtype)
        return lasso(stiff, rho * y, self.lam1, y)

    def conjugate(self, v: Array) -> Array:
        w = self.apply(v)
        return jnp.sum(v * w) - self.value(v, w)

    def value(self, v: Array, w: Array) -> Array:
        return 0.5 * jnp.sum(w * matmul(self.precision, w)) + self.lam1 * jnp.sum(jnp.abs(w))

    def slack_bound(self, v: Array, error: Array, w: Array) -> Array:
        """At least `slack` for all V within `error` of v, whatever rounding does."""
        m, unit = len(v), 0.5 * jnp.finfo(v.dtype).eps
        r = v - matmul(self.precision, w)
        lost = error + unit * ((m + 8.0) * matmul(jnp.abs(self.precision), jnp.abs(w)) + 2.0 * jnp.abs(v) + jnp.abs(r))
        p = jnp.clip(r, -self.lam1, self.lam1)
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0) + (lost + 4.0 * unit * self.lam1) * jnp.abs(w)
        # What is off by at most its size plus the error, as the norm that the quadratic form is.
        norm = jnp.sqrt(self.conjugate_bound(r - p, self.precision))
        row = jnp.max(jnp.sum(jnp.abs(self.matrix), axis=1))
        return (norm + jnp.sqrt(row * jnp.sum(lost**2))) ** 2 + jnp.sum(penalty)

    def slack(self, v: Array, w: Array) -> Array:
        # With the nearest subgradient p of the penalty, R*(v) <= |v - p|^2 / 2 in the metric of M: two terms >= 0.
        r = v - matmul(self.precision, w)
        p = jnp.clip(r, -self.lam1, self.lam1)
        off = r - p
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0)
        return jnp.maximum(0.5 * jnp.sum(off * matmul(self.matrix, off)), 0.0) + jnp.sum(penalty)
