"""Files of models: NumPy arrays, and a text in JSON with everything else, also of networks. Never a pickle."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, fields_of
from mocha_jax._files import atomic, container
from mocha_jax._files.container import About, Arrays, Container


def write(path: str | os.PathLike[str], kind: str, arrays: Arrays, about: Mapping[str, object]) -> None:
    """Write a model: its kind, its arrays by name, and what else there is to say."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'save: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        content = Container.of("model", arrays, {"model": kind, **about})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"save: names and what is said of the training must be texts or finite numbers; {error}."
        ) from error
    atomic.write(path, content.to_bytes())


def read(path: str | os.PathLike[str]) -> tuple[Arrays, About]:
    """Read the arrays of a model, and what else it says."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'load_model: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        content = container.load(path, "model")
    except FileNotFoundError as error:
        raise ValueError(f"load_model: path must be that of a file, and there is none at {path}.") from error
    except container.Unreadable as error:
        raise ValueError(f"load_model: {error}.") from error
    except (OSError, ValueError) as error:  # which a null byte in the name is
        raise ValueError(f"load_model: {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return content.arrays, content.about


def described(record: Pytree, home: ModuleType) -> dict[str, object] | None:
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


def rebuilt(about: Mapping[str, object], home: ModuleType) -> Pytree:
    """Make a record of what `described` wrote."""
    kind = getattr(home, str(about["class"]), None)
    if not (inspect.isclass(kind) and issubclass(kind, Pytree)):
        raise ValueError(f"this library has no {home.__name__.rpartition('.')[2]}.{about['class']}")
    return kind(**{name: _value(value, home) for name, value in about.items() if name != "class"})


def _plain(value: object, home: ModuleType) -> object:
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


def _value(value: object, home: ModuleType) -> object:
    if isinstance(value, dict):
        return rebuilt(value, home)
    return tuple(_value(each, home) for each in value) if isinstance(value, list) else value
