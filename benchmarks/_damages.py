"""Ways to damage a checkpoint, for `benchmarks.survival`."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mocha_jax._files import container
from mocha_jax._files.checkpoint import KIND
from mocha_jax._files.container import Container


class Payload:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def damages(rng: np.random.Generator, good: bytes, other: bytes, trace: Path) -> Iterator[tuple[str, Any]]:
    """Endlessly, what was done to a file and what it holds now; or a function that puts something else there."""
    saved = container.read(io.BytesIO(good), KIND, "the checkpoint")
    arrays = saved.arrays
    names = [name for name in arrays if name.startswith(("progress", "history")) and arrays[name].size]

    def at() -> int:
        return int(rng.integers(len(good)))

    def rezipped(changed: dict[str, Any], *, honest: bool = True) -> bytes:
        anew = Container.of(KIND, changed, saved.about)
        kept = Container(changed, anew.about | {"digest": saved.about["digest"]})
        return (kept if honest else anew).to_bytes()

    def flipped() -> bytes:
        i = at()
        return good[:i] + bytes([good[i] ^ (1 << int(rng.integers(8)))]) + good[i + 1 :]

    def one_number() -> bytes:
        name = str(rng.choice(names))
        value = arrays[name].copy()
        raw = value.reshape(-1).view(np.uint8)
        raw[int(rng.integers(raw.size))] ^= 1
        return rezipped(arrays | {name: value})

    def without() -> dict[str, np.ndarray]:
        gone = str(rng.choice(list(arrays)))
        return {name: value for name, value in arrays.items() if name != gone}

    def reshaped() -> bytes:
        name = str(rng.choice(names))
        return rezipped(arrays | {name: np.stack([arrays[name]] * 2)}, honest=False)

    def retyped() -> bytes:
        name = str(rng.choice(names))
        return rezipped(arrays | {name: arrays[name].astype(np.complex64)}, honest=False)

    def zeroed() -> bytes:
        i, count = at(), int(rng.integers(1, 2000))
        return good[:i] + bytes(len(good[i : i + count])) + good[i + count :]

    def last_entry(content: bytes | None) -> bytes:
        to = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(to, "w") as new:
            *names, last = old.namelist()
            for name in names:
                new.writestr(name, old.read(name))
            if content is not None:
                new.writestr(last, content)
        return to.getvalue()

    objects, single, foreign = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([Payload(trace)], object))
    np.save(single, np.ones(3))
    np.savez(foreign, a=np.ones(3))
    kinds: dict[str, Callable[[], Any]] = {
        "cut off": lambda: good[: at()],
        "a bit flipped": flipped,
        "a block zeroed": zeroed,
        "bytes inserted": lambda: good[: (i := at())] + rng.bytes(int(rng.integers(1, 100))) + good[i:],
        "bytes appended": lambda: good + rng.bytes(int(rng.integers(1, 1000))),
        "random bytes": lambda: rng.bytes(int(rng.integers(1, 10_000))),
        "one number changed": one_number,
        "one array missing": lambda: rezipped(without()),
        "one file of the archive missing": lambda: last_entry(None),
        "one array missing, digest made anew": lambda: rezipped(without(), honest=False),
        "one array of another shape, digest made anew": reshaped,
        "one array of another type, digest made anew": retyped,
        "another archive": foreign.getvalue,
        "one array": single.getvalue,
        "a pickle": lambda: pickle.dumps(Payload(trace)),
        "an archive with a pickle": lambda: last_entry(objects.getvalue()),
        "nothing": lambda: b"",
        "of another run": lambda: other,
        "a folder": lambda: Path.mkdir,
        "a pipe": lambda: os.mkfifo,
        "a link to nowhere": lambda: lambda path: path.symlink_to(trace.with_name("nowhere") / rng.bytes(8).hex()),
    }
    while True:
        for kind, make in kinds.items():
            yield kind, make()
