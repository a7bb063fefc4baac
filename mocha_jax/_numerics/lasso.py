r"""Lasso problems that share one quadratic form, for the weights of (15) from V.

One column of W, one feature of all tasks, is one problem in m unknowns; the d of them are solved side by side.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import in_blocks, matmul, nodes_of

_MAX_SWEEPS = 1000
_MATRICES = 2**22  # numbers of the systems of as many columns as are factorised at once
BETWEEN = 8  # sweeps, or proximal steps, between two of Newton's; of sweeps more where a step costs more

# Turns without halving the residual after which rounding rules. Of turns in which no sign changes two are enough.
_PATIENCE = 64

# A residual below so many roundings of its terms is none.
ROUNDINGS = 20.0


def soft_threshold(x: Array, by: Array) -> Array:
    """Numbers moved towards 0 by `by`, and no further than 0."""
    return x - jnp.clip(x, -by, by)


def lasso(a: Array, v: Array, lam1: Array, start: Array) -> Array:
    r"""Solve d lasso problems at once, by coordinate descent and Newton's method.

    $$
    \arg\min_W \tfrac12\mathrm{tr}(W^\top A W) - \langle V, W\rangle + \lambda_1\|W\|_1
    $$

    Args:
      a: positive definite ``[m, m]``.
      v: ``[m, d]``; every column is a problem of its own.
      lam1: penalty, a scalar.
      start: where to begin ``[m, d]``; it is returned if it is optimal up to rounding.

    Sweeps, which change signs, take turns with Newton's step on the entries that are not 0, which ends the work once
    the signs are right. It goes on until the subgradient of least length is as small as rounding lets it be, for at
    most a thousand sweeps.
    """
    m = len(a)
    diagonal = jnp.diagonal(a)
    at_once = max(BETWEEN, m // BETWEEN)  # about as long as a step

    def residual(w: Array) -> Array:
        """Minus the subgradient of least length."""
        return -least_subgradient(matmul(a, w) - v, w, lam1)

    def size(w: Array) -> Array:
        """The largest residual, over what rounding makes of each column."""
        terms = jnp.max(jnp.abs(v) + matmul(jnp.abs(a), jnp.abs(w)), axis=0, keepdims=True)
        unit = ROUNDINGS * jnp.maximum(jnp.finfo(v.dtype).eps * terms, jnp.finfo(v.dtype).tiny)
        return jnp.max(jnp.abs(residual(w)) / unit)

    def update(j: Array, w: Array) -> Array:
        rest = v[j] - matmul(a[j], w) + diagonal[j] * w[j]
        return w.at[j].set(soft_threshold(rest, lam1) / diagonal[j])

    def unswept(carry: tuple[Array, Array]) -> Array:
        return (carry[0] < at_once) & (size(carry[1]) > 1.0)

    def sweep(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] + 1, lax.fori_loop(0, m, update, carry[1])

    def unfinished(carry: tuple[Patience, Array, Array]) -> Array:
        patience, sweeps, w = carry
        return patience.goes_on() & (sweeps < _MAX_SWEEPS) & (size(w) > 1.0)

    def sweeps_and_step(carry: tuple[Patience, Array, Array]) -> tuple[Patience, Array, Array]:
        patience, sweeps, before = carry
        count, swept = lax.while_loop(unswept, sweep, (zero, before))
        w = lax.cond(count < at_once, lambda w: w, lambda w: _newton(a, w, residual(w)), swept)
        return patience.after(size(w), before, swept, w), sweeps + count, w

    zero = jnp.zeros((), jnp.int32)
    return lax.while_loop(unfinished, sweeps_and_step, (Patience(zero, size(start)), zero, start))[2]


class Patience(Pytree):
    """A record by which to tell whether turns of two kinds of steps still gain something."""

    idle: Array  # [] int32 turns without halving the residual; one in which no sign changes counts as many
    least: Array  # [] the residual that has to be halved

    def goes_on(self) -> Array:
        return self.idle < _PATIENCE

    def after(self, residual: Array, *states: Array) -> Patience:
        """The patience after a turn with these states in it."""
        signs = [jnp.sign(state) for state in states]
        moves = jnp.any(jnp.stack([before != after for before, after in itertools.pairwise(signs)]))
        gains = residual < 0.5 * self.least
        idle = jnp.where(gains, 0, self.idle + jnp.where(moves, 1, _PATIENCE // 2))
        return Patience(idle, jnp.where(gains, residual, self.least))


def least_subgradient(gradient: Array, x: Array, penalty: Array) -> Array:
    """Return the subgradient of least length, of what has this gradient and of the sum of penalties times |x|."""
    return jnp.where(x == 0, soft_threshold(gradient, penalty), gradient + penalty * jnp.sign(x))


def _newton(a: Array, w: Array, residual: Array) -> Array:
    """Go towards the least value with the signs of w: as far as they allow, or all the way with 0 for what crosses 0.

    Of both points that with the smaller value is taken, in every column of w ``[m, d]``, if it gains anything.
    """
    eye = jnp.eye(len(a), dtype=a.dtype)

    def direction(support: Array, r: Array) -> Array:
        own = jnp.where(support[:, None] & support[None, :], a, eye)
        return jsl.cho_solve(jsl.cho_factor(own), jnp.where(support, r, 0.0))

    def some(first: Array | int, width: int) -> Array:
        return jax.vmap(direction)(nodes_of((w != 0).T, first, width), nodes_of(residual.T, first, width))

    change = in_blocks(some, w.shape[1], a.size, _MATRICES).T
    change = jnp.where(jnp.all(jnp.isfinite(change), axis=0, keepdims=True), change, 0.0)
    crosses, until = crossings(w, change)
    share = jnp.min(until, axis=0, keepdims=True)
    allowed = jnp.where(crosses & (until <= share), -w, share * change)
    whole = jnp.where(crosses, -w, change)

    def gain(step: Array) -> Array:  # while no sign changes the objective is quadratic
        return jnp.sum(step * (residual - 0.5 * matmul(a, step)), axis=0, keepdims=True)

    best = jnp.where(gain(whole) > gain(allowed), whole, allowed)
    return w + jnp.where(gain(best) > 0, best, 0.0)


def crossings(x: Array, change: Array) -> tuple[Array, Array]:
    """Tell which entries a change takes across 0, and after which share of it each is there; 1 for the others."""
    crosses = jnp.sign(x) * (x + change) < 0
    return crosses, jnp.where(crosses, jnp.abs(x) / jnp.where(crosses, jnp.abs(change), 1.0), 1.0)
