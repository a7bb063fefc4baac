r"""The best mixture of the points of every node: a quadratic program over all nodes, solved by splitting it.

With $U_k$ the vectors from where node k stands to its points, s their slopes, $\bar M$ the coupling and $\Delta$ the
weights that are not negative and sum to at most one,

$$
\min_{a_k\in\Delta}\; \sum_k \langle s_k, a_k\rangle + \tfrac12\langle Ua, \bar M\,Ua\rangle .
$$

The nodes' weights and their coupling are split (Douglas and Rachford): with stiffness $c_k$ and a vector $h_k$ a node,

$$
w = h - \bar M(\bar M + c)^{-1}h,\qquad
a_k = \arg\min_{\Delta}\; \langle s_k, a_k\rangle + \tfrac{c_k}{2}\|U_k a_k - (2w - h)_k\|^2,\qquad
h \leftarrow h + r\,(Ua - w).
$$

The coupling, however strong, is one product with an operator that is known beforehand, and every node has a quadratic
program of its own, of a few numbers. Gradient steps on the whole took three to five times as many: they see the
coupling through its largest eigenvalue. What is found is scaled along the way from where the nodes stand, so that the
dual never gets worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.platform import platform_dependent
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._numerics.math import EXACT, safe_ratio, total
from mocha_jax.coupling import Coupling, Operator

# The stiffness of the splitting in units of the mean curvature of a task.
_STIFFNESS = 3.0

# How far beyond the mean of both a step goes: 1 is the method of multipliers, 2 the end of what converges.
_RELAXATION = 1.8

# Steps of an accelerator, whose host should not wait for an answer; and at most where it tells when to stop: when what
# nodes and coupling disagree by is no more than that share of what the weights gain.
_STEPS, _MAX_STEPS, _TOLERANCE = 16, 48, 1e-3

# Nesterov's momentum of the few projected steps on a node's own weights that are one step of the splitting.
_MOMENTUM = (0.0, 0.28, 0.43)

# Points nearer than that, as a share of the squared distance of the farthest, move with its step size.
_MIN_SQUARED_DISTANCE = 1e-6

# No curvature is less than this share of the steepest slope: a step of so many weights ends in a corner anyway, and a
# longer one, of samples that are all zero, would drown them in rounding.
_MIN_CURVATURE = 1e-3


class Consensus(Pytree):
    r"""What is known beforehand: $\bar M(\bar M + c)^{-1}$, and c ``[]``."""

    resolvent: Operator
    stiffness: Array


def consensus(coupling: Coupling) -> Consensus:
    """What the splitting needs of a coupling, factorised once."""
    curvature = jnp.mean(coupling.diagonal())
    stiffness = jnp.maximum(_STIFFNESS * curvature, jnp.finfo(curvature.dtype).tiny ** 0.5)
    return Consensus(coupling.resolvent(1.0 / stiffness), stiffness)


class Tasks(Pytree):
    """The tasks of nodes, and what couples them."""

    coupling: Coupling
    resolvent: Operator
    task: Array | None  # [m] of every node; None where node k is all of task k
    counts: Array  # [num_tasks] nodes of every task, at least one
    nodes: int = static()  # m; those beyond the tasks are inert where each node is a task of its own

    def apply(self, u: Array) -> Array:
        r"""$\bar M u$ for a vector of every node ``[m, d]``."""
        return self._to_nodes(self.coupling.apply(self._to_tasks(u)))

    def settle(self, h: Array) -> Array:
        r"""$\bar M(\bar M + c_k)^{-1} h$ with $c_k = c$ times the nodes of its task: the resolvent of their mean."""
        return self._to_nodes(self.resolvent.apply(self._to_tasks(h) / self.counts[:, None]))

    def shared_out(self, stiffness: Array) -> Array:
        """Every node's ``[m]``, from the one of a task with a single node."""
        return stiffness * self._to_nodes(self.counts[:, None])[:, 0]

    def _to_tasks(self, per_node: Array) -> Array:
        tasks = len(self.counts)
        return per_node[:tasks] if self.task is None else jax.ops.segment_sum(per_node, self.task, tasks)

    def _to_nodes(self, per_task: Array) -> Array:
        if self.task is None:
            return jnp.pad(per_task, ((0, self.nodes - len(per_task)), (0, 0)))
        return per_task[self.task]


class Points(NamedTuple):
    """What a node's part of a step is about: the points of every node, relative to where it stands."""

    along: Array  # [m, p, d] from there to them, in units of the node's longest entry
    gram: Array  # [p, p, m] their products, in units of the objective
    slope: Array  # [p, m]
    metric: Array  # [p, m] see `_metric`
    size: Array  # [m] the unit
    stiffness: Array  # [m]
    free: Array  # [m] 1 where a node answered, else 0


def best_mixture(v: Sequence[Array], slope: Array, tasks: Tasks, stiffness: Array, free: Array) -> Array:
    r"""The best weights ``[p, m]``, or as good as some steps make them.

    Args:
      v: the points' dual vectors, each ``[m, d]``; the first is where each node stands.
      slope: of the others, ``[p - 1, m]``.
      tasks: what couples the nodes.
      stiffness: c of every node ``[m]``.
      free: which nodes answered ``[m]``; the others stay where they are.
    """
    points = _points(v, slope, stiffness, free)
    start = jnp.zeros_like(v[0]), jnp.zeros_like(slope)
    a = _split(tasks, points, *start)
    moved = _combine(points, a)
    gain, bent = -jnp.sum(slope * a), jnp.sum(moved * tasks.apply(moved))
    a = a * jnp.clip(jnp.where(bent > 0, safe_ratio(gain, bent), jnp.sign(gain)), 0.0, 1.0)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


def _points(v: Sequence[Array], slope: Array, stiffness: Array, free: Array) -> Points:
    # Relative to the first point, so that nothing cancels near the optimum, and to each node's largest entry: squares
    # of small numbers would be none.
    along = jnp.stack([point - v[0] for point in v[1:]], axis=1)
    size = jnp.max(jnp.abs(along), axis=(1, 2))
    along = along / jnp.where(size > 0, size, 1.0)[:, None, None]
    # One point after the other: twice as fast as at once, on a CPU.
    gram = jnp.stack([_against(along, along[:, j]) for j in range(along.shape[1])])
    flattest = _MIN_CURVATURE * jnp.max(jnp.abs(slope), axis=0, keepdims=True)
    unit = size * (size * stiffness)
    metric = jnp.maximum(_metric(gram) * unit[None], flattest)
    metric = jnp.maximum(metric, jnp.finfo(metric.dtype).tiny ** 0.5)
    return Points(along, gram * unit[None, None], slope, metric, size, stiffness, free.astype(slope.dtype))


def _metric(gram: Array) -> Array:
    r"""A metric h ``[p, m]`` with $\sum_j h_{kj} a_{kj}^2 \ge |\sum_j a_{kj} u_{kj}|^2$ for vectors of these products.

    One number for each point, for old points can be far and new ones near.
    """
    tiny = jnp.finfo(gram.dtype).tiny ** 0.25
    length = jnp.maximum(jnp.einsum("ppm->pm", gram), tiny)
    length = jnp.maximum(length, _MIN_SQUARED_DISTANCE * jnp.max(length, axis=0, keepdims=True))
    cosines = gram**2 / (length[:, None] * length[None, :])
    return length * jnp.sqrt(jnp.sum(cosines, axis=(0, 1)) + tiny)[None]


def _against(along: Array, u: Array) -> Array:
    """Products ``[p, m]`` of the points with a vector of every node ``[m, d]``."""
    return jnp.einsum("mpd,md->pm", along, u, precision=EXACT)


def _combine(points: Points, a: Array) -> Array:
    """The way that weights ``[p, m]`` go, ``[m, d]``."""
    return jnp.einsum("pm,mpd->md", a * points.size[None], points.along, precision=EXACT)


def step(points: Points, against: Array, a: Array, total: Callable[[Array], Array] = total) -> Array:
    r"""The weights ``[p, m]`` of every node by itself, from the last ones on.

    Args:
      points: see there.
      against: their products ``[p, m]`` with what the coupling asks for, $2w - h$.
      a: the last weights.
      total: the sum over the first axis.
    """
    # The gradient is linear: here, and that of the way there.
    slope, last = points.slope - (points.stiffness * points.size)[None] * against, a
    for momentum in _MOMENTUM:
        ahead = a + momentum * (a - last)
        gradient = slope + total(points.gram * ahead[:, None])
        a, last = nearest_weights(ahead - gradient / points.metric, points.metric, total), a
    return jnp.where(points.free[None] > 0, a, 0.0)


def _step(tasks: Tasks, points: Points, h: Array, a: Array) -> tuple[Array, Array]:
    pulled = tasks.settle(h)
    a = step(points, _against(points.along, h - 2.0 * pulled), a)
    return h + _RELAXATION * (_combine(points, a) - h + pulled), a


def _split(tasks: Tasks, points: Points, h: Array, a: Array) -> Array:
    other = dict.fromkeys(("cuda", "rocm", "tpu"), _in_some_steps)
    return platform_dependent(a, tasks, points, h, a, default=_until_they_agree, **other)


def _in_some_steps(tasks: Tasks, points: Points, h: Array, a: Array) -> Array:
    for _ in range(_STEPS):
        h, a = _step(tasks, points, h, a)
    return a


def _until_they_agree(tasks: Tasks, points: Points, h: Array, a: Array) -> Array:
    def body(s: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        h, a, k, _ = s
        ahead, a = _step(tasks, points, h, a)
        apart = jnp.sum(points.stiffness[:, None] * (ahead - h) ** 2)
        return ahead, a, k + 1, apart <= _TOLERANCE * -jnp.sum(points.slope * a)

    start = h, a, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return lax.while_loop(lambda s: ~s[3] & (s[2] < _MAX_STEPS), body, start)[1]


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
