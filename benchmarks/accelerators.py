"""Compile for GPUs and TPUs that are not here: ``python -m benchmarks.accelerators [--short] [--json FILE]``.

The compilers of JAX's CUDA plugin and of libtpu need no device. Which one is installed decides what is compiled for, so
each is installed by itself, as `.ci/run` does. Nothing is run and no time is measured. It prints

- of the kernels for GPUs alone, for every width, many nodes and few: the registers of a thread and what it spills, the
  most of all losses;
- of whole runs (losses, shapes, algorithms and servers, on one device and on several): how often the kernel of the
  library is in the program, how many kernels of any kind a round starts, counting an open-ended loop once, memory for
  arguments and temporaries relative to the samples, and the registers of the local epoch's kernel and the weighing's.

`--predict` prints instead what a round of some algorithms is predicted to take (`_model.py`), for 10^3 to 10^9 tasks on
1 to 256 devices; where neither compiler is installed, how far off such predictions are on this CPU, as measured.

The exit status counts what is wrong: does not compile, spills, has threads that add up differently, loops where the
kernel is expected, or a kernel by Triton with a JAX in which that is deprecated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GPU, TPU = (find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
DUMP = tempfile.TemporaryDirectory()
os.environ["JAX_PLATFORMS"] = "cpu"
if GPU:  # there is no card to try variants on; of what can be dumped, the code of the kernels is wanted
    os.environ["MOSAIC_GPU_DUMP_TO"] = DUMP.name
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_dump_to={DUMP.name} --xla_dump_emitter_re=ptx"
elif TPU:
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is held, so others may compile at the same time
    }
else:  # BLAS's threads wait for cores that XLA holds: a triangular solve of 32 x 32 took 2.3 ms in a round, 0.01 alone
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    use_abstract_mesh,
)  # fmt: skip

import mocha_jax as mj  # noqa: E402
from benchmarks._cards import CARDS  # noqa: E402
from benchmarks._prediction import check, predict  # noqa: E402
from benchmarks._programs import resources  # noqa: E402
from benchmarks._work import steps  # noqa: E402
from mocha_jax._data.layouts import in_format  # noqa: E402
from mocha_jax._node import local_solver  # noqa: E402

SLICES = {"TPU v5e": {4: "v5e:2x2", 256: "v5e:16x16"}, "TPU v5p": {4: "v5p:2x2x1"}}
MACHINES = tuple(CARDS if GPU else SLICES)
TRITON = "__gpu$xla.gpu.triton"  # not with JAX 0.11 or newer
KERNELS = (TRITON, "mosaic_gpu_v2") if GPU else ("tpu_custom_call",)
NAMES = EPOCH, WEIGHING, SMALL = "epoch_on_gpu", "weigh_on_gpu", "small_work_on_gpu"  # how those of GPUs begin
LOSSES = {
    "hinge": mj.losses.Hinge(),
    "smoothed hinge": mj.losses.SmoothedHinge(0.5),
    "squared hinge": mj.losses.SquaredHinge(),
    "logistic": mj.losses.Logistic(),
    "squared": mj.losses.Squared(),
    "absolute": mj.losses.Absolute(),
    "epsilon": mj.losses.EpsilonInsensitive(0.1),
    "huber": mj.losses.Huber(1.0),
    "quantile": mj.losses.Quantile(0.3),
}
NODES = (10_000, 30)
WIDTHS = (1, 2, 8, 10, 16, 20, 32, 33, 64, 100, 128, 200, 256, 561, 1500, 2000, 4096)
MEAN, LEARNED = mj.regularizers.MeanRegularized(0.1, 0.1), mj.regularizers.Probabilistic(0.1)
ALGORITHMS: dict[str, tuple[Any, Any]] = {
    "Algorithm 1": (mj.Mocha(sigma_prime="per_task"), MEAN),
    "adaptive": (mj.Mocha(), MEAN),
    "proximal": (mj.Mocha(), LEARNED),
    "alternation": (mj.Mocha(server="dual"), LEARNED),
    "CoCoA": (mj.Cocoa(theta=0.5), MEAN),
}
ROUNDS = 50

# A thread of a kernel may take so many registers: with more, too few threads share a processor. Of rows of 16 KB two
# programs have enough on their way.
REGISTERS, REGISTERS_LONG, LONG = 168, 192, 4000


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to compile."""

    algorithm: str = "Algorithm 1"
    loss: str = "hinge"
    shape: tuple[int, int, int] = (1000, 64, 64)  # m, n, d
    storage: str = "float32"
    devices: int = 1


def cases(short: bool) -> Iterator[Case]:
    """A usual run, then one thing varied at a time."""
    yield Case()
    yield Case("adaptive", "logistic", devices=4)
    yield Case("adaptive", shape=(30, 40, 20))  # fewer nodes than a program of the weighing has threads
    yield Case("proximal", shape=(30, 40, 10))
    if not short:
        yield from (Case(name) for name in ALGORITHMS if name != Case.algorithm)
        yield from (Case(name, devices=4) for name in ("Algorithm 1", "proximal"))
        yield from (Case(loss=name) for name in LOSSES if name != Case.loss)
        yield from (Case("adaptive", shape=s) for s in [(10_000, 128, 64), (30, 240, 561)])
        yield from (
            Case(shape=s) for s in [(10_000, 16, 10), (10_000, 128, 64), (30, 240, 561), (7, 33, 1500), (100, 2**17, 8)]
        )
        yield from (Case(storage=name) for name in ("bfloat16", "float16"))


def main() -> int:
    """Compile, print, save; return how much is wrong."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.accelerators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a few programs, as a check")
    # Mosaic's assembler serves one generation of GPUs in a process, that of the first kernel.
    parser.add_argument("--machines", nargs="+", choices=MACHINES, help="default the first; of GPUs one generation")
    parser.add_argument("--predict", action="store_true", help="what a round would take; on a CPU, how far that is off")
    parser.add_argument("--json", type=Path, help="save what was found here")
    options = parser.parse_args()
    machines = options.machines or MACHINES[:1]
    if options.predict:
        print(f"compiled, not run: jax {jax.__version__}, Python {sys.version.split()[0]}")
        rows = (
            predict(machines[0], partial(to_predict, machines[0]), options.short) if GPU or TPU else check(ALGORITHMS)
        )
        if options.json:
            options.json.write_text(json.dumps({"jax": jax.__version__, "predictions": rows}, indent=1))
        return 0
    kernels: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    print(f"compiled, not run: jax {jax.__version__}, Python {sys.version.split()[0]}")
    if GPU:
        losses = ["hinge", "logistic"] if options.short else list(LOSSES)
        print("\nkernels alone, many nodes and few: registers (spilled bytes)")
        print("".join(f"{t:>10}" for t in ("d", *(f"{machine} {m}" for machine in machines for m in NODES))))
        for d in WIDTHS[:: 4 if options.short else 1]:
            of_width = [worst(machine, losses, m, d) for machine in machines for m in NODES]
            kernels += of_width
            print(f"{d:10}" + "".join(f"{r['registers']:>4} ({r['spilled']})".rjust(10) for r in of_width), flush=True)
    columns = "devices  kernel  starts  memory  registers  of the weighing"
    print(f"\n{'machine':8} {'algorithm':12} {'loss':14} {'m, n, d':>15} {'samples':9} {columns}")
    for machine in machines:
        for case in cases(options.short):
            runs.append(row := whole_run(machine, case))
            shape = ", ".join(map(str, case.shape))
            what = f"{machine:8} {case.algorithm:12} {case.loss:14} {shape:>15} {case.storage:9} {case.devices:7}"
            counts = f"{row['kernels']:7} {row['starts'] or '':>7} {row['memory']:7.1f}"
            taken = f"{row['registers'] or '':>10} {row.get('weighing_registers', ''):>16}"
            print(f"{what} {counts} {taken} {row['wrong']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "kernels": kernels, "runs": runs}, indent=1))
    wrong = [row for row in kernels + runs if row["wrong"]]
    print("\n" + "\n".join(["all is well"] if not wrong else [f"wrong: {row}" for row in wrong]))
    return len(wrong)


def worst(machine: str, losses: list[str], m: int, d: int) -> dict[str, Any]:
    """What the kernel for rows of d features takes of a GPU, the most of some losses."""
    arrays = alone(machine, (m, 64, d))
    row: dict[str, Any] = {"machine": machine, "m": m, "d": d, "registers": 0, "spilled": 0, "wrong": ""}
    for name in losses:
        loss = jax.tree.map(lambda _: arrays[0].update(shape=(), dtype=jnp.float32), LOSSES[name])
        try:
            text = compiled(machine, chosen, loss, *arrays).as_text()
            row = judged(machine, row | {"wrong": row["wrong"] or by_wrong(text)})
        except Exception as error:
            row["wrong"] = f"{name}: {first_line(error)}"
    return row


def chosen(loss: mj.losses.Loss, x: jax.Array, *rest: jax.Array) -> Any:
    """A pass by the kernel that the library chooses."""
    *others, order = rest
    return local_solver._on_cuda(order[None], loss, x, *others)


def by_wrong(text: str) -> str:
    """What is wrong with the kernels of a program."""
    if not any(f'"{name}"' in text for name in KERNELS):
        return "loops in place of the kernel"
    return "Triton" if GPU and f'"{TRITON}"' in text and jax.__version_info__ >= (0, 11) else ""


def alone(machine: str, shape: tuple[int, int, int], storage: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of a kernel after the loss, of a shape m, n, d."""
    m, n, d = shape
    [device] = devices_of(machine, 1)
    real, count = (partial(struct, SingleDeviceSharding(device), dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    x = real(n, m, d).update(dtype=storage)
    return x, *[real(n, m)] * 4, real(m, d), real(m), count(m), count(n)


def whole_run(machine: str, case: Case) -> dict[str, Any]:
    """What a run consists of."""
    row = {"machine": machine} | dataclasses.asdict(case)
    row |= {"kernels": 0, "starts": None, "memory": float("nan"), "registers": 0, "spilled": 0, "wrong": ""}
    try:
        program = program_of(machine, case)
    except Exception as error:
        return row | {"wrong": first_line(error)}
    text, memory = program.as_text(), program.memory_analysis()
    of_samples = np.prod(case.shape) * jnp.dtype(case.storage).itemsize / case.devices
    row["kernels"] = sum(map(text.count, (f'"{name}"' for name in KERNELS)))
    row["memory"] = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / of_samples
    row["wrong"] = by_wrong(text)
    return judged(machine, row | {"starts": round(sum(s.times for s in steps(text)) / ROUNDS)}) if GPU else row


def program_of(machine: str, case: Case) -> Any:
    """A whole run, compiled."""
    algorithm, regularizer = ALGORITHMS[case.algorithm]

    def go(key: jax.Array, problem: mj.Problem) -> Any:
        return mj.run(problem, algorithm, key, num_rounds=ROUNDS, record_every=ROUNDS)

    return compiled(machine, go, *abstract(case, regularizer, devices_of(machine, case.devices)))


def to_predict(machine: str, algorithm: str, shape: tuple[int, int, int], devices: int) -> tuple[Any, int]:
    """A whole run, compiled, and its rounds."""
    return program_of(machine, Case(algorithm, shape=shape, devices=devices)), ROUNDS


def judged(machine: str, row: dict[str, Any]) -> dict[str, Any]:
    """With what the kernels take that were compiled since the last call."""
    found = resources(DUMP.name, NAMES, CARDS[machine].architecture)
    if not found:
        return row | {"wrong": row["wrong"] or "no code of the kernel was found"}
    for taken in found:
        which = {WEIGHING: "weighing_", SMALL: "small_"}.get(taken.kernel, "")
        for what in ("registers", "spilled"):
            row = row | {which + what: max(row.get(which + what, 0), getattr(taken, what))}
    if any(taken.spilled for taken in found):
        return row | {"wrong": row["wrong"] or "spills"}
    if any(taken.differing for taken in found):
        return row | {"wrong": row["wrong"] or "threads of a node with different sums"}
    most, allowed = max(taken.registers for taken in found), REGISTERS_LONG if row.get("d", 0) > LONG else REGISTERS
    return row | {"wrong": row["wrong"] or (f"{most} registers" if most > allowed else "")}


def compiled(machine: str, work: Any, *given: Any) -> Any:
    """The program of a function of abstract arrays, for the devices that these lie on."""
    with lowered_for(machine):
        return jax.jit(work).lower(*given).compile()


@contextmanager
def lowered_for(machine: str) -> Iterator[None]:
    """As if its card were here: a kernel is written for a card."""
    name, cores, platform = (CARDS[machine].name, CARDS[machine].cores, "gpu") if GPU else (machine, 1, "tpu")
    device = AbstractDevice(name, cores, platform)
    with ExitStack() as stack:  # a mesh that is not there tells which it is, and a device its generation
        stack.enter_context(use_abstract_mesh(AbstractMesh((), (), abstract_device=device)))
        if GPU:
            stack.enter_context(jax.default_device(devices_of(machine, 1)[0]))
        yield


def devices_of(machine: str, count: int) -> list[Any]:
    """Devices of a machine that is not here."""
    if GPU:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=CARDS[machine].target, topology=f"1x1x{count}"
        )
    else:
        name = next(name for size, name in SLICES[machine].items() if count <= size)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return list(topology.devices[:count])


def struct(where: Any, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of which nothing is known but its shape and place."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def abstract(case: Case, regularizer: Any, devices: list[Any]) -> tuple[Any, mj.Problem]:
    """A key and a problem of shapes, on one device or spread over several."""
    m, n, d = case.shape

    def of(x: jax.Array, y: jax.Array, owner: jax.Array) -> tuple[jax.Array, mj.Problem]:
        data = mj.TaskData(x, y, y, owner, num_tasks=m, loss_scaling="task_mean")
        return jax.random.key(0), mj.Problem(data, LOSSES[case.loss], regularizer)

    shapes = ((m, n, d), jnp.dtype(case.storage)), ((m, n), jnp.float32), ((m,), jnp.int32)
    key, problem = jax.eval_shape(of, *(jax.ShapeDtypeStruct(*one) for one in shapes))
    if case.devices == 1:
        one = SingleDeviceSharding(devices[0])
        key, problem = jax.tree.map(lambda leaf: leaf.update(sharding=one), (key, problem))
        return key, problem.exchange(data=problem.data.exchange(x=in_format(problem.data.x)))  # as packed
    mesh = Mesh(np.array(devices), ("nodes",), axis_types=(AxisType.Auto,))
    return key.update(sharding=NamedSharding(mesh, PartitionSpec())), mj.shard(problem, mesh)


def first_line(error: Exception) -> str:
    """The gist of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}" if str(error) else type(error).__name__


if __name__ == "__main__":
    sys.exit(min(main(), 1))
