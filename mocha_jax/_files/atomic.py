"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from typing import IO


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file, which then is the new one or, whatever goes wrong, the old one.

    They go to a new file beside it with a unique name, which takes its place once it is on the disk. A link
    is followed: its target is replaced, not the link. A device or a pipe is written into.

    Args:
      path: of the file, in a folder that exists.
      data: all of its content.

    Raises:
      OSError: it cannot be written.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):  # of a folder this says that it is one
        with open(target, "wb") as device:
            device.write(data)
        return
    new = open(_beside(target), "xb")  # noqa: SIM115 (`install` closes it)
    install(new, lambda file: file.write(data), lambda name: os.replace(name, target))
    sync_folder(target)


def install(
    new: IO[bytes], fill: Callable[[IO[bytes]], object], put: Callable[[str], object], *, keep_open: bool = False
) -> None:
    """Fill a new file, and put it in its place once it is on the disk; remove it if any of that fails.

    Args:
      new: the file, open and empty.
      fill: writes into it.
      put: puts the file of that name in its place.
      keep_open: whether it stays open, e.g. because it is locked.
    """
    try:
        fill(new)
        new.flush()
        os.fsync(new.fileno())
        if not keep_open:
            new.close()
        put(new.name)
    except BaseException:  # an interruption too
        for undo in (new.close, lambda: os.remove(new.name)):
            with contextlib.suppress(OSError):
                undo()
        raise


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Bring the name of a file to the disk too."""
    with contextlib.suppress(OSError):  # not every system lets a folder be synced
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def make_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file if it is missing, and check now whether `write` could write there.

    Args:
      path: of the file, which is left as it is.

    Raises:
      OSError: it could not.
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    trial = _beside(target)
    with open(trial, "xb"):
        pass
    os.remove(trial)


def _beside(target: str) -> str:
    """A name for a new file in the folder of another."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}.new")
