"""Very many small models at once, `Independent`, beside scikit-learn in a process pool on all cores.

Models of 16 samples and 32 features each: ridge regression, logistic regression, support vector machines, solved to a
relative gap of 1e-3 of their sum. scikit-learn fits a sample of the same models, each to its own default tolerance; its
seconds are scaled to all of them. The objectives of both are compared in float64: the sum of the library's over the
sample cannot be further above scikit-learn's than the gap of all models says.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from benchmarks.card._inside import Inside, scratch, step
from benchmarks.card._sklearn_models import KINDS, LAM, objectives
from benchmarks.card._timing import gist, in_threads, timed
from mocha_jax._data.layouts import row_by_row

SAMPLES, FEATURES, TOL = 16, 32, 1e-3
LOSSES: dict[str, mj.losses.Loss] = {
    "ridge": mj.losses.Squared(), "logistic": mj.losses.Logistic(), "svm": mj.losses.Hinge()
}  # fmt: skip


def measure(here: Inside) -> None:
    """A process for each number of models; then both beside scikit-learn."""
    here.apart("benchmarks.card.many", {str(m): {} for m in ((100_000, 1_000_000) if here.full else (40,))}, part)
    found = here.details()
    theirs = {detail["kind"]: detail for detail in found if "each" in detail}
    for ours in (detail for detail in found if "seconds" in detail):
        if beside := theirs.get(ours["kind"]):
            m, seconds = ours["models"], beside["each"] * ours["models"]
            note = f"scaled from {beside['count']:,} models in {beside['taken']:.2f} s on {beside['cores']} cores"
            here.figure(f"{m:,} {ours['kind']} models: scikit-learn", seconds, "s", note=note)
            here.figure(
                f"{m:,} {ours['kind']} models: scikit-learn's seconds over ours", seconds / ours["seconds"], "times"
            )


def part(here: Inside, name: str) -> None:
    """All kinds of one number of models."""
    m, sample = int(name), 3000 if here.full else 8
    kinds = KINDS if here.full else KINDS[2:]
    data = {kind: made(kind, m) for kind in kinds}
    warm = list(in_threads([partial(_solve, kind, data[kind]) for kind in kinds], lambda: 0.6 * here.left()))
    with here.alone():
        for kind, first in zip(kinds, warm, strict=True):
            if isinstance(first, TimeoutError) or here.left() < 3.0:
                here.unfinished(f"{m:,} {kind}")
            elif isinstance(first, Exception):
                here.wrong(f"{m:,} {kind}: {gist(first)}")
            else:
                _one(here, kind, m, data[kind])
                if m <= 100_000:
                    _beside(here, kind, data[kind], first, sample)


def made(kind: str, m: int) -> mj.TaskData:
    """Samples of m models, each with weights of its own, in order in memory."""
    data = _made(m, kind != "ridge")
    return data.replace(x=row_by_row(data.x))


@partial(jax.jit, static_argnums=(0, 1))
def _made(m: int, classes: bool) -> mj.TaskData:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, SAMPLES, FEATURES))
    z = jnp.einsum("mnd,md->mn", x, jax.random.normal(keys[1], (m, FEATURES))) / FEATURES**0.5
    z = z + 0.3 * jax.random.normal(keys[2], z.shape)
    y = jnp.where(z > 0, 1.0, -1.0) if classes else z
    weight = jnp.full(y.shape, 1.0 / SAMPLES)
    return mj.TaskData(x, y, weight, jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling="task_mean")


def _solve(kind: str, data: mj.TaskData) -> mj.Solution:
    problem = mj.Problem(data, LOSSES[kind], mj.regularizers.Independent(LAM))
    solution = mj.solve(problem, tol=TOL, max_rounds=300)
    jax.block_until_ready(solution.weights)
    return solution


def _one(here: Inside, kind: str, m: int, data: mj.TaskData) -> None:
    """Time solves that compile nothing."""
    taken = timed(lambda: _solve(kind, data), calls=3, within=1.0)
    solution: mj.Solution = taken.result
    rate = f"{m / taken.seconds:,.0f} models a second, {solution.rounds} rounds, {solution.status.name}"
    here.figure(f"{m:,} {kind} models", taken.seconds, "s", spread=taken.spread, note=rate)
    here.detail(kind=kind, models=m, seconds=taken.seconds)


def _beside(here: Inside, kind: str, data: mj.TaskData, solution: mj.Solution, sample: int) -> None:
    """scikit-learn on the first of the models, in a process that has not heard of JAX."""
    x, y, ours = (np.asarray(a[:sample]) for a in (data.x, data.y, solution.weights))
    with scratch() as folder:
        path, to = Path(folder) / "sample.npz", Path(folder) / "weights.npz"
        np.savez(path, x=x, y=y)
        child = here.child(
            ["-m", "benchmarks.card._sklearn_models", kind, str(path), str(to)],
            environment=dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        )
        rows: list[dict[str, Any]] = child.results
        if not rows or "absent" in rows[-1]:
            here.note(f"{kind}: no comparison, " + (rows[-1]["absent"] if rows else child.why()))
            return
        theirs, row = np.load(to)["weights"], rows[-1]
    here.detail(kind=kind, each=row["seconds"] / len(x), taken=row["seconds"], cores=row["cores"], count=len(x))
    mine, others = (float(objectives(kind, x, y, w).sum()) for w in (ours, theirs))
    here.figure(f"{kind}: our objective of the sample over scikit-learn's, less 1", mine / others - 1.0, "")
    gap = float(solution.gap) + float(solution.rounding)
    if mine - others > gap + 1e-9 * others:
        here.wrong(f"{kind}: {mine - others:.2e} above scikit-learn on the sample, the gap of all models is {gap:.2e}")


if __name__ == "__main__":
    step(measure, part)
