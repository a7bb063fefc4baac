"""Cells of the slides' tables of the CNN that are missing in `experiments/README.md`, the cheapest first.

`experiments.fedavg_rounds` keeps a CSV and a checkpoint in a folder, so that another run goes on where this one ends.
MNIST is a file that has to be given; on a CPU a made-up set and a small network stand in for it.
"""

from __future__ import annotations

import time
from importlib.util import find_spec

from benchmarks.card._inside import Inside, step

FULL = (
    "--model",
    "cnn",
    "--slides",
    "--missing",
    "--rates",
    "0.1",
    "0.147",
    "0.215",
    "--rounds",
    "2500",
    "--every",
    "5",
)
TINY = ("--clients", "4", "--samples", "20", "--rounds", "2", "--target", "0.99", "--batch", "10", "--fraction", "0.5",
        "--parts", "iid", "--rates", "0.1")  # fmt: skip


def measure(here: Inside) -> None:
    """As many cells as there is time for."""
    if find_spec("matplotlib") is None:
        here.left_out("matplotlib is not installed here, which experiments draw with")
        return
    if here.full and (here.mnist is None or not here.mnist.exists()):
        here.left_out("MNIST is not here: give --mnist FILE, an .npz with X, y, writer and split")
        return
    folder = here.out / "slides"
    data = ["--data", str(here.mnist)] if here.full else []
    began = time.perf_counter()
    given = ["-m", "experiments.fedavg_rounds", *(FULL if here.full else TINY), *data, "--out", str(folder)]
    child = here.child(given, seconds=here.left() - 4.0)
    for line in child.output.splitlines():
        if line.startswith("E "):
            here.note(line)
    done = sum(line.startswith("E ") for line in child.output.splitlines())
    here.figure("runs to the end, of a cell and a rate", done, "", note=f"in {time.perf_counter() - began:.0f} s")
    if child.code is None:
        here.unfinished(f"the other cells; {folder.name}/ holds what is done, --only slides goes on with it")
    elif child.code != 0:
        here.wrong(f"experiments.fedavg_rounds: {child.why()}")
    if not here.full and folder.exists():  # nothing of it is worth keeping
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


if __name__ == "__main__":
    step(measure)
