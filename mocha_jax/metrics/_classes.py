"""Scores of models that tell two classes apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.metrics._means import (
    Weights,
    check_labels,
    counts,
    mean_over_tasks,
    model_of,
    predicted,
    summary,
    task_means,
)


@on_purpose
def error_rate(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Share of samples on the wrong side: sign(w'x) != y. A prediction of exactly 0 is wrong.

    Args:
      weights: ``[num_tasks, d]``, or ``[1, d]`` for a global model; or a solution or its model, whose tasks are found
        by their names.
      data: samples with labels -1 and +1; others are refused; inside a transformation they cannot be
        checked.
      per_task: return every task's score ``[num_tasks]`` (NaN without samples), not the mean.

    Examples:
      >>> import numpy as np, jax.numpy as jnp, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(2, dtype="f"), np.eye(2, dtype="f")], [np.ones(2), -np.ones(2)])
      >>> float(error_rate(jnp.array([[1.0, 1.0], [1.0, -1.0]]), data))
      0.25
    """
    return mean_over_tasks(_wrong("error_rate", weights, data), data, per_task)


@on_purpose
def balanced_error(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Mean of the two classes' error rates, however rare one of them is; 0.5 for a model that knows one class only.

    A task whose samples are all of one class has no score. Arguments as `error_rate`.
    """
    check.flag("balanced_error", per_task=per_task)
    wrong, positive = _wrong("balanced_error", weights, data), data.y > 0
    score = 0.5 * (task_means(wrong, data, positive) + task_means(wrong, data, ~positive))
    return summary(score, (counts(data, positive) > 0) & (counts(data, ~positive) > 0), per_task)


@on_purpose
def f1(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Harmonic mean of precision and recall of the label +1: 2 TP / (2 TP + FP + FN).

    A task without positives has no score. Arguments as `error_rate`.
    """
    check.flag("f1", per_task=per_task)
    wrong, positive = _wrong("f1", weights, data), data.y > 0
    hits = 2.0 * task_means(jnp.where(positive, 1.0 - wrong, 0.0), data)
    mistaken, scored = task_means(wrong, data), counts(data, positive) > 0
    has_score = scored & ~jnp.isnan(mistaken)
    return summary(jnp.where(has_score, safe_ratio(hits, hits + mistaken), jnp.nan), scored, per_task)


@on_purpose
def log_loss(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    r"""Mean of $-\log p(y \mid x)$ where $p(y \mid x) = 1/(1 + e^{-y w^\top x})$.

    It is for predictions that are logarithms of odds, as those of `losses.Logistic` are; a model of another loss is
    refused, weights in an array are taken for such. Arguments as `error_rate`.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(2, dtype="f")], [np.array([1, -1])])
      >>> round(float(log_loss(np.array([[0.0, -np.log(3.0)]]), data)), 4)  # of probabilities 1/2 and 3/4
      0.4904
    """
    check.flag("log_loss", per_task=per_task)
    if (model := model_of(weights)) is not None and not model.logistic:
        raise ValueError(
            "log_loss: weights must be those of a model that has probabilities; train with losses.Logistic()."
        )
    z = predicted(weights, data)
    _check_signs("log_loss", data)
    return mean_over_tasks(jax.nn.softplus(-data.y * z), data, per_task)


def _wrong(owner: str, weights: Weights, data: TaskData) -> Array:
    """1 for every sample on the wrong side, ``[m, n]``; NaN where the prediction is."""
    z = predicted(weights, data)
    _check_signs(owner, data)
    return jnp.where(jnp.isnan(z), jnp.nan, jnp.where(z * data.y > 0, 0.0, jnp.ones_like(z)))


def _check_signs(owner: str, data: TaskData) -> None:
    needs = "labels -1 and +1 (map others with np.where(y == positive_class, 1, -1))"
    check_labels(owner, data, lambda y: np.abs(y) == 1, needs)
