"""A progress bar: tqdm where it is installed, a plain line otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any, Self


class Bar:
    """Shows rounds done, or other units, and the relative gap; does nothing when not enabled."""

    def __init__(self, enabled: bool, *, total: int, done: int, unit: str = "round") -> None:
        self._total, self._done, self._unit = total, done, unit
        self._tqdm: Any = None
        self._plain = enabled
        self._last = 0.0
        if enabled:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._tqdm, self._plain = tqdm(total=total, initial=done, unit=unit, leave=True), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
        elif self._plain:
            print(file=sys.stderr)

    def show(self, done: int, gap: float) -> None:
        """Move to so many that are done."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(f"relative gap {gap:.1e}", refresh=False)
            self._tqdm.update(done - self._done)
        elif self._plain and (time.monotonic() - self._last > 0.2 or done == self._total):
            self._last = time.monotonic()
            print(f"\r{done}/{self._total} {self._unit}s, relative gap {gap:.1e}", end="", file=sys.stderr, flush=True)
        self._done = done
