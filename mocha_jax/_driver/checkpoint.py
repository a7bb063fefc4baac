"""Checkpoints of a solve: one npz file, replaced atomically, refused where it does not belong.

The file holds the arrays of `Progress` and `History`, who wrote it, a digest of all that, and a fingerprint of
everything that determines the run: data, loss, regularizer, algorithm, systems, key. How many
rounds to run and when to stop are not part of it, so a finished solve can be continued.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.devices import fetched, place
from mocha_jax._core.warnings import warn
from mocha_jax._driver.fingerprint import fingerprint, plain, plain_dtype
from mocha_jax._driver.history import History, Progress
from mocha_jax._driver.owned_file import CheckpointError, OwnedFile

_FORMAT = "mocha_jax checkpoint 5"


class Saver:
    """Saves to and loads from one file while it is open; without a file it does nothing.

    A file that cannot be saved to at all is an error. Once it could be, a save that fails, for instance because the
    disk is full, costs a warning and not the solution: the file keeps what was saved before.
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: Array, *config: object) -> None:
        # Where a link points: two solves by two names are two solves of one file, and a link stays one.
        self._file = None if path is None else OwnedFile(_target(path))
        self._fingerprint = "" if path is None else fingerprint(jax.random.key_data(key), *config)
        self._writer = uuid.uuid4().hex
        self._digest: str | None = None  # of what we know to be in the file
        self._saved = self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and jax.process_index() == 0:
            self._file.release()

    def __call__(self, progress: Progress, history: History) -> None:
        """Write everything to a new file, then put it in place of the old one."""
        if self._file is None:
            return
        arrays = {f"progress_{i}": plain(fetched(a)) for i, a in enumerate(jax.tree.leaves(progress))}
        arrays |= {f"history_{i}": plain(np.asarray(a)) for i, a in enumerate(jax.tree.leaves(history))}
        if jax.process_index() != 0:
            return
        try:
            self._write(self._file, arrays)
        except OSError as error:
            reason = error.strerror or str(error)
            if not self._saved:
                raise CheckpointError(
                    f"{self._file.path} cannot be saved to: {reason}; choose another path for the checkpoint."
                ) from error
            if not self._warned:
                self._warned = True
                round = int(progress.state.round)
                warn(
                    f"solve: {self._file.path} could not be saved to after round {round}: {reason}; it holds what was "
                    f"saved before, and the solve goes on."
                )

    def _write(self, file: OwnedFile, arrays: dict[str, np.ndarray]) -> None:
        if self._digest is not None and _digest_at(file.path) not in (self._digest, None):
            raise CheckpointError(
                f"{file.path} is no longer what this solve saved there: another solve saves to it too; let that one go "
                f"on, or choose another path for this one."
            )
        own = {"format": _FORMAT, "fingerprint": self._fingerprint, "writer": self._writer}
        arrays |= {name: np.array(text) for name, text in own.items()}
        digest = _digest(arrays)
        file.replace(lambda to: np.savez(to, digest=np.array(digest), **arrays))  # type: ignore[arg-type]
        self._digest, self._saved = digest, True

    def load(self, fresh: Progress, blank: History) -> tuple[Progress, History]:
        """The saved run where there is one, else nothing done and nothing recorded."""
        if self._file is None:
            return fresh, blank
        path = self._file.path
        if os.path.lexists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{path} is not a file; choose another path.")
        if jax.process_index() == 0:
            self._file.claim()
        if not os.path.exists(path):
            return fresh, blank
        arrays = _read(path)
        digest = str(arrays.pop("digest", ""))
        if str(arrays.get("format")) != _FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint of this library; choose another path.")
        if digest != _digest(arrays):
            raise CheckpointError(f"{path} is damaged: its digest does not match; delete it to start afresh.")
        if str(arrays.get("fingerprint")) != self._fingerprint:
            raise CheckpointError(
                f"{path} belongs to another run: its data, loss, regularizer, algorithm, systems, cost, watch, "
                f"key or record_every differ from this call's (nodes that `shard` adds to fill up the devices are data "
                f"too); choose another path, or delete it to start afresh."
            )
        leaves, structure = jax.tree.flatten(fresh)
        blanks, records = jax.tree.flatten(blank)
        if not _complete(arrays, leaves, blanks):
            raise CheckpointError(f"{path} does not hold what it says it holds; delete it to start afresh.")
        self._digest = digest
        saved = [_like(arrays[f"progress_{i}"], leaf) for i, leaf in enumerate(leaves)]
        history = [_native(arrays[f"history_{i}"], one.dtype) for i, one in enumerate(blanks)]
        return jax.tree.unflatten(structure, saved), jax.tree.unflatten(records, history)


def _target(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (TypeError, ValueError) as error:  # of bytes, or with a null character
        raise CheckpointError(f"{os.fspath(path)!r} cannot be the path of a checkpoint; choose another one.") from error


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # whatever a reader of zip and npy files makes of garbage
        raise CheckpointError(f"{path} is damaged or not a checkpoint; delete it to start afresh.") from error


def _digest_at(path: Path) -> str | None:
    """Read the digest that a file says it has; None without a file."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return str(file["digest"])
    except FileNotFoundError:
        return None
    except OSError:  # it cannot be read, which says nothing of what is in it
        raise
    except Exception:  # as in `_read`
        return ""


def _complete(arrays: dict[str, np.ndarray], leaves: list[Array], blanks: list[np.ndarray]) -> bool:
    """Tell whether every array is there, with the shape and dtype of this run, and equally many records of each."""
    raw = [jax.eval_shape(jax.random.key_data, a) if _is_key(a) else a for a in leaves]
    wanted = {f"progress_{i}": (a.shape, plain_dtype(a.dtype)) for i, a in enumerate(raw)}
    count = arrays["history_0"].shape[:1] if "history_0" in arrays else ()
    wanted |= {f"history_{i}": ((*count, *a.shape[1:]), plain_dtype(a.dtype)) for i, a in enumerate(blanks)}
    return all(name in arrays and (arrays[name].shape, arrays[name].dtype) == of for name, of in wanted.items())


def _digest(arrays: dict[str, np.ndarray]) -> str:
    return fingerprint(*((name, arrays[name]) for name in sorted(arrays)))


def _is_key(leaf: Array) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _like(array: np.ndarray, leaf: Array) -> Array:
    """Return a saved array in its dtype and where it was."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return place(_native(array, leaf.dtype), leaf.sharding)


def _native(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Undo `plain`."""
    return array.view(dtype) if dtype.kind == "V" else array
