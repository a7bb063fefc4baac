"""The worker of a node: it compiles once, and answers messages at a Unix socket.

``python -m mocha_jax.flower._worker FOLDER`` with its setup as JSON at the standard input; `client_app` starts it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time

from mocha_jax.flower._node_store import NodeStore, locked, open_store
from mocha_jax.flower._worker_socket import Setup, address, fingerprint, receive, send

_log = logging.getLogger("flwr")

# Seconds for which a worker waits for its SuperNode to restart.
_GRACE = 120.0

# Timeout for the first message of a connection, in seconds.
_PATIENCE = 60.0


def main(folder: str, setup: Setup) -> None:
    """Answer messages until there are none for long, or the SuperNode is gone."""
    with locked(folder, wait=False) as acquired:
        if not acquired:  # another worker runs
            return
        path = address(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a worker that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            before = os.umask(0o177)
            listener.bind(path)
            os.umask(before)
            listener.listen(8)
            listener.settimeout(1.0)
            _log.warning("Worker %d of %s began.", os.getpid(), folder)
            try:
                _serve(listener, folder, setup)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        _log.warning("Worker %d of %s ended.", os.getpid(), folder)


def _serve(listener: socket.socket, folder: str, setup: Setup) -> None:
    store: NodeStore | None = None
    name, idle, parent = fingerprint(setup), float(setup["idle"]), (0, "")
    last_message = last_parent = time.monotonic()
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            now = time.monotonic()
            last_parent = now if _start_time(parent[0]) == parent[1] else last_parent
            if now - last_message > idle or now - last_parent > _GRACE:
                return
            continue
        with connection:
            try:
                connection.settimeout(_PATIENCE)
                header, arrays = receive(connection)
                pid = int(header.pop("parent", 0))
                parent = pid, _start_time(pid)
                if header.pop("worker", "") != name:  # the next one is of another node or program
                    send(connection, {"what": "another"}, {})
                    return
                try:
                    store = store or open_store(folder, setup)
                    answer = store.answer(header, arrays)
                except Exception as error:
                    _log.exception("Worker: a message could not be answered.")
                    send(connection, {"what": "failed", "kind": type(error).__name__}, {})
                    if store is None:  # so that a repaired node module is imported again
                        return
                else:
                    connection.settimeout(None)
                    send(connection, *answer)
            except (OSError, EOFError, ValueError):
                _log.warning("Worker: the connection to the process that asked is lost.", exc_info=True)
        last_message = last_parent = time.monotonic()


def _start_time(pid: int) -> str:
    """The time at which a process began, which tells it from a later one of the same number; empty: there is none."""
    if pid <= 0:
        return ""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        pass
    if os.path.exists("/proc/self/stat"):
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    main(sys.argv[1], json.load(sys.stdin))
