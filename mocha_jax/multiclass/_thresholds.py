r"""Ordered classes as one question per threshold.

With thresholds $\theta_1, \dots, \theta_{K-1}$ a label reaches k where $w^\top x > \theta_k$. Each
of these is a problem of two classes, and together they are one, in samples $(x, -s\,e_k)$ with labels $\pm 1$ and
weights $(w, \theta/s)$:

$$
\min_{W, \Theta}\; \sum_t\sum_i c_{ti} \sum_{k=1}^{K-1} \varphi\bigl(s_{tik}(w_t^\top x_{ti} - \theta_{tk})\bigr)
+ R\bigl(W, \Theta/s\bigr), \qquad s_{tik} = +1 \text{ where } y_{ti} \ge k, \text{ else } -1 .
$$

It is convex in both, so that duals, certificates and every algorithm are those of the loss $\varphi$, the hinge or any
other for two classes; with the hinge it is `losses.Ordinal`, whose thresholds are given. Every task has its own
thresholds, which the regularizer draws together as it does the weights. They are penalised like weights, and the less
the larger s is. It takes K-1 times the samples: with thresholds known beforehand `losses.Ordinal` reads each once.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax.losses import Ordinal, PerTask
from mocha_jax.multiclass._each_class import require_labels


@on_purpose
def by_threshold(data: TaskData, levels: int, *, size: float = 1.0) -> TaskData:
    """Ask of every sample whether its label exceeds each threshold.

    Args:
      data: samples ``[m, n, d]`` with labels 0, 1, ..., levels - 1.
      levels: the number of labels, K.
      size: s, the size of the feature that stands for a threshold; 10 makes it a hundred times cheaper.

    Returns:
      Samples ``[m, n (K-1), d + K-1]`` with labels -1 and +1, each threshold's after another.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> x = np.linspace(-3, 3, 60, dtype="f")[:, None]
      >>> data = mj.pack_tasks([x, x], [np.digitize(x[:, 0], [-1.0, 2.0]), np.digitize(x[:, 0], [0.0, 1.0])])
      >>> asked = mj.multiclass.by_threshold(data, 3)
      >>> problem = mj.Problem(asked, mj.losses.Hinge(), mj.regularizers.Independent(0.01))
      >>> weights, loss = mj.multiclass.thresholds_of(mj.solve(problem, tol=1e-3).weights, 3)
      >>> float(mj.metrics.absolute_error(weights, data, loss))
      0.0
    """
    check.instance("by_threshold", "data", data, TaskData, "pack_tasks(xs, ys)")
    check.integer("by_threshold", 2, levels=levels)
    check.scalar("by_threshold", size=size)
    check.positive("by_threshold", size=size)
    check.representable("by_threshold", {"size": size}, data.x.dtype)
    require_labels("by_threshold", data, levels)
    asked, (m, n, d) = levels - 1, data.x.shape
    thresholds = jnp.arange(asked, dtype=data.dtype)
    exceeds = jnp.where(data.y[:, None] > thresholds[None, :, None], jnp.ones((), data.dtype), -1.0)  # [m, K-1, n]
    feature = -jnp.asarray(size, data.x.dtype) * jnp.eye(asked, dtype=data.x.dtype)
    x = jnp.concatenate(
        [
            jnp.broadcast_to(data.x[:, None], (m, asked, n, d)),
            jnp.broadcast_to(feature[None, :, None], (m, asked, n, asked)),
        ],
        axis=3,
    )
    weight = jnp.broadcast_to(data.weight[:, None], (m, asked, n))
    return data.replace(
        x=x.reshape(m, asked * n, d + asked), y=exceeds.reshape(m, -1), weight=weight.reshape(m, -1),
        names=data.names.replace(features=None, classes=None), intercept=0.0,
    )  # fmt: skip


@on_purpose
def thresholds_of(weights: Array, levels: int, *, size: float = 1.0) -> tuple[Array, PerTask]:
    """Take weights of `by_threshold`'s samples apart: those of the samples, and the loss with every task's thresholds.

    Args:
      weights: ``[num_tasks, d + K-1]``.
      levels: K, as given to `by_threshold`.
      size: s, as given to `by_threshold`.
    """
    check.integer("thresholds_of", 2, levels=levels)
    check.scalar("thresholds_of", size=size)
    check.positive("thresholds_of", size=size)
    weights = check.floats("thresholds_of", "weights", weights, ("num_tasks", "d"))
    asked = levels - 1
    if weights.shape[1] <= asked:
        raise ValueError(
            f"thresholds_of: weights must have more than {asked} columns, the last of which are thresholds."
        )
    # In order: where the data leaves open which is larger, rounding must not decide.
    thresholds = jnp.sort(jnp.asarray(size, weights.dtype) * weights[:, -asked:], axis=1)
    numbers = check.concrete(thresholds)
    if numbers is not None and not np.isfinite(numbers).all():
        raise ValueError("thresholds_of: weights times size must be finite, got infinity or NaN.")
    return weights[:, :-asked], PerTask(Ordinal([thresholds[:, k] for k in range(asked)]))
