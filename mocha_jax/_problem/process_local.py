"""`from_process_local`: data of which every process brings its own nodes."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, node_sharding, on_purpose, place, place_rows
from mocha_jax._core.processes import agreed, gathered, together
from mocha_jax._data.layouts import row_by_row
from mocha_jax._data.task_data import TaskData

_OWNER = "from_process_local"


@on_purpose
def from_process_local(
    data: TaskData,
    mesh: Mesh | None = None,
    axes: str | tuple[str, ...] | None = None,
    *,
    task: ArrayLike | None = None,
) -> TaskData:
    """Make one data set of the nodes that every process brings, each on a device of its process.

    All processes of a run (`jax.distributed`) call this together, each with data of its own; samples do not travel.
    What is exchanged is how many nodes there are and their rows, and, where nodes share tasks, the task and the number
    of samples of each node. A problem of the result goes to `shard`.

    Nodes are numbered in the order of the devices. All devices have room for equally many; what a process does not
    fill is taken by nodes without data, so it is best that all bring equally many. Where they do not, tasks may lie
    elsewhere than their nodes and then travel in every round, and what chance does to a node, in `mocha_jax.systems`,
    depends on its place, those without data counted.

    Args:
      data: the nodes of this process, from `pack_tasks`, at least one; features, dtypes and `loss_scaling` are those
        of all processes.
      mesh: devices of all processes; default all there are, process by process.
      axes: axes of the mesh to spread the nodes over; default all. No block of nodes may lie in two processes.
      task: ``[m]`` the task of each of these nodes, counted over all processes: nodes of several may share one, and
        with ``loss_scaling="task_mean"`` a task's samples are counted over all of them. Default: tasks of this
        process alone, numbered after those on earlier devices.

    Examples:
      In a run of one process it is the data of that process:

      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(n, 3)).astype("f") for n in (5, 8, 3)]
      >>> data = mj.from_process_local(mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs]))
      >>> problem = mj.shard(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1)))
      >>> mj.solve(problem, tol=1e-3).status.name
      'CONVERGED'
    """
    mesh = _all_devices() if mesh is None else mesh
    reports = together(_OWNER, lambda: _described(data, mesh, axes, task))
    agreed(_OWNER, reports, "features", "dtype", "dtype of samples", "loss_scaling", "mesh", "whether task is given")
    deal = _dealt(node_sharding(_OWNER, mesh, axes, 0), [one["nodes"] for one in reports])
    own = data.pad(nodes=len(deal.own_places), rows=max(one["rows"] for one in reports))
    weight = np.array(own.weight)
    if task is None and all(one["a task each"] for one in reports):
        owner = np.where(deal.real, np.cumsum(deal.real) - 1, 0)
        occupied = deal.real
    else:
        owner, samples = _exchanged(data, task, reports, deal)
        occupied = samples > 0
        if data.loss_scaling == "task_mean":
            weight[: data.num_nodes] *= _share(data, owner, samples, deal)[:, None].astype(weight.dtype)
    num_tasks = int(owner.max()) + 1
    in_order = np.array_equal(owner[:num_tasks], np.arange(num_tasks)) and not occupied[num_tasks:].any()
    return TaskData(
        x=row_by_row(deal.spread(np.asarray(own.x))),
        y=deal.spread(np.asarray(own.y)),
        weight=deal.spread(weight),
        task=place(owner.astype(np.int32), deal.sharding.by_node),
        num_tasks=num_tasks,
        shared=not in_order,
        loss_scaling=data.loss_scaling,
        sharding=deal.sharding,
    )


@dataclasses.dataclass(frozen=True)
class _Deal:
    """The places of nodes in arrays ``[m, ...]`` that all processes share."""

    sharding: NodeSharding
    size: int  # places in a block
    places: list[np.ndarray]  # of each process, its nodes first
    counts: list[int]  # nodes of each process

    @property
    def own_places(self) -> np.ndarray:
        """The places in this process."""
        return self.places[jax.process_index()]

    @property
    def real(self) -> np.ndarray:
        """The places that hold a node, ``[m]`` bool."""
        real = np.zeros(self.sharding.devices * self.size, bool)
        for places, count in zip(self.places, self.counts, strict=True):
            real[places[:count]] = True
        return real

    def spread(self, own: np.ndarray) -> jax.Array:
        """Put the rows of this process's places on its devices, as part of an array of all."""

        def rows(start: int, stop: int) -> np.ndarray:
            place = int(np.flatnonzero(self.own_places == start)[0])
            return own[place : place + stop - start]

        return place_rows((self.sharding.devices * self.size, *own.shape[1:]), self.sharding.by_node, rows)


def _all_devices() -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices), ("nodes",), axis_types=(AxisType.Auto,))


def _described(
    data: TaskData, mesh: Mesh, axes: str | tuple[str, ...] | None, task: ArrayLike | None
) -> dict[str, Any]:
    """Describe what this process brings, in what others must know or agree with."""
    check.instance(_OWNER, "data", data, TaskData, "pack_tasks(xs, ys)")
    if check.hidden(data.weight) or data.sharding is not None:
        raise ValueError(f"{_OWNER}: data must be of this process alone, not traced, abstract or spread already.")
    if task is not None:
        check.array(_OWNER, "task", task, (data.num_nodes,), "iu")
        check.integers(_OWNER, 0, task=task)
    sharding = node_sharding(_OWNER, mesh, axes, data.num_nodes)
    if not sharding.here:
        raise ValueError(f"{_OWNER}: the mesh is of devices that are not here.")
    blocks = sharding.blocks_of_processes()
    if sorted(blocks) != list(range(jax.process_count())):
        raise ValueError(
            f"{_OWNER}: the mesh has devices of processes {sorted(blocks)} only, of {jax.process_count()}."
        )
    if sum(map(len, blocks.values())) != sharding.devices:
        raise ValueError(
            f"{_OWNER}: nodes over {sharding.axes} of a mesh {dict(mesh.shape)} would lie on devices of several "
            f"processes each; spread them over axes along which no process begins anew."
        )
    ids = zlib.crc32(repr([device.id for device in mesh.devices.flat]).encode())
    return {
        "features": data.num_features,
        "dtype": str(data.dtype),
        "dtype of samples": str(data.x.dtype),
        "loss_scaling": data.loss_scaling,
        "mesh": f"{dict(mesh.shape)} along {sharding.axes}, devices {ids:08x}",
        "whether task is given": task is not None,
        "nodes": data.num_nodes,
        "rows": data.y.shape[1],
        "tasks": data.num_tasks,
        "a task each": data.num_tasks == data.num_nodes and not data.shared,
    }


def _dealt(sharding: NodeSharding, counts: list[int]) -> _Deal:
    """Fill the blocks of every process with its nodes, one block after the other."""
    blocks = sharding.blocks_of_processes()
    size = max(-(-count // len(blocks[process])) for process, count in enumerate(counts))
    places, filled = [], [0] * sharding.devices
    for process, count in enumerate(counts):
        for i, block in enumerate(blocks[process]):
            filled[block] = min(max(count - i * size, 0), size)
        places.append(np.concatenate([block * size + np.arange(size) for block in blocks[process]]))
    return _Deal(dataclasses.replace(sharding, nodes=sum(counts), filled=tuple(filled)), size, places, counts)


def _exchanged(
    data: TaskData, task: ArrayLike | None, reports: list[dict[str, Any]], deal: _Deal
) -> tuple[np.ndarray, np.ndarray]:
    """The task and the number of samples in every place, of all processes."""
    order = np.argsort([places[0] for places in deal.places])
    tasks = np.array([one["tasks"] for one in reports])
    before = np.zeros(len(reports), int)
    before[order[1:]] = np.cumsum(tasks[order])[:-1]  # tasks on earlier devices
    own = np.zeros((2, max(deal.counts)), np.int32)
    own[0, : data.num_nodes] = np.asarray(data.task) + before[jax.process_index()] if task is None else task
    own[1, : data.num_nodes] = np.asarray(data.sizes)
    owner, samples = (np.zeros(deal.sharding.devices * deal.size, int) for _ in range(2))
    for places, count, (theirs, sizes) in zip(deal.places, deal.counts, gathered(own), strict=True):
        owner[places[:count]], samples[places[:count]] = theirs[:count], sizes[:count]
    named = np.unique(owner[deal.real])
    if len(named) <= named[-1]:
        lacking = int(np.flatnonzero(~np.isin(np.arange(len(named) + 1), named))[0])
        raise ValueError(
            f"{_OWNER}: task names tasks up to {named[-1]}, but no node of any process works on task {lacking}; number "
            f"them without gaps."
        )
    return owner, samples


def _share(data: TaskData, owner: np.ndarray, samples: np.ndarray, deal: _Deal) -> np.ndarray:
    """Return the samples of each own node's task in what this process packed, over those of all processes."""
    packed, sizes = np.asarray(data.task), np.asarray(data.sizes)
    packed_samples = np.bincount(packed, sizes)[packed]
    all_samples = np.bincount(owner, samples)[owner[deal.own_places[: data.num_nodes]]]
    return packed_samples / np.maximum(all_samples, 1)
