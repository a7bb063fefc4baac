"""Products of samples with weights, and sums over samples: of one node, or of many with leading axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Tree
from mocha_jax._numerics.math import EXACT

Terms = TypeVar("Terms")  # an array, or a tree of some


def times(x: Array, weights: Array) -> Array:
    """``[..., n, d]`` times ``[..., d]``, in the precision of the latter, ``[..., n]``."""
    return jnp.einsum("...nd,...d->...n", x.astype(weights.dtype), weights, precision=EXACT)


def combine(x: Array, factors: Array) -> Array:
    """``[..., n, d]`` combined by ``[..., n]``, in the precision of the latter, ``[..., d]``."""
    return jnp.einsum("...n,...nd->...d", factors, x.astype(factors.dtype), precision=EXACT)


def totals(terms: Callable[..., Terms], given: Tree, z: Array, y: Array, weight: Array, *rows: Array) -> Terms:
    """See `TaskData.sum_over_rows`; padding is cut off rather than multiplied: 0 times infinity is not 0."""
    found = terms(given, z, y, *rows)
    return jax.tree.map(lambda term: jnp.sum(jnp.where(weight > 0, weight * term, 0.0), axis=-1), found)


def lengths(squared: Array) -> Array:
    """Lengths from their squares; none so small that its square was lost."""
    return jnp.sqrt(jnp.maximum(squared, jnp.finfo(squared.dtype).tiny))
