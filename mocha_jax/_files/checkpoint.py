"""Checkpoints of a solve: one file, replaced atomically, refused where it does not belong.

The file holds the arrays of the run's progress and of its records, the kind of the records' quality, who wrote it, and
a fingerprint of each part of what determines the run: data, loss, regularizer, algorithm, systems, key and so on. How
many rounds to run and when to stop are not part of it, so a finished solve can be continued.

If processes share arrays, the file holds no rows of these, but the names and digests of the parts that do
(`mocha_jax._files.checkpoint_parts`): every process writes its own, and they count once the first one has written the
file.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.devices import fetched, is_cut_by_rows, place
from mocha_jax._core.processes import together
from mocha_jax._core.warnings import warn
from mocha_jax._files import container
from mocha_jax._files.checkpoint_parts import Part, PartReader, read, remove_abandoned
from mocha_jax._files.container import About, Arrays, Container
from mocha_jax._files.fingerprint import by_rows, fingerprint, once
from mocha_jax._files.owned_file import CheckpointError, OwnedFile

Progress = TypeVar("Progress")  # a tree of arrays
Records = TypeVar("Records")  # a tree of NumPy arrays, one entry per record
Result = TypeVar("Result")

KIND = "checkpoint"


class Saver:
    """Saves to and loads from one file while it is open; without a file it does nothing.

    A file that cannot be saved to at all is an error. Once it could be, a save that fails, for instance because the
    disk is full, costs a warning and not the solution: the file keeps what was saved before.

    Args:
      path: of the file; None for none.
      run: everything that determines the run, part by part, by name; a file of another run is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, run: Mapping[str, object]) -> None:
        # Where a link points: two solves by two names are two solves of one file, and a link stays one.
        self._file = None if path is None else OwnedFile(_target(path))
        self._part = None if self._file is None else Part(self._file.path)
        contents = once(by_rows)
        self._run = {} if path is None else {name: fingerprint(part, contents=contents) for name, part in run.items()}
        self._writer = uuid.uuid4().hex
        self._shared = False  # whether processes share arrays, and hence the work
        self._digest: str | None = None  # of what we know to be in the file
        self._saved = self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None or self._part is None:
            return
        self._part.release()
        if jax.process_index() == 0:
            self._file.release()

    def __call__(self, round: int, progress: object, history: object, quality: str) -> None:
        """Write everything to new files, then put the one that counts in place of the old one.

        Args:
          round: the last one that was done.
          progress: a tree of arrays.
          history: a tree of NumPy arrays, the records.
          quality: what kind of quality they are of.
        """
        if self._file is None or self._part is None:
            return
        leaves = {f"progress/{i}": a for i, a in enumerate(jax.tree.leaves(progress))}
        shared = {name: a for name, a in leaves.items() if is_cut_by_rows(a)}
        arrays = {name: fetched(a) for name, a in leaves.items() if name not in shared} | _records(history)
        if jax.process_index() != 0 and not self._shared:
            return
        try:
            self._save(self._file, self._part, arrays, shared, quality)
        except OSError as error:
            reason = error.strerror or str(error)
            if not self._saved:
                raise CheckpointError(
                    f"{self._file.path} cannot be saved to: {reason}; choose another path for the checkpoint."
                ) from error
            if not self._warned:
                self._warned = True
                warn(
                    f"solve: {self._file.path} could not be saved to after round {round}: {reason}; it holds what was "
                    f"saved before, and the solve goes on."
                )

    def _save(self, file: OwnedFile, part: Part, arrays: Arrays, shared: dict[str, Array], quality: str) -> None:
        parts: dict[str, str] = {}
        first = jax.process_index() == 0
        try:
            if shared:
                parts = dict(self._together(lambda: part.write(shared)))
            about = {"quality": quality, "parts": parts}
            self._digest = self._together(lambda: self._write(file, arrays, about) if first else None)[0]
        except (OSError, CheckpointError):
            # After other errors, such as those of a network, the file may or may not name the new part.
            part.settle(counts=False)
            raise
        part.settle(counts=True)
        if first and not self._saved:
            remove_abandoned(file.path, parts)
        self._saved = True

    def _write(self, file: OwnedFile, arrays: Arrays, about: About) -> str:
        if self._digest is not None and _digest_at(file.path) not in (self._digest, None):
            raise CheckpointError(
                f"{file.path} is no longer what this solve saved there: another solve saves to it too; let that one go "
                f"on, or choose another path for this one."
            )
        content = Container.of(KIND, arrays, {"run": self._run, "writer": self._writer, **about})
        file.replace(content.write)
        return content.about["digest"]

    def load(self, fresh: Progress, blank: Records) -> tuple[Progress, Records]:
        """The saved run where there is one, else nothing done and nothing recorded."""
        if self._file is None:
            return fresh, blank
        path = self._file.path
        found: list[Container] = []
        self._shared = any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(fresh))

        def claim() -> str:
            found.extend(self._claim(path))
            return found[0].about["digest"] if found else ""

        digests = self._together(claim)
        if any(digest != digests[0] for digest in digests):
            raise CheckpointError(
                f"processes find different files at {path}; it must lie where all of them read and write the same."
            )
        if not found:
            return fresh, blank
        arrays, about = found[0].arrays, found[0].about
        run, parts = about.get("run", {}), about.get("parts", {})
        if run != self._run:
            raise CheckpointError(
                f"{path} belongs to another run: its {self._what_differs(run)} from this call's; choose another path, "
                f"or delete it to start afresh."
            )
        leaves, structure = jax.tree.flatten(fresh)
        blanks = _records(blank)
        if not _complete(arrays, bool(parts), leaves, blanks):
            raise CheckpointError(f"{path} does not hold what it says it holds; delete it to start afresh.")
        self._digest = digests[0]
        reader = PartReader(path, parts)
        saved: list[Array] = []
        self._together(
            lambda: saved.extend(_restored(f"progress/{i}", a, arrays, reader) for i, a in enumerate(leaves))
        )
        history = [arrays[name] for name in blanks]
        return jax.tree.unflatten(structure, saved), jax.tree.unflatten(jax.tree.structure(blank), history)

    def _claim(self, path: Path) -> list[Container]:
        """Make the file ours, and read it where there is one."""
        if os.path.lexists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{path} is not a file; choose another path.")
        if jax.process_index() == 0 and self._file is not None:
            self._file.claim()
        found = [read(path, KIND)] if os.path.exists(path) else []
        if jax.process_index() == 0:
            remove_abandoned(path, found[0].about.get("parts", ()) if found else ())
        return found

    def _what_differs(self, saved: dict[str, str]) -> str:
        """Name the parts of a run that are not those of the file."""
        *first, last = names = [name for name in self._run | saved if saved.get(name) != self._run.get(name)]
        those = f"{', '.join(first)} and {last}" if first else last
        shards = " (nodes that `shard` adds to fill up the devices are data too)" if "data" in names else ""
        return f"{those}{shards} {'differ' if first else 'differs'}"

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """Work that all processes do where they share arrays, and one does else."""
        if not self._shared:
            return [work()]
        try:
            return together("checkpoint", work)
        except CheckpointError:
            raise
        except ValueError as error:  # of another process
            raise CheckpointError(str(error)) from error


def _target(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (TypeError, ValueError) as error:  # of bytes, or with a null character
        raise CheckpointError(f"{os.fspath(path)!r} cannot be the path of a checkpoint; choose another one.") from error


def _digest_at(path: Path) -> str | None:
    """Read the digest that a file says it has; None without a file."""
    try:
        return container.load(path, KIND, lambda name: False).about["digest"]
    except FileNotFoundError:
        return None
    except container.Unreadable:
        return ""


def _records(history: object) -> Arrays:
    """Name the arrays of records by their fields."""
    leaves = jax.tree_util.tree_flatten_with_path(history)[0]
    return {
        f"history/{jax.tree_util.keystr(path, simple=True, separator='.')}": np.asarray(leaf) for path, leaf in leaves
    }


def _complete(arrays: Arrays, in_parts: bool, leaves: list[Array], blanks: Arrays) -> bool:
    """Tell whether every array is there, with the shape and dtype of this run, and equally many records of each."""
    raw = [jax.eval_shape(jax.random.key_data, a) if _is_key(a) else a for a in leaves]
    wanted = {f"progress/{i}": (a.shape, a.dtype) for i, a in enumerate(raw)}
    if in_parts:  # they hold the others
        wanted = {name: of for name, of in wanted.items() if name in arrays}
    count = next((arrays[name].shape[:1] for name in blanks if name in arrays), ())
    wanted |= {name: ((*count, *a.shape[1:]), a.dtype) for name, a in blanks.items()}
    return all(name in arrays and (arrays[name].shape, arrays[name].dtype) == of for name, of in wanted.items())


def _is_key(leaf: Array) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _restored(name: str, leaf: Array, arrays: Arrays, parts: PartReader) -> Array:
    """Return a saved array in its dtype and where it was."""
    if name not in arrays:
        return parts.array(name, leaf)
    array = arrays[name]
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return place(array, leaf.sharding)
