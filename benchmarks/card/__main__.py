"""Measure on a card all that the project claims of cards: ``python3 -m benchmarks.card --out DIR --minutes 8``.

It runs from a checkout without an installation, with Python 3.11 or later, JAX for the card, optax, numpy and scipy.
Where scikit-learn, torch or matplotlib lack, what they are compared with or needed for says so, and the rest goes on.
The steps, in the order of their worth (`_steps.py` has them with their seconds):

a facts: the card, its driver, versions; bandwidth of a copy, float32 products, the start of a kernel.
b kernels: every kernel of the local epoch and the weighing, against the loops and NumPy in float64, twice to the bit.
  Of all losses x d in {1, 2, 10, 32, 64, 100, 128, 200, 256, 561, 1500, 4096} x m in {1, 7, 100, 10000} x float32 and
  bfloat16 x one and two passes x few and many rows not all combinations are run but all pairs, those first that hold
  most new ones; padded rows and partial budgets are in each. How many pairs were held is counted; another ``--seed``
  draws other combinations. products: no product in TF32 where a certificate rests on it. certificates: 200 random
  solves, judged by `benchmarks.certificates`. derivatives: a sample of `benchmarks.gradients`. resumed: a solve that
  is killed and goes on.
c passes: the shapes of `benchmarks.kernel`; lanes, rows in flight, warps and nodes of the kernels varied.
d rounds: of Algorithm 1, (14), the adaptive server, FedAvg; measured, predicted from the compiled program, kernels
  counted by the profiler and in the program; with JAX's flags, with small graphs, with products by cuBLAS.
e scale: `benchmarks.scale` to 10^7 tasks, on the CPU 10^5. f many: small models by the million, and scikit-learn.
g averaging: `benchmarks.fedavg_round`, more models, torch. h first: `benchmarks.compile_time`.
i slides: `experiments.fedavg_rounds`, cells that are missing in its tables.

A step is a process group of its own with a limit of its own: it gets its share of the time that is left, is killed at
its end with all its children, and what it has said until then counts. Steps b take no times and run side by side; the
programs of a later step are compiled side by side by some processes, which then take times one after the other.

DIR gets three files, ``card.json`` (all figures), ``card.txt`` (the table; it marks what is off its prediction by more
than 1.5 times) and ``card.log`` (a section for each step; while a step runs its section is a file of its own), written
after every step, and a folder ``slides``: a CSV, a picture, a checkpoint. Started again with the same DIR it goes on: a
step that is complete is not run again unless with ``--again``.

Programs that steps compile are shared by a cache, but for the step that measures first results. No process takes most
of the card's memory at once (XLA_PYTHON_CLIENT_PREALLOCATE=false): some have others beside them. This one takes none.

On a CPU, or with ``--small``, all shapes are tiny, and kernels are interpreted on a CPU: it measures nothing, but all
of it runs.
The exit status is the number of steps that failed, found something wrong, or got no time. Slow is never wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.card._runner import Options, Runner
from benchmarks.card._steps import STEPS


def main() -> int:
    """Parse the command line, run the steps."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--out", type=Path, default=Path("card"), help="folder of the results (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help="run these steps")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="STEP", help="run all but these")
    parser.add_argument("--again", action="store_true", help="run steps again that are complete")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a card too, as a rehearsal")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default %(default)s)")
    parser.add_argument("--mnist", type=Path, help="mnist.npz as experiments have it, for the step slides")
    user = os.getuid() if hasattr(os, "getuid") else 0
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir(), f"mocha_jax_card_{user}"),
        help="folder for compiled programs (default %(default)s)",
    )  # fmt: skip
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    options = Options(given.out, given.minutes, given.cache, given.again, given.small, given.seed, given.mnist)
    chosen = [step for step in STEPS if step.name in given.only and step.name not in given.skip]
    return Runner(options, STEPS, chosen).run()


if __name__ == "__main__":
    sys.exit(main())
