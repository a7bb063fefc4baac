r"""The time that a round is predicted to take, from the steps of its compiled program and a machine's description.

.. math:: t = \sum_s n_s \Big( t_{start} + \sum_a \frac{b_{sa}}{B(a)} + \frac{f_s}{F} + c_s \Big)

Step s is started n times and moves b bytes of each array a, at the bandwidth of the nearest memory that holds all
that is touched before a is touched again; f are the flops of its products of matrices. c is what else it costs: of a
collective of g devices the way of its bytes and 2 latencies a hop, of a call for a small matrix its columns.
Nothing overlaps, and arithmetic other than products of matrices is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks._machines import Machine
from benchmarks._work import Step


class Seconds(NamedTuple):
    """Where the time of a round goes."""

    starts: float = 0.0
    memory: float = 0.0
    products: float = 0.0
    calls: float = 0.0
    network: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def seconds(steps: Sequence[Step], machine: Machine) -> Seconds:
    """The time of steps one after the other."""
    each = [[step.times * part for part in of_step(step, machine)] for step in steps]
    return Seconds(*map(sum, zip(*each, strict=True)))


def of_step(step: Step, machine: Machine) -> Seconds:
    """The time of one step, taken once."""
    return Seconds(
        starts=_start(step, machine),
        memory=sum(access.bytes / machine.bandwidth(access.since) for access in step.accesses),
        products=step.flops / machine.flops,
        calls=_call(step, machine),
        network=collective(step.kind, step.group, step.sent, machine) if step.sent else 0.0,
    )


def collective(kind: str, group: int, sent: int, machine: Machine) -> float:
    """The time in which devices exchange what each has: bytes by the slowest link, there and back by all."""
    share = {"all-reduce": 2 * (group - 1) / group, "all-gather": group - 1, "collective-permute": 1}
    taken, inside, latency = machine.links[0], 1, 0.0
    for link in machine.links:
        if group > inside:
            taken, among = link, min(group, link.reach)
            latency += 2 * link.latency * link.hops(among / inside if not link.torus else among)
            inside = among
    return latency + share.get(kind, (group - 1) / group) * sent / taken.bandwidth


def _start(step: Step, machine: Machine) -> float:
    if machine.scalars is not None and step.numbers <= 1:
        return machine.scalars
    return machine.start + (machine.shared if step.parts > 1 else 0.0)


def _call(step: Step, machine: Machine) -> float:
    return next((column * step.axis for name, column in machine.columns if name in step.target), 0.0)
