"""`shard`: the same problem on many devices."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, node_sharding, on_purpose, place
from mocha_jax._core.pytree import fields_of
from mocha_jax._core.values import is_traced
from mocha_jax._data.layouts import AsStored, in_format, row_by_row
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Federated

Kind = TypeVar("Kind", bound=Federated)


@on_purpose
def shard(problem: Kind, mesh: Mesh | AbstractMesh | None = None, axes: str | tuple[str, ...] | None = None) -> Kind:
    """Spread a problem's nodes over devices; `run`, `solve` and `certificate` then work on all of them.

    Every device holds an equal block of consecutive nodes and does their local work; nodes without data are added
    where the number of devices does not divide that of nodes. The server's work is done on every device, or
    divided among them too where tasks can be dealt out evenly. A round of Algorithm 1 with a given coupling moves the
    tasks' dual vectors once: an all-gather of ``[m, d]`` numbers for a dense coupling, a sum of ``[r, d]`` for one of
    low rank r.

    With several processes (`jax.distributed`) all call this with the same problem, on a mesh of all their devices; or
    each brings nodes of its own, and the problem is of the data that `from_process_local` makes of them.

    A problem of shapes (leaves `jax.ShapeDtypeStruct`) may be spread over devices that are not here. Its shapes then
    say where everything lies, and ``jax.jit(...).lower(key, problem).compile()`` tells what a run would take there.
    An `AbstractMesh` has no compiler: ``jax.jit(...).trace(key, problem).lower(lowering_platforms=("tpu",))``.

    Args:
      problem: a problem on one device or on the host, or of data that is spread already; not under `jit`.
      mesh: devices, from `jax.make_mesh` with axes of type `Auto`; default where the data is, or else all devices.
      axes: axes of the mesh to spread the nodes over; default all.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> solution = mj.solve(mj.shard(problem), tol=1e-3)
      >>> solution.weights.shape == (data.num_tasks, data.num_features)
      True

      A million tasks on 64 devices, without any of it:

      >>> from jax.sharding import AbstractMesh, AxisType
      >>> def of_zeros(x, y, task):
      ...     data = mj.TaskData(x, y, y, task, num_tasks=len(task))
      ...     return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> shapes = [jax.ShapeDtypeStruct((10**6, *s), t) for s, t in (((64, 8), "f"), ((64,), "f"), ((), "i"))]
      >>> pod = AbstractMesh((64,), ("nodes",), axis_types=(AxisType.Auto,))
      >>> mj.shard(jax.eval_shape(of_zeros, *shapes), pod).data.x.sharding.shard_shape((10**6, 64, 8))
      (15625, 64, 8)
    """
    check.instance("shard", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    if is_traced(problem.data.x):
        raise ValueError("shard: the problem is traced; shard it before jit, vmap or grad.")
    sharding = problem.placement(_choose_sharding(problem.data, mesh, axes))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(problem)):
        return _shapes(problem, sharding)
    if not sharding.here:
        raise ValueError(
            "shard: the mesh is of devices that are not here; to compile for them, pass the problem's shapes, "
            "jax.eval_shape(lambda: problem)."
        )
    rest = {name: value for name, value in fields_of(problem).items() if name != "data"}
    rest = jax.tree.map(lambda a: a if _is_spread(a) else place(a, sharding.replicated), rest)
    return problem.replace(data=_put(problem.data, sharding), **rest)


def _put(data: TaskData, sharding: NodeSharding) -> TaskData:
    if _same_place(data.sharding, sharding):
        return data.replace(sharding=sharding)
    data = jax.tree.map(lambda a: place(a, sharding.by_node), _padded(data, sharding))
    return data.exchange(x=row_by_row(data.x), layout=AsStored(), sharding=sharding)


def _shapes(problem: Kind, sharding: NodeSharding) -> Kind:
    """Return the shapes of a sharded problem, and where they lie."""

    def spread(problem: Kind) -> Kind:
        data = problem.data if _same_place(problem.data.sharding, sharding) else _padded(problem.data, sharding)
        return problem.replace(data=data.replace(sharding=sharding))

    def placed(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=sharding.by_node if path[0] == _DATA else sharding.replicated)

    shapes = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(spread, problem))
    return shapes.exchange(data=shapes.data.exchange(x=in_format(shapes.data.x)))


_DATA = jax.tree_util.GetAttrKey("data")


def _padded(data: TaskData, sharding: NodeSharding) -> TaskData:
    return data.replace(sharding=None).pad(nodes=-(-data.num_nodes // sharding.devices) * sharding.devices)


def _choose_sharding(
    data: TaskData, mesh: Mesh | AbstractMesh | None, axes: str | tuple[str, ...] | None
) -> NodeSharding:
    old = data.sharding
    if old is not None and mesh is None:
        mesh, axes = old.mesh, old.axes if axes is None else axes
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), ("nodes",), axis_types=(AxisType.Auto,))
    wanted = node_sharding("shard", mesh, axes, data.num_nodes)
    if old is not None and _same_place(old, wanted):
        return old
    if _is_spread(data.x):
        raise ValueError("shard: the data is spread over processes already; leave mesh and axes out, or give its own.")
    return wanted


def _same_place(one: NodeSharding | None, other: NodeSharding) -> bool:
    return one is not None and one.by_node == other.by_node


def _is_spread(array: Array) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable
