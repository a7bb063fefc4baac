"""Trees of arrays: shapes, rows, arithmetic, and models mapped over clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, SameTree, Tree
from mocha_jax._core.warnings import warn
from mocha_jax._numerics.math import EXACT
from mocha_jax.networks import Params


def nans_like(shapes: SameTree) -> SameTree:
    """Make trees of these shapes of NaN, where numbers may be that."""
    return jax.tree.map(
        lambda a: jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0, a.dtype), shapes
    )


def told_if_nan(owner: str, ready: SameTree) -> SameTree:
    """Return the trees; warn where all their numbers are known to be NaN, as those of clients that are not ready."""
    known = [check.concrete(leaf) for leaf in jax.tree.leaves(ready) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if known and all(leaf is not None and np.isnan(leaf).all() for leaf in known):
        warn(
            f"{owner}: the weights are NaN: clients are made ready after the last round, by solve, or by "
            f"algorithm.settle(state, problem)."
        )
    return ready


def zeros_like(shapes: SameTree, *lead: int) -> SameTree:
    """Make zeros of these shapes, with leading axes of those lengths."""
    return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), shapes)


def mapped(model: Callable[[PyTree, PyTree, PyTree], Params], shared: Tree, rows: Tree, own: Tree) -> Params:
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
    """Count what a message has: a floating number is one, an integer as much as it has bytes, of four."""

    def each(leaf: Array) -> float:
        return 1.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype.itemsize / 4

    return float(sum(leaf.size * each(leaf) for leaf in jax.tree.leaves(shapes)))


def as_vector(tree: Tree) -> Array:
    """Put all arrays of a tree one after the other."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def as_tree(vector: Array, like: SameTree) -> SameTree:
    """Cut a vector into the arrays of a tree."""
    leaves, form = jax.tree.flatten(like)
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
    return jax.tree.unflatten(
        form, [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(vector, cuts), leaves, strict=True)]
    )


def scaled(factor: Array, tree: SameTree) -> SameTree:
    """Multiply all arrays of a tree by a number."""
    return jax.tree.map(lambda a: factor * a, tree)


def difference(a: SameTree, b: SameTree) -> SameTree:
    """Subtract a tree from another one."""
    return jax.tree.map(lambda a, b: a - b, a, b)


def inner_product(a: Tree, b: Tree) -> Array:
    """Sum the products of the numbers of two trees."""
    products = jax.tree.map(lambda a, b: jnp.vdot(a, b, precision=EXACT), a, b)
    return jnp.asarray(sum(jax.tree.leaves(products)))
