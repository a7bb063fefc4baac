"""Runs steps, each as a process group with a limit, and writes the table after every one.

JAX is not imported here: this process would hold the card's memory. Steps that time nothing run side by side, all
others alone. Steps get the share of the time left that their seconds are of those of all steps still to come. At their
limit their groups are asked to end (SIGTERM), two seconds later killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card import _process
from benchmarks.card._inside import ORDER, ROOT
from benchmarks.card._process import Group
from benchmarks.card._results import NO_TIME, NOT_THERE, Results
from benchmarks.card._steps import Step

_LEAST = 4.0  # seconds below which no step is begun
_SAVE = 5.0  # seconds between two copies of what steps have said
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


class Running(NamedTuple):
    """A step that runs."""

    step: Step
    group: Group
    rows: Path  # what it says
    log: Path  # what it prints
    began: float


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
        self.running: list[Running] = []
        self.machine: dict[str, Any] = {}

    def run(self, probe: bool = True) -> int:
        """Run them; return how many did not end well."""
        _process.adopt()
        with tempfile.TemporaryDirectory(prefix="mocha_jax_card_", ignore_cleanup_errors=True) as folder:
            try:
                self.machine = self._probe() if probe else {}
                self.results.about |= self.machine | {"begun": time.strftime("%F %T"), "seed": self.options.seed}
                parts = side_by_side([step for step in self.chosen if self._wanted(step)])
                for i, part in enumerate(parts):
                    self._part(part, self._limit(parts[i:]), Path(folder))
            finally:
                _process.end(one.group for one in self.running)
                for one in list(self.running):
                    self._ended(one, None)
                self._write()
        failed = self.results.failed([step.name for step in self.chosen])
        print(self.options.out.joinpath("card.txt").read_text())
        print(f"{len(self.chosen) - len(failed)} of {len(self.chosen)} steps ended well", *failed)
        return len(failed)

    def _wanted(self, step: Step) -> bool:
        """Whether it is to run, and not complete."""
        complete = self.results.complete(step.name) and not self.options.again
        if complete:
            print(f"{step.letter} {step.name}: was complete", flush=True)
        return not complete

    def _probe(self) -> dict[str, Any]:
        """What JAX sees, asked in a process of its own; where that says nothing the steps will say why."""
        with open(self.options.out / "card.log", "ab") as log:
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

    def _limit(self, to_come: Sequence[Sequence[Step]]) -> float:
        """Seconds of the next steps: their share of what is left."""
        seconds = [max(step.seconds for step in part) for part in to_come]
        return (self.end - time.time()) * seconds[0] / sum(seconds)

    def _part(self, part: Sequence[Step], limit: float, folder: Path) -> None:
        """Some steps side by side, whatever happens to them."""
        if limit < _LEAST:
            for step in part:
                self.results.skip(step.name, NO_TIME, f"{limit:.1f} s were left for it")
            self._write()
            return
        until = time.time() + limit
        for step in part:
            print(f"{step.letter} {step.name}: {step.what} [{limit:.0f} s]", flush=True)
            self._begin(step, limit, folder)
        saved = time.time()
        while self.running and time.time() < until:
            for one in [one for one in self.running if not one.group.running()]:
                _process.end([one.group])
                self._ended(one, one.group.code)
            if time.time() - saved > _SAVE:
                self._heard()
                saved = time.time()
            time.sleep(_process.POLL)
        _process.end(one.group for one in self.running)
        for one in list(self.running):
            self._ended(one, None)

    def _begin(self, step: Step, limit: float, folder: Path) -> None:
        self.results.begin(step.name, round(limit, 1), self.machine.get("device", ""))
        rows, log, began = folder / f"{step.name}.jsonl", self.options.out / f"{step.name}.log", time.time()
        rows.unlink(missing_ok=True)
        log.write_bytes(f"\n==== {step.letter} {step.name}, {time.strftime('%F %T')}, {limit:.0f} s\n".encode())
        order = {"rows": str(rows), "end": began + limit, "full": self._full(), "seed": self.options.seed}
        order |= {"out": str(self.options.out.resolve())}
        order |= {"mnist": str(self.options.mnist.resolve()) if self.options.mnist else None}
        group = Group(step.command, self._environment(step, order), log)
        self.running.append(Running(step, group, rows, log, began))

    def _heard(self) -> None:
        """Keep what the running steps have said so far."""
        for one in self.running:
            self.results.heard(one.step.name, one.rows)
        self.results.save()

    def _ended(self, one: Running, code: int | None) -> None:
        """Take over what a step has found."""
        name, seconds = one.step.name, time.time() - one.began
        self.running.remove(one)
        self.results.heard(name, one.rows)
        text = _shortened(one.log.read_bytes())
        with open(self.options.out / "card.log", "ab") as log:
            log.write(text)
        one.log.unlink()
        last = text.decode(errors="replace").strip().splitlines()[-1][:120]
        status = self.results.end(name, seconds, one.group.processor, code, last if code else "")
        print(f"{one.step.letter} {name}: {status}, {seconds:.0f} s", flush=True)
        self._write()

    def _on_cpu(self) -> bool:
        """Whether there is no accelerator: JAX says so, or says nothing where there is no tool of NVIDIA's either."""
        backend = self.machine.get("backend", "cpu")
        return backend == "cpu" or (backend == "unknown" and shutil.which("nvidia-smi") is None)

    def _full(self) -> bool:
        return not self._on_cpu() and not self.options.small

    def _environment(self, step: Step | None, order: dict[str, Any]) -> dict[str, str]:
        """Variables of a step: the checkout, not an installation, and one cache of compiled programs."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2", ORDER: json.dumps(order)}
        # Steps have processes beside them on the card (torch, children), so none takes most of its memory at once.
        ours |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self._on_cpu():  # compiled quickly: much is compiled and little computed
            ours |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
        if step and step.own_cache:
            return {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"} | ours
        if self.options.cache is not None:
            ours |= {
                "JAX_COMPILATION_CACHE_DIR": str(self.options.cache.resolve()),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        return os.environ | ours

    def _write(self) -> None:
        for step in self.steps:
            self.results.skip(step.name, NOT_THERE, "")
        self.results.save()
        names = [(step.letter, step.name) for step in self.steps]
        (self.options.out / "card.txt").write_text(self.results.table(names))


def side_by_side(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps in a row that time nothing, together; all others alone."""
    parts: list[list[Step]] = []
    for step in steps:
        if parts and not step.timed and not parts[-1][-1].timed:
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


def _shortened(text: bytes) -> bytes:
    """Cut the middle out of what is too long."""
    half = _MOST_LOG // 2
    return text if len(text) <= _MOST_LOG else text[:half] + b"\n[...]\n" + text[-half:]
