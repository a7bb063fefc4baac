"""The data container: the samples of all nodes in padded arrays.

Node is not task. Node k holds samples and works on task ``task[k]``; with one node per
task, the usual case, the two coincide. Several nodes on one task is Remark 4 of the
paper; all nodes on one task is the global model.
"""

from __future__ import annotations

from typing import Self, cast

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, on_purpose
from mocha_jax._data import reshape, splits_and_folds
from mocha_jax._data.layouts import AsStored, row_by_row
from mocha_jax._data.moments import Scaling
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._data.node_arrays import NodeArrays, check_arrays
from mocha_jax._data.standardize import standardized
from mocha_jax._numerics.math import safe_ratio

SCALINGS = ("sum", "task_mean")


class TaskData(NodeArrays):
    r"""The samples of m nodes, padded to a common number of rows n.

    The data term of every model is $\sum_t\sum_i c_{ti}\,\ell(w_t^\top x_{ti}, y_{ti})$
    with the weights c given here. **A row of weight 0 is padding** and has no effect;
    its numbers must still be finite. Build one with `pack_tasks`.
    """

    @on_purpose
    def __post_init__(self) -> None:
        check_arrays(self.x, self.y, self.weight, self.task)
        check.one_of("TaskData", "loss_scaling", self.loss_scaling, SCALINGS)
        check.flag("TaskData", shared=self.shared)
        object.__setattr__(self, "intercept", size_of_intercept("TaskData", self.intercept))
        check.instance("TaskData", "names", self.names, Names, "that of pack_tasks(...)")
        check.integer("TaskData", -1, num_tasks=self.num_tasks)
        if self.scaling is not None:
            check.instance("TaskData", "scaling", self.scaling, Scaling, "that of data.standardized()")
        if self.sharding is not None:
            check.instance("TaskData", "sharding", self.sharding, NodeSharding, "that of shard(problem).data")
        task, weight = check.concrete(self.task), check.concrete(self.weight)
        if task is not None:
            count = int(task.max()) + 1 if self.num_tasks < 0 else self.num_tasks
            if task.dtype.kind not in "iu" or task.min() < 0 or task.max() >= count:
                raise ValueError(
                    f"TaskData: task must hold integers from 0 to {count - 1} (num_tasks), got {check.shown(task)}."
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
        self._check_names()

    @on_purpose
    def __repr__(self) -> str:
        task = check.concrete(self.task)
        if task is None or task.ndim != 1 or task.dtype.kind not in "iu" or check.hidden(self.weight):
            return super().__repr__()  # of several data sets, of derivatives, inside a transformation
        sizes = np.bincount(task, np.asarray(self.sizes), self.num_tasks).astype(int)
        tasks = "1 task" if len(sizes) == 1 else f"{len(sizes)} tasks"
        nodes = "" if self.num_nodes == len(sizes) else f" on {self.num_nodes} nodes"
        least, most = sizes.min(), sizes.max()
        many = f"{most}" if least == most else f"{least} to {most}"
        intercept = " and an intercept" if self.intercept else ""
        return f"TaskData({tasks}{nodes} of {many} samples, {self.num_slopes} features{intercept}, {self.x.dtype})"

    @on_purpose
    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; what is not given follows from them.

        The number of tasks follows a changed `task`, the weights a changed `loss_scaling`, a layout its samples.
        """
        if "task" in changes:
            scaling = None if self.scaling is None else self.scaling.regrouped()
            changes = {"num_tasks": -1, "names": self.names.replace(tasks=None), "scaling": scaling, **changes}
        if "x" in changes and getattr(changes["x"], "shape", (0,))[-1:] != (self.num_features,):
            names = cast(Names, changes.get("names", self.names))
            changes = {"intercept": 0.0, **changes, "names": names.replace(features=None), "scaling": None}
        if not changes.keys().isdisjoint({"x", "y", "weight", "sharding"}):
            changes = {"layout": AsStored(), **changes}
        if "x" in changes:
            changes["x"] = row_by_row(changes["x"])
        changed: Self = super().replace(**changes)
        if changed.loss_scaling == self.loss_scaling or "weight" in changes:
            return changed
        return changed.replace(weight=self.weight * safe_ratio(changed.base_weight(), self.base_weight()))

    def _check_names(self) -> None:
        counts = {"tasks": self.num_tasks, "features": self.num_slopes}
        for what, count in counts.items():
            names = getattr(self.names, what)
            if names is not None and len(names) != count:
                raise ValueError(f"TaskData: names has {len(names)} {what}, but there are {count}.")

    def unnamed(self) -> Self:
        """Leave out the names, which are no part of a program: of other ones nothing is compiled anew."""
        if self.names is NAMELESS and not self.intercept and self.scaling is None:
            return self
        return self.exchange(names=NAMELESS, intercept=0.0, scaling=None)

    @on_purpose
    def split(self, key: Array, fraction: float, *, stratify: bool | None = None) -> tuple[TaskData, TaskData]:
        """Split every node's samples at random into two parts, e.g. training and test.

        Classes of a node are divided in the same proportion as nearly as whole samples allow, so rare ones land on
        both sides. Numbers are divided regardless of their values. A node with two samples or more puts at least one
        on each side; a single sample goes to the first part. Rows keep their order. The weights follow `loss_scaling`
        within each part.

        Args:
          key: a JAX random key. The draw of a sample depends on its node and row only.
          fraction: share of the first part, in (0, 1).
          stratify: whether to divide each label value alike. Default: if there are at most 20 values.

        Examples:
          >>> import jax, numpy as np, mocha_jax as mj
          >>> data = mj.pack_tasks([np.eye(4, dtype=np.float32)], [np.array([1.0, 1, -1, -1])])
          >>> train, test = data.split(jax.random.key(0), 0.5)
          >>> sorted(train.y[0].tolist()), sorted(test.y[0].tolist())
          ([-1.0, 1.0], [-1.0, 1.0])
        """
        return splits_and_folds.split(self, key, fraction, stratify)

    @on_purpose
    def pooled(self) -> TaskData:
        """Put all nodes and samples on one task: the data of the global model.

        With ``loss_scaling="task_mean"`` every sample then weighs 1/N, N of all nodes.
        """
        return reshape.pooled(self)

    @on_purpose
    def merged(self) -> TaskData:
        """The data with all samples on one node and task, as at a central server. Weights do not change.

        Examples:
          >>> import numpy as np, mocha_jax as mj
          >>> data = mj.pack_tasks([np.ones((3, 2), "f"), np.zeros((1, 2), "f")], [np.ones(3), np.zeros(1)])
          >>> data.merged().x.shape, data.merged().y.tolist()
          ((1, 4, 2), [[1.0, 1.0, 1.0, 0.0]])
        """
        return reshape.merged(self)

    @on_purpose
    def pad(self, *, nodes: int | None = None, rows: int | None = None) -> TaskData:
        """Pad with inert nodes and rows up to the given counts, e.g. to fit a device mesh.

        The number of tasks does not change: nodes beyond it hold no data and do no work.
        """
        return reshape.pad(self, nodes, rows)

    @on_purpose
    def append(self, other: TaskData) -> TaskData:
        """Append the tasks of `other` after the existing ones.

        Examples:
          >>> import numpy as np, mocha_jax as mj
          >>> old, new = (mj.pack_tasks([np.ones((n, 2), "f")], [np.ones(n)]) for n in (3, 1))
          >>> both = old.append(new)
          >>> both.num_tasks, both.sizes.tolist()
          (2, [3, 1])
        """
        return reshape.append(self, other)

    @on_purpose
    def join(self, other: TaskData) -> TaskData:
        """Add samples that came later: rows of old tasks, found by their names, and new tasks after the old ones.

        Existing samples keep their places, so that a solve continues from its state,
        ``algorithm.add_tasks(solution.state, larger)``. Weights follow `loss_scaling`.

        Examples:
          >>> import numpy as np, mocha_jax as mj
          >>> old = mj.pack_tasks(np.ones((3, 2), "f"), np.ones(3), ["oak", "oak", "elm"])
          >>> new = mj.pack_tasks(np.zeros((3, 2), "f"), np.ones(3), ["elm", "elm", "yew"])
          >>> both = old.join(new)
          >>> both.names.tasks, both.sizes.tolist()
          (('elm', 'oak', 'yew'), [3, 2, 1])
        """
        return reshape.join(self, other)

    @on_purpose
    def standardized(self, by: str = "pooled", *, labels: bool = False, like: TaskData | None = None) -> TaskData:
        """Centre every feature and divide it by its standard deviation.

        ``solution.model`` is in the original units, and metrics of a solution
        take the original data. An appended intercept does not change.

        Args:
          by: whose means and standard deviations: ``"pooled"``, those of all samples; ``"task"``, those of each task;
            ``"within"``, the means of each task, and the standard deviation from them of all samples;
            ``"centred"``, the means of each task and no deviations. A task without samples has the others' means.
          labels: subtract the means of the labels too. With means of tasks and the squared loss, **no
            intercept is penalised** then: the best one is 0.
          like: other data, for training, whose means and standard deviations to use instead.

        Examples:
          >>> import numpy as np, mocha_jax as mj
          >>> x = np.array([[1000.0], [3000.0], [0.0], [2000.0]], "f")
          >>> data = mj.pack_tasks(x, x[:, 0], ["oak", "oak", "elm", "elm"])
          >>> data.standardized("task", labels=True).x[..., 0].tolist()
          [[-1.0, 1.0], [-1.0, 1.0]]
        """
        return standardized(self, by, labels, like)

    @on_purpose
    def folds(self, key: Array, count: int, groups: ArrayLike | None = None) -> Array:
        """Deal every node's samples into parts of nearly equal size, for cross-validation.

        Each label value of a node is spread over the parts as evenly as whole samples allow; real-valued labels are
        dealt at random. Nodes begin with different parts, so that those with few samples do not all fill the same one.

        Args:
          key: a JAX random key. The draw of a sample depends on its node and row only.
          count: how many parts, from 2 to the samples of the largest task.
          groups: ``[m, n]`` integers; samples of a node with the same number stay together, e.g. of one
            recording. Labels are then not balanced.

        Returns:
          The part of every sample ``[m, n]`` int32; -1 for padding.

        Examples:
          >>> import jax, numpy as np, mocha_jax as mj
          >>> data = mj.pack_tasks([np.eye(6, dtype=np.float32)], [np.array([1.0, 1, 1, -1, -1, -1])])
          >>> part = data.folds(jax.random.key(0), 3)
          >>> [sorted(data.y[part == f].tolist()) for f in range(3)]
          [[-1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]
        """
        return splits_and_folds.folds(self, key, count, groups)

    @on_purpose
    def keep(self, rows: Array) -> TaskData:
        """Keep the rows that are marked ``[m, n]`` as samples; the weights follow `loss_scaling`."""
        return splits_and_folds.keep(self, rows)


def size_of_intercept(owner: str, intercept: bool | float) -> float:
    """The constant that is appended to samples: 1 for True, 0 for none."""
    if not isinstance(intercept, bool | np.bool_):
        check.scalar(owner, intercept=intercept)
        check.nonnegative(owner, intercept=intercept)
    return float(intercept)
