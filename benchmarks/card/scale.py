"""Many tasks: `benchmarks.scale` with the proximal server, on the device and on this machine's CPU."""

from __future__ import annotations

import numpy as np

from benchmarks.card._inside import Inside, step

_CPU = "on this machine's CPU"


def measure(here: Inside) -> None:
    """All sizes on the device, and the smallest on the CPU; each has a process of its own, for its memory."""
    sizes = [100_000, 1_000_000, 10_000_000] if here.full else [200]
    parts: dict[str, dict[str, str]] = {str(m): {} for m in sizes}
    parts |= {f"{m} {_CPU}": {"JAX_PLATFORMS": "cpu"} for m in sizes[:1] if here.full}
    here.apart("benchmarks.card.scale", parts, part)
    seconds = {detail["part"]: detail["seconds"] for detail in here.details()}
    for m in sizes:
        if str(m) in seconds and f"{m} {_CPU}" in seconds:
            ratio = seconds[f"{m} {_CPU}"] / seconds[str(m)]
            here.figure(f"{m:,} tasks: the CPU's seconds over the card's", ratio, "times")


def part(here: Inside, name: str) -> None:
    """A solve of so many tasks; the timed one is the second."""
    from benchmarks import scale

    count, _, where = name.partition(" ")
    m, what = int(count), f"{int(count):,} tasks {where}".rstrip()
    row = scale.measure(m, "proximal", 0, here.alone())
    here.detail(part=name, **row)
    note = f"{row['rounds']} rounds to {row['gap']:.1e}, the first solve {row['compile_s']:.1f} s more"
    here.figure(f"{what}: a solve to a joint gap of 1e-2", row["seconds"], "s", note=note)
    here.figure(
        f"{what}: of it a round", row["round_ms"], "ms", note=f"{1e6 * row['round_ms'] / m / 16:.2f} ns a sample"
    )
    if np.isfinite(row["device_gb"]):
        samples = m * 16 * 32 * 4 / 1e9
        here.figure(f"{what}: memory of the card", row["device_gb"], "GB", note=f"of which samples {samples:.2f}")
    if row["gap"] > 1e-2:
        here.note(f"{what}: ended at a gap of {row['gap']:.1e}")


if __name__ == "__main__":
    step(measure, part)
