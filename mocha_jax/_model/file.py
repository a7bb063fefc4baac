"""Files of models: NumPy arrays, and a text in JSON with everything else. Never a pickle."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from mocha_jax._core import check
from mocha_jax._files import atomic

_FORMAT, _VERSION = "mocha_jax model", 1


def write(path: str | os.PathLike[str], kind: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write a model: its arrays by name, and ``about``, the text, as bytes in UTF-8."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'save: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        said = {"format": _FORMAT, "version": _VERSION, "kind": kind, **about}
        text = json.dumps(said, ensure_ascii=False, allow_nan=False)
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
        known, version = about["format"] == _FORMAT, about["version"]
    except Exception as error:  # whatever readers of zip, npy and JSON make of garbage
        raise ValueError(f"load_model: {path} is no file of a model, or it is damaged.") from error
    if not known:
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
