"""Truth of products: none in TF32 where a certificate rests on it.

An accelerator multiplies float32 matrices in TF32 unless told otherwise, which loses 3e-4 of them. The products of the
library are compared with NumPy's in float64; the products in the programs of certificates must ask for all digits; and
objectives of solutions must be within what their certificates say rounding may hide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from benchmarks import certificates as judge
from benchmarks.card import _reference
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import gist
from mocha_jax._node import row_products as by_rows
from mocha_jax._numerics import math, products, tall
from mocha_jax.coupling import Dense, LowRank
from mocha_jax.servers import _quadratic_programs

_RIGHT = 3e-5  # relative; float32 is ten times closer, TF32 ten times as far off
_DOT = re.compile(r"stablehlo\.dot_general.*tensor<[\dx]*f32>")

Product = tuple[str, Callable[..., Any], tuple[np.ndarray, ...], Callable[..., np.ndarray]]


def measure(here: Inside) -> None:
    """All three."""
    worst = 0.0
    size = (40, 50, 300) if here.full else (3, 4, 20)
    for name, ours, given, exact in _products(size, np.random.default_rng(here.seed)):
        try:
            found = np.asarray(jax.jit(ours)(*map(jnp.asarray, given)), np.float64)
        except Exception as error:
            here.wrong(f"{name}: {gist(error)}")
            continue
        off, _ = _reference.differ(found, exact(*(a.astype(np.float64) for a in given)))
        here.detail(product=name, off=off)
        worst = max(worst, off)
        if not off <= _RIGHT:
            here.wrong(f"{name} is off by {off:.1e}")
    here.figure("products of the library: furthest from float64", worst, "relative")
    shapes = [(30, 60, 561), (200, 64, 64)] if here.full else [(3, 8, 5)]
    for shape in shapes:
        for kind in ("independent", "mean", "probabilistic") if here.full else ("mean",):
            if here.left() < 6.0:
                here.unfinished(f"certificates from {shape} {kind} on")
                return
            _certificate(here, kind, shape)


def _products(size: tuple[int, int, int], rng: np.random.Generator) -> Iterator[Product]:
    """Products of the library, as it makes them, and as NumPy does."""
    m, n, d = size

    def real(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) + np.float32(1.0)  # a mean, for errors of one sign to add up

    x, w, f, a, points = real(n, m, d), real(m, d), real(m, n), real(m, m), real(m, 4, d)
    factor, vector = real(m, 3), real(4, m)
    yield "matmul", math.matmul, (a, w), np.matmul
    yield "rows times weights", by_rows.times, (x, w), lambda x, w: np.einsum("nmd,md->mn", x, w)
    yield "rows combined", by_rows.combine, (x, f), lambda x, f: np.einsum("nmd,mn->md", x, f)
    yield "samples times weights", products.times, (x, f.T[:, :1] * w[:1]), lambda x, w: np.einsum("nmd,nd->nm", x, w)
    yield "samples combined", products.combine, (x, f.T), lambda x, f: np.einsum("nm,nmd->nd", f, x)
    yield "points against vectors", _quadratic_programs.against, (points, w), lambda p, w: np.einsum("mpd,md->pm", p, w)
    yield "points combined", _quadratic_programs.combine, (points, vector), lambda p, a: np.einsum("pm,mpd->md", a, p)
    yield "a full coupling", lambda a, w: Dense(a).apply(w), (a, w), np.matmul
    low: Callable[..., Any] = lambda f, w: LowRank(jnp.float32(0.3), f).apply(w)  # noqa: E731
    yield "a coupling of low rank", low, (factor, w), lambda f, w: 0.3 * w + f @ (f.T @ w)
    tall_one = real(8 * 16, 16)
    values: Callable[..., Any] = lambda w: tall.factors(w).s  # noqa: E731
    yield "singular values", values, (tall_one,), lambda w: np.linalg.svd(w, compute_uv=False)


def _certificate(here: Inside, kind: str, shape: tuple[int, int, int]) -> None:
    """One problem: the program of its certificate, and the objective of its solution."""
    m, n, d = shape
    rng = np.random.default_rng(here.seed)
    x = (rng.normal(size=shape) / d**0.5).astype(np.float32)
    y = np.where(np.einsum("mnd,md->mn", x, 1.0 + rng.normal(size=(m, d))) > 0, 1.0, -1.0).astype(np.float32)
    data = mj.pack_tasks(list(x), list(y), loss_scaling="task_mean")
    lam, other = np.float32(0.01), np.float32(2.0)
    problem = mj.Problem(data, mj.losses.Logistic(), judge.regularizer(kind, m, lam, other))
    name = f"{kind}, {', '.join(map(str, shape))}"
    try:
        solution = mj.solve(problem, tol=1e-4, max_rounds=200, record_every=5)
        text = jax.jit(mj.certificate).lower(problem, solution.state.beta, solution.relation).as_text()
    except Exception as error:
        here.wrong(f"{name}: {gist(error)}")
        return
    low = [line.strip()[:160] for line in text.splitlines() if _DOT.search(line) and "HIGHEST" not in line]
    if low:
        here.wrong(f"{name}: {len(low)} products in its certificate do not ask for all digits: {low[0]}")
    w, exact = np.asarray(solution.weights, np.float64), np.float64
    z = np.einsum("mnd,md->mn", x.astype(exact), w)
    objective = np.mean(judge.losses("logistic", z, y.astype(exact)), axis=1).sum()
    objective += judge.penalty(kind, w, exact(lam), exact(other), None)
    q = solution.certificate
    primal = float(q.joint_primal if kind == "probabilistic" else q.primal)
    off, said = abs(primal - objective), float(solution.rounding)
    note = f"gap {solution.certificate.residual:.1e}, {solution.status.name}, {len(_DOT.findall(text))} products"
    here.figure(f"objective of {name}: error over its rounding", off / said, "", note=note)
    if off > said + 1e-12 * abs(objective):
        here.wrong(f"{name}: the objective is off by {off:.1e}, its certificate says {said:.1e} at most")


if __name__ == "__main__":
    step(measure)
