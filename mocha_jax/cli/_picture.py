"""Pictures of the commands, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from mocha_jax._files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def installed() -> bool:
    """Tell whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def check_form(option: str, path: Path) -> None:
    """Refuse a name that says no form of picture."""
    from matplotlib.backend_bases import FigureCanvasBase

    forms = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in forms:
        raise ValueError(f"{option}: must end in one of {', '.join(f'.{form}' for form in forms)}, got {path}.")


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix[1:].lower() or "png")
    atomic.write(path, content.getvalue())


def missing() -> str:
    """A sentence in its place."""
    return "No picture: matplotlib is not installed (pip install 'mocha_jax[plots]')."
