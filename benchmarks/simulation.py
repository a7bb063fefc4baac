"""What simulating a federation adds to a round: ``python -m benchmarks.simulation``.

Rounds of MOCHA with the clock of equation (30), without and with systems of stragglers and drops, on the same data in
the same run. The systems here leave every node's work whole or nearly so: what is timed is the simulation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from mocha_jax import systems

SHAPES = ((32, 256, 576), (1000, 64, 64), (10_000, 16, 32))
ROUNDS = 50


def main() -> None:
    """Time every system against none, in turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="timings of each (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to save to")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {ROUNDS} rounds, median of {options.turns}")
    results = [row for shape in SHAPES for row in measure(*shape, options.turns)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(m: int, n: int, d: int, turns: int) -> list[dict[str, Any]]:
    """Milliseconds a round with each system, and the ratio to none."""
    data = mj.datasets.federation(jax.random.key(0), m, d, smallest=n, largest=n).data
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
    groups = np.arange(m) % 10
    worlds: dict[str, systems.System] = {
        "none": systems.Full(),
        "drops and partial epochs": systems.Dropout(0.1) & systems.PartialEpochs(0.9, 1.0),
        "outages of groups": systems.Outages(0.1, groups, length=5),
        "a sampled share": systems.Sampled(0.9),
        "deadline": systems.Deadline(10.0, mj.costs.lte(np.geomspace(1e8, 1e9, m))),
        "all of these": systems.Dropout(0.1) & systems.Outages(0.1, groups, 5) & systems.Sampled(0.9)
        & systems.PartialEpochs(0.9, 1.0) & systems.Deadline(10.0, mj.costs.lte(np.geomspace(1e8, 1e9, m))),
    }  # fmt: skip

    def timed(world: systems.System) -> float:
        began = time.perf_counter()
        key = jax.random.key(1)
        jax.block_until_ready(
            mj.run(
                problem,
                mj.Mocha(sigma_prime="per_task"),
                key,
                num_rounds=ROUNDS,
                record_every=ROUNDS,
                systems=world,
                cost=mj.costs.lte(),
            )
        )
        return 1e3 * (time.perf_counter() - began) / ROUNDS

    for world in worlds.values():
        timed(world)
    times: dict[str, list[float]] = {name: [] for name in worlds}
    for _ in range(turns):  # in turns, so that a busy moment of the machine hits all alike
        for name, world in worlds.items():
            times[name].append(timed(world))
    rows = []
    print(f"m, n, d = {m}, {n}, {d}")
    for name, t in times.items():
        ratio = float(np.median(np.array(t) / np.array(times["none"])))
        rows.append({"shape": [m, n, d], "system": name, "round_ms": float(np.median(t)), "ratio": ratio})
        print(f"  {name:<26} {np.median(t):>8.2f} ms a round   {ratio:>6.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
