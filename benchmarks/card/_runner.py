"""Runs steps one after the other, each as a process group with a limit, and writes the table after every one.

JAX is not imported here: this process would hold the card's memory. A step gets the share of the time left that its
seconds are of those of all steps still to come. At its limit its group is asked to end (SIGTERM) and two seconds later
killed; who cannot even be killed, as happens to a process that waits for a driver, is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card._inside import ORDER, ROOT, scratch
from benchmarks.card._results import NO_TIME, NOT_THERE, Results
from benchmarks.card._steps import Step

_LEAST = 4.0  # seconds below which no step is begun
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_POLL, _SAVE = 0.05, 5.0  # seconds between two looks at a process, and between two copies of what it has said
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
_MOST_LOG = 400_000  # bytes of a step's log that are kept, of its beginning and of its end

_PROBE = """
import json, jax
found = jax.devices()
device = f"{len(found)} x {found[0].device_kind}"
print(json.dumps({"backend": jax.default_backend(), "device": device, "jax": jax.__version__}))
"""


class Options(NamedTuple):
    """What the command line says."""

    out: Path
    minutes: float = 8.0
    cache: Path | None = None
    again: bool = False
    small: bool = False
    seed: int = 0
    mnist: Path | None = None


class Runner:
    """A run of some steps.

    Args:
      options: see there.
      steps: all there are, for the table.
      chosen: those to run.
    """

    def __init__(self, options: Options, steps: Sequence[Step], chosen: Sequence[Step]) -> None:
        self.options, self.steps, self.chosen = options, steps, chosen
        self.end = time.time() + 60.0 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self.results = Results(options.out)
        self.log = options.out / "card.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.machine: dict[str, Any] = {}

    def run(self, probe: bool = True) -> int:
        """Run them; return how many did not end well."""
        adopt()
        try:
            self.machine = self._probe() if probe else {}
            self.results.about |= self.machine | {"begun": time.strftime("%F %T"), "seed": self.options.seed}
            for i, step in enumerate(self.chosen):
                if self.results.complete(step.name) and not self.options.again:
                    print(f"{step.letter} {step.name}: was complete", flush=True)
                else:
                    self._one(step, self._limit(self.chosen[i:]))
        finally:
            self._kill()
            self._write()
        failed = self.results.failed([step.name for step in self.chosen])
        print(self.options.out.joinpath("card.txt").read_text())
        print(f"{len(self.chosen) - len(failed)} of {len(self.chosen)} steps ended well", *failed)
        return len(failed)

    def _probe(self) -> dict[str, Any]:
        """What JAX sees, asked in a process of its own; where that says nothing the steps will say why."""
        with open(self.log, "ab") as log:
            log.write(b"\n==== which devices JAX sees\n")
            log.flush()
            try:
                done = subprocess.run(
                    [sys.executable, "-c", _PROBE], stdout=subprocess.PIPE, stderr=log, env=self._environment(None, {}),
                    timeout=max(min(90.0, (self.end - time.time()) / 2), 1.0), text=True, cwd=ROOT, check=True,
                )  # fmt: skip
                return json.loads(done.stdout.splitlines()[-1])
            except (subprocess.SubprocessError, ValueError, IndexError) as error:
                log.write(f"{error}\n".encode())
        return {"backend": "unknown", "device": "JAX sees no device, or says nothing", "jax": "unknown"}

    def _limit(self, to_come: Sequence[Step]) -> float:
        """Seconds of the next step: its share of what is left."""
        waiting = [s for s in to_come if self.options.again or not self.results.complete(s.name)]
        return (self.end - time.time()) * to_come[0].seconds / sum(s.seconds for s in waiting)

    def _one(self, step: Step, limit: float) -> None:
        """One step, whatever happens to it."""
        name = step.name
        if limit < _LEAST:
            self.results.skip(name, NO_TIME, f"{limit:.1f} s were left for it")
            self._write()
            return
        print(f"{step.letter} {name}: {step.what} [{limit:.0f} s]", flush=True)
        self.results.begin(name, round(limit, 1), self.machine.get("device", ""))
        used = _processor()
        began, start = time.time(), self.log.stat().st_size if self.log.exists() else 0
        with scratch() as folder, open(self.log, "ab") as log:
            rows = Path(folder) / "rows.jsonl"
            log.write(f"\n==== {step.letter} {name}, {time.strftime('%F %T')}, {limit:.0f} s at most\n".encode())
            log.flush()
            order = {"rows": str(rows), "end": began + limit, "full": self._full(), "seed": self.options.seed}
            order |= {"out": str(self.options.out.resolve())}
            order |= {"mnist": str(self.options.mnist.resolve()) if self.options.mnist else None}
            self.process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, process_group=0,
                env=self._environment(step, order),
            )  # fmt: skip
            code = self._wait(began + limit, name, rows)
            self._kill()
            self.results.heard(name, rows)
        _shorten(self.log, start)
        self.results.steps[name]["processor"] = round(_processor() - used, 1)
        status = self.results.end(name, time.time() - began, code, self._gist(start) if code else "")
        print(f"{step.letter} {name}: {status}, {time.time() - began:.0f} s", flush=True)
        self._write()

    def _wait(self, until: float, name: str, rows: Path) -> int | None:
        """Until it ends or is out of time (None), taking over what it says."""
        assert self.process is not None
        saved, size = time.time(), 0
        while (code := self.process.poll()) is None and time.time() < until:
            time.sleep(_POLL)
            now = rows.stat().st_size if rows.exists() else 0
            if now != size and time.time() - saved > _SAVE:
                self.results.heard(name, rows)
                self.results.save()
                saved, size = time.time(), now
        return code

    def _kill(self) -> None:
        """End the last process, and all that it started."""
        process, self.process = self.process, None
        if process is None:
            return
        for how, grace in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, how)
            except ProcessLookupError:
                break
            until = time.time() + grace
            while time.time() < until and _alive(process):
                time.sleep(_POLL)

    def _full(self) -> bool:
        return self.machine.get("backend", "cpu") not in ("cpu", "unknown") and not self.options.small

    def _environment(self, step: Step | None, order: dict[str, Any]) -> dict[str, str]:
        """Variables of a step: the checkout, not an installation, and one cache of compiled programs."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2", ORDER: json.dumps(order)}
        # Steps have processes beside them on the card (torch, children), so none takes most of its memory at once.
        ours |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if not self._full():  # compiled quickly: much is compiled and little computed
            ours |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
        if self.options.cache is not None and not (step and step.own_cache):
            ours |= {
                "JAX_COMPILATION_CACHE_DIR": str(self.options.cache.resolve()),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        return os.environ | ours

    def _gist(self, start: int) -> str:
        """The last line that a step that failed has said."""
        with open(self.log, "rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:120] if lines else ""

    def _write(self) -> None:
        for step in self.steps:
            self.results.skip(step.name, NOT_THERE, "")
        self.results.save()
        names = [(step.letter, step.name) for step in self.steps]
        (self.options.out / "card.txt").write_text(self.results.table(names))


def adopt() -> None:
    """Become the parent of those whose parent dies, to know when they have ended; where that cannot be, go on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _processor() -> float:
    """Seconds that cores have worked for processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of its group is there."""
    if process.poll() is not None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-process.pid, os.WNOHANG)[0]:
                pass
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _shorten(log: Path, start: int) -> None:
    """Cut the middle out of a section that is too long."""
    if log.stat().st_size - start <= _MOST_LOG:
        return
    with open(log, "r+b") as file:
        file.seek(start)
        section = file.read()
        half = _MOST_LOG // 2
        file.seek(start)
        file.write(section[:half] + b"\n[...]\n" + section[-half:])
        file.truncate()
