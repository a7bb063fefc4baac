"""A node with its state on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator

import jax
import numpy as np

from mocha_jax._core.pytree import Tree
from mocha_jax._files import container
from mocha_jax._files.atomic import write
from mocha_jax._files.container import Arrays, Container
from mocha_jax._files.fingerprint import fingerprint
from mocha_jax.federated import Down, Message, Node, Refused
from mocha_jax.federated._archive import leaves_of, record_of
from mocha_jax.flower._records import Header, message_bytes, message_from_bytes
from mocha_jax.flower._worker_socket import LOCK, Setup

_log = logging.getLogger("flwr")

# The file of what a node keeps, and the one for users, which is not read here.
_KEPT, WEIGHTS = "node.npz", "weights.npz"

_FIELDS: tuple[str, ...] = (*Message.integers, *Message.texts)


class NodeStore:
    """A node, with its state and its last answer in a file.

    Args:
      folder: of the file.
      node: the node.
      task: its task.
    """

    def __init__(self, folder: str, node: Node, task: int) -> None:
        self.folder, self.node, self.task = folder, node, task
        self._data = fingerprint(arrays_in(node._side))  # duals belong to samples and settings
        self._message, self._answer = "", b""
        self._state = node.init()
        self._read()

    def answer(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Answer a message: with the last answer where the message is a repeated one, and else by a round's work.

        Raises:
          Refused: it is no message that a server of this federation sends to this node; nothing is changed.
        """
        message = hashlib.sha256(message_bytes(header, arrays)).hexdigest()
        if message == self._message:
            self._export(_down(header, arrays))
            return message_from_bytes(self._answer)
        seed = header.get("seed", 0)
        if header.get("what") != "down" or any(name not in header for name in _FIELDS):
            raise Refused("Node: the server sent a message that does not belong to a round.")
        if header["task"] != self.task:
            raise Refused(f"Node: the server sent a message to task {header['task']!r}, and this is task {self.task}.")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise Refused("Node: the server sent an invalid seed.")
        down = _down(header, arrays)
        state, up = self.node.step(jax.random.key(seed), self._state, down)
        answer = message_bytes({"what": "up", **up.header}, up.arrays)
        self._write(state, message, answer)
        self._state, self._message, self._answer = state, message, answer
        self._export(down)
        return message_from_bytes(answer)

    def state_arrays(self) -> Arrays:
        """Return the arrays of the node's state."""
        return arrays_in(self._state)

    def _export(self, down: Down) -> None:
        """Write the node's own model, for local prediction; the federation does not need it."""
        try:
            export(self._path(WEIGHTS), self.node.weights(self._state, down))
        except OSError:
            _log.warning("Node: %s could not be written.", self._path(WEIGHTS), exc_info=True)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _write(self, state: Tree, message: str, answer: bytes) -> None:
        arrays = {f"state/{name}": array for name, array in leaves_of("Node", "state", state).items()}
        arrays["answer"] = np.frombuffer(answer, np.uint8)
        content = Container.of("Flower node", arrays, {"message": message, "data": self._data})
        write(self._path(_KEPT), content.to_bytes())

    def _read(self) -> None:
        try:
            kept = container.load(self._path(_KEPT), "Flower node")
            if kept.about["data"] != self._data:
                _log.warning("Node: %s belongs to other samples; it begins anew.", self.folder)
                return
            answer = kept.arrays.pop("answer").tobytes()
            arrays = {name.removeprefix("state/"): array for name, array in kept.arrays.items()}
            state = record_of("Node", self.folder, arrays, self._state)
            self._state, self._message, self._answer = state, kept.about["message"], answer
        except FileNotFoundError:
            return
        except (OSError, KeyError, ValueError):
            _log.warning("Node: %s is of another version or broken; it begins anew.", self.folder, exc_info=True)


def _down(header: Header, arrays: Arrays) -> Down:
    return Down(**{name: header[name] for name in _FIELDS}, arrays=arrays)


def open_store(folder: str, setup: Setup) -> NodeStore:
    """Make the node that a setup names, and read its state."""
    if setup["root"] and setup["root"] not in sys.path:
        sys.path.insert(0, setup["root"])
    module, _, function = setup["make_node"].partition(":")
    node = getattr(importlib.import_module(module), function)(dict(setup["config"]))
    if not isinstance(node, Node):
        raise TypeError(f"client_app: make_node must return a federated.Node, got a {type(node).__name__}.")
    return NodeStore(folder, node, setup["task"])


@contextlib.contextmanager
def locked(folder: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a node's folder; hand in whether it is held, which it is not where another process has it.

    Args:
      folder: of the node.
      wait: until it can be had.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    with open(os.path.join(folder, LOCK), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield False
            return
        yield True


def arrays_in(record: Tree) -> dict[str, np.ndarray]:
    """Return the leaves of a record by their places in it."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def export(path: str | os.PathLike[str], record: Tree) -> None:
    """Write the arrays of a record to a file that NumPy reads; an array by itself as ``weights``."""
    record = {"weights": record} if isinstance(record, jax.Array | np.ndarray) else record
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays_in(record))
    write(path, content.getvalue())
