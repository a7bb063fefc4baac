"""Scores of predictions of numbers, or of the labels that a loss decides, per task and averaged over tasks."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.losses import Loss
from mocha_jax.metrics._means import (
    Weights,
    check_labels,
    counts,
    mean_over_tasks,
    model_of,
    predicted,
    summary,
    task_largest,
    task_means,
)

# Where |y - mu| is below so much of y + mu, a deviance is a series of so many terms, which is then exact in float64.
_NEAR, _TERMS = 0.2, 11


@on_purpose
def rmse(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Root mean squared error of the predictions w'x; arguments as `error_rate`."""
    check.flag("rmse", per_task=per_task)
    z = predicted(weights, data)
    return summary(jnp.sqrt(task_means((z - data.y) ** 2, data)), counts(data) > 0, per_task)


@on_purpose
def mean_loss(weights: Weights, data: TaskData, loss: Loss, *, per_task: bool = False) -> Array:
    """Mean loss of the predictions w'x; differentiable, for `tune`. Other arguments as `error_rate`."""
    check.instance("mean_loss", "data", data, TaskData, "data.split(key, 0.75)[1]")
    check.instance("mean_loss", "loss", loss, Loss, "losses.Hinge()")
    check.flag("mean_loss", per_task=per_task)
    loss.check_tasks(data.num_tasks)
    losses = loss.of_nodes(data.task).value(predicted(weights, data), data.y)
    count = counts(data).astype(losses.dtype)
    totals = data.to_tasks(jnp.sum(jnp.where(data.weight > 0, losses, 0.0), axis=1))
    means = safe_ratio(totals, count)
    if per_task:
        return jnp.where(count > 0, means, jnp.nan)
    # Not by way of NaN, whose derivative is NaN.
    return jnp.sum(means) / jnp.maximum(jnp.sum(count > 0), 1).astype(losses.dtype)


@on_purpose
def absolute_error(weights: Weights, data: TaskData, loss: Loss | None = None, *, per_task: bool = False) -> Array:
    """Mean distance of labels from the predictions w'x, or from what a loss decides by them (`losses.Loss.decide`).

    Of ordered labels, with the loss that has their thresholds: by how many levels the prediction is off, on average.
    Other arguments as `error_rate`.
    """
    if loss is None:
        model = model_of(weights)
        if model is not None and set(model.decides) != {"value"}:
            raise ValueError(
                "absolute_error: loss must be given for a model whose predictions do not stand for themselves, such as "
                "that of losses.Ordinal; pass problem.loss."
            )
        return mean_over_tasks(jnp.abs(predicted(weights, data) - data.y), data, per_task)
    return mean_over_tasks(jnp.abs(_decided(weights, data, loss) - data.y), data, per_task)


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
    error = decided - data.y
    spread = _variance(decided, data) + _variance(data.y, data) + task_means(error, data) ** 2
    scored = spread > 0
    kappa = 1.0 - safe_ratio(task_means(error**2, data), spread)
    return summary(jnp.where(scored, kappa, jnp.nan), scored, per_task)


def _decided(weights: Weights, data: TaskData, loss: Loss) -> Array:
    """Decide by the loss for every sample, ``[m, n]``."""
    z = predicted(weights, data)
    check.instance("metrics", "loss", loss, Loss, "losses.Ordinal([-1.0, 1.0])")
    loss.check_tasks(data.num_tasks)
    return jnp.where(jnp.isnan(z), jnp.nan, loss.of_nodes(data.task).decide(z))


@on_purpose
def r2(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    r"""Share of the variation of labels that predictions account for.

    $$
    R^2 = 1 - \frac{\sum_i (y_i - z_i)^2}{\sum_i (y_i - \bar y)^2}
    $$

    1 if all are right, 0 for a model that predicts the mean of the task's labels, negative for a worse one. A task
    whose labels are all the same has no score. Arguments as `error_rate`, labels any numbers.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.array([[1.0], [2.0], [3.0]], "f")], [np.array([2.0, 4.0, 6.0])])
      >>> float(r2(np.array([[2.0]]), data)), float(r2(np.array([[1.5]]), data))
      (1.0, 0.5625)
    """
    check.flag("r2", per_task=per_task)
    return _explained(predicted(weights, data) - data.y, data, per_task)


@on_purpose
def explained_variance(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    """Share of the labels' variance that predictions account for: as `r2`, but their mean may be off.

    A task whose labels are all the same has no score. Arguments as `error_rate`, labels any numbers.
    """
    check.flag("explained_variance", per_task=per_task)
    return _explained(_centred(predicted(weights, data) - data.y, data), data, per_task)


def _explained(error: Array, data: TaskData, per_task: bool) -> Array:
    """Compare errors ``[m, n]`` with the variation of labels."""
    variation = _variance(data.y, data)
    scored = variation > 0
    score = 1.0 - safe_ratio(task_means(error**2, data), variation)
    return summary(jnp.where(scored, score, jnp.nan), scored, per_task)


def _variance(values: Array, data: TaskData) -> Array:
    """The variance of every task's values ``[m, n]``; exactly 0 where all are the label that all samples have."""
    largest = data.to_nodes(task_largest(data.y, data))[:, None]
    return task_means(_centred(values - largest, data) ** 2, data)


def _centred(values: Array, data: TaskData) -> Array:
    return values - data.to_nodes(task_means(values, data))[:, None]


@on_purpose
def poisson_deviance(weights: Weights, data: TaskData, *, per_task: bool = False) -> Array:
    r"""Mean deviance of counts from predicted rates, $2(y \log(y/\mu) - y + \mu)$ with $\log \mu = w^\top x$.

    It is for predictions that are logarithms of rates, as those of a Poisson loss $e^z - yz$ are. Labels are counts, or
    any numbers from 0 up; others are refused, but for inside a transformation. Arguments as `error_rate`.
    """
    check.flag("poisson_deviance", per_task=per_task)
    z = predicted(weights, data)
    check_labels("poisson_deviance", data, lambda y: y >= 0, "labels from 0 up")
    return mean_over_tasks(2.0 * _beyond_rate(data.y, z), data, per_task)


def _beyond_rate(y: Array, z: Array) -> Array:
    r"""Compute $y \log(y/\mu) - y + \mu$ with $\mu = e^z$, which is 0 where y is the rate.

    Near there its terms cancel. With $v = (y - \mu)/(y + \mu)$ it is
    $(y - \mu) v + 2 y \sum_{k \ge 1} v^{2k+1} / (2k+1)$, where nothing does (Loader 2000).
    """
    rate = jnp.exp(z)
    apart, both = y - rate, y + rate
    near = jnp.abs(apart) < _NEAR * both
    v = safe_ratio(jnp.where(near, apart, 0.0), both)
    series = jnp.zeros_like(v)
    for k in range(_TERMS, 0, -1):
        series = v**2 * (series + 1.0 / (2 * k + 1))
    far = jnp.where(y > 0, y * (jnp.log(jnp.where(y > 0, y, 1.0)) - z), 0.0) - apart
    return jnp.where(near, apart * v + 2.0 * y * v * series, far)
