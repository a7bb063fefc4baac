"""Truth of checkpoints: a solve that is killed and started again ends, bit for bit, where an undisturbed one ends.

Processes are those of `benchmarks.survival`: 120 rounds, a checkpoint after every one.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.card._inside import Inside, scratch, step
from benchmarks.survival import Child, digest, solved
from mocha_jax._files import checkpoint_parts
from mocha_jax._files.checkpoint import KIND


def measure(here: Inside) -> None:
    """Some settings, one after the other: what the first process compiles the next ones find."""
    slowest = 0.0
    settings = ("adaptive", "proximal", "averaging") if here.full else ("safe",)
    for i, setting in enumerate(settings):
        if here.left() < slowest + 5.0:
            here.unfinished(", ".join(settings[i:]))
            return
        began = time.perf_counter()
        with scratch() as folder:
            _one(here, setting, Path(folder), np.random.default_rng([here.seed, i]))
        slowest = max(slowest, time.perf_counter() - began)


def _one(here: Inside, setting: str, folder: Path, rng: np.random.Generator) -> None:
    """One setting: undisturbed, killed once or twice, and to the end."""
    straight, path, kills = folder / "straight.npz", folder / "killed.npz", 0
    want = digest(solved(setting, straight))
    began = time.perf_counter()
    for _ in range(2 if here.full else 1):
        if here.left() > 15.0 or not kills:
            kills += Child(setting, path).strike(path, float(rng.uniform(0.0, 0.3)))
    found, said = Child(setting, path).end()
    apart = "the same to the last bit" if found == want else f"numbers differ by {_apart(straight, path)}; {said}"
    here.figure(f"{setting}: processes killed", kills, "", note=f"then {apart}, {time.perf_counter() - began:.0f} s")
    if found != want:
        here.wrong(f"{setting}: ends elsewhere after it was killed: {apart}")


def _apart(one: Path, other: Path) -> str:
    """The largest difference of any number in two checkpoints, relative to the largest number of its array."""
    try:
        a, b = (checkpoint_parts.read(path, KIND).arrays for path in (one, other))
        shared = [n for n in a if n in b and a[n].dtype.kind == "f" and a[n].shape == b[n].shape and a[n].size]
        off = [
            np.nanmax(np.abs(np.nan_to_num(a[n]) - np.nan_to_num(b[n]))) / max(np.nanmax(np.abs(a[n])), 1e-30)
            for n in shared
        ]
        return f"{max(off, default=0.0):.1e}"
    except Exception as error:
        return f"an unknown amount ({type(error).__name__})"


if __name__ == "__main__":
    step(measure)
