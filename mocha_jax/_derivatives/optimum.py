r"""The optimum near a point, and its derivative.

A derivative of the optimum is only as good as the point at which it is taken, and nothing in its linear system tells
how good that is. The same system (`mocha_jax._derivatives.sensitivity`) with what the conditions are short of on its
right side is a semismooth Newton step (Qi and Sun 1993), with a hinge-like loss one of an active set method. Such steps
take the point to the optimum, and the size of the last one says how far the point may still be from it.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.compiling import Program
from mocha_jax._core.pytree import Pytree, Relation, Tree
from mocha_jax._derivatives.sensitivity import Sensitivity, Unknowns, curvatures, read, unknown_at
from mocha_jax._numerics.linear_systems import LinearSolution
from mocha_jax._problem.gap import objective
from mocha_jax._problem.problem import Problem

# Steps at most. From where a solve ends at a gap of 1e-4, two to four settle.
_STEPS = 10

# A step that moves the point by less than this power of the rounding unit is the last: the next would be of rounding.
_SETTLED = 2.0 / 3.0


Reported = tuple[Array, Relation, Array]  # weights, Omega and objective
OptimumArguments = tuple[Problem, Reported, Array]  # with the duals
Value = TypeVar("Value")


class OptimumPoint(Pytree):
    """A point at which the optimality conditions are evaluated."""

    unknown: Tree  # the regularizer's, see `OptimalityConditions`
    beta: Array  # [m, n]
    weights: Array  # [num_tasks, d] that belong to the unknown
    kappa: Array  # [m, n] of the steps of the duals


class Refined(Pytree):
    """A point after some Newton steps."""

    point: OptimumPoint
    before: OptimumPoint  # the last step
    distance: Array  # [] by how much that moved weights or duals, as a share of their size
    steps: Array  # [] int32


def _refine(
    problem: Problem, weights: Array, beta: Array, relation: Relation, *, tol: float | None, max_steps: int
) -> Refined:
    """Take Newton steps until the point no longer moves, up to a limit."""
    settled = jnp.finfo(beta.dtype).eps ** _SETTLED
    # Of the best Omega at the start; a run may have held another one for long.
    kappa = curvatures(problem, read(problem, unknown_at(problem, weights, beta, relation))[1])

    def unfinished(refined: Refined) -> Array:
        return (refined.steps < _STEPS) & ~(refined.distance <= settled)

    def step(refined: Refined) -> Refined:
        old = refined.point
        system = _system(problem, old, tol=tol, max_steps=max_steps)
        (move, move_beta), (left, left_beta) = system.correction()
        # Anew from weights and duals: at singular values of 0 the weights have no say in their unknown.
        new = _point(problem, *read(problem, _plus(old.unknown, move)), old.beta + move_beta, kappa)
        beyond = jax.jvp(lambda unknown: read(problem, unknown)[0], (new.unknown,), (left,))[1]
        shares = [
            _share(new.weights - old.weights, old.weights, new.weights),
            _share(beyond, old.weights, new.weights),
            _share(move_beta, old.beta, new.beta),
            _share(left_beta, old.beta, new.beta),
        ]
        moved = jnp.max(jnp.stack(shares))
        return Refined(new, old, jnp.where(jnp.isnan(moved), jnp.inf, moved), refined.steps + 1)

    start = _point(problem, weights, relation, beta, kappa)
    far, none = jnp.full((), jnp.inf, beta.dtype), jnp.zeros((), jnp.int32)
    return lax.while_loop(unfinished, step, Refined(start, start, far, none))


def _numbers(problem: Problem, *_: object, **__: object) -> int:
    return problem.data.x.size


refine = Program(_refine, _numbers, static_argnames=("tol", "max_steps"))


def _point(problem: Problem, weights: Array, relation: Relation, beta: Array, kappa: Array) -> OptimumPoint:
    unknown = unknown_at(problem, weights, beta, relation)
    return OptimumPoint(unknown, beta, read(problem, unknown)[0], kappa)


def _system(problem: Problem, point: OptimumPoint, *, tol: float | None, max_steps: int) -> Sensitivity:
    return Sensitivity(problem, point.unknown, point.beta, point.kappa, tol=tol, max_steps=max_steps)


def _plus(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def _share(change: Array, old: Array, new: Array) -> Array:
    """The size of a change, against that of what changed."""
    size, moved = jnp.maximum(jnp.sum(old**2), jnp.sum(new**2)), jnp.sum(change**2)
    return jnp.where(moved == 0, 0.0, jnp.sqrt(moved / size))


def _pulled_back(
    problem: Problem, points: OptimumPoint, weights_bar: Array, *, tol: float | None, max_steps: int
) -> tuple[Problem, LinearSolution[Unknowns], Array]:
    """The gradients with respect to the problem of something with these gradients with respect to the weights.

    Args:
      problem: the problem.
      points: with a leading axis; one after the other, as one program.
      weights_bar: gradients at them, ``[., num_tasks, d]``.
      tol: see `Implicit`.
      max_steps: see `Implicit`.

    Returns:
      Of every point the gradient; how the linear system was solved; how many dual variables are free.
    """

    def one(point_and_bar: tuple[OptimumPoint, Array]) -> tuple[Problem, LinearSolution[Unknowns], Array]:
        point, bar = point_and_bar
        _, pull = jax.vjp(lambda p, u: read(p, u)[0], problem, point.unknown)
        direct, towards = pull(bar)
        system = _system(problem, point, tol=tol, max_steps=max_steps)
        through, solution = system.cotangent(towards, jnp.zeros_like(point.beta))
        gradient = jax.tree.map(lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b, direct, through)
        return gradient, solution, jnp.sum(system.free, dtype=jnp.int32)

    return lax.map(one, (points, weights_bar))


pulled_back = Program(_pulled_back, _numbers, static_argnames=("tol", "max_steps"))


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def optimum(
    problem: Problem, reported: Reported, beta: Array, tol: float | None, max_steps: int, worst: float
) -> Reported:
    """Weights, Omega and objective as found; where a derivative is asked for, those of the optimum."""
    return reported


@jax.custom_jvp
def _first_only(value: Value) -> Value:
    """Refuse to differentiate the derivative of an optimum again: the point would seem not to move."""
    return value


@_first_only.defjvp
def _first_only_jvp(primals: tuple[Value], tangents: tuple[Value]) -> NoReturn:
    raise NotImplementedError(
        "Implicit() has first derivatives only; for second ones differentiate the rounds, adjoint=Unrolled()."
    )


def _filled(new: Array, old: Array) -> Array:
    """An array of a record of Omega with zeros up to the shape that it has in a run which began with a given one."""
    if new.shape == old.shape:
        return new
    return jnp.pad(new, [(0, more - size) for size, more in zip(new.shape, old.shape, strict=True)])


@optimum.defjvp
def _optimum_jvp(
    tol: float | None, max_steps: int, worst: float, primals: OptimumArguments, tangents: OptimumArguments
) -> tuple[Reported, Reported]:
    problem, reported, beta = _first_only(primals)
    refined = refine(problem, reported[0], beta, reported[1], tol=tol, max_steps=max_steps)
    return _moving(tol, max_steps, worst, problem, reported, refined, tangents[0])


@partial(jax.jit, static_argnums=(0, 1, 2))  # one program, where jax.grad is not under jax.jit
def _moving(
    tol: float | None,
    max_steps: int,
    worst: float,
    problem: Problem,
    reported: Reported,
    refined: Refined,
    change: Problem,
) -> tuple[Reported, Reported]:
    """The optimum at a point, and how it moves with a change of the problem."""
    near = refined.distance <= worst
    system = _system(problem, refined.point, tol=tol, max_steps=max_steps)
    moved = system.tangent(change, jnp.where(near, worst, -jnp.inf))[0]

    def report(problem: Problem, unknown: Tree) -> Reported:
        weights, relation = read(problem, unknown)
        relation = jax.tree.map(_filled, relation, reported[1])
        # The best Omega for W may be left out: at an optimum its own change does not change the objective.
        return weights, relation, objective(problem, weights, None if problem.regularizer.jointly_convex else relation)

    best, moving = jax.jvp(report, (problem, refined.point.unknown), (change, moved))
    return jax.tree.map(lambda new, old: jnp.where(near, new, old), best, reported), moving
