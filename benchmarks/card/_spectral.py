"""Truth of the kernel for the d x d work of (14): singular values and a contraction, against NumPy in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.card._inside import Inside
from benchmarks.card._kernels import contracted
from benchmarks.card._timing import gist
from mocha_jax._numerics import tall

WIDTHS, ROWS, SHARE = (1, 10, 32, 64), (700, 10_000), 0.01
KINDS = ("normal", "graded", "rank four")

# Of the largest singular value: a hundred roundings, of which an exact method takes a dozen.
_OFF = 1.2e-5


def cases(full: bool) -> list[dict[str, Any]]:
    """Every width, with the kinds and numbers of rows in turns."""
    if not full:
        return [{"kind": "normal", "m": 40, "d": 4}]
    return [{"kind": KINDS[k % 3], "m": ROWS[k % 2], "d": WIDTHS[k % 4]} for k in range(8)]


def matrix(kind: str, m: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Random numbers; or of singular values over five decades; or of four that are not 0."""
    if kind == "normal":
        return rng.normal(size=(m, d)).astype(np.float32)
    u, v = (np.linalg.qr(rng.normal(size=(k, d)))[0] for k in (m, d))
    s = np.logspace(0, -5, d) if kind == "graded" else (np.arange(d) < 4).astype(float)
    return ((u * s) @ v.T).astype(np.float32)


def check(here: Inside, case: dict[str, Any]) -> None:
    """One matrix, from the basis that its own Gram matrix gives."""
    w = matrix(**case, rng=np.random.default_rng([here.seed, case["m"], case["d"]]))
    share = np.float32(SHARE)
    try:
        basis = jax.jit(tall.basis_of)(w, np.float32(1.0))
        program = jax.jit(partial(contracted, True)).lower(w, share, basis).compile()
        (s, inner), again = (jax.tree.map(np.asarray, program(w, share, basis)) for _ in range(2))
        theirs = jax.tree.map(np.asarray, jax.jit(partial(contracted, False))(w, share, basis))
    except Exception as error:
        here.wrong(f"singular values, {case}: {gist(error)}")
        here.detail(kind="spectral", case=case, right=False, off=float("inf"), error=str(error)[:2000])
        return
    u, exact, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
    wanted = (u * np.maximum(exact - float(share) * exact[0], 0.0)) @ vt
    off, theirs_off = (
        max(np.abs(found[0] - exact).max(), np.linalg.norm(w @ found[1].astype(np.float64) - wanted, 2)) / exact[0]
        for found in ((s, inner), theirs)
    )
    bits = np.array_equal(s, again[0]) and np.array_equal(inner, again[1])
    right = bool(bits and off <= _OFF)
    here.detail(kind="spectral", case=case, right=right, off=off, library=theirs_off, calls=calls(program))
    if not right:
        said = "" if bits else ", other bits in a second run"
        here.wrong(f"singular values, {case}: off by {off:.1e} of the largest, the library by {theirs_off:.1e}{said}")


def calls(program: jax.stages.Compiled) -> int:
    """How many calls of kernels are in a program."""
    return (program.as_text() or "").count("mosaic_gpu_v2")
