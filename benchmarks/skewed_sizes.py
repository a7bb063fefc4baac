"""Devices of very different sizes: ``python -m benchmarks.skewed_sizes [--parts rounds solves] [--json FILE]``.

m devices with 3 to 2,000 samples each (lognormal, clipped) of d features, hinge loss, tasks near their mean, float32;
beside them m devices of one size with as many samples in all. Milliseconds of one local epoch and of a whole round of
`run` (with a certificate in every round, and in every fiftieth), medians of several; then the same devices padded to
the largest, which is what the array [m, n, d] by itself would cost.

Then solves to a relative gap of 1e-3 by default, which is by `mj.Newton` or `mj.InteriorPoint`, and by `mj.Mocha`, of
both kinds of devices in turns: rounds, seconds of the first solve and milliseconds of others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from benchmarks.local_epoch import one_pass
from mocha_jax._node.buckets import bucket_sizes, time_major

SHAPES = [(300, 64), (1000, 32), (1000, 64), (3000, 64)]
METHODS = {"per_task": mj.Mocha(sigma_prime="per_task"), "adaptive": mj.Mocha(sigma_prime="adaptive")}
ROUNDS = 50
SOLVES = [(300, 16), (300, 64), (1000, 32)]
NEAR = mj.regularizers.MeanRegularized(1e-2, 1e-3)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.skewed_sizes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=["rounds", "solves"], default=["rounds", "solves"])
    parser.add_argument("--json", type=Path, help="save the numbers here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; milliseconds")
    found: dict[str, Any] = {"jax": jax.__version__}
    if "rounds" in options.parts:
        found["rows"] = of_rounds(options.repeats)
    if "solves" in options.parts:
        found["solves"] = of_solves(options.repeats)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def of_rounds(repeats: int) -> list[dict[str, Any]]:
    """Rounds and epochs, beside those of equal sizes."""
    columns = "m, d", "samples", "padded", "epoch", "equal sizes", "ratio", "all padded"
    print("".join(f"{c:>13}" for c in columns) + "   a round, over that of equal sizes; records every 1 and 50")
    rows = []
    for m, d in SHAPES:
        row = compare(m, d, repeats)
        rows.append(row)
        rounds = ", ".join(f"{name} {a:.2f} {b:.2f}" for name, (a, b) in row["rounds"].items())
        print(f"{f'{m}, {d}':>13}{row['samples']:>13}{row['padded']:>13}{row['epoch']:>13.2f}{row['equal']:>13.2f}"
              f"{row['epoch'] / row['equal']:>13.2f}{row['all_padded']:>13.2f}   {rounds}", flush=True)  # fmt: skip
    return rows


def of_solves(repeats: int) -> list[dict[str, Any]]:
    """Whole solves, of skewed and of equal sizes."""
    print(f"{'m, d':>13}{'loss':>10}{'algorithm':>16}   rounds, first s, ms: skewed       equal sizes   a round, ratio")
    rows = []
    for m, d in SOLVES:
        sizes = drawn_sizes(m)
        both = [problem(n, d).data for n in (sizes, np.full(m, round(sizes.mean())))]
        for loss in (mj.losses.Logistic(), mj.losses.Hinge()):
            pair = [mj.Problem(data, loss, NEAR) for data in both]
            for algorithm in (mj.default_algorithm(pair[0]), mj.Mocha()):
                rows.append(row := solves(pair, algorithm, repeats))
                shown = (
                    f"{r:8d}{f:8.1f}{ms:8.0f}"
                    for r, f, ms in zip(row["rounds"], row["first_s"], row["ms"], strict=True)
                )
                ratio = row["ms"][0] / row["rounds"][0] / (row["ms"][1] / row["rounds"][1])
                print(
                    f"{f'{m}, {d}':>13}{row['loss']:>10}{row['algorithm']:>16}{''.join(shown)}{ratio:12.2f}", flush=True
                )
    return rows


def solves(pair: list[mj.Problem], algorithm: mj.Algorithm[mj.Problem], repeats: int) -> dict[str, Any]:
    """Solve both in turns."""
    every = 5 if isinstance(algorithm, mj.Mocha) else 1
    first: list[float] = []
    times: tuple[list[float], list[float]] = [], []
    rounds = [0, 0]
    for turn in range(repeats + 1):
        for i, this in enumerate(pair):
            began = time.perf_counter()
            rounds[i] = int(mj.solve(this, algorithm, tol=1e-3, record_every=every).rounds)
            (times[i] if turn else first).append(time.perf_counter() - began)
    m, d = pair[0].data.num_tasks, pair[0].data.num_features
    ms = [1e3 * float(np.median(each)) for each in times]
    about = {"m": m, "d": d, "loss": type(pair[0].loss).__name__, "algorithm": type(algorithm).__name__}
    return about | {"first_s": first, "ms": ms, "rounds": rounds}


def drawn_sizes(m: int) -> np.ndarray:
    """Numbers of samples, the largest and the smallest among them."""
    draws = np.random.default_rng(0).normal(np.log(60), 1.3, m)
    sizes = np.clip(np.exp(draws), 3, 2000).astype(int)
    sizes[:2] = 2000, 3
    return sizes


def compare(m: int, d: int, repeats: int) -> dict[str, Any]:
    """The same number of samples on skewed and on equal devices."""
    sizes = drawn_sizes(m)
    skewed, equal = problem(sizes, d), problem(np.full(m, round(sizes.mean())), d)
    bucketing = bucket_sizes(skewed.data)
    rounds = {
        name: [round_ms(skewed, a, every, repeats) / round_ms(equal, a, every, repeats) for every in (1, ROUNDS)]
        for name, a in METHODS.items()
    }
    return {
        "m": m, "d": d, "samples": int(sizes.sum()), "padded": sum(nodes * rows for nodes, rows in bucketing),
        "epoch": epoch_ms(skewed, bucketing, repeats), "equal": epoch_ms(equal, (), repeats),
        "all_padded": epoch_ms(skewed, (), repeats), "rounds": rounds,
    }  # fmt: skip


def problem(sizes: np.ndarray, d: int) -> mj.Problem:
    """Devices with labels of their own linear rules, a tenth of them wrong."""
    key = jax.random.key(0)
    weights = jax.random.normal(jax.random.fold_in(key, 0), (len(sizes), d))
    data = mj.datasets.classification(jax.random.fold_in(key, 1), weights, sizes, label_noise=0.1)
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1.0, 1.0))


def epoch_ms(this: mj.Problem, bucketing: tuple[tuple[int, int], ...], repeats: int) -> float:
    """One local epoch of all devices."""
    state = METHODS["per_task"].init(this)
    rows = jax.jit(partial(time_major, bucketing=bucketing))(this.data)
    q = state.server.sigma * state.server.coupling.diagonal()
    epoch = jax.jit(one_pass)
    return median(lambda: epoch(jax.random.key(0), this.loss, rows, state.beta, state.w, q, this.data.sizes), repeats)


def round_ms(this: mj.Problem, algorithm: mj.Mocha, every: int, repeats: int) -> float:
    """One round of many."""
    return median(
        lambda: mj.run(this, algorithm, jax.random.key(0), num_rounds=ROUNDS, record_every=every), max(repeats // 2, 1)
    ) / ROUNDS  # fmt: skip


def median(work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds, after a call that compiles."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[1:]))


if __name__ == "__main__":
    main()
