"""Compiled stretches of a solve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._algorithms.base import State
from mocha_jax._core.pytree import Relation
from mocha_jax._driver.config import RunConfig, program
from mocha_jax._driver.history import History, Progress
from mocha_jax._driver.run import block
from mocha_jax._problem.quality import Quality

# Traced once for the two programs that follow.
_block = jax.jit(block, static_argnums=3)


def _allocate(key: Array, config: RunConfig, state: State | None, *, records: int) -> tuple[Progress, History]:
    """The progress before the first round, and room for the records of a stretch."""
    config = config.whole()
    progress = config.start(state)
    shapes = jax.eval_shape(lambda p: _block(key, config, p, 1)[1], progress)
    return progress, jax.tree.map(lambda r: jnp.zeros((records, *r.shape), r.dtype), shapes)


def _run_chunk(
    key: Array,
    config: RunConfig,
    progress: Progress,
    room: History,
    blocks: Array | int,
    tol: Array,
    *,
    rounds: int,
) -> tuple[Progress, History, Array, Array]:
    """Run so many blocks of rounds, or fewer: until the tolerance, what rounding leaves or numbers that are not finite.

    Returns:
      Where the run stands; the records, the last ones in the last place where there is no more room; how many; whether
      there is a reason to go on.
    """
    config = config.whole()

    def unfinished(carry: tuple[Progress, History, Array, Array]) -> Array:
        return carry[3] & (carry[2] < blocks)

    def body(carry: tuple[Progress, History, Array, Array]) -> tuple[Progress, History, Array, Array]:
        progress, history, i, _ = carry
        progress, record = _block(key, config, progress, rounds)
        at = jnp.minimum(i, len(history.round) - 1)
        history = jax.tree.map(lambda h, r: lax.dynamic_update_index_in_dim(h, r, at, 0), history, record)
        ended = (record.residual <= tol) | progress.best.stays(config.problem, tol)
        return progress, history, i + 1, record.quality.finite & ~ended

    carry = progress, room, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return lax.while_loop(unfinished, body, carry)


def _resumed(config: RunConfig, state: State) -> State:
    """The state with W derived afresh from the duals."""
    config = config.whole()
    return config.algorithm.resume(state, config.problem)


def _proven(config: RunConfig, state: State, bound: Array) -> tuple[Quality, Relation]:
    """The certificate of a state with all rounding counted, and its Omega."""
    config = config.whole()
    certificate = config.algorithm.prove(state, config.problem).with_bound(config.problem, bound)
    return certificate, config.algorithm.relation(state, config.problem)


# A run reuses the memory of its progress, and so does its end; inside a transformation there is no memory to reuse.
allocate = program(_allocate, static_argnames="records")
run_chunk = program(_run_chunk, static_argnames="rounds")
run_chunk_in_place = program(_run_chunk, static_argnames="rounds", donate_argnames="progress")
resumed, proven = program(_resumed), program(_proven)
_resumed_in_place = program(_resumed, donate_argnames="state")


def finalize(
    config: RunConfig, state: State, bound: Array, resumed: Callable[..., Any] = resumed
) -> tuple[Any, Any, Relation]:
    """The state with W derived afresh from the duals, its certificate with all rounding counted, and its Omega."""
    # Two programs: the second needs no memory of the first.
    state = resumed(config, state)
    return state, *proven(config, state, bound)


finalize_in_place = partial(finalize, resumed=_resumed_in_place)
