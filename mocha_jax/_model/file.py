"""Files of models: NumPy arrays, and a text in JSON with everything else. Never a pickle."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from mocha_jax._core import check

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
    half_written = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(half_written, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, about=np.frombuffer(text.encode(), np.uint8), **arrays)
        os.replace(half_written, path)
    finally:
        if os.path.exists(half_written):
            os.remove(half_written)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays of a model, and what else it says."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'load_model: path must be that of a file such as "model.npz", got {check.shown(path)}.')
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes().decode())
        known = about["format"] == _FORMAT
    except FileNotFoundError as error:
        raise ValueError(f"load_model: path must be that of a file, and there is none at {path}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"load_model: {path} is no file of a model, or it is damaged.") from error
    if not known:
        raise ValueError(f"load_model: {path} is no file of a model.")
    if about["version"] > _VERSION:
        raise ValueError(
            f"load_model: {path} is of version {about['version']}; this is a library that reads up to {_VERSION}."
        )
    return arrays, about
