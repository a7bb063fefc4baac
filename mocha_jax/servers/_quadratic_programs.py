r"""The best mixture of the points of every node: a quadratic program over all nodes, solved by splitting it.

With $U_k$ the vectors from where node k stands to its points, s their slopes, $\bar M$ the coupling and $\Delta$ the
weights that are not negative and sum to at most one,

$$
\min_{a_k\in\Delta}\; \sum_k \langle s_k, a_k\rangle + \tfrac12\langle Ua, \bar M\,Ua\rangle .
$$

The nodes' weights and their coupling are split (Douglas and Rachford): with stiffness $c_k$ and a vector $h_k$ a node,

$$
w = h - \bar M(\bar M + c)^{-1}h,\qquad
a_k = \arg\min_{\Delta}\; \langle s_k, a_k\rangle + \tfrac{c_k}{2}\|U_k a_k - z_k\|^2,\quad z = 2w - h,\qquad
h \leftarrow h + r\,(Ua - w).
$$

The coupling, however strong, is one product with an operator that is known beforehand. Gradient steps on the whole took
three to five times as many: they see the coupling through its largest eigenvalue. The result is scaled along the way
from where the nodes stand, so that the dual never gets worse. Vectors are kept in units of $1/\sqrt c$: their squares
are then objectives, and of a usual size.

**A node's own program** has a few numbers. `answer` solves it, nearly, from the last answer on. First any two points
exchange weight, pair by pair, as much as is best for both: that tells which points count. Then all points with weight
move together, to where the gradient along them vanishes or until one of them has no weight left: pairs are slow where
points lie nearly on a line, and so are gradients. One answer comes as near as twenty projected gradient steps; a second
one, from there, leaves next to nothing. Numbers of a point are arrays of their own, ``[m]``, one number for each node:
it is all arithmetic of numbers, in a kernel as well (`mocha_jax.servers._quadratic_programs_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._core.devices import NodeSharding
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._numerics.math import EXACT, in_blocks, nodes_of, safe_ratio
from mocha_jax.coupling import Coupling, Operator

# The stiffness of the splitting in units of the mean curvature of a task.
_STIFFNESS = 1.0

# How far beyond the mean of both a step goes: 1 is the method of multipliers, 2 the end of what converges.
RELAXATION = 1.8

# Steps at most, and when to stop earlier: when what nodes and coupling disagree by is no more than that share of what
# the weights gain.
_MAX_STEPS, _TOLERANCE = 48, 0.01

# Nodes whose programs a CPU solves at once: their numbers stay in its cache.
_BLOCK = 16384

# In units of the rounding: weights that are none, and lengths that are lost beside the longest one of a program.
_ROUNDING = 8.0

# Curvature of any way, as a share of the points': along flatter ones, where rounding would choose, weights keep still.
_RIDGE = 3e-3

Numbers = Sequence[Array]  # one of each point, ``[m]``


class Consensus(Pytree):
    r"""The part of a weighing that is known beforehand: $\bar M(\bar M + c)^{-1}$, and c ``[]``."""

    resolvent: Operator
    stiffness: Array


def consensus(coupling: Coupling) -> Consensus:
    """Factorise a coupling once for many steps of the splitting."""
    curvature = jnp.mean(coupling.diagonal())
    stiffness = jnp.maximum(_STIFFNESS * curvature, jnp.finfo(curvature.dtype).tiny ** 0.5)
    return Consensus(coupling.resolvent(1.0 / stiffness), stiffness)


class Tasks(Pytree):
    """The tasks of nodes, and what couples them."""

    coupling: Coupling
    consensus: Consensus
    task: Array | None  # [m] of every node, num_tasks where it has no data; None where node k is all of task k
    counts: Array  # [num_tasks] nodes of every task, at least one
    nodes: int = static()  # m; those beyond the tasks are inert where each node is a task of its own
    sharding: NodeSharding | None = static(default=None)  # of nodes and tasks alike; None: all are here

    def apply(self, u: Array) -> Array:
        r"""$\bar M u$ for a vector of every node ``[m, d]``."""
        return self._to_nodes(self.coupling.apply(self._to_tasks(u)))

    def settle(self, h: Array) -> Array:
        r"""$\bar M(\bar M + c_k)^{-1} h$ with $c_k = c$ times the nodes of its task: the resolvent of their mean."""
        mean = self._to_tasks(h) if self.task is None else self._to_tasks(h) / self.counts[:, None]
        return self._to_nodes(self.consensus.resolvent.apply(mean))

    @property
    def units(self) -> Array:
        """The stiffness of every node in units of c ``[m]``: 1 where it has a task to itself."""
        return self._to_nodes(self.counts[:, None])[:, 0]

    def _to_tasks(self, per_node: Array) -> Array:
        tasks = len(self.counts)
        return per_node[:tasks] if self.task is None else jax.ops.segment_sum(per_node, self.task, tasks)

    def _to_nodes(self, per_task: Array) -> Array:
        if self.task is None:
            return jnp.pad(per_task, ((0, self.nodes - len(per_task)), (0, 0)))
        return per_task.at[self.task].get(mode="fill", fill_value=0)


class Iterate(NamedTuple):
    """The variables of the splitting between two steps."""

    h: Array  # [m, d], or [d, m]
    a: tuple[Array, ...]  # p x [m] weights


Weighing = tuple[Tasks, Array, Array, Array]  # and vectors [m, p, d], slopes [p, m], who is free [m]
Weighed = tuple[Array, Array]  # weights [p, m], and the way that they go [m, d]


def best_mixture(
    v: Sequence[Array],
    slope: Array,
    tasks: Tasks,
    free: Array,
    on_accelerators: Mapping[str, Callable[[*Weighing], Weighed]],
) -> Array:
    r"""The best weights ``[p, m]``, or as good as some steps make them.

    Args:
      v: the points' dual vectors, each ``[m, d]``; the first is where each node stands.
      slope: of the others, ``[p - 1, m]``.
      tasks: what couples the nodes.
      free: which nodes answered ``[m]``; the others stay where they are.
      on_accelerators: the splitting by platform, where that is not the one for a CPU.
    """
    stiffness = tasks.consensus.stiffness
    # Relative to where the node stands, so that nothing cancels near the optimum.
    unit = jnp.sqrt(stiffness)
    along = jnp.stack([unit * (point - v[0]) for point in v[1:]], axis=1)
    weighing = tasks, along, slope, free.astype(slope.dtype)
    a, moved = platform_dependent(*weighing, default=until_they_agree, **on_accelerators)
    gain, bent = -jnp.sum(slope * a), jnp.sum(moved * tasks.apply(moved)) / stiffness
    a = a * jnp.clip(jnp.where(bent > 0, safe_ratio(gain, bent), jnp.sign(gain)), 0.0, 1.0)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


def split_step(
    answers: Callable[[Numbers, Numbers], tuple[Array, ...]],
    iterate: Iterate,
    pulled: Array,
    against: Callable[[Array], Array],
    combine: Callable[[Array], Array],
) -> tuple[Iterate, Numbers]:
    """Go one step; return also what the nodes were asked for.

    Args:
      answers: of all nodes, to what they are asked, from their last ones.
      iterate: the variables before.
      pulled: what the coupling's resolvent makes of h, laid out as that is.
      against: c times products ``[p, m]`` of the points' vectors with one of every node.
      combine: the way that weights ``[p, m]`` go.
    """
    asked = tuple(against(iterate.h - 2.0 * pulled))
    a = answers(asked, iterate.a)
    return Iterate(iterate.h + RELAXATION * (combine(jnp.stack(a)) - iterate.h + pulled), a), asked


Look = tuple[Iterate, Array, Array, Array]  # where they are, steps, by what they disagree, whether that will do


def until_they_agree(tasks: Tasks, along: Array, slope: Array, free: Array) -> Weighed:
    """Step until nodes and coupling agree: a host on a CPU looks after every step."""
    program = programs(along, slope, tasks.units, free)

    def asked(z: Array) -> Array:
        return tasks.units[None] * against(along, z)

    def answers(asked: Numbers, a: Numbers) -> tuple[Array, ...]:
        def some(first: Array | int, width: int) -> tuple[Array, ...]:
            return answer(*jax.tree.map(lambda each: nodes_of(each, first, width), (program, asked, a)))

        return in_blocks(some, len(free), 1, _BLOCK)

    def body(s: Look) -> Look:
        iterate, k, before, _ = s
        after, wanted = split_step(answers, iterate, tasks.settle(iterate.h), asked, partial(combine, along))
        change = after.h - iterate.h
        apart = jnp.vdot(tasks.units[:, None] * change, change) + jnp.sum(left(program, wanted, after.a))
        # What the next step will leave of it, if that goes as this one went.
        left_then = apart * jnp.minimum(safe_ratio(apart, before), 1.0)
        return after, k + 1, apart, left_then <= _TOLERANCE * -jnp.sum(slope * jnp.stack(after.a))

    start = Iterate(jnp.zeros_like(along[:, 0]), tuple(jnp.zeros_like(slope)))
    begin = start, jnp.zeros((), jnp.int32), jnp.full((), jnp.finfo(slope.dtype).tiny), jnp.zeros((), bool)
    a = jnp.stack(lax.while_loop(lambda s: ~s[3] & (s[1] < _MAX_STEPS), body, begin)[0].a)
    return a, combine(along, a)


class Programs(Pytree):
    """The quadratic programs of m nodes with p points each."""

    slope: tuple[Array, ...]  # p x [m]
    gram: tuple[tuple[Array, ...], ...]  # c times products of the vectors, [m]: row i holds those with 0 to i
    free: Array  # [m] 1 where a node answered, else 0: the others stay where they are

    def between(self, i: int, j: int) -> Array:
        """The product of the vectors of two points, times c."""
        return self.gram[max(i, j)][min(i, j)]

    def times(self, a: Numbers) -> list[Array]:
        """The Gram matrix times numbers of the points."""
        return [total(self.between(i, j) * each for j, each in enumerate(a)) for i in range(len(a))]


def programs(along: Array, slope: Array, stiffness: Array, free: Array) -> Programs:
    """Set up the programs.

    Args:
      along: the vectors u of every node ``[m, p, d]``.
      slope: s ``[p, m]``.
      stiffness: c of every node ``[m]``.
      free: which nodes answered ``[m]`` bool.
    """
    # One point after the other: twice as fast as at once, on a CPU.
    gram = [stiffness[None] * against(along, along[:, i]) for i in range(along.shape[1])]
    return Programs(tuple(slope), tuple(tuple(row[: i + 1]) for i, row in enumerate(gram)), free.astype(slope.dtype))


def against(along: Array, z: Array) -> Array:
    """Products ``[p, m]`` of the points' vectors with one of every node ``[m, d]``."""
    return jnp.einsum("mpd,md->pm", along, z, precision=EXACT)


def combine(along: Array, a: Array) -> Array:
    """The way that weights ``[p, m]`` go, ``[m, d]``."""
    return jnp.einsum("pm,mpd->md", a, along, precision=EXACT)


def answer(program: Programs, asked: Numbers, a: Numbers) -> tuple[Array, ...]:
    """The weights of every node.

    Args:
      program: of all nodes.
      asked: c times the products of the points' vectors with z.
      a: the last weights.
    """
    slope = [s - z for s, z in zip(program.slope, asked, strict=True)]
    gradient = [s + bent for s, bent in zip(slope, program.times(a), strict=True)]
    weights = _together(program, *_in_pairs(program, a, gradient))
    most = jnp.maximum(total(weights), 1.0)
    return tuple(jnp.where(program.free > 0, each / most, 0.0) for each in weights)


def left(program: Programs, asked: Numbers, a: Numbers) -> Array:
    """Bound what better answers than these weights would gain, by convexity, ``[m]``; see `answer`."""
    gradient = [s - z + bent for s, z, bent in zip(program.slope, asked, program.times(a), strict=True)]
    least = jnp.minimum(least_of(gradient), 0.0)
    return program.free * (total(each * g for each, g in zip(a, gradient, strict=True)) - least)


def _in_pairs(program: Programs, a: Numbers, gradient: Numbers) -> tuple[list[Array], list[Array]]:
    """Let any two points, where the node stands among them, exchange weight; return weights and gradient."""
    a, gradient, points = list(a), list(gradient), range(len(a))
    rest = jnp.maximum(1.0 - total(a), 0.0)
    tiny = jnp.finfo(rest.dtype).tiny
    for j in points:
        more = jnp.clip(-gradient[j] / jnp.maximum(program.between(j, j), tiny), -a[j], rest)
        a[j], rest = a[j] + more, rest - more
        gradient = [g + more * program.between(k, j) for k, g in enumerate(gradient)]
    for i in points:
        for j in range(i + 1, len(a)):
            lengths = program.between(i, i) + program.between(j, j)
            # Between points that are nearly the same all is rounding: what they exchange must be little.
            bend = jnp.maximum(lengths - 2.0 * program.between(i, j), jnp.maximum(_RIDGE * lengths, tiny))
            more = jnp.clip((gradient[i] - gradient[j]) / bend, -a[j], a[i])
            a[i], a[j] = a[i] - more, a[j] + more
            gradient = [g + more * (program.between(k, j) - program.between(k, i)) for k, g in enumerate(gradient)]
    return a, gradient


def _together(program: Programs, a: Numbers, gradient: Numbers) -> list[Array]:
    """Go from weights to the best ones of the same points, or until one of these has no weight left."""
    points, eps = range(len(a)), float(jnp.finfo(a[0].dtype).eps)
    lost = _ROUNDING * eps
    tiny = jnp.finfo(a[0].dtype).tiny
    rest = jnp.maximum(1.0 - total(a), 0.0)
    stands = rest > lost  # the point where the node stands has weight
    present = [each > lost for each in a]
    base = _shortest(program, present, stands)

    # Relative to a base with weight, whose change is minus that of all others: nothing is lost, for it is the shortest.
    to_base = program.times(base)
    own = total(b * g for b, g in zip(base, to_base, strict=True))
    between = {(i, j): program.between(i, j) - to_base[i] - to_base[j] + own for i in points for j in range(i + 1)}
    downhill = total(b * g for b, g in zip(base, gradient, strict=True))
    # Differences have the rounding of what they are of.
    least = jnp.maximum(lost * most_of([program.between(j, j) for j in points]), tiny)
    moves = [each & (b == 0) for each, b in zip(present, base, strict=True)]
    unit = [jnp.where(moves[j], lax.rsqrt(jnp.maximum(between[j, j], least)), 0.0) for j in points]
    cosines = {(i, j): between[i, j] * unit[i] * unit[j] for i in points for j in range(i)}
    steps = _solved(cosines, [(downhill - gradient[j]) * unit[j] for j in points])
    way = [steps[j] * unit[j] for j in points]
    back = -total(way)
    way = [jnp.where(b > 0, back, step) for b, step in zip(base, way, strict=True)]

    gain = -total(g * step for g, step in zip(gradient, way, strict=True))
    bend = total(step * bent for step, bent in zip(way, program.times(way), strict=True))
    far = jnp.maximum(gain, 0.0) / jnp.maximum(bend, tiny)
    far = jnp.minimum(far, jnp.where(stands & (back < 0), rest / jnp.maximum(-back, tiny), jnp.inf))
    for each, step in zip(a, way, strict=True):
        far = jnp.minimum(far, jnp.where(step < 0, each / jnp.maximum(-step, tiny), jnp.inf))
    return [jnp.maximum(each + far * step, 0.0) for each, step in zip(a, way, strict=True)]


def _shortest(program: Programs, present: Sequence[Array], stands: Array) -> list[Array]:
    """Mark the point with the shortest vector among those with weight; none where the node stands there."""
    lengths = [jnp.where(each, program.between(j, j), jnp.inf) for j, each in enumerate(present)]
    least, taken, marks = least_of(lengths), stands, []
    for each, length in zip(present, lengths, strict=True):
        mark = each & (length <= least) & ~taken
        taken = taken | mark
        marks.append(mark.astype(length.dtype))
    return marks


def _solved(below: dict[tuple[int, int], Array], right: list[Array]) -> list[Array]:
    """Solve with a matrix of cosines, given those below its diagonal, plus a ridge, by elimination."""
    below, x, points = dict(below), list(right), range(len(right))
    pivots = [jnp.full_like(x[0], 1.0 + _RIDGE) for _ in points]
    inverse = []
    for k in points:
        inverse.append(1.0 / jnp.maximum(pivots[k], _RIDGE))
        for i in points[k + 1 :]:
            much = below[i, k] * inverse[k]
            for j in range(k + 1, i):
                below[i, j] = below[i, j] - much * below[j, k]
            pivots[i] = pivots[i] - much * below[i, k]
            x[i] = x[i] - much * x[k]
    for k in reversed(points):
        later = [below[j, k] * x[j] for j in points[k + 1 :]]
        x[k] = inverse[k] * (x[k] - total(later) if later else x[k])
    return x


def total(each: Iterable[Array]) -> Array:
    """Add up numbers of the points."""
    first, *others = each
    return sum(others, start=first)


def least_of(each: Iterable[Array]) -> Array:
    """The least of some numbers of the points."""
    return reduce(jnp.minimum, each)


def most_of(each: Iterable[Array]) -> Array:
    """The largest of some numbers of the points."""
    return reduce(jnp.maximum, each)
