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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax import Array

from mocha_jax._core.devices import own_rows, place_rows
from mocha_jax._files import container
from mocha_jax._files.container import Arrays, Container
from mocha_jax._files.owned_file import CheckpointError, OwnedFile, remove_if_abandoned

_KIND = "part of a checkpoint"


class Part:
    """The part of this process; it keeps the last one that counts, and a new one until that does."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._counts: OwnedFile | None = None
        self._new: OwnedFile | None = None

    def write(self, shared: dict[str, Array]) -> tuple[str, str]:
        """Write the rows of shared arrays that lie here to a new file; return its name and digest."""
        blocks = {name: own_rows(array) for name, array in shared.items()}
        arrays = {name: np.concatenate([rows for _, rows in own]) for name, own in blocks.items()}
        places = {name: [(start, start + len(rows)) for start, rows in own] for name, own in blocks.items()}
        part = Container.of(_KIND, arrays, {"rows": places})
        which = f"{jax.process_index()}-of-{jax.process_count()}.{uuid.uuid4().hex[:12]}"
        self._new = OwnedFile(self._checkpoint.with_name(f"{self._checkpoint.name}.{which}.part"))
        self._new.replace(part.write)
        return self._new.path.name, part.about["digest"]

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
    """Rows of shared arrays, read from the parts that hold them and no others.

    Args:
      checkpoint: the file beside them.
      digests: of the parts, by their names.
    """

    def __init__(self, checkpoint: Path, digests: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._paths = [checkpoint.with_name(name) for name in digests]
        self._digests = list(digests.values())
        self._rows: dict[int, dict[str, list[list[int]]]] = {}
        self._read: dict[int, Arrays] = {}

    def array(self, name: str, like: Array) -> Array:
        """Return the array of that name, of the dtype of another and where that is."""

        def rows(start: int, stop: int) -> np.ndarray:
            block = self._between(name, start, stop)
            if block.shape[1:] != like.shape[1:] or block.dtype != like.dtype:
                raise CheckpointError(
                    f"{self._checkpoint} does not hold what it says it holds; delete it to start afresh."
                )
            return block

        return place_rows(like.shape, like.sharding, rows)

    def _between(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows of an array from `start` to `stop`."""
        blocks: list[tuple[int, np.ndarray]] = []
        missing = stop - start
        for part in self._order():
            place = 0
            for first, end in self._rows_of(part).get(name, []):
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

    def _rows_of(self, part: int) -> dict[str, list[list[int]]]:
        if part not in self._rows:
            self._rows[part] = read(self._paths[part], _KIND, lambda name: False).about["rows"]
        return self._rows[part]

    def _whole(self, part: int) -> Arrays:
        if part not in self._read:
            found = read(self._paths[part], _KIND)
            if found.about["digest"] != self._digests[part]:
                raise CheckpointError(f"{self._paths[part]} is damaged: its digest does not match; delete it to start "
                                      f"afresh.")  # fmt: skip
            self._read[part] = found.arrays
        return self._read[part]


def remove_abandoned(checkpoint: Path, counting: Iterable[str]) -> None:
    """Remove parts that do not count and are no longer being written."""
    kept = set(counting)
    of_ours = rf"\.?{re.escape(checkpoint.name)}\.\d+-of-\d+\.[0-9a-f]{{12}}\.part(\.[0-9a-f]{{12}}\.partial)?"
    with contextlib.suppress(OSError):
        for name in os.listdir(checkpoint.parent):
            if re.fullmatch(of_ours, name) and name not in kept:
                remove_if_abandoned(checkpoint.with_name(name))


def read(path: Path, kind: str, wanted: Callable[[str], bool] = lambda name: True) -> Container:
    """Read a checkpoint or a part of one; arguments as those of `container.read`."""
    try:
        return container.load(path, kind, wanted)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; delete the checkpoint that it is part of to start afresh."
        ) from error
    except (OSError, container.Unreadable) as error:
        why = f"{path} cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{why}; choose another path, or delete it to start afresh.") from error
