"""Scores of a model on held-out data, per task and averaged over tasks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.linear import LinearModel
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.losses import Loss

Weights = Any  # an array ``[num_tasks, d]``, a `LinearModel`, or a `Solution`, which has one


@on_purpose
def error_rate(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Share of samples on the wrong side: sign(w'x) != y. A prediction of exactly 0 is wrong.

    Args:
      weights: ``[num_tasks, d]``, or ``[1, d]`` for a global model; or a solution or its model, whose tasks are found
        by their names.
      data: samples with labels -1 and +1.
      per_task: return every task's score ``[num_tasks]`` (NaN without samples), not the mean.

    Examples:
      >>> import numpy as np, jax.numpy as jnp, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(2, dtype="f"), np.eye(2, dtype="f")], [np.ones(2), -np.ones(2)])
      >>> float(error_rate(jnp.array([[1.0, 1.0], [1.0, -1.0]]), data))
      0.25
    """
    z = predicted(weights, data)
    wrong = jnp.where(z * data.y > 0, 0.0, jnp.ones_like(z))
    return mean_over_tasks(jnp.where(jnp.isnan(z), jnp.nan, wrong), data, per_task)


@on_purpose
def rmse(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Root mean squared error of the predictions w'x; arguments as `error_rate`."""
    check.flag("rmse", per_task=per_task)
    z = predicted(weights, data)
    return _summary(jnp.sqrt(_task_means((z - data.y) ** 2, data)), _counts(data) > 0, per_task)


@on_purpose
def mean_loss(weights: Weights, data: TaskData, loss: Loss, *, per_task: bool = False) -> Array:
    """Mean loss of the predictions w'x; differentiable, for `tune`. Other arguments as `error_rate`."""
    check.instance("mean_loss", "loss", loss, Loss, "losses.Hinge()")
    check.flag("mean_loss", per_task=per_task)
    loss.check_tasks(data.num_tasks)
    losses = loss.of_nodes(data.task).value(predicted(weights, data), data.y)
    counts = _counts(data).astype(losses.dtype)
    totals = data.to_tasks(jnp.sum(jnp.where(data.weight > 0, losses, 0.0), axis=1))
    means = safe_ratio(totals, counts)
    if per_task:
        return jnp.where(counts > 0, means, jnp.nan)
    # Not by way of NaN, whose derivative is NaN.
    return jnp.sum(means) / jnp.maximum(jnp.sum(counts > 0), 1).astype(losses.dtype)


@on_purpose
def absolute_error(weights: Weights, data: TaskData, loss: Loss, *, per_task: bool = False) -> Array:
    """Mean distance of labels from what the loss decides (`losses.Loss.decide`); other arguments as `error_rate`.

    Of ordered labels: by how many levels the prediction is off, on average.
    """
    decided = _decided(weights, data, loss)
    return mean_over_tasks(jnp.abs(decided - data.y), data, per_task)


@on_purpose
def quadratic_kappa(weights: Weights, data: TaskData, loss: Loss, *, per_task: bool = False) -> Array:
    r"""Agreement of ordered labels with what the loss decides, beyond that of chance: 1 if all are right.

    $$
    \kappa = 1 - \frac{\sum_i (\hat y_i - y_i)^2 / n}{\sum_{i,j} (\hat y_i - y_j)^2 / n^2}
    $$

    Cohen's kappa with weights that grow as the square of the distance. A task whose labels and predictions are all the
    same has no score. Other arguments as `error_rate`.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.array([[-2.0], [0.0], [2.0], [2.0]], "f")], [np.array([0, 1, 2, 1])])
      >>> round(float(mj.metrics.quadratic_kappa(np.ones((1, 1), "f"), data, mj.losses.Ordinal([-1.0, 1.0]))), 4)
      0.8
    """
    check.flag("quadratic_kappa", per_task=per_task)
    decided = _decided(weights, data, loss)
    mean, of_y = _task_means(decided, data), _task_means(data.y, data)
    spread = _task_means(decided**2, data) - mean**2 + _task_means(data.y**2, data) - of_y**2 + (mean - of_y) ** 2
    scored = spread > 0
    kappa = 1.0 - safe_ratio(_task_means((decided - data.y) ** 2, data), spread)
    return _summary(jnp.where(scored, kappa, jnp.nan), scored, per_task)


def _decided(weights: Weights, data: TaskData, loss: Loss) -> Array:
    """Decide by the loss for every sample, ``[m, n]``."""
    z = predicted(weights, data)
    check.instance("metrics", "loss", loss, Loss, "losses.Ordinal([-1.0, 1.0])")
    loss.check_tasks(data.num_tasks)
    return jnp.where(jnp.isnan(z), jnp.nan, loss.of_nodes(data.task).decide(z))


@on_purpose
def auc(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Area under the ROC curve: how often a positive outranks a negative, ties counting half.

    A task whose samples are all of one class has no score. Arguments as `error_rate`.
    """
    check.flag("auc", per_task=per_task)
    z, y, real = predicted(weights, data), data.y, data.weight > 0
    if data.shared:  # a task's samples are spread over nodes: look at all of them, task by task
        tasks = jnp.arange(data.num_tasks, dtype=data.task.dtype)
        own = real[None] & (data.task[None] == tasks[:, None])[:, :, None]
        scores, scored = jax.lax.map(lambda real: _auc(z.ravel(), y.ravel(), real.ravel()), own)
    else:
        m = data.num_tasks
        scores, scored = jax.lax.map(lambda node: _auc(*node), (z[:m], y[:m], real[:m]))
    return _summary(scores, scored, per_task)


def _auc(z: Array, y: Array, real: Array) -> tuple[Array, Array]:
    """The score, and whether there are samples of both classes to score."""
    positive, negative = real & (y > 0), real & (y <= 0)
    below = jnp.sort(jnp.where(negative, z, jnp.inf))
    wins = 0.5 * sum(jnp.searchsorted(below, z, side=side).astype(z.dtype) for side in ("left", "right"))
    pairs = jnp.sum(positive) * jnp.sum(negative)
    total = jnp.sum(jnp.where(positive, wins, 0.0))
    known = (pairs > 0) & ~jnp.any(real & jnp.isnan(z))  # NaN would outrank all, padding too
    return jnp.where(known, safe_ratio(total, pairs.astype(z.dtype)), jnp.nan), pairs > 0


def predicted(weights: Weights, data: TaskData) -> Array:
    """The predictions w'x of every sample, ``[m, n]``, by each task's weights or those of a global model.

    The weights of a solution or a model are those of the data's tasks, found by their names.
    """
    check.instance("metrics", "data", data, TaskData, "data.split(key, 0.75)[1]")
    if isinstance(known := getattr(weights, "model", weights), LinearModel):
        weights = jnp.asarray(known.weights_for(data), data.dtype)
    weights = check.floats("metrics", "weights", weights, ("num_tasks", data.num_features))
    if len(weights) == 1:
        weights = jnp.broadcast_to(weights, (data.num_tasks, weights.shape[1]))
    return data.predictions(weights)


def mean_over_tasks(values: Array, data: TaskData, per_task: bool) -> Array:
    """Average a number of every sample over each task, and over tasks unless `per_task`."""
    check.instance("metrics", "data", data, TaskData, "data.split(key, 0.75)[1]")
    check.flag("metrics", per_task=per_task)
    values = check.floats("metrics", "values", values, data.y.shape)
    return _summary(_task_means(values, data), _counts(data) > 0, per_task)


def _task_means(values: Array, data: TaskData) -> Array:
    """Mean over each task's real samples, NaN where there are none."""
    real = data.weight > 0
    total = data.to_tasks(jnp.sum(jnp.where(real, values, 0.0), axis=1))
    count = _counts(data).astype(values.dtype)
    return jnp.where(count > 0, safe_ratio(total, count), jnp.nan)


def _counts(data: TaskData) -> Array:
    """Real samples of each task."""
    return data.to_tasks(jnp.sum(data.weight > 0, axis=1, dtype=jnp.int32))


def _summary(scores: Array, scored: Array, per_task: bool) -> Array:
    """The mean over the tasks that there is something to score of; NaN where one of their scores is."""
    return scores if per_task else jnp.mean(scores, where=scored)
