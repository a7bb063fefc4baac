"""Warnings of the library."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import sys
import warnings
from collections.abc import Iterator

# The folder of the package.
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


# Kinds of warnings that are silenced while the caller reports them.
_silent: contextvars.ContextVar[tuple[type[Warning], ...]] = contextvars.ContextVar("silent", default=())


class NotConverged(UserWarning):
    """A solve ended at `max_rounds` before it reached the requested tolerance.

    ``warnings.simplefilter("error", mocha_jax.NotConverged)`` makes it an error.
    """


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of the library that called it."""
    if issubclass(category, _silent.get()):
        return
    for level in itertools.count(1):
        try:
            file = sys._getframe(level).f_code.co_filename
        except ValueError:  # no frame outside of it
            break
        if not file.startswith(_HERE):
            break
    warnings.warn(message, category=category, stacklevel=level + 1)


@contextlib.contextmanager
def silenced(category: type[Warning]) -> Iterator[None]:
    """Give no warnings of that kind, in this thread."""
    before = _silent.set((*_silent.get(), category))
    try:
        yield
    finally:
        _silent.reset(before)
