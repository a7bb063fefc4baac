"""Files of models: NumPy arrays, and a text in JSON with everything else, also of networks. Never a pickle."""

from __future__ import annotations

import inspect
import io
import json
import os
import zipfile
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, fields_of
from mocha_jax._files import atomic

_FORMAT, _VERSION = "mocha_jax model", 1


def write(
    path: str | os.PathLike[str], kind: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, object]
) -> None:
    """Write a model: its arrays by name, and ``about``, the text, as bytes in UTF-8."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'save: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        content_of = {"format": _FORMAT, "version": _VERSION, "kind": kind, **about}
        text = json.dumps(content_of, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"save: names and what is said of the training must be texts or finite numbers; {error}."
        ) from error
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, about=np.frombuffer(text.encode(), np.uint8), **arrays)
    atomic.write(path, content.getvalue())


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays of a model, and what else it says."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'load_model: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError as error:
        raise ValueError(f"load_model: path must be that of a file, and there is none at {path}.") from error
    except (OSError, ValueError) as error:  # which a null byte in the name is
        raise ValueError(f"load_model: {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:  # which knows by checksums whether a part is whole
            arrays = {name.removesuffix(".npy"): _array(parts.read(name)) for name in parts.namelist()}
        about = json.loads(arrays.pop("about").tobytes().decode(), parse_constant=_refuse)
        is_model, version = about["format"] == _FORMAT, about["version"]
    except Exception as error:  # whatever readers of zip, npy and JSON make of garbage
        raise ValueError(f"load_model: {path} is no file of a model, or it is damaged.") from error
    if not is_model:
        raise ValueError(f"load_model: {path} is no file of a model.")
    if type(version) is not int or version < 1:
        raise ValueError(f"load_model: {path} is damaged: its version must be an integer >= 1, got {version!r}.")
    if version > _VERSION:
        raise ValueError(f"load_model: {path} is of version {version}; this is a library that reads up to {_VERSION}.")
    return arrays, about


def _array(content: bytes) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


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
