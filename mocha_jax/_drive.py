"""Compiled stretches of a solve."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._history import History, Progress
from mocha_jax._quality import Quality
from mocha_jax._run import Setting, block


@partial(jax.jit, static_argnames="records")
def begin(key: Array, run: Setting, state: Any, *, records: int) -> tuple[Progress, History]:
    """Nothing done yet, and room for the records of a stretch."""
    progress = run.start(state)
    shapes = jax.eval_shape(lambda p: block(key, run, p, 1)[1], progress)
    return progress, jax.tree.map(lambda r: jnp.zeros((records, *r.shape), r.dtype), shapes)


@jax.jit
def prepare(run: Setting) -> Setting:
    """With the data laid out."""
    return run.prepared()


@partial(jax.jit, static_argnames="record_every")
def stretch(
    key: Array, run: Setting, progress: Progress, room: History, limit: Array | int, tol: Array, *, record_every: int
) -> tuple[Progress, History, Array]:
    """Blocks of rounds until the limit, the tolerance or numbers that are not finite.

    Returns:
      Where the run stands; the records, the last ones in the last place where there is no more room; how many.
    """

    def unfinished(carry: tuple[Progress, History, Array, Array]) -> Array:
        return carry[3] & (carry[0].state.round < limit)

    def body(carry: tuple[Progress, History, Array, Array]) -> tuple[Progress, History, Array, Array]:
        progress, history, i, _ = carry
        done = progress.state.round
        progress, record = block(key, run, progress, jnp.minimum(record_every - done % record_every, limit - done))
        at = jnp.minimum(i, len(history.round) - 1)
        history = jax.tree.map(lambda h, r: h.at[at].set(r), history, record)
        return progress, history, i + 1, record.quality.finite & ~(record.residual <= tol)

    carry = progress, room, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return lax.while_loop(unfinished, body, carry)[:3]


@jax.jit
def settled(run: Setting, where: Progress) -> tuple[Any, Quality, Any]:
    """The state with W derived afresh from the duals, its certificate with all rounding counted, and its Omega."""
    state = run.algorithm.adopt(where.state, run.problem)
    certificate = run.algorithm.prove(state, run.problem).with_bound(run.problem, where.bound)
    return state, certificate, run.algorithm.omega(state, run.problem)
