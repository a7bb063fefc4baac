"""Time to the first result: a first solve and a first gradient, without and with a cache of compiled programs.

`benchmarks.compile_time` in a process that finds nothing compiled, then in one that finds what the first compiled; the
models side by side, each on cores of its own: it is compilers that take the time.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread

from benchmarks.card._inside import Child, Inside, scratch, step
from benchmarks.compile_time import alone

MODELS = ("near the mean", "near the mean, interior point", "(14)", "local", "local, interior point")


def measure(here: Inside) -> None:
    """All models at once."""
    models, shape = (MODELS, (30, 40, 20)) if here.full else (MODELS[-1:], (3, 25, 5))
    with scratch() as folder:
        threads = [
            Thread(target=_one, args=(here, name, shape, Path(folder) / str(k)), daemon=True)
            for k, name in enumerate(models)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _one(here: Inside, name: str, shape: tuple[int, int, int], cache: Path) -> None:
    """One model, in two processes."""
    cache.mkdir()
    for which, share in (("nothing compiled before", 0.6), ("with the cache of another process", 1.0)):
        gradient = here.full or share < 1.0
        arguments, keep = alone(name, *shape, str(cache), gradient=gradient)
        began = time.perf_counter()
        child = here.child(arguments, seconds=share * (here.left() - 3.0), environment=keep)
        _say(here, f"{name}, {which}", child, time.perf_counter() - began, gradient)


def _say(here: Inside, what: str, child: Child, seconds: float, gradient: bool) -> None:
    if not child.results:
        (here.unfinished if child.code is None else here.wrong)(f"{what}: {child.why()}")
        return
    row = child.results[-1]
    note = f"compiler {row['solve_compiler_s']:.1f} s, {row['solve_programs']:.0f} programs, gap {row['gap']:.0e}"
    here.figure(f"{what}: a first solve", row["solve_s"], "s", note=note, row=row)
    if "again_s" in row:
        programs = f"{row['again_programs']:.0f} programs"
        here.figure(f"{what}: a second solve, of other data", 1e3 * row["again_s"], "ms", note=programs)
    if row["grad_s"] == row["grad_s"]:
        here.figure(f"{what}: a first gradient", row["grad_s"], "s", note=f"{row['grad_programs']:.0f} programs")
        here.figure(f"{what}: the process from start to end", seconds, "s")
    elif child.code is None:
        here.unfinished(f"{what}: the gradient")
    elif gradient:
        here.wrong(f"{what}: the gradient: {child.why()}")


if __name__ == "__main__":
    step(measure)
