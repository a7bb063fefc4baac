"""A round of the adaptive server over a round of Algorithm 1: ``python -m benchmarks.adaptive [--json FILE]``.

Tasks near their mean (lambda 0.01 of both kinds), hinge loss, float32. Both run the same rounds on the same data, turn
about; a round is timed with one record at the end (median of the turns); *ratio* is the median of the turns' ratios.
*gap* is the relative gap of each after those rounds, *compile s* what the first run takes more than a later one.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

import mocha_jax as mj

SHAPES = (30, 400, 10), (32, 256, 576), (1000, 64, 64), (4096, 32, 32), (10000, 16, 32), (100000, 16, 32)
METHODS = {"Algorithm 1": mj.Mocha(server="dual", sigma_prime="per_task"), "adaptive": mj.Mocha(server="dual")}


def problem(m: int, n: int, d: int) -> mj.Problem:
    """Labels of a linear model with a common part and noise."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(m, n, d)) / np.sqrt(d)).astype("f")
    truth = rng.normal(size=(m, d)) + 1.0
    y = np.sign(np.einsum("mnd,md->mn", x, truth) + 0.3 * rng.normal(size=(m, n))).astype("f")
    data = mj.pack_tasks(list(x), list(y), loss_scaling="task_mean")
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.01, 0.01))


def measure(shape: tuple[int, int, int], rounds: int, turns: int) -> dict[str, Any]:
    """Milliseconds of a round of both, their ratio, gaps and compile times."""
    given, gaps = problem(*shape), {}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    rounds = max(rounds, round(rounds * 1e6 / np.prod(shape)))
    for _ in range(1 + turns):
        for name, algorithm in METHODS.items():
            began = time.perf_counter()
            ran = mj.run(given, algorithm, jax.random.key(0), num_rounds=rounds, record_every=rounds)
            history = jax.block_until_ready(ran)[1]
            seconds[name].append(time.perf_counter() - began)
            gaps[name] = float(history.relative_gap[-1])
    ours, theirs = (np.array(seconds[name]) for name in ("adaptive", "Algorithm 1"))
    return {
        "shape": shape,
        "rounds": rounds,
        "ms": {name: 1e3 * float(np.median(each[1:])) / rounds for name, each in seconds.items()},
        "ratio": float(np.median(ours[1:] / theirs[1:])),
        "gap": gaps,
        "compile_s": {name: each[0] - float(np.median(each[1:])) for name, each in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--rounds", type=int, default=10, help="at least; more of small shapes")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", help="save the numbers here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; milliseconds a round")
    print(f"{'m, n, d':>16} {'rounds':>7} |{'Algorithm 1':>12} {'adaptive':>9} {'ratio':>6} |{'gaps':>9} {'':>9} "
          f"|{'compile s':>10}")  # fmt: skip
    rows = []
    for text in options.shapes:
        m, n, d = map(int, text.split("x"))
        row = measure((m, n, d), options.rounds, options.turns)
        rows.append(row)
        ms, gap, compiled = (list(row[key].values()) for key in ("ms", "gap", "compile_s"))
        print(f"{f'{m}, {n}, {d}':>16} {row['rounds']:>7} |{ms[0]:>12.2f} {ms[1]:>9.2f} {row['ratio']:>6.2f} "
              f"|{gap[0]:>9.1e} {gap[1]:>9.1e} |{compiled[0]:>5.1f} {compiled[1]:>4.1f}", flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
