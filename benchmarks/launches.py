"""What the host launches in a round on a GPU: ``python -m benchmarks.launches [--shape M N D] [--json FILE]``.

Compiled for an H100 that need not be here, nothing is run; it takes an environment with JAX's CUDA plugin. XLA records
kernels that follow each other into a graph, which is launched as one. Which it records is a matter of flags, so every
set of flags is compiled in a process of its own. Columns, in one turn of the loop of rounds: graphs and the kernels
and copies in them, kernels and copies launched one by one, calls of NVIDIA's libraries, loops within the round that the
host turns, with what is launched in one turn of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ALGORITHMS = ("Algorithm 1", "proximal", "adaptive")
FLAGS = {
    "default": "",
    "small graphs": "--xla_gpu_graph_min_graph_size=1",
    "small graphs, loops": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE",
    "no graphs": "--xla_gpu_enable_command_buffer=",
}
COLUMNS = ("graphs", "in graphs", "alone", "calls", "loops", "in loops")
_LAUNCH = re.compile(r"( *)\d{3,}: k(\w+)")
_CALLS = ("CustomCall", "TriangularSolve", "Gemm", "CublasLtMatmul", "Cholesky")


def of_a_round(text: str) -> dict[str, int]:
    """What one turn of the loop of rounds launches, from the sequence as XLA dumps it."""
    found: Counter[str] = Counter()
    around: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not (launch := _LAUNCH.match(line)):
            continue
        depth, kind = len(launch[1]), launch[2]
        while around and around[-1][0] >= depth:
            around.pop()
        outside = [name for _, name in around]
        around.append((depth, kind))
        # The loop's own test is not launched where XLA knows the number of turns.
        if outside[:1] != ["While"] or "loop_compare" in line or outside[-1] == "DynamicSliceFusion":
            continue
        if kind in ("While", "Conditional"):
            found["loops"] += 1
        elif outside.count("While") > 1 and "CommandBuffer" not in outside:
            found["in loops"] += 1
        elif outside[-1] == "CommandBuffer":
            found["in graphs"] += 1
        elif kind == "CommandBuffer":
            found["graphs"] += 1
        elif kind in _CALLS:
            found["calls"] += 1
        elif kind != "Sequential":
            found["alone"] += 1
    return {name: found[name] for name in COLUMNS}


def main() -> None:
    """Compile with every set of flags, count, print, save."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.launches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=3, default=(1000, 64, 64), metavar=("M", "N", "D"))
    parser.add_argument("--json", type=Path, help="save the numbers here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps({name: counted(name, tuple(options.shape), options.one) for name in ALGORITHMS}))
        return
    print(f"compiled, not run: H100, m, n, d = {', '.join(map(str, options.shape))}; a round launches")
    print(f"{'flags':20} {'algorithm':11}" + "".join(f"{name:>10}" for name in COLUMNS))
    rows = []
    for label, flags in FLAGS.items():
        command = [sys.executable, "-m", "benchmarks.launches", f"--one={flags}", "--shape", *map(str, options.shape)]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        for name, counts in json.loads(said.stdout.splitlines()[-1]).items():
            rows.append({"flags": flags, "algorithm": name} | counts)
            print(f"{label:20} {name:11}" + "".join(f"{counts[c]:10}" for c in COLUMNS), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def counted(algorithm: str, shape: tuple[int, int, int], flags: str) -> dict[str, Any]:
    """What one program launches. XLA reads its flags once in a process, when it compiles first."""
    from benchmarks import accelerators  # it imports JAX, for which only this process has a use

    if "dump_hlo" not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_go {flags}"
    folder = Path(accelerators.DUMP.name)
    accelerators.program_of("H100", accelerators.Case(algorithm, shape=shape))
    dumped = sorted(folder.glob("*thunk_sequence*.txt"))  # what passes made of it, if they made anything, comes last
    text = dumped[-1].read_text()
    for path in folder.glob("*.*"):
        path.unlink()
    return of_a_round(text)


if __name__ == "__main__":
    main()
