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
from collections.abc import Mapping
from typing import Any

from mocha_jax.flower._node_store import Keeper, keeper_of, locked
from mocha_jax.flower._worker_socket import address, mark, receive, send

_log = logging.getLogger("flwr")

# Seconds for which a worker waits for its SuperNode to restart.
_GRACE = 120.0

# Timeout for the first message of a connection, in seconds.
_PATIENCE = 60.0


def main(folder: str, setup: Mapping[str, Any]) -> None:
    """Answer messages until there are none for long, or the SuperNode is gone."""
    with locked(folder, wait=False) as mine:
        if not mine:  # there is one already
            return
        at = address(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(at)  # one that was killed has left it
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            before = os.umask(0o177)
            door.bind(at)
            os.umask(before)
            door.listen(8)
            door.settimeout(1.0)
            _log.warning("Worker %d of %s began.", os.getpid(), folder)
            try:
                _serve(door, folder, setup)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(at)
        _log.warning("Worker %d of %s ended.", os.getpid(), folder)


def _serve(door: socket.socket, folder: str, setup: Mapping[str, Any]) -> None:
    keeper: Keeper | None = None
    name, idle, parent = mark(setup), float(setup["idle"]), (0, "")
    asked = seen = time.monotonic()
    while True:
        try:
            line, _ = door.accept()
        except TimeoutError:
            now = time.monotonic()
            seen = now if _born(parent[0]) == parent[1] else seen
            if now - asked > idle or now - seen > _GRACE:
                return
            continue
        with line:
            try:
                line.settimeout(_PATIENCE)
                header, arrays = receive(line)
                pid = int(header.pop("parent", 0))
                parent = pid, _born(pid)
                if header.pop("worker", "") != name:  # the next one is of another node or program
                    send(line, {"what": "another"}, {})
                    return
                try:
                    keeper = keeper or keeper_of(folder, setup)
                    answer = keeper.answer(header, arrays)
                except Exception as error:
                    _log.exception("Worker: a message could not be answered.")
                    send(line, {"what": "failed", "kind": type(error).__name__}, {})
                    if keeper is None:  # so that a repaired node module is imported again
                        return
                else:
                    line.settimeout(None)
                    send(line, *answer)
            except (OSError, EOFError, ValueError):
                _log.warning("Worker: whoever asked is gone.", exc_info=True)
        asked = seen = time.monotonic()


def _born(pid: int) -> str:
    """The time at which a process began, so that another one of the same number is not taken for it; empty: none."""
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
