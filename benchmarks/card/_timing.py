"""Times of device work: warmed up, waited for, the median of several calls and how far they spread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np


class Timing(NamedTuple):
    """Seconds of a call."""

    seconds: float  # the median
    spread: float  # the middle half, as a share of the median
    first: float  # what the first call took more: compiling, where the program was not compiled before
    result: Any  # of the last call


def timed(work: Callable[[], Any], *, calls: int = 9, within: float = 2.0) -> Timing:
    """Time some calls, at least three, after two that do not count; no more than fit into so many seconds."""
    first = _one(work)[0]
    _one(work)
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or (len(taken) < calls and time.perf_counter() - began < within):
        seconds, result = _one(work)
        taken.append(seconds)
    low, median, high = np.percentile(taken, [25, 50, 75])
    return Timing(float(median), float((high - low) / median), first - float(median), result)


def _one(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - began, result


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


def gist(error: BaseException) -> str:
    """The first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def on_cpu() -> bool:
    """Whether there is no accelerator."""
    return jax.default_backend() == "cpu"
