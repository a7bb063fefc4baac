"""Nodes spread over the devices of a mesh: which of them lie where, and doing something with each device's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

Shared = TypeVar("Shared")
Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")


@dataclasses.dataclass(frozen=True)
class NodeSharding:
    """Equal blocks of consecutive nodes on the devices along some axes of a mesh; tasks too, or whole on each."""

    mesh: Mesh
    axes: tuple[str, ...]
    split_tasks: bool
    nodes: int  # of the problem; those beyond were added to fill up the devices

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nowhere, ()  # devices are of one process; what is read back is on the default one

    def __deepcopy__(self, _: dict[int, object]) -> NodeSharding:
        return self  # a copy in this process is on the same devices

    @property
    def devices(self) -> int:
        """The number of blocks."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def by_node(self) -> NamedSharding:
        """The sharding of an array ``[m, ...]``: each device holds the rows of its nodes."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes))

    @property
    def by_task(self) -> NamedSharding:
        """The sharding of an array ``[num_tasks, ...]``."""
        return self.by_node if self.split_tasks else self.replicated

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())


def _nowhere() -> None:
    """Return what is left of a `NodeSharding` in a file or another process: None."""


def each_device(
    sharding: NodeSharding | None, work: Callable[[Shared, *Trees], Result], shared: Shared, *by_node: *Trees
) -> Result:
    """``work(shared, *by_node)``, where every device sees its own nodes only, and so are the results.

    Args:
      sharding: where the nodes are; None: on one device, and this is a plain call.
      work: a function of arrays whose leading axis counts nodes, or blocks of nodes.
      shared: arrays that every device needs whole.
      by_node: arrays cut along their leading axis.
    """
    if sharding is None:
        return work(shared, *by_node)
    cut = sharding.by_node.spec
    specs = PartitionSpec(), *(cut for _ in by_node)
    return jax.shard_map(work, mesh=sharding.mesh, in_specs=specs, out_specs=cut, check_vma=False)(shared, *by_node)


def on_every_device(sharding: NodeSharding | None, work: Callable[[*Trees], Result], *whole: *Trees) -> Result:
    """``work(*whole)``, done by every device for itself."""
    if sharding is None:
        return work(*whole)
    spec = PartitionSpec()
    return jax.shard_map(work, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)(*whole)


def fetched(array: ArrayLike) -> np.ndarray:
    """The whole array on the host; where processes share it, all of them have to ask for it together.

    Of random keys their numbers.
    """
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def place(array: ArrayLike, sharding: Sharding) -> jax.Array:
    """The array on some devices; where processes share them, each puts its part of what all of them have."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
