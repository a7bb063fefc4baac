"""Nodes spread over the devices of a mesh: which of them lie where, and doing something with each device's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Spread:
    """Equal blocks of consecutive nodes on the devices along some axes of a mesh; tasks too, or whole on each."""

    mesh: Mesh
    axes: tuple[str, ...]
    tasks_too: bool

    @property
    def devices(self) -> int:
        """How many blocks there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def by_node(self) -> NamedSharding:
        """Of an array ``[m, ...]``: each device holds the rows of its nodes."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes))

    @property
    def by_task(self) -> NamedSharding:
        """Of an array ``[num_tasks, ...]``."""
        return self.by_node if self.tasks_too else self.everywhere

    @property
    def everywhere(self) -> NamedSharding:
        """Of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())


def each_device(spread: Spread | None, work: Callable[..., Any], shared: Any, *by_node: Any) -> Any:
    """``work(shared, *by_node)``, where every device sees its own nodes only, and so are the results.

    Args:
      spread: where the nodes are; None: on one device, and this is a plain call.
      work: a function of arrays whose leading axis counts nodes, or blocks of nodes.
      shared: arrays that every device needs whole.
      by_node: arrays cut along their leading axis.
    """
    if spread is None:
        return work(shared, *by_node)
    cut = spread.by_node.spec
    specs = PartitionSpec(), *(cut for _ in by_node)
    return jax.shard_map(work, mesh=spread.mesh, in_specs=specs, out_specs=cut, check_vma=False)(shared, *by_node)
