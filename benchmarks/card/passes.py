"""A pass of the local epoch by kernel and by loops, beside what its bytes take at the speed of a copy; variants.

The predicted time of a pass by a kernel is that of its bytes, each read or written once, at the bandwidth of a copy
that is measured in the same process: samples, 20 bytes for each row, weights and changes. Programs are compiled first,
several at once, and timed when nothing else is compiled. A program also draws the order of the rows; what the kernel
takes alone is told by the profiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel as bench
from benchmarks.card._device import copies
from benchmarks.card._inside import Inside, step
from benchmarks.card._kernels import Kernel, kernels
from benchmarks.card._timing import gist, in_threads, on_cpu, profiled, timed
from mocha_jax._node.buckets import TimeMajor

Shape = tuple[int, int, int]
_TINY: list[Shape] = [(4, 3, 8)]


class Job(NamedTuple):
    """A program to time."""

    shape: Shape
    loss: str = "hinge"
    samples: str = "float32"
    by: str = "kernel"  # as the library chooses it; "loops"; or a kernel's name
    variant: tuple[tuple[str, int], ...] = ()

    @property
    def what(self) -> str:
        """For the table."""
        said = " ".join(f"{name} {value}" for name, value in self.variant)
        return f"{', '.join(map(str, self.shape))} {self.loss} {self.samples}: {self.by} {said}".rstrip()


def measure(here: Inside) -> None:
    """The shape that is the goal with all variants, the other shapes, the other losses."""
    names = ("variants", "shapes", "losses")[: 3 if here.full else 1]
    here.apart("benchmarks.card.passes", {name: {} for name in names}, part)


def part(here: Inside, name: str) -> None:
    """Compile, then time when nobody else compiles."""
    found = {kernel.name: kernel for kernel in kernels(here.note if name == "variants" else print, used=False)}
    jobs = _jobs(here.full, found)[name]
    programs = list(in_threads([partial(_compiled, found, job) for job in jobs], lambda: 0.55 * here.left()))
    with here.alone():
        copy = copies(here.full)
        here.figure(f"copy, before the {name}", copy.bandwidth / 1e9, "GB/s")
        loops: dict[tuple[Any, ...], float] = {}
        for job, program in zip(jobs, programs, strict=True):
            if isinstance(program, TimeoutError) or here.left() < 3.0:
                here.unfinished(job.what)
            elif isinstance(program, Exception):
                here.wrong(f"{job.what}: {gist(program)}")
            else:
                _time(here, job, program, copy.bandwidth, loops)


def _jobs(full: bool, found: dict[str, Kernel]) -> dict[str, list[Job]]:
    """What to time, the most wanted first; loops before kernels, which are compared with them."""
    goal, others = (bench.GOAL, [s for s in bench.SHAPES if s != bench.GOAL]) if full else (_TINY[0], [])
    both = ("loops", "kernel") if not on_cpu() else ("loops",)
    variants = [
        Job(goal, by=name, variant=tuple(variant.items()))
        for name, k in found.items() if k.takes(goal[1], goal[0], goal[2], jnp.float32)
        for variant in ({}, *(k.variants if full else ()))
    ]  # fmt: skip
    more = [(loss, "float32") for loss in bench.LOSSES if loss != "hinge"] + [("hinge", "bfloat16")]
    return {
        "variants": [Job(goal, by=by) for by in both] + variants,
        "shapes": [Job(shape, by=by) for shape in others for by in both],
        "losses": [Job(goal, loss, samples, by) for loss, samples in more for by in both]
        + [Job(shape, "hinge", "bfloat16", "kernel") for shape in others],
    }


@cache
def _lock(shape: Shape, samples: str) -> threading.Lock:
    """So that two threads do not make the same samples."""
    return threading.Lock()


_made: dict[tuple[Shape, str], Any] = {}


def _sets(shape: Shape, samples: str) -> tuple[bench.Arguments, ...]:
    with _lock(shape, samples):
        if (shape, samples) not in _made:
            _made[shape, samples] = jax.block_until_ready(bench.several_sets(shape, samples))
        return cast(Any, _made[shape, samples])


def _compiled(found: dict[str, Kernel], job: Job) -> Callable[..., Any]:
    """The program of a job, a function of sets of samples."""
    sets = _sets(job.shape, job.samples)
    if job.by in found:
        work: Any = partial(_by, found[job.by], dict(job.variant))
    else:
        work = partial(bench.several_passes, backend="pallas" if job.by == "kernel" else "xla")
    return jax.jit(partial(work, job.loss)).lower(sets).compile()


def _by(kernel: Kernel, variant: dict[str, int], loss: str, sets: tuple[bench.Arguments, ...]) -> Any:
    """Passes by one kernel: as many as `several_passes` does, one after the other over each of the sets."""
    found = []
    for data, beta, w, q, steps in sets:
        [rows] = cast(TimeMajor, data.layout).buckets
        n, m, _ = rows.samples.shape
        order = jnp.argsort(jax.random.bits(jax.random.key(0), (n,))).astype(jnp.int32)
        given = rows.samples, rows.y[0], rows.weight[0], rows.norm2[0]

        def one(beta: Any, _: None, given: Any = given, rest: Any = (w, q, steps), order: Any = order) -> Any:
            return kernel.passes(order[None], bench.LOSSES[loss], *given, beta, *rest, **variant)[0], None

        found.append(jax.lax.scan(one, beta.T, length=bench.PASSES if len(sets) == 1 else 1)[0])
    return found


def _time(
    here: Inside, job: Job, program: Callable[..., Any], copy: float, loops: dict[tuple[Any, ...], float]
) -> None:
    """Time a program; of a kernel also its share of the copy's bandwidth, and what the loops take."""
    sets = _sets(job.shape, job.samples)
    passes = bench.passes_over(sets)
    taken = timed(lambda: program(sets), within=0.8, queued=4)
    us, (m, n, d) = 1e6 * taken.seconds / passes, job.shape
    of_x = np.prod(job.shape, dtype=float) * jnp.dtype(job.samples).itemsize
    if job.by == "loops":
        loops[job[:3]] = us
        here.figure(job.what, us, "us", spread=taken.spread)
        return
    floor = 1e6 * (of_x + 20.0 * m * n + 12.0 * m * d) / copy
    note = f"{of_x / copy / us * 1e6:.0%} of the copy"
    if job[:3] in loops:
        note += f", loops x {loops[job[:3]] / us:.1f}"
    more: dict[str, Any] = {}
    if not on_cpu() and here.left() > 3.0:
        ran = profiled(lambda: program(sets))
        alone = 1e6 * ran.of("epoch") / passes
        more = {"alone": alone, "longest": ran.longest()}
        if alone > 0.0:
            note += f"; the kernel alone {alone:.1f} us, {of_x / copy / alone * 1e6:.0%}"
    here.figure(job.what, us, "us", predicted=floor, spread=taken.spread, note=note, sets=len(sets),
                share=of_x / copy / us * 1e6, **more)  # fmt: skip


if __name__ == "__main__":
    step(measure, part)
