"""Domains of hyperparameters: checked at once for a number at hand, and while it runs for a traced one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check


class Domain(NamedTuple):
    """A set of numbers."""

    check: Callable[..., None]  # check(owner, name=value) raises
    contains: Callable[[Array], Array]  # of an array of floats, entry by entry


def _normal(v: Array) -> Array:
    """Positive as processors see it, which take numbers below the smallest normal one for 0, as those one over it."""
    return (v >= jnp.finfo(v.dtype).tiny) & ((v <= 0.125 / jnp.finfo(v.dtype).tiny) | (v == jnp.inf))


POSITIVE = Domain(check.positive, lambda v: _normal(v) & (v < jnp.inf))
POSITIVE_OR_INFINITE = Domain(check.positive_or_infinite, _normal)
NONNEGATIVE = Domain(check.nonnegative, lambda v: (v >= 0) & (v < jnp.inf))
OPEN_UNIT_INTERVAL = Domain(
    partial(check.in_unit_interval, open_left=True, open_right=True), lambda v: _normal(v) & (v < 1)
)


def require(record: object, domains: Mapping[str, Domain]) -> None:
    """Raise where a named field of a record is outside of its domain."""
    for name, domain in domains.items():
        domain.check(type(record).__name__, **{name: getattr(record, name)})


def contain(record: object, domains: Mapping[str, Domain]) -> Array:
    """Tell whether all numbers are inside, traced or not, [] bool."""
    inside = [jnp.all(domain.contains(jnp.asarray(getattr(record, name)))) for name, domain in domains.items()]
    return jnp.all(jnp.stack(inside)) if inside else jnp.asarray(True)
