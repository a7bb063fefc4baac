"""Networks and likelihoods in plain JSON: the name of the class, and its fields."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import numpy as np

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, fields_of


def described(record: Pytree, home: ModuleType) -> dict[str, Any] | None:
    """Write a record of the library as JSON has it; of one that a person wrote, or that holds functions, None.

    Args:
      record: a network or a likelihood.
      home: the public module that its class must be found in.
    """
    kind = type(record).__name__
    if getattr(home, kind, None) is not type(record):
        return None
    try:
        return {"class": kind, **{name: _plain(value, home) for name, value in fields_of(record).items()}}
    except TypeError:
        return None


def rebuilt(about: dict[str, Any], home: ModuleType) -> Any:
    """Make a record of what `described` wrote."""
    kind = getattr(home, str(about["class"]), None)
    if not (inspect.isclass(kind) and issubclass(kind, Pytree)):
        raise ValueError(f"this library has no {home.__name__.rpartition('.')[2]}.{about['class']}")
    return kind(**{name: _value(value, home) for name, value in about.items() if name != "class"})


def _plain(value: object, home: ModuleType) -> Any:
    if isinstance(value, Pytree):
        if (inner := described(value, home)) is None:
            raise TypeError
        return inner
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return [_plain(each, home) for each in value]
    array = check.concrete(value)
    if array is None or array.dtype.kind not in "fiub":
        raise TypeError
    return np.asarray(array, np.float64 if array.dtype.kind == "f" else None).tolist()


def _value(value: Any, home: ModuleType) -> Any:
    if isinstance(value, dict):
        return rebuilt(value, home)
    return tuple(_value(each, home) for each in value) if isinstance(value, list) else value
