"""The text of a compiled program as operations, with the shapes of what they take and give."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|branch_computations|true_computation|false_computation)="
    r"\{?((?:%[\w.\-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TILE = re.compile(r"T\((\d+),(\d+)\)")


class Array(NamedTuple):
    """The shape of an array, or of one of a tuple."""

    dtype: str
    shape: tuple[int, ...]
    layout: str  # the order of axes, the last of them the slowest; on a TPU tiles and the number of the memory too

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of a number."""
        bits = re.search(r"\d+", self.dtype)
        return max(int(bits[0]) if bits else 8, 8) // 8

    @property
    def bytes(self) -> int:
        """What it takes of the large memory, a TPU's tiles padded."""
        if self.near:
            return 0
        tile = _TILE.search(self.layout)
        if tile is None or len(self.shape) < 2:
            return self.width * self.size
        fast, second = (int(axis) for axis in self.layout.split(":")[0].split(",")[:2])
        padded = list(self.shape)
        padded[fast], padded[second] = (
            -(-self.shape[a] // int(t)) * int(t) for a, t in ((fast, tile[2]), (second, tile[1]))
        )
        return self.width * math.prod(padded)

    @property
    def near(self) -> bool:
        """Whether a TPU keeps it beside its arithmetic rather than in its large memory."""
        return "S(" in self.layout


class Operation(NamedTuple):
    """A line of a program."""

    name: str
    kind: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: dict[str, list[str]]  # computations by what they are for
    said: str  # the rest of the line
    root: bool

    def number(self, after: str) -> int:
        """The number after these characters: the place of a parameter, of an element of a tuple."""
        found = re.search(after + r"(\d+)", self.said)
        assert found is not None
        return int(found[1])

    @property
    def moved(self) -> int:
        """Bytes of the last array it gives, which of a start is the one that is written."""
        return max((a.bytes for a in self.results if a.layout or a.shape), default=0)


class Program:
    """The computations of a program; each lists its operations in order."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Operation]] = {}
        name = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                name = head[2]
                self.computations[name] = {}
                self.entry = name if head[1] else getattr(self, "entry", "")
            elif name and (operation := _operation(line)):
                self.computations[name][operation.name] = operation

    def root(self, computation: str) -> Operation:
        """What a computation gives."""
        return next(o for o in self.computations[computation].values() if o.root)

    def turns(self, loop: Operation) -> int | None:
        """Turns of a loop, as the compiler says or by what its counter is compared with; None where nobody knows."""
        if known := _TRIPS.search(loop.said):
            return int(known[1])
        [condition] = loop.called["condition"]
        return self._limit(condition) if self.root(condition).kind == "compare" else None

    def most_turns(self, loop: Operation) -> int | None:
        """Turns that a loop may take at most, if its end depends on a counter too."""
        [condition] = loop.called["condition"]
        root = self.root(condition)
        return self._limit(root.called["calls"][0] if root.kind == "fusion" else condition)

    def _limit(self, condition: str) -> int | None:
        """What a counter is less than."""
        operations = self.computations[condition]
        for test in operations.values():
            if test.kind == "compare" and "direction=LT" in test.said:
                limits = [operations[n].number("") for n in test.operands if operations[n].kind == "constant"]
                return next(iter(limits), None)
        return None


def _operation(line: str) -> Operation | None:
    found = _LINE.match(line)
    if found is None:
        return None
    given, said = _balanced(line, found.end())
    shapes = re.sub(r"/\*.*?\*/", "", found[3])
    results = tuple(Array(t, tuple(map(int, s.split(","))) if s else (), o) for t, s, o in _ARRAY.findall(shapes))
    called = {kind: _NAME.findall(names) for kind, names in _CALLED.findall(said)}
    operands = tuple(_NAME.findall(given))
    if not operands:  # a constant's value, a parameter's number
        said = f"{given}){said}"
    return Operation(found[2], found[4], results, operands, called, said, bool(found[1]))


def _balanced(line: str, start: int) -> tuple[str, str]:
    """What lies between the parenthesis opened before `start` and its end, and the rest."""
    depth = 1
    for end in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        if depth == 0:
            return line[start:end], line[end + 1 :]
    return line[start:], ""
