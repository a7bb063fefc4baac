"""Nodes spread over the devices of a mesh: their placement, work on each device's own nodes, and transfers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._core import check
from mocha_jax._core.processes import all_rows
from mocha_jax._core.values import is_traced

Shared = TypeVar("Shared")
Tree = TypeVar("Tree")
Result = TypeVar("Result")
Trees = TypeVarTuple("Trees")
Function = TypeVar("Function", bound=Callable[..., object])


@dataclasses.dataclass(frozen=True)
class NodeSharding:
    """Equal blocks of consecutive nodes on the devices along some axes of a mesh; tasks too, or whole on each."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    split_tasks: bool
    nodes: int  # of the problem; all others were added to fill up the devices
    filled: tuple[int, ...] = ()  # nodes of the problem in each block, the first of it; (): full ones, then the rest

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nowhere, ()  # devices are of one process; what is read back is on the default one

    def __deepcopy__(self, _: dict[int, object]) -> NodeSharding:
        return self  # a copy in this process is on the same devices

    @property
    def devices(self) -> int:
        """The number of blocks."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def here(self) -> bool:
        """Tell whether these are devices of this run, on which arrays can be put."""
        if isinstance(self.mesh, AbstractMesh):
            return False
        return all(map(_is_of_this_run, self.mesh.devices.flat))

    def blocks_of_processes(self) -> dict[int, list[int]]:
        """The blocks that lie on the devices of each process, in order."""
        blocks_of: dict[int, set[int]] = {}
        indices: Any = self.by_node.devices_indices_map((self.devices,))
        for device, (rows,) in indices.items():
            blocks_of.setdefault(device.process_index, set()).add(rows.start or 0)
        return {process: sorted(blocks) for process, blocks in blocks_of.items()}

    def numbers(self, num_nodes: int) -> np.ndarray:
        """Return which node of the problem is in each place ``[num_nodes]``; where none is, the last one before."""
        if not self.filled:
            return np.minimum(np.arange(num_nodes), self.nodes - 1)
        block, place = np.divmod(np.arange(num_nodes), num_nodes // self.devices)
        filled = np.asarray(self.filled)
        return np.maximum((np.cumsum(filled) - filled)[block] + np.minimum(place, filled[block] - 1), 0)

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
    """Return None, which replaces a `NodeSharding` in a file or another process."""


def node_sharding(
    owner: str, mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None, nodes: int
) -> NodeSharding:
    """Nodes over some axes of a mesh, default all of them; both as a person gave them."""
    if not isinstance(mesh, AbstractMesh):
        check.instance(owner, "mesh", mesh, Mesh, 'jax.make_mesh((8,), ("nodes",), axis_types=(AxisType.Auto,))')
    axes = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(
            f"{owner}: axes must name axes of the mesh, such as {mesh.axis_names}, got {check.shown(axes)}."
        )
    axes = tuple(axes)
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing or not axes:
        none = check.shown(missing) if missing else "axes were named"
        raise ValueError(f"{owner}: the mesh has axes {mesh.axis_names}, but no {none}.")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"{owner}: the mesh's axes are of types {mesh.axis_types}; make it with axis_types=(AxisType.Auto,) for "
            f"each axis (from jax.sharding import AxisType)."
        )
    return NodeSharding(mesh, axes, False, nodes)


def _is_of_this_run(device: jax.Device) -> bool:
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # there are no devices of that kind
        return False


def each_device(
    sharding: NodeSharding | None, work: Callable[[Shared, *Trees], Result], shared: Shared, *by_node: *Trees
) -> Result:
    """``work(shared, *by_node)``, where every device sees its own nodes only, and so are the results.

    Args:
      sharding: where the nodes are; None: on one device, and this is a plain call.
      work: a function of arrays whose leading axis counts nodes, or blocks of nodes.
      shared: arrays that every device needs whole.
      by_node: arrays cut along their leading axis; numbers among them are the same for all nodes.
    """
    if sharding is None:
        return work(shared, *by_node)
    cut = sharding.by_node.spec
    specs = PartitionSpec(), *(jax.tree.map(lambda a: cut if np.ndim(a) else PartitionSpec(), tree) for tree in by_node)
    return jax.shard_map(work, mesh=sharding.mesh, in_specs=specs, out_specs=cut, check_vma=False)(shared, *by_node)


def on_every_device(sharding: NodeSharding | None, work: Callable[[*Trees], Result], *whole: *Trees) -> Result:
    """``work(*whole)``, done by every device for itself."""
    if sharding is None:
        return work(*whole)
    spec = PartitionSpec()
    return jax.shard_map(work, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)(*whole)


def on_all(sharding: NodeSharding | None, tree: Tree) -> Tree:
    """Copy to every device the arrays that lie on some of them on purpose; JAX moves the others by itself."""
    if sharding is None:
        return tree

    def copied(leaf: object) -> object:
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return leaf
        return place(leaf, sharding.replicated)

    return cast(Tree, jax.tree.map(copied, tree))


def beside(array: object, tree: Tree) -> Tree:
    """Put arrays on the one device on which another lies on purpose, as the results of programs with it do.

    A program is compiled anew for arguments of which JAX may choose the device.
    """
    if not isinstance(array, jax.Array) or is_traced(array) or not array.committed or len(array.devices()) > 1:
        return tree
    (device,) = array.devices()

    def put(leaf: ArrayLike) -> ArrayLike:
        there = isinstance(leaf, jax.Array) and leaf.committed and leaf.devices() == {device}
        return leaf if there else jax.device_put(leaf, device)

    return cast(Tree, jax.tree.map(put, tree))


def _in_plain_order(array: ArrayLike, sharding: Sharding) -> ArrayLike:
    """The array in the order of its axes, if it is to go elsewhere: between CPU devices JAX forgets any other order."""
    if not isinstance(array, jax.Array) or array.sharding.device_set == sharding.device_set:
        return array
    plain = tuple(range(array.ndim))
    return array if order_of(array) in (None, plain) else in_order(array, plain)


def order_of(array: Array) -> tuple[int, ...] | None:
    """Return the order of an array's axes in memory, None if it has none."""
    described: Any = array  # JAX's types leave its format out
    layout = described.format.layout
    return None if layout is None else layout.major_to_minor


def in_order(array: Array, order: tuple[int, ...]) -> Array:
    """Put the axes of an array in this order in memory, the one whose neighbours are farthest apart first."""
    return jax.jit(_same, out_shardings=format_of(order, array.sharding))(array)


def format_of(order: tuple[int, ...], sharding: Sharding) -> Format:
    """Return the format of arrays on some devices with their axes in this order."""
    return Format(Layout(order), sharding)


def _same(array: Array) -> Array:
    return array


def fetched(array: ArrayLike) -> np.ndarray:
    """The whole array on the host; where processes share it, all of them have to ask for it together.

    Of random keys their numbers.
    """
    array = key_numbers(array)
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return all_rows(array)
    return np.asarray(array)


def on_host(*arrays: Array) -> tuple[Array, ...] | None:
    """Return the memory of arrays as arrays of NumPy, where all of them lie on one CPU; else None."""
    views = [_on_host(array) for array in arrays]
    return None if any(view is None for view in views) else cast(tuple[Array, ...], tuple(views))


def _on_host(array: Array | np.ndarray) -> np.ndarray | None:
    if isinstance(array, np.ndarray):
        return array
    if is_traced(array) or [device.platform for device in array.devices()] != ["cpu"]:
        return None
    try:
        return np.from_dlpack(cast(Any, array))
    except Exception:  # of a dtype that NumPy lacks
        return None


def namespace_of(array: Array) -> Any:
    """NumPy for its own arrays, `jax.numpy` for others."""
    return np if isinstance(array, np.ndarray) else jnp


def key_numbers(array: ArrayLike) -> ArrayLike:
    """An array as it is, of random keys their numbers."""
    keys = isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if keys else array


def own_rows(array: Array) -> list[tuple[int, np.ndarray]]:
    """The blocks of rows of a shared array that this process answers for, each with its first row."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    blocks = {shard.index[0].start or 0: shard.data for shard in shards}
    return [(start, np.asarray(blocks[start])) for start in sorted(blocks)]


def is_cut_by_rows(array: ArrayLike) -> bool:
    """Tell whether processes share an array and each holds whole rows of it, not all."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return False
    block = array.sharding.shard_shape(array.shape)
    return block[1:] == array.shape[1:]


def place(array: ArrayLike, sharding: Sharding) -> jax.Array:
    """The array on some devices; where processes share them, each puts its part of what all of them have."""
    if sharding.is_fully_addressable:
        return jax.device_put(_in_plain_order(array, sharding), sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_rows(shape: tuple[int, ...], sharding: Sharding, rows: Callable[[int, int], np.ndarray]) -> jax.Array:
    """An array that is cut along its leading axis, each process making ``rows(start, stop)`` where they lie with it."""

    def block(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        return rows(start, stop)[(slice(None), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, block)


def on_purpose(function: Function) -> Function:
    """The function, with leave to bring to the device what it needs there, and to look at what comes of it.

    With ``jax_transfer_guard="disallow"`` people look for arrays that travel to the device unnoticed; to JAX every
    Python number in an expression is one of them. What a function of the library is given and the few numbers that it
    adds are meant to be there.
    """

    @functools.wraps(function)
    def with_leave(*args: object, **kwargs: object) -> object:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return cast(Function, with_leave)


def on_device(value: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """The value as an array of JAX. What is on the host is made there: `jnp.asarray` would compile a program for it."""
    if isinstance(value, jax.Array):
        # In that dtype and not weakly so: programs are compiled for one or the other.
        same = dtype is None or (value.dtype == dtype and not value.weak_type)
        return value if same else jnp.asarray(value, dtype)
    return jax.device_put(np.asarray(value, dtype))
