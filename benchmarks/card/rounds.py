"""A round of four algorithms: microseconds measured beside predicted, kernels counted beside compiled.

A run of many rounds is one program; what is measured, predicted and counted of it are a round's share of all of it, its
plan and its record too. The prediction is `benchmarks._model`'s for this card's data sheet, from the text of the very
program; on a CPU it is for an H100 and means nothing. Kernels are counted by JAX's profiler in one run, in what CUDA
reports of its streams.

XLA reads its flags once in a process, so every set of flags has a process of its own, and so has every shape.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

import mocha_jax as mj
from benchmarks._machines import Machine
from benchmarks._model import seconds
from benchmarks._prediction import tasks
from benchmarks._work import steps
from benchmarks.card._device import machine
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import gist, in_threads, on_cpu, profiled, timed
from mocha_jax._data.layouts import row_by_row

Shape = tuple[int, int, int]
FULL: list[Shape] = [(1000, 64, 64), (10_000, 128, 64), (100_000, 16, 32)]
TINY: list[Shape] = [(6, 4, 8)]
FLAGS = {
    "JAX's flags": "",
    "small graphs": "--xla_gpu_graph_min_graph_size=1",
    "products by cuBLAS": "--xla_gpu_enable_triton_gemm=false",
}
_ASKED = 100  # clients of FedAvg in a round

MEAN = mj.regularizers.MeanRegularized(0.1, 0.1)
DUAL: dict[str, tuple[Any, Any]] = {
    "Algorithm 1": (mj.Mocha(sigma_prime="per_task"), MEAN),
    "(14)": (mj.Mocha(), mj.regularizers.Probabilistic(0.1)),
    "adaptive": (mj.Mocha(), MEAN),
}


def measure(here: Inside) -> None:
    """A process for each shape; other flags are tried with the first one."""
    usual, shapes = os.environ.get("XLA_FLAGS", ""), FULL if here.full else TINY
    parts = {
        f"{', '.join(map(str, shape))}; {name}": {"XLA_FLAGS": f"{usual} {flags}".strip()} if flags else {}
        for name, flags in FLAGS.items()
        for shape in (shapes[:1] if flags else shapes)
    }
    here.apart("benchmarks.card.rounds", parts, part)


def part(here: Inside, name: str) -> None:
    """All algorithms of one shape at once: first they are compiled, then timed; at last kernels are counted."""
    where, _, flags = name.partition("; ")
    m, n, d = map(int, where.split(", "))
    sheet, how = machine()
    if not on_cpu() and not FLAGS[flags]:
        here.note(f"{where}: {how}")
    data = jax.jit(tasks, static_argnums=(0, 1, 2))(m, n, d)
    data = data.replace(x=row_by_row(data.x))
    names = (*DUAL, "FedAvg")
    if FLAGS[flags]:
        names = tuple(DUAL) if here.full else ("Algorithm 1",)
    jobs = [partial(compiled, name, data, here.full) for name in names]
    programs = list(in_threads(jobs, lambda: 0.6 * here.left()))
    ready: list[tuple[str, Program]] = []
    with here.alone():
        for name, program in zip(names, programs, strict=True):
            what = f"{where} {name}, {flags}"
            if isinstance(program, TimeoutError) or here.left() < 3.0:
                here.unfinished(what)
            elif isinstance(program, Exception):
                here.wrong(f"{what}: {gist(program)}")
            else:
                ready.append((what, program))
                _time(here, what, program, sheet)
    with here.alone():
        for what, program in ready:  # last: where a profiler hangs it costs the counts alone
            if here.left() > 3.0:
                _count(here, what, program)


class Program(NamedTuple):
    """A run, compiled."""

    name: str
    call: Any
    given: tuple[Any, ...]
    rounds: int


def compiled(name: str, data: mj.TaskData, full: bool) -> Program:
    """A run of an algorithm with one record at its end."""
    key = jax.random.key(0)
    if name == "FedAvg":
        labels = data.replace(y=(data.y > 0).astype(data.dtype))
        problem: Any = mj.Prediction(labels, test=jax.tree.map(lambda a: a[:, :1] if a.ndim > 1 else a, labels))
        # Linear models: what is measured is all around the training.
        model, share = mj.networks.MLP(data.num_features, 2, ()), min(_ASKED / data.num_nodes, 1.0)
        algorithm: Any = mj.FedAvg(model, optax.sgd(0.1), batch_size=16, fraction=share)
    else:
        algorithm, regularizer = DUAL[name]
        problem = mj.Problem(data, mj.losses.Hinge(), regularizer)
    rounds = (8 if name == "FedAvg" else 64) if full else 4

    def go(key: jax.Array, problem: Any) -> Any:
        return mj.run(problem, algorithm, key, num_rounds=rounds, record_every=rounds)

    return Program(name, jax.jit(go).lower(key, problem).compile(), (key, problem), rounds)


def _time(here: Inside, what: str, program: Program, sheet: Machine) -> None:
    """Measured beside predicted."""
    taken = timed(lambda: program.call(*program.given), calls=7, within=1.2)
    predicted, parts = _predicted(here, what, program, sheet)
    history = taken.result[1]
    name, reached = ("error", history.error) if program.name == "FedAvg" else ("gap", history.relative_gap)
    here.figure(
        what, 1e6 * taken.seconds / program.rounds, "us", predicted=predicted, spread=taken.spread,
        note=f"{name} {float(reached[-1]):.1e}", rounds=program.rounds, parts=parts,
    )  # fmt: skip


def _predicted(here: Inside, what: str, program: Program, sheet: Machine) -> tuple[float | None, dict[str, float]]:
    """Microseconds of a round, and its parts; nothing of FedAvg, whose loops end where no compiler knows."""
    if program.name == "FedAvg":
        return None, {}
    try:
        found = steps(program.call.as_text())
        times = {name: 1e6 * t / program.rounds for name, t in seconds(found, sheet)._asdict().items()}
    except Exception as error:
        here.note(f"{what}: no prediction ({gist(error)})")
        return None, {}
    parts = times | {"kernels": sum(s.times for s in found) / program.rounds}
    return None if on_cpu() else sum(times.values()), parts


def _count(here: Inside, what: str, program: Program) -> None:
    """Kernels in one run, as CUDA reports them, beside those of the compiled program."""
    try:
        ran = profiled(lambda: program.call(*program.given))
        inside = None if program.name == "FedAvg" else sum(s.times for s in steps(program.call.as_text()))
    except Exception as error:
        here.note(f"{what}: kernels were not counted ({gist(error)})")
        return
    found, rounds = sum(ran.times.values()), program.rounds
    here.detail(what=what, kernels=found / rounds, longest=ran.longest(30))
    if found:
        predicted = None if inside is None else inside / rounds
        here.figure(f"{what}: kernels", found / rounds, "a round", predicted=predicted)
        taken = 1e6 * sum(ran.seconds.values()) / rounds
        first = ", ".join(f"{name[:40]} {us / rounds:.1f}" for name, (_, us) in ran.longest(3).items())
        here.figure(f"{what}: in kernels", taken, "us a round", note=first)
    elif not on_cpu():
        here.note(f"{what}: the profiler reports no kernels")


if __name__ == "__main__":
    step(measure, part)
