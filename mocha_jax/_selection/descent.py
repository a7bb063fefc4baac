"""One step of descent on held-out folds: their trainings, losses and gradients, as one program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import metrics
from mocha_jax._algorithms.base import State
from mocha_jax._core.compiling import Program
from mocha_jax._core.pytree import PyTree, Pytree, Tree
from mocha_jax._driver.adjoint import Hypergradient, Implicit, hypergradient
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.candidates import SolveOptions, warm_started
from mocha_jax._selection.preparation import Preparation, to_score

Make = Callable[[Problem, PyTree], Problem]  # of hyperparameters in a form of the user's
Score = Callable[[Problem, Solution[Problem], PyTree], Array]


class TuningTrace(Pytree):
    """The steps of `tune`; every field has a leading axis, one entry per step."""

    value: Array  # mean loss of the folds that stop
    descended: Array  # of the other folds, and the prior: what descent is on
    losses: Array  # [., folds]
    hyperparameters: PyTree  # at which they were taken
    gradient: PyTree  # of `descended`, with respect to their logarithms
    error: PyTree  # of the gradient, about, see `Hypergradient`
    distance: Array  # from the optimum of where the gradient was taken, the largest of all folds
    residual: Array  # of the linear system behind it, likewise
    gap: Array  # relative gap at which the trainings ended, likewise
    rounds: Array  # of the trainings, of all folds together


class OfFold(Pytree):
    """A training for one fold, and how its loss changes with the hyperparameters."""

    loss: Array
    gradient: Tree
    error: Tree
    distance: Array
    residual: Array
    gap: Array
    rounds: Array
    state: State


def mean_loss(problem: Problem, solution: Solution[Problem], hyperparameters: Tree) -> Array:
    """The usual score."""
    return metrics.mean_loss(solution.weights, problem.data, problem.loss)


def _fold_by_fold(
    inputs: tuple[Array, Problem, Array, SolveOptions, Implicit], logs: Tree, states: Tree, *, count: int, make: Make,
    score: Score, prepare: Preparation | None,
) -> OfFold:  # fmt: skip
    """Train without each fold, from the states of the last time, and differentiate its loss."""
    key, problem, parts, options, adjoint = inputs

    def with_hyperparameters(problem: Problem, logs: Tree) -> Problem:
        return make(problem, jax.tree.map(jnp.exp, logs))

    def one(fold: Array, state: PyTree) -> OfFold:
        rows = parts != fold
        training, held_out, for_those = to_score(prepare, problem.data.keep(rows), problem.data.keep(~rows))
        own_problem, pull = jax.vjp(partial(with_hyperparameters, problem.replace(data=training)), logs)
        solution = options.solve(key, own_problem, warm_started(options.algorithm, state, own_problem))
        asked = problem.exchange(data=held_out)  # which may have one more feature, see `to_score`

        def loss(weights: Array, logs: Tree) -> Array:
            return score(asked, solution.exchange(weights=for_those(weights)), jax.tree.map(jnp.exp, logs))

        slope: Hypergradient = hypergradient(lambda w: loss(w, logs), solution, adjoint=adjoint)
        gradient, error = (pull(g)[0] for g in (slope.gradient, slope.error))
        gradient = jax.tree.map(jnp.add, gradient, jax.grad(loss, 1)(solution.weights, logs))
        return OfFold(
            slope.value, gradient, jax.tree.map(jnp.abs, error), slope.distance, slope.residual,
            solution.history.residual, jnp.asarray(solution.rounds), solution.state,
        )  # fmt: skip

    # On a CPU one training keeps a core busy, see `room`.
    every = jnp.arange(count, dtype=parts.dtype), states
    return lax.map(lambda inputs: one(*inputs), every) if jax.default_backend() == "cpu" else jax.vmap(one)(*every)


trained = Program(
    _fold_by_fold, lambda inputs, *_, **__: inputs[1].data.x.size, often=True,
    static_argnames=("count", "make", "score", "prepare"),
)  # fmt: skip


def summed(
    of_folds: OfFold, logs: Tree, stopping: int, unit: float | None, samples: int, prior: float
) -> tuple[TuningTrace, Tree]:
    """Put the folds together: the record of a step, and the gradient of what descent is on."""
    of_folds, logs = jax.tree.map(np.asarray, (of_folds, logs))
    kept = len(of_folds.loss) - stopping
    mean = float(of_folds.loss[:kept].mean())
    weight = (mean if unit is None else unit) / (samples * prior**2)
    aside = jax.tree.map(lambda a: a - a.mean(), logs)
    total = mean + 0.5 * weight * sum(float((a**2).sum()) for a in jax.tree.leaves(aside))
    gradient = jax.tree.map(lambda g, a: (g[:kept].mean(0) + weight * a).astype(a.dtype), of_folds.gradient, aside)
    error = jax.tree.map(lambda e: e[:kept].mean(0), of_folds.error)
    value = float(of_folds.loss[kept:].mean()) if stopping else total
    largest = of_folds.distance.max(), of_folds.residual.max(), of_folds.gap.max()
    values = jax.tree.map(np.asarray, (value, total))
    trace = TuningTrace(
        values[0], values[1], of_folds.loss, jax.tree.map(np.exp, logs), gradient, error, *largest,
        of_folds.rounds.sum(),
    )  # fmt: skip
    return trace, gradient
