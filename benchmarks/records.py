"""What a certificate costs: ``python -m benchmarks.records [--repeats 200] [--json FILE]``.

Milliseconds, of float32 problems: a round of `run` without a record, the record of a round (`Algorithm.certify`), and
the certificate of a solution, taken once at the end of a solve (`Algorithm.prove`). The least of many runs, in turns:
other work on the machine can only add to them.
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

SHAPES = [(32, 256, 576), (24, 1408, 100), (1000, 64, 64), (4096, 32, 32)]
LOSSES = {"hinge": mj.losses.Hinge(), "logistic": mj.losses.Logistic()}
MODELS: dict[str, tuple[Any, Any]] = {
    "near the mean": (mj.regularizers.MeanRegularized(0.1, 0.1), mj.Mocha(server="dual", sigma_prime="per_task")),
    "(14)": (mj.regularizers.Probabilistic(0.1), mj.Mocha()),
}
ROUNDS = 20


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200, help="of each, in turns")
    parser.add_argument("--json", type=Path, help="save the numbers here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; milliseconds, least of {options.repeats}")
    print(f"{'m, n, d':>14} {'model':>14} {'loss':>9} {'round':>8} {'record':>8} {'of a round':>11} {'solution':>9}")
    rows = []
    for shape in SHAPES:
        for model in MODELS:
            for loss in LOSSES:
                row: dict[str, Any] = {"shape": shape, "model": model, "loss": loss}
                rows.append(row := row | measured(shape, model, loss, options.repeats))
                ratio = row["record"] / row["round"]
                print(f"{', '.join(map(str, shape)):>14} {model:>14} {loss:>9} {row['round']:8.2f} "
                      f"{row['record']:8.2f} {ratio:11.2f} {row['solution']:9.2f}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1))


def measured(shape: tuple[int, int, int], model: str, loss: str, repeats: int) -> dict[str, float]:
    """All three, of a state after a few rounds."""
    m, n, d = shape
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=shape), rng.normal(size=(m, d))
    y = np.sign(np.einsum("mnd,md->mn", x, w) + rng.normal(size=(m, n)))
    data = mj.pack_tasks(list(x.astype(np.float32)), list(y.astype(np.float32)))
    regularizer, algorithm = MODELS[model]
    problem = mj.Problem(data, LOSSES[loss], regularizer)
    key = jax.random.key(0)

    def rounds(problem: mj.Problem) -> Any:
        return mj.run(problem, algorithm, key, num_rounds=ROUNDS, record_every=ROUNDS)[0]

    compiled = jax.jit(rounds)
    state = compiled(problem)
    work: dict[str, Callable[[], Any]] = {"round": partial(compiled, problem)}
    for name, how in ("record", "certify"), ("solution", "prove"):
        work[name] = partial(jax.jit(getattr(algorithm, how)), state, problem)
    least = dict.fromkeys(work, np.inf)
    for i in range(repeats + 1):
        for name, go in work.items():
            if name == "round" and i % 10:  # twenty of them at once
                continue
            start = time.perf_counter()
            jax.block_until_ready(go())
            spent = time.perf_counter() - start
            if i:  # the first time it compiles
                least[name] = min(least[name], spent)
    return {name: 1e3 * spent / (ROUNDS if name == "round" else 1) for name, spent in least.items()}


if __name__ == "__main__":
    main()
