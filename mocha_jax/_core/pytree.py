"""Immutable records that JAX sees as pytrees.

Every noun of the library (data, losses, regularizers, states, ...) derives from
`Pytree`. Fields are array leaves unless marked with `static()`; static fields are
part of the tree's structure, so `jit` hashes them by value and a new value
retraces, while a new array does not.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self, TypeAlias, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pickling import portable

Hyperparameter = Array | np.ndarray | np.floating | float  # an array leaf; often a scalar

# A pytree of arrays of any structure, such as a network's parameters: handed on and mapped over, not looked into.
Tree = object

# A pytree of arrays whose structure its maker knows, such as a method's shared parameters or an optimizer's state:
# taken apart by the functions that its maker hands over, so that no type checker can look into it.
PyTree: TypeAlias = Any

# The tree that a function is given and another one of its structure, which it returns.
SameTree = TypeVar("SameTree")


_Values = tuple[object, ...]

# Letters of a record that is shown, about, and entries of a vector whose values are.
_LINE, _ENTRIES = 160, 8


def static(**kwargs: Any) -> Any:
    """A field that belongs to the structure of the record, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def tree(**kwargs: Any) -> Any:
    """A field that holds a pytree of arrays, such as a network's parameters: lists in it are what they are."""
    return dataclasses.field(metadata={"tree": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, tree, dataclasses.field))
class Pytree(metaclass=abc.ABCMeta):  # noqa: B024  (its subclasses have abstract methods)
    """Base class: subclasses become frozen dataclasses registered with JAX.

    Rebuilding a record inside a transformation skips `__init__`, hence also the
    checks in `__post_init__`: those see only what a person wrote.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        meta = tuple(f.name for f in fields if f.metadata.get("static"))
        data = tuple(f.name for f in fields if not f.metadata.get("static"))

        def flatten(node: Pytree) -> tuple[_Values, _Values]:
            return tuple(getattr(node, k) for k in data), tuple(getattr(node, k) for k in meta)

        def flatten_with_keys(node: Pytree) -> tuple[_Values, _Values]:
            leaves, aux = flatten(node)
            keys = (jax.tree_util.GetAttrKey(k) for k in data)
            return tuple(zip(keys, leaves, strict=True)), aux

        def unflatten(aux: _Values, leaves: _Values) -> Pytree:
            node = object.__new__(cls)
            for name, value in zip(data + meta, tuple(leaves) + tuple(aux), strict=True):
                object.__setattr__(node, name, value)
            return node

        original, names = cls.__init__, tuple(f.name for f in fields if not f.kw_only)
        trees = {f.name for f in fields if f.metadata.get("tree")}

        def plain(name: str, value: object) -> object:
            if name in trees:
                return value
            # A list would be a subtree of numbers, where an array leaf is meant.
            return check.leaf(cls.__name__, name, value) if name in data else check.fixed(value)

        def init(self: object, *args: object, **kwargs: object) -> None:
            first = (plain(name, value) for name, value in zip(names, args, strict=False))
            original(self, *first, *args[len(names) :], **{name: plain(name, value) for name, value in kwargs.items()})

        functools.update_wrapper(init, original)
        cls.__init__ = init  # type: ignore[method-assign]
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)  # type: ignore[arg-type]

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; the checks of the constructor run again."""
        return type(self)(**{**fields_of(self), **changes})

    def exchange(self, **changes: object) -> Self:
        """A copy with some fields changed, without revalidation."""
        twin = copy.copy(self)
        vars(twin).update(changes)
        return twin

    def __getstate__(self) -> dict[str, object]:
        return {name: portable(value) for name, value in vars(self).items()}

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def __repr__(self) -> str:
        return summary(self, fields_of(self))


Relation = Array | Pytree | None  # Omega as a regularizer keeps it: an array or a record; None where it is given


def fields_of(record: Pytree) -> dict[str, Any]:
    """The fields of a record by name, in order (shallow)."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}  # type: ignore[arg-type]


@on_purpose
def summary(record: object, fields: Mapping[str, object], name: str | None = None) -> str:
    """A record in one line: numbers and short vectors by value, other arrays by type and shape.

    Of a long line what is nested goes first, then the last fields. The record goes by the name of its class, unless
    it has another one.
    """
    name, parts = name or type(record).__name__, {k: short(v) for k, v in fields.items()}
    for k, value in fields.items():
        if isinstance(value, Pytree) and sum(map(len, parts.values())) > _LINE:
            parts[k] = f"{type(value).__name__}(...)"
    shown: list[str] = []
    for k, text in parts.items():
        if shown and sum(map(len, shown)) + len(k) + len(text) > _LINE:
            shown.append(f"and {len(parts) - len(shown)} more")
            break
        shown.append(f"{k}={text}")
    return f"{name}({', '.join(shown)})"


def short(value: object) -> str:
    """A value in a few words; of arrays in a dictionary or a list how many there are."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        few = np.ndim(value) < 2 and np.size(value) <= _ENTRIES  # type: ignore[arg-type]
        numbers = check.concrete(value) if few else None
        if numbers is None or numbers.dtype.kind not in "fiub":
            return f"{value.dtype}{list(value.shape)}"
        texts = [f"{one:.6g}" if numbers.dtype.kind == "f" else str(one) for one in numbers.ravel().tolist()]
        return texts[0] if numbers.shape == () else f"[{', '.join(texts)}]"
    if isinstance(value, Pytree):
        return repr(value)
    if isinstance(value, dict) and len(value) <= _ENTRIES:
        return "{" + ", ".join(f"{k!r}: {short(v)}" for k, v in value.items()) + "}"
    leaves = jax.tree.leaves(value)
    if any(callable(leaf) for leaf in leaves):
        return str(getattr(value, "__qualname__", f"{type(value).__name__}(...)"))
    if any(hasattr(leaf, "shape") for leaf in leaves):
        return f"{len(leaves)} arrays"
    return repr(value)
