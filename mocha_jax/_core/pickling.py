"""Functions within functions, pickled as all others are: by where they are written.

Pickle finds a function by its module and name. One that was made by another function, as those that optax's
transformations consist of, has no name there; but its code is a constant of that other function's code, and what it
closes over are values, often functions of the same kind. Both ends need the same version of what it is written in.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import types
from collections.abc import Iterator
from typing import Any

_INNER = ".<locals>."

# The way from one code to another inside it: names, and which of those of that name.
_Way = tuple[tuple[str, int], ...]


def portable(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a value whose inner functions have a form that becomes them again when it is unpickled."""
    if inspect.isfunction(value) and _INNER in value.__code__.co_qualname:
        if id(value) in inside:
            raise pickle.PicklingError(f"{value.__qualname__} refers to itself; write it at the top of a module.")
        return Written(value, (*inside, id(value)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(portable(part, inside) for part in value))
    if type(value) in (tuple, list):
        return type(value)(portable(part, inside) for part in value)
    if type(value) is dict:
        return {key: portable(part, inside) for key, part in value.items()}
    if isinstance(value, functools.partial):
        args = (portable(arg, inside) for arg in value.args)
        return functools.partial(portable(value.func, inside), *args, **portable(value.keywords, inside))
    return value


class Written:
    """A stand-in for a function until it is unpickled."""

    def __init__(self, function: types.FunctionType, inside: tuple[int, ...]) -> None:
        self.function, self._inside = function, inside

    def __call__(self) -> None:
        """Look like a function to `functools.partial`."""

    def __reduce__(self) -> tuple[object, ...]:
        function, code = self.function, self.function.__code__
        module, outer = function.__globals__["__name__"], code.co_qualname.partition(_INNER)[0]
        ways = [way for way, inner in _within(_code_of(module, outer)) if inner is code]
        if not ways:
            raise pickle.PicklingError(f"{module}.{code.co_qualname} is not written where its name says.")

        def carried(value: object) -> object:
            return portable(value, self._inside)

        cells = tuple(carried(_held(cell)) for cell in function.__closure__ or ())
        rest = function.__defaults__, function.__kwdefaults__, function.__dict__
        return _made, (module, outer, ways[0], cells, function.__qualname__, *map(carried, rest))


def _made(
    module: str, outer: str, way: _Way, cells: tuple[tuple[object, ...], ...], name: str,
    defaults: tuple[object, ...] | None, keywords: dict[str, object] | None, attributes: dict[str, object],
) -> types.FunctionType:  # fmt: skip
    code = dict(_within(_code_of(module, outer))).get(way)
    if code is None or len(code.co_freevars) != len(cells):
        raise pickle.UnpicklingError(f"{module}.{name} is written otherwise here; use the version it was pickled with.")
    closure = tuple(types.CellType(*held) for held in cells)
    function = types.FunctionType(code, vars(importlib.import_module(module)), code.co_name, defaults, closure)
    function.__kwdefaults__, function.__qualname__ = keywords, name
    function.__dict__.update(attributes)
    return function


def _code_of(module: str, name: str) -> types.CodeType:
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        code = inspect.unwrap(function).__code__  # type: ignore[arg-type]
    except (ImportError, AttributeError) as error:
        raise pickle.PicklingError(f"there is no function {module}.{name} to be imported.") from error
    return code


def _within(code: types.CodeType, way: _Way = ()) -> Iterator[tuple[_Way, types.CodeType]]:
    """Iterate over all code objects inside, each with its path."""
    seen: dict[str, int] = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            seen[inner.co_name] = seen.get(inner.co_name, -1) + 1
            way_there = (*way, (inner.co_name, seen[inner.co_name]))
            yield way_there, inner
            yield from _within(inner, way_there)


def _held(cell: types.CellType) -> tuple[object, ...]:
    """Return the contents of a cell, if there are any."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
