"""Work that the processes of a run do together, and end together where it fails in one of them.

Every function here is collective: all processes call it, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Report = TypeVar("Report")  # what JSON can write

# Bytes of a message. All messages have this length, so that one exchange and one small program are enough.
_LENGTH = 1024


def together(owner: str, work: Callable[[], Report]) -> list[Report]:
    """Do ``work()`` in every process; return what came of it in each, in the order of processes.

    An error is raised in all processes: its own in the one where it happened, one that says where elsewhere, an
    `OSError` for one of the operating system and a `ValueError` for any other. Where processes do not answer, it is a
    `RuntimeError`.

    Args:
      owner: whom to name in an error.
      work: returns what JSON can write, a few hundred letters at most.
    """
    if jax.process_count() == 1:
        return [work()]
    error: Exception | None = None
    try:
        own: dict[str, object] = {"found": work()}
    except Exception as found:  # the others have to learn of it, whatever it is
        error, own = found, {"error": str(found)[:300], "system": isinstance(found, OSError)}
    try:
        texts = _exchange(json.dumps(own))
    except Exception as lost:  # of whatever carries messages: what the others did is not known
        raise RuntimeError(f"{owner}: other processes do not answer: {str(lost)[:200]}") from lost
    reports = [json.loads(text) for text in texts]
    if error is not None:
        raise error
    for process, report in enumerate(reports):
        if "error" in report:
            kind = OSError if report["system"] else ValueError
            raise kind(f"{owner}: process {process} failed: {report['error']}")
    return [report["found"] for report in reports]


def agreed(owner: str, reports: list[dict[str, object]], *names: str) -> None:
    """Raise if processes disagree about the value of one of the names."""
    for name in names:
        values = [one[name] for one in reports]
        if any(value != values[0] for value in values):
            other = next(i for i, value in enumerate(values) if value != values[0])
            raise ValueError(
                f"{owner}: processes disagree in {name}: {values[0]} in process 0, {values[other]} in process {other}."
            )


def gathered(numbers: np.ndarray) -> np.ndarray:
    """The arrays of all processes, of one shape and of 32 bits at most, one after the other: ``[processes, ...]``."""
    return np.asarray(multihost_utils.process_allgather(numbers))


def all_rows(array: jax.Array) -> np.ndarray:
    """Gather an array that processes share; all of them have to ask for it together."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _exchange(text: str) -> list[str]:
    raw = text.encode()
    if len(raw) > _LENGTH:
        raise ValueError(f"a message to other processes has {len(raw)} bytes, more than {_LENGTH}.")
    message = np.zeros(_LENGTH, np.uint8)
    message[: len(raw)] = np.frombuffer(raw, np.uint8)
    return [bytes(one).rstrip(b"\0").decode() for one in gathered(message)]
