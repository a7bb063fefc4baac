"""Labels 0, 1, ... of several classes."""

from __future__ import annotations

import numpy as np

from mocha_jax._core import check
from mocha_jax._data.task_data import TaskData


def require_labels(owner: str, data: TaskData, count: int) -> None:
    """Refuse labels other than 0, 1, ..., count - 1; traced labels are not checked."""
    y, real = check.concrete(data.y), check.concrete(data.weight)
    if y is None or real is None:
        return
    labels = y[real > 0]
    if ((labels < 0) | (labels >= count) | (labels != labels.round())).any():
        raise ValueError(f"{owner}: labels must be 0, 1, ..., {count - 1}, got {check.shown(labels)}.")


def count_classes(owner: str, data: TaskData, classes: int | None) -> int:
    """The number of classes: as given, by their names, or one more than the largest label."""
    check.instance(owner, "data", data, TaskData, "pack_tasks(xs, ys)")
    y = np.where(np.asarray(data.weight) > 0, np.asarray(data.y), 0.0)
    if (y != np.round(y)).any() or y.min() < 0:
        raise ValueError(f"{owner}: labels must be 0, 1, ...; map yours with np.unique(y, return_inverse=True)[1].")
    least = int(y.max()) + 1
    if classes is None:
        return max(least, len(data.names.classes or ()))
    check.integer(owner, least, classes=classes)
    return int(classes)
