"""Parameters of networks: arrays by their path in the tree, those of all tasks and those of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from mocha_jax import networks
from mocha_jax._core import check
from mocha_jax._model.file import described
from mocha_jax.networks import Network, Params


def named(network: Network) -> str:
    """A network in a line: of one with functions the name of its class, for functions have addresses in theirs."""
    return repr(network) if described(network, networks) is not None else type(network).__name__


def by_path(params: Params) -> dict[str, Any]:
    """The leaves of a tree by the way there, such as ``"0/w"``: names of fields and keys, and places in lists."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = "/".join(_step(key) for key in path)
        if name in leaves:
            raise ValueError(f"two arrays of these parameters have the same path, {name!r}")
        leaves[name] = leaf
    return leaves


def shapes(network: Network) -> Params:
    """The parameters of one network, as shapes alone."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))


def of_paths(network: Network, arrays: Mapping[str, np.ndarray]) -> Params:
    """The tree that a network wants, of arrays by their paths."""
    wanted = by_path(tree := shapes(network))
    name = type(network).__name__
    if missing := [path for path in wanted if path not in arrays]:
        raise ValueError(f"the file has no parameter {missing[0]!r}, which {name} wants")
    if more := [path for path in arrays if path not in wanted]:
        raise ValueError(f"the file has a parameter {more[0]!r}, which {name} has not")
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[path] for path in wanted])


def checked_parameters(owner: str, network: Network, params: Params) -> tuple[Params, int | None]:
    """Parameters as NumPy's arrays, of one type, and how many tasks have some of their own; None where none has.

    Args:
      owner: who asks.
      network: whose parameters they are.
      params: its tree, every array of the network's shape, or with a leading axis of tasks before it.
    """
    tree = shapes(network)
    structure, wanted = (cast(Any, jax.tree.structure(each)) for each in (params, tree))
    if structure != wanted:
        raise ValueError(
            f"{owner}: parameters must be a tree of arrays as network.init makes it, of a {type(network).__name__} "
            f"{wanted}; got {check.shown(params)}."
        )
    arrays, counts = [], set()
    for (path, leaf), want in zip(by_path(params).items(), jax.tree.leaves(tree), strict=True):
        array = check.concrete(leaf)
        if array is None or array.dtype.kind not in "fiub":
            raise ValueError(f"{owner}: parameter {path!r} must be numbers, got {check.shown(leaf)}.")
        if array.shape[array.ndim - want.ndim :] != want.shape or array.ndim - want.ndim not in (0, 1):
            raise ValueError(
                f"{owner}: parameter {path!r} must be {list(want.shape)} numbers for all tasks, or have an axis of "
                f"tasks before that; got {list(array.shape)}."
            )
        counts |= {len(array)} if array.ndim > want.ndim else set()
        arrays.append(array)
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"{owner}: parameters must be of the same number of tasks, one or more; got {sorted(counts)}.")
    dtype = np.result_type(np.float32, *arrays)
    params = jax.tree.unflatten(wanted, [array.astype(dtype) for array in arrays])
    return params, counts.pop() if counts else None


def owned(network: Network, params: Params) -> tuple[bool, ...]:
    """Tell of every array, in order, whether it has a row for each task."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shapes(network)), strict=True)
    return tuple(np.ndim(leaf) > want.ndim for leaf, want in pairs)


def rows(params: Params, own: tuple[bool, ...], which: int | slice) -> Params:
    """Take rows of the arrays that have one for each task, and keep the other arrays."""
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(leaves, own, strict=True)
    return jax.tree.unflatten(structure, [leaf[which] if of_task else leaf for leaf, of_task in pairs])


def _step(key: object) -> str:
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
