"""Fits of folds: some at a time, on every device its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, each_device
from mocha_jax._data.splits_and_folds import class_sizes
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.progress import Bar

Given = TypeVar("Given")  # a tree of arrays that every fit needs
Fitted = tuple[Array, Array, Array]  # of all candidates: scores of tasks [c, num_tasks], residuals and rounds [c]


def room(owner: str, data: TaskData, trials: int, folds: int, chunk: int | None) -> tuple[int, NodeSharding | None]:
    """Say how many fits are done at the same time, by all devices, and on which."""
    # On a CPU one fit keeps a core busy, and several at once only push one another out of its cache.
    chunk = (1 if jax.default_backend() == "cpu" else folds) if chunk is None else chunk
    check.integer(owner, 1, chunk=chunk)
    # Each device does its own fits, unless all of them share the samples already.
    devices = 1 if data.sharding is not None else min(jax.local_device_count(), -(-trials * folds // chunk))
    return chunk * devices, _over(devices)


def alone(data: TaskData, label: np.ndarray, classes: int, groups: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Count each class in each task ``[num_tasks, classes]``, and mark samples that are alone in theirs ``[m, n]``."""
    real, task = np.asarray(data.weight) > 0, np.asarray(data.task)
    label = np.where(real, label, 0).astype(int)
    sizes = class_sizes(label, real, task, data.num_tasks, classes, None if groups is None else np.asarray(groups))
    # Of two samples, one of each class, neither is rare.
    single = (np.take_along_axis(sizes[task], label, 1) == 1) & (sizes[task].sum(1, keepdims=True) > 2)
    return sizes, real & single


def fold_by_fold(
    fit: Callable[[Array, Array], Fitted], trials: int, folds: int, size: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Do all fits: scores ``[trials, folds, c, num_tasks]``, residuals and rounds ``[trials, folds, c]``.

    Args:
      fit: does some of them: trial and fold of each ``[size]`` to arrays with such an axis.
      trials: how many.
      folds: of each trial.
      size: fits at a time.
      progress: whether to show a bar.
    """
    fitted = []
    with Bar(progress, total=trials * folds, done=0, unit="training") as bar:
        for trial, fold in _chunks(trials * folds, folds, size):
            fitted.append(jax.tree.map(np.asarray, fit(trial, fold)))
            bar.show(min(len(fitted) * len(fold), trials * folds), float(np.nanmean(fitted[-1][1])))
    all_of_them = (np.concatenate(a)[: trials * folds] for a in zip(*fitted, strict=True))
    scores, residuals, rounds = (a.reshape(trials, folds, *a.shape[1:]) for a in all_of_them)
    return scores, residuals, rounds


def several(
    one: Callable[[Given, Array, Array], Fitted],
    shared: Given,
    parts: Array,
    fold: Array,
    sharding: NodeSharding | None,
) -> Fitted:
    """Fit some folds at once, ``one(given, part, fold)`` each."""

    def some(shared: Given, parts: Array, fold: Array) -> Fitted:
        if len(fold) == 1:  # without the cost of mapping
            return jax.tree.map(lambda a: a[None], one(shared, parts[0], fold[0]))
        return jax.vmap(partial(one, shared))(parts, fold)

    return each_device(sharding, some, shared, parts, fold)


def _over(devices: int) -> NodeSharding | None:
    """Fits over so many of this process's devices; None: one after the other."""
    if devices == 1:
        return None
    mesh = jax.make_mesh((devices,), ("fits",), (AxisType.Auto,), devices=jax.local_devices()[:devices])
    return NodeSharding(mesh, ("fits",), False, devices)


def _chunks(total: int, folds: int, size: int) -> Iterator[tuple[Array, Array]]:
    """Trial and fold of each fit, so many at a time; the last ones are repeated where a chunk would be shorter."""
    for start in range(0, total, size):
        which = np.minimum(np.arange(start, start + size), total - 1)
        yield jnp.asarray(which // folds, jnp.int32), jnp.asarray(which % folds, jnp.int32)
