"""This machine's CPU as a `Machine`, by what XLA's own programs take on it: measured, for the check of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._machines import Machine
from benchmarks._work import of_a_round

# Numbers in an array: two of them are touched in a pass, from the first cache to memory.
_SIZES = [2**p for p in (11, 15, 17, 19, 21, 22, 24)]
_SHARED = 2**16, 2**18  # of arrays that cores share while caches hold them
_ROWS, _NODES = 64, 512  # of a loop of small steps
_DECOMPOSITIONS: dict[str, Callable[[Any], Any]] = {
    "syevd": lambda a: jnp.linalg.eigh(a),
    "gesdd": lambda a: jnp.linalg.svd(a),
    "potrf": lambda a: jnp.linalg.cholesky(a),
    "trsm": lambda a: jax.scipy.linalg.solve_triangular(a, a, lower=True),
}


def this_cpu(d: int) -> Machine:
    """Measure it; calls for d x d matrices."""
    small, large = (_of_a_turn(_passes, jnp.ones(n), jnp.ones(n), about=12 * n / 1e11) for n in _SHARED)
    shared = max(small - (large - small) * _SHARED[0] / (_SHARED[1] - _SHARED[0]), 0.0)
    speeds = [20 * n / _of_a_turn(_passes_in_turn, jnp.ones(n), jnp.ones(n), about=20 * n / 1e11) for n in _SIZES]
    holds = [8 * math.sqrt(a * b) for a, b in zip(_SIZES, _SIZES[1:], strict=False)] + [math.inf]
    rows = jnp.ones((_ROWS, _NODES))
    a, b = jnp.ones((d, 4096)), jnp.ones((4096, d))
    matrix = jnp.eye(d) + 0.1 * jnp.ones((d, d))
    return Machine(
        name="this CPU",
        start=_of_a_turn(_small_steps, rows, about=1e-4) / _starts_of(_small_steps, rows),
        memories=tuple(zip(holds, speeds, strict=True)),
        flops=2 * d * 4096 * d / _of_a_turn(_products, a, b, about=2e-4),
        shared=shared,
        columns=tuple((name, best(jax.jit(f), matrix, repeats=50) / d) for name, f in _DECOMPOSITIONS.items()),
    )


def best(work: Callable[..., Any], *given: Any, repeats: int = 5) -> float:
    """The least seconds of several runs, after one that compiles."""
    jax.block_until_ready(work(*given))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work(*given))
        times.append(time.perf_counter() - began)
    return min(times)


def _of_a_turn(loop: Callable[..., Any], *given: Any, about: float) -> float:
    """Seconds of a turn: of twice as many turns, what they take more."""
    turns = int(np.clip(2e-2 / about, 4, 20_000))
    return max(best(loop, turns * 2, *given) - best(loop, turns, *given), 1e-9) / turns


@partial(jax.jit, static_argnums=0)
def _passes(turns: int, x: Any, w: Any) -> Any:
    return jax.lax.fori_loop(0, turns, lambda _, x: 0.5 * x + w, x)


@partial(jax.jit, static_argnums=0)
def _passes_in_turn(turns: int, x: Any, w: Any) -> Any:
    """Two steps, of which each takes what the other core has written, as the steps of a round often do."""

    def both(_: Any, x: Any) -> Any:
        first, second = jnp.split(x, 2)
        return 0.5 * jax.lax.optimization_barrier(jnp.concatenate([second, first])) + w

    return jax.lax.fori_loop(0, turns, both, x)


@partial(jax.jit, static_argnums=0)
def _small_steps(turns: int, x: Any) -> Any:
    """Passes over rows, each of a few steps of a few hundred numbers."""

    def row(w: Any, x: Any) -> tuple[Any, Any]:
        a = jnp.where(jnp.roll(w, 1) * x < 1.0, 0.5, 0.0)
        return w + jnp.roll(a, 1) * x, a

    return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.scan(row, x[0], x)[1], x)


def _starts_of(loop: Any, *given: Any) -> float:
    turns = 1000  # any number that no other loop has
    return sum(s.times for s in of_a_round(loop.lower(turns, *given).compile().as_text(), turns))


@partial(jax.jit, static_argnums=0)
def _products(turns: int, a: Any, b: Any) -> Any:
    return jax.lax.fori_loop(0, turns, lambda _, b: b + 1e-9 * (a @ b).sum(), b)
