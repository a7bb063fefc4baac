"""Plans of rounds: the part of a round that is known before it begins, computed for many rounds at once.

What nodes do and in which order depends on the run's key and the round's number alone. Drawn within the loop of rounds
it would be many small kernels a round on an accelerator; drawn for many rounds together it is as many for all of them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.pytree import Pytree, tree
from mocha_jax._driver.config import RunConfig
from mocha_jax.systems._base import Work

# Folded into the run's key for what lasts longer than a round; rounds are counted below it.
NO_ROUND = np.uint32(2**32 - 1)

# Rounds planned at once, at most; and the bytes that their plans may take, so many or a share of those of the samples.
_AT_ONCE, _BYTES, _SHARE = 64, 2**20, 1 / 32


class RoundPlan(Pytree):
    """The plan of a round; of many, with a leading axis."""

    work: Work
    drawn: Any = tree()  # from `Algorithm.draw`
    key: Array  # for measuring theta


def plan(key: Array, config: RunConfig, round: Array) -> RoundPlan:
    """RoundPlan a round. Its randomness depends on the run's key and the round's number only."""
    algorithm, problem = config.algorithm, config.problem
    request = algorithm.request(problem, round)
    work = config.systems.work(jax.random.fold_in(key, NO_ROUND), problem.data, request)
    key = jax.random.fold_in(key, round)
    return RoundPlan(work, algorithm.draw(jax.random.fold_in(key, 1), problem), jax.random.fold_in(key, 2))


def plans(key: Array, config: RunConfig, rounds: Array) -> RoundPlan:
    """RoundPlan several rounds, of these numbers ``[g]``."""
    return jax.vmap(partial(plan, key, config))(rounds)


def at_once(key: Array, config: RunConfig, count: int) -> int:
    """Choose how many rounds to plan at once: a divisor of their number, as large as memory allows."""
    shapes = jax.tree.leaves(jax.eval_shape(partial(plan, key, config), jnp.zeros((), jnp.int32)))
    each = sum(math.prod(s.shape) * getattr(s.dtype, "itemsize", 4) for s in shapes)
    x = config.problem.data.x
    room = max(_SHARE * math.prod(x.shape) * x.dtype.itemsize, _BYTES)
    most = min(max(int(room // each), 1), _AT_ONCE)
    return max(size for size in range(1, most + 1) if count % size == 0)
