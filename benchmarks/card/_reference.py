"""The local epoch in NumPy and float64, from the definitions of the losses alone, and all pairs of some factors.

The step of a coordinate, arg min over b of l*(-b) + (b - beta) g + kappa/2 (b - beta)^2, is found through the
prediction z that it leads to: z + kappa l'(z) = g - kappa beta, b = (z - g)/kappa + beta, by bisection, for l' grows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Derivative = Callable[[np.ndarray, np.ndarray], np.ndarray]

# l'(z, y), with the hyperparameters of `benchmarks.certificates.LOSSES`.
DERIVATIVES: dict[str, Derivative] = {
    "hinge": lambda z, y: np.where(y * z < 1, -y, 0.0),
    "smoothed hinge": lambda z, y: -y * np.clip((1 - y * z) / 0.5, 0, 1),
    "squared hinge": lambda z, y: -2 * y * np.maximum(1 - y * z, 0),
    "logistic": lambda z, y: -y / (1 + np.exp(np.minimum(y * z, 700))),
    "squared": lambda z, y: z - y,
    "absolute": lambda z, y: np.sign(z - y),
    "epsilon insensitive": lambda z, y: np.where(np.abs(z - y) > 0.1, np.sign(z - y), 0.0),
    "huber": lambda z, y: np.clip(z - y, -0.7, 0.7),
    "quantile": lambda z, y: np.where(z < y, -0.25, 0.75),
}


def dual_step(slope: Derivative, beta: np.ndarray, g: np.ndarray, y: np.ndarray, kappa: np.ndarray) -> np.ndarray:
    """The new dual of one coordinate of each node."""
    v = g - kappa * beta
    far = v - kappa * slope(v, y)
    low, high = np.minimum(v, far), np.maximum(v, far)
    for _ in range(100):
        z = (low + high) / 2
        above = z + kappa * slope(z, y) > v
        low, high = np.where(above, low, z), np.where(above, z, high)
    return ((low + high) / 2 - v) / kappa


def passes(loss: str, orders: np.ndarray, *arrays: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Passes over the rows, one for each order; arrays as `mocha_jax._node.kernel` has them, up to the steps."""
    x, y, c, norm2, beta, w, q = (np.array(a, np.float64) for a in arrays[:7])
    steps, u = np.asarray(arrays[7]), np.zeros_like(w)
    done = np.zeros_like(steps)
    for i in itertools.chain.from_iterable(orders):
        visit = (c[i] > 0) & (done < steps)
        g = np.einsum("md,md->m", x[i], w + q[:, None] * u)
        kappa = np.where(visit, q * c[i] * norm2[i], 1.0)
        new = np.where(visit, dual_step(DERIVATIVES[loss], beta[i], g, y[i], kappa), beta[i])
        u += (c[i] * (new - beta[i]))[:, None] * x[i]
        beta[i], done = new, done + visit
    return beta, u, done


def differ(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """|found - expected| / |expected| of the whole, and the largest difference relative to the largest number."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    if not np.isfinite(found).all():
        return float("inf"), float("inf")
    off = np.abs(found - expected)
    size, most = float(np.linalg.norm(expected)), float(np.max(np.abs(expected), initial=0.0))
    return float(np.linalg.norm(off)) / max(size, 1e-30), float(off.max(initial=0.0)) / max(most, 1e-30)


def pairs(factors: dict[str, Sequence[Any]], tries: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Combinations of factors that hold all pairs of their values: each the best of some that begin with a new pair."""
    names = list(factors)
    new = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a])) for j in range(len(factors[b]))
    }  # fmt: skip

    def held(chosen: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}

    while new:
        ordered = sorted(new)
        best: dict[str, int] = {}
        gain: set[tuple[str, int, str, int]] = set()
        for _ in range(tries):
            a, i, b, j = ordered[int(rng.integers(len(ordered)))]
            chosen = {name: int(rng.integers(len(values))) for name, values in factors.items()} | {a: i, b: j}
            if len(found := held(chosen) & new) > len(gain):
                best, gain = chosen, found
        new -= gain
        yield {name: factors[name][i] for name, i in best.items()}


def count_pairs(cases: Sequence[dict[str, Any]], names: Sequence[str]) -> int:
    """How many pairs of values some cases hold."""
    return len({(a, str(c[a]), b, str(c[b])) for c in cases for a, b in itertools.combinations(names, 2)})
