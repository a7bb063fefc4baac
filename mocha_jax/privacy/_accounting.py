"""The accountants' package, imported when it is needed, and what their numbers must be."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
from jax.typing import ArrayLike

from mocha_jax._core import check


def accounting() -> ModuleType:
    """Import dp-accounting."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise ImportError("privacy needs dp-accounting: pip install 'mocha_jax[privacy]'.") from error


def check_delta(owner: str, delta: ArrayLike) -> None:
    """Raise unless it is above 0 and below 1; of many, each."""
    check.positive(owner, delta=delta)
    if not np.all(np.asarray(delta) < 1):
        raise ValueError(f"{owner}: delta must be below 1, got {check.shown(delta)}.")
