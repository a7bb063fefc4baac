"""Compiled programs of an earlier process, found by what they are called with.

JAX's cache on disk is keyed by lowered code, so that every process traces and lowers a function before it finds the
program. That code depends on the function, the structure, shapes and dtypes of its arguments, JAX's settings and the
versions of the packages. Programs are kept here by these, and a process that finds one neither traces nor lowers. A
call that involves code from outside of installed packages, such as a user's loss, is not kept: that code may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import marshal
import os
import pickle
import re
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from mocha_jax._core.pickling import Written, portable
from mocha_jax._core.values import is_traced

# Packages whose code is known by their versions; with this one, and Python's own modules that values are pickled by.
_VERSIONED = ("jax", "jaxlib", "numpy", "optax", "chex", "ml_dtypes")
_FIXED = {"mocha_jax", *_VERSIONED, "builtins", "collections", "copyreg", "enum", "functools", "math", "operator"}

# Settings by which a call does more than its code or does it elsewhere: JAX minds them.
_ELSE = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_enable_checks", "jax_default_device")

# Functions outside of a program that it calls, in what is lowered.
_OUTSIDE = re.compile(r'custom_call @"?([^"(\s]+)')

_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Keep programs here from now on; with None, keep none."""
    global _folder  # noqa: PLW0603  (a choice of the process, as JAX's own)
    _folder = folder
    if folder is not None:
        _listen()


class Call(NamedTuple):
    """A call of a function, as far as the code that JAX compiles for it depends on the call."""

    structure: jax.tree_util.PyTreeDef  # of the arguments that are not static
    static: tuple[tuple[str, object], ...]
    leaves: tuple[object, ...]
    settings: tuple[object, ...]


class Place:
    """The place on disk of the program for such calls.

    Attributes:
      program: the one of this process, or of an earlier one; None if there is none yet.
    """

    def __init__(self, path: Path, structure: jax.tree_util.PyTreeDef) -> None:
        self._path, self.program = path, _load(path, structure)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the program, and keep it."""
        before = _taken.count
        program = self.program = lowered.compile()
        outside = set(_OUTSIDE.findall(lowered.as_text()))
        if _taken.count == before and all(name.startswith("lapack_") for name in outside):
            with contextlib.suppress(Exception):  # a full disk, or what JAX cannot write
                _write(program, self._path, lapack=bool(outside))
        return program


class KeptPrograms:
    """The places of the programs of one function.

    Args:
      name: of the function and of how it is compiled.
      static: the names of its static arguments.
    """

    def __init__(self, name: str, static: str | tuple[str, ...]) -> None:
        self._name, self._static = name, (static,) if isinstance(static, str) else static
        self._places: dict[Call, Place | None] = {}

    def dynamic(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the keyword arguments that are not static."""
        return {name: value for name, value in kwargs.items() if name not in self._static}

    def place(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Place | None:
        """Return the place for such calls; None if they are for JAX alone: nothing is kept, or not of such calls."""
        if _folder is None or jax.default_backend() != "cpu" or jax.process_count() > 1:
            return None
        if not jax.sharding.get_abstract_mesh().empty or any(getattr(jax.config, name) for name in _ELSE):
            return None
        leaves, structure = jax.tree.flatten((args, self.dynamic(kwargs)))
        device = jax.devices()[0]
        described = [about for leaf in leaves if (about := _described(leaf, device))]
        if len(described) < len(leaves):
            return None
        static = tuple((name, value) for name, value in sorted(kwargs.items()) if name in self._static)
        settings = tuple(getattr(jax.config, name, value) for name, value in jax.config.values.items())
        call = Call(structure, static, tuple(described), settings)
        if call not in self._places:
            path = _path(_folder, self._name, call)
            self._places[call] = None if path is None else Place(path, structure)
        return self._places[call]


def _described(leaf: object, device: jax.Device) -> object:
    """Describe an argument as far as compiled code depends on it; None if it is traced, elsewhere or no number."""
    if isinstance(leaf, jax.Array):
        if is_traced(leaf) or not isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
            return None
        kind = leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # which keys have not
        here = leaf.sharding.device_set == {device}
        return (*kind, leaf.committed, leaf.sharding.memory_kind) if here else None
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    return type(leaf) if isinstance(leaf, (bool, int, float, complex)) else None


def _path(folder: Path, name: str, call: Call) -> Path | None:
    """Return the file of such a call's program; None if the next process might mean something else by it."""
    try:
        like = jax.tree.unflatten(call.structure, list(map(str, call.leaves)))
        about = name, like, call.static, repr(call.settings), os.environ.get("XLA_FLAGS"), _versions()
        digest = hashlib.sha256(_pickled(portable(about))).hexdigest()
    except Exception:  # whatever another package's class raises when it is rebuilt or pickled
        return None
    return folder / f"{digest[:40]}-program"


class _Pickler(pickle.Pickler):
    """Describes what consists of arrays' shapes, plain values and the fixed code of installed packages."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Written):
            value = value.function
        if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return NotImplemented
        if (value.__module__ or "").partition(".")[0] not in _FIXED:
            raise pickle.PicklingError(f"{value.__qualname__} may be another one in the next process.")
        if not isinstance(value, types.FunctionType):
            return NotImplemented
        # What a module has under a function's name may be another one that calls it.
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        code = value.__module__, value.__qualname__, marshal.dumps(value.__code__, 2)
        return tuple, ((*code, value.__defaults__, value.__kwdefaults__, held),)


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5)
    pickler.fast = True  # equal values are the same bytes, whether or not they are one object
    pickler.dump(value)
    return file.getvalue()


@lru_cache
def _versions() -> tuple[str, ...]:
    return (sys.version, source(), *(f"{name} {metadata.version(name)}" for name in _VERSIONED))


@lru_cache
def source() -> str:
    """Return a digest that changes whenever a file of this package does."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    files = sorted(root.rglob("*.py"))
    if not files:
        raise OSError(f"{root} is no folder.")
    for path in files:
        about = path.stat()
        found.update(f"{path.relative_to(root)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest()[:8]


def _load(path: Path, structure: jax.tree_util.PyTreeDef) -> jax.stages.Compiled | None:
    """Return the program of a file, if there is one and it is whole."""
    try:
        from jax.experimental import serialize_executable  # noqa: PLC0415  (a JAX without it compiles)

        program, result, lapack = pickle.loads(zlib.decompress(path.read_bytes()))  # which has a checksum
        if lapack:
            _find_lapack()
        return serialize_executable.deserialize_and_load(
            program, structure, jax.tree.structure(result), execution_devices=jax.devices()[:1]
        )
    except FileNotFoundError:
        return None
    except Exception:  # damaged, or of a JAX that is built otherwise: compiled anew
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _write(program: jax.stages.Compiled, path: Path, *, lapack: bool) -> None:
    from jax.experimental import serialize_executable  # noqa: PLC0415

    content, _, result = serialize_executable.serialize(program)
    like = portable(jax.tree.unflatten(result, [0] * result.num_leaves))
    if jax.tree.structure(pickle.loads(pickle.dumps(like))) != result:
        raise pickle.PicklingError("what it returns holds functions, which another process has for others.")
    whole = zlib.compress(pickle.dumps((content, like, lapack), protocol=5), 1)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(whole)
        os.replace(name, path)  # at once: another process may read it
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@lru_cache
def _find_lapack() -> None:
    """Let JAX look up where SciPy's LAPACK is, which it does when it lowers: a program that is loaded would crash."""
    jax.jit(lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), "float32"))


class _Taken(threading.local):
    """The number of programs that this thread has from JAX's cache. They lack parts when they are written again."""

    count = 0


_taken = _Taken()


@lru_cache
def _listen() -> None:
    def listen(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _taken.count += 1

    jax.monitoring.register_event_listener(listen)
