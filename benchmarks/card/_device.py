"""This machine's device: the measured bandwidth of its memory, and its description in the model of costs."""

from __future__ import annotations

import subprocess
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks._cards import CARDS
from benchmarks._machines import MACHINES, Machine, of_card
from benchmarks.card._timing import Timing, timed


class Copy(NamedTuple):
    """How fast memory is copied: bytes read and bytes written, together, a second."""

    plain: Timing
    added: Timing  # x + 1, by a kernel of XLA's
    bytes: int

    @property
    def bandwidth(self) -> float:
        """Of the faster one."""
        return self.bytes / min(self.plain.seconds, self.added.seconds)


def copies(full: bool) -> Copy:
    """Copy an array of random numbers that no cache holds."""
    x = jax.block_until_ready(jax.random.normal(jax.random.key(0), (2**28 if full else 2**20,)))
    plain, added = (jax.jit(work) for work in (jnp.copy, lambda x: x + 1.0))
    return Copy(timed(lambda: plain(x), queued=8), timed(lambda: added(x), queued=8), 2 * x.nbytes)


def machine() -> tuple[Machine, str]:
    """The description of this card, and how well it is known."""
    kind = jax.devices()[0].device_kind
    for name, card in CARDS.items():
        if name in kind:
            return of_card(card), f"predicted with the data sheet of a {card.name}"
    return MACHINES["H100"], f"predicted as if {kind} were an H100: no data sheet of it is in benchmarks/_cards.py"


def asked(*what: str) -> list[str]:
    """What NVIDIA's tool says of the first card; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(what)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines: list[Any] = done.stdout.strip().splitlines()
    return [part.strip() for part in lines[0].split(",")] if lines else []
