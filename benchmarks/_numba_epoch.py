"""The loop a person would write: the line for the library to reach."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(parallel=True, fastmath=True)
def epoch(
    x: np.ndarray,
    y: np.ndarray,
    c: np.ndarray,
    norm2: np.ndarray,
    beta: np.ndarray,
    r: np.ndarray,
    q: np.ndarray,
    order: np.ndarray,
) -> None:
    """One pass over all rows of every task, a task per core, with r = w + q u kept up to date in place."""
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
