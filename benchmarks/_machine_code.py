"""The inner loop of a compiled GPU kernel, read in its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks._programs import tool

# Cycles until a result can be used, about, on Hopper. From memory: when it is busy, and when the line is in the first
# cache, as the order of the rows is: 32 of its numbers are a line, which all warps read.
MEMORY, _CACHE = 700, 35
_LATENCY = {
    "LDG": MEMORY,
    "LD": MEMORY,
    "LDS": 30,
    "SHFL": 24,
    "MUFU": 22,
    "BAR": 25,
    "SYNCS": 25,
    "S2R": 25,
    "S2UR": 25,
    "R2UR": 12,
}
_ARITHMETIC, _PREDICATE = 5, 12

_NO_RESULT = ("ST", "STG", "STS", "BRA", "BAR", "EXIT", "UTMALDG", "RED")
_INTEGER = ("MOV", "R2UR", "SHF", "LEA", "UIADD3", "UIMAD", "UMOV", "IMAD", "IADD3", "IMNMX", "VIMNMX", "SEL", "USEL")
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_NAME = re.compile(r"\b(U?R\d+|U?P[0-6])\b")
_WIDTH = {".64": 2, ".128": 4}


class Instruction(NamedTuple):
    """One line of machine code."""

    guard: str
    operation: str
    operands: str

    @property
    def kind(self) -> str:
        return self.operation.split(".")[0]

    @property
    def registers(self) -> int:
        """How many the result takes."""
        return next((count for suffix, count in _WIDTH.items() if suffix in self.operation), 1)

    @property
    def latency(self) -> int:
        return _LATENCY.get(self.kind, _PREDICATE if "SETP" in self.kind else _ARITHMETIC)

    def names(self) -> tuple[list[str], list[str]]:
        """The registers that it writes and those that it reads."""
        parts = [p.strip() for p in self.operands.split(",")]
        results = 0 if self.kind in _NO_RESULT else 2 if "SETP" in self.kind else 1
        written = [name for part in parts[:results] for name in _NAME.findall(part) if "[" not in part]
        read = _NAME.findall(self.guard) + [name for part in parts[results:] for name in _NAME.findall(part)]
        if written:
            written += [_after(written[0], j) for j in range(1, self.registers)]
        pairs = re.findall(r"\b(U?R\d+)\.64", self.operands)  # an address takes two
        return written, read + [_after(name, 1) for name in pairs]


def _after(name: str, j: int) -> str:
    """The register j places after this one."""
    kind = name.rstrip("0123456789")
    return f"{kind}{int(name[len(kind) :]) + j}"


def machine_code(ptx: Path, architecture: str) -> str:
    """Assemble and take apart again."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        subprocess.run([tool("ptxas"), f"-arch={architecture}", ptx, "-o", binary.name], check=True)
        command: list[str | Path] = [tool("nvdisasm"), "-c", binary.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inner_loop(text: str) -> list[Instruction]:
    """The longest stretch of code that a branch goes back over."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    longest = (0, 0)
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            code.append(Instruction(found[1] or "", found[2], found[3]))
            target = _TARGET.search(found[3])
            if found[2].startswith("BRA") and target and target[1] in labels:
                longest = max(longest, (labels[target[1]], len(code)), key=lambda span: span[1] - span[0])
    return code[slice(*longest)]


def cycles(loop: list[Instruction], turns: int = 16) -> float:
    """Cycles of a turn for one warp that has a scheduler to itself, issuing in order, all branches fallen through."""
    latencies = [_CACHE if j in _indices(loop) else i.latency for j, i in enumerate(loop)]
    ready: dict[str, float] = {}
    now, began = 0.0, 0.0
    for turn in range(turns):
        if turn == turns // 2:
            began = now
        for instruction, latency in zip(loop, latencies, strict=True):
            written, read = instruction.names()
            now = max([now + 1, *(ready.get(name, 0.0) for name in read)])
            ready |= dict.fromkeys(written, now + latency)
            if instruction.kind in ("BAR", "SYNCS"):
                now += latency
    return (now - began) / (turns - turns // 2)


def _indices(loop: list[Instruction]) -> set[int]:
    """Which instructions load what the address of another load is made of: a row's number."""
    origin: dict[str, set[int]] = {}
    found: set[int] = set()
    for _ in range(3):
        for j, instruction in enumerate(loop):
            written, read = instruction.names()
            behind = {i for name in read if "P" not in name for i in origin.get(name, set())}
            loads = instruction.kind in ("LDG", "LD")
            if loads or instruction.kind == "UTMALDG":
                found |= behind
            whole = (
                instruction.kind in ("MOV", "R2UR", "SHF", "LEA", "UIADD3", "UIMAD", "UMOV")
                or instruction.kind[0] == "I"
            )
            for name in written:
                origin[name] = {j} if loads else behind if whole else set()
    return found
