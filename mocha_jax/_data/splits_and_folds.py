"""Parts of the samples: training and test, folds, or those that are marked; every node's rows, all nodes at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.node_arrays import Data, NodeArrays
from mocha_jax._numerics.math import safe_ratio, uniform_bits

_CLASSES = 20  # labels of more values are numbers


def split(data: Data, key: Array, fraction: float, stratify: bool | None) -> tuple[Data, Data]:
    """Divide every node's samples at random into two parts, each label value alike if `stratify`."""
    check.scalar("TaskData.split", fraction=fraction)
    check.in_unit_interval("TaskData.split", open_left=True, open_right=True, fraction=fraction)
    if stratify is not None:
        check.flag("TaskData.split", stratify=stratify)
    bits, real, labels = draws(key, *data.y.shape), np.asarray(data.weight) > 0, np.asarray(data.y)
    if stratify is None:
        # A value that a node has once goes to the larger part: of numbers the smaller part would lack the rare ones.
        stratify = len(np.unique(labels[real])) <= _CLASSES
    labels = labels if stratify else np.zeros(labels.shape)
    first = stratified(labels, bits, real, fraction)
    return _packed(data, first), _packed(data, real & ~first)


def folds(data: NodeArrays, key: Array, count: int, groups: ArrayLike | None) -> Array:
    """Deal every node's samples into parts of nearly equal size: the part of every row, -1 for padding."""
    check.integer("TaskData.folds", 2, count=count)
    if groups is not None:
        asked, groups = groups, check.concrete(groups)
        if groups is None or groups.shape != data.y.shape or groups.dtype.kind not in "iu":
            raise ValueError(
                f"TaskData.folds: groups must be integers [m, n] = {data.y.shape}, got {check.shown(asked)}."
            )
    real = np.asarray(data.weight) > 0
    most = int(np.bincount(np.asarray(data.task), real.sum(axis=1)).max())
    if count > most:
        raise ValueError(
            f"TaskData.folds: there must be at most {most} folds, as many as the largest task has samples, got {count}."
        )
    bits = draws(key, *data.y.shape)
    return jnp.asarray(dealt(np.asarray(data.y), bits, real, count, groups))


def keep(data: Data, rows: Array) -> Data:
    """Keep the rows that are marked as samples."""
    rows = check.marks("TaskData.keep", "rows", rows, data.y.shape)
    relative = safe_ratio(data.weight, data.base_weight())
    part = data.replace(weight=jnp.where(rows & (data.weight > 0), jnp.ones_like(data.weight), 0.0))
    return part.replace(weight=part.base_weight() * relative)


def _packed(data: Data, keep: np.ndarray) -> Data:
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


def draws(key: Array, nodes: int, rows: int) -> np.ndarray:
    """A random number for every row ``[nodes, rows]``, which depends on the key, the node and the row only."""
    check.key("TaskData.split or folds", key)
    keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(nodes))
    return np.asarray(jax.vmap(lambda k: uniform_bits(k, rows))(keys))


def stratified(y: np.ndarray, bits: np.ndarray, real: np.ndarray, fraction: float) -> np.ndarray:
    """Mark about `fraction` of each node's real rows, class by class. All nodes at once."""
    node, row = np.nonzero(real)
    order = np.lexsort((bits[node, row], y[node, row], node))
    node, row = node[order], row[order]
    label, draw = y[node, row], bits[node, row]
    # Classes are runs of (node, label); `rank` counts within a run in random order.
    new = np.ones(len(node), bool)
    new[1:] = (node[1:] != node[:-1]) | (label[1:] != label[:-1])
    starts = np.flatnonzero(new)
    sizes = np.diff(np.r_[starts, len(node)]).astype(int)
    group = np.repeat(np.arange(len(sizes)), sizes)
    rank = np.arange(len(node)) - starts[group]
    owner = node[starts]
    total = np.bincount(node, minlength=len(y))
    want = np.clip(
        np.round(fraction * total).astype(int), np.minimum(total, 1), np.maximum(total - 1, np.minimum(total, 1))
    )
    # Largest remainder: whole shares first, then one more to the classes cut off most.
    share = (fraction * sizes).astype(int)
    missing = want - np.bincount(owner, weights=share, minlength=len(y)).astype(int)
    tie = draw[starts]
    queue = np.lexsort((tie, -(fraction * sizes - share), owner))
    turn = np.empty(len(sizes), int)
    first_of_node = np.r_[0, np.cumsum(np.bincount(owner, minlength=len(y)))][owner[queue]]
    turn[queue] = np.arange(len(sizes)) - first_of_node
    share = share + (turn < missing[owner])
    first = np.zeros(real.shape, bool)
    chosen = rank < share[group]
    first[node[chosen], row[chosen]] = True
    return first


def class_sizes(
    label: np.ndarray, real: np.ndarray, task: np.ndarray, num_tasks: int, classes: int, groups: np.ndarray | None
) -> np.ndarray:
    """Count each task's samples of every class ``[num_tasks, classes]``; given groups, the groups that have such.

    Args:
      label: ``[m, n]`` integers from 0, or booleans.
      real: which are samples.
      task: ``[m]`` of every node.
      num_tasks: how many.
      classes: how many.
      groups: ``[m, n]`` integers.
    """
    node, row = np.nonzero(real)
    owner, kind = task[node], label[node, row].astype(int)
    if groups is not None:
        member = np.unique(groups[node, row], return_inverse=True)[1].ravel()
        together = (node * (member.max(initial=0) + 1) + member) * classes + kind
        first = np.unique(together, return_index=True)[1]
        owner, kind = owner[first], kind[first]
    return np.bincount(classes * owner + kind, minlength=classes * num_tasks).reshape(num_tasks, classes)


def dealt(y: np.ndarray, bits: np.ndarray, real: np.ndarray, count: int, groups: np.ndarray | None) -> np.ndarray:
    """The part of each row: a node's rows in random order, class by class or group by group, dealt in turns."""
    node, row = np.nonzero(real)
    draw = bits[node, row]
    if groups is None:
        label = y[node, row]
        # The labels of a node in random order too: of real-valued ones each may be there but once.
        _, run = np.unique(np.stack([node.astype(float), label]), axis=1, return_inverse=True)
        run = run.ravel()
        least = np.full(run.max(initial=-1) + 1, np.iinfo(draw.dtype).max, draw.dtype)
        np.minimum.at(least, run, draw)
        order = np.lexsort((draw, run, least[run], node))
        turn = np.arange(len(node))
    else:
        # The draw of a group is that of its first row.
        owner = np.unique(np.stack([node, groups[node, row]]), axis=1, return_inverse=True, return_index=True)
        first, member = owner[1], owner[2].ravel()
        draw = draw[first][member]
        order = np.lexsort((row, member, draw, node))
        turn = np.r_[0, np.cumsum(np.diff(member[order]) != 0)] if len(order) else np.zeros(0, int)
    node, row = node[order], row[order]
    begins = np.r_[0, np.flatnonzero(np.diff(node)) + 1].astype(int)
    lengths = np.diff(np.r_[begins, len(node)])
    turn_of_node = turn - np.repeat(turn[begins], lengths) if len(node) else turn
    part = np.full(real.shape, -1, np.int32)
    part[node, row] = (turn_of_node + node) % count
    return part
