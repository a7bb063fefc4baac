"""Truth of the weighing's kernel: its weights against those of the loops, and what they gain, in NumPy and float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.card._inside import Inside
from benchmarks.card._kernels import weigh
from benchmarks.card._timing import gist, on_cpu
from mocha_jax.coupling import Coupling, Dense, Diagonal, Exchangeable, LowRank
from mocha_jax.servers import _quadratic_programs_kernels
from mocha_jax.servers._quadratic_programs import Tasks, consensus

KINDS = ("exchangeable", "low rank", "diagonal", "dense")
SIZES = ((1000, 4, 64), (5, 4, 3), (40, 3, 16), (150, 4, 200))  # nodes, points besides the first, features

# Of the gain. On a CPU the loops look when they may stop, so that both are nearly as far.
_ON_A_CARD, _ON_A_CPU = 1e-3, 0.3


def cases(full: bool) -> list[dict[str, Any]]:
    """Every kind and every size once."""
    if not full:
        return [{"kind": "low rank", "size": (5, 2, 3)}]
    return [{"kind": kind, "size": size} for kind, size in zip(KINDS, SIZES, strict=True)]


def coupling(kind: str, m: int, rng: np.random.Generator) -> Coupling:
    """A coupling of m tasks."""
    real = partial(jnp.asarray, dtype=jnp.float32)
    if kind == "exchangeable":
        return Exchangeable(real(0.7), real(5.0), m)
    if kind == "low rank":
        return LowRank(real(0.3), real(rng.normal(size=(m, 2))))
    if kind == "diagonal":
        return Diagonal(real(rng.uniform(0.5, 2.0, m)))
    root = rng.normal(size=(m, m + 2))
    return Dense(real(root @ root.T / m))


def check(here: Inside, case: dict[str, Any]) -> None:
    """One case."""
    if on_cpu():
        _quadratic_programs_kernels._STEPS = 3  # interpreted steps are slow to compile
    m, p, d = case["size"]
    rng = np.random.default_rng([here.seed, m, KINDS.index(case["kind"])])
    far = np.array([0.0, 0.1, 1.0, 0.01, 1.0])[: p + 1, None, None]
    v = jnp.asarray(rng.normal(size=(1, m, d)) + far * rng.normal(size=(p + 1, m, d)), jnp.float32)
    slope, free = jnp.asarray(-rng.random((p, m)), jnp.float32), jnp.asarray(rng.random(m) < 0.8)
    between = coupling(case["kind"], m, rng)
    tasks = Tasks(between, consensus(between), None, jnp.ones(m, jnp.float32), m)
    try:
        program = jax.jit(partial(weigh, True)).lower(v, slope, tasks, free).compile()
        ours, again = (np.asarray(program(v, slope, tasks, free)) for _ in range(2))
        theirs = np.asarray(jax.jit(partial(weigh, False))(v, slope, tasks, free))
    except Exception as error:
        here.wrong(f"weighing, {case}: {gist(error)}")
        here.detail(kind="weighing", case=case, right=False, off=float("inf"), error=str(error)[:2000])
        return
    matrix = np.asarray(between.apply(jnp.eye(m, dtype=jnp.float32)), np.float64)
    value = partial(_value, np.asarray(v, np.float64), np.asarray(slope, np.float64), matrix, np.asarray(free))
    (gain, left), (expected, _) = value(ours), value(theirs)
    off = (expected - gain) / abs(expected)
    feasible = bool(np.isfinite(ours).all() and ours.min() >= -1e-5 and abs(ours.sum(0) - 1.0).max() <= 1e-5)
    feasible &= bool((ours[1:, ~np.asarray(free)] == 0.0).all())
    calls = (program.as_text() or "").count("custom-call(")
    right = feasible and np.array_equal(ours, again) and off <= (_ON_A_CPU if on_cpu() else _ON_A_CARD)
    here.detail(kind="weighing", case=case, right=right, off=off, gain=gain, left=left, calls=calls)
    if not right:
        said = "feasible" if feasible else "not feasible"
        here.wrong(
            f"weighing, {case}: gains {off:.1e} less than the loops, {said}, same bits {np.array_equal(ours, again)}"
        )


def _value(
    v: np.ndarray, slope: np.ndarray, matrix: np.ndarray, free: np.ndarray, a: np.ndarray
) -> tuple[float, float]:
    """What weights gain, and by convexity at most as much is left."""
    along = v[1:] - v[0]
    moved = np.einsum("pm,pmd->md", a[1:], along)
    pulled = matrix @ moved
    gain = -np.sum(slope * a[1:]) - 0.5 * np.sum(moved * pulled)
    gradient = slope + np.einsum("pmd,md->pm", along, pulled)
    left = np.sum(a[1:] * gradient, axis=0) - np.minimum(gradient.min(0), 0.0)
    return float(gain), float(np.sum(left[free]))
