"""Iterative refinement: linear systems of which an approximate inverse is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._numerics.minres import LinearSolution, inner

Vector = TypeVar("Vector")  # a pytree

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
