"""Truth of the kernels: against the loops of XLA, against NumPy in float64, and twice the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.card import _reference, _spectral, _weighing
from benchmarks.card._inside import Inside, step
from benchmarks.card._kernels import Kernel, kernels, loops
from benchmarks.card._timing import gist
from benchmarks.certificates import LOSSES

# In float32 kernels are a hundred times closer, a product in TF32 is three times as far off.
_WHOLE, _LARGEST = 1e-4, 1e-3
_MOST = 2**25  # numbers of X; with more there are fewer rows
_NODES = 40  # that NumPy goes through

FULL: dict[str, Any] = {
    "loss": list(LOSSES), "d": [1, 2, 10, 32, 64, 100, 128, 200, 256, 561, 1500, 4096], "m": [1, 7, 100, 10_000],
    "samples": ["float32", "bfloat16"], "passes": [1, 2], "rows": [1, 3, 9, 30],
}  # fmt: skip
TINY: dict[str, Any] = {
    "loss": ["logistic"], "d": [8], "m": [3], "samples": ["float32", "bfloat16"], "passes": [1], "rows": [3]
}  # fmt: skip


def measure(here: Inside) -> None:
    """All cases, shared out among some processes where there are cores for them: most of the time is compiling."""
    factors = FULL if here.full else TINY
    cases = list(_reference.pairs(factors, 60 if here.full else 10, np.random.default_rng(here.seed)))
    workers = max(min((os.cpu_count() or 1) // 2, 8), 1) if here.full else 1
    if "worker" in here.order or workers == 1:
        _work(here, cases[here.worker :: here.workers])
    else:
        here.share_among("benchmarks.card.kernels", workers)
    if "worker" not in here.order:
        _summary(here, cases, list(factors))


def _work(here: Inside, cases: list[dict[str, Any]]) -> None:
    """Some cases, one after the other, as long as there is time."""
    found = list(kernels(here.note if here.worker == 0 else print))
    others = [partial(of.check, here, case) for of in (_weighing, _spectral) for case in of.cases(here.full)]
    works: list[Callable[[], None]] = [partial(_one, here, found, case) for case in cases]
    works[2:2] = others[here.worker :: here.workers]
    for work in works:
        if here.left() < 8.0:
            break
        work()


def _one(here: Inside, found: list[Kernel], case: dict[str, Any]) -> None:
    """One case, by every kernel that takes it."""
    orders, arrays = draw(case, np.random.default_rng(here.seed))
    n, m, d = arrays[0].shape
    taking = [kernel for kernel in found if kernel.takes(n, m, d, case["samples"])]
    if not taking:
        here.detail(kind="epoch", kernel="none", case=case, right=True, whole=0.0, largest=0.0)
        return
    given = jax.tree.map(jnp.asarray, (orders, LOSSES[case["loss"]], *arrays))
    results = {}
    for name, work in [("loops", loops), *((kernel.name, kernel.passes) for kernel in taking)]:
        try:
            results[name] = _twice(work, given)
        except Exception as error:
            here.wrong(f"{name}, {_said(case)}: {gist(error)}")
            here.detail(kind="epoch", kernel=name, case=case, right=False, error=str(error)[:2000])
    nodes = np.unique(np.r_[0, case["m"] - 1, np.random.default_rng(0).integers(0, case["m"], _NODES)])
    x, y, c, norm2, beta, w, q, steps = arrays
    by_row = (np.asarray(a)[:, nodes] for a in (x, y, c, norm2, beta))
    expected = _reference.passes(case["loss"], orders, *by_row, w[nodes], q[nodes], steps[nodes])
    for name, (once, again) in results.items():
        _judge(here, name, case, once, again, expected, nodes, results.get("loops", (None, None))[0])


def _twice(work: Any, given: tuple[Any, ...]) -> tuple[Any, Any]:
    """Two runs of a program; before each, arrays of NaN lie where the allocator will put the results."""
    orders, loss, *arrays = given
    program = jax.jit(work).lower(orders, loss, *arrays).compile()
    runs = []
    for _ in range(2):
        poison = [jnp.full_like(a, jnp.nan) for a in (arrays[4], arrays[5])]
        jax.block_until_ready(poison)
        del poison
        runs.append(jax.tree.map(np.asarray, program(orders, loss, *arrays)))
    return runs[0], runs[1]


def _judge(
    here: Inside, name: str, case: dict[str, Any], once: Any, again: Any, expected: Any, nodes: np.ndarray,
    by_loops: Any,
) -> None:  # fmt: skip
    """Compare duals, vectors and steps."""
    new, moved, done = once
    mine = new[:, nodes], moved[nodes]
    off = [_reference.differ(a, b) for a, b in zip(mine, expected[:2], strict=True)]
    if by_loops is not None:
        off += [_reference.differ(a, b) for a, b in zip(once[:2], by_loops[:2], strict=True)]
    whole, largest = (max(each) for each in zip(*off, strict=True))
    bits = all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
    steps = np.array_equal(done[nodes], expected[2]) and (by_loops is None or np.array_equal(done, by_loops[2]))
    right = bits and steps and whole <= _WHOLE and largest <= _LARGEST
    here.detail(kind="epoch", kernel=name, case=case, right=right, whole=whole, largest=largest, bits=bits, steps=steps)
    if not right:
        said = f"off by {whole:.1e} ({largest:.1e} of the largest)" + ("" if bits else ", other bits in a second run")
        here.wrong(f"{name}, {_said(case)}: {said}" + ("" if steps else ", other numbers of steps"))


def draw(case: dict[str, Any], rng: np.random.Generator) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Orders and arrays of a case, with padded rows and budgets that end in the middle of a pass or later."""
    m, d = case["m"], case["d"]
    n = max(min(case["rows"], _MOST // (m * d)), 1)
    x = rng.standard_normal((n, m, d), np.float32)
    x *= (rng.uniform(0.5, 1.5, (n, m)) / np.maximum(np.linalg.norm(x, axis=2), 1e-3))[..., None].astype(np.float32)
    x = x.astype(jnp.dtype(case["samples"]))
    norm2 = np.einsum("nmd,nmd->nm", *[x.astype(np.float32)] * 2)
    y, beta = rng.normal(size=(n, m)), np.zeros((n, m))
    if LOSSES[case["loss"]].binary:
        y = np.where(y > 0, 1.0, -1.0)
        beta = y * rng.random((n, m))
    weight = np.where(rng.random((n, m)) < 0.8, rng.uniform(0.2, 1.0, (n, m)), 0.0)
    w, q = rng.normal(size=(m, d)) / max(d, 4) ** 0.5, rng.uniform(0.5, 2.0, m)
    numbers = tuple(a.astype(np.float32) for a in (y, weight, norm2, beta * (weight > 0), w, q))
    orders = np.stack([rng.permutation(n) for _ in range(case["passes"])]).astype(np.int32)
    return orders, (x, *numbers, rng.integers(0, 2 * n + 2, m).astype(np.int32))


def _said(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def _summary(here: Inside, cases: list[dict[str, Any]], names: list[str]) -> None:
    """How much was held, and how close."""
    found = here.details()
    epochs = [detail for detail in found if detail["kind"] == "epoch"]
    of_all = _reference.count_pairs(cases, names)
    for name in sorted({detail["kernel"] for detail in epochs} - {"none"}):
        mine = [detail for detail in epochs if detail["kernel"] == name]
        held, right = (
            _reference.count_pairs([detail["case"] for detail in mine], names),
            [d for d in mine if d["right"]],
        )
        here.figure(
            f"{name}: cases right",
            len(right),
            f"of {len(mine)}",
            note=f"{held} of {of_all} pairs of values are in them",
        )
        if right:
            here.figure(f"{name}: furthest from float64 and the loops", max(d["whole"] for d in right), "relative")
    held_by_any = {str(detail["case"]) for detail in epochs}
    missing = [case for case in cases if str(case) not in held_by_any]
    for kind, off in (("weighing", "of the loops' gain"), ("spectral", "of the largest singular value")):
        mine = [detail for detail in found if detail["kind"] == kind]
        if not mine:
            here.wrong(f"no case of {kind} was held")
            continue
        here.figure(f"{kind}: cases right", sum(d["right"] for d in mine), f"of {len(mine)}")
        here.figure(f"{kind}: furthest off", max(float(d["off"]) for d in mine), off)
    if not epochs:
        here.wrong("no case of the local epoch was held")
    if missing:
        here.unfinished(f"{len(missing)} of {len(cases)} cases; --again with another --seed draws others")


if __name__ == "__main__":
    step(measure)
