"""A model from the weights of a convex problem."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._data.moments import Scaling
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.base import HowTrained
from mocha_jax._model.linear import LinearModel
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Regularizer


class _Affine(Protocol):
    """A record that says how its samples were changed."""

    @property
    def intercept(self) -> float: ...

    @property
    def scaling(self) -> Scaling | None: ...


def linear_model(problem: Problem, weights: Array, trained: HowTrained) -> LinearModel:
    """The weights of every task with their names, the meaning of predictions, and the record of training.

    Args:
      problem: what was solved.
      weights: W ``[num_tasks, d]``.
      trained: what else to say of the training, e.g. the accuracy that was reached.
    """
    data, m = problem.data, problem.data.num_tasks
    slopes, intercept = slopes_and_intercepts(_completed(np.asarray(weights), data), data)
    if data.scaling is not None:
        trained = {**trained, "standardized": data.scaling.by}
    losses = [problem.loss.of_task(t) for t in range(m)]
    return LinearModel(
        slopes, intercept, data.names, tuple(loss.decides for loss in losses), _thresholds(losses),
        all(loss.log_odds for loss in losses),
        {**how_trained(problem.loss, problem.regularizer), **trained},
    )  # fmt: skip


def _completed(weights: np.ndarray, data: TaskData) -> np.ndarray:
    """The weights, and the mean of the others' slopes for tasks whose samples say nothing of slopes.

    A single sample minus its own mean is 0, and tells nothing of slopes. A regularizer that couples tasks may give this
    task slopes all the same: they are kept. Where they are 0 too, the task would predict its one label for any sample.
    """
    if data.scaling is None or data.scaling.by == "pooled" or check.hidden(data.x) or len(weights) < 2:
        return weights
    d = data.num_slopes
    informative = np.asarray(data.to_tasks(jnp.sum(jnp.abs(data.x[..., :d]), axis=1))).any(axis=1)
    size = np.abs(weights[:, :d]).max(axis=1)
    lost = ~informative & (size <= 1e-3 * size.max(where=informative, initial=0.0))
    if not lost.any() or not informative.any():
        return weights
    slopes = np.where(lost[:, None], weights[informative, :d].mean(axis=0), weights[:, :d])
    return np.concatenate([slopes, weights[:, d:]], axis=1)


def slopes_and_intercepts(weights: np.ndarray, data: _Affine) -> tuple[np.ndarray, np.ndarray]:
    """Slopes ``[..., num_tasks, d]`` and intercepts ``[..., num_tasks]``, in the units that the samples had at first.

    Args:
      weights: ``[..., num_tasks, d]`` of samples as they are in `data`.
      data: whose `intercept` and `scaling` they have.
    """
    slopes, intercept = weights, np.zeros(weights.shape[:-1], weights.dtype)
    if data.intercept:
        slopes, intercept = weights[..., :-1], data.intercept * weights[..., -1]
    return (slopes, intercept) if data.scaling is None else data.scaling.raw(slopes, intercept)


def how_trained(loss: Loss | None, regularizer: Regularizer | None, **more: object) -> dict[str, str]:
    """Describe what trained a model, in texts; `more` are other records."""
    records = {"loss": loss, "regularizer": regularizer, **more}
    library = f"mocha_jax {importlib.import_module('mocha_jax').__version__}"
    return {"library": library, **{name: _described(each) for name, each in records.items() if each is not None}}


def _thresholds(losses: list[Any]) -> np.ndarray | None:
    """Thresholds of every task ``[num_tasks, levels - 1]``; infinite where there are fewer."""
    each = [loss.thresholds if loss.decides == "level" else () for loss in losses]
    if not (most := max(map(len, each))):
        return None
    return np.array([[*map(float, own), *[np.inf] * (most - len(own))] for own in each])


def _described(record: object) -> str:
    """A record in a line: numbers as they are, arrays by their shape."""
    short = jax.tree.map(lambda leaf: leaf if np.ndim(leaf) else float(f"{float(leaf):.7g}"), record)
    return repr(short)
