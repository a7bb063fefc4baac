"""Fingerprints of runs: a few letters that are the same in every process."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from typing import cast

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core.devices import NodeSharding, fetched, is_cut_by_rows, key_numbers, own_rows
from mocha_jax._core.processes import gathered
from mocha_jax._core.pytree import Pytree, fields_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Contents = Callable[[ArrayLike], bytes | memoryview]

_SIZE = 16  # bytes of a digest
_RANGE = 2 ** (8 * _SIZE)


def all_contents(array: ArrayLike) -> bytes | memoryview:
    """Return the contents of an array, brought together where processes share it."""
    return plain(np.ascontiguousarray(fetched(array))).data


def by_rows(array: ArrayLike) -> bytes | memoryview:
    """Return a digest of the contents of an array that each process reads its own rows for: a sum over rows."""
    if is_cut_by_rows(array):
        own = sum(_digest_of_rows(start, rows) for start, rows in own_rows(cast(Array, array))) % _RANGE
        sums = gathered(np.frombuffer(own.to_bytes(_SIZE, "little"), np.uint8))
        total = sum(int.from_bytes(one.tobytes(), "little") for one in sums)
    elif np.ndim(array):
        total = _digest_of_rows(0, fetched(array))
    else:
        return all_contents(array)
    return (total % _RANGE).to_bytes(_SIZE, "little")


def once(contents: Contents) -> Contents:
    """Hash every array only once, however often it is part of something."""
    seen: dict[int, tuple[ArrayLike, bytes | memoryview]] = {}  # arrays are kept, so that none takes another's number

    def read(array: ArrayLike) -> bytes | memoryview:
        if id(array) not in seen:
            seen[id(array)] = array, contents(array)
        return seen[id(array)][1]

    return read


def _digest_of_rows(start: int, rows: np.ndarray) -> int:
    data, total = plain(np.ascontiguousarray(rows)).reshape(-1).view(np.uint8).data, 0
    width = len(data) // max(len(rows), 1)
    for i in range(len(rows)):
        row = hashlib.blake2b((start + i).to_bytes(8, "little"), digest_size=_SIZE)
        row.update(data[i * width : (i + 1) * width])
        total += int.from_bytes(row.digest(), "little")
    return total


def fingerprint(*parts: object, contents: Contents = all_contents) -> str:
    """A digest of records, arrays and plain values by content, the same in every process.

    Args:
      *parts: of what.
      contents: what to read of an array: `all_contents`, or a sum `by_rows`.
    """
    digest = hashlib.blake2b(digest_size=_SIZE)
    _feed(digest, parts, contents)
    return digest.hexdigest()


def _kind(kind: type) -> tuple[str, str]:
    """Name a class. Those of the library have names of their own, whichever module they are moved to."""
    module = "mocha_jax" if kind.__module__.startswith("mocha_jax.") else kind.__module__
    return module, kind.__qualname__


def _feed(digest: hashlib.blake2b, value: object, contents: Contents, reading: tuple[int, ...] = ()) -> None:
    """Feed all parts of a value to the digest; `reading` are the objects that contain it."""
    if id(value) in reading:
        digest.update(f"again {reading.index(id(value))};".encode())
        return

    def feed(part: object) -> None:
        _feed(digest, part, contents, (*reading, id(value)))

    if isinstance(value, Pytree):
        digest.update(f"{'.'.join(_kind(type(value)))}(".encode())
        for name, field in fields_of(value).items():
            digest.update(f"{name}=".encode())
            feed(field)
        digest.update(b")")
    elif isinstance(value, NodeSharding):
        feed(None)  # where a problem is solved is no part of what it is
    elif isinstance(value, types.CodeType):
        feed(_text(value))
    elif isinstance(value, dict):
        feed(sorted(value.items(), key=lambda item: str(item[0])))
    elif isinstance(value, set | frozenset):
        feed(sorted(fingerprint(one, contents=contents) for one in value))
    elif isinstance(value, tuple | list):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            feed(item)
    elif hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type | types.ModuleType):
        array = cast(Array, key_numbers(cast(ArrayLike, value)))
        digest.update(f"{array.dtype}{np.shape(array) or (1,)}".encode())
        digest.update(contents(array))
    elif isinstance(value, str | bytes | int | float | complex | type(None) | type(...)):
        digest.update(f"{value!r};".encode())
    else:
        feed(_contents(value))


def _contents(value: object) -> tuple[object, ...]:
    """Return what an object or a function does, as far as it can be read: source and what it holds on to."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type):
        return "class", *_kind(value)
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
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        return "function", value.__code__, value.__defaults__, value.__kwdefaults__, cells, plain, helpers
    inner = getattr(value, "__wrapped__", None)
    if inner is not None:
        return "wrapped", inner
    kind = _kind(type(value))
    return "object", kind, getattr(value, "__qualname__", ""), getattr(value, "__dict__", {})


def _text(code: types.CodeType) -> object:
    """Return a function's source, free of comments and format; where that is not at hand, the names it refers to."""
    try:
        lines, _ = inspect.findsource(code)
        written = [node for node in _functions("".join(lines)) if _holds(node, code)]
    except (OSError, TypeError, SyntaxError):
        written = []
    if not written:
        return code.co_name, code.co_names, code.co_consts
    node = min(written, key=lambda node: (node.end_lineno or 0) - node.lineno)
    body = node.body if isinstance(node.body, list) else [node.body]
    return [ast.dump(part) for part in (node.args, *body)]


@functools.lru_cache(maxsize=64)
def _functions(source: str) -> tuple[_Function, ...]:
    """Find every function and lambda of a source."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, _Function))


def _holds(node: _Function, code: types.CodeType) -> bool:
    """Tell whether the code was compiled from the function."""
    if not isinstance(node, ast.Lambda):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    # Several lambdas may share a line: the instructions say where theirs is.
    places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    start, end = (node.body.lineno, node.body.col_offset), (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    return code.co_name == "<lambda>" and bool(places) and all(start <= place < end for place in places)


def _is_record(value: object) -> bool:
    """Tell whether an object is its fields."""
    kinds = Pytree | types.SimpleNamespace | tuple
    return isinstance(value, kinds) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it
        return "empty"


def plain(array: np.ndarray) -> np.ndarray:
    """View an array in a dtype that NumPy's files know, which bfloat16 is not."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
