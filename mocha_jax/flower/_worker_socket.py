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
from typing import TypedDict

import numpy as np

from mocha_jax.flower._records import Arrays, Header, message_bytes, message_from_bytes

LOG, LOCK = "worker.log", "worker.lock"

# A path of a Unix socket has at most 108 bytes on Linux, 104 elsewhere.
_LONGEST = 100
_LENGTH = struct.Struct("<Q")
_STARTS = 3

# Workers of this process, which go on without it and are not waited for.
_workers: list[subprocess.Popen[bytes]] = []


class Setup(TypedDict):
    """The settings of a worker."""

    make_node: str  # package.module:function
    root: str | None  # folder from which it is imported
    config: dict[str, object]  # of the node
    task: int
    idle: float  # seconds without a message after which the worker ends


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
    status = os.lstat(path)
    if hasattr(os, "getuid") and (not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()):
        raise PermissionError(f"client_app: {path} must be a folder of the user who runs the node.")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def address(folder: str) -> str:
    """Return the socket's path; in a folder of its own in the temporary one where the node's has too long a name."""
    path = os.path.join(os.path.abspath(folder), "socket")
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return os.path.join(private_folder(os.path.join(tempfile.gettempdir(), f"mocha-{os.getuid()}-{name}")), "socket")


def send(connection: socket.socket, header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Send a message."""
    data = message_bytes(header, arrays)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> tuple[Header, Arrays]:
    """Wait for a message.

    Raises:
      EOFError: the sender is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return message_from_bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("worker: the connection was closed")
        data += part
    return bytes(data)


def fingerprint(setup: Setup) -> str:
    """Return a hash of all settings of a worker: another node or another program needs another worker."""
    return hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()


def ask(
    folder: str, setup: Setup, header: Mapping[str, object], arrays: Mapping[str, np.ndarray],
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
    end, path, started, starts = time.monotonic() + seconds, address(folder), None, 0
    request = {**header, "worker": fingerprint(setup), "parent": os.getppid()}
    while (remaining := end - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(remaining)
                connection.connect(path)
                send(connection, request, arrays)
                answer = receive(connection)
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
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(address(folder))
            send(connection, {"what": "end", "worker": "", "parent": os.getpid()}, {})
            receive(connection)
    except (OSError, EOFError, ValueError):  # no worker is running
        pass


def _start(folder: str, setup: Setup) -> subprocess.Popen[bytes]:
    paths = [setup["root"], os.environ.get("PYTHONPATH")]
    with open(os.path.join(folder, LOG), "ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mocha_jax.flower._worker", os.path.abspath(folder)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,  # it outlives this process
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )  # fmt: skip
    assert worker.stdin is not None
    _workers[:] = [worker, *(one for one in _workers if one.poll() is None)]
    try:
        worker.stdin.write(json.dumps(setup).encode())
        worker.stdin.close()
    except BrokenPipeError:  # it has ended; the log says why
        pass
    return worker
