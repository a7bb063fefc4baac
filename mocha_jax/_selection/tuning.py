"""Choosing hyperparameters by gradient descent on the loss of held-out folds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import beside, on_purpose
from mocha_jax._core.pytree import Hyperparameter, PyTree, Tree, fields_of, short
from mocha_jax._core.warnings import warn
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.adjoint import Implicit
from mocha_jax._driver.config import or_by_loops
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax._selection.candidates import solve_options
from mocha_jax._selection.descent import Make, Score, TuningTrace, mean_loss, summed, trained
from mocha_jax._selection.learner import learner_of
from mocha_jax._selection.preparation import Preparation, anonymous, preparation, prepared
from mocha_jax.regularizers import Regularizer

# Learning rate of the default optimizer, on a natural log scale, at the start; it falls to 0 along a cosine.
_RATE = 0.3

PositiveNumbers = dict[str, "Hyperparameter | PositiveNumbers"]  # of a regularizer, those of its parts within

# Steps without progress on the folds that stop, after which descent ends.
_PATIENCE = 5


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The hyperparameters chosen by `tune`, with the history of the descent."""

    hyperparameters: PyTree  # those of the best step
    problem: Problem  # with them, of all samples
    solution: Solution[Problem]  # of that problem
    value: float  # the loss of the folds that stop, at the best step
    best: int  # the step at which it is least
    history: TuningTrace

    def __repr__(self) -> str:
        best = short(self.hyperparameters)
        return f"Tuned(value={self.value:.6g}, hyperparameters={best}, {self.solution.message})"


@on_purpose
def tune(
    problem: Problem,
    *,
    make: Make | None = None,
    start: PyTree = None,
    score: Score | None = None,
    folds: int | ArrayLike = 5,
    stopping: int = 1,
    prior: float = 1.0,
    standardize: str | Preparation | None = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 25,
    algorithm: Algorithm[Problem] | None = None,
    key: Array | None = None,
    tol: float = 1e-4,
    max_rounds: int = 500,
    record_every: int = 1,
    adjoint: Implicit | None = None,
    callback: Callable[[int, float], object] | None = None,
) -> Tuned:
    r"""Gradient descent on the loss of held-out folds, over the logarithms of any number of hyperparameters.

    A step trains without each of the folds in turn, from its last solution, all in one compiled call. It differentiates
    the losses of the held-out folds through the optima (`hypergradient`) and moves all hyperparameters at once, down

    $$
    \bar L(h) + \frac{\bar L(h_0)}{n} \sum_a \sum_{j \in a} \frac{(\log h_j - \overline{\log h_a})^2}{2\tau^2},
    $$

    with $\bar L$ the mean loss of the folds but for the last, $h_0$ the start, n their samples and $\tau$ the `prior`:
    each array a of hyperparameters is log-normal about a level of its own, so that a single number has none. The fold
    that descent does not see says where to stop: the step at which its loss is least is chosen, the start among them,
    and descent ends some steps after. The solution is then one of all samples. The loss need not be convex in the
    hyperparameters: start where a coarse grid says.

    Where a training ends so far from the optimum that there is no gradient, descent ends with a warning, or at the
    first step with an error.

    By default all positive numbers of the regularizer are tuned, but for counts and matrices: one or one for each task,
    as they are. Any others by `make`: one $\lambda$ for each cluster of tasks,

        >>> import jax, jax.numpy as jnp, mocha_jax as mj
        >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
        >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Independent(1.0))
        >>> cluster = jnp.array([0, 0, 1, 1, 2, 2])
        >>> def with_ridges(problem, lam):
        ...     return problem.replace(regularizer=mj.regularizers.Independent(lam[cluster]))
        >>> tuned = mj.tune(problem, make=with_ridges, start=jnp.ones(3), folds=3, steps=5, tol=1e-3)
        >>> tuned.hyperparameters.shape, bool(tuned.value <= tuned.history.value[0])
        ((3,), True)

    or how much each task's samples count, ``problem.data.replace(weight=problem.data.weight * h[:, None])``.

    Args:
      problem: data, loss and where to start; with `make`, only the first two.
      make: ``make(problem, hyperparameters)``, a pure function: the problem with them, of the samples of the one given.
        The same function again is not compiled again.
      start: the first hyperparameters, any pytree of positive arrays; needed with `make`.
      score: ``score(problem, solution, hyperparameters)``, to be small; `problem` is the one given with held-out
        samples. It is differentiated through ``solution.weights`` and the hyperparameters. Default `metrics.mean_loss`.
      folds: how many, drawn with `key` as `cross_validate` draws them; or ``[m, n]`` integers, the fold in which each
        sample is held out: 0 and 1 for two validation parts, and -1 for samples that always train.
      stopping: how many of the folds, the last ones, descent does not see. With 0 the step at which what it descends on
        is least is chosen.
      prior: $\tau$, on a natural log scale; infinity for none.
      standardize: what to do with features, fitted to the training samples of every fold, see `cross_validate`.
      optimizer: of logarithms; default `optax.novograd`, by which an array moves as one vector, with a rate that falls
        from 0.3 to 0.
      steps: how many at most.
      algorithm: default as for `solve`.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap of the trainings.
      max_rounds: of each training.
      record_every: rounds between looks at the gap.
      adjoint: how exactly to solve for the gradient.
      callback: called as ``callback(step, value)`` after each step; a true return value stops.
    """
    name = "tune"
    check.instance(name, "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.integer(name, 1, steps=steps)
    check.integer(name, 0, stopping=stopping)
    check.positive_or_infinite(name, prior=prior)
    check.scalar(name, prior=prior)
    for what, function, example in (
        ("make", make, "lambda problem, h: problem"),
        ("score", score, "lambda problem, solution, h: ..."),
        ("callback", callback, "lambda step, loss: loss < 0.1"),
    ):
        if function is not None:
            check.function(name, what, function, example)
    if optimizer is not None:
        check.instance(name, "optimizer", optimizer, optax.GradientTransformation, "optax.adam(0.1)")
    if (make is None) != (start is None):
        raise ValueError(
            "tune: make and start belong together: the problem for given hyperparameters, and the first ones."
        )
    key = jax.random.key(0) if key is None else key
    check.key(name, key)
    adjoint = Implicit() if adjoint is None else adjoint
    check.instance(name, "adjoint", adjoint, Implicit, "Implicit()")
    if make is None:
        make, start = _with_numbers, _positive_numbers(problem.regularizer)
    start = jax.tree.map(partial(jnp.asarray, dtype=problem.data.dtype), start)
    if not jax.tree.leaves(start) or not all(
        (_np(a) > 0).all() and np.isfinite(_np(a)).all() for a in jax.tree.leaves(start)
    ):
        raise ValueError(f"tune: hyperparameters must be positive and finite to have logarithms, got {start}.")
    learner = learner_of(name, problem)
    prepare = preparation(name, standardize, learner.centres_labels)
    options = solve_options(name, make(problem, start), algorithm, tol, max_rounds, record_every)
    parts, count = _parts(problem.data, key, folds)
    if stopping >= count:
        raise ValueError(f"tune: stopping must leave a fold to descend on, of {count} folds at most {count - 1}.")
    optimizer = _usual_optimizer(int(steps)) if optimizer is None else optimizer
    slim = problem.exchange(data=anonymous(problem.data, prepare))
    fixed = dict(count=count, make=make, score=mean_loss if score is None else score, prepare=prepare)
    samples = int(((_np(parts) >= 0) & (_np(parts) < count - stopping) & (_np(problem.data.weight) > 0)).sum())

    seen: list[TuningTrace] = []
    logs, unit = jax.tree.map(jnp.log, start), None
    # What is not finite is begun anew.
    like = jax.eval_shape(lambda start: options.algorithm.init(make(slim, start)), start)
    states = jax.tree.map(lambda a: jnp.full((count, *a.shape), jnp.inf if a.dtype.kind == "f" else 0, a.dtype), like)
    logs, progress, states = beside(slim.data.x, (logs, optimizer.init(logs), states))
    for i in range(steps):
        of_folds = or_by_loops(
            problem, options.algorithm,
            lambda by: trained((key, slim, parts, options.replace(algorithm=by), adjoint), logs, states, **fixed),  # noqa: B023
        )  # fmt: skip
        states = of_folds.state
        now, gradient = summed(of_folds.exchange(state=None), logs, stopping, unit, samples, prior)
        unit = float(now.losses[: count - stopping].mean()) if unit is None else unit
        if not all(np.isfinite(a).all() for a in (now.value, *jax.tree.leaves(now.gradient))):
            if not seen:
                raise ValueError(
                    f"tune: there is no gradient at the start, {start}: loss {float(now.value):.3g}, gap of "
                    f"the trainings {float(now.gap):.1e}, distance from the optimum {float(now.distance):.1e} and "
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
        seen.append(now)
        values = [trace.value for trace in seen]
        if callback is not None and callback(i, float(now.value)):
            break
        if stopping and i - int(np.argmin(values)) >= _PATIENCE:
            break
        logs, progress = _moved(optimizer, gradient, progress, logs)
    history = jax.tree.map(lambda *leaves: np.stack(leaves), *seen)
    best = int(np.argmin(history.value))
    chosen = jax.tree.map(lambda a: jnp.asarray(a[best]), history.hyperparameters)
    final = make(problem.replace(data=prepared(prepare, problem.data)), chosen)
    return Tuned(chosen, final, options.solve(key, final, None), float(history.value[best]), best, history)


@lru_cache
def _usual_optimizer(steps: int) -> optax.GradientTransformation:
    """Follow the direction of an array's gradient, whatever its size: numbers that hardly matter hardly move."""
    return optax.novograd(optax.cosine_decay_schedule(_RATE, steps), b1=0.5, b2=0.9)


@partial(jax.jit, static_argnums=0)
def _moved(
    optimizer: optax.GradientTransformation, gradient: Tree, progress: optax.OptState, logs: Tree
) -> tuple[Tree, optax.OptState]:
    """One step of the optimizer."""
    with jax.numpy_dtype_promotion("standard"):  # which optimizers take for granted
        updates, progress = optimizer.update(gradient, progress, logs)
        return optax.apply_updates(logs, updates), progress


def _parts(data: TaskData, key: Array, folds: int | ArrayLike) -> tuple[Array, int]:
    """The fold of every sample ``[m, n]``, and how many folds there are."""
    if np.ndim(folds) == 0:
        check.integer("tune", 2, folds=folds)
        return data.folds(jax.random.fold_in(key, 0), int(folds)), int(folds)  # type: ignore[arg-type]
    parts = np.asarray(folds)
    if parts.shape != data.y.shape or parts.dtype.kind not in "iu":
        raise ValueError(f"tune: folds must be a number or integers [m, n] = {data.y.shape}, got {check.shown(folds)}.")
    real = _np(data.weight) > 0
    count = int(parts[real].max(initial=-1)) + 1
    empty = sorted(set(range(count)) - set(parts[real].tolist()))
    if count < 1 or empty:
        raise ValueError(f"tune: each of the folds 0, 1, ... must have samples, but fold {(empty or [0])[0]} has none.")
    return jnp.asarray(np.where(real, parts, -1).astype(np.int32)), count


def _positive_numbers(regularizer: Regularizer) -> PositiveNumbers:
    """All positive numbers of a regularizer and its parts, by name, except those that it marks as fixed."""
    positive: PositiveNumbers = {}
    for name, value in fields_of(regularizer).items():
        if isinstance(value, Regularizer):
            positive[name] = _positive_numbers(value)
        elif name not in regularizer.frozen_fields and np.isfinite(_np(value)).all() and (_np(value) > 0).all():
            positive[name] = value
    return positive


def _with_numbers(problem: Problem, values: PositiveNumbers) -> Problem:
    def changed(record: Regularizer, values: PositiveNumbers) -> Regularizer:
        parts = {name: changed(getattr(record, name), v) if isinstance(v, dict) else v for name, v in values.items()}
        return record.replace(**parts)

    return problem.replace(regularizer=changed(problem.regularizer, values))


def _np(a: ArrayLike) -> np.ndarray:
    return np.asarray(a)
