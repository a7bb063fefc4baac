"""The data container: the samples of all nodes in padded arrays.

Node is not task. Node k holds samples and works on task ``task[k]``; with one node per
task, the usual case, the two coincide. Several nodes on one task is Remark 4 of the
paper; all nodes on one task is the global model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._math import safe_ratio, uniform_bits
from mocha_jax._pytree import Pytree, static

SCALINGS = ("sum", "task_mean")


class TaskData(Pytree):
    r"""The samples of m nodes, padded to a common number of rows n.

    The data term of every model is :math:`\sum_t\sum_i c_{ti}\,\ell(w_t^\top x_{ti}, y_{ti})`
    with the weights c given here. **A row of weight 0 is padding** and takes no part in
    anything; its numbers must be finite all the same. Build one with `pack_tasks`.
    """

    x: Array  # [m, n, d]
    y: Array  # [m, n]
    weight: Array  # [m, n] c_ti; 0 marks padding
    task: Array  # [m] the task that node k works on
    num_tasks: int = static(default=-1)  # -1: derived from `task`
    shared: bool = static(default=False)  # False: node k works on task k, nodes beyond are inert
    loss_scaling: str = static(default="sum")

    def __post_init__(self) -> None:
        m, n, _ = _expect_ndim("x", self.x, 3)
        for name, value, shape in (("y", self.y, (m, n)), ("weight", self.weight, (m, n)), ("task", self.task, (m,))):
            if np.shape(value) != shape:
                raise ValueError(f"TaskData: {name} must have shape {shape} to match x, got {np.shape(value)}.")
        _check.one_of("TaskData", "loss_scaling", self.loss_scaling, SCALINGS)
        task, weight = _check.concrete(self.task), _check.concrete(self.weight)
        if weight is not None and not (np.isfinite(weight) & (weight >= 0)).all():
            node = int(np.argmin((np.isfinite(weight) & (weight >= 0)).all(1)))
            raise ValueError(f"TaskData: node {node} has a negative or non-finite weight; weights must be >= 0.")
        if task is not None:
            count = int(task.max()) + 1 if self.num_tasks < 0 else self.num_tasks
            if task.dtype.kind not in "iu" or task.min() < 0 or task.max() >= count:
                raise ValueError(f"TaskData: task must hold integers from 0 to {count - 1}, got {task}.")
            object.__setattr__(self, "num_tasks", count)
            if weight is not None:  # in order, and beyond the last task nothing but inert nodes?
                shared = not np.array_equal(task[:count], np.arange(count)) or bool(weight[count:].any())
                object.__setattr__(self, "shared", shared)
        elif self.num_tasks < 0:
            raise ValueError("TaskData: pass num_tasks where `task` is traced; it sets array shapes.")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the number of tasks follows a changed `task`."""
        if "task" in changes:
            changes = {"num_tasks": -1, **changes}
        return super().replace(**changes)

    @property
    def num_nodes(self) -> int:
        """How many nodes, m."""
        return self.x.shape[0]

    @property
    def num_features(self) -> int:
        """Length d of a sample, the appended intercept included."""
        return self.x.shape[2]

    @property
    def sizes(self) -> Array:
        """Real samples of each node, ``[m]`` int32."""
        return jnp.sum(self.weight > 0, axis=1, dtype=jnp.int32)

    @property
    def nodes_per_task(self) -> Array:
        """How many nodes hold data of each task, ``[num_tasks]``."""
        return self.to_tasks((self.sizes > 0).astype(self.x.dtype))

    def to_nodes(self, per_task: Array) -> Array:
        """Give each node its task's row: ``[num_tasks, ...]`` to ``[m, ...]``."""
        if self.shared:
            return per_task[self.task]
        extra = self.num_nodes - self.num_tasks
        return jnp.pad(per_task, [(0, extra)] + [(0, 0)] * (per_task.ndim - 1)) if extra else per_task

    def to_tasks(self, per_node: Array) -> Array:
        """Add up the nodes of each task: ``[m, ...]`` to ``[num_tasks, ...]``."""
        if self.shared:
            return jax.ops.segment_sum(per_node, self.task, self.num_tasks)
        return per_node[: self.num_tasks]

    def split(self, key: Array, fraction: float) -> tuple[TaskData, TaskData]:
        """Split every node's samples at random into two parts, e.g. training and test.

        Each label value of a node is divided in the same proportion as nearly as whole
        samples allow (so rare classes land on both sides; real-valued labels are split at
        random). A node with two samples or more puts at least one on each side; a single
        sample goes to the first part. Rows keep their order. The weights follow
        `loss_scaling` within each part.

        Args:
          key: a JAX random key. The draw of a sample depends on its node and row only.
          fraction: share of the first part, in (0, 1).

        >>> import jax, numpy as np
        >>> data = pack_tasks([np.eye(4, dtype=np.float32)], [np.array([1.0, 1, -1, -1])])
        >>> train, test = data.split(jax.random.key(0), 0.5)
        >>> sorted(train.y[0].tolist()), sorted(test.y[0].tolist())
        ([-1.0, 1.0], [-1.0, 1.0])
        """
        _check.in_unit_interval("TaskData.split", open_left=True, open_right=True, fraction=fraction)
        keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(self.num_nodes))
        bits = np.asarray(jax.vmap(lambda k: uniform_bits(k, self.x.shape[1]))(keys))
        real = np.asarray(self.weight) > 0
        first = _stratified(np.asarray(self.y), bits, real, fraction)
        return self._select(first), self._select(real & ~first)

    def pooled(self) -> TaskData:
        """The same nodes and samples, all on one task: the data of the global model.

        With ``loss_scaling="task_mean"`` every sample then weighs 1/N, N of all nodes.
        """
        pooled = self.replace(task=jnp.zeros_like(self.task), num_tasks=1, shared=self.num_nodes > 1)
        return pooled.replace(weight=self.weight * safe_ratio(pooled._base_weight(), self._base_weight()))

    def pad(self, *, nodes: int | None = None, rows: int | None = None) -> TaskData:
        """Pad with inert nodes and rows up to the given counts, e.g. to fit a device mesh.

        The number of tasks does not change: nodes beyond it hold no data and do no work.
        """
        m, n, _ = self.x.shape
        more_nodes, more_rows = (nodes or m) - m, (rows or n) - n
        if more_nodes < 0 or more_rows < 0:
            raise ValueError(f"TaskData.pad: cannot shrink {m} nodes x {n} rows to {nodes} x {rows}.")
        grow = [(0, more_nodes), (0, more_rows)]
        return self.replace(
            x=jnp.pad(self.x, [*grow, (0, 0)]),
            y=jnp.pad(self.y, grow, mode="edge"),
            weight=jnp.pad(self.weight, grow),
            task=jnp.pad(self.task, grow[:1]),
            num_tasks=self.num_tasks,
        )

    def _select(self, keep: np.ndarray) -> TaskData:
        """Keep some rows of each node, packed to the front."""
        n = max(int(keep.sum(1).max()), 1)
        order = np.argsort(~keep, axis=1, kind="stable")[:, :n]
        rows = np.arange(self.num_nodes)[:, None], order
        kept = keep[rows]
        old, weight = np.asarray(self._base_weight())[rows], np.asarray(self.weight)[rows]
        part = self.replace(
            x=jnp.asarray(np.asarray(self.x)[rows] * kept[..., None]),
            y=jnp.asarray(np.asarray(self.y)[rows]),
            weight=jnp.asarray(kept, self.weight.dtype),
        )
        relative = np.divide(weight, old, out=np.zeros_like(weight), where=kept & (old > 0))
        return part.replace(weight=part._base_weight() * jnp.asarray(relative))

    def _base_weight(self) -> Array:
        """What `loss_scaling` gives each real sample, ``[m, n]``."""
        real = (self.weight > 0).astype(self.x.dtype)
        if self.loss_scaling == "sum":
            return real
        count = self.to_tasks(jnp.sum(real, axis=1))
        return real / jnp.maximum(self.to_nodes(count), 1.0)[:, None]


def pack_tasks(
    xs: Sequence[Any] | Any,
    ys: Sequence[Any] | Any,
    groups: Any = None,
    *,
    task: Sequence[int] | Any = None,
    loss_scaling: str = "sum",
    intercept: bool = False,
    dtype: Any = None,
) -> TaskData:
    """Pack ragged per-node data into one `TaskData`.

    Args:
      xs: list of ``[n_t, d]`` arrays, one a node; or one ``[N, d]`` array with `groups`.
      ys: list of ``[n_t]`` arrays; or one ``[N]`` array with `groups`.
      groups: ``[N]`` labels, any sortable type; each distinct label is a node, in sorted
        order, and its samples keep their order.
      task: ``[m]`` the task of each node, where several nodes share one (Remark 4);
        default: node k is task k.
      loss_scaling: ``"sum"`` adds up losses as equation (1) does, c = 1; ``"task_mean"``
        averages them within each task, c = 1/n_t.
      intercept: append a constant 1 to every sample. Its weight is penalised like any other.
      dtype: of the stored arrays; default is JAX's default float (float32, or float64
        with ``jax_enable_x64``).

    >>> import numpy as np
    >>> data = pack_tasks([np.ones((3, 2), "f"), np.ones((1, 2), "f")], [np.ones(3), np.ones(1)])
    >>> data.x.shape, data.sizes.tolist(), data.weight.tolist()
    ((2, 3, 2), [3, 1], [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    """
    _check.one_of("pack_tasks", "loss_scaling", loss_scaling, SCALINGS)
    names: Sequence[str] = range(0)  # type: ignore[assignment]
    if groups is not None:
        xs, ys, names = _by_group(np.asarray(xs), np.asarray(ys), np.asarray(groups))
    elif getattr(xs, "ndim", 0) == 2 and getattr(ys, "ndim", 0) == 1:
        raise ValueError(
            "pack_tasks: one array of samples needs groups, the device of each; or pass a list per device."
        )
    xs, ys = [np.asarray(x) for x in xs], [np.asarray(y) for y in ys]
    names = names or [f"task {t}" for t in range(len(xs))]
    dtype = _storage_dtype(xs, dtype)
    _check_tasks(xs, ys, names)
    m, n, d = len(xs), max(map(len, ys)), xs[0].shape[1]

    x = np.zeros((m, n, d + intercept), dtype)
    y = np.zeros((m, n), dtype)
    weight = np.zeros((m, n), dtype)
    with np.errstate(over="ignore"):  # reported below, by name
        for t, (rows, labels) in enumerate(zip(xs, ys, strict=True)):
            x[t, : len(rows), :d] = rows
            x[t, : len(rows), d:] = 1.0
            y[t, : len(rows)] = labels
            y[t, len(rows) :] = labels[-1]  # padding carries a real label, so every loss is finite on it
            weight[t, : len(rows)] = 1.0
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        t = int(np.argmin(np.isfinite(x).all((1, 2)) & np.isfinite(y).all(1)))
        raise ValueError(f"{names[t]}: a value overflows {np.dtype(dtype).name}; rescale its features or labels.")

    owner = np.arange(m) if task is None else np.asarray(task)
    if (
        owner.shape != (m,)
        or owner.dtype.kind not in "iu"
        or sorted(set(owner.tolist())) != list(range(owner.max() + 1))
    ):
        raise ValueError(
            f"pack_tasks: task must give each of the {m} nodes an integer task, and every task from 0 to the "
            f"largest needs a node; renumber them, e.g. with np.unique(task, return_inverse=True)[1]."
        )
    data = TaskData(
        x=jnp.asarray(x), y=jnp.asarray(y), weight=jnp.asarray(weight),
        task=jnp.asarray(owner, jnp.int32), loss_scaling=loss_scaling,
    )  # fmt: skip
    return data.replace(weight=data._base_weight())


def _by_group(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    if x.ndim != 2 or y.shape != x.shape[:1] or groups.shape != x.shape[:1]:
        raise ValueError(
            f"pack_tasks: with groups, X must be [N, d] and y and groups [N]; got {x.shape}, {y.shape}, {groups.shape}."
        )
    if groups.dtype.kind == "f" and np.isnan(groups).any():
        raise ValueError(f"pack_tasks: groups is NaN in row {int(np.argmax(np.isnan(groups)))}; give it a label.")
    labels, node = np.unique(groups, return_inverse=True)
    order = np.argsort(node, kind="stable")
    cuts = np.cumsum(np.bincount(node))[:-1]
    return np.split(x[order], cuts), np.split(y[order], cuts), [f"group {label!r}" for label in labels.tolist()]


def _storage_dtype(xs: list[np.ndarray], dtype: Any) -> np.dtype:
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if dtype is not None:
        wanted = np.dtype(dtype)
        if wanted.kind != "f":
            raise ValueError(f"pack_tasks: dtype must be a float type, got {wanted.name}.")
        if wanted == np.float64 and not x64:
            raise ValueError(
                "pack_tasks: dtype=float64 needs JAX's x64 mode; call jax.config.update('jax_enable_x64', True) "
                "before anything else, or leave dtype out to store float32."
            )
        return wanted
    if not x64 and any(x.dtype == np.float64 for x in xs):
        warnings.warn(
            "pack_tasks: xs are float64 but JAX's x64 mode is off, so they are stored as float32 (relative gaps "
            "below about 1e-6 are then out of reach); pass dtype='float32' to accept that in silence, or call "
            "jax.config.update('jax_enable_x64', True) before anything else to keep float64.",
            stacklevel=3,
        )
    return np.dtype(np.float64 if x64 else np.float32)


def _check_tasks(xs: list[np.ndarray], ys: list[np.ndarray], names: Sequence[str]) -> None:
    if not xs:
        raise ValueError("pack_tasks: got no tasks; xs is empty.")
    if len(xs) != len(ys):
        raise ValueError(f"pack_tasks: got {len(xs)} arrays in xs but {len(ys)} in ys; pass one of each per task.")
    for name, x, y in zip(names, xs, ys, strict=True):
        if x.ndim != 2:
            raise ValueError(f"{name}: x must be [n_t, d], got shape {x.shape}.")
        if x.shape[1] == 0:
            raise ValueError(f"{name}: has no features.")
        if x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"{name}: has {x.shape[1]} features where {names[0]} has {xs[0].shape[1]}; all must agree."
            )
        if y.shape != x.shape[:1]:
            raise ValueError(f"{name}: y must be [{len(x)}] to match its x, got shape {y.shape}.")
        if not len(x):
            raise ValueError(f"{name}: has no samples; leave it out.")
        for what, a in (("x", x), ("y", y)):
            if a.dtype.kind not in "fiub":
                raise ValueError(f"{name}: {what} must be numbers, got dtype {a.dtype}.")
            if not np.isfinite(a).all():
                row = int(np.argmin(np.isfinite(a.reshape(len(a), -1)).all(1)))
                raise ValueError(f"{name}: {what} is NaN or infinite in row {row}; remove or impute it.")


def _stratified(y: np.ndarray, bits: np.ndarray, real: np.ndarray, fraction: float) -> np.ndarray:
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


def _expect_ndim(name: str, value: Any, ndim: int) -> tuple[int, ...]:
    if np.ndim(value) != ndim:
        raise ValueError(f"TaskData: {name} must have {ndim} axes, got shape {np.shape(value)}.")
    return np.shape(value)
