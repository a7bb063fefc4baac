"""The connection to a node's worker process: a Unix socket in a folder with mode 0700."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from mocha_jax.flower._records import Arrays, Header, from_bytes, to_bytes

LOG, LOCK = "worker.log", "worker.lock"

# A path of a Unix socket has at most 108 bytes on Linux, 104 elsewhere.
_LONGEST = 100
_LENGTH = struct.Struct("<Q")
_STARTS = 3

# Workers of this process, which go on without it and are not waited for.
_workers: list[subprocess.Popen[bytes]] = []


class WorkerError(RuntimeError):
    """A worker that does not start; its log says why."""


def possible() -> bool:
    """Return whether there are Unix sockets and locks here."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return False
    return hasattr(socket, "AF_UNIX")


def private_folder(path: str) -> str:
    """Make a folder, if need be, that is of this user alone, and return its path."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if hasattr(os, "getuid") and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()):
        raise PermissionError(f"client_app: {path} must be a folder of the user who runs the node.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def address(folder: str) -> str:
    """Return the socket's path; in a folder of its own in the temporary one where the node's has too long a name."""
    path = os.path.join(os.path.abspath(folder), "line")
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return os.path.join(private_folder(os.path.join(tempfile.gettempdir(), f"mocha-{os.getuid()}-{name}")), "line")


def send(line: socket.socket, header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Send a message."""
    data = to_bytes(header, arrays)
    line.sendall(_LENGTH.pack(len(data)) + data)


def receive(line: socket.socket) -> tuple[Header, Arrays]:
    """Wait for a message.

    Raises:
      EOFError: the sender is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return from_bytes(_exactly(line, length))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = line.recv(min(size - len(data), 1 << 20))
        if not some:
            raise EOFError("worker: the line was cut")
        data += some
    return bytes(data)


def mark(setup: Mapping[str, Any]) -> str:
    """Return a name of all settings of a worker: another node or another program needs another worker."""
    return hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()


def ask(
    folder: str, setup: Mapping[str, Any], header: Mapping[str, object], arrays: Mapping[str, np.ndarray],
    seconds: float,
) -> tuple[Header, Arrays]:  # fmt: skip
    """Send a message to the node's worker and wait for the answer; start the worker if none runs.

    A worker that dies at work is started anew and asked again: it repeats the answer if it had got so far.

    Args:
      folder: of the node's state.
      setup: what the worker is started with.
      header: of the message.
      arrays: of the message.
      seconds: how long an answer is waited for.

    Raises:
      TimeoutError: there is no answer.
      WorkerError: it does not start.
    """
    end, at, started, starts = time.monotonic() + seconds, address(folder), None, 0
    asked = {**header, "worker": mark(setup), "parent": os.getppid()}
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(left)
                line.connect(at)
                send(line, asked, arrays)
                answer = receive(line)
            if answer[0].get("what") != "another":
                return answer
        except (FileNotFoundError, ConnectionError, EOFError):
            if started is None or started.poll() is not None:
                # One that ends with 0 has met another one that holds the lock.
                starts += started is None or started.returncode != 0
                if starts > _STARTS:
                    raise WorkerError(f"client_app: the worker ends at once; {folder}/{LOG} says why.") from None
                started = _start(folder, setup)
        time.sleep(0.02)
    raise TimeoutError(f"client_app: the worker of {folder} did not answer in {seconds:.0f} s.")


def dismiss(folder: str) -> None:
    """Tell a node's worker to end, if there is one."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(10.0)
            line.connect(address(folder))
            send(line, {"what": "end", "worker": "", "parent": os.getpid()}, {})
            receive(line)
    except (OSError, EOFError, ValueError):  # no worker is running
        pass


def _start(folder: str, setup: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    with open(os.path.join(folder, LOG), "ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mocha_jax.flower._worker", os.path.abspath(folder)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,  # it outlives this process
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*_paths(setup), *_given()])},
        )  # fmt: skip
    assert worker.stdin is not None
    _workers[:] = [worker, *(one for one in _workers if one.poll() is None)]
    try:
        worker.stdin.write(json.dumps(dict(setup)).encode())
        worker.stdin.close()
    except BrokenPipeError:  # it is gone; the log says why
        pass
    return worker


def _paths(setup: Mapping[str, Any]) -> list[str]:
    return [str(setup["root"])] if setup.get("root") else []


def _given() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]
