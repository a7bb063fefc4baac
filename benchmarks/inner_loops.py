"""What the inner loops of the GPU kernels allow for: ``python -m benchmarks.inner_loops [--card NAME] [--json FILE]``.

Compiled, not run, and no time is measured: the kernels by Triton and by Mosaic are compiled for a card that need not be
here, their inner loops are read in the machine code, and what is counted there and the card's data sheet say how fast a
pass can be at best. It takes JAX's CUDA plugin (packages jax-cuda12-plugin, jax-cuda12-pjrt) and CUDA
13's ptxas and nvdisasm (packages nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-nvdisasm).

Columns: registers of a thread; instructions of threads for each number of X; cycles of a row, for a warp that has a
scheduler to itself; programs that a multiprocessor holds; KB of X in flight on each. Then the microseconds that a pass
takes at least: for the bandwidth (of X and of 20 bytes for each row of a node), for what is in flight to arrive, for
issuing, for shared memory, and for a node's rows one after another, as often as programs take turns. The last column is
the share of the bandwidth that is left for X if the longest of these is all there is.
"""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import accelerators  # before JAX: it says what JAX compiles for

# isort: split
import jax
import jax.numpy as jnp

from benchmarks._cards import CARDS
from benchmarks._machine_code import MEMORY, cycles, inner_loop, machine_code
from benchmarks._programs import resources
from mocha_jax._node import kernel_gpu

GOAL = (10_000, 128, 64)
SCHEDULERS, REGISTERS, WARPS, SHARED_BYTES = 4, 2**16, 64, 128  # of a multiprocessor; bytes of shared memory a cycle
NUMBERS = 20  # bytes of y, weight, norm2, the old and the new dual


class Case(NamedTuple):
    """A kernel to read."""

    kernel: str
    shape: tuple[int, int, int] = GOAL  # m, n, d
    loss: str = "hinge"
    samples: str = "float32"
    depth: int = 4
    lanes: int | None = None
    copied: bool | None = None


def cases() -> list[Case]:
    """The variants of the kernel by Mosaic, then other losses and shapes; by Triton as long as JAX has it."""
    both = ("triton", "mosaic") if find_spec("jax.experimental.pallas.triton") else ("mosaic",)
    more = [("logistic", "float32"), ("hinge", "bfloat16"), ("logistic", "bfloat16"), ("hinge", "float16")]
    shapes = [(10_000, 128, d) for d in (10, 16, 32, 100, 128, 256, 561, 1500)]
    shapes += [(1000, 64, 64), (10_000, 16, 10), (30, 240, 64), (30, 240, 561), (7, 33, 1500)]
    return [
        *(Case(kernel) for kernel in both),
        *(Case("mosaic", depth=depth, lanes=lanes) for lanes in (2, 4, 8, 16) for depth in (2, 3, 4, 6)),
        *(Case(kernel, GOAL, *what) for what in more for kernel in both),
        *(Case(kernel, shape) for shape in shapes for kernel in both),
        *(Case(kernel, (10_000, 128, 100), samples="bfloat16") for kernel in both),
    ]


def main() -> None:
    """Compile, count, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.inner_loops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=list(CARDS), default="H100")
    parser.add_argument("--json", type=Path, help="save the numbers here")
    options = parser.parse_args()
    print(f"compiled, not run: jax {jax.__version__}, {CARDS[options.card].name}")
    print("kernel lanes depth        m, n, d     loss  samples regs spill instr cycles held   KB", end="")
    print(" | memory arrive  issue shared   rows | share")
    rows = []
    for case in cases():
        if taken(options.card, case):
            rows.append(row := judged(options.card, case))
            print(line(case, row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def taken(machine: str, case: Case) -> bool:
    """Tell whether the kernel takes such rows, with this version of JAX."""
    m, n, d = case.shape
    with accelerators.lowered_for(machine):
        return of(case.kernel).fits((n, m, d), case.samples)


def line(case: Case, row: dict[str, Any]) -> str:
    """One line of the table."""
    shape = ", ".join(map(str, case.shape))
    what = f"{case.kernel:6} {row['lanes']:5} {case.depth:5} {shape:>14} {case.loss:>8} {case.samples:>8}"
    counts = f"{row['registers']:4} {row['spilled']:5} {row['instructions']:5.1f} {row['cycles']:6.0f}"
    times = "".join(f"{1e6 * t:7.1f}" for t in row["times"].values())
    return f"{what} {counts} {row['held']:4} {row['flight'] / 1e3:4.0f} |{times} | {row['share']:5.0%}"


def judged(machine: str, case: Case) -> dict[str, Any]:
    """What one kernel allows for."""
    card, (m, n, d), size = CARDS[machine], case.shape, jnp.dtype(case.samples).itemsize
    options: dict[str, Any] = {"depth": case.depth}
    if case.kernel == "triton":
        (nodes, warps), lanes, shared = of("triton").program(d), 0, 0
    else:
        with accelerators.lowered_for(machine):
            tile = kernel_gpu.program((n, m, d), case.samples, case.lanes, case.copied)
        nodes, lanes, warps, shared = tile.nodes, tile.lanes, 4, case.depth * tile.nodes * d * size * tile.copied
        options |= {"lanes": case.lanes, "copied": case.copied}
    code, taken = compiled(machine, case, options)
    loop = inner_loop(code)
    programs = ceil(m / nodes)
    row = ceil(n / case.depth) / n  # turns of the loop for a row
    held = min(
        REGISTERS // (-(-taken.registers // 8) * 8 * 32) // warps, WARPS // warps,
        card.shared // (shared + 1024) if shared else WARPS, ceil(programs / card.cores),
    )  # fmt: skip
    flight = held * case.depth * nodes * d * size
    of_x, clock = m * n * d * size, card.clock * 1e9
    cycles_of_row = cycles(loop) * row
    times = {
        "memory": (of_x + m * n * NUMBERS) / card.bandwidth,
        "arrive": of_x / (flight * card.cores) * MEMORY / clock,
        "issue": programs * warps * n * row * len(loop) / (SCHEDULERS * card.cores * clock),
        "shared": 2 * of_x / (SHARED_BYTES * card.cores * clock) if shared else 0.0,
        "rows": ceil(programs / (card.cores * held)) * n * cycles_of_row / clock,
    }
    return case._asdict() | {
        "lanes": lanes, "registers": taken.registers, "spilled": taken.spilled, "held": held, "flight": flight,
        "instructions": len(loop) * row * warps * 32 / (nodes * d), "cycles": cycles_of_row, "times": times,
        "share": of_x / card.bandwidth / max(times.values()),
    }  # fmt: skip


def of(kernel: str) -> Any:
    """The module of a kernel: of Triton's only where it is asked for."""
    return importlib.import_module(f"mocha_jax._node.kernel_{'gpu' if kernel == 'mosaic' else kernel}")


def compiled(machine: str, case: Case, options: dict[str, Any]) -> tuple[str, Any]:
    """The machine code of a kernel, and what it takes of a multiprocessor."""
    epoch = of(case.kernel).epoch
    arrays = accelerators.alone(machine, case.shape, jnp.dtype(case.samples))
    loss = jax.tree.map(lambda _: arrays[0].update(shape=(), dtype=jnp.float32), accelerators.LOSSES[case.loss])
    accelerators.compiled(machine, lambda loss, *arrays: epoch(loss, *arrays, **options), loss, *arrays)
    architecture, folder = CARDS[machine].architecture, Path(accelerators.DUMP.name)
    [code] = [machine_code(p, architecture) for p in folder.glob("*.ptx") if ".entry epoch_on_gpu" in p.read_text()]
    [taken] = resources(str(folder), "epoch_on_gpu", architecture)
    return code, taken


if __name__ == "__main__":
    main()
