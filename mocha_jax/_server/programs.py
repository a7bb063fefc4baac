r"""Every node's own part of the weighing: a quadratic program of a few numbers.

A node has p points besides the one where it stands, at vectors $u_1, \dots, u_p$ from there, with slopes s. What the
others ask of it is a vector z, and it answers with the weights

$$
\arg\min_{a\ge 0,\;\sum_j a_j\le 1}\; \langle s, a\rangle + \tfrac{c}{2}\Big\|\sum_j a_j u_j - z\Big\|^2 ,
$$

found, nearly, by a few projected gradient steps from the last answer on. All nodes answer at once; where `total`, the
sum over points, is an argument, the same function is the body of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import EXACT, total

# Projected gradient steps of an answer.
_STEPS = 5

# Points nearer than that, as a share of the squared distance of the farthest, move with its step size.
_MIN_SQUARED_DISTANCE = 1e-6

# No curvature is less than this share of the steepest slope: a step of so many weights ends in a corner anyway, and a
# longer one, of samples that are all zero, would drown them in rounding.
_MIN_CURVATURE = 1e-3


class Programs(Pytree):
    """The quadratic programs of m nodes with p points each."""

    slope: Array  # [p, m]
    gram: Array  # [p, p, m] c times products of the vectors
    metric: Array  # [p, m] see `metric`
    free: Array  # [m] 1 where a node answered, else 0: the others stay where they are


def programs(along: Array, slope: Array, stiffness: Array, free: Array) -> Programs:
    """Set up the programs.

    Args:
      along: the vectors u of every node ``[m, p, d]``.
      slope: s ``[p, m]``.
      stiffness: c of every node ``[m]``.
      free: which nodes answered ``[m]`` bool.
    """
    # One point after the other: twice as fast as at once, on a CPU.
    gram = stiffness[None, None] * jnp.stack([against(along, along[:, j]) for j in range(along.shape[1])])
    return Programs(slope, gram, metric(gram, slope), free.astype(slope.dtype))


def metric(gram: Array, slope: Array, total: Callable[[Array], Array] = total) -> Array:
    r"""A metric h ``[p, m]`` with $\sum_j h_{kj} a_{kj}^2 \ge c_k |\sum_j a_{kj} u_{kj}|^2$.

    One number for each point, for old points can be far and new ones near.
    """
    tiny = jnp.finfo(gram.dtype).tiny ** 0.5
    point = lax.broadcasted_iota(jnp.int32, gram.shape, 0)
    own = jnp.where(point == lax.broadcasted_iota(jnp.int32, gram.shape, 1), gram, 0.0)
    length = jnp.maximum(total(own), tiny)
    length = jnp.maximum(length, _MIN_SQUARED_DISTANCE * jnp.max(length, axis=0, keepdims=True))
    inverse = 1.0 / jnp.sqrt(length)
    cosines = gram * inverse[:, None] * inverse[None, :]
    together = jnp.sqrt(total(total(cosines**2)) + tiny)
    flattest = _MIN_CURVATURE * jnp.max(jnp.abs(slope), axis=0, keepdims=True)
    return jnp.maximum(jnp.maximum(length * together[None], flattest), tiny)


def against(along: Array, z: Array) -> Array:
    """Products ``[p, m]`` of the points' vectors with one of every node ``[m, d]``."""
    return jnp.einsum("mpd,md->pm", along, z, precision=EXACT)


def combine(along: Array, a: Array) -> Array:
    """The way that weights ``[p, m]`` go, ``[m, d]``."""
    return jnp.einsum("pm,mpd->md", a, along, precision=EXACT)


def answer(
    given: Programs, asked: Array, a: Array, total: Callable[[Array], Array] = total, steps: int = _STEPS
) -> Array:
    """The weights ``[p, m]`` of every node.

    Args:
      given: the programs.
      asked: c times the products ``[p, m]`` of the points' vectors with z.
      a: the last weights ``[p, m]``.
      total: the sum over the first axis.
      steps: projected gradient steps.
    """
    slope, last, t = given.slope - asked, a, 1.0
    for _ in range(steps):
        t, before = 0.5 + math.sqrt(0.25 + t * t), t
        ahead = a + (before - 1.0) / t * (a - last)  # Nesterov
        gradient = slope + total(given.gram * ahead[:, None])
        a, last = nearest_weights(ahead - gradient / given.metric, given.metric, total), a
    return jnp.where(given.free[None] > 0, a, 0.0)


def left(given: Programs, asked: Array, a: Array) -> Array:
    """Bound what better answers than these weights ``[p, m]`` would gain, by convexity, ``[m]``; see `answer`."""
    gradient = given.slope - asked + total(given.gram * a[:, None])
    least = jnp.minimum(jnp.min(gradient, axis=0), 0.0)
    return given.free * (total(a * gradient) - least)


def nearest_weights(x: Array, metric: Array, total: Callable[[Array], Array] = total) -> Array:
    r"""Projection of every column of x ``[p, m]`` onto $a \ge 0, \sum_j a_j \le 1$ in a metric h ``[p, m]``.

    It is $a_j = [x_j - \tau / h_j]_+$ with the least $\tau \ge 0$ that will do.
    """
    give, none = 1.0 / metric, jnp.zeros_like(total(x))
    tiny = jnp.finfo(x.dtype).tiny

    def drop(_: Array, tau: Array) -> Array:
        # Of the points that are left, this tau takes away too much of those that it makes negative: they are out.
        left = x > tau[None] * give
        asked = (total(jnp.where(left, x, 0.0)) - 1.0) / jnp.maximum(total(jnp.where(left, give, 0.0)), tiny)
        return jnp.maximum(tau, asked)

    tau = lax.fori_loop(0, len(x), drop, none)
    a = jnp.maximum(x - tau[None] * give, 0.0)
    return a / jnp.maximum(total(a), 1.0)[None]


def along_from(points: Sequence[Array], unit: Array) -> Array:
    """The vectors ``[m, p, d]`` from the first of some points ``[m, d]`` to the others, times the unit."""
    # Relative to the first point, so that nothing cancels near the optimum.
    return jnp.stack([unit * (point - points[0]) for point in points[1:]], axis=1)
