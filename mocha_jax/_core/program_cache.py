"""Compiled programs kept on disk, so that the next process need not compile them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

from mocha_jax._core import kept_programs

# Bytes that the folder may hold when a process begins: some hundred kinds of problems.
_MOST = 500_000_000


def keep_programs() -> None:
    """Keep what this process compiles, in the user's cache folder, and take from there what an earlier one compiled.

    On a CPU a next process neither traces nor compiles the programs of a solve of the same kind and shape. Where a loss
    or another part is written outside of this library and of optax they are traced again, as they are on accelerators,
    but not compiled.

    The command line and the estimators call this. A choice of the user's goes first: with a cache of JAX's own
    (``JAX_COMPILATION_CACHE_DIR``), or without any (``JAX_ENABLE_COMPILATION_CACHE=false``), nothing is done. Nor is it
    where the folder cannot be written to.

    Examples:
      >>> import mocha_jax as mj
      >>> mj.keep_programs()  # doctest: +SKIP
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    with contextlib.suppress(OSError, RuntimeError):  # the latter of a user without a home
        folder = _caches() / "mocha_jax"
        own = folder / f"jax-{jax.__version__}-{kept_programs.source()}-{_machine()}"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write there can run code here
        if not os.access(own, os.W_OK | os.X_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(own))
        # Each of the programs is small and quick to compile; together they are what a first solve waits for.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        kept_programs.keep_in(own)
        _trim(folder)  # where another process does so too, files vanish


def _caches() -> Path:
    """Return the folder where this system keeps the caches of programs."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _machine() -> str:
    """Tell kinds of processors apart: a home may be shared by machines of which one lacks another's instructions."""
    about = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(about.encode()).hexdigest()[:8]


def _trim(folder: Path) -> None:
    """Delete the oldest programs of a folder that holds too much, down to half of what it may hold."""
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    size = sum(stat.st_size for _, stat in files)
    if size <= _MOST:
        return
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if size <= _MOST / 2:
            return
        path.unlink(missing_ok=True)
        size -= stat.st_size
