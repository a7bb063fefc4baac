"""The steps, in the order of their worth."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Step(NamedTuple):
    """A part of the measurements, in a process of its own."""

    letter: str
    name: str
    seconds: float  # its share of the time, of a run of eight minutes; what earlier steps leave is shared out again
    what: str
    code: str = ""  # a program to run in place of the module of that name, for tests
    own_cache: bool = False  # whether it is run without the cache of compiled programs that the others share
    timed: bool = True  # whether it takes times, for which it has to be alone

    @property
    def command(self) -> list[str]:
        """Its process."""
        return [sys.executable, *(["-c", self.code] if self.code else ["-m", f"benchmarks.card.{self.name}"])]


def _truth(name: str, what: str) -> Step:
    return Step("b", name, 115, f"truth: {what}", timed=False)


STEPS = (
    Step("a", "facts", 20, "card, driver, versions; bandwidth of a copy, a product, the start of a kernel"),
    _truth("kernels", "every kernel against the loops and against NumPy in float64, to the bit twice"),
    _truth("products", "no product in TF32 where a certificate rests on it"),
    _truth("certificates", "200 random solves, judged by NumPy"),
    _truth("derivatives", "through a solve, a sample, against differences"),
    _truth("resumed", "a solve that is killed and goes on ends where another one ends"),
    Step("c", "passes", 50, "a pass by kernel and by loops, share of the copy's bandwidth, variants of the kernels"),
    Step("d", "rounds", 80, "a round of four algorithms: measured, predicted, kernels counted; three sets of flags"),
    Step("e", "scale", 50, "10^5, 10^6, 10^7 tasks, (14) to a joint gap of 1e-2, and on this machine's CPU"),
    Step("f", "many", 50, "10^5 and 10^6 ridge, logistic and SVM models at once, and scikit-learn on all cores"),
    Step("g", "averaging", 90, "a round of federated averaging, the shortest loop, torch; accuracy"),
    Step("h", "first", 50, "time to the first result, with a cache of compiled programs and without", own_cache=True),
    Step("i", "slides", 15, "cells of the slides' tables of the CNN, the cheapest first, as long as there is time"),
)
