"""Predictions of a round: of programs compiled for machines that are not here, and of this CPU's, which is asked.

Every line begins with *prediction*: nothing of it was measured but the last two columns of the check.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from benchmarks._machines import MACHINES, Machine
from benchmarks._model import Seconds, seconds
from benchmarks._this_cpu import this_cpu
from benchmarks._work import Step, of_a_round

Shape = tuple[int, int, int]
ALGORITHMS = ("Algorithm 1", "proximal", "adaptive")
SHAPES: list[Shape] = [(10**p, 16, 32) for p in range(3, 10)] + [(1000, 64, 64)]
COUNTS = {"H100": (1, 8, 256), "TPU v5e": (1, 4, 256)}
POD = {"TPU v5e": (256 * 40_000, 16, 32)}
CHECKED: list[Shape] = [(1_000, 16, 32), (10_000, 16, 32), (100_000, 16, 32), (1000, 64, 64)]

# Compiles an algorithm for a shape and so many devices, and says how many rounds the program runs.
Compile = Callable[[str, Shape, int], tuple[Any, int]]


class Prediction(NamedTuple):
    """What is predicted of a round on every one of some devices."""

    memory: float  # bytes: arguments, temporaries and results
    steps: list[Step]
    times: Seconds

    @property
    def starts(self) -> float:
        return sum(s.times for s in self.steps)

    @property
    def bytes(self) -> float:
        return sum(s.times * s.bytes for s in self.steps)


def predicted(program: Any, rounds: int, machine: Machine, longest: bool = False) -> Prediction:
    """Of a compiled program of so many rounds."""
    memory, steps = program.memory_analysis(), of_a_round(program.as_text(), rounds, longest)
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Prediction(taken, steps, seconds(steps, machine))


def predict(machine: str, compile: Compile, short: bool) -> list[dict[str, Any]]:
    """Print a prediction of every algorithm and size, or of every third, on as few devices as hold it."""
    columns = "".join(f"{name:>13}" for name in (*Seconds._fields, "us in all"))
    print(f"prediction  machine  devices algorithm                m, n, d |     GB  starts           MB |{columns}")
    rows = []
    for shape in [*SHAPES[:: 3 if short else 1], *([POD[machine]] if machine in POD else [])]:
        for algorithm in ALGORITHMS:
            rows.append(row := _smallest(machine, algorithm, shape, compile))
            print(*_lines(row), sep="\n", flush=True)
    return rows


def _smallest(machine: str, algorithm: str, shape: Shape, compile: Compile) -> dict[str, Any]:
    """On the fewest devices that hold it."""
    there = MACHINES[machine]
    what: dict[str, Any] = {"machine": machine, "algorithm": algorithm, "shape": shape, "devices": COUNTS[machine][-1]}
    row = what | {"wrong": "the samples alone do not fit"}
    samples = 4 * np.prod(shape, dtype=float)
    counts = [c for c in COUNTS[machine] if samples < c * there.memory] if shape != POD.get(machine) else [256]
    for devices in counts:
        row = what | {"devices": devices, "wrong": ""}
        try:
            program, rounds = compile(algorithm, shape, devices)
        except Exception as error:
            row |= {"wrong": " ".join(str(error).split())[:160]}
            continue
        found = predicted(program, rounds, there)
        row |= {"held": found.memory, "started": found.starts, "moved": found.bytes}
        row |= {"seconds": found.times._asdict() | {"total": found.times.total}}
        row |= {"collectives": [list(c) for c in collectives(found.steps)]}
        if found.memory <= there.memory:
            return row
        row["wrong"] = f"takes {found.memory / 1e9:.0f} GB of {there.memory / 1e9:.0f}"
    return row


def collectives(steps: list[Step]) -> Iterator[tuple[str, int, int, float]]:
    """Their kind, how many devices take part, the bytes that each of them gives, how often a round."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for step in steps:
        if step.sent:
            counts[step.kind, step.group, step.sent] += step.times  # type: ignore[assignment]
    yield from ((*what, times) for what, times in counts.items())


def _lines(row: dict[str, Any]) -> Iterator[str]:
    shape = ", ".join(f"{n:,}".replace(",", "_") for n in row["shape"])
    what = f"prediction  {row['machine']:8} {row['devices']:7} {row['algorithm']:11} {shape:>21}"
    if "seconds" not in row:
        yield f"{what} | does not compile or fit: {row['wrong']}"
        return
    parts = "".join(f"{1e6 * taken:13.1f}" for taken in row["seconds"].values())
    size = f"{row['held'] / 1e9:6.2f} {row['started']:7.1f} {row['moved'] / 1e6:12.2f}"
    yield f"{what} | {size} |{parts} {row['wrong']}"
    for kind, group, sent, times in row["collectives"]:
        yield f"prediction  {'':27} {times:5.1f} {kind} a round, of {sent:,} bytes by each of {group}"


def check(regularizers: dict[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Print the predictions of the model for this CPU beside measured rounds, the machine measured in the same run."""
    print("prediction            m, n, d algorithm   |  starts    MB a round | predicted ms  measured ms  ratio")
    rows = []
    for shape in CHECKED:
        machine = this_cpu(shape[2])
        for name in ALGORITHMS:
            found, measured = _on_this_cpu(shape, *regularizers[name], machine)
            rows.append({"shape": shape, "algorithm": name, "predicted": found.times.total, "measured": measured})
            ratio = found.times.total / measured
            print(
                f"prediction {', '.join(map(str, shape)):>18} {name:11} | {found.starts:7.0f} {found.bytes / 1e6:13.1f}"
                f" | {1e3 * found.times.total:12.2f} {1e3 * measured:12.2f} {ratio:6.2f}  "
                + " ".join(f"{part} {1e3 * t:.2f}" for part, t in found.times._asdict().items() if t),
                flush=True,
            )
        speeds = ", ".join(f"{speed / 1e9:.0f}" for _, speed in machine.memories)
        starts = f"{1e6 * machine.start:.2f} us a start, {1e6 * machine.shared:.1f} more if cores share it"
        print(
            f"prediction  from, measured: {starts}, "
            f"GB/s from the first cache to memory {speeds}, {machine.flops / 1e9:.0f} Gflop/s"
        )
    return rows


def _on_this_cpu(shape: Shape, algorithm: Any, regularizer: Any, machine: Machine) -> tuple[Prediction, float]:
    """What is predicted of a round, and its seconds: of twice as many rounds, what they take more."""
    problem, key, rounds = mj.Problem(tasks(*shape), mj.losses.Hinge(), regularizer), jax.random.key(0), 10

    def program(count: int) -> Any:
        def go(key: jax.Array, problem: mj.Problem) -> Any:
            return mj.run(problem, algorithm, key, num_rounds=count, record_every=count)

        return jax.jit(go).lower(key, problem).compile()

    programs = [program(rounds), program(2 * rounds)]
    times: list[list[float]] = [[], []]
    until = time.perf_counter() + 5.0
    while len(times[0]) < 3 or (time.perf_counter() < until and len(times[0]) < 9):
        for some, one in zip(times, programs, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(one(key, problem))
            some.append(time.perf_counter() - began)
    return predicted(programs[0], rounds, machine, longest=True), float(min(times[1]) - min(times[0])) / rounds


def tasks(m: int, n: int, d: int) -> mj.TaskData:
    x, w, noise = (jax.random.normal(jax.random.key(j), s) for j, s in enumerate([(m, n, d), (m, d), (m, n)]))
    y = jnp.sign(jnp.einsum("mnd,md->mn", x, w) / d**0.5 + 0.3 * noise)
    weight = jnp.full((m, n), 1.0 / n)
    return mj.TaskData(x, y, weight, jnp.arange(m, dtype=jnp.int32), num_tasks=m, loss_scaling="task_mean")
