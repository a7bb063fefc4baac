"""Truth of certificates: random solves in float32 on this machine, judged by `benchmarks.certificates`."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import jax
import numpy as np

import mocha_jax as mj
from benchmarks import certificates as judge
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import gist

_SOLVES, _SIZE, _ROUNDS = 200, 12, 500  # at least; problems solved side by side; at most


def measure(here: Inside) -> None:
    """Groups of problems, shared out among some processes: most of the time is compiling."""
    workers = max(min((os.cpu_count() or 1) // 3, 5), 1) if here.full else 1
    if "worker" in here.order or workers == 1:
        _work(here)
    else:
        here.share_among("benchmarks.card.certificates", workers)
    if "worker" not in here.order:
        _summary(here)


def _work(here: Inside) -> None:
    """Every so-manieth group, until there are enough solves or no more time."""
    jax.config.update("jax_enable_x64", True)  # as the judge has it; the problems are in float32 all the same
    size, rounds = (_SIZE, _ROUNDS) if here.full else (2, 30)
    enough = _SOLVES if here.full else 2
    solves, slowest = 0, 0.0
    for i, group in enumerate(judge.groups(np.random.default_rng(here.seed), 10_000, size)):
        if i % here.workers != here.worker:
            continue
        if solves * here.workers >= enough or here.left() < slowest + 5.0:
            return
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for name, algorithm in judge.ALGORITHMS.items() if here.full else [("safe", judge.ALGORITHMS["safe"])]:
            if here.left() < slowest + 5.0:
                break
            before = here.left()
            try:
                found |= judge.sweep(group, rounds, ("float32",), {name: algorithm})
            except Exception as error:
                here.wrong(f"{group.loss}, {group.regularizer}, {name}: {gist(error)}")
            slowest = max(slowest, before - here.left())
        jax.clear_caches()  # no other group runs these programs
        solves += _judged(here, group, found)


def _judged(here: Inside, group: judge.Group, found: dict[tuple[str, str], dict[str, Any]]) -> int:
    """How many solves were judged."""
    codes = Counter(mj.Status(int(code)).name for each in found.values() for code in np.asarray(each["code"]))
    verdicts = list(judge.judge(group, found))
    of = {"loss": group.loss, "regularizer": group.regularizer, "shape": group.x.shape[1:]}
    here.detail(**of, solves=len(verdicts), codes=dict(codes))
    for _, algorithm, wrong in verdicts:
        if wrong:
            here.wrong(f"{', '.join(map(str, of.values()))}, {algorithm}: {wrong}")
    return len(verdicts)


def _summary(here: Inside) -> None:
    found = here.details()
    codes: Counter[str] = Counter()
    for detail in found:
        codes.update(detail["codes"])
    solves = sum(detail["solves"] for detail in found)
    said = ", ".join(f"{count} {name}" for name, count in sorted(codes.items()))
    here.figure("solves judged", solves, "", note=f"in {len(found)} pairs of loss and regularizer: {said}")
    if not solves:
        here.wrong("no solve was judged")
    elif here.full and solves < _SOLVES:
        here.unfinished(f"{_SOLVES - solves} of {_SOLVES} solves")


if __name__ == "__main__":
    step(measure)
