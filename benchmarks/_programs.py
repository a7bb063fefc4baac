"""What a compiled program consists of, read from its text."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Operations of a compiled GPU program that start nothing on the card.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "async-done", "copy-done"}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r" = .*? ([a-z][a-z\-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(body|to_apply|calls|branch_computations|true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)


def starts(text: str) -> int:
    """Kernels that a run of the program starts: an open-ended loop counts once, a condition by its longer branch."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)

    @cache
    def of(name: str) -> int:
        return sum(map(of_line, bodies[name]))

    def of_line(line: str) -> int:
        operation = _OPERATION.search(line)
        if operation is None or operation[1] in _FREE:
            return 0
        called = {kind: names.replace("%", "").replace(",", " ").split() for kind, names in _CALLED.findall(line)}
        if operation[1] == "while":
            trips = _TRIPS.search(line)
            return int(trips[1] if trips else 1) * of(called["body"][0])
        if operation[1] == "conditional":
            return 1 + max(of(n) for kind, names in called.items() if "computation" in kind for n in names)
        if operation[1] == "call":
            return of(called["to_apply"][0])
        return 1

    return of(entry)


class Resources(NamedTuple):
    """What a GPU kernel takes of a multiprocessor."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread that are stored to memory and loaded again


def resources(dump: str, kernel: str, architecture: str) -> list[Resources]:
    """Of all kernels whose code is in the folder and whose name begins so; the folder is emptied."""
    found = []
    for path in Path(dump).glob("*.ptx"):
        if f".entry {kernel}" in path.read_text():
            said = assembled(path, architecture)
            registers, spilled = (re.findall(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
            found.append(Resources(max(map(int, registers)), max(map(int, spilled))))
    for path in Path(dump).glob("*.*"):
        if path.is_file():
            path.unlink()
    return found


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
