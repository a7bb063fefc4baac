"""Immutable records that JAX sees as pytrees.

Every noun of the library (data, losses, regularizers, states, ...) derives from
`Pytree`. Fields are array leaves unless marked with `static()`; static fields are
part of the tree's structure, so `jit` hashes them by value and a new value
retraces, while a new array does not.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._inner_functions import portable

Hyperparameter = Array | np.ndarray | np.floating | float  # an array leaf; often a scalar


def static(**kwargs: Any) -> Any:
    """A field that belongs to the structure of the record, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
class Pytree:
    """Base class: subclasses become frozen dataclasses registered with JAX.

    Rebuilding a record inside a transformation skips `__init__`, hence also the
    checks in `__post_init__`: those see only what a person wrote.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        meta = tuple(f.name for f in fields if f.metadata.get("static"))
        data = tuple(f.name for f in fields if not f.metadata.get("static"))

        def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(getattr(node, k) for k in data), tuple(getattr(node, k) for k in meta)

        def flatten_with_keys(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            leaves, aux = flatten(node)
            keys = (jax.tree_util.GetAttrKey(k) for k in data)
            return tuple(zip(keys, leaves, strict=True)), aux

        def unflatten(aux: tuple[Any, ...], leaves: tuple[Any, ...]) -> Any:
            node = object.__new__(cls)
            for name, value in zip(data + meta, tuple(leaves) + tuple(aux), strict=True):
                object.__setattr__(node, name, value)
            return node

        given, names = cls.__init__, tuple(f.name for f in fields if not f.kw_only)

        def plain(name: str, value: Any) -> Any:
            # A list would be a subtree of numbers, where an array leaf is meant.
            return _check.leaf(cls.__name__, name, value) if name in data else _check.fixed(value)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            first = (plain(name, value) for name, value in zip(names, args, strict=False))
            given(self, *first, *args[len(names) :], **{name: plain(name, value) for name, value in kwargs.items()})

        functools.update_wrapper(init, given)
        cls.__init__ = init  # type: ignore[method-assign]
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; the checks of the constructor run again."""
        return type(self)(**{**fields_of(self), **changes})

    def __getstate__(self) -> dict[str, Any]:
        return {name: portable(value) for name, value in vars(self).items()}

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={_short(v)}" for k, v in fields_of(self).items())
        return f"{type(self).__name__}({inner})"


Record = TypeVar("Record", bound="Pytree")


def grid(make: Callable[..., Record], **axes: Any) -> Record:
    """All combinations of some settings in one record, to train all at once with `jax.vmap`.

    Args:
      make: a class of records, or a function that returns one.
      **axes: fields of the record, each with its values.

    Returns:
      A record whose array leaves have a leading axis, one entry per combination; the last setting varies fastest.

    >>> import jax, mocha_jax as mj
    >>> rivals = grid(mj.MiniBatchSdca, batch=[2, 8], beta=[1.0, 4.0])
    >>> rivals.batch.tolist(), rivals.beta.tolist()
    ([2, 2, 8, 8], [1.0, 4.0, 1.0, 4.0])
    >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
    >>> def last_gap(algorithm):
    ...     return mj.run(jax.random.key(1), algorithm, problem, num_rounds=50)[1].relative_gap[-1]
    >>> jax.vmap(last_gap)(rivals).shape
    (4,)
    """
    _check.function("grid", "make", make, "regularizers.Independent")
    if not axes:
        raise ValueError("grid: name at least one setting, e.g. grid(make, lam=[0.1, 1.0]).")
    values = [a.ravel() for a in np.meshgrid(*(_values(k, v) for k, v in axes.items()), indexing="ij")]
    size = values[0].size
    combinations = [{name: a.item() for name, a in zip(axes, row, strict=True)} for row in zip(*values, strict=True)]
    # What becomes of the numbers is up to `make`, so it makes one record of each combination. Where static fields
    # follow from them (the room for the largest batch), it is given all at once.
    records = [make(**combination) for combination in combinations]
    for record in records:
        _check.instance("grid", "what make returns", record, Pytree, "regularizers.Independent(0.1)")
    if len({str(jax.tree.structure(r)) for r in records}) == 1:
        return jax.tree.map(lambda *leaf: np.stack([np.asarray(a) for a in leaf]), *records)
    first = records[0]
    leaves = {f.name for f in dataclasses.fields(first) if not f.metadata.get("static")}  # type: ignore[arg-type]
    if not set(axes) <= leaves:
        raise ValueError(f"grid: the records differ in static fields, which cannot be mapped over; vary {leaves}.")
    record = make(**dict(zip(axes, values, strict=True)))

    def stacked(leaf: Any) -> Any:
        return np.broadcast_to(leaf, (size, *np.shape(leaf)))

    others = {name: jax.tree.map(stacked, getattr(record, name)) for name in leaves - set(axes)}
    return record.replace(**others)


def _values(name: str, given: Any) -> np.ndarray:
    """The values of one setting of a grid."""
    values = _check.concrete(given)
    if values is None or values.ndim > 1 or not values.size:
        raise ValueError(f"grid: {name} needs a list of values, at least one, got {_check.shown(given)}.")
    return values


def fields_of(record: Pytree) -> dict[str, Any]:
    """The fields of a record by name, in order (shallow)."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}  # type: ignore[arg-type]


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape != ():
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
