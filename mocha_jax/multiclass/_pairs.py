r"""One problem for all classes at once: a loss of every pair of a sample's class and another.

With weights $w_{tk}$ for every task and class, and a loss $\varphi$ of the margin,

$$
\min_{W}\; \sum_t\sum_i c_{ti} \sum_{k \ne y_{ti}} \varphi\bigl((w_{t y_{ti}} - w_{tk})^\top x_{ti}\bigr) + R(W),
\qquad W \in \mathbb{R}^{\text{tasks} \times Kd}.
$$

With the hinge it is the support vector machine of Weston and Watkins (1999). Each term is a loss of two classes, of the
lifted sample $(e_{y} - e_k) \otimes x$ with Kd features and the label +1, so that duals, certificates, kernels and
every algorithm are those of $\varphi$. A regularizer that learns a relationship learns one for all classes, where
`one_vs_rest` learns one for each.

The softmax, and the hinge of Crammer and Singer (2001), need a vector of K duals for every sample, and a step that
minimises over a simplex. Everything here keeps one dual number a sample, so they are not there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.solution import Solution
from mocha_jax._model.multiclass import MulticlassModel
from mocha_jax._problem.problem import Problem
from mocha_jax._problem.to_model import slopes_and_intercepts
from mocha_jax.multiclass._each_class import require_labels


@on_purpose
def by_pair(data: TaskData, classes: int) -> TaskData:
    r"""Lift every sample to the differences between its class and each other one.

    Split first and lift then: parts of lifted data have some of the pairs of a sample.

    Args:
      data: samples ``[m, n, d]`` with labels 0, 1, ..., classes - 1.
      classes: the number of classes, K.

    Returns:
      Samples $(e_y - e_k) \otimes x$ ``[m, n (K-1), K d]`` with labels +1: K (K-1) times the memory. The pairs of one
      sample are n rows apart.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(60, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [x.argmax(1) for x in xs], loss_scaling="task_mean")
      >>> pairs = mj.multiclass.by_pair(data, 3)
      >>> solution = mj.solve(mj.Problem(pairs, mj.losses.Hinge(), mj.regularizers.Probabilistic(1e-3)), tol=1e-2)
      >>> weights = mj.multiclass.weights_of_classes(solution.weights, 3)
      >>> weights.shape, bool(mj.multiclass.error_rate(weights, data) < 0.1)
      ((3, 4, 3), True)
    """
    check.instance("by_pair", "data", data, TaskData, "pack_tasks(xs, ys)")
    check.integer("by_pair", 2, classes=classes)
    require_labels("by_pair", data, classes)
    (m, n, d), others = data.x.shape, int(classes) - 1
    y = jnp.where(data.weight > 0, data.y, 0.0).astype(jnp.int32)[:, None]
    rival = (y + jnp.arange(1, classes, dtype=jnp.int32)[None, :, None]) % classes  # [m, K-1, n]
    lifted = jax.nn.one_hot(y, classes, dtype=data.x.dtype) - jax.nn.one_hot(rival, classes, dtype=data.x.dtype)
    x = lifted[..., None] * data.x[:, None, :, None]
    rows = (m, others * n)
    weight = jnp.broadcast_to(data.weight[:, None], (m, others, n)).reshape(rows)
    names = data.names.replace(features=None, classes=None)
    return data.replace(
        x=x.reshape(*rows, classes * d), y=jnp.ones(rows, data.dtype), weight=weight, names=names, intercept=0.0
    )


@on_purpose
def weights_of_classes(weights: Array, classes: int) -> Array:
    """Take weights of `by_pair`'s samples apart, ``[num_tasks, K d]`` to those of classes ``[K, num_tasks, d]``."""
    check.integer("weights_of_classes", 2, classes=classes)
    weights = check.floats("weights_of_classes", "weights", weights, ("num_tasks", "d"))
    if weights.shape[1] % classes:
        raise ValueError(
            f"weights_of_classes: weights must have a multiple of classes={classes} columns, got {weights.shape[1]}."
        )
    return jnp.moveaxis(weights.reshape(len(weights), classes, -1), 1, 0)


@on_purpose
def pair_model(solution: Solution[Problem], data: TaskData) -> MulticlassModel:
    """The model of a problem of `by_pair`'s samples: it predicts by name and contains no samples.

    Args:
      solution: of the problem of lifted samples.
      data: the samples that were lifted, for their names.
    """
    check.instance("pair_model", "solution", solution, Solution, "solve(problem)")
    check.instance("pair_model", "data", data, TaskData, "what by_pair was given")
    classes, rest = divmod(solution.weights.shape[1], data.num_features)
    if rest or classes < 2 or solution.problem.data.num_tasks not in (1, data.num_tasks):
        raise ValueError("pair_model: data must be what by_pair was given for this solution; its shape is another one.")
    weights = np.asarray(weights_of_classes(solution.weights, classes))
    slopes, intercept = slopes_and_intercepts(weights, data)
    names = data.names if len(data.names.classes or ()) in (0, classes) else data.names.replace(classes=None)
    if solution.problem.data.num_tasks < data.num_tasks:
        names = names.replace(tasks=None)
    return MulticlassModel(slopes, intercept, names, method="by_pair", trained=solution.model.trained)
