"""The card, its driver, versions; and what a copy, a product and the start of a kernel take on it."""

from __future__ import annotations

import os
import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.card import _reference
from benchmarks.card._device import asked, copies, machine
from benchmarks.card._inside import Inside, step
from benchmarks.card._timing import on_cpu, timed

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "optax", "scipy", "scikit-learn",
             "torch", "triton")  # fmt: skip
_TURNS = 500


def measure(here: Inside) -> None:
    """One after the other; each costs a second."""
    devices = jax.devices()
    here.note(f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores, Python {platform.python_version()}")
    here.note("card, driver, memory, clock of its processors: " + ", ".join(
        asked("name", "driver_version", "memory.total", "clocks.max.sm") or ["nothing says"]))  # fmt: skip
    here.note(", ".join(filter(None, map(_version, _PACKAGES))))
    stats = devices[0].memory_stats() or {}
    here.detail(limit=stats.get("bytes_limit"), capability=str(getattr(devices[0], "compute_capability", "")))
    sheet, how = machine()
    predict = not on_cpu()
    if predict:
        here.note(how)
    copy = copies(here.full)
    bandwidth = sheet.memories[-1][1] / 1e9 if predict else None
    for name, taken in (("a plain copy", copy.plain), ("x + 1", copy.added)):
        speed = copy.bytes / taken.seconds / 1e9
        here.figure(f"{name}, bytes read and written", speed, "GB/s", predicted=bandwidth, spread=taken.spread)
    _products(here, sheet.flops / 1e12 if predict else None)
    _starts(here, 1e6 * sheet.start if predict else None)


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _products(here: Inside, flops: float | None) -> None:
    """Products of float32 matrices, by default and with all digits: Tflop/s, and how far off they are."""
    size = 8192 if here.full else 256
    a, b = (jax.random.normal(jax.random.key(k), (size, size)) for k in range(2))
    rows = np.asarray(a[:16], np.float64) @ np.asarray(b, np.float64)
    for precision in ("default", "highest"):
        product = jax.jit(lambda a, b, p=precision: jnp.matmul(a, b, precision=p))
        taken = timed(partial(product, a, b), calls=5)
        off, _ = _reference.differ(np.asarray(taken.result[:16]), rows)
        here.figure(
            f"a product of float32 matrices, precision {precision}", 2 * size**3 / taken.seconds / 1e12, "Tflop/s",
            predicted=flops if precision == "highest" else None, spread=taken.spread,
            note=f"off by {off:.0e}" + (", as TF32 is" if off > 5e-5 else ""),
        )  # fmt: skip


def _starts(here: Inside, start: float | None) -> None:
    """Kernels of little work, each after the other: one a turn of a loop, and ten a turn."""
    x = jnp.ones((16, 128))

    def turn(count: int, x: jax.Array) -> jax.Array:
        for k in range(count):  # a roll by another number each time, for the steps not to become one
            x = jax.lax.optimization_barrier(jnp.roll(x, k + 1, axis=1) * 1.0001)
        return x

    taken = {}
    for count in (1, 10):
        loop = jax.jit(lambda x, c=count: jax.lax.fori_loop(0, _TURNS, lambda _, x: turn(c, x), x))
        taken[count] = timed(partial(loop, x))
        here.detail(kernels=count, us_a_turn=1e6 * taken[count].seconds / _TURNS)
    us = 1e6 * (taken[10].seconds - taken[1].seconds) / 9 / _TURNS
    here.figure("a kernel more in a loop", us, "us", predicted=start, spread=taken[10].spread)
    here.figure("a turn of a loop with one kernel", 1e6 * taken[1].seconds / _TURNS, "us", spread=taken[1].spread)


if __name__ == "__main__":
    step(measure)
