"""Functions that regroup samples: other nodes, rows or tasks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mocha_jax._core import check
from mocha_jax._data.names import Names, duplicates, listed
from mocha_jax._data.node_arrays import Data, NodeArrays
from mocha_jax._data.standardize import appended
from mocha_jax._numerics.math import safe_ratio


def pooled(data: Data) -> Data:
    """Put all nodes on one task."""
    together = data.replace(task=jnp.zeros_like(data.task), num_tasks=1, shared=data.num_nodes > 1)
    return together.replace(weight=data.weight * safe_ratio(together.base_weight(), data.base_weight()))


def merged(data: Data) -> Data:
    """Put all samples on one node."""
    real = np.asarray(data.weight) > 0
    x, y, weight = (jnp.asarray(np.asarray(a)[real][None]) for a in (data.x, data.y, data.weight))
    task = jnp.zeros(1, data.task.dtype)
    return data.replace(x=x, y=y, weight=weight, task=task, num_tasks=1, shared=False, sharding=None)


def pad(data: Data, nodes: int | None, rows: int | None) -> Data:
    """Append inert nodes and rows up to the given counts."""
    m, n, _ = data.x.shape
    nodes, rows = m if nodes is None else nodes, n if rows is None else rows
    check.integer("TaskData.pad", 0, nodes=nodes, rows=rows)
    more_nodes, more_rows = nodes - m, rows - n
    if more_nodes < 0 or more_rows < 0:
        raise ValueError(f"TaskData.pad: cannot shrink {m} nodes x {n} rows to {nodes} x {rows}.")
    grow = [(0, more_nodes), (0, more_rows)]
    return data.replace(
        x=jnp.pad(data.x, [*grow, (0, 0)]),
        y=jnp.pad(data.y, grow, mode="edge"),
        weight=jnp.pad(data.weight, grow),
        task=jnp.pad(data.task, grow[:1]),
        num_tasks=data.num_tasks,
        names=data.names,
        scaling=data.scaling,
    )


def append(data: Data, other: NodeArrays) -> Data:
    """Append the tasks of other data."""
    check.instance("TaskData.append", "other", other, type(data), "pack_tasks(xs, ys)")
    if data.num_features != other.num_features:
        raise ValueError(
            f"TaskData.append: samples here have {data.num_features} features, those to append "
            f"{other.num_features}; is the intercept in both?"
        )
    if data.loss_scaling != other.loss_scaling:
        raise ValueError(
            f"TaskData.append: loss_scaling is {data.loss_scaling!r} here and {other.loss_scaling!r} there; "
            f"pack both alike."
        )
    if data.intercept != other.intercept:
        raise ValueError(
            f"TaskData.append: the intercept is {data.intercept:g} here and {other.intercept:g} there; pack both alike."
        )
    if data.num_nodes > data.num_tasks and not data.shared:
        raise ValueError("TaskData.append: append before padding with inert nodes, not after.")
    rows = max(data.x.shape[1], other.x.shape[1])
    first, second = pad(data, None, rows), pad(other, None, rows)
    return data.replace(
        x=jnp.concatenate([first.x, second.x.astype(first.x.dtype)]),
        y=jnp.concatenate([first.y, second.y.astype(first.y.dtype)]),
        weight=jnp.concatenate([first.weight, second.weight.astype(first.weight.dtype)]),
        task=jnp.concatenate([first.task, second.task + data.num_tasks]),
        num_tasks=data.num_tasks + other.num_tasks,
        shared=data.shared or other.shared,
        names=_names_of_both(data, other),
        scaling=appended(data, other),
    )


def join(data: Data, other: Data) -> Data:
    """Add rows to old tasks, found by their names, and append new tasks."""
    owner = "TaskData.join"
    check.instance(owner, "other", other, type(data), "pack_tasks(xs, ys, groups)")
    for each, which in ((data, "this data"), (other, "other")):
        if each.names.tasks is None or each.shared or each.num_nodes != each.num_tasks:
            raise ValueError(f"{owner}: {which} must have names of tasks, and one node for each; pack it with groups.")
    task_of = {name: t for t, name in enumerate(data.names.tasks or ())}
    theirs = other.names.tasks or ()
    new = [t for t, name in enumerate(theirs) if name not in task_of]
    old = [t for t, name in enumerate(theirs) if name in task_of]
    added = _rows_of(other, new)
    both = data if added is None else append(data, added)
    if not old:
        return both
    # More rows of old tasks go after those that are there, which keep their places and so their duals.
    more = _rows_of(other, old)
    assert more is not None
    _names_of_both(data, more.replace(names=more.names.replace(tasks=None)))
    if more.loss_scaling != data.loss_scaling or more.num_features != data.num_features:
        raise ValueError(
            f"{owner}: other must have {data.num_features} features and loss_scaling {data.loss_scaling!r}, as here."
        )
    tasks = np.array([task_of[theirs[t]] for t in old])
    if more.intercept != data.intercept or more.scaling != (data.scaling and data.scaling.of(tasks)):
        raise ValueError(f"{owner}: other must have the intercept and the scaling of this data; pack it with like=.")
    # Weights of a user's own stay in proportion to what `loss_scaling` gives.
    relative, theirs_relative = (np.asarray(safe_ratio(d.weight, d.base_weight())) for d in (both, more))
    x, y, weight = (np.array(a) for a in (both.x, both.y, relative))
    real = np.asarray(more.weight) > 0
    # Behind the last real row: rows may have been left out in between.
    ends = np.where((weight > 0).any(1), weight.shape[1] - np.argmax(weight[:, ::-1] > 0, axis=1), 0)
    rows = max(weight.shape[1], int((ends[tasks] + real.sum(1)).max()))
    grow = [(0, 0), (0, rows - weight.shape[1])]
    x, y, weight = np.pad(x, [*grow, (0, 0)]), np.pad(y, grow, mode="edge"), np.pad(weight, grow)
    for k, t in enumerate(tasks):
        added_rows = slice(ends[t], ends[t] + int(real[k].sum()))
        x[t, added_rows], y[t, added_rows] = np.asarray(more.x)[k][real[k]], np.asarray(more.y)[k][real[k]]
        weight[t, added_rows] = theirs_relative[k][real[k]]
    marked = both.replace(x=jnp.asarray(x), y=jnp.asarray(y), weight=jnp.asarray(weight))
    return marked.replace(weight=marked.base_weight() * marked.weight)


def _rows_of(data: Data, tasks: list[int]) -> Data | None:
    """The data of some tasks alone, one node each; None of none."""
    if not tasks:
        return None
    order, names = np.array(tasks), data.names
    chosen = None if names.tasks is None else tuple(names.tasks[t] for t in tasks)
    scaling = None if data.scaling is None else data.scaling.of(order)
    return data.replace(
        x=data.x[order], y=data.y[order], weight=data.weight[order], task=jnp.arange(len(order), dtype=data.task.dtype),
        num_tasks=len(order), shared=False, names=names.replace(tasks=chosen), scaling=scaling,
    )  # fmt: skip


def _names_of_both(data: NodeArrays, other: NodeArrays) -> Names:
    """The names of the tasks of both, where both have some."""
    one, two = data.names, other.names
    for what in ("features", "classes"):
        ours, theirs = getattr(one, what), getattr(two, what)
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(f"TaskData.append: {what} are {listed(ours)} here and {listed(theirs)} there.")
    if one.tasks is None or two.tasks is None:
        return one.replace(tasks=None)
    if twice := duplicates((*one.tasks, *two.tasks)):
        raise ValueError(
            f"TaskData.append: tasks {listed(twice)} are in both; more samples of an old task are packed with the old."
        )
    return one.replace(tasks=(*one.tasks, *two.tasks))
