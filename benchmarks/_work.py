"""What a compiled program does in a round: steps, each with the bytes it moves, its arithmetic and how often."""

from __future__ import annotations

import itertools
import math
import re
from typing import NamedTuple

from benchmarks._hlo import Operation, Program

# Operations that start nothing.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "async-done", "fusion-done", "copy-done", "slice-done",
    "all-reduce-done", "all-gather-done", "collective-permute-done",
}  # fmt: skip
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?")
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the new part
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KERNEL = re.compile(r'op_name="[^"]*/(\w+_on_\w+)/')
_GROUP = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[([^\]]*)\] \{([^}]*)\})")
_PARTS = re.compile(r'"outer_dimension_partitions":\[([\d",]+)\]')
_CONTRACTED = re.compile(r'(?:lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d",]*)[\]}]|dim_labels=(\w+?)_\w+->)')
_WINDOW = re.compile(r"window=\{size=([\dx]+)")

# Where an array lies: the visit of a computation that made it, the operation, the place in its tuple.
Buffer = tuple[int, str, int]
_Where = dict[str, list[Buffer]]
_Loops = tuple[tuple[str, int], ...]
_Operations = dict[str, Operation]


class Access(NamedTuple):
    """Bytes that are read or written."""

    bytes: int
    parts: float = 1.0  # of the array, another at every turn of a loop, of which so many are left to be taken
    since: int = -1  # bytes that are touched from one time to the next, -1 where that is not known yet


class Step(NamedTuple):
    """Something that is started."""

    kind: str  # as XLA says
    target: str  # of a call that is not XLA's own code, and its name
    loops: _Loops  # within which it lies, from outside, and their turns
    accesses: tuple[Access, ...]
    flops: int  # of products of matrices
    numbers: int  # of the largest array
    axis: int  # the longest last axis of an operand
    parts: int  # that cores of a CPU may share
    group: int  # devices that take part
    sent: int  # bytes that each of them gives
    times: float = 1.0

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in self.accesses)


def steps(text: str, longest: bool = False) -> list[Step]:
    """All that a run of the program starts, of a condition the longer branch.

    A loop whose end depends on what it computes counts once; with `longest` as often as it may turn.
    """
    found = _Walk(Program(text), longest).whole()
    return [s._replace(times=math.prod(turns for _, turns in s.loops)) for s in found]


def of_a_round(text: str, rounds: int, longest: bool = False) -> list[Step]:
    """What a round starts, with its share of what is done for several at once, from a run of so many."""
    found: dict[str, list[Step]] = {}
    for step in steps(text, longest):
        if step.loops:
            found.setdefault(step.loops[0][0], []).append(step)
    loops = [inside for inside in found.values() if any(_turns(s, rounds) for s in inside)]
    if not loops:
        raise ValueError(f"no loop of {rounds} rounds in the program.")
    most = max(loops, key=lambda inside: sum(s.times for s in inside))
    return [s._replace(times=s.times / rounds) for s in most]


def _turns(step: Step, rounds: int) -> bool:
    return rounds in itertools.accumulate((turns for _, turns in step.loops), lambda a, b: a * b)


class _Walk:
    """A walk through a program, which keeps track of where arrays lie."""

    def __init__(self, program: Program, longest: bool):
        self.program = program
        self.longest = longest
        self.visits = itertools.count()
        self.sizes: dict[Buffer, int] = {}

    def whole(self) -> list[Step]:
        """The steps of the program."""
        return self._turn(self.program.entry, {}, (), 1)[0]

    def _turn(self, name: str, given: _Where, loops: _Loops, turns: int) -> tuple[list[Step], dict[Buffer, int]]:
        """One turn of a loop: its steps, and what all turns touch."""
        found, touched = self._within(name, given, loops)
        total = sum(touched.values())
        found = [s._replace(accesses=tuple(_resolved(access, total, turns) for access in s.accesses)) for s in found]
        return found, {buffer: min(count * turns, self.sizes[buffer]) for buffer, count in touched.items()}

    def _within(self, name: str, given: _Where, loops: _Loops) -> tuple[list[Step], dict[Buffer, int]]:
        """The steps of a computation in turn, and how many bytes of which buffers they touch."""
        operations, where, visit = self.program.computations[name], dict(given), next(self.visits)
        found: list[Step] = []
        touched: dict[Buffer, int] = {}

        def join(steps: list[Step], of: dict[Buffer, int]) -> None:
            found.extend(steps)
            for buffer, count in of.items():
                touched[buffer] = min(touched.get(buffer, 0) + count, self.sizes[buffer])

        for operation in operations.values():
            kind, called = operation.kind, operation.called
            taken = [where[operand] for operand in operation.operands if operand in where]
            own = [(visit, operation.name, j) for j in range(len(operation.results))]
            self.sizes |= {buffer: array.bytes for buffer, array in zip(own, operation.results, strict=True)}
            if kind == "tuple":
                where[operation.name] = [buffer for buffers in taken for buffer in buffers]
            elif kind == "get-tuple-element" and len(taken[0]) > 1:
                where[operation.name] = [taken[0][operation.number("index=")]]
            elif kind in ("get-tuple-element", "bitcast", "opt-barrier"):
                where[operation.name] = taken[0]
            elif kind == "while":
                where[operation.name], [body] = taken[0], called["body"]
                turns = self.program.turns(operation) or (self.longest and self.program.most_turns(operation)) or 1
                join(*self._turn(body, self._given(body, taken), (*loops, (operation.name, turns)), turns))
            elif kind in ("call", "async-start"):
                [inside] = called["to_apply" if kind == "call" else "calls"]
                where[operation.name] = own
                join(*self._within(inside, self._given(inside, taken), loops))
            elif kind == "conditional":
                names = [n for purpose, names in called.items() if "computation" in purpose for n in names]
                where[operation.name] = own
                ways = [self._within(n, self._given(n, [taken[1 + j]]), loops) for j, n in enumerate(names)]
                join(*max(ways, key=lambda way: len(way[0])))
                join([self._step(operation, operations, loops, [])], {})
            else:
                where.setdefault(operation.name, own)
                if kind not in FREE:
                    accesses = self._accesses(operation, operations, taken, own)
                    step = self._step(operation, operations, loops, [access for _, access in accesses])
                    for buffer, access in accesses:
                        join([], {buffer: access.bytes})
                    join([step], {})
        return found, touched

    def _given(self, name: str, taken: list[list[Buffer]]) -> _Where:
        """What the parameters of a computation are, called with these."""
        operations = self.program.computations[name].values()
        return {o.name: taken[o.number("")] for o in operations if o.kind == "parameter"}

    def _accesses(
        self, operation: Operation, operations: _Operations, taken: list[list[Buffer]], own: list[Buffer]
    ) -> list[tuple[Buffer, Access]]:
        """What a step reads and writes. Of an array of which it takes or replaces a part it is that part."""
        arrays = [operations[name].results for name in operation.operands]
        read = [Access(sum(a.bytes for a in results)) for results in arrays]
        written = [(buffer, Access(array.bytes)) for buffer, array in zip(own, operation.results, strict=True)]
        inside = self.program.computations[operation.called["calls"][0]] if operation.kind == "fusion" else {}
        if inside:
            for j, parameter in ((o.number(""), o) for o in inside.values() if o.kind == "parameter"):
                read[j] = _part(parameter, inside) or read[j]
            roots = _elements(next(o for o in inside.values() if o.root), inside)
            for j, root in enumerate(roots):
                if root.kind in _UPDATES:
                    new, into = inside[root.operands[_UPDATES[root.kind]]], _behind(inside[root.operands[0]], inside)
                    target = taken[into.number("")][0] if into.kind == "parameter" else own[j]
                    written[j] = target, _piece(new.results[0].bytes, root.results[0].bytes)
        elif operation.kind in _SLICES:
            read[0] = _piece(operation.results[0].bytes, arrays[0][0].bytes)
        elif operation.kind in _UPDATES:
            new_part = arrays[_UPDATES[operation.kind]][0].bytes
            read[0], written[0] = Access(0), (taken[0][0], _piece(new_part, arrays[0][0].bytes))
        elif operation.kind.endswith("-start"):  # its results name the operands too
            written = [(own[0], Access(operation.moved))]
        return [(b, a) for b, a in [(of[0], a) for of, a in zip(taken, read, strict=True)] + written if a.bytes]

    def _step(self, operation: Operation, operations: _Operations, loops: _Loops, accesses: list[Access]) -> Step:
        arrays = [a for name in operation.operands for a in operations[name].results]
        collective = _COLLECTIVE.match(operation.kind)
        names, parts = (p.findall(operation.said) for p in (_TARGET, _KERNEL)), _PARTS.search(operation.said)
        return Step(
            kind=collective[1] if collective else operation.kind,
            target=" ".join(name for found in names for name in found),
            loops=loops,
            accesses=tuple(accesses),
            flops=self._flops(operation, operations),
            numbers=max([a.size for a in (*arrays, *operation.results)], default=0),
            axis=max([a.shape[-1] for a in arrays if len(a.shape) > 1], default=0),
            parts=math.prod(int(n.strip('"')) for n in parts[1].split(",")) if parts else 1,
            group=_group(operation.said) if collective else 1,
            sent=sum(a.size * a.width for a in arrays) if collective else 0,
        )

    def _flops(self, operation: Operation, operations: _Operations) -> int:
        """Two for each product of numbers in the products of matrices."""
        if operation.kind == "fusion":
            inside = self.program.computations[operation.called["calls"][0]]
            return sum(self._flops(o, inside) for o in inside.values())
        contracted = _CONTRACTED.search(operation.said)
        if contracted is None or not operation.operands:
            return 0
        if contracted[2]:  # a TPU's products are convolutions, of features with a window
            axes, window = [contracted[2].index("f")], _WINDOW.search(operation.said)
        else:
            axes, window = [int(a.strip('"')) for a in contracted[1].split(",") if a], None
        shape = operations[operation.operands[0]].results[0].shape
        sums = math.prod([shape[a] for a in axes] + [int(n) for n in (window[1].split("x") if window else [])])
        return 2 * operation.results[0].size * sums


def _resolved(access: Access, total: int, turns: int) -> Access:
    """With what a turn of the loop touches, if the access is to the same bytes at every turn."""
    if access.since >= 0:
        return access
    return access._replace(parts=access.parts / turns) if access.parts > 1.0 else access._replace(since=total)


def _behind(operation: Operation, inside: _Operations) -> Operation:
    """What is behind another view of the same bytes."""
    while operation.kind == "bitcast":
        operation = inside[operation.operands[0]]
    return operation


def _elements(root: Operation, inside: _Operations) -> list[Operation]:
    """What a computation gives, one by one."""
    names = root.operands if root.kind == "tuple" else (root.name,)
    return [_behind(inside[name], inside) for name in names]


def _piece(count: int, whole: int) -> Access:
    return Access(count, whole / count if count else 1.0)


def _part(parameter: Operation, inside: _Operations) -> Access | None:
    """The bytes that a fusion takes of an array, if it takes parts of it."""
    names, count = {parameter.name}, 0
    for operation in inside.values():
        if not names.intersection(operation.operands):
            continue
        if operation.kind == "bitcast":
            names.add(operation.name)
        elif operation.kind in _SLICES and operation.operands[0] in names:
            count += operation.results[0].bytes
        elif not (operation.kind in _UPDATES and operation.operands[0] in names):  # which is in place
            return None
    whole = parameter.results[0].bytes
    return _piece(min(count, whole), whole)


def _group(said: str) -> int:
    """How many devices work together."""
    found = _GROUP.search(said)
    if found is None:
        return 1
    if found[1]:
        return int(found[1])
    if found[2]:
        return found[2].count(",") + 1
    axes = dict(re.findall(r"'(\w+)'=(\d+)", found[3]))
    return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", found[4]))
