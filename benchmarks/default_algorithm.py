"""Second-order methods beside coordinate ascent: where `mj.default_algorithm` puts the line.

    python -m benchmarks.default_algorithm [--shapes 30x40x5 139x110x29 ...] [--losses ...] [--json FILE]

For every shape (tasks x samples x features), loss and regularizer, by `Newton`, or `InteriorPoint` for losses with
kinks, and by `Mocha`, in one process and in turns: rounds, marked + where they did not reach the tolerance, the first
solve, which compiles, and the median of five more with other keys, both to a certified relative gap of 1e-4 in at most
1,000 rounds. The samples are drawn; a weak regularizer is a hundredth of the other one.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import mocha_jax as mj

R = mj.regularizers
SHAPES = ["30x40x5", "139x110x29", "139x110x60", "139x110x100", "1000x64x48", "10000x16x32"]
LOSSES = ["Logistic", "Squared", "Hinge", "Absolute", "Quantile", "SquaredHinge", "SmoothedHinge", "Huber"]
REGULARIZERS: dict[str, Callable[[int], mj.regularizers.Regularizer]] = {
    "local": lambda m: R.Independent(1e-2),
    "mean": lambda m: R.MeanRegularized(1e-2, 1e-3),
    "mean, weak": lambda m: R.MeanRegularized(1e-4, 1e-5),
    "ring": lambda m: R.Graph(_ring(m), 1e-2, 1e-3),
}
_TOL, _TURNS = 1e-4, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES[:4])
    parser.add_argument("--regularizers", nargs="+", choices=REGULARIZERS, default=[*REGULARIZERS])
    parser.add_argument("--turns", type=int, default=_TURNS)
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; seconds of a first solve, milliseconds of others")
    print(f"{'':40}{'second order':>24}{'Mocha':>26}   {'ratio of both':>14}")
    head = f"{'rounds':>8}{'first':>8}{'again':>8}"
    print(f"{'shape':14}{'loss':14}{'regularizer':12}{head}  {head}   {'first':>6} {'again':>7}  default")
    rows = []
    for shape in options.shapes:
        for loss in options.losses:
            for name in options.regularizers:
                row = compared(shape, loss, name, options.turns)
                if row is not None:
                    rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)


def compared(shape: str, loss: str, name: str, turns: int) -> dict[str, Any] | None:
    """Measure and print one row; none where a dense relationship of so many tasks is no small thing."""
    m, n, d = map(int, shape.split("x"))
    if name == "ring" and m > 200:
        return None
    problem = drawn(m, n, d, loss, REGULARIZERS[name](m))
    default = type(mj.default_algorithm(problem)).__name__
    row: dict[str, Any] = {"shape": shape, "loss": loss, "regularizer": name, "default": default}
    second: mj.Algorithm[mj.Problem] = mj.InteriorPoint() if problem.loss.piecewise_linear else mj.Newton()
    algorithms = {"second": second, "mocha": mj.Mocha()}
    times: dict[str, list[float]] = {who: [] for who in algorithms}
    for turn in range(turns + 1):
        for who, algorithm in algorithms.items():
            seconds, solution = timed(problem, algorithm, turn)
            times[who].append(seconds)
            row[f"{who}_rounds"], row[f"{who}_gap"] = solution.rounds, float(solution.relative_gap)
    shown = ""
    for who in algorithms:
        first, again = times[who][0], 1e3 * float(np.median(times[who][1:]))
        row |= {f"{who}_first_s": first, f"{who}_again_ms": again}
        there = "" if row[f"{who}_gap"] <= _TOL else "+"
        shown += f"{row[f'{who}_rounds']:>7}{there or ' '}{first:8.2f}{again:8.1f}  "
    first, again = (row[f"second_{what}"] / row[f"mocha_{what}"] for what in ("first_s", "again_ms"))
    print(f"{shape:14}{loss:14}{name:12}{shown} {first:6.2f} {again:7.2f}  {default}", flush=True)
    jax.clear_caches()
    return row


def timed(problem: mj.Problem, algorithm: mj.Algorithm[mj.Problem], turn: int) -> tuple[float, mj.Solution[mj.Problem]]:
    """Solve once, with a key of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mj.NotConverged)
        begin = time.perf_counter()
        solution = mj.solve(problem, algorithm, tol=_TOL, key=jax.random.key(turn))
        jax.block_until_ready(solution.weights)
        return time.perf_counter() - begin, solution


def drawn(m: int, n: int, d: int, loss: str, regularizer: mj.regularizers.Regularizer) -> mj.Problem:
    """A problem with tasks that differ from their mean by half of its size."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=d) + 0.5 * rng.normal(size=(m, d))
    x = rng.normal(size=(m, n, d)).astype(np.float32)
    z = np.einsum("mnd,md->mn", x, weights) / np.sqrt(d) + 0.3 * rng.normal(size=(m, n))
    made = getattr(mj.losses, loss)()
    y = (np.sign(z) if made.binary else z).astype(np.float32)
    data = mj.pack_tasks(list(x), list(y), loss_scaling="task_mean")
    return mj.Problem(data, made, regularizer)


def _ring(m: int) -> np.ndarray:
    """The Laplacian of a ring of tasks."""
    one = np.eye(m, dtype=np.float32)
    return 2.0 * one - np.roll(one, 1, 0) - np.roll(one, -1, 0)


if __name__ == "__main__":
    main()
