"""Predictions of several classes and their scores, per task and over tasks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.multiclass import require_probabilities
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.metrics import mean_over_tasks, predicted
from mocha_jax.metrics._means import check_labels

ClassWeights = Any  # an array ``[classes, num_tasks, d]``, an `OneVsRest`, or a `MulticlassModel`


class ClassScores(Pytree):
    """Scores of every class, ``[classes]`` or ``[num_tasks, classes]``; NaN where nothing is divided by."""

    precision: Array  # share of the samples said to be of a class that are
    recall: Array  # share of the samples of a class that are said to be
    f1: Array  # their harmonic mean
    samples: Array  # int32 how many are of the class
    names: tuple[Hashable, ...] | None = static(default=None)  # of the classes

    def __str__(self) -> str:
        if np.ndim(self.f1) != 1:
            return repr(self)
        names = [str(name) for name in (range(len(self.f1)) if self.names is None else self.names)]
        wide = max(5, *map(len, names))
        rows = zip(names, *(np.asarray(a) for a in (self.precision, self.recall, self.f1, self.samples)), strict=True)
        lines = [f"{'class':{wide}} precision  recall      f1 samples"]
        return "\n".join(lines + [f"{name:{wide}} {p:9.3f} {r:7.3f} {f:7.3f} {n:7d}" for name, p, r, f, n in rows])


@on_purpose
def said(weights: ClassWeights, data: TaskData) -> Array:
    """Return decision values of all classes and samples, ``[classes, m, n]``; a model's tasks are found by name."""
    check.instance("multiclass", "data", data, TaskData, "data.split(key, 0.75)[1]")
    own_classes, theirs = getattr(getattr(weights, "names", None), "classes", None), data.names.classes
    if own_classes is not None and theirs is not None and own_classes != theirs:
        raise ValueError("multiclass: the data's classes are not those of the model; pack it with like=train.")
    if hasattr(weights, "weights_for"):
        weights = jnp.asarray(weights.weights_for(data), data.dtype)
    weights = check.floats("multiclass", "weights", weights, ("classes", "num_tasks", data.num_features))
    if weights.shape[1] not in (1, data.num_tasks):
        raise ValueError(f"multiclass: weights must be of {data.num_tasks} tasks or of 1, got {weights.shape[1]}.")
    return _said(weights, data.unnamed())


@jax.jit
def _said(weights: Array, data: TaskData) -> Array:
    return lax.map(lambda w: predicted(w, data), weights)


@on_purpose
def probabilities(weights: ClassWeights, data: TaskData) -> Array:
    """Probabilities of the classes ``[m, n, classes]``."""
    return jnp.moveaxis(jnp.exp(_log_probabilities("predict_proba", weights, data)), 0, -1)


def _log_probabilities(owner: str, weights: ClassWeights, data: TaskData) -> Array:
    """Logarithms of the classes' probabilities, ``[classes, m, n]``."""
    z, calibration = said(weights, data), getattr(weights, "calibration", None)
    require_probabilities(owner, calibration is not None, getattr(weights, "logistic", True))
    if calibration is not None:
        slope, offset = jnp.asarray(calibration, z.dtype).T[:, :, None, None]
        z = slope * z + offset
    return jax.nn.log_softmax(jax.nn.log_sigmoid(z), axis=0)  # each sigmoid over the sum of all


def _require_classes(owner: str, data: TaskData, num_classes: int | None = None) -> None:
    """Refuse labels that are no classes, or, of so many known ones, none of these; unless they are traced."""
    needs = (
        "labels 0, 1, 2, ..."
        if num_classes is None
        else f"labels from 0 to {num_classes - 1}, the classes that weights are of"
    )
    most = np.inf if num_classes is None else num_classes - 1
    check_labels(owner, data, lambda y: (y >= 0) & (y <= most) & (y == np.floor(y)), needs)


def _classes_of(data: TaskData, num_classes: int) -> Array:
    """The class of every sample ``[m, n]`` int32; `num_classes` for an unknown class."""
    place = jnp.clip(data.y, 0, num_classes).astype(jnp.int32)
    return jnp.where(place.astype(data.y.dtype) == data.y, place, num_classes)


@on_purpose
def error_rate(weights: ClassWeights, data: TaskData, *, per_task: bool = False) -> Array:
    """The share of samples for which another class has a larger decision value; unknown classes count as wrong.

    Args:
      weights: ``[classes, num_tasks, d]``, or ``[classes, 1, d]`` for a global model; or a model, whose tasks are found
        by their names.
      data: samples with labels 0, 1, ..., classes - 1.
      per_task: return every task's score ``[num_tasks]`` (NaN without samples), not the mean.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(3, dtype="f")], [np.array([0, 1, 1])])
      >>> round(float(mj.multiclass.error_rate(np.eye(3)[:, None], data)), 4)
      0.3333
    """
    z = said(weights, data)
    _require_classes("error_rate", data)
    right = jnp.argmax(z, axis=0).astype(jnp.int32) == _classes_of(data, len(z))
    wrong = jnp.where(right, 0.0, jnp.ones_like(z[0]))
    return mean_over_tasks(jnp.where(jnp.isnan(z).any(0), jnp.nan, wrong), data, per_task)


@on_purpose
def log_loss(weights: ClassWeights, data: TaskData, *, per_task: bool = False) -> Array:
    """Mean of -log p of the samples' own classes.

    Probabilities are those of a calibrated model; else, and of an array, of the logistic loss: the sigmoid of what a
    class says over the sum of all. Arguments as `error_rate`.
    """
    log_p = _log_probabilities("log_loss", weights, data)
    _require_classes("log_loss", data, len(log_p))
    place = _classes_of(data, len(log_p))
    own = jnp.take_along_axis(log_p, place[None], axis=0, mode="fill", fill_value=-jnp.inf)[0]
    return mean_over_tasks(-own, data, per_task)


@on_purpose
def confusion(weights: ClassWeights, data: TaskData, *, per_task: bool = False) -> Array:
    """Count samples by their class, the row, and by that which says most, the column.

    A sample for which a model says NaN is counted nowhere. Arguments as `error_rate`.

    Returns:
      ``[classes, classes]`` int32, with `per_task` ``[num_tasks, classes, classes]``.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(3, dtype="f")], [np.array([0, 1, 1])])
      >>> mj.multiclass.confusion(np.eye(3)[:, None], data).tolist()
      [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    """
    check.flag("confusion", per_task=per_task)
    z = said(weights, data)
    classes = len(z)
    _require_classes("confusion", data, classes)
    place = _classes_of(data, classes) * classes + jnp.argmax(z, axis=0).astype(jnp.int32)
    counted = (data.weight > 0) & ~jnp.isnan(z).any(0)
    cells = jax.vmap(lambda cell, real: jnp.zeros(classes**2, jnp.int32).at[cell].add(real, mode="drop"))
    table = data.to_tasks(cells(place, counted.astype(jnp.int32))).reshape(-1, classes, classes)
    return table if per_task else jnp.sum(table, axis=0, dtype=jnp.int32)


@on_purpose
def class_scores(weights: ClassWeights, data: TaskData, *, per_task: bool = False) -> ClassScores:
    """Precision, recall and F1 of every class, of all samples together or of every task's.

    NaN where a model says NaN. Arguments as `error_rate`.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.eye(3, dtype="f")], [np.array([0, 1, 1])])
      >>> print(mj.multiclass.class_scores(np.eye(3)[:, None], data))
      class precision  recall      f1 samples
      0         1.000   1.000   1.000       1
      1         1.000   0.500   0.667       2
      2         0.000     nan   0.000       0
    """
    table = confusion(weights, data, per_task=per_task)
    own = jnp.diagonal(table, axis1=-2, axis2=-1)
    said_to_be, are = (jnp.sum(table, axis=axis, dtype=jnp.int32) for axis in (-2, -1))
    missed = mean_over_tasks(jnp.where(jnp.isnan(said(weights, data)).any(0), jnp.nan, data.weight), data, per_task)
    spoilt = jnp.isnan(missed)[..., None]

    def ratio(a: Array, b: Array) -> Array:
        share = safe_ratio(a.astype(data.dtype), b.astype(data.dtype))
        return jnp.where((b > 0) & ~spoilt, share, jnp.nan)

    names = data.names.classes if data.names.classes is not None and len(data.names.classes) == own.shape[-1] else None
    return ClassScores(ratio(own, said_to_be), ratio(own, are), ratio(2 * own, said_to_be + are), are, names)
