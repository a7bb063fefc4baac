"""The command line, for those who do not program: ``mocha-jax fit``, `predict`, `compare`, `inspect`, `demo`.

It may import `_core`, `datasets` and `plotting`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax

import mocha_jax as mj
from mocha_jax.cli import _demo, _fit, _saved

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(prog="mocha-jax", description=(mj.__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action="version", version=f"mocha_jax {mj.__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for part in (_fit, _saved, _demo):
        part.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        parser.error(str(error))
