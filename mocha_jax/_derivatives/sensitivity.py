r"""Implicit differentiation: how the optimum moves with every number of the problem.

The optimum is where two conditions hold: the regularizer's, for its unknown Q, the weights W(Q) and the dual vectors V
(`mocha_jax.regularizers._base`), and for every sample that a coordinate step leaves its dual variable alone,

$$
r(Q, V(\beta)) = 0, \qquad \beta_i = \mathrm{step}(\beta_i, x_i^\top w_t(Q)).
$$

A step that is clipped has no slope: its $\beta_i$ stays at the end of its interval, as the samples away from
the margin of a support vector machine do. Only the others are *free*; scaled, their conditions and the first form
one symmetric system, of a saddle point,

$$
\begin{pmatrix} \partial r & -P X^\top C \\ -C X P & -C D \end{pmatrix},
$$

with $P = \partial W$ and D the curvature of the conjugate loss. For hinge-like losses D is 0, so that nothing may be
eliminated: `mocha_jax._numerics.linear_systems` solves the system, and no matrix is formed. For smooth losses, a given
relationship and few features it has a closed form. With a smooth loss every free dual variable of

$$
P\bigl(\rho(I - P)q - X^\top C\beta\bigr) = r, \qquad -C X P q - C D \beta = s,
$$

with $P = \rho\bar M(I + \rho\bar M)^{-1}$, can be eliminated. With $u = Pq$ and $H = X^\top C D^{-1} X$ of the free
samples it becomes the system of a Newton step, $(I + \bar M H)u = (\bar M + I/\rho)r - \bar M X^\top D^{-1}s$, and

$$
C\beta = -D^{-1}s - C D^{-1}Xu, \qquad
q = u + \frac{1}{\rho}\bigl(r + X^\top C\beta + \tfrac{1}{\rho}\bar M^{-1}r\bigr).
$$
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from mocha_jax._algorithms.second_derivatives import curvature
from mocha_jax._core.pytree import PyTree, Relation, Tree
from mocha_jax._numerics.linear_systems import LinearSolution, minres, refined
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem
from mocha_jax.regularizers import OptimalityConditions
from mocha_jax.regularizers._base import Proximal

# A step that answers to less than this share of a change of its prediction is clipped, or as good as.
_CLIPPED = 1e-12

# The least curvature of a coordinate, as a share of the largest: for samples that are 0.
_LEAST_CURVATURE = 1e-6


Unknowns = tuple[Tree, Array]  # the regularizer's, see `OptimalityConditions`, and the duals ``[m, n]``


class Sensitivity:
    """The conditions at a point, linearised in the unknowns."""

    def __init__(
        self, problem: Problem, unknown: Tree, beta: Array, kappa: Array, *, tol: float | None, max_steps: int
    ) -> None:
        data, loss = problem.data, problem.node_loss
        self._point = problem, unknown, beta
        self._tol = float(jnp.finfo(beta.dtype).eps ** 0.75) if tol is None else tol
        self._max_steps = max_steps
        stationary = _stationary(problem)
        real = data.weight > 0
        direct = _direct(problem)
        self._kappa = lax.stop_gradient(kappa)
        z = data.node_predictions(data.to_nodes(stationary.weights(unknown)))
        slope = jax.jvp(lambda z: loss.dual_step(beta, z, data.y, self._kappa), (z,), (jnp.ones_like(z),))[1]
        self.free = real & (-slope * self._kappa > _CLIPPED)
        self._fixed = real & ~self.free
        # With it the second row is -C X P, - C D; its diagonal is about c (D + kappa).
        self._scale = jnp.where(self.free, safe_ratio(data.weight, -slope), 0.0)
        self._stiffness = stationary.stiffness(unknown)
        self._moved = jax.linearize(partial(self._conditions, problem), unknown, beta)[1]
        self._inverse: Callable[[PyTree], PyTree] | None = None
        if direct is not None:
            # A dual's own share of a step is D / (D + kappa), and the slope 1 / (D + kappa).
            own = -self._moved(jax.tree.map(jnp.zeros_like, unknown), jnp.ones_like(beta))[1]
            self._inverse = eliminated(problem, direct.rho, safe_ratio(-slope, own), self.free)

    def _conditions(self, problem: Problem, unknown: Tree, beta: Array) -> Unknowns:
        """Return the residual of the regularizer's condition, and the step of each dual variable."""
        data, stationary = problem.data, _stationary(problem)
        z = data.node_predictions(data.to_nodes(stationary.weights(unknown)))
        residual = stationary.residual(unknown, data.dual_vectors(beta))
        return residual, problem.node_loss.dual_step(beta, z, data.y, self._kappa) - beta

    def _apply(self, x: Unknowns) -> Unknowns:
        unknown, beta = x
        residual, step = self._moved(unknown, jnp.where(self.free, beta, 0.0))
        return residual, self._scale * step

    def _precondition(self, r: Unknowns) -> Unknowns:
        unknown = jax.tree.map(jnp.divide, r[0], self._stiffness)
        return unknown, r[1] / jnp.where(self.free, self._scale, 1.0)

    def _solve(self, b: Unknowns) -> LinearSolution[Unknowns]:
        if self._inverse is not None:
            return refined(self._apply, b, self._inverse, self._precondition, tol=self._tol)
        return minres(self._apply, b, self._precondition, tol=self._tol, max_steps=self._max_steps)

    def _pushed(self, fixed: Array) -> Tree:
        """Return the change of the regularizer's condition with the fixed duals."""
        unknown = jax.tree.map(jnp.zeros_like, self._point[1])
        return self._moved(unknown, jnp.where(self._fixed, fixed, 0.0))[0]

    def tangent(self, change: Problem, worst: Array) -> Unknowns:
        """The change of the unknowns with that of the problem; NaN where the system was solved worse than that."""
        problem, unknown, beta = self._point

        residual, step = jax.jvp(lambda p: self._conditions(p, unknown, beta), (problem,), (change,))[1]
        # As one vector: JAX can transpose a linear solve only if all parts of its right side move with the problem.
        right, apart = ravel_pytree(self._against(residual, step))

        def apply(x: Array) -> Array:
            return ravel_pytree(self._apply(apart(x)))[0]

        def solve(_: Callable[[Array], Array], b: Array) -> Array:
            solution = self._solve(apart(b))
            return jnp.where(solution.residual <= worst, ravel_pytree(solution.x)[0], jnp.nan)

        return self._with_fixed(apart(lax.custom_linear_solve(apply, right, solve, symmetric=True)), step)

    def correction(self) -> tuple[Unknowns, Unknowns]:
        """Newton's step, to where the linearised conditions hold; and a measure of what it leaves them short of."""
        problem, unknown, beta = self._point
        residual, step = self._conditions(problem, unknown, beta)
        right = self._against(residual, step)
        if self._inverse is not None:  # what it leaves is up to the next step
            return self._with_fixed(self._inverse(right), step), jax.tree.map(jnp.zeros_like, right)
        solution = self._solve(right)
        left = jax.tree.map(lambda r: solution.residual * r, self._precondition(right))
        return self._with_fixed(solution.x, step), left

    def _against(self, residual: Tree, step: Array) -> Unknowns:
        """The right side that answers a change of the conditions."""
        pushed = self._pushed(step)
        return jax.tree.map(lambda r, p: -r - p, residual, pushed), -self._scale * step

    def _with_fixed(self, x: Unknowns, step: Array) -> Unknowns:
        """A solution, with the movement of the duals that the system is not about."""
        unknown, beta = x
        return unknown, jnp.where(self.free, beta, jnp.where(self._fixed, step, 0.0))

    def cotangent(self, unknown_bar: Tree, beta_bar: Array) -> tuple[Problem, LinearSolution[Unknowns]]:
        """The gradient with respect to the problem of something with this gradient with respect to the unknowns."""
        problem, unknown, beta = self._point
        solution = self._solve((unknown_bar, jnp.where(self.free, beta_bar, 0.0)))
        towards, of_free = solution.x
        _, back = jax.vjp(self._pushed, jnp.zeros_like(beta))
        of_fixed = jnp.where(self._fixed, beta_bar - back(towards)[0], 0.0)
        _, pull = jax.vjp(lambda p: self._conditions(p, unknown, beta), problem)
        return pull((jax.tree.map(jnp.negative, towards), of_fixed - self._scale * of_free))[0], solution


def unknown_at(problem: Problem, weights: Array, beta: Array, relation: Relation) -> Tree:
    """The regularizer's unknown at an optimum."""
    return _stationary(problem).unknown(weights, problem.data.dual_vectors(beta), relation)


def read(problem: Problem, unknown: Tree) -> tuple[Array, Relation]:
    """Weights and Omega, from the unknown."""
    stationary = _stationary(problem)
    return stationary.weights(unknown), stationary.relation(unknown)


def _stationary(problem: Problem) -> OptimalityConditions:
    return problem.regularizer.optimality(problem.data.num_tasks, problem.data.num_features)


def _direct(problem: Problem) -> Proximal | None:
    """The conditions of a system that has a closed form; None if it has not."""
    stationary = _stationary(problem)
    # The only unknown of a given relationship, unless it is one of the user's own.
    return stationary if isinstance(stationary, Proximal) and can_eliminate(problem) else None


def curvatures(problem: Problem, relation: Relation) -> Array:
    """A curvature for every dual variable ``[m, n]``, by an Omega near the best: steps with any have the same end."""
    return _curvatures(problem, relation) if _direct(problem) is None else _least(problem)


def _least(problem: Problem) -> Array:
    """The least curvature of the conjugate of a smooth loss, of every sample: near it nothing is lost to rounding."""
    data = problem.data
    most = jnp.broadcast_to(jnp.asarray(problem.loss.smoothness, data.dtype), (data.num_tasks,))
    return jnp.broadcast_to(1.0 / data.to_nodes(most)[:, None], data.y.shape)


def _curvatures(problem: Problem, relation: Relation) -> Array:
    """A curvature for each coordinate, of the size that matters."""
    data, regularizer = problem.data, problem.regularizer
    own = regularizer.coupling(data.num_tasks, relation).diagonal()
    own = jnp.maximum(own, _LEAST_CURVATURE * jnp.max(own))
    kappa = data.to_nodes(own)[:, None] * data.weight * jnp.sum(data.x.astype(own.dtype) ** 2, axis=2)
    largest = jnp.max(kappa)
    return jnp.maximum(kappa, jnp.where(largest > 0, _LEAST_CURVATURE * largest, 1.0))


# Second derivatives at most. MINRES takes hundreds or thousands of steps, each of two products with the samples: a
# factorisation is cheaper up to a thousand features or so, whatever the samples.
_MOST = 2**24


def can_eliminate(problem: Problem) -> bool:
    """Tell whether the loss has a curvature and second derivatives are few enough to be factorised."""
    data, d = problem.data, problem.data.num_features
    size = d if data.shared else min(d, data.y.shape[1])
    few = data.num_nodes * size**2 + d**2 <= _MOST
    smooth = problem.loss.smoothness is not None
    return few and smooth and not problem.regularizer.learned and data.sharding is None


def eliminated(
    problem: Problem, rho: Array, flexibility: Array, free: Array
) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
    """Factorise the system, and return what solves it.

    Args:
      problem: the problem.
      rho: of the proximal map whose argument is the unknown.
      flexibility: the inverse of D of every sample ``[m, n]``.
      free: marks the duals that move ``[m, n]``.
    """
    data = problem.data
    coupling = problem.regularizer.coupling(data.num_tasks)
    moves = jnp.where(free, flexibility, 0.0)
    bent = curvature(data, data.weight * moves)
    system = coupling.newton_system(bent)

    def solve(b: tuple[Array, Array]) -> tuple[Array, Array]:
        right, slopes = b
        u, changed = system(right / rho + coupling.apply(right), -moves * slopes)
        unknown = u + (right + bent.sums(changed) + coupling.gradient(right) / rho) / rho
        return unknown, jnp.where(free, safe_ratio(changed, data.weight), 0.0)

    return solve
