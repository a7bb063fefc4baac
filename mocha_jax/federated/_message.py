"""Messages between nodes and server: small records of arrays, and their validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from mocha_jax._core.pytree import Tree

# The version of the messages' form. Nodes and servers refuse messages of another one.
VERSION = 1

_LARGEST_ROUND = 2**31 - 1
_INTEGERS = (int, *{np.dtype(f"{sign}{size}").type for sign in "iu" for size in (1, 2, 4, 8)})
_SHOWN = 40  # characters of a sent value


class Refused(ValueError):
    """A refused message, in one sentence that names its sender."""


@dataclasses.dataclass(frozen=True, repr=False)
class Message:
    """The form of messages in both directions.

    Args:
      federation: the name of the federation; messages of others are refused.
      task: the task of the node that it goes to or comes from.
      round: the round that it belongs to, from 1.
      incarnation: a number of the server's, another one after each of its restarts.
      held: the round of the node's last answer that the server holds, 0 for none; of an answer below 0 where the node
        had gone further than that.
      kind: the name of the record that its arrays make up.
      arrays: NumPy arrays by their names.
      version: of the form of messages.
    """

    federation: str
    task: int
    round: int
    incarnation: int
    held: int
    kind: str
    arrays: Mapping[str, np.ndarray]
    version: int = VERSION

    integers: ClassVar[tuple[str, ...]] = ("version", "task", "round", "incarnation", "held")
    texts: ClassVar[tuple[str, ...]] = ("federation", "kind")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind} of round {self.round}, task {self.task}, {self.nbytes} bytes)"

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


def check_header(owner: str, sender: str, message: object, kind: type[Message], federation: str | None) -> None:
    """Refuse what is no such message, of another version or of another federation.

    Nothing of a message is called before its type is known to be one of Python's or NumPy's own: an answer of whatever
    class, with whatever methods, can do no more than be refused.

    Args:
      owner: the caller, for error messages.
      sender: who is said to have sent it.
      message: anything.
      kind: `Up` or `Down`.
      federation: the name that it must have; None for any.
    """

    def refuse(why: str) -> Refused:
        return Refused(f"{owner}: {sender} {why}.")

    if type(message) is not kind:
        raise refuse(f"sent {_named(message)} where a federated.{kind.__name__} is wanted")
    assert isinstance(message, kind)
    for name in Message.integers:
        value = getattr(message, name, None)
        if type(value) not in _INTEGERS:
            raise refuse(f"sent {shown(value)} for the message's {name}, which must be an integer")
        if abs(int(cast(int, value))) > _LARGEST_ROUND:
            raise refuse(f"sent {shown(value)} for the message's {name}, which must fit in 32 bits")
    for name in Message.texts:
        if type(value := getattr(message, name, None)) is not str:
            raise refuse(f"sent {shown(value)} for the message's {name}, which must be a text")
    if message.version != VERSION:
        raise refuse(f"speaks version {message.version} of messages, where {VERSION} is spoken here")
    if federation is not None and message.federation != federation:
        raise refuse(f"belongs to the federation {shown(message.federation)}, not to {shown(federation)}")


def check_arrays(owner: str, sender: str, message: Message, like: Mapping[str, Tree]) -> Tree:
    """The record of a message whose arrays have the names, shapes and dtypes that they must have, and are finite.

    Args:
      owner: the caller, for error messages.
      sender: who is said to have sent it.
      message: one with a good header.
      like: the records that it may be, with their axis of nodes, by their names.
    """

    def refuse(why: str) -> Refused:
        return Refused(f"{owner}: {sender} {why}.")

    if message.kind not in like:
        raise refuse(f"sent a record {shown(message.kind)}, where one of {', '.join(sorted(like))} is wanted")
    wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(like[message.kind])[0]}
    arrays: object = getattr(message, "arrays", None)
    if type(arrays) is not dict:
        raise refuse(f"sent {shown(arrays)} where a dict of names and arrays is wanted")
    if unexpected := [name for name in arrays if type(name) is not str or name not in wanted]:
        raise refuse(f"sent an array {shown(unexpected[0])}, which a {message.kind} has not")
    if missing := [name for name in wanted if name not in arrays]:
        raise refuse(f"sent no {missing[0]}, which a {message.kind} must have")
    checked = {}
    for name, array in arrays.items():
        shape, dtype = wanted[name].shape[1:], np.dtype(wanted[name].dtype)
        if type(array) is not np.ndarray and type(array) is not dtype.type:
            raise refuse(f"sent {name} as {_named(array)}, which must be a NumPy array of {dtype}")
        if array.shape != shape or array.dtype != dtype:
            raise refuse(f"sent {name} as {_form(array)}, which must be {dtype}{list(shape)}")
        checked[name] = np.array(array)  # a copy: the array may change after its check
        if jnp.issubdtype(dtype, jnp.floating) and not np.isfinite(checked[name]).all():
            raise refuse(f"sent {name} with NaN or infinite numbers")
    return jax.tree_util.tree_map_with_path(lambda path, _: checked[_name(path)][None], like[message.kind])


def plain_integer(value: object) -> int | None:
    """The integer that a value of Python or NumPy is; None for other types, which might only pretend to be one."""
    return int(cast(int, value)) if type(value) in _INTEGERS else None


def shown(value: object) -> str:
    """A value in a few characters and on one line; of what is no plain value the type, for its `repr` may do anything.

    Examples:
      >>> shown("a text"), shown(10**9999), shown([1, 2])
      ("'a text'", 'an integer of 33216 bits', 'an object of type list')
    """
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if type(value) in (str, bytes):
        return _cut(repr(cast(str, value)[:_SHOWN]))
    if type(value) is np.ndarray:
        return f"an array {_form(value)}"
    return _cut(repr(value)) if value is None or type(value) in (*_INTEGERS, bool, float) else _named(value)


def _named(value: object) -> str:
    # Not `type(value).__name__`: a class of classes may have one of its own.
    name = type.__dict__["__name__"].__get__(type(value))
    return f"an object of type {_cut(''.join(c for c in name if c.isprintable()))}"


def _form(array: np.ndarray) -> str:
    return _cut(f"{array.dtype.name}{list(array.shape)}" if array.dtype.isnative else f"{array.dtype}{[*array.shape]}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
