"""The sets of part two of the experiments: digits, writers, activities, as lists of clients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj


class Digits(NamedTuple):
    """MNIST, in its order, with the writer of every digit."""

    x: np.ndarray  # [N, 784] in [0, 1]
    y: np.ndarray  # [N]
    writer: np.ndarray  # [N]


def mnist(path: Path) -> tuple[Digits, Digits]:
    """Training and test digits of an ``.npz`` with ``X``, ``y``, ``writer`` and ``split`` (0 for training)."""
    file = np.load(path, allow_pickle=False)
    x = file["X"].astype(np.float32) / (255.0 if file["X"].max() > 1 else 1.0)
    split = file["split"]
    train = (split == "train") if split.dtype.kind in "US" else (split == 0)
    parts = (Digits(x[rows], file["y"][rows].astype(int), file["writer"][rows]) for rows in (train, ~train))
    return next(parts), next(parts)


def blobs(key: jax.Array, count: int = 3000, features: int = 64, classes: int = 10) -> tuple[Digits, Digits]:
    """A stand-in without files: classes of two bumps each, for a first look and for tests."""
    draw = _draw(key)
    centres = draw.normal(size=(classes, 2, features)).astype(np.float32)

    def part(n: int) -> Digits:
        y = draw.integers(0, classes, n)
        x = centres[y, draw.integers(0, 2, n)] + 1.6 * draw.normal(size=(n, features)).astype(np.float32)
        return Digits(x, y, draw.integers(0, 40, n))

    return part(count), part(count // 3)


def deal(key: jax.Array, digits: Digits, clients: int, samples: int, iid: bool, permute: bool = False) -> mj.TaskData:
    """So many digits for each client: at random, or two shards of the sorted digits; pixels permuted or not."""
    count = clients * samples
    if count > len(digits.y):
        raise ValueError(f"{clients} clients x {samples} samples are more than the {len(digits.y)} there are.")
    chosen = np.sort(_draw(key).permutation(len(digits.y))[:count])
    x, y = digits.x[chosen], digits.y[chosen]
    parts = mj.partition.iid(key, count, clients) if iid else mj.partition.shards(key, y, clients, 2)
    xs = [x[rows] for rows in parts]
    return mj.pack_tasks(mj.partition.permuted(key, xs) if permute else xs, [y[rows] for rows in parts])


def writers(key: jax.Array, digits: Digits, count: int, least: int = 100) -> mj.TaskData:
    """The digits of some writers with at least so many."""
    parts = [rows for rows in mj.partition.by_group(digits.writer) if len(rows) >= least]
    chosen = np.sort(_draw(key).permutation(len(parts))[:count])
    return mj.pack_tasks([digits.x[parts[i]] for i in chosen], [digits.y[parts[i]] for i in chosen])


def pooled(digits: Digits, limit: int | None = None) -> mj.TaskData:
    """All of them with one client, e.g. for testing."""
    return mj.pack_tasks([digits.x[:limit]], [digits.y[:limit]])


def _draw(key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
