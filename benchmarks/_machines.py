"""Machines as the model of a round's time wants them described: data sheets, and assumptions that are named so."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks._cards import CARDS, Card


class Link(NamedTuple):
    """What connects so many devices."""

    reach: int
    bandwidth: float  # bytes a second that a device gives
    latency: float  # seconds of a hop
    torus: bool = False  # hops to neighbours on a square, else by a switch in a tree

    def hops(self, devices: float) -> float:
        """From one to all of so many, the longest way."""
        return math.sqrt(devices) if self.torus else math.log2(devices)


class Machine(NamedTuple):
    """A kind of device and its network."""

    name: str
    start: float  # seconds to start a step
    memories: tuple[tuple[float, float], ...]  # bytes it holds and bytes a second, nearest first
    flops: float  # of products of float32 matrices, a second
    memory: float = math.inf  # bytes
    links: tuple[Link, ...] = ()  # nearest first
    scalars: float | None = None  # seconds of a step of scalars alone, where another processor does those
    shared: float = 0.0  # seconds more to start a step that cores share
    columns: tuple[tuple[str, float], ...] = ()  # of calls for small matrices: a part of the name, seconds a column

    def bandwidth(self, since: int) -> float:
        """Of bytes that are touched again after so many others."""
        return next(speed for holds, speed in self.memories if since <= holds)


# Assumed: steps one after the other for each column of a small matrix. Eigenvalues and singular values: a
# reduction to a band and Jacobi's or Cuppen's method; the others eliminate column by column. The library's own kernel:
# two sweeps and four products are 1,600 cycles a column in its machine code (`_machine_code.py`, 64 columns).
_STEPS_A_COLUMN = {
    "small_work": 0.3,
    "syevd": 5, "gesvd": 10, "EighTpu": 10, "Eigh": 10,
    "potrf": 0.5, "getrf": 1, "geqrf": 1, "trsm": 0.5, "triangularSolve": 0.5,
    "Cholesky": 0.5, "Qr": 1, "Compact": 0.5, "InvertDiag": 0.5,
}  # fmt: skip


def _of_steps(start: float) -> tuple[tuple[str, float], ...]:
    return tuple((name, steps * start) for name, steps in _STEPS_A_COLUMN.items())


_GPU_START, _TPU_START = 3e-6, 1e-6


def of_card(card: Card) -> Machine:
    """A GPU. From its data sheet: memory, bandwidth, arithmetic in float32, of an H100 67 Tflop/s.

    Of the H100: NVLink 450 GB/s each way among 8, InfiniBand NDR 400 Gb/s a card beyond. Assumed: 3 us a start, 5.5
    TB/s of the second cache, 2 and 5 us a hop.
    """
    cache = max(5.5e12, 1.2 * card.bandwidth)
    return Machine(
        card.name, _GPU_START, ((card.cache, cache), (math.inf, card.bandwidth)),
        2.0 * card.cores * card.fpus * card.clock * 1e9, card.memory,
        (Link(8, 450e9, 2e-6), Link(2**20, 50e9, 5e-6)), columns=_of_steps(_GPU_START),
    )  # fmt: skip


MACHINES = {
    "H100": of_card(CARDS["H100"]),
    # Data sheet: 16 GB at 819 GB/s, 197 Tflop/s in bfloat16, six passes of which make a float32 product, 4 links of
    # 400 Gb/s each way on a torus. Assumed: 1 us a step, about the latency of its memory, and 1 us a hop; scalars free.
    "TPU v5e": Machine(
        "TPU v5e", _TPU_START, ((math.inf, 819e9),), 197e12 / 6, 16e9,
        (Link(256, 200e9, 1e-6, torus=True),), scalars=0.0, columns=_of_steps(_TPU_START),
    ),
}  # fmt: skip
