"""The options of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from mocha_jax._core import check


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The arguments of `serve`, checked."""

    max_rounds: int = 1000
    tol: float = 1e-3
    round_seconds: float = 60.0
    message_seconds: float = 0.0
    min_answers: int = 1
    asynchronous: bool = False
    start_seconds: float = 600.0
    leave_after: int = 0
    seed: int = 0
    poll_seconds: float = 0.1
    checkpoint: str = ""

    def __post_init__(self) -> None:
        check.integer("serve", 1, max_rounds=self.max_rounds, min_answers=self.min_answers)
        check.integer("serve", 0, leave_after=self.leave_after, seed=self.seed)
        for name in ("round_seconds", "tol", "message_seconds", "start_seconds", "poll_seconds"):
            value = getattr(self, name)
            check.scalar("serve", **{name: value})
            (check.positive if name == "round_seconds" else check.nonnegative)("serve", **{name: value})
            object.__setattr__(self, name, float(value))
        for name in ("max_rounds", "min_answers", "leave_after", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))
        check.flag("serve", asynchronous=self.asynchronous)
        if not isinstance(self.checkpoint, str | os.PathLike):
            raise ValueError(f"serve: checkpoint must be the path of a file, got {check.shown(self.checkpoint)}.")


def overridden(plan: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those in place that a run-config has, under the same names with hyphens."""
    return {name: config.get(name.replace("_", "-"), value) for name, value in plan.items()}
