"""How good a model is on held-out data: per task, then averaged over tasks.

A node without samples in the data has no score and does not count. Weights of one task (a
global model) are used for every node.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._data import TaskData
from mocha_jax._math import EXACT


def error_rate(weights: Array, data: TaskData, *, per_task: bool = False) -> Array:
    """Share of samples on the wrong side: sign(w'x) != y. A prediction of exactly 0 is wrong.

    Args:
      weights: ``[num_tasks, d]``, or ``[1, d]`` for a global model.
      data: samples with labels -1 and +1.
      per_task: return every node's score ``[m]`` (NaN without samples), not the mean.

    >>> import numpy as np, jax.numpy as jnp, mocha_jax as mj
    >>> data = mj.pack_tasks([np.eye(2, dtype="f"), np.eye(2, dtype="f")], [np.ones(2), -np.ones(2)])
    >>> float(error_rate(jnp.array([[1.0, 1.0], [1.0, -1.0]]), data))
    0.25
    """
    return _score(weights, data, per_task, lambda z, y, real: _mean(jnp.where(z * y > 0, 0.0, 1.0), real))


def rmse(weights: Array, data: TaskData, *, per_task: bool = False) -> Array:
    """Root mean squared error of the predictions w'x."""
    return _score(weights, data, per_task, lambda z, y, real: jnp.sqrt(_mean((z - y) ** 2, real)))


def auc(weights: Array, data: TaskData, *, per_task: bool = False) -> Array:
    """Area under the ROC curve: how often a positive outranks a negative, ties counting half.

    A node whose samples are all of one class has no score.
    """
    return _score(weights, data, per_task, _auc_of_node)


def _auc_of_node(z: Array, y: Array, real: Array) -> Array:
    positive, negative = real & (y > 0), real & (y <= 0)
    wins = (z[:, None] > z[None, :]).astype(z.dtype) + 0.5 * (z[:, None] == z[None, :]).astype(z.dtype)
    pairs = positive[:, None] & negative[None, :]
    return _mean(wins, pairs)


def _score(weights: Array, data: TaskData, per_task: bool, of_node: Callable[[Array, Array, Array], Array]) -> Array:
    weights = jnp.asarray(weights)
    own = jnp.broadcast_to(weights, (data.num_nodes, weights.shape[1])) if len(weights) == 1 else data.to_nodes(weights)
    z = jnp.einsum("mnd,md->mn", data.x, own, precision=EXACT)
    scores = jax.lax.map(lambda node: of_node(*node), (z, data.y, data.weight > 0))
    return scores if per_task else jnp.nanmean(scores)


def _mean(values: Array, real: Array) -> Array:
    """Mean over the real entries, NaN where there are none."""
    count = jnp.sum(real)
    total = jnp.sum(jnp.where(real, values, 0.0))
    return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(total.dtype), jnp.nan)
