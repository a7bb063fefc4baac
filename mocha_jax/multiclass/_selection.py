"""Choosing one regularizer for all classes: the searches of one problem, for the problems of all."""

from __future__ import annotations

from typing import Any

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem
from mocha_jax._selection import cross_validation, path
from mocha_jax._selection.records import CrossValidation
from mocha_jax.multiclass._each_class import Make
from mocha_jax.multiclass._learner import classes_of
from mocha_jax.multiclass._one_vs_rest import OneVsRest
from mocha_jax.regularizers import Regularizer


@on_purpose
def lambda_path(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    **options: Any,
) -> list[OneVsRest]:
    """Train each class against the rest with one regularizer after the other; one compiled call for all.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      classes: how many; default as `one_vs_rest`.
      **options: `standardize`, `key`, `tol`, `max_rounds` and `record_every`, as of `mocha_jax.lambda_path`.

    Returns:
      The models of every candidate, each begun from the ones before.
    """
    return path.lambda_path(classes_of("lambda_path", data, make, classes), candidates, algorithm, **options)


@on_purpose
def cross_validate(
    data: TaskData,
    make: Make,
    candidates: Regularizer,
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    **options: Any,
) -> CrossValidation[OneVsRest]:
    """Choose one regularizer for the models of all classes, by cross-validation within every task.

    It is `mocha_jax.cross_validate` of the problems of all classes: on the same folds, all classes and candidates of a
    fold in one compiled call, with the same warnings. What is scored is the class whose model says most.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1; its own regularizer does not matter.
      candidates: regularizers in one record with a leading axis, from `grid`, best with the strongest first.
      algorithm: default as for `solve`.
      classes: how many; default as `one_vs_rest`.
      **options: all others of `mocha_jax.cross_validate`: `key`, `folds`, `trials`, `groups`, `metric`, `maximise`,
        `scored_as`, `standardize`, `keep_rare`, `tol`, `max_rounds`, `record_every`, `chunk`, `refit` and `progress`.
        The `metric` is ``"error_rate"``, the default, of the logistic loss ``"log_loss"``, or any function like those
        of `multiclass`, called as ``metric(weights, data, per_task=True)`` with weights ``[classes, num_tasks, d]``.
        Residuals and rounds are those of the class that is furthest from its tolerance. Labels are not centred, and of
        what a function for `standardize` returns the samples count alone.

    Returns:
      The scores and the choice; ``solution`` is an `OneVsRest`.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(25, 8)).astype("f") * np.array([1] * 3 + [5] * 5, "f") for _ in range(6)]
      >>> ys = [(x[:, :3] + 0.5 * rng.normal(size=(25, 3))).argmax(1) for x in xs]
      >>> data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
      >>> def hinge(data):
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> candidates = mj.grid(mj.regularizers.MeanRegularized, lam1=[1.0], lam2=[1.0, 0.03, 0.001])
      >>> found = mj.multiclass.cross_validate(data, hinge, candidates, folds=3, tol=1e-2)
      >>> found.metric, found.best, found.solution.weights.shape
      ('error_rate', 1, (3, 6, 8))
    """
    learner = classes_of("cross_validate", data, make, classes)
    return cross_validation.cross_validate(learner, candidates, algorithm, **options)
