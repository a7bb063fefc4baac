"""What a step knows and says: its time, its sizes, its figures. Nothing of JAX is imported here.

A step is a module with a function that takes an `Inside`, and ends with ``step(measure)``. What it says is appended to
a file at once, a line of JSON each, so that nothing is lost when the process is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ORDER = "MOCHA_JAX_CARD"  # the environment variable that holds what a step is to do, as JSON

# What `mocha_jax._driver.config` says when a kernel was left for the loops: then a figure is not of the kernel.
_FALLBACK = "fails on this machine"


class Child(NamedTuple):
    """How a process that a step started has ended."""

    code: int | None  # None: out of time, killed
    output: str

    @property
    def results(self) -> list[dict[str, Any]]:
        """The lines of its output that are records of JSON."""
        return _records(self.output)

    def why(self) -> str:
        """Why there are no results."""
        return "out of time" if self.code is None else f"exit status {self.code}, see the log"


class Inside:
    """One step, from its own process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.rows = Path(order["rows"])
        self.end: float = order["end"]  # in seconds of `time.time`
        self.full: bool = order["full"]  # whether the sizes are those of an accelerator; else tiny ones
        self.seed: int = order["seed"]
        self.out = Path(order["out"])
        self.mnist = Path(order["mnist"]) if order.get("mnist") else None
        self.worker: int = order.get("worker", 0)
        self.workers: int = order.get("workers", 1)
        self._compiling: IO[str] | None = None
        if "turns" in order:
            self._compiling = open(order["turns"], "a")  # noqa: SIM115
            fcntl.flock(self._compiling, fcntl.LOCK_SH)

    @classmethod
    def from_environment(cls) -> Inside:
        """The order of `benchmarks.card`."""
        if ORDER not in os.environ:
            raise SystemExit("This is a step of benchmarks.card: run python -m benchmarks.card --only NAME.")
        return cls(json.loads(os.environ[ORDER]))

    def left(self) -> float:
        """Seconds until the process is killed."""
        return self.end - time.time()

    def figure(
        self, what: str, value: float, unit: str, *, predicted: float | None = None, spread: float | None = None,
        note: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """A measured figure, a line of the table.

        Args:
          what: was measured.
          value: in this unit; the median where it was measured several times.
          unit: such as ``"us"``.
          predicted: in the same unit; the table marks what is off by more than 1.5 times.
          spread: the middle half of the measurements, as a share of the median.
          note: for the end of the line.
          **more: what the JSON alone shall have.
        """
        said = {"what": what, "value": value, "unit": unit, "predicted": predicted, "spread": spread, "note": note}
        self._write({"figure": said | more})
        beside = f" (predicted {predicted:.4g})" if predicted is not None else ""
        print(f"{what}: {value:.4g} {unit}{beside} {note}", flush=True)

    def detail(self, **numbers: Any) -> None:
        """What the JSON alone shall have."""
        self._write({"detail": numbers})

    def note(self, text: str) -> None:
        """A sentence for the table."""
        self._write({"note": text})
        print(text, flush=True)

    def wrong(self, text: str) -> None:
        """Something that must not be: the step counts as wrong."""
        self._write({"wrong": text})
        print(f"WRONG: {text}", flush=True)

    def unfinished(self, text: str) -> None:
        """What was planned and not done for lack of time: another run begins this step again."""
        self._write({"unfinished": text})
        print(f"not done: {text}", flush=True)

    def left_out(self, text: str) -> None:
        """Why there is nothing to do on this machine."""
        self._write({"left_out": text})
        print(f"left out: {text}", flush=True)

    def details(self) -> list[dict[str, Any]]:
        """The details that this step and its children have written so far."""
        return [line["detail"] for line in read(self.rows) if "detail" in line]

    def child(
        self, arguments: Iterable[str], *, seconds: float | None = None, environment: dict[str, str] | None = None,
        heard: bool = True, **order: Any,
    ) -> Child:  # fmt: skip
        """Run Python with these arguments until it ends or is out of time; what it prints goes to the log.

        It belongs to the process group of the step, and so ends with it at the latest.

        Args:
          arguments: such as ``["-m", "benchmarks.scale"]``.
          seconds: at most; default those that are left but two.
          environment: variables to set.
          heard: whether its output is wanted, which then comes to the log when it has ended; errors come at once.
          **order: what differs in the order that it gets.
        """
        limit = max(min(seconds or 1e9, self.left() - 3.0), 1.0)
        command = [sys.executable, *arguments]
        print(f"$ python {' '.join(command[1:])}  [{limit:.0f} s]", flush=True)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE if heard else None, cwd=ROOT,
            env=os.environ | (environment or {}) | {ORDER: json.dumps(self.order | order)},
        )  # fmt: skip
        in_time, output = True, b""
        for ask, seconds in ((None, limit), (process.terminate, 1.0), (process.kill, 0.5)):
            if ask is not None:
                in_time = False
                ask()
            try:
                output = process.communicate(timeout=seconds)[0] or b""
                break
            except subprocess.TimeoutExpired as late:  # its own children may hold the pipe when it is gone
                output = late.stdout or b""
        process.poll()
        if process.stdout is not None:
            process.stdout.close()
        text = output.decode(errors="replace")
        sys.stdout.write(text)
        sys.stdout.flush()
        return Child(process.returncode if in_time else None, text)

    def share_among(self, module: str, workers: int) -> None:
        """Run a module as so many processes at once, each with a number of its own; they write rows themselves."""
        self._at_once({f"process {w}": (["-m", module], {}, {"worker": w, "workers": workers}) for w in range(workers)})

    def apart(
        self, module: str, parts: Mapping[str, Mapping[str, str]], part: Callable[[Inside, str], None]
    ) -> None:  # fmt: skip
        """Run each part of a step by a process of its own: all compile at once, and take times one after the other.

        Tiny ones are run here, one after the other, unless they need another environment.

        Args:
          module: this one, run with the name of a part.
          parts: variables of the environment by name.
          part: what to do.
        """
        mine = {} if self.full else {name: more for name, more in parts.items() if not more}
        with scratch() as folder:
            turns = {"turns": str(Path(folder) / "turns"), "patience": 0.55 * self.left(), "worker": 0}
            others = {name: more for name, more in parts.items() if name not in mine}
            self._at_once({name: (["-m", module, name], dict(more), turns) for name, more in others.items()})
        for name in mine:
            part(self, name)

    def _at_once(self, children: Mapping[str, tuple[list[str], dict[str, str], dict[str, Any]]]) -> None:
        """Children beside each other, which must be over two seconds before the step's own end."""

        def run(name: str) -> None:
            arguments, environment, order = children[name]
            found = self.child(arguments, environment=environment, heard=False, end=self.end - 4.0, **order)
            if found.code is None:
                self.unfinished(f"{name}: out of time")
            elif found.code != 0:
                self.wrong(f"{name}: {found.why()}")

        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """When no other part compiles any more, or after some patience, and one part at a time: times are taken."""
        if self._compiling is None:
            yield
            return
        fcntl.flock(self._compiling, fcntl.LOCK_UN)
        until = time.time() + self.order["patience"]
        with open(self.order["turns"], "a") as turn:
            while time.time() < until and not _locked(turn):
                time.sleep(0.05)
            yield

    def _write(self, line: dict[str, Any]) -> None:
        with open(self.rows, "a") as file:
            file.write(json.dumps(_plain(line)) + "\n")


def step(measure: Callable[[Inside], None], part: Callable[[Inside, str], None] | None = None) -> None:
    """Run a step, a worker of it, or a part, to its end."""
    here = Inside.from_environment()
    faulthandler.register(signal.SIGTERM, chain=True)  # where it was at its limit goes to the log
    _end_with_parent()
    _listen(here)
    code = 0
    try:
        if part is not None and len(sys.argv) > 1:
            part(here, sys.argv[1])
        else:
            measure(here)
        if "worker" not in here.order:
            here._write({"end": True})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still compile would keep the process


def read(path: Path) -> list[dict[str, Any]]:
    """The lines that were written to their end."""
    return _records(path.read_text(errors="replace")) if path.exists() else []


def _records(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:  # cut off by a kill
                continue
    return found


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is gone afterwards."""
    return tempfile.TemporaryDirectory(prefix="mocha_jax_card_", ignore_cleanup_errors=True)


def _plain(value: Any) -> Any:
    """As JSON has it: numbers of NumPy become Python's, what is not finite becomes a string."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _end_with_parent() -> None:
    """End, with all children, when whoever started this process is gone: nothing may be left on the card."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _listen(here: Inside) -> None:
    """A kernel that was replaced by the loops is an error here, not a warning."""
    show = warnings.showwarning

    def heard(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if _FALLBACK in str(message):
            here.wrong(str(message))
        show(message, category, *rest, **more)

    warnings.showwarning = heard
