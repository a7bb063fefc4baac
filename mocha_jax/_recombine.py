r"""What the central node can make of the last few dual points of every node.

Node k keeps points :math:`\beta_{k0}` (where it stands), :math:`\beta_{k1}` (what it has just found) and some older
ones. All are feasible, so are their mixtures, and since :math:`\ell^*` is convex

.. math:: D\Big(\sum_j a_{kj}\beta_{kj}\Big) \le \sum_{k,j} a_{kj}\,\varphi_{kj} + R^*\Big(\sum_j a_{kj} v_{kj}\Big),
   \qquad \varphi_{kj} = \sum_i c_{ki}\,\ell^*(-\beta_{kji}) .

The central node knows the right side: the vectors v it was sent anyway, and one number :math:`\varphi` with each. It
minimises it over weights in a simplex per node and sends them back, a few numbers a node. Whatever the nodes found,
the dual never gets worse, so no safe :math:`\sigma'` is needed: that would be one weight for all nodes and rounds,
chosen before anything was found. In the primal, this is a bundle method: every node's data term is replaced by the
largest of a few of its lower bounds :math:`-\varphi_{kj} - \langle v_{kj}, w\rangle`, and R is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._math import EXACT
from mocha_jax._pytree import Pytree

# The weights are good enough when at most this share of what they gain is left to gain.
_TOLERANCE = 0.1

# Steps between two looks at the tolerance, and how many looks at most.
_STEPS, _CHUNKS = 5, 40

# What is left below so many roundings of its terms cannot be told from nothing.
_NOISE = 4.0

# Points nearer than that, as a share of the squared distance of the farthest, move with its step size.
_SHORTEST = 1e-6


class Points(Pytree):
    """Some dual points of every node, with what the central node knows of them."""

    beta: Array  # [p, m, n]
    v: Array  # [p, m, d] each node's dual vector
    value: Array  # [p, m] phi


class Weighing(Pytree):
    """Accelerated projected gradient steps on the weights of all points but the first, which gets the rest."""

    a: Array  # [p - 1, m]
    y: Array  # [p - 1, m] extrapolated
    t: Array  # []
    done: Array  # [] bool


def weigh(points: Points, apply: Callable[[Array], Array], safe: Array, free: Array) -> Array:
    r"""The best weights ``[p, m]``, to within a tenth of what they gain.

    Args:
      points: the first is where each node stands.
      apply: :math:`\bar M` on vectors per node ``[m, d]``.
      safe: :math:`\sigma'_t \bar M_{tt}` of every node ``[m]``, from a safe rule.
      free: which nodes answered ``[m]``; the others stay where they are.
    """
    # Relative to the first point, so that nothing cancels near the optimum: f(a) = <a, gain> + R*(sum_j a_j along_j).
    along = jnp.swapaxes(points.v[1:] - points.v[:1], 0, 1)  # [m, p - 1, d]: a node's points together
    gain = points.value[1:] - points.value[:1] + _products(along, apply(points.v[0]))
    metric, free = _metric(along, safe), free[None]
    noise = (
        _NOISE
        * jnp.finfo(along.dtype).eps
        * jnp.sum(jnp.where(free, jnp.max(jnp.abs(points.value), axis=0, keepdims=True), 0.0))
    )

    def forward(a: Array) -> tuple[Array, Array]:
        """The value f and its gradient."""
        u = jnp.einsum("pm,mpd->md", a, along, precision=EXACT)
        pull = apply(u)
        return jnp.sum(a * gain) + 0.5 * jnp.sum(u * pull), gain + _products(along, pull)

    def step(s: Weighing, _: None) -> tuple[Weighing, None]:
        a = jnp.where(free, nearest_weights(s.y - forward(s.y)[1] / metric, metric), 0.0)
        t = 0.5 + jnp.sqrt(0.25 + s.t**2)
        astray = jnp.sum(metric * (s.y - a) * (a - s.a)) > 0  # O'Donoghue and Candes: then momentum starts anew
        y = jnp.where(astray, a, a + (s.t - 1.0) / t * (a - s.a))
        return s.replace(a=a, y=y, t=jnp.where(astray, 1.0, t)), None

    def go_on(s: Weighing) -> Weighing:
        s, _ = lax.scan(step, s, length=_STEPS)
        f, slope = forward(s.a)
        # No other weights gain more than this on top, by convexity.
        least = jnp.minimum(jnp.min(slope, axis=0, keepdims=True), 0.0)
        left = jnp.sum(jnp.where(free, jnp.sum(s.a * slope, axis=0, keepdims=True) - least, 0.0))
        return s.replace(done=left <= jnp.maximum(_TOLERANCE * -f, noise))

    stay = jnp.zeros_like(gain)
    start = Weighing(stay, stay, jnp.ones((), stay.dtype), jnp.zeros((), bool))
    found, _ = lax.scan(lambda s, _: (lax.cond(s.done, lambda s: s, go_on, s), None), start, length=_CHUNKS)
    a = jnp.where(forward(found.a)[0] < 0, found.a, stay)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


def _metric(along: Array, safe: Array) -> Array:
    r"""A metric h ``[p - 1, m]`` with :math:`\tfrac12\sum_{kj} h_{kj} a_{kj}^2 \ge R^*(\sum_j a_{kj} u_{kj})`, u along.

    One number for each point, for old points can be far and new ones near.
    """
    gram = jnp.einsum("mpd,mqd->mpq", along, along, precision=EXACT)
    tiny = jnp.finfo(along.dtype).tiny ** 0.25
    length = jnp.maximum(jnp.diagonal(gram, axis1=1, axis2=2), tiny)
    length = jnp.maximum(length, _SHORTEST * jnp.max(length, axis=1, keepdims=True))  # [m, p - 1]
    cosines = gram**2 / (length[:, :, None] * length[:, None, :])
    h = safe[:, None] * length * jnp.sqrt(jnp.sum(cosines, axis=(1, 2)) + tiny)[:, None]
    return jnp.swapaxes(jnp.maximum(h, tiny), 0, 1)


def nearest_weights(x: Array, metric: Array) -> Array:
    r"""Projection of every column of x ``[p, m]`` onto :math:`a \ge 0, \sum_j a_j \le 1` in a metric h ``[p, m]``.

    It is :math:`a_j = [x_j - \tau / h_j]_+` with the least :math:`\tau \ge 0` that will do.
    """
    # A set S of points asks for at least tau_S = (sum_S x_j - 1) / (sum_S 1 / h_j), and the right one for tau itself:
    # it is the largest. The right one holds the points no worse than a certain one. Sorting would take longer.
    worth = x * metric
    among = (worth[:, None] >= worth[None]).astype(x.dtype)  # [p, p, m] point i is in the set of j
    asked = (jnp.sum(among * x[:, None], axis=0) - 1.0) / jnp.sum(among / metric[:, None], axis=0)
    tau = jnp.maximum(jnp.max(asked, axis=0, keepdims=True), 0.0)
    a = jnp.maximum(x - tau / metric, 0.0)
    return a / jnp.maximum(jnp.sum(a, axis=0, keepdims=True), 1.0)


def _products(vectors: Array, w: Array) -> Array:
    return jnp.einsum("mpd,md->pm", vectors, w, precision=EXACT)
