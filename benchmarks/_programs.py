"""What the kernels of a compiled GPU program take, as NVIDIA's assembler says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple


class Resources(NamedTuple):
    """What a GPU kernel takes of a multiprocessor."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread that are stored to memory and loaded again
    kernel: str  # its name begins so
    differing: int  # additions over threads in which each thread's own product is not rounded, but that of others is


def resources(dump: str, kernels: str | tuple[str, ...], architecture: str) -> list[Resources]:
    """Of all kernels whose code is in the folder and whose name begins so, or so; the folder is emptied."""
    found = []
    for path in Path(dump).glob("*.ptx"):
        code = path.read_text()
        for kernel in [kernels] if isinstance(kernels, str) else kernels:
            if f".entry {kernel}" in code:
                said = assembled(path, architecture)
                taken = (re.findall(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
                registers, spilled = (max(map(int, each)) for each in taken)
                found.append(Resources(registers, spilled, kernel, differing(code)))
    for path in Path(dump).glob("*.*"):
        if path.is_file():
            path.unlink()
    return found


def differing(code: str) -> int:
    """How often a product is contracted with the number of another thread: the two would have different sums."""
    others = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", code))
    return sum(other in others for other in re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+)", code))


def assembled(code: Path, architecture: str) -> str:
    """What the assembler says of a kernel: JAX's own of one by Mosaic, which keeps it, else NVIDIA's, run again."""
    if (kept := code.with_suffix(".ptxas")).exists():
        return kept.read_text()
    command: list[str | Path] = [tool("ptxas"), "-v", f"-arch={architecture}", code, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def tool(name: str) -> Path:
    """A program of NVIDIA's: of CUDA 13, which newer versions of JAX write code for, else of CUDA 12."""
    import nvidia  # type: ignore[import-not-found]

    places = [Path(root) / folder / name for folder in ("cu13/bin", "cuda_nvcc/bin") for root in nvidia.__path__]
    return next(place for place in places if place.exists())
