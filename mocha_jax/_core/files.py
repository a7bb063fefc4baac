"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid


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
    partial = _beside(target)
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:  # an interruption too
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise


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
