r"""Linear systems on pytrees: MINRES for symmetric ones, and refinement where an approximate inverse is known.

MINRES (Paige and Saunders 1975) solves indefinite and singular systems too. Of all points of the Krylov space it takes
the one of least residual. Where the system is singular but has solutions, it finds one all the same; where it has none,
it stops before what rounding makes of the missing direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import EXACT, safe_ratio

Vector = TypeVar("Vector")  # a pytree

# A residual that A takes to less than this power of the rounding unit, relative to both, is what no x can mend. Smaller
# than rounding alone would have it: once it is there, it grows again within a few steps.
_SINGULAR = 0.6


class LinearSolution(Pytree, Generic[Vector]):
    """A solution of a linear system, from `minres`."""

    x: Vector
    residual: Array  # [] |b - A x| / |b|, measured at the end and not as the recurrence has it
    steps: Array  # [] int32


class _MinresState(Pytree, Generic[Vector]):
    """The Lanczos process and the QR factorisation of its tridiagonal matrix, both a step at a time."""

    x: Vector
    lanczos: tuple[Vector, Vector, Vector]  # the last two residual vectors, and the last one preconditioned
    directions: tuple[Vector, Vector]
    off: tuple[Array, Array]  # the last two entries beside the diagonal
    bar: tuple[Array, Array]  # what the rotations leave for the next column
    rotation: tuple[Array, Array]
    phi: Array  # [] size of the residual in the preconditioner's norm
    largest: Array  # [] of the columns of the tridiagonal matrix: about the norm of A
    open: Array  # [] bool whether A times the residual is not 0 yet, so that a smaller one exists
    steps: Array


def inner(a: Vector, b: Vector) -> Array:
    """The inner product of two pytrees."""
    products = [jnp.vdot(p, q, precision=EXACT) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return jnp.sum(jnp.stack(products))


def minres(
    apply: Callable[[Vector], Vector],
    b: Vector,
    precondition: Callable[[Vector], Vector],
    *,
    tol: float,
    max_steps: int,
) -> LinearSolution[Vector]:
    r"""Solve A x = b.

    Args:
      apply: x to A x, A symmetric.
      b: the right side, a pytree; the solution has its shapes.
      precondition: an approximation of the inverse of |A|, symmetric positive definite.
      tol: residual to stop at, relative to b, in the norm of the preconditioner.
      max_steps: applications of A at most.
    """

    def size(r: Vector, y: Vector) -> Array:
        square = inner(r, y)
        nothing = square <= 0  # what is no number stays so
        return jnp.where(nothing, 0.0, jnp.sqrt(jnp.where(nothing, 1.0, square)))

    def plus(a: Vector, s: Array, c: Vector) -> Vector:
        return jax.tree.map(lambda p, q: p + s * q, a, c)

    def scaled(s: Array, a: Vector) -> Vector:
        return jax.tree.map(lambda p: s * p, a)

    # Of ordinary size, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(b)]))
    unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    b = jax.tree.map(lambda leaf: leaf / unit, b)
    nothing = jax.tree.map(jnp.zeros_like, b)
    first = precondition(b)
    start = size(b, first)
    zero = jnp.zeros_like(start)
    tiny, singular = jnp.finfo(start.dtype).tiny, jnp.finfo(start.dtype).eps ** _SINGULAR

    def unfinished(state: _MinresState[Vector]) -> Array:
        return (state.steps < max_steps) & (state.phi > tol * start) & (state.off[1] > 0) & state.open

    def step(state: _MinresState[Vector]) -> _MinresState[Vector]:
        (r1, r2, y), (older, old), (cs, sn), (dbar, eps) = state.lanczos, state.off, state.rotation, state.bar
        v = scaled(safe_ratio(jnp.ones_like(old), old), y)
        image = plus(apply(v), -safe_ratio(old, older), r1)
        alfa = inner(v, image)
        image = plus(image, -safe_ratio(alfa, old), r2)
        y = precondition(image)
        off = size(image, y)
        delta, gbar, bar = cs * dbar + sn * alfa, sn * dbar - cs * alfa, (-cs * off, sn * off)
        gamma = jnp.maximum(jnp.sqrt(gbar**2 + off**2), tiny)
        largest = jnp.maximum(state.largest, jnp.sqrt(old**2 + alfa**2 + off**2))
        open = jnp.sqrt(gbar**2 + bar[0] ** 2) > singular * largest  # times phi it is the size of A r
        w1, w2 = state.directions
        w = scaled(1.0 / gamma, plus(plus(v, -eps, w1), -delta, w2))
        cs, sn = gbar / gamma, off / gamma
        x = plus(state.x, jnp.where(open, cs * state.phi, 0.0), w)
        phi = sn * state.phi
        return _MinresState(x, (r2, image, y), (w2, w), (old, off), bar, (cs, sn), phi, largest, open, state.steps + 1)

    begin = _MinresState(
        nothing, (nothing, b, first), (nothing, nothing), (zero, start), (zero, zero), (zero - 1.0, zero), start,
        zero, jnp.ones((), bool), jnp.zeros((), jnp.int32),
    )  # fmt: skip
    end = lax.while_loop(unfinished, step, begin)
    left = jax.tree.map(jnp.subtract, b, apply(end.x))
    rest = size(left, precondition(left))
    residual = jnp.where(start == 0, 0.0, rest / jnp.where(start == 0, 1.0, start))
    return LinearSolution(scaled(unit, end.x), jnp.where(jnp.isfinite(largest), residual, jnp.nan), end.steps)


# Up to so many numbers the two steps of `twice` are a loop. Beyond, warm solves by `Newton` and `InteriorPoint` with
# loops took up to a third longer (two cores, five shapes from 139 x 110 x 60 to 10,000 x 16 x 32).
_FEW = 8192

# Corrections at most. Each multiplies the residual by what the inverse is off; with a factorisation one or two do.
_MOST = 5


def refined(
    apply: Callable[[Vector], Vector],
    b: Vector,
    inverse: Callable[[Vector], Vector],
    weigh: Callable[[Vector], Vector],
    *,
    tol: float,
) -> LinearSolution[Vector]:
    """Solve A x = b; each step counts as one.

    Args:
      apply: x to A x.
      b: the right side, a pytree; the solution has its shapes.
      inverse: about that of A.
      weigh: of the norm in which residuals are measured, symmetric positive definite.
      tol: residual to stop at, relative to b.
    """

    def size(r: Vector) -> Array:
        return jnp.sqrt(inner(r, weigh(r)))

    # Of ordinary size, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(b)]))
    unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    b = jax.tree.map(lambda leaf: leaf / unit, b)
    start = size(b)
    nothing = jax.tree.map(jnp.zeros_like, b)

    def unfinished(state: tuple[Vector, Vector, Array, Array]) -> Array:
        return (state[3] < _MOST) & (state[2] > tol * start)

    def step(state: tuple[Vector, Vector, Array, Array]) -> tuple[Vector, Vector, Array, Array]:
        x, left, rest, steps = state
        new = jax.tree.map(jnp.add, x, inverse(left))
        residual = jax.tree.map(jnp.subtract, b, apply(new))
        beyond = size(residual)
        better = beyond < rest
        # Where a correction corrects nothing, it is of rounding, and the last.
        x, left = jax.tree.map(lambda new, old: jnp.where(better, new, old), (new, residual), (x, left))
        return x, left, jnp.where(better, beyond, rest), jnp.where(better, steps + 1, _MOST)

    x, _, rest, steps = lax.while_loop(unfinished, step, (nothing, b, start, jnp.zeros((), jnp.int32)))
    residual = jnp.where(start == 0, 0.0, rest / jnp.where(start == 0, 1.0, start))
    return LinearSolution(jax.tree.map(lambda leaf: unit * leaf, x), residual, steps)


def twice(correct: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Return ``correct(correct(start))``, where `start` holds zeros, as a first solution does.

    With few numbers the compiler has one step to compile. With many, it has two, and leaves products with these zeros
    out of the first.
    """
    numbers = sum(leaf.size for leaf in jax.tree.leaves(start))
    return lax.fori_loop(0, 2, lambda _, carry: correct(carry), start, unroll=numbers > _FEW)
