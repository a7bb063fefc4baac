"""The command line, for those who do not program: ``mocha-jax fit``, `predict`, `compare`, `inspect`, `demo`.

It may import `_core`, `_files`, `_data`, `_selection`, `datasets`, `plotting` and `regularizers`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import jax

import mocha_jax as mj
from mocha_jax._core.program_cache import keep_programs
from mocha_jax.cli import _demo, _fit, _saved

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command.

    Returns:
      0; 1 where a file cannot be read or written, 130 where a person interrupts. What is wrong with the arguments or a
      table ends the process with 2. Each is said in one sentence.
    """
    parser = argparse.ArgumentParser(prog="mocha-jax", description=(mj.__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action="version", version=f"mocha_jax {mj.__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for part in (_fit, _saved, _demo):
        part.add_to(commands)
    options = parser.parse_args(arguments)
    keep_programs()
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader of the output has ended
        with contextlib.suppress(OSError, ValueError):  # else the interpreter flushes the buffer at exit, and fails
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"mocha-jax: error: {_said(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmocha-jax: interrupted.", file=sys.stderr)
        return 130


def _said(error: OSError) -> str:
    """The file and what is wrong with it, or the whole sentence where the error is of this library."""
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}."
