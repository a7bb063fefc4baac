"""Many tasks: `benchmarks.scale` with the proximal server, on the device and on this machine's CPU.

A process for each size. All compile at once, then they take turns with what is timed, alone.
"""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.card._inside import Inside, scratch, step

_HERE, _CPU = "", "on this machine's CPU"


def measure(here: Inside) -> None:
    """All sizes on the device, and the smaller ones on the CPU."""
    sizes = [100_000, 1_000_000, 10_000_000] if here.full else [200]
    runs = [(m, _HERE) for m in sizes] + [(m, _CPU) for m in sizes[:2] if here.full]
    seconds: dict[tuple[int, str], float] = {}
    with scratch() as folder:
        threads = [Thread(target=_one, args=(here, *run, Path(folder), seconds), daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for m in sizes:
        if (m, _HERE) in seconds and (m, _CPU) in seconds:
            ratio = seconds[m, _CPU] / seconds[m, _HERE]
            here.figure(f"{m:,} tasks: the CPU's seconds over the card's", ratio, "times")


def _one(here: Inside, m: int, where: str, folder: Path, seconds: dict[tuple[int, str], float]) -> None:
    """A solve of so many tasks."""
    what = f"{m:,} tasks {where}".rstrip()
    given = ["-m", "benchmarks.scale", "--one", "--tasks", str(m), "--methods", "proximal", "--repeats", "0"]
    given += ["--turns", str(folder / "turns"), f"{0.6 * here.left():.0f}"]
    child = here.child(given, environment={"JAX_PLATFORMS": "cpu"} if where == _CPU else {})
    rows: list[dict[str, Any]] = child.results
    if not rows:
        say = here.unfinished if child.code is None else here.wrong
        say(f"{what}: {child.why()}")
        return
    row = rows[-1]
    note = f"{row['rounds']} rounds to {row['gap']:.1e}, the first solve {row['compile_s']:.1f} s more"
    here.figure(f"{what}: a solve to a joint gap of 1e-2", row["seconds"], "s", note=note, row=row)
    here.figure(
        f"{what}: of it a round", row["round_ms"], "ms", note=f"{1e6 * row['round_ms'] / m / 16:.2f} ns a sample"
    )
    if isinstance(row["device_gb"], float) and row["device_gb"] > 0:
        samples = m * 16 * 32 * 4 / 1e9
        here.figure(f"{what}: memory of the card", row["device_gb"], "GB", note=f"of which samples {samples:.2f}")
    if row["gap"] > 1e-2:
        here.note(f"{what}: ended at a gap of {row['gap']:.1e}")
    seconds[m, where] = float(row["seconds"])


if __name__ == "__main__":
    step(measure)
