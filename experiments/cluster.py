"""One problem on many processes: ``python -m experiments.cluster``; see experiments/README.md for how to launch it.

Every process runs this same program and holds its share of the nodes. What starts the processes says where to
meet: SLURM, Open MPI and Cloud TPUs by their environment, anything else by --coordinator, --processes and --process.
``--local N`` starts N processes on this machine, to try it out.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import jax

import mocha_jax as mj
from experiments import tasksets


def main() -> None:
    """Join the others, train, and let one process report."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="an .npz file that every process can read; default: made-up clusters")
    parser.add_argument(
        "--checkpoint", type=Path, help="a file that every process can read, to save to and resume from"
    )
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--max-rounds", type=int, default=2000)
    parser.add_argument("--cpu-devices", type=int, default=1, help="CPU devices of a process without an accelerator")
    parser.add_argument("--coordinator", help="host:port of process 0; default: as the cluster's environment says")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which of them this is")
    parser.add_argument("--local", type=int, metavar="N", help="start N processes on this machine")
    options = parser.parse_args()
    if options.local:
        raise SystemExit(start_here(options.local, sys.argv[1:]))

    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    # From here on every process does the same; each array knows which part of it is where.
    tasks = tasksets.synthetic(jax.random.key(0)) if options.data is None else tasksets.load(options.data)
    problem = mj.shard(mj.Problem(tasks.data, tasks.loss, mj.regularizers.Probabilistic(0.01)))
    first = jax.process_index() == 0
    if first:
        print(
            f"{jax.process_count()} processes, {jax.device_count()} devices, {tasks.data.num_tasks} tasks", flush=True
        )
    solution = mj.solve(
        problem, tol=options.tol, max_rounds=options.max_rounds, checkpoint=options.checkpoint, progress=True
    )
    if first:
        print(solution.message)


def start_here(count: int, arguments: list[str]) -> int:
    """All processes on this machine, with the same arguments."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meet = f"localhost:{free.getsockname()[1]}"
    at = arguments.index("--local")
    shared = [sys.executable, "-m", "experiments.cluster", *arguments[:at], *arguments[at + 2 :]]
    shared += ["--coordinator", meet, "--processes", str(count)]
    processes = [subprocess.Popen([*shared, "--process", str(k)]) for k in range(count)]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    main()
