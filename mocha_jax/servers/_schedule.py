"""When Omega is updated: the numbers H_i of rounds before each update, Algorithm 1."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check

# The rounds before every update, or before the first, the second and so on; the last number holds on.
Schedule = int | tuple[int, ...]


def checked(owner: str, value: object) -> Schedule:
    """Return the schedule that is meant: a number of rounds, or a sequence of such."""
    many = tuple(value) if isinstance(value, range) else value
    numbers = (
        check.widths(owner, "omega_every", many, "(5, 10, 20)") if isinstance(many, tuple | list | np.ndarray) else ()
    )
    if not numbers:
        check.integer(owner, 1, omega_every=value)
        return int(value)  # type: ignore[call-overload]
    check.integer(owner, 1, **{"the sum of omega_every": sum(numbers)})
    return numbers


def every_round(every: Schedule) -> bool:
    """Tell whether Omega is updated after every round."""
    return every == 1 if isinstance(every, int) else set(every) == {1}


def is_due(every: Schedule, round: Array) -> Array:
    """Tell whether Omega is updated after this round, counted from 1, [] bool."""
    if isinstance(every, int):
        return round % every == 0
    ends = jnp.asarray(tuple(itertools.accumulate(every)), jnp.int32)
    past = round - ends[-1]
    return jnp.any(round == ends) | ((past > 0) & (past % every[-1] == 0))
