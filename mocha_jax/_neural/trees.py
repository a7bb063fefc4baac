"""Trees of arrays: shapes, rows, and models mapped over clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Tree
from mocha_jax.networks import Params


def unknown(shapes: Tree) -> Any:
    """Make trees of these shapes of NaN, where numbers may be that."""
    return jax.tree.map(
        lambda a: jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0, a.dtype), shapes
    )


def zeros_like(shapes: Tree, *lead: int) -> Any:
    """Make zeros of these shapes, with leading axes of those lengths."""
    return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), shapes)


def mapped(model: Callable[[Any, Any, Any], Params], shared: Tree, rows: Tree, own: Tree) -> Params:
    """Map a model over clients, ``[m, ...]``; what is the same for all of them has no axis."""
    args = shared, *jax.tree.map(first_row, (rows, own))
    program, shapes = jax.make_jaxpr(model, return_shape=True)(*args)
    places = {id(variable): i for i, variable in enumerate(program.jaxpr.invars[: len(jax.tree.leaves(shared))])}
    whole = jax.tree.leaves(shared)
    each = jax.tree.leaves(jax.vmap(partial(model, shared))(rows, own))
    leaves = [
        whole[places[id(out)]] if id(out) in places else leaf
        for out, leaf in zip(program.jaxpr.outvars, each, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def first_row(a: Array) -> Array:
    return a[0]


def count_numbers(shapes: Tree) -> float:
    return float(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
