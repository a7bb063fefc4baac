"""Parts of the samples: training and test, folds, or those that are marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.splits import dealt, draws, stratified
from mocha_jax._numerics.math import safe_ratio

if TYPE_CHECKING:
    from mocha_jax._data.task_data import TaskData


def split(data: TaskData, key: Array, fraction: float, stratify: bool) -> tuple[TaskData, TaskData]:
    """See `TaskData.split`."""
    check.scalar("TaskData.split", fraction=fraction)
    check.in_unit_interval("TaskData.split", open_left=True, open_right=True, fraction=fraction)
    check.flag("TaskData.split", stratify=stratify)
    bits, real = draws(key, *data.y.shape), np.asarray(data.weight) > 0
    labels = np.asarray(data.y) if stratify else np.zeros(data.y.shape)
    first = stratified(labels, bits, real, fraction)
    return _packed(data, first), _packed(data, real & ~first)


def folds(data: TaskData, key: Array, count: int, groups: ArrayLike | None) -> Array:
    """See `TaskData.folds`."""
    check.integer("TaskData.folds", 2, count=count)
    if groups is not None:
        given, groups = groups, check.concrete(groups)
        if groups is None or groups.shape != data.y.shape or groups.dtype.kind not in "iu":
            raise ValueError(
                f"TaskData.folds: groups must be integers [m, n] = {data.y.shape}, got {check.shown(given)}."
            )
    real = np.asarray(data.weight) > 0
    most = int(np.bincount(np.asarray(data.task), real.sum(axis=1)).max())
    if count > most:
        raise ValueError(
            f"TaskData.folds: there must be at most {most} folds, as many as the largest task has samples, got {count}."
        )
    bits = draws(key, *data.y.shape)
    return jnp.asarray(dealt(np.asarray(data.y), bits, real, count, groups))


def keep(data: TaskData, rows: Array) -> TaskData:
    """See `TaskData.keep`."""
    rows = check.marks("TaskData.keep", "rows", rows, data.y.shape)
    relative = safe_ratio(data.weight, data.base_weight())
    part = data.replace(weight=jnp.where(rows & (data.weight > 0), jnp.ones_like(data.weight), 0.0))
    return part.replace(weight=part.base_weight() * relative)


def _packed(data: TaskData, keep: np.ndarray) -> TaskData:
    """Keep some rows of each node, packed to the front."""
    n = max(int(keep.sum(1).max()), 1)
    order = np.argsort(~keep, axis=1, kind="stable")[:, :n]
    rows = np.arange(data.num_nodes)[:, None], order
    kept = keep[rows]
    old, weight = np.asarray(data.base_weight())[rows], np.asarray(data.weight)[rows]
    part = data.replace(
        x=jnp.asarray(np.asarray(data.x)[rows] * kept[..., None]),
        y=jnp.asarray(np.asarray(data.y)[rows]),
        weight=jnp.asarray(kept, data.weight.dtype),
    )
    relative = np.divide(weight, old, out=np.zeros_like(weight), where=kept & (old > 0))
    return part.replace(weight=part.base_weight() * jnp.asarray(relative))
