"""Parts of a checkpoint: the rows that a process holds of arrays that processes share, in a file of its own.

A part has a unique name and is complete when it has that name. It counts once the checkpoint beside it
names it, with its digest: a set of which one is missing never counts, and the one before it is still there. Parts lie
in the folder of the checkpoint, on a file system that all processes share.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax import Array

from mocha_jax._core.devices import own_rows, place_rows
from mocha_jax._files.fingerprint import fingerprint, native, plain, plain_dtype
from mocha_jax._files.owned_file import CheckpointError, OwnedFile, remove_if_abandoned

Arrays = dict[str, np.ndarray]

FORMAT = "mocha_jax checkpoint 7"


class Part:
    """The part of this process; it keeps the last one that counts, and a new one until that does."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._counts: OwnedFile | None = None
        self._new: OwnedFile | None = None

    def write(self, shared: dict[str, Array]) -> tuple[str, str]:
        """Write the rows of shared arrays that lie here to a new file; return its name and digest."""
        arrays: Arrays = {}
        for name, array in shared.items():
            starts, rows = zip(*own_rows(array), strict=True)
            arrays[name] = np.concatenate([plain(block) for block in rows])
            arrays[f"{name}_rows"] = np.array(
                [(start, start + len(block)) for start, block in zip(starts, rows, strict=True)]
            )
        which = f"{jax.process_index()}-of-{jax.process_count()}.{uuid.uuid4().hex[:12]}"
        self._new = OwnedFile(self._checkpoint.with_name(f"{self._checkpoint.name}.{which}.part"))
        digest = digest_of(arrays)
        self._new.replace(lambda to: np.savez(to, digest=np.array(digest), **arrays))  # type: ignore[arg-type]
        return self._new.path.name, digest

    def settle(self, *, counts: bool) -> None:
        """Keep the new part in place of the old one if it counts, else the old one."""
        unused, self._counts = (self._counts, self._new) if counts else (self._new, self._counts)
        self._new = None
        if unused is not None:
            unused.release()
            unused.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the file."""
        if self._counts is not None:
            self._counts.release()


class PartReader:
    """Rows of shared arrays, read from the parts that hold them and no others."""

    def __init__(self, checkpoint: Path, arrays: Arrays) -> None:
        nothing = np.array([], str)
        self._checkpoint = checkpoint
        self._paths = [checkpoint.with_name(name) for name in arrays.get("parts", nothing).tolist()]
        self._digests = arrays.get("part_digests", nothing).tolist()
        self._rows: dict[int, Arrays] = {}
        self._read: dict[int, Arrays] = {}

    def array(self, name: str, like: Array) -> Array:
        """Return the array of that name, of the dtype of another and where that is."""

        def rows(start: int, stop: int) -> np.ndarray:
            block = self._between(name, start, stop)
            if block.shape[1:] != like.shape[1:] or block.dtype != plain_dtype(like.dtype):
                raise CheckpointError(
                    f"{self._checkpoint} does not hold what it says it holds; delete it to start afresh."
                )
            return native(block, like.dtype)

        return place_rows(like.shape, like.sharding, rows)

    def _between(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows of an array from `start` to `stop`."""
        blocks: list[tuple[int, np.ndarray]] = []
        missing = stop - start
        for part in self._order():
            place = 0
            for first, end in self._rows_of(part).get(f"{name}_rows", np.zeros((0, 2), int)).tolist():
                low, high = max(first, start), min(end, stop)
                if low < high:
                    blocks.append((low, self._whole(part)[name][place + low - first : place + high - first]))
                    missing -= high - low
                place += end - first
            if not missing:
                return np.concatenate([rows for _, rows in sorted(blocks, key=lambda one: one[0])])
        raise CheckpointError(f"{self._checkpoint} lacks rows that its parts should hold; delete it to start afresh.")

    def _order(self) -> Iterator[int]:
        """First the part with the number of this process: with as many as had written it, no other is needed."""
        own = jax.process_index()
        yield from sorted(range(len(self._paths)), key=lambda part: (part != own, part))

    def _rows_of(self, part: int) -> Arrays:
        if part not in self._rows:
            self._rows[part] = read(self._paths[part], lambda name: name.endswith("_rows"))
        return self._rows[part]

    def _whole(self, part: int) -> Arrays:
        if part not in self._read:
            arrays = read(self._paths[part])
            digest = str(arrays.pop("digest", ""))
            if digest != self._digests[part] or digest != digest_of(arrays):
                raise CheckpointError(f"{self._paths[part]} is damaged: its digest does not match; delete it to start "
                                      f"afresh.")  # fmt: skip
            self._read[part] = arrays
        return self._read[part]


def remove_abandoned(checkpoint: Path, counting: Iterable[str]) -> None:
    """Remove parts that do not count and are no longer being written."""
    kept = set(counting)
    of_ours = rf"\.?{re.escape(checkpoint.name)}\.\d+-of-\d+\.[0-9a-f]{{12}}\.part(\.[0-9a-f]{{12}}\.partial)?"
    with contextlib.suppress(OSError):
        for name in os.listdir(checkpoint.parent):
            if re.fullmatch(of_ours, name) and name not in kept:
                remove_if_abandoned(checkpoint.with_name(name))


def read(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Arrays:
    """Read the arrays of a file that are wanted, by name."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if wanted(name)}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; delete the checkpoint that it is part of to start afresh."
        ) from error
    except Exception as error:  # readers of zip and npy files may raise anything on garbage
        raise CheckpointError(f"{path} is damaged or not a checkpoint; delete it to start afresh.") from error


def digest_of(arrays: Arrays) -> str:
    """Digest of arrays and their names."""
    return fingerprint(*((name, arrays[name]) for name in sorted(arrays)))
