"""Choosing hyperparameters by gradient descent on a validation loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from mocha_jax import metrics
from mocha_jax._algorithms.base import Algorithm, State
from mocha_jax._algorithms.default import default_algorithm
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Tree, fields_of, short
from mocha_jax._core.transfers import on_purpose
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.adjoint import Hypergradient, Implicit, hypergradient
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.preparation import Preparation, of_residuals, preparation, prepared, to_score
from mocha_jax._selection.solves import SolveOptions, warm_started

# Learning rate of the default optimizer, on a natural log scale, at the start; it falls to 0 along a cosine.
_RATE = 0.7


class Trace(Pytree):
    """The steps of `tune`; every field has a leading axis, one entry per step."""

    value: Array  # validation loss
    hyperparameters: Any  # at which it was taken
    gradient: Any  # with respect to their logarithms
    error: Any  # of the gradient, about, see `Hypergradient`
    distance: Array  # from the optimum of where the gradient was taken
    residual: Array  # of the linear system behind it
    gap: Array  # relative gap at which the training ended
    rounds: Array  # of the training


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The best hyperparameters and the way there, from `tune`."""

    hyperparameters: Any  # the best ones seen
    problem: Problem  # with them
    solution: Solution[Problem]  # of the training then; its history holds the last record
    value: float  # the validation loss of its weights
    best: int  # the step at which they were seen
    history: Trace

    def __repr__(self) -> str:
        gap = float(self.history.gap[self.best])
        best = short(self.hyperparameters)
        return f"Tuned(value={self.value:.6g}, hyperparameters={best}, trained to a gap of {gap:.1e})"


@on_purpose
def tune(
    problem: Problem,
    validation: TaskData,
    *,
    make: Callable[[Any], Problem] | None = None,
    start: Any = None,
    score: Callable[[Array, TaskData], Array] | None = None,
    standardize: str | Preparation | None = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 25,
    algorithm: Algorithm[Problem] | None = None,
    key: Array | None = None,
    tol: float = 1e-4,
    max_rounds: int = 500,
    record_every: int = 5,
    adjoint: Implicit | None = None,
    callback: Callable[[int, float], object] | None = None,
) -> Tuned:
    r"""Gradient descent on the validation loss over the logarithms of any number of hyperparameters.

    A step trains from the solution of the last one, differentiates the validation loss through the optimum
    (`hypergradient`) and moves all hyperparameters at once. The best ones seen are returned, so the result is never
    worse than the start. Where a training ends so far from the optimum that there is no gradient, descent stops with a
    warning, or at the first step with an error. The loss need not be convex in them: start where a coarse grid says.

    By default all positive numbers of the regularizer are tuned, but for counts and matrices. Any others by `make`: one
    $\lambda$ for each cluster of tasks,

        >>> import jax, jax.numpy as jnp, mocha_jax as mj
        >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
        >>> train, validation = data.split(jax.random.key(1), 0.7)
        >>> problem = mj.Problem(train, mj.losses.Logistic(), mj.regularizers.Independent(1.0))
        >>> cluster = jnp.array([0, 0, 1, 1, 2, 2])
        >>> def with_ridges(lam):
        ...     return problem.replace(regularizer=mj.regularizers.Independent(lam[cluster]))
        >>> tuned = mj.tune(problem, validation, make=with_ridges, start=jnp.ones(3), steps=5, tol=1e-3)
        >>> tuned.hyperparameters.shape, bool(tuned.value <= tuned.history.value[0])
        ((3,), True)

    or how much each task's samples count, ``data.replace(weight=data.weight * h[:, None])``.

    Args:
      problem: where to start; with `make`, only for its data and loss.
      validation: samples of the same tasks that are not trained on.
      make: the problem for given hyperparameters, a pure function.
      start: the first hyperparameters, any pytree of positive arrays; needed with `make`.
      score: ``score(weights, validation)``, differentiable; default `metrics.mean_loss` with the problem's loss.
      standardize: what to do with features, fitted to the problem's samples and done with those for validation too, see
        `cross_validate`; not with `make`, which has the samples that it has.
      optimizer: of logarithms; default Adam with a rate that falls from 0.7 to 0.
      steps: how many trainings.
      algorithm: default as for `solve`.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap of the trainings.
      max_rounds: of each training.
      record_every: rounds between looks at the gap.
      adjoint: how exactly to solve for the gradient.
      callback: called as ``callback(step, validation_loss)`` after each step; a true return value stops.
    """
    name = "tune"
    check.instance(name, "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.instance(name, "validation", validation, TaskData, "data.split(key, 0.75)[1]")
    if score is None and (
        problem.data.num_features != validation.num_features or problem.data.num_tasks not in (1, validation.num_tasks)
    ):
        raise ValueError(
            f"tune: validation has {validation.num_tasks} tasks of {validation.num_features} features, but problem "
            f"{problem.data.num_tasks} of {problem.data.num_features}; pass samples of the same tasks, or a score."
        )
    check.integer(name, 1, steps=steps, max_rounds=max_rounds, record_every=record_every)
    check.scalar(name, tol=tol)
    check.nonnegative(name, tol=tol)
    tol = float(tol)
    if algorithm is not None:
        check.instance(name, "algorithm", algorithm, Algorithm, "Mocha()")
    if score is not None:
        check.function(name, "score", score, "lambda weights, validation: ...")
    if optimizer is not None:
        check.instance(name, "optimizer", optimizer, optax.GradientTransformation, "optax.adam(0.1)")
    if callback is not None:
        check.function(name, "callback", callback, "lambda step, loss: loss < 0.1")
    if (make is None) != (start is None):
        raise ValueError(
            "tune: make and start belong together: the problem for given hyperparameters, and the first ones."
        )
    if standardize is not None and make is not None:
        raise ValueError("tune: standardize must be left out where make builds the problem; give it such samples.")
    prepare = preparation(name, standardize, of_residuals(problem))
    _, validation, for_those = to_score(prepare, problem.data, validation)
    problem = problem.replace(data=prepared(prepare, problem.data))
    if make is None:
        make, start = _of_regularizer(problem)
    start = jax.tree.map(partial(jnp.asarray, dtype=problem.data.dtype), start)
    if not jax.tree.leaves(start) or not all(
        (_np(a) > 0).all() and np.isfinite(_np(a)).all() for a in jax.tree.leaves(start)
    ):
        raise ValueError(f"tune: hyperparameters must be positive and finite to have logarithms, got {start}.")
    score = partial(metrics.mean_loss, loss=problem.loss) if score is None else score
    optimizer = optax.adam(optax.cosine_decay_schedule(_RATE, steps)) if optimizer is None else optimizer
    algorithm = default_algorithm(make(start)) if algorithm is None else algorithm
    budget = SolveOptions(algorithm, tol, int(max_rounds), int(record_every))
    adjoint = Implicit() if adjoint is None else adjoint
    check.instance(name, "adjoint", adjoint, Implicit, "Implicit()")
    key = jax.random.key(0) if key is None else key
    check.key(name, key)

    @jax.jit
    def step(
        algorithm: Algorithm[Problem], logs: Tree, progress: optax.OptState, state: State, validation: TaskData
    ) -> tuple[Tree, optax.OptState, Solution[Problem], Trace]:
        by = budget.replace(algorithm=algorithm)
        values = jax.tree.map(jnp.exp, logs)
        there, pull = jax.vjp(lambda logs: make(jax.tree.map(jnp.exp, logs)), logs)
        solution = by.solve(key, there, warm_started(algorithm, state, there))
        found: Hypergradient = hypergradient(lambda w: score(for_those(w), validation), solution, adjoint=adjoint)
        gradient, error = (pull(g)[0] for g in (found.gradient, found.error))
        with jax.numpy_dtype_promotion("standard"):  # which optimizers take for granted
            updates, progress = optimizer.update(gradient, progress, logs)
            moved = optax.apply_updates(logs, updates)
        seen = Trace(
            found.value, values, gradient, error, found.distance, found.residual,
            solution.certificate.residual, jnp.asarray(solution.rounds),
        )  # fmt: skip
        return moved, progress, solution, seen

    seen: list[Trace] = []
    logs, chosen = jax.tree.map(jnp.log, start), None
    progress = optimizer.init(logs)
    state: State = jax.jit(lambda start: budget.algorithm.init(make(start)))(start)
    for i in range(steps):
        logs, progress, solution, now = or_by_loops(
            problem, budget.algorithm,
            lambda by: step(by, logs, progress, state, validation),  # noqa: B023
        )  # fmt: skip
        numbers = now.value, *jax.tree.leaves(now.gradient)
        if not all(np.isfinite(_np(a)).all() for a in numbers):
            if not seen:
                raise ValueError(
                    f"tune: there is no gradient at the start, {start}: validation loss {float(now.value):.3g}, gap of "
                    f"the training {float(now.gap):.1e}, distance from the optimum {float(now.distance):.1e} and "
                    f"residual of the linear system {float(now.residual):.1e} (each at most {adjoint.worst:g}). Train "
                    f'to a smaller tol, with more max_rounds, not with Mocha(server="dual") where Omega is learned, or '
                    f"start elsewhere."
                )
            warn(
                f"tune: stopped after {i} steps: there is no gradient at {now.hyperparameters}, where training ended "
                f"at a gap of {float(now.gap):.1e}, a distance of {float(now.distance):.1e} from the optimum and a "
                f"residual of {float(now.residual):.1e} (at most {adjoint.worst:g}); train to a smaller tol or start "
                f"elsewhere. The best of the steps before is returned."
            )
            break
        state = solution.state
        if not seen or now.value < min(trace.value for trace in seen):
            chosen = solution
        seen.append(jax.tree.map(np.asarray, now))
        if callback is not None and callback(i, float(now.value)):
            break
    history = jax.tree.map(lambda *leaves: np.stack(leaves), *seen)
    best = int(np.argmin(history.value))
    assert chosen is not None
    if history.gap[best] > 10.0 * tol:
        warn(
            f"tune: the best training stopped at max_rounds={max_rounds} with a relative gap of "
            f"{history.gap[best]:.1e}, far from tol={tol:g}; its validation loss is not the optimum's.",
            NotConverged,
        )
    values = jax.tree.map(lambda a: jnp.asarray(a[best]), history.hyperparameters)
    return Tuned(values, make(values), chosen, float(history.value[best]), best, history)


def _of_regularizer(problem: Problem) -> tuple[Callable[[Any], Problem], dict[str, ArrayLike]]:
    """All its positive numbers, by name, but for those that it says to leave alone."""
    regularizer = problem.regularizer
    fields = {k: v for k, v in fields_of(regularizer).items() if k not in regularizer.frozen_fields}
    start = {k: v for k, v in fields.items() if np.isfinite(_np(v)).all() and (_np(v) > 0).all()}

    def make(values: dict[str, ArrayLike]) -> Problem:
        return problem.replace(regularizer=regularizer.replace(**values))

    return make, start


def _np(a: ArrayLike) -> np.ndarray:
    return np.asarray(a)
