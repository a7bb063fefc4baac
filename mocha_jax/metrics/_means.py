"""Predictions of every sample, and means over the samples of a task: the parts of all scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.linear import LinearModel
from mocha_jax._numerics.math import safe_ratio

Weights = Any  # an array ``[num_tasks, d]``, a `LinearModel`, or a `Solution`, which has one


def predicted(weights: Weights, data: TaskData) -> Array:
    """The predictions w'x of every sample, ``[m, n]``, by each task's weights or those of a global model.

    The weights of a solution or a model are those of the data's tasks, found by their names.
    """
    check.instance("metrics", "data", data, TaskData, "data.split(key, 0.75)[1]")
    if (model := model_of(weights)) is not None:
        weights = jnp.asarray(model.weights_for(data), data.dtype)
    weights = check.floats("metrics", "weights", weights, ("num_tasks", data.num_features))
    if len(weights) == 1:
        weights = jnp.broadcast_to(weights, (data.num_tasks, weights.shape[1]))
    return data.predictions(weights)


def model_of(weights: Weights) -> LinearModel | None:
    """The model that weights are given by; None where they are an array."""
    model = getattr(weights, "model", weights)
    return model if isinstance(model, LinearModel) else None


def mean_over_tasks(values: Array, data: TaskData, per_task: bool) -> Array:
    """Average a number of every sample over each task, and over tasks unless `per_task`."""
    check.instance("metrics", "data", data, TaskData, "data.split(key, 0.75)[1]")
    check.flag("metrics", per_task=per_task)
    values = check.floats("metrics", "values", values, data.y.shape)
    return summary(task_means(values, data), counts(data) > 0, per_task)


def task_means(values: Array, data: TaskData, among: Array | None = None) -> Array:
    """Mean over each task's real samples, or over some ``[m, n]`` among them; NaN without any."""
    real = data.weight > 0 if among is None else (data.weight > 0) & among
    total = data.to_tasks(jnp.sum(jnp.where(real, values, 0.0), axis=1))
    count = counts(data, among).astype(values.dtype)
    return jnp.where(count > 0, safe_ratio(total, count), jnp.nan)


def task_largest(values: Array, data: TaskData) -> Array:
    """The largest number of each task's real samples; minus infinity without any."""
    largest = jnp.max(jnp.where(data.weight > 0, values, -jnp.inf), axis=1)
    if data.shared:
        largest = jax.ops.segment_max(largest, data.task, data.num_tasks)
    return data.constrain_tasks(largest[: data.num_tasks])


def counts(data: TaskData, among: Array | None = None) -> Array:
    """Real samples of each task, or how many of some ``[m, n]`` are."""
    real = data.weight > 0 if among is None else (data.weight > 0) & among
    return data.to_tasks(jnp.sum(real, axis=1, dtype=jnp.int32))


def summary(scores: Array, scored: Array, per_task: bool) -> Array:
    """The mean over the tasks that there is something to score of; NaN where one of their scores is."""
    return scores if per_task else jnp.mean(scores, where=scored)


def task_by_task(
    score: Callable[[Array, Array, Array], tuple[Array, Array]], weights: Weights, data: TaskData, per_task: bool
) -> Array:
    """A score that looks at all samples of a task together.

    Args:
      score: of predictions, labels and marks of real samples, ``[n]`` each; returns the score, and whether there is
        something to score.
      weights: see `predicted`.
      data: the samples.
      per_task: return every task's score.
    """
    z, y, real = predicted(weights, data), data.y, data.weight > 0
    if data.shared:  # a task's samples are spread over nodes: look at all of them, task by task
        tasks = jnp.arange(data.num_tasks, dtype=data.task.dtype)
        own = real[None] & (data.task[None] == tasks[:, None])[:, :, None]
        scores, scored = jax.lax.map(lambda real: score(z.ravel(), y.ravel(), real.ravel()), own)
    else:
        m = data.num_tasks
        scores, scored = jax.lax.map(lambda node: score(*node), (z[:m], y[:m], real[:m]))
    return summary(scores, scored, per_task)


def check_labels(owner: str, data: TaskData, admits: Callable[[np.ndarray], np.ndarray], needs: str) -> None:
    """Refuse labels for which a score is meaningless; traced labels are not checked."""
    y, weight, task = (check.of_this_process(a) for a in (data.y, data.weight, data.task))
    if y is None or weight is None or task is None:
        return
    wrong = ~admits(y.astype(np.float64)) & (weight > 0)
    if wrong.any():
        node, row = np.argwhere(wrong)[0]
        which = data.names.task(int(task[node]))
        raise ValueError(f"{owner}: data must have {needs}, but {which} has label {float(y[node, row]):g}.")
