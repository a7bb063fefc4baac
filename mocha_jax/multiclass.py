r"""More than two classes with models for two: one against the rest, or of ordered ones, one question per threshold.

**Ordered classes.** With thresholds $\theta_1, \dots, \theta_{K-1}$ a label reaches k where $w^\top x > \theta_k$. Each
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

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Relation
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.fallback import or_by_loops
from mocha_jax._driver.solve import solve
from mocha_jax._problem.certificate import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Ordinal, PerTask
from mocha_jax.metrics import mean_over_tasks, predicted

__all__ = [
    "by_threshold",
    "one_vs_rest",
    "OneVsRest",
    "thresholds_of",
]


def __dir__() -> list[str]:
    return __all__


class OneVsRest(Pytree):
    """A model for every class; the class whose model says most is predicted."""

    weights: Array  # [classes, num_tasks, d]
    relation: Relation  # Omega of each; None where it is given
    certificate: Certificate  # of each, [classes, ...]
    rounds: Array  # [classes] int32

    def predict(self, data: TaskData) -> Array:
        """The class of every sample, ``[m, n]`` int32."""
        return jnp.argmax(self._says(data), axis=0).astype(jnp.int32)

    def error_rate(self, data: TaskData, *, per_task: bool = False) -> Array:
        """Share of wrong classes, mean over tasks; of every task with `per_task`.

        NaN without samples, or where a model predicts NaN.
        """
        says = self._says(data)
        wrong = (jnp.argmax(says, axis=0).astype(jnp.int32) != data.y.astype(jnp.int32)).astype(data.dtype)
        return mean_over_tasks(jnp.where(jnp.isnan(says).any(0), jnp.nan, wrong), data, per_task)

    def _says(self, data: TaskData) -> Array:
        """Predict every sample by every model, ``[classes, m, n]``."""
        return lax.map(lambda w: predicted(w, data), self.weights)


@on_purpose
def one_vs_rest(
    data: TaskData,
    make: Callable[[TaskData], Problem],
    algorithm: Algorithm[Problem] | None = None,
    *,
    classes: int | None = None,
    key: Array | None = None,
    tol: float = 1e-3,
    max_rounds: int = 500,
    record_every: int = 5,
) -> OneVsRest:
    """Train a model for each class against all others; one compiled call for all classes.

    Args:
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1.
      algorithm: default `Mocha()`.
      classes: how many; default one more than the largest label.
      key: a JAX random key; default ``jax.random.key(0)``.
      tol: relative gap at which to stop.
      max_rounds: of each model.
      record_every: rounds between looks at the gap.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(60, 3)).astype("f") for _ in range(4)]
      >>> data = mj.pack_tasks(xs, [x.argmax(1) for x in xs], loss_scaling="task_mean")
      >>> def hinge(data):
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(1e-3))
      >>> found = mj.one_vs_rest(data, hinge)
      >>> found.weights.shape, bool(found.error_rate(data) < 0.1)
      ((3, 4, 3), True)
    """
    check.instance("one_vs_rest", "data", data, TaskData, "pack_tasks(xs, ys)")
    check.function("one_vs_rest", "make", make, "lambda data: Problem(data, loss, regularizer)")
    if algorithm is not None:
        check.instance("one_vs_rest", "algorithm", algorithm, Algorithm, "Mocha()")
    check.integer("one_vs_rest", 1, max_rounds=max_rounds, record_every=record_every)
    max_rounds, record_every = int(max_rounds), int(record_every)
    check.scalar("one_vs_rest", tol=tol)
    check.nonnegative("one_vs_rest", tol=tol)
    real = np.asarray(data.weight) > 0
    y = np.where(real, np.asarray(data.y), 0.0)
    if (y != np.round(y)).any() or y.min() < 0:
        raise ValueError("one_vs_rest: labels must be 0, 1, ...; map yours with np.unique(y, return_inverse=True)[1].")
    count = int(y.max()) + 1 if classes is None else classes
    check.integer("one_vs_rest", int(y.max()) + 1, classes=count)
    key = jax.random.key(0) if key is None else key
    check.key("one_vs_rest", key)
    labels = jnp.asarray(np.where(y[None] == np.arange(count)[:, None, None], 1.0, -1.0), data.dtype)

    @jax.jit
    def train(algorithm: Algorithm[Problem], data: TaskData, labels: Array) -> OneVsRest:
        def one(y: Array) -> OneVsRest:
            problem = make(data.replace(y=y))
            check.instance("one_vs_rest", "what make returns", problem, Problem, "Problem(data, loss, regularizer)")
            s = solve(problem, algorithm, key=key, tol=tol, max_rounds=max_rounds, record_every=record_every)
            return OneVsRest(s.weights, s.relation, s.certificate, jnp.asarray(s.rounds, jnp.int32))

        return lax.map(one, labels)

    algorithm = Mocha() if algorithm is None else algorithm
    first = make(data.replace(y=labels[0]))
    return or_by_loops(first, algorithm, lambda by: train(by, data.unnamed(), labels))


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
    y, real = check.concrete(data.y), check.concrete(data.weight)
    if y is not None and real is not None:
        labels = y[real > 0]
        if ((labels < 0) | (labels >= levels) | (labels != labels.round())).any():
            raise ValueError(f"by_threshold: labels must be 0, 1, ..., {levels - 1}, got {check.shown(labels)}.")
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
    return data.replace(x=x.reshape(m, asked * n, d + asked), y=exceeds.reshape(m, -1), weight=weight.reshape(m, -1))


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
    known = check.concrete(thresholds)
    if known is not None and not np.isfinite(known).all():
        raise ValueError("thresholds_of: weights times size must be finite, got infinity or NaN.")
    return weights[:, :-asked], PerTask(Ordinal([thresholds[:, k] for k in range(asked)]))
