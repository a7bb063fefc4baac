"""A file that one solve at a time writes, whole or not at all.

Data is written to a new file with a unique name, which then replaces the old one. A solve keeps its file open and
locked from its first read or write: a second solve raises an error. The lock belongs to the file, not to a name, and
the operating system releases it however a process ends. So there is no lock file, dead processes lock nothing (unless
processes that they forked live on), and a file that they left half written can be told from one that is being written.

Without locks (Windows, some network file systems) two solves can open the same file; `Saver` in
`mocha_jax._files.checkpoint` then notices when it is about to replace a file that is not its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mocha_jax._files import atomic

try:
    import fcntl
except ImportError:  # Windows, which in turn neither removes nor renames what is open
    fcntl = None  # type: ignore[assignment]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


class OwnedFile:
    """A file of ours, from `claim` on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ours = False  # whether the file at the path is ours to replace
        self._file: IO[bytes] | None = None  # it, open and locked

    def claim(self) -> None:
        """Make sure that no other solve writes an existing file; if there is none, `replace` checks."""
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):  # to be replaced were its end
            raise OSError(errno.EINVAL, "a device or a pipe, not a file", str(self.path))
        self._clean()
        while os.path.exists(self.path):
            try:
                file = open(self.path, "rb+") if fcntl else None  # noqa: SIM115 (to be kept)
            except OSError:  # not to be written, though perhaps to be replaced
                file = None
            if file is None or (_lock(file) is not False and _is_at(file, self.path)):
                self._hold(file)
                return
            taken = _is_at(file, self.path)
            file.close()
            if taken:
                raise self._contested()

    def replace(self, write: Callable[[IO[bytes]], object]) -> None:
        """Write a new file and put it in place of the one we have."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._begin()
        atomic.install(file, write, self._put, keep_open=fcntl is not None)
        self._hold(None if file.closed else file)
        atomic.sync_folder(self.path)

    def release(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._clean()

    def _hold(self, file: IO[bytes] | None) -> None:
        old, self._file, self._ours = self._file, file, True
        if old is not None:
            old.close()

    def _begin(self) -> IO[bytes]:
        """A new file, locked before another solve could take it for an abandoned one."""
        while True:
            partial = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:12]}.partial")
            file = open(partial, "xb")  # noqa: SIM115 (to be kept)
            if _lock(file) is not False and _is_at(file, partial):
                return file
            file.close()

    def _put(self, partial: str) -> None:
        if self._ours:
            os.replace(partial, self.path)
            return
        try:
            os.link(partial, self.path)  # unlike a replacement it fails where someone else was first
        except FileExistsError:
            raise self._contested() from None
        except OSError:  # not every file system has links
            if os.path.exists(self.path):
                raise self._contested() from None
            os.replace(partial, self.path)
        else:
            with contextlib.suppress(OSError):
                os.remove(partial)

    def _contested(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is in use: another solve, which is still running, saves to it; wait for that one or end it, "
            f"or choose another path."
        )

    def _clean(self) -> None:
        """Remove what writers of this file who are no more left half written."""
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.([0-9a-f]{{12}}\.)?partial")
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path.parent):
                if pattern.fullmatch(name):
                    remove_if_abandoned(self.path.with_name(name))


def _lock(file: IO[bytes]) -> bool | None:
    """Try to lock the file; True if it is ours now, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Tell whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def remove_if_abandoned(partial: Path) -> None:
    """Remove a file unless a process has it open and locked."""
    with contextlib.suppress(OSError):
        if fcntl is None:
            partial.unlink()
            return
        with open(partial, "rb+") as file:
            if _lock(file):
                partial.unlink()
