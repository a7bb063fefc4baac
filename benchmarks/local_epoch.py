"""One local epoch of all tasks: this library, liblinear, and a hand-written numba loop.

    python -m benchmarks.local_epoch [--repeats 15] [--json FILE]

All three do one pass of dual coordinate ascent for the hinge loss over the same samples, in the
same process, in turn. The library and the numba loop visit rows in one random order and do the
same arithmetic in float32; their results are compared. liblinear (by way of scikit-learn's wrapper) works
in float64 (it has no float32), in its own random order, task after task, and is timed as the difference
of a fit with 21 passes and a fit with 1, over 20. All solve the same problem: C = 100, that is
lambda = 1/(200 n) with task means. A much smaller C would let liblinear's shrinking skip most
rows after a few passes, and the time of a pass would no longer be that of an epoch.

The gap printed is the relative duality gap after 20 epochs of the library, so that speed is
never shown without accuracy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
from sklearn.svm import _liblinear

import mocha_jax as mj
from mocha_jax._local import ascend, time_major, visiting_order

SHAPES = [(32, 256, 576), (24, 1408, 100), (40, 512, 180), (1000, 64, 64), (4096, 32, 32)]
C = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions; the median is printed")
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, numba {numba.__version__}")
    print("milliseconds per local epoch of all tasks, median of", options.repeats)
    print(
        f"{'m, n, d':>16} {'library':>8} {'liblinear':>10} {'numba':>7} | "
        f"{'/liblinear':>10} {'/numba':>7} | {'compile s':>9} {'gap at 20':>9}"
    )
    rows = []
    for shape in SHAPES:
        row = measure(*shape, options.repeats)
        rows.append(row)
        print(
            f"{', '.join(map(str, shape)):>16} {row['library_ms']:8.2f} {row['liblinear_ms']:10.2f} "
            f"{row['numba_ms']:7.2f} | "
            f"{row['library_ms'] / row['liblinear_ms']:10.2f} {row['library_ms'] / row['numba_ms']:7.2f} | "
            f"{row['compile_s']:9.2f} {row['gap']:9.1e}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "device": device.device_kind, "rows": rows}, file, indent=1)


def measure(m: int, n: int, d: int, repeats: int) -> dict[str, Any]:
    key = jax.random.key(0)
    weights = jax.random.normal(jax.random.fold_in(key, 0), (m, d))
    sizes = np.full(m, n)
    data = mj.datasets.classification(jax.random.fold_in(key, 1), weights, sizes, label_noise=0.1)
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1 / (2 * C * n)))
    algorithm = mj.Mocha()
    state = algorithm.init(problem)
    q = state.sigma * state.coupling.diagonal()
    steps = jnp.full(m, n, jnp.int32)
    rows = jax.block_until_ready(time_major(data))
    epoch = jax.jit(lambda key, beta, w: ascend(key, problem.loss, rows, beta, w, q, steps, passes=1))
    began = time.perf_counter()
    compiled = epoch.lower(key, state.beta.T, state.w).compile()
    compile_s = time.perf_counter() - began
    ours = lambda: jax.block_until_ready(compiled(key, state.beta.T, state.w))  # noqa: E731

    x, y, c = (np.array(a) for a in (data.x, data.y, data.weight))
    norm2 = np.einsum("mnd,mnd->mn", x, x)
    order = np.asarray(visiting_order(jax.random.fold_in(key, 0), n))  # that of pass 0
    qs, w0, beta0 = np.array(q), np.zeros((m, d), np.float32), np.zeros((m, n), np.float32)

    def by_hand() -> np.ndarray:
        beta = beta0.copy()
        numba_epoch(x, y, c, norm2, beta, w0.copy(), qs, order)
        return beta

    np.testing.assert_allclose(ours()[0].T, by_hand(), atol=2e-3)  # the same work
    liblinear = liblinear_epoch(x.astype(np.float64), y.astype(np.float64), C)
    library_ms, numba_ms, liblinear_ms = medians([timed(ours), timed(by_hand), liblinear], repeats)
    _, history = mj.run(key, algorithm, problem, num_rounds=20)
    return dict(
        m=m, n=n, d=d, library_ms=library_ms, numba_ms=numba_ms, liblinear_ms=liblinear_ms, compile_s=compile_s,
        gap=float(history.relative_gap[-1]),
    )  # fmt: skip


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)

    return once


def medians(measurements: list[Callable[[], float]], repeats: int) -> list[float]:
    """Each measurement in turn, so that a noisy moment hits all of them."""
    for once in measurements:
        once()
    return [float(m) for m in np.median([[once() for once in measurements] for _ in range(repeats)], axis=0)]


def liblinear_epoch(x: np.ndarray, y: np.ndarray, c: float) -> Callable[[], float]:
    ones = np.ones(x.shape[1])

    def fit(passes: int) -> float:
        began = time.perf_counter()
        for t in range(len(x)):  # solver 3: L2-regularised hinge, dual
            _liblinear.train_wrap(x[t], y[t], 0, 3, 1e-30, -1.0, c, np.ones(2), passes, 0, 0.1, ones)
        return time.perf_counter() - began

    def once() -> float:
        with silence():
            return 1e3 * (fit(21) - fit(1)) / 20

    return once


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """liblinear's wrapper prints from C."""
    saved = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1), os.dup2(null, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(null)


@numba.njit(parallel=True, fastmath=True)
def numba_epoch(
    x: np.ndarray, y: np.ndarray, c: np.ndarray, norm2: np.ndarray, beta: np.ndarray, r: np.ndarray,
    q: np.ndarray, order: np.ndarray,
) -> None:  # fmt: skip
    """The loop a person would write: a task per core, r = w + q u kept up to date in place."""
    m, n, d = x.shape
    for t in numba.prange(m):
        for s in range(n):
            i = order[s]
            z = np.float32(0)
            for j in range(d):
                z += x[t, i, j] * r[t, j]
            a = y[t, i] * beta[t, i]
            kappa = q[t] * c[t, i] * norm2[t, i]
            new = min(max(a + (1 - y[t, i] * z) / kappa, np.float32(0)), np.float32(1))
            step = q[t] * c[t, i] * y[t, i] * (new - a)
            beta[t, i] = y[t, i] * new
            if step != 0:
                for j in range(d):
                    r[t, j] += step * x[t, i, j]


if __name__ == "__main__":
    main()
