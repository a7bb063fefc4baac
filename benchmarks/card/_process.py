"""A step's process group: begun, looked at, ended with all that belongs to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.card._inside import ROOT

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
POLL = 0.05  # seconds between two looks
_LAST = 5.0  # seconds for a group to be gone after SIGKILL; a process that waits for a driver may stay
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


class Group:
    """A process in a group of its own; what it and its children print goes to a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=environment, process_group=0
            )
        self.id = self._process.pid
        self.code: int | None = None  # how the first process has ended
        self.processor = 0.0  # seconds of cores that it and its children took

    def running(self) -> bool:
        """Whether the first process has not ended."""
        if self.code is None:
            with contextlib.suppress(ChildProcessError):
                pid, status, used = os.wait4(self.id, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
                    self.processor = used.ru_utime + used.ru_stime
                    self._process.returncode = self.code
        return self.code is None

    def there(self) -> bool:
        """Whether any process of the group has not ended."""
        if not self.running():
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self.id, os.WNOHANG)[0]:
                    pass
        return self._told(0)

    def _told(self, number: int) -> bool:
        try:
            os.killpg(self.id, number)
        except ProcessLookupError:
            return False
        return True


def end(groups: Iterable[Group]) -> None:
    """Ask groups to end, all at once, and kill those that do not within the grace."""
    left = [group for group in groups if group.there()]
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, _LAST)):
        for group in left:
            group._told(number)
        until = time.time() + seconds
        while left and time.time() < until:
            time.sleep(POLL)
            left = [group for group in left if group.there()]


def adopt() -> None:
    """Become the parent of those whose parent dies, to know when they have ended; where that cannot be, go on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
