r"""Probabilities from held-out decision values, by Platt's method for every class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.warnings import NotConverged, warn
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.config import or_by_loops
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import caveats
from mocha_jax._selection.candidates import SolveOptions, solve_options
from mocha_jax.multiclass._each_class import EachClass, Make, count_classes, each_class
from mocha_jax.multiclass._one_vs_rest import OneVsRest
from mocha_jax.multiclass._scores import said

_MOST_STEPS = 100  # of Newton's method, which takes about ten


@on_purpose
def calibrated(
    model: OneVsRest,
    data: TaskData,
    make: Make,
    algorithm: Algorithm[Problem] | None = None,
    *,
    key: Array | None = None,
    folds: int = 5,
    groups: ArrayLike | None = None,
    tol: float = 1e-3,
    max_rounds: int = 500,
    record_every: int = 5,
) -> OneVsRest:
    r"""Calibrate the probabilities of a model on samples that were held out.

    For every fold the models of all classes are trained without it and predict it. A sigmoid is fitted to the decision
    values z of class k on all samples (Platt 1999, with his targets, which keep both numbers finite):

    $$
    p_k(z) = \frac{1}{1 + e^{-(a_k z + b_k)}}, \qquad
    \text{probability of } k = \frac{p_k(z_k)}{\sum_j p_j(z_j)} .
    $$

    Each class has two numbers, for all tasks together. The weights of the model and its predictions do not change.

    Args:
      model: from `one_vs_rest`, trained on all of the data.
      data: what it was trained on.
      make: the problem that it was trained with.
      algorithm: default as for `solve`.
      key: a JAX random key for the folds; default ``jax.random.key(0)``.
      folds: parts of each node's samples, of which each is held out once.
      groups: ``[m, n]`` integers, see `TaskData.folds`.
      tol: relative gap at which a solve ends.
      max_rounds: of each solve at most.
      record_every: rounds between looks at the gap.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(60, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [x.argmax(1) for x in xs], loss_scaling="task_mean")
      >>> def hinge(data):
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1e-3))
      >>> found = mj.multiclass.calibrated(mj.one_vs_rest(data, hinge), data, hinge, folds=3)
      >>> found.predict_proba(data).shape, bool(mj.multiclass.log_loss(found, data) < 0.4)
      ((4, 60, 3), True)
    """
    owner = "calibrated"
    check.instance(owner, "model", model, OneVsRest, "one_vs_rest(data, make)")
    check.integer(owner, 2, folds=folds)
    key = jax.random.key(0) if key is None else key
    check.key(owner, key)
    count = count_classes(owner, data, len(model.weights))
    each, first = each_class(owner, data, make, count)
    options = solve_options(owner, first, algorithm, tol, max_rounds, record_every)
    part = data.folds(key, folds, groups)

    def work(by: Algorithm[Problem]) -> tuple[Array, Array, Array]:
        held = jnp.arange(folds, dtype=part.dtype)
        return _held_out(key, each, data.unnamed(), part, held, options.replace(algorithm=by))

    z, residuals, rounds = (np.asarray(a) for a in or_by_loops(first, options.algorithm, work))
    caveat = caveats.unfinished(
        residuals, rounds, options.tol, options.max_rounds, then="are asked as far as they got",
        of="classes", names=model.names.classes,
    )  # fmt: skip
    if caveat is not None:
        warn(f"{owner}: {caveat}", NotConverged)
    real, y = np.asarray(data.weight) > 0, np.asarray(data.y)
    fitted = [sigmoid_fit(own[real].astype(float), y[real] == k) for k, own in enumerate(z)]
    return model.exchange(calibration=jnp.asarray(fitted, data.dtype))


@jax.jit
def _held_out(
    key: Array, each: EachClass, data: TaskData, part: Array, held: Array, options: SolveOptions
) -> tuple[Array, Array, Array]:
    """Ask about every sample the models that were trained without its fold: ``[classes, m, n]``.

    Returns:
      What they say, and the residuals and rounds of their solves ``[folds, classes]``.
    """

    def one(fold: Array) -> tuple[Array, Array, Array]:
        def of_class(problem: Problem) -> tuple[Array, Array, Array]:
            training = Problem(problem.data.keep(part != fold), problem.loss, problem.regularizer)
            solution = options.solve(key, training, None)
            return solution.weights, solution.certificate.residual, jnp.asarray(solution.rounds)

        weights, residuals, rounds = each.map(of_class)
        return jnp.where(part == fold, said(weights, data), 0.0), residuals, rounds

    z, residuals, rounds = lax.map(one, held)
    return jnp.sum(z, axis=0), residuals, rounds


def sigmoid_fit(z: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Fit slope and offset of the log-odds to decision values ``[k]``, by Newton's method with Platt's targets."""
    many = positive.sum()
    target = np.where(positive, (many + 1.0) / (many + 2.0), 1.0 / (len(z) - many + 2.0))
    scale = max(float(np.abs(z).max()), np.finfo(float).tiny)
    design = np.stack([z / scale, np.ones_like(z)], axis=1)

    def value(w: np.ndarray) -> float:
        s = design @ w
        return float(np.sum(np.logaddexp(0.0, s) - target * s))

    mean = target.mean()
    w = np.array([0.0, np.log(mean / (1.0 - mean))])
    for _ in range(_MOST_STEPS):
        s = design @ w
        p = 0.5 * (1.0 + np.tanh(0.5 * s))
        slope = design.T @ (p - target)
        # The least part of the identity keeps it regular where all values are the same.
        curvature = (design * (p * (1.0 - p))[:, None]).T @ design + 1e-12 * np.eye(2)
        step = np.linalg.solve(curvature, slope)
        rate, gain = 1.0, float(slope @ step)
        while rate > 1e-10 and value(w - rate * step) > value(w) - 1e-4 * rate * gain:
            rate *= 0.5
        w = w - rate * step
        if gain <= 1e-20 * len(z):
            break
    return float(w[0] / scale), float(w[1])
