"""The arrays of all nodes, and what is computed of them: predictions, sums over samples, nodes to tasks and back."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, on_purpose
from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._data.frames import check_unmasked
from mocha_jax._data.layouts import AsStored, Layout
from mocha_jax._data.moments import Scaling
from mocha_jax._data.names import NAMELESS, Names
from mocha_jax._numerics.math import Terms

Data = TypeVar("Data", bound="NodeArrays")
Value = TypeVar("Value")
Result = TypeVar("Result")  # a tree of arrays [m, ...]


Samples = Array | np.ndarray

# Arrays that were looked at. Those of JAX never change, so once is enough.
_seen: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


class NodeArrays(Pytree):
    """The fields of `TaskData`, and all that compiled programs ask of them."""

    x: Array  # [m, n, d]
    y: Array  # [m, n]
    weight: Array  # [m, n] c_ti; 0 marks padding
    task: Array  # [m] the task that node k works on
    layout: Layout = AsStored()  # the samples as an algorithm reads them; drivers set it
    num_tasks: int = static(default=-1)  # -1: derived from `task`
    shared: bool = static(default=False)  # False: node k works on task k, nodes beyond are inert
    loss_scaling: str = static(default="sum")
    names: Names = static(default=NAMELESS)  # of tasks, features and classes; from `pack_tasks`
    intercept: float = static(default=0.0)  # the last feature of every sample, where one was appended; else 0
    scaling: Scaling | None = static(default=None)  # what was taken from the samples; from `standardized`
    sharding: NodeSharding | None = static(default=None)  # on which devices the nodes are, from `shard`

    @abstractmethod
    def __post_init__(self) -> None:
        """Check the fields, and derive those that are left open."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes, m."""
        return self.x.shape[0]

    @property
    def num_features(self) -> int:
        """Length d of a sample, the appended intercept included."""
        return self.x.shape[2]

    @property
    def num_slopes(self) -> int:
        """The number of features without an appended intercept."""
        return self.num_features - bool(self.intercept)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all arithmetic. The samples may be stored in fewer bits, see `pack_tasks`."""
        return self.y.dtype

    @property
    @on_purpose
    def sizes(self) -> Array:
        """Real samples of each node, ``[m]`` int32."""
        return self.layout.sizes(self.weight)

    @property
    def nodes_per_task(self) -> Array:
        """The number of nodes that hold data of each task, ``[num_tasks]``."""
        return self.to_tasks((self.sizes > 0).astype(self.dtype))

    def to_nodes(self, per_task: Array) -> Array:
        """Give each node its task's row: ``[num_tasks, ...]`` to ``[m, ...]``."""
        if self.shared:
            per_node = per_task[self.task]
        else:
            per_node = jnp.pad(per_task, [(0, self.num_nodes - self.num_tasks)] + [(0, 0)] * (per_task.ndim - 1))
        return per_node if self.sharding is None else lax.with_sharding_constraint(per_node, self.sharding.by_node)

    def to_tasks(self, per_node: Array) -> Array:
        """Add up the nodes of each task: ``[m, ...]`` to ``[num_tasks, ...]``."""
        if self.shared:
            return self.constrain_tasks(jax.ops.segment_sum(per_node, self.task, self.num_tasks))
        return self.constrain_tasks(per_node[: self.num_tasks])

    def replicated(self, array: Array) -> Array:
        """Place an array whole on every device."""
        return array if self.sharding is None else lax.with_sharding_constraint(array, self.sharding.replicated)

    def constrain_tasks(self, per_task: Value) -> Value:
        """Place arrays where `sharding` wants them: those with a row for every task, and others on every device."""
        sharding = self.sharding
        if sharding is None:
            return per_task

        def place(array: Array) -> Array:
            rows = array.ndim > 0 and len(array) == self.num_tasks
            return lax.with_sharding_constraint(array, sharding.by_task if rows else sharding.replicated)

        return jax.tree.map(place, per_task)

    def pad_settings(self, settings: Value) -> Value:
        """Settings per node ``[..., m]`` of the nodes there were before `shard`, for all: those beyond are inert."""
        if self.sharding is None:
            return settings
        if self.num_nodes == (nodes := self.sharding.nodes):
            return settings
        numbers = self.sharding.numbers(self.num_nodes)

        def fill(array: ArrayLike) -> ArrayLike:
            return jnp.asarray(array)[..., numbers] if np.shape(array)[-1:] == (nodes,) else array

        return jax.tree.map(fill, settings)

    def node_predictions(self, weights: Array) -> Array:
        """Multiply every sample by its node's weights: ``[m, d]`` to ``[m, n]``."""
        return self.layout.node_predictions(self.x, weights)

    def weighted_sums(self, factors: Array) -> Array:
        """Add up each node's samples times their factors: ``[m, n]`` to ``[m, d]``."""
        return self.layout.weighted_sums(self.x, factors)

    def predictions(self, weights: Array) -> Array:
        r"""Predict $z_{ti} = w_t^T x_{ti}$: weights ``[num_tasks, d]`` to ``[m, n]``."""
        check.array("TaskData.predictions", "weights", weights, (self.num_tasks, self.num_features))
        return self.node_predictions(self.to_nodes(weights))

    def node_vectors(self, beta: Array) -> Array:
        r"""Add up $\sum_i c_{ki}\beta_{ki}x_{ki}$ of every node: duals ``[m, n]`` to ``[m, d]``."""
        return self.weighted_sums(self.weight * beta)

    def renewed(self, vectors: Array, beta: Array, part: Array, parts: int) -> Array:
        """Derive `node_vectors` afresh for one of so many parts of the nodes; of the others they stay what they are.

        What rounds have added up has the rounding of all of them. In every round a part of it is replaced, which costs
        little and, unlike all of it now and then, takes no decision.
        """
        real = self.num_nodes if self.shared else self.num_tasks  # beyond it nodes hold no data
        return self.layout.renewed(self.x, self.sharding, self.weight * beta, vectors, part, parts, real)

    def dual_vectors(self, beta: Array) -> Array:
        r"""Add up $v_t = \sum_i c_{ti}\beta_{ti}x_{ti}$: duals ``[m, n]`` to ``[num_tasks, d]``."""
        return self.to_tasks(self.node_vectors(beta))

    def weighted(self, terms: Array) -> Array:
        """Multiply terms ``[m, n]`` by c, with padding cut off rather than multiplied: 0 times infinity is not 0."""
        return jnp.where(self.weight > 0, self.weight * terms, 0.0)

    def map_samples(self, work: Callable[..., Result], by_node: tuple[Array, ...], *by_row: Array) -> Result:
        """Compute something of the samples of every node, of some nodes at a time; of padding it is to be 0.

        Args:
          work: ``work(x, *by_node, *by_row)``, of samples ``[k, r, d]`` and arrays ``[k, ...]`` and ``[k, r, ...]``
            makes arrays ``[k, ...]``. It may be given fewer rows than there are, r of n: those that are real.
          by_node: arrays ``[m, ...]``.
          *by_row: arrays ``[m, n, ...]``.
        """
        return cast(Result, self.layout.map_samples(self.x, self.sharding, work, by_node, *by_row))

    def with_features_scaled(self, scale: Array) -> Self:
        """Multiply the features of all samples by these numbers ``[d]``; how they were laid out is lost."""
        x = self.x * scale[None, None, :].astype(self.x.dtype)
        return self.exchange(x=x, layout=AsStored())

    @property
    def longest(self) -> Array:
        """The length of each node's longest sample, ``[m]``."""
        return self.layout.longest(self.x, self.dtype)

    def map_rows(self, work: Callable[..., Array], given: Tree, by_node: tuple[Array, ...], *by_row: Array) -> Array:
        """Compute something for every sample, ``[m, n]``; for padding perhaps what the first array holds.

        Args:
          work: ``work(given, by_node, *by_row)``, for any nodes and any number of rows.
          given: what else it depends on, e.g. a loss: a tree of numbers and of arrays ``[m, 1]``.
          by_node: arrays ``[m, ...]``.
          *by_row: arrays ``[m, n]``.
        """
        return self.layout.map_rows(work, given, by_node, *by_row)

    def sum_over_rows(self, terms: Callable[..., Terms], given: Tree, weights: Array, *rows: Array) -> Terms:
        """Add up c times something over each node's samples, ``[m]``.

        Args:
          terms: ``terms(given, z, y, *rows)``, arrays with a number for every sample.
          given: what else the terms depend on, e.g. a loss: a tree of numbers and of arrays ``[m, 1]``.
          weights: ``[m, d]``, for the predictions z.
          *rows: other arrays ``[m, n]``, e.g. duals.
        """
        return self.layout.sum_over_rows(self.x, self.y, self.weight, terms, given, weights, *rows)

    def base_weight(self) -> Array:
        """Return the weight that `loss_scaling` gives each real sample, ``[m, n]``."""
        real = (self.weight > 0).astype(self.dtype)
        if self.loss_scaling == "sum":
            return real
        count = self.to_tasks(jnp.sum(real, axis=1))
        return real / jnp.maximum(self.to_nodes(count), 1.0)[:, None]


def check_arrays(x: Samples, y: Samples, weight: Samples, task: Samples) -> None:
    """Samples ``[m, n, d]``, labels and weights ``[m, n]`` and tasks ``[m]`` that fit together and are numbers."""
    check_unmasked("TaskData", x=x, y=y, weight=weight, task=task)
    check.array("TaskData", "x", x, ("m", "n", "d"))
    m, n, _ = np.shape(x)
    for name, value, shape in (("y", y, (m, n)), ("weight", weight, (m, n)), ("task", task, (m,))):
        check.array("TaskData", name, value, shape)
    weights = check.concrete(weight)
    if weights is not None and not (sound := np.isfinite(weights) & (weights >= 0)).all():
        node = int(np.argmin(sound.all(1)))
        raise ValueError(f"TaskData: node {node} has a negative or non-finite weight; weights must be >= 0.")
    for name, value in (("x", x), ("y", y)):
        if not _finite(value):
            good = np.isfinite(np.asarray(value)).reshape(m, n, -1).all(2)
            node, row = np.argwhere(~good)[0]
            tasks = check.concrete(task)
            position = f"{'' if tasks is None else f'task {int(tasks[node])}, '}node {node}, row {row}"
            # 0 times NaN is not 0.
            padding = weights is not None and weights[node, row] == 0
            remedy = "padding must be finite too, e.g. 0" if padding else "remove or impute it"
            raise ValueError(f"TaskData: {name} is NaN or infinite in {position}; {remedy}.")


def _views(array: Samples) -> list[np.ndarray]:
    """The numbers of an array on CPUs as they lie there: NumPy's own copy of them in its order would stay with it."""
    if not isinstance(array, jax.Array):
        return [np.asarray(array)]
    return [np.from_dlpack(shard.data) for shard in array.addressable_shards]


def _finite(array: Samples) -> bool:
    """Tell whether all numbers are finite, at about the cost of their sum; true of what cannot be looked at."""
    if check.hidden(array) or not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    if _seen.get(id(array)) is array:
        return True
    on_host = not isinstance(array, jax.Array) or {d.platform for d in array.devices()} == {"cpu"}
    if on_host and array.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            # What is not finite stays so in a sum; finite numbers may overflow in it.
            finite = all(bool(np.isfinite(a.sum()) or np.isfinite(a).all()) for a in _views(array))
    else:  # NumPy is slow with small floats, and what is elsewhere should stay there
        with jax.ensure_compile_time_eval():
            finite = bool(jnp.isfinite(array).all())
    if finite and isinstance(array, jax.Array):
        _seen[id(array)] = array
    return finite
