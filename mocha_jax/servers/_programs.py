r"""Every node's own part of the weighing: a quadratic program of a few numbers.

A node has p points besides the one where it stands, at vectors $u_1, \dots, u_p$ from there, with slopes s. What the
others ask of it is a vector z, and it answers with the weights

$$
\arg\min_{a\ge 0,\;\sum_j a_j\le 1}\; \langle s, a\rangle + \tfrac{c}{2}\Big\|\sum_j a_j u_j - z\Big\|^2 ,
$$

found, nearly, from the last answer on. First any two points exchange weight, pair by pair, as much as is best for both:
that tells which points count. Then all points with weight move together, to where the gradient along them vanishes or
until one of them has no weight left: pairs are slow where points lie nearly on a line, and so are gradients. One answer
comes as near as twenty projected gradient steps; a second one, from there, leaves next to nothing.

Numbers of a point are arrays of their own, ``[m]``, one number for each node: it is all arithmetic of numbers, in a
kernel as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import EXACT

# In units of the rounding: weights that are none, and lengths that are lost beside the longest one of a program.
_ROUNDING = 8.0

# Curvature of any way, as a share of the points': along flatter ones, where rounding would choose, weights keep still.
_RIDGE = 3e-3

Numbers = Sequence[Array]  # one of each point, ``[m]``


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


def answer(given: Programs, asked: Numbers, a: Numbers) -> tuple[Array, ...]:
    """The weights of every node.

    Args:
      given: the programs.
      asked: c times the products of the points' vectors with z.
      a: the last weights.
    """
    slope = [s - z for s, z in zip(given.slope, asked, strict=True)]
    gradient = [s + bent for s, bent in zip(slope, given.times(a), strict=True)]
    found = _together(given, *_in_pairs(given, a, gradient))
    most = jnp.maximum(total(found), 1.0)
    return tuple(jnp.where(given.free > 0, each / most, 0.0) for each in found)


def left(given: Programs, asked: Numbers, a: Numbers) -> Array:
    """Bound what better answers than these weights would gain, by convexity, ``[m]``; see `answer`."""
    gradient = [s - z + bent for s, z, bent in zip(given.slope, asked, given.times(a), strict=True)]
    least = jnp.minimum(least_of(gradient), 0.0)
    return given.free * (total(each * g for each, g in zip(a, gradient, strict=True)) - least)


def _in_pairs(given: Programs, a: Numbers, gradient: Numbers) -> tuple[list[Array], list[Array]]:
    """Let any two points, where the node stands among them, exchange weight; return weights and gradient."""
    a, gradient, points = list(a), list(gradient), range(len(a))
    rest = jnp.maximum(1.0 - total(a), 0.0)
    tiny = jnp.finfo(rest.dtype).tiny
    for j in points:
        more = jnp.clip(-gradient[j] / jnp.maximum(given.between(j, j), tiny), -a[j], rest)
        a[j], rest = a[j] + more, rest - more
        gradient = [g + more * given.between(k, j) for k, g in enumerate(gradient)]
    for i in points:
        for j in range(i + 1, len(a)):
            lengths = given.between(i, i) + given.between(j, j)
            # Between points that are nearly the same all is rounding: what they exchange must be little.
            bend = jnp.maximum(lengths - 2.0 * given.between(i, j), jnp.maximum(_RIDGE * lengths, tiny))
            more = jnp.clip((gradient[i] - gradient[j]) / bend, -a[j], a[i])
            a[i], a[j] = a[i] - more, a[j] + more
            gradient = [g + more * (given.between(k, j) - given.between(k, i)) for k, g in enumerate(gradient)]
    return a, gradient


def _together(given: Programs, a: Numbers, gradient: Numbers) -> list[Array]:
    """Go from weights to the best ones of the same points, or until one of these has no weight left."""
    points, eps = range(len(a)), float(jnp.finfo(a[0].dtype).eps)
    lost = _ROUNDING * eps
    tiny = jnp.finfo(a[0].dtype).tiny
    rest = jnp.maximum(1.0 - total(a), 0.0)
    stands = rest > lost  # the point where the node stands has weight
    there = [each > lost for each in a]
    base = _shortest(given, there, stands)

    # Relative to a base with weight, whose change is minus that of all others: nothing is lost, for it is the shortest.
    to_base = given.times(base)
    own = total(b * g for b, g in zip(base, to_base, strict=True))
    between = {(i, j): given.between(i, j) - to_base[i] - to_base[j] + own for i in points for j in range(i + 1)}
    downhill = total(b * g for b, g in zip(base, gradient, strict=True))
    # Differences have the rounding of what they are of.
    least = jnp.maximum(lost * most_of([given.between(j, j) for j in points]), tiny)
    moves = [each & (b == 0) for each, b in zip(there, base, strict=True)]
    unit = [jnp.where(moves[j], lax.rsqrt(jnp.maximum(between[j, j], least)), 0.0) for j in points]
    cosines = {(i, j): between[i, j] * unit[i] * unit[j] for i in points for j in range(i)}
    steps = _solved(cosines, [(downhill - gradient[j]) * unit[j] for j in points])
    way = [steps[j] * unit[j] for j in points]
    back = -total(way)
    way = [jnp.where(b > 0, back, step) for b, step in zip(base, way, strict=True)]

    gain = -total(g * step for g, step in zip(gradient, way, strict=True))
    bend = total(step * bent for step, bent in zip(way, given.times(way), strict=True))
    far = jnp.maximum(gain, 0.0) / jnp.maximum(bend, tiny)
    far = jnp.minimum(far, jnp.where(stands & (back < 0), rest / jnp.maximum(-back, tiny), jnp.inf))
    for each, step in zip(a, way, strict=True):
        far = jnp.minimum(far, jnp.where(step < 0, each / jnp.maximum(-step, tiny), jnp.inf))
    return [jnp.maximum(each + far * step, 0.0) for each, step in zip(a, way, strict=True)]


def _shortest(given: Programs, there: Sequence[Array], stands: Array) -> list[Array]:
    """Mark the point with the shortest vector among those with weight; none where the node stands there."""
    lengths = [jnp.where(each, given.between(j, j), jnp.inf) for j, each in enumerate(there)]
    least, taken, marks = least_of(lengths), stands, []
    for each, length in zip(there, lengths, strict=True):
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


def along_from(points: Sequence[Array], unit: Array) -> Array:
    """The vectors ``[m, p, d]`` from the first of some points ``[m, d]`` to the others, times the unit."""
    # Relative to the first point, so that nothing cancels near the optimum.
    return jnp.stack([unit * (point - points[0]) for point in points[1:]], axis=1)
