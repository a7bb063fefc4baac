"""The local epoch as one kernel, on a GPU or TPU: ``python -m benchmarks.kernel [--json FILE]``.

For each shape and loss: microseconds of one pass over all rows by the Pallas kernel and by the loops that XLA compiles
(the same function, `mocha_jax._node.local_solver.ascend`, and the same data; the results are compared), and the share
of the device's copy bandwidth that the kernel reaches, counting X once. The copy is measured in the same run. Medians
of several calls of several passes each; compile times apart. Where X would fit into the device's cache a call goes
through several sets of samples, one after the other.

Then, on any device: what storing the samples in bfloat16 does to the solution. Rounding the samples makes another
problem, which is solved as exactly as ever; its dual point and its weights are certified for the original one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from experiments import tasksets
from mocha_jax._node.buckets import TimeMajor, time_major
from mocha_jax._node.local_solver import ascend, visiting_orders

GOAL = (10_000, 128, 64)
SHAPES = [
    (1_000, 128, 64), GOAL, (100_000, 16, 32), (10_000, 128, 16), (10_000, 128, 100), (1_000, 256, 576), (100, 2000, 64)
]  # fmt: skip
LOSSES = {
    "hinge": mj.losses.Hinge(), "smoothed hinge": mj.losses.SmoothedHinge(0.5), "squared": mj.losses.Squared(),
    "logistic": mj.losses.Logistic(),
}  # fmt: skip
PASSES = 5
_CACHE = 64 * 2**20  # bytes, about, of the second level of a large GPU


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="calls of which the median is taken")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help=".npz files for the effect of bfloat16")
    parser.add_argument("--json", type=Path, help="save the numbers here")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "speed": [], "half": []}
    if jax.default_backend() == "cpu":
        print("no accelerator here: kernels are not timed")
    else:
        copy = copy_bandwidth(options.repeats)
        print(f"copy: {copy / 1e9:.0f} GB/s")
        columns = "m, n, d", "loss", "storage", "kernel us", "loops us", "ratio", "of copy", "compile s", "differ"
        print("".join(f"{c:>16}" for c in columns))
        for shape in SHAPES:
            cases = [(loss, "float32") for loss in LOSSES if shape == GOAL or loss == "hinge"] + [("hinge", "bfloat16")]
            for loss, storage in cases:
                r = speed(shape, loss, storage, copy, options.repeats)
                results["speed"].append(r)
                numbers = f"{r['kernel_us']:>16.0f}{r['loops_us']:>16.0f}{r['loops_us'] / r['kernel_us']:>16.1f}"
                numbers += f"{r['share']:>16.0%}{r['compile_s']:>16.1f}{r['differ']:>16.0e}"
                print(f"{', '.join(map(str, shape)):>16}{loss:>16}{storage:>16}{numbers}", flush=True)
    print(f"\n{'bfloat16':>12} {'rounds':>7} {'gap, its own problem':>21} {'gap, original problem':>22}")
    for path in options.data:
        row = half_precision(tasksets.load(path))
        results["half"].append({"data": path.stem} | row)
        print(f"{path.stem:>12} {row['rounds']:7d} {row['own']:21.1e} {row['original']:22.1e}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def speed(shape: tuple[int, int, int], loss: str, storage: str, copy: float, repeats: int) -> dict[str, Any]:
    """One pass by kernel and by loops."""
    sets = jax.block_until_ready(several_sets(shape, storage))
    passes = passes_over(sets)
    kernel, loops = (jax.jit(partial(several_passes, backend=b), static_argnums=0) for b in ("pallas", "xla"))
    ours, compile_s = seconds(lambda: kernel(loss, sets), repeats)
    theirs, _ = seconds(lambda: loops(loss, sets), max(repeats // 3, 1))
    both = zip(*(jax.tree.leaves(by(loss, sets)) for by in (kernel, loops)), strict=True)
    differ = max(float(jnp.max(jnp.abs(a - b))) for a, b in both)
    nbytes = sets[0][0].x.nbytes
    return dict(shape=shape, loss=loss, storage=storage, kernel_us=1e6 * ours / passes, loops_us=1e6 * theirs / passes,
                share=nbytes * passes / ours / copy, compile_s=compile_s, differ=differ)  # fmt: skip


Arguments = tuple[mj.TaskData, jax.Array, jax.Array, jax.Array, jax.Array]


def several_passes(loss: str, sets: tuple[Arguments, ...], *, backend: str) -> Any:
    """Several passes in one program, which hides the launch: over one set of samples, or one over each of several."""
    found, key = [], jax.random.key(0)
    for data, *rest in sets:
        data = data.replace(layout=cast(TimeMajor, data.layout).replace(backend=backend))
        orders = visiting_orders(key, data, PASSES if len(sets) == 1 else 1)
        found.append(ascend(orders, LOSSES[loss], data, *rest))
    return found


def passes_over(sets: tuple[Arguments, ...]) -> int:
    """How many passes `several_passes` does."""
    return PASSES if len(sets) == 1 else len(sets)


def several_sets(shape: tuple[int, int, int], storage: str) -> tuple[Arguments, ...]:
    """As many sets of samples as it takes for none to be left in the cache when its turn comes again."""
    size = np.prod(shape, dtype=float) * jnp.dtype(storage).itemsize
    count = 1 if size >= 4 * _CACHE or jax.default_backend() == "cpu" else min(int(3 * _CACHE / size) + 1, 6)
    return tuple(make(shape, storage, jax.random.key(k)) for k in range(count))


@partial(jax.jit, static_argnums=(0, 1))
def make(shape: tuple[int, int, int], storage: str, key: jax.Array) -> Arguments:
    """A set of arguments, made on the device and laid out."""
    m, n, d = shape
    keys = jax.random.split(key, 3)
    x = (jax.random.normal(keys[0], (m, n, d)) / d**0.5).astype(storage)
    y = jnp.where(jax.random.bernoulli(keys[1], shape=(m, n)), 1.0, -1.0)
    data = mj.TaskData(x, y, jnp.full((m, n), 1.0 / n), jnp.arange(m, dtype=jnp.int32), num_tasks=m)
    w = jax.random.normal(keys[2], (m, d))
    return time_major(data), jnp.zeros((m, n)), w, jnp.ones(m), jnp.full(m, PASSES * n, jnp.int32)


def copy_bandwidth(repeats: int) -> float:
    """Bytes per second of an elementwise operation: what is read and what is written, together."""
    x = jax.random.normal(jax.random.key(0), (2**28,))
    copy = jax.jit(lambda x: x + 1.0)
    return 2 * x.nbytes / seconds(lambda: copy(x), repeats)[0]


def seconds(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median of several calls, and the first one above it: compilation."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    typical = float(np.median(times[2:]))
    return typical, times[0] - typical


def half_precision(tasks: Any) -> dict[str, Any]:
    """Solve with the samples rounded to bfloat16; certify the result for the rounded and the original samples."""
    regularizer = mj.regularizers.MeanRegularized(0.1, 0.1)
    data = tasks.data
    problem = mj.Problem(data, tasks.loss, regularizer)
    rounded = problem.replace(data=data.replace(x=data.x.astype(jnp.bfloat16)))
    solution = mj.solve(rounded, tol=1e-4, max_rounds=2000)
    original = mj.certificate(problem, solution.state.beta)
    return dict(rounds=solution.rounds, own=solution.relative_gap, original=float(original.relative_gap))


if __name__ == "__main__":
    main()
