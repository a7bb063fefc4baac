"""Checkpoints of a solve: one npz file, replaced atomically, refused where it does not belong.

The file holds the arrays of `Progress` and `History`, a digest of them, and a fingerprint of
everything that determines the run: data, loss, regularizer, algorithm, systems, key. How many
rounds to run and when to stop are not part of it, so a finished solve can be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._history import History, Progress
from mocha_jax._pytree import Pytree, fields_of
from mocha_jax._spread import Spread, fetched, place

_FORMAT = "mocha_jax checkpoint 4"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


class Saver:
    """Saves to and loads from one file; without a file it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None, key: Array, *run: Any) -> None:
        self._path = None if path is None else Path(path)
        self._fingerprint = "" if path is None else fingerprint(jax.random.key_data(key), *run)

    def __call__(self, progress: Progress, history: History) -> None:
        """Write everything to a new file, then put it in place of the old one."""
        if self._path is None:
            return
        arrays = {f"progress_{i}": _plain(fetched(a)) for i, a in enumerate(jax.tree.leaves(progress))}
        arrays |= {f"history_{i}": _plain(np.asarray(a)) for i, a in enumerate(jax.tree.leaves(history))}
        if jax.process_index() == 0:
            self._write(self._path, arrays)

    def _write(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        arrays |= {"format": np.array(_FORMAT), "fingerprint": np.array(self._fingerprint)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        with open(partial, "wb") as file:
            np.savez(file, digest=np.array(_digest(arrays)), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        with contextlib.suppress(OSError):  # not every system lets a folder be synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def load(self, fresh: Progress, blank: History) -> tuple[Progress, History]:
        """The saved run where there is one, else nothing done and nothing recorded."""
        if self._path is None or not self._path.exists():
            return fresh, blank
        arrays = self._read()
        digest = str(arrays.pop("digest", ""))
        if str(arrays.get("format")) != _FORMAT:
            raise CheckpointError(f"{self._path} is not a checkpoint of this library; choose another path.")
        if digest != _digest(arrays):
            raise CheckpointError(f"{self._path} is damaged: its digest does not match; delete it to start afresh.")
        if str(arrays["fingerprint"]) != self._fingerprint:
            raise CheckpointError(
                f"{self._path} belongs to another run: its data, loss, regularizer, algorithm, systems, cost, watch, "
                f"key or record_every differ from this call's (nodes that `shard` adds to fill up the devices are data "
                f"too); choose another path, or delete it to start afresh."
            )
        leaves, structure = jax.tree.flatten(fresh)
        saved = [_like(arrays[f"progress_{i}"], leaf) for i, leaf in enumerate(leaves)]
        blanks = jax.tree.leaves(blank)
        records = [_native(arrays[f"history_{i}"], np.asarray(one).dtype) for i, one in enumerate(blanks)]
        return jax.tree.unflatten(structure, saved), jax.tree.unflatten(jax.tree.structure(blank), records)

    def _read(self) -> dict[str, np.ndarray]:
        assert self._path is not None
        if not self._path.is_file():
            raise CheckpointError(f"{self._path} is not a file; choose another path.")
        with open(self._path, "rb") as raw:
            try:
                with np.load(raw, allow_pickle=False) as file:
                    return {name: file[name] for name in file.files}
            except Exception as error:  # whatever a reader of zip and npy files makes of garbage
                raise CheckpointError(
                    f"{self._path} is damaged or not a checkpoint; delete it to start afresh."
                ) from error


def _plain(array: np.ndarray) -> np.ndarray:
    """The same bytes in a dtype that npz files know; bfloat16 is none."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _like(array: np.ndarray, leaf: Array) -> Array:
    """What was saved of an array, again in its dtype and where it was."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return place(_native(array, leaf.dtype), leaf.sharding)


def _native(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What `_plain` was given."""
    return array.view(dtype) if dtype.kind == "V" else array


def _digest(arrays: dict[str, np.ndarray]) -> str:
    return fingerprint(*((name, arrays[name]) for name in sorted(arrays)))


def fingerprint(*parts: Any) -> str:
    """A digest of records, arrays and plain values by content, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, parts)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, reading: tuple[int, ...] = ()) -> None:
    """Everything that a value consists of; `reading` are the objects that it is part of."""
    if id(value) in reading:
        digest.update(f"again {reading.index(id(value))};".encode())
        return

    def feed(part: Any) -> None:
        _feed(digest, part, (*reading, id(value)))

    if isinstance(value, Pytree):
        digest.update(f"{type(value).__module__}.{type(value).__qualname__}(".encode())
        for name, field in fields_of(value).items():
            digest.update(f"{name}=".encode())
            feed(field)
        digest.update(b")")
    elif isinstance(value, Spread):
        feed(None)  # where a problem is solved is no part of what it is
    elif isinstance(value, types.CodeType):
        digest.update(value.co_code)
        feed((value.co_names, value.co_consts))
    elif isinstance(value, dict):
        feed(sorted(value.items(), key=lambda item: str(item[0])))
    elif isinstance(value, set | frozenset):
        feed(sorted(map(fingerprint, value)))
    elif isinstance(value, tuple | list):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            feed(item)
    elif hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type | types.ModuleType):
        array = np.ascontiguousarray(fetched(value))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(_plain(array).data)
    elif isinstance(value, str | bytes | int | float | complex | type(None) | type(...)):
        digest.update(f"{value!r};".encode())
    else:
        feed(_contents(value))


def _contents(value: Any) -> Any:
    """What an object or a function does, as far as it can be read: code and what it holds on to, no addresses."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type):
        return "class", value.__module__, value.__qualname__
    if isinstance(value, functools.partial):
        return "partial", value.func, value.args, value.keywords
    if inspect.ismethod(value):
        return "method", value.__self__, value.__func__
    if inspect.isfunction(value):
        # Other functions of its module may well be its own parts, plain values its settings.
        seen = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        plain = {
            k: v for k, v in seen.items() if isinstance(v, str | int | float | np.ndarray | Array) or _is_record(v)
        }
        helpers = {k: v for k, v in seen.items() if inspect.isfunction(v) and v.__module__ == value.__module__}
        held = [_cell(cell) for cell in value.__closure__ or ()]
        return "function", value.__code__, value.__defaults__, value.__kwdefaults__, held, plain, helpers
    inner = getattr(value, "__wrapped__", None)
    if inner is not None:
        return "wrapped", inner
    kind = type(value).__module__, type(value).__qualname__
    return "object", kind, getattr(value, "__qualname__", ""), getattr(value, "__dict__", {})


def _is_record(value: Any) -> bool:
    """Whether an object is its fields."""
    kinds = Pytree | types.SimpleNamespace | tuple
    return isinstance(value, kinds) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it
        return "empty"
