"""Times of device work: warmed up, waited for, the median of several calls and how far they spread."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.card._inside import scratch


class Timing(NamedTuple):
    """Seconds of a call."""

    seconds: float  # the median
    spread: float  # the middle half, as a share of the median
    first: float  # what the first call took more: compiling, where the program was not compiled before
    result: Any  # of the last call


def timed(work: Callable[[], Any], *, calls: int = 9, within: float = 2.0, queued: int = 1) -> Timing:
    """Time some calls, at least three, after two that do not count; no more than fit into so many seconds.

    Args:
      work: what to time.
      calls: how many times.
      within: seconds.
      queued: so often in a row before the device is waited for, so that the host's part is not in the time.
    """
    first = _one(work)[0]
    _one(work)
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or (len(taken) < calls and time.perf_counter() - began < within):
        seconds, result = _one(work, queued)
        taken.append(seconds)
    low, median, high = np.percentile(taken, [25, 50, 75])
    return Timing(float(median), float((high - low) / median), first - float(median), result)


def _one(work: Callable[[], Any], queued: int = 1) -> tuple[float, Any]:
    began = time.perf_counter()
    for _ in range(queued - 1):
        work()
    result = jax.block_until_ready(work())
    return (time.perf_counter() - began) / queued, result


def in_threads(jobs: Sequence[Callable[[], Any]], left: Callable[[], float]) -> Iterator[Any]:
    """Results of jobs in their order, each as soon as it is there; of one that fails its exception.

    They are compilations, which leave Python to other threads for most of their time. Where no time is left the rest
    are `TimeoutError`s.

    Args:
      jobs: functions of nothing.
      left: how many seconds are left.
    """
    pool = ThreadPoolExecutor(max(min(8, (os.cpu_count() or 2) // 2), 1))
    futures: list[Future[Any]] = [pool.submit(job) for job in jobs]
    for future in futures:
        try:
            yield future.result(timeout=max(left(), 0.0))
        except Exception as error:
            future.cancel()
            yield error
    pool.shutdown(wait=False, cancel_futures=True)


class Kernels(NamedTuple):
    """What ran on a card, by name: how often, and for how many seconds in all."""

    times: Counter[str]
    seconds: Counter[str]

    def longest(self, most: int = 12) -> dict[str, tuple[int, float]]:
        """The names that took the longest: how often, and microseconds in all."""
        return {name: (self.times[name], 1e6 * taken) for name, taken in self.seconds.most_common(most)}

    def of(self, part: str) -> float:
        """Seconds of all whose names have this part."""
        return sum(taken for name, taken in self.seconds.items() if part in name)


def profiled(work: Callable[[], Any]) -> Kernels:
    """Run it once under JAX's profiler: what CUDA reports of its streams, and nothing of the host."""
    found = Kernels(Counter(), Counter())
    with scratch() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if "/device:GPU" in plane.name else ():
                    for event in line.events if line.name.startswith("Stream") else ():
                        found.times[event.name] += 1
                        found.seconds[event.name] += 1e-9 * event.duration_ns
    return found


def gist(error: BaseException) -> str:
    """The first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def on_cpu() -> bool:
    """Whether there is no accelerator."""
    return jax.default_backend() == "cpu"
