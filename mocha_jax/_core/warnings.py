"""Warnings of the library."""

from __future__ import annotations

import itertools
import os
import sys
import warnings

# The folder of the package.
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn whoever called the library, however deep in it this is."""
    for level in itertools.count(1):
        try:
            file = sys._getframe(level).f_code.co_filename
        except ValueError:  # nobody did
            break
        if not file.startswith(_HERE):
            break
    warnings.warn(message, category, stacklevel=level + 1)
