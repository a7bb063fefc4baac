"""Messages between nodes and server: small records of arrays, and what they must be to be believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from mocha_jax._core.pytree import Tree

# Of the messages' form. Nodes and servers of another one do not understand each other, and say so.
VERSION = 1

_LARGEST_ROUND = 2**31 - 1


class Refused(ValueError):
    """A message that is not believed, in one sentence that names its sender."""


@dataclasses.dataclass(frozen=True)
class Message:
    """The form of messages in both directions.

    Args:
      federation: the name of the federation; messages of others are refused.
      task: the task of the node that it goes to or comes from.
      round: the round that it belongs to, from 1.
      life: a number of the server's, another one after each of its restarts.
      held: the round of the node's last answer that the server holds, 0 for none; of an answer below 0 where the node
        had gone further than that.
      kind: the name of the record that its arrays make up.
      arrays: NumPy arrays by their names.
      version: of the form of messages.
    """

    federation: str
    task: int
    round: int
    life: int
    held: int
    kind: str
    arrays: Mapping[str, np.ndarray]
    version: int = VERSION

    integers: ClassVar[tuple[str, ...]] = ("version", "task", "round", "life", "held")
    texts: ClassVar[tuple[str, ...]] = ("federation", "kind")

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes; what says to whom they belong comes on top."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def header(self) -> dict[str, int | str]:
        """Return all but the arrays, by name."""
        return {name: getattr(self, name) for name in (*self.integers, *self.texts)}


class Down(Message):
    """A message from the server to a node."""


class Up(Message):
    """A node's answer."""


def arrays_of(record: Tree) -> dict[str, np.ndarray]:
    """Name the arrays of a record of one node, and leave out the axis of nodes: ``terms.size`` and so on."""
    leaves = jax.tree_util.tree_flatten_with_path(record)[0]
    return {_name(path): np.asarray(leaf)[0] for path, leaf in leaves}


def record_of(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The record of one node, as `like` is, from its arrays."""
    return jax.tree_util.tree_map_with_path(lambda path, _: np.asarray(arrays[_name(path)])[None], like)


def check_header(owner: str, sender: str, message: object, kind: type[Message], federation: str | None) -> None:
    """Refuse what is no such message, of another version or of another federation.

    Args:
      owner: whoever asks.
      sender: who is said to have sent it.
      message: anything.
      kind: `Up` or `Down`.
      federation: the name that it must have; None for any.
    """

    def refuse(why: str) -> Refused:
        return Refused(f"{owner}: {sender} {why}.")

    if not isinstance(message, kind):
        raise refuse(f"sent a {type(message).__name__} where an answer is wanted, a federated.{kind.__name__}")
    for name in Message.integers:
        value = getattr(message, name)
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise refuse(f"sent {_shown(value)} for the message's {name}, which must be an integer")
        if abs(int(value)) > _LARGEST_ROUND:
            raise refuse(f"sent {_shown(value)} for the message's {name}, which must fit in 32 bits")
    for name in Message.texts:
        if not isinstance(getattr(message, name), str):
            raise refuse(f"sent {_shown(getattr(message, name))} for the message's {name}, which must be a text")
    if message.version != VERSION:
        raise refuse(f"speaks version {message.version} of messages, where {VERSION} is spoken here")
    if federation is not None and message.federation != federation:
        raise refuse(f"belongs to the federation {_shown(message.federation)}, not to {federation!r}")


def check_arrays(owner: str, sender: str, message: Message, like: Mapping[str, Tree]) -> Tree:
    """The record of a message whose arrays have the names, shapes and dtypes that they must have, and are finite.

    Args:
      owner: whoever asks.
      sender: who is said to have sent it.
      message: one with a good header.
      like: the records that it may be, with their axis of nodes, by their names.
    """

    def refuse(why: str) -> Refused:
        return Refused(f"{owner}: {sender} {why}.")

    if message.kind not in like:
        raise refuse(f"sent a record {_shown(message.kind)}, where one of {', '.join(sorted(like))} is wanted")
    wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(like[message.kind])[0]}
    arrays = message.arrays
    if not isinstance(arrays, Mapping):
        raise refuse(f"sent {_shown(arrays)} where a mapping of names to arrays is wanted")
    for name in wanted:
        if name not in arrays:
            raise refuse(f"sent no {name}, which a {message.kind} must have")
    for name, array in arrays.items():
        if name not in wanted:
            raise refuse(f"sent {_shown(name)}, which a {message.kind} has not")
        shape, dtype = wanted[name].shape[1:], np.dtype(wanted[name].dtype)
        if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
            raise refuse(f"sent {name} as a {type(array).__name__}, which must be an array of NumPy")
        if array.shape != shape or array.dtype != dtype:
            raise refuse(
                f"sent {name} as {array.dtype}{list(array.shape)}, which must be {dtype}{list(shape)}"
            )  # fmt: skip
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise refuse(f"sent {name} with NaN or infinite numbers")
    return record_of(like[message.kind], arrays)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shown(value: object) -> str:
    """A value in a few characters and on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
