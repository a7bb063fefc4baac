"""The accountants' package, imported when it is needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def accounting() -> ModuleType:
    """Import dp-accounting."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise ImportError("privacy needs dp-accounting: pip install 'mocha_jax[privacy]'.") from error
