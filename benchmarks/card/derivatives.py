"""Truth of derivatives through a solve: a sample of `benchmarks.gradients`, in float32 on this machine.

Central differences, of solves in float64 to the last digit, are taken on the CPU: they are the reference.
"""

from __future__ import annotations

import os

import jax
import numpy as np

from benchmarks import gradients
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import gist

CASES = [
    ("Logistic", "MeanRegularized"), ("Squared", "Probabilistic"), ("SmoothedHinge", "Independent"),
    ("SquaredHinge", "Graph"), ("Huber", "Clustered"), ("Hinge", "MeanRegularized"),
]  # fmt: skip


def measure(here: Inside) -> None:
    """Some losses and regularizers, shared out among processes: most of the time is compiling."""
    workers = max(min((os.cpu_count() or 1) // 4, len(CASES)), 1) if here.full else 1
    if "worker" in here.order or workers == 1:
        _work(here)
    else:
        here.share_among("benchmarks.card.derivatives", workers)
    if "worker" not in here.order:
        _summary(here)


def _work(here: Inside) -> None:
    jax.config.update("jax_enable_x64", True)  # for the differences
    if not here.full:
        jax.config.update("jax_disable_most_optimizations", True)
    slowest = 0.0
    cases = CASES if here.full else [("Squared", "Independent")]
    for loss, regularizer in cases[here.worker :: here.workers]:
        if here.left() < slowest + 5.0:
            return
        before = here.left()
        try:
            _one(here, loss, regularizer)
        except Exception as error:
            here.wrong(f"{loss}, {regularizer}: {gist(error)}")
        jax.clear_caches()
        slowest = max(slowest, before - here.left())


def _one(here: Inside, loss: str, regularizer: str) -> None:
    """One loss and regularizer, solved to a gap of 1e-4 by the server that is the default."""
    cases = list(
        gradients.audit(loss, regularizer, here.seed, methods=1, dtypes=(np.float32,), budgets=("gap 1e-4",))
    )  # fmt: skip
    for case in cases:
        where = f"{loss}, {regularizer}, number {case.number}"
        here.detail(case=where, error=case.error, flagged=case.flagged, error_of_grad=case.error_of_grad, gap=case.gap)
        if not case.flagged and not case.error <= gradients.TARGET:
            here.wrong(f"{where}: off by {case.error:.1e} and not flagged")


def _summary(here: Inside) -> None:
    found = here.details()
    silent = [float(case["error"]) for case in found if not case["flagged"]]
    if not found:
        here.wrong("no derivative was taken")
        return
    note = f"{len(found) - len(silent)} flagged; jax.grad: worst {max(float(c['error_of_grad']) for c in found):.1e}"
    here.figure("derivatives", len(found), "", note=note)
    if silent:
        here.figure("furthest from differences, of those not flagged", max(silent), "relative")


if __name__ == "__main__":
    step(measure)
