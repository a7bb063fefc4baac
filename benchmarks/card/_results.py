"""The results of all steps: `card.json`, and the table that is made of it, `card.txt`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.card._inside import read

# How a step ended; nothing is wrong with the first three.
COMPLETE, UNFINISHED, LEFT_OUT = "complete", "unfinished", "left out"
WRONG, FAILED, STOPPED, NO_TIME, NOT_THERE = "wrong", "failed", "stopped", "no time", "not run"
GOOD = (COMPLETE, UNFINISHED, LEFT_OUT)

# What is off its prediction by more than this is marked.
FACTOR = 1.5

_KINDS = {"figure": "figures", "detail": "details", "note": "notes", "wrong": "wrong", "unfinished": "unfinished"}


class Results:
    """What every step has found, kept in a file that is replaced as a whole."""

    def __init__(self, out: Path) -> None:
        self.path = out / "card.json"
        self.about: dict[str, Any] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            self.about, self.steps = kept["about"], kept["steps"]

    def complete(self, name: str) -> bool:
        """Whether a step needs no other run."""
        return self.steps.get(name, {}).get("status") in (COMPLETE, WRONG)

    def begin(self, name: str, limit: float, device: str) -> None:
        """Another run of a step; what an earlier one found is kept beside it."""
        earlier = self.steps.get(name)
        before = [*earlier.pop("earlier", []), earlier] if earlier and earlier.get("figures") else []
        self.steps[name] = {"status": STOPPED, "limit": limit, "device": device, "when": time.strftime("%F %T")}
        self.steps[name] |= {"earlier": before[-3:]}

    def heard(self, name: str, rows: Path) -> None:
        """Take over what a step has said so far."""
        lines, found = read(rows), self.steps[name]
        for kind, where in _KINDS.items():
            found[where] = [line[kind] for line in lines if kind in line]
        found["left_out"] = next((line["left_out"] for line in lines if "left_out" in line), "")
        found["ended"] = any("end" in line for line in lines)

    def end(self, name: str, seconds: float, processor: float, code: int | None, said: str) -> str:
        """How a run has ended; `code` is its exit status, None where it was killed at its limit."""
        found = self.steps[name]
        found |= {"seconds": round(seconds, 1), "processor": round(processor, 1), "code": code, "said": said}
        if code is None:
            status = STOPPED
        elif code != 0 or not found["ended"]:
            status = FAILED
        elif found["wrong"]:
            status = WRONG
        elif found["left_out"]:
            status = LEFT_OUT
        else:
            status = UNFINISHED if found["unfinished"] else COMPLETE
        found["status"] = status
        return status

    def skip(self, name: str, status: str, why: str) -> None:
        """A step that was not begun; what an earlier run found stays."""
        if self.steps.get(name, {}).get("status") in (None, NOT_THERE):
            self.steps[name] = {"status": status, "said": why, "seconds": 0.0, "limit": 0.0}

    def save(self) -> None:
        """Replace the file by a new one."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"about": self.about, "steps": self.steps}, indent=1))
        os.replace(partial, self.path)

    def failed(self, names: Sequence[str]) -> list[str]:
        """Those of some steps that did not end well, or found something wrong."""
        found = (self.steps.get(name, {}) for name in names)
        return [n for n, s in zip(names, found, strict=True) if s.get("status") not in GOOD or s.get("wrong")]

    def table(self, names: Sequence[tuple[str, str]]) -> str:
        """Everything that a person wants to read; `names` are letters and names of steps."""
        lines = [f"{key}: {value}" for key, value in self.about.items()]
        lines += ["", f"{'step':<16}{'status':<12}{'seconds':>8}{'of':>6}{'core s':>9}  figures"]
        for letter, name in names:
            found = self.steps.get(name, {"status": NOT_THERE})
            count = len(found.get("figures", []))
            took = "".join(f"{found.get(k, 0.0):>{w}.0f}" for k, w in (("seconds", 8), ("limit", 6), ("processor", 9)))
            took += f"{count:>9}"
            lines.append(f"{letter + ' ' + name:<16}{found['status']:<12}{took}  {found.get('said', '')}".rstrip())
        for letter, name in names:
            if self.steps.get(name, {}).get("status", NOT_THERE) != NOT_THERE:
                lines += ["", *self._of_step(f"{letter} {name}", self.steps[name])]
        lines += ["", f"<< more than {FACTOR} times off its prediction"]
        return "\n".join(lines) + "\n"

    def _of_step(self, title: str, found: dict[str, Any]) -> Iterator[str]:
        device = found.get("device", "")
        elsewhere = f", on {device}" if device and device != self.about.get("device") else ""
        yield f"== {title}: {found['status']}{elsewhere}"
        for text in found.get("wrong", []):
            yield f"   WRONG: {text}"
        for text in found.get("notes", []):
            yield f"   {text}"
        for figure in found.get("figures", []):
            yield _line(figure)
        for text in found.get("unfinished", []):
            yield f"   not done: {text}"
        if found.get("left_out"):
            yield f"   {found['left_out']}"


def _line(figure: dict[str, Any]) -> str:
    spread = figure.get("spread")
    value = f"{_number(figure['value'])} {figure['unit']}"
    beside = "" if not isinstance(spread, float) else f"+-{100 * spread:.0f} %"
    predicted, ratio = figure.get("predicted"), _ratio(figure)
    if ratio is not None:
        beside = f"{beside:>8}  predicted {_number(predicted)}, x {ratio:.2f}"
        beside += " <<" if not 1 / FACTOR <= ratio <= FACTOR else ""
    return f"   {figure['what']:<58}{value:>20} {beside:>8}  {figure.get('note', '')}".rstrip()


def _ratio(figure: dict[str, Any]) -> float | None:
    """What was measured over what was predicted."""
    value, predicted = figure["value"], figure.get("predicted")
    numbers = isinstance(value, int | float) and isinstance(predicted, int | float)
    return value / predicted if numbers and predicted else None


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
