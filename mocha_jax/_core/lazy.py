"""Names of a package that are imported when they are first asked for.

A program that needs one name of a package waits for that one, and a process that needs none of JAX does without. The
names are those of the package's stub, ``__init__.pyi``, which tools that read code without running it read as well
(Scientific Python's SPEC 1).
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable

Getter = Callable[[str], object]


def attach(package: str) -> tuple[Getter, list[str]]:
    """Return a package's ``__getattr__``, and the names in its stub.

    Args:
      package: its ``__name__``.
    """
    stub = pkgutil.get_data(package, "__init__.pyi")  # also of packages in archives
    if stub is None:
        raise ImportError(f"{package}: its stub __init__.pyi is missing, which lists its names; install it anew.")
    origins: dict[str, tuple[str, str]] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.split(".")[0]:
            origins |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}

    def get(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = _imported(package, *origins[name])
        setattr(sys.modules[package], name, value)  # the next time it is there
        return value

    return get, list(origins)


def _imported(package: str, module: str, name: str) -> object:
    """Do as ``from module import name``; a package's own names are its submodules."""
    if module != package:
        holder = importlib.import_module(module)
        if hasattr(holder, name):
            return getattr(holder, name)
        if not hasattr(holder, "__path__"):
            raise ImportError(f"cannot import name {name!r} from {module!r}, as {package}/__init__.pyi has it")
    return importlib.import_module(f"{module}.{name}")
