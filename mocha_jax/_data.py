"""The data container: the samples of all nodes in padded arrays.

Node is not task. Node k holds samples and works on task ``task[k]``; with one node per
task, the usual case, the two coincide. Several nodes on one task is Remark 4 of the
paper; all nodes on one task is the global model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._math import safe_ratio
from mocha_jax._products import combine, lengths, times, totals
from mocha_jax._pytree import Pytree, static
from mocha_jax._samples import check_arrays
from mocha_jax._splits import dealt, draws, stratified
from mocha_jax._spread import Spread
from mocha_jax._transfers import on_purpose

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
    layout: Any = None  # the samples as an algorithm reads them; drivers set it
    num_tasks: int = static(default=-1)  # -1: derived from `task`
    shared: bool = static(default=False)  # False: node k works on task k, nodes beyond are inert
    loss_scaling: str = static(default="sum")
    spread: Spread | None = static(default=None)  # on which devices the nodes are, from `shard`

    @on_purpose
    def __post_init__(self) -> None:
        check_arrays(self.x, self.y, self.weight, self.task)
        _check.one_of("TaskData", "loss_scaling", self.loss_scaling, SCALINGS)
        _check.flag("TaskData", shared=self.shared)
        _check.integer("TaskData", -1, num_tasks=self.num_tasks)
        if self.spread is not None:
            _check.instance("TaskData", "spread", self.spread, Spread, "that of shard(problem).data")
        task, weight = _check.concrete(self.task), _check.concrete(self.weight)
        if task is not None:
            count = int(task.max()) + 1 if self.num_tasks < 0 else self.num_tasks
            if task.dtype.kind not in "iu" or task.min() < 0 or task.max() >= count:
                raise ValueError(
                    f"TaskData: task must hold integers from 0 to {count - 1} (num_tasks), got {_check.shown(task)}."
                )
            if count > self.num_nodes:
                raise ValueError(
                    f"TaskData: num_tasks must be at most the number of nodes, {self.num_nodes}, got {count}; number "
                    f"the tasks without gaps, and give one without samples a node of weight 0."
                )
            object.__setattr__(self, "num_tasks", count)
            if weight is not None:  # in order, and beyond the last task nothing but inert nodes?
                shared = not np.array_equal(task[:count], np.arange(count)) or bool(weight[count:].any())
                object.__setattr__(self, "shared", shared)
        elif self.num_tasks < 0:
            raise ValueError("TaskData: pass num_tasks where `task` is traced; it sets array shapes.")

    @on_purpose
    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; what is not given follows from them.

        The number of tasks follows a changed `task`, the weights a changed `loss_scaling`, a layout its samples.
        """
        if "task" in changes:
            changes = {"num_tasks": -1, **changes}
        if not changes.keys().isdisjoint({"x", "y", "weight", "spread"}):
            changes = {"layout": None, **changes}
        changed: Self = super().replace(**changes)
        if changed.loss_scaling == self.loss_scaling or "weight" in changes:
            return changed
        return changed.replace(weight=self.weight * safe_ratio(changed.base_weight(), self.base_weight()))

    @property
    def num_nodes(self) -> int:
        """How many nodes, m."""
        return self.x.shape[0]

    @property
    def num_features(self) -> int:
        """Length d of a sample, the appended intercept included."""
        return self.x.shape[2]

    @property
    def dtype(self) -> Any:
        """Of all arithmetic. The samples may be stored in fewer bits, see `pack_tasks`."""
        return self.y.dtype

    @property
    @on_purpose
    def sizes(self) -> Array:
        """Real samples of each node, ``[m]`` int32."""
        return jnp.sum(self.weight > 0, axis=1, dtype=jnp.int32)

    @property
    def nodes_per_task(self) -> Array:
        """How many nodes hold data of each task, ``[num_tasks]``."""
        return self.to_tasks((self.sizes > 0).astype(self.dtype))

    def to_nodes(self, per_task: Array) -> Array:
        """Give each node its task's row: ``[num_tasks, ...]`` to ``[m, ...]``."""
        if self.shared:
            per_node = per_task[self.task]
        else:
            per_node = jnp.pad(per_task, [(0, self.num_nodes - self.num_tasks)] + [(0, 0)] * (per_task.ndim - 1))
        return per_node if self.spread is None else lax.with_sharding_constraint(per_node, self.spread.by_node)

    def to_tasks(self, per_node: Array) -> Array:
        """Add up the nodes of each task: ``[m, ...]`` to ``[num_tasks, ...]``."""
        if self.shared:
            return self.place_tasks(jax.ops.segment_sum(per_node, self.task, self.num_tasks))
        return self.place_tasks(per_node[: self.num_tasks])

    def gathered(self, array: Array) -> Array:
        """The same array, whole on every device."""
        return array if self.spread is None else lax.with_sharding_constraint(array, self.spread.everywhere)

    def place_tasks(self, per_task: Any) -> Any:
        """The same arrays where `spread` wants them: those with a row for every task, and others everywhere."""
        spread = self.spread
        if spread is None:
            return per_task

        def place(array: Array) -> Array:
            rows = array.ndim > 0 and len(array) == self.num_tasks
            return lax.with_sharding_constraint(array, spread.by_task if rows else spread.everywhere)

        return jax.tree.map(place, per_task)

    def fill_nodes(self, settings: Any) -> Any:
        """Settings per node ``[..., m]`` of the nodes there were before `shard`, for all: those beyond are inert."""
        if self.spread is None:
            return settings
        more, known = self.num_nodes - self.spread.nodes, (self.spread.nodes,)

        def fill(array: Any) -> Any:
            if np.shape(array)[-1:] != known:
                return array
            return jnp.pad(jnp.asarray(array), [(0, 0)] * (np.ndim(array) - 1) + [(0, more)], mode="edge")

        return jax.tree.map(fill, settings)

    def times(self, weights: Array) -> Array:
        """Every sample times its node's weights: ``[m, d]`` to ``[m, n]``."""
        if self.layout is not None:
            return self.layout.times(self.x, weights)
        return times(self.x, weights)

    def combine(self, factors: Array) -> Array:
        """Add up each node's samples times their factors: ``[m, n]`` to ``[m, d]``."""
        if self.layout is not None:
            return self.layout.combine(self.x, factors)
        return combine(self.x, factors)

    @property
    def longest(self) -> Array:
        """The length of each node's longest sample, ``[m]``."""
        if self.layout is not None:
            return self.layout.longest(self.x)
        return lengths(jnp.max(jnp.sum(self.x.astype(self.dtype) ** 2, axis=2), axis=1))

    def each_row(self, work: Callable[..., Array], given: Any, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        """Something for every sample, ``[m, n]``; for padding perhaps what the first array holds.

        Args:
          work: ``work(given, by_node, *by_row)``, for any nodes and any number of rows.
          given: what else it depends on, e.g. a loss.
          by_node: arrays ``[m, ...]``.
          *by_row: arrays ``[m, n]``.
        """
        if self.layout is not None:
            return self.layout.each_row(work, given, by_node, *by_row)
        return work(given, by_node, *by_row)

    def totals(self, terms: Callable[..., Any], given: Any, weights: Array, *rows: Array) -> Any:
        """Each node's sum of c times something, ``[m]``.

        Args:
          terms: ``terms(given, z, y, *rows)``, arrays with a number for every sample.
          given: what else the terms depend on, e.g. a loss.
          weights: ``[m, d]``, for the predictions z.
          *rows: other arrays ``[m, n]``, e.g. duals.
        """
        if self.layout is not None:
            return self.layout.totals(self, terms, given, weights, *rows)
        return totals(terms, given, self.x, self.y, self.weight, weights, *rows)

    @on_purpose
    def split(self, key: Array, fraction: float, *, stratify: bool = True) -> tuple[TaskData, TaskData]:
        """Split every node's samples at random into two parts, e.g. training and test.

        Each label value of a node is divided in the same proportion as nearly as whole
        samples allow (so rare classes land on both sides; real-valued labels are split at
        random). A node with two samples or more puts at least one on each side; a single
        sample goes to the first part. Rows keep their order. The weights follow
        `loss_scaling` within each part.

        Args:
          key: a JAX random key. The draw of a sample depends on its node and row only.
          fraction: share of the first part, in (0, 1).
          stratify: divide each label value alike; otherwise a node's samples are divided whatever their labels.

        >>> import jax, numpy as np, mocha_jax as mj
        >>> data = mj.pack_tasks([np.eye(4, dtype=np.float32)], [np.array([1.0, 1, -1, -1])])
        >>> train, test = data.split(jax.random.key(0), 0.5)
        >>> sorted(train.y[0].tolist()), sorted(test.y[0].tolist())
        ([-1.0, 1.0], [-1.0, 1.0])
        """
        _check.scalar("TaskData.split", fraction=fraction)
        _check.in_unit_interval("TaskData.split", open_left=True, open_right=True, fraction=fraction)
        _check.flag("TaskData.split", stratify=stratify)
        bits, real = draws(key, *self.y.shape), np.asarray(self.weight) > 0
        labels = np.asarray(self.y) if stratify else np.zeros(self.y.shape)
        first = stratified(labels, bits, real, fraction)
        return self._select(first), self._select(real & ~first)

    @on_purpose
    def pooled(self) -> TaskData:
        """The same nodes and samples, all on one task: the data of the global model.

        With ``loss_scaling="task_mean"`` every sample then weighs 1/N, N of all nodes.
        """
        pooled = self.replace(task=jnp.zeros_like(self.task), num_tasks=1, shared=self.num_nodes > 1)
        return pooled.replace(weight=self.weight * safe_ratio(pooled.base_weight(), self.base_weight()))

    @on_purpose
    def merged(self) -> TaskData:
        """All samples with one node, on one task: the data of a central server. Weights stay what they were.

        >>> import numpy as np, mocha_jax as mj
        >>> data = mj.pack_tasks([np.ones((3, 2), "f"), np.zeros((1, 2), "f")], [np.ones(3), np.zeros(1)])
        >>> data.merged().x.shape, data.merged().y.tolist()
        ((1, 4, 2), [[1.0, 1.0, 1.0, 0.0]])
        """
        real = np.asarray(self.weight) > 0
        x, y, weight = (jnp.asarray(np.asarray(a)[real][None]) for a in (self.x, self.y, self.weight))
        task = jnp.zeros(1, self.task.dtype)
        return self.replace(x=x, y=y, weight=weight, task=task, num_tasks=1, shared=False, spread=None)

    @on_purpose
    def pad(self, *, nodes: int | None = None, rows: int | None = None) -> TaskData:
        """Pad with inert nodes and rows up to the given counts, e.g. to fit a device mesh.

        The number of tasks does not change: nodes beyond it hold no data and do no work.
        """
        m, n, _ = self.x.shape
        nodes, rows = m if nodes is None else nodes, n if rows is None else rows
        _check.integer("TaskData.pad", 0, nodes=nodes, rows=rows)
        more_nodes, more_rows = nodes - m, rows - n
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

    @on_purpose
    def append(self, other: TaskData) -> TaskData:
        """The same federation with more tasks: those of `other`, after the ones that are here.

        >>> import numpy as np, mocha_jax as mj
        >>> old, new = (mj.pack_tasks([np.ones((n, 2), "f")], [np.ones(n)]) for n in (3, 1))
        >>> both = old.append(new)
        >>> both.num_tasks, both.sizes.tolist()
        (2, [3, 1])
        """
        _check.instance("TaskData.append", "other", other, TaskData, "pack_tasks(xs, ys)")
        if self.num_features != other.num_features:
            raise ValueError(
                f"TaskData.append: samples here have {self.num_features} features, those to append "
                f"{other.num_features}; is the intercept in both?"
            )
        if self.loss_scaling != other.loss_scaling:
            raise ValueError(
                f"TaskData.append: loss_scaling is {self.loss_scaling!r} here and {other.loss_scaling!r} there; "
                f"pack both alike."
            )
        if self.num_nodes > self.num_tasks and not self.shared:
            raise ValueError("TaskData.append: append before padding with inert nodes, not after.")
        rows = max(self.x.shape[1], other.x.shape[1])
        first, second = self.pad(rows=rows), other.pad(rows=rows)
        return self.replace(
            x=jnp.concatenate([first.x, second.x.astype(first.x.dtype)]),
            y=jnp.concatenate([first.y, second.y.astype(first.y.dtype)]),
            weight=jnp.concatenate([first.weight, second.weight.astype(first.weight.dtype)]),
            task=jnp.concatenate([first.task, second.task + self.num_tasks]),
            num_tasks=self.num_tasks + other.num_tasks,
            shared=self.shared or other.shared,
        )

    @on_purpose
    def folds(self, key: Array, count: int, groups: Any = None) -> Array:
        """Deal every node's samples into parts of nearly equal size, for cross-validation.

        Each label value of a node is spread over the parts as evenly as whole samples allow; real-valued labels are
        dealt at random. Nodes begin with different parts, so that those with few samples do not all fill the same one.

        Args:
          key: a JAX random key. The draw of a sample depends on its node and row only.
          count: how many parts, >= 2.
          groups: ``[m, n]`` integers; samples of a node with the same number stay together, e.g. of one
            recording. Labels are then not balanced.

        Returns:
          The part of every sample ``[m, n]`` int32; -1 for padding.

        >>> import jax, numpy as np, mocha_jax as mj
        >>> data = mj.pack_tasks([np.eye(6, dtype=np.float32)], [np.array([1.0, 1, 1, -1, -1, -1])])
        >>> part = data.folds(jax.random.key(0), 3)
        >>> [sorted(data.y[part == f].tolist()) for f in range(3)]
        [[-1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]
        """
        _check.integer("TaskData.folds", 2, count=count)
        if groups is not None:
            given, groups = groups, _check.concrete(groups)
            if groups is None or groups.shape != self.y.shape or groups.dtype.kind not in "iu":
                raise ValueError(
                    f"TaskData.folds: groups must be integers [m, n] = {self.y.shape}, got {_check.shown(given)}."
                )
        bits, real = draws(key, *self.y.shape), np.asarray(self.weight) > 0
        return jnp.asarray(dealt(np.asarray(self.y), bits, real, count, groups))

    @on_purpose
    def keep(self, rows: Array) -> TaskData:
        """The same rows, but only those marked ``[m, n]`` are samples; the weights follow `loss_scaling`."""
        rows = _check.marks("TaskData.keep", "rows", rows, self.y.shape)
        relative = safe_ratio(self.weight, self.base_weight())
        part = self.replace(weight=jnp.where(rows & (self.weight > 0), jnp.ones_like(self.weight), 0.0))
        return part.replace(weight=part.base_weight() * relative)

    def _select(self, keep: np.ndarray) -> TaskData:
        """Keep some rows of each node, packed to the front."""
        n = max(int(keep.sum(1).max()), 1)
        order = np.argsort(~keep, axis=1, kind="stable")[:, :n]
        rows = np.arange(self.num_nodes)[:, None], order
        kept = keep[rows]
        old, weight = np.asarray(self.base_weight())[rows], np.asarray(self.weight)[rows]
        part = self.replace(
            x=jnp.asarray(np.asarray(self.x)[rows] * kept[..., None]),
            y=jnp.asarray(np.asarray(self.y)[rows]),
            weight=jnp.asarray(kept, self.weight.dtype),
        )
        relative = np.divide(weight, old, out=np.zeros_like(weight), where=kept & (old > 0))
        return part.replace(weight=part.base_weight() * jnp.asarray(relative))

    def base_weight(self) -> Array:
        """What `loss_scaling` gives each real sample, ``[m, n]``."""
        real = (self.weight > 0).astype(self.dtype)
        if self.loss_scaling == "sum":
            return real
        count = self.to_tasks(jnp.sum(real, axis=1))
        return real / jnp.maximum(self.to_nodes(count), 1.0)[:, None]
