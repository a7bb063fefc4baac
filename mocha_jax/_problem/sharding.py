"""`shard`: the same problem on many devices."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, place
from mocha_jax._core.pytree import fields_of
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Federated

Kind = TypeVar("Kind", bound=Federated)


@on_purpose
def shard(problem: Kind, mesh: Mesh | None = None, axes: str | tuple[str, ...] | None = None) -> Kind:
    """Spread a problem's nodes over devices; `run`, `solve` and `certificate` then work on all of them.

    Every device holds an equal block of consecutive nodes and does their local work; nodes without data are added
    where the number of devices does not divide that of nodes. The server's work is done on every device, or
    divided among them too where tasks can be dealt out evenly. A round of Algorithm 1 with a given coupling moves the
    tasks' dual vectors once: an all-gather of ``[m, d]`` numbers for a dense coupling, a sum of ``[r, d]`` for one of
    low rank r.

    With several processes (`jax.distributed`) all call this with the same problem, on a mesh of all their devices.

    Args:
      problem: a problem on one device or on the host, not under `jit`.
      mesh: devices, from `jax.make_mesh` with axes of type `Auto`; default all devices there are.
      axes: axes of the mesh to spread the nodes over; default all.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> solution = mj.solve(mj.shard(problem), tol=1e-3)
      >>> solution.weights.shape == (data.num_tasks, data.num_features)
      True
    """
    check.instance("shard", "problem", problem, Federated, "Problem(data, loss, regularizer)")
    sharding = _node_sharding(problem, mesh, axes)
    if isinstance(problem.data.x, jax.core.Tracer):
        raise ValueError("shard: the problem is traced; shard it before jit, vmap or grad.")
    rest = {name: value for name, value in fields_of(problem).items() if name != "data"}
    rest = jax.tree.map(lambda a: place(a, sharding.replicated), rest)
    return problem.replace(data=_put(problem.data, sharding), **rest)


def _put(data: TaskData, sharding: NodeSharding) -> TaskData:
    data = data.replace(sharding=None)
    data = data.pad(nodes=-(-data.num_nodes // sharding.devices) * sharding.devices)
    return jax.tree.map(lambda a: place(a, sharding.by_node), data).replace(sharding=sharding)


def _node_sharding(problem: Federated, mesh: Mesh | None, axes: str | tuple[str, ...] | None) -> NodeSharding:
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), ("nodes",), axis_types=(AxisType.Auto,))
    check.instance("shard", "mesh", mesh, Mesh, 'jax.make_mesh((8,), ("nodes",), axis_types=(AxisType.Auto,))')
    axes = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(f"shard: axes must name axes of the mesh, such as {mesh.axis_names}, got {check.shown(axes)}.")
    axes = tuple(axes)
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing or not axes:
        none = check.shown(missing) if missing else "axes were named"
        raise ValueError(f"shard: the mesh has axes {mesh.axis_names}, but no {none}.")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"shard: the mesh's axes are of types {mesh.axis_types}; make it with axis_types=(AxisType.Auto,) for "
            f"each axis (from jax.sharding import AxisType)."
        )
    return problem.placement(NodeSharding(mesh, axes, False, problem.data.num_nodes))
