"""The three tables and their splits, as flat arrays that any library takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

KINDS = {"school": "numbers", "landmine": "rare", "har": "classes", "new person": "classes"}
FILES = {"school": "school", "landmine": "landmine", "har": "har", "new person": "har"}
TRAINING = {"school": 0.75, "landmine": 0.5, "har": 0.25, "new person": 0.25}  # share of a task's rows

# Windows of HAR that follow one another overlap by half: so many stay on one side of a split.
_BLOCK = 8


class Rows(NamedTuple):
    """Rows of a table."""

    x: np.ndarray  # [k, d]
    y: np.ndarray  # [k] numbers; or -1 and +1; or classes 0, 1, ...
    group: np.ndarray  # [k] the task of each
    block: np.ndarray  # [k] rows of one number are never divided

    def take(self, which: np.ndarray) -> Rows:
        """Some of the rows."""
        return Rows(*(a[which] for a in self))

    def of(self, group: object) -> Rows:
        """The rows of one task."""
        return self.take(self.group == group)


class Split(NamedTuple):
    """Training and test rows of one table."""

    train: Rows
    test: Rows


def load(folder: Path | None, name: str) -> Rows | None:
    """The rows of a table; made up without a folder, None where the folder lacks it."""
    if folder is None:
        return _made_up(KINDS[name])
    path = folder / f"{FILES[name]}.npz"
    if not path.exists():
        return None
    file = np.load(path, allow_pickle=False)
    x, y = file["X"].astype(np.float64), file["y"].astype(np.float64)
    group = file["subject" if KINDS[name] == "classes" else "task"].astype(int)
    y = y - 1.0 if KINDS[name] == "classes" else y
    varying = x.std(axis=0) > 0
    return Rows(x[:, varying], y, group, _blocks(group, _BLOCK if KINDS[name] == "classes" else 1))


def split(name: str, rows: Rows, seed: int) -> Split:
    """A random split of every task; of `new person`, a fifth of the tasks is for the test and no row of theirs trains.

    Classes that are rare are divided alike in every task.
    """
    rng = np.random.default_rng([seed, 20170531])
    tasks, training = np.unique(rows.group), np.zeros(len(rows.y), bool)
    for task in tasks:
        for label in (-1.0, 1.0) if KINDS[name] == "rare" else (None,):
            here = (rows.group == task) & ((rows.y == label) if label is not None else True)
            blocks = rng.permutation(np.unique(rows.block[here]))
            count = TRAINING[name] * len(blocks)
            count = int(np.floor(count + rng.random()))  # on average the share
            training |= here & np.isin(rows.block, blocks[:count])
    test = ~training
    if name == "new person":
        new = rng.permutation(tasks)[: max(len(tasks) // 5, 1)]
        test = np.isin(rows.group, new)
        training &= ~test
    return Split(rows.take(training), rows.take(test))


def folds(kind: str, rows: Rows, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places of training and held-out rows, within every task, for the cross-validation of one method."""
    rng, part = np.random.default_rng([seed, 1]), np.zeros(len(rows.y), int)
    for task in np.unique(rows.group):
        for label in (-1.0, 1.0) if kind == "rare" else (None,):
            here = (rows.group == task) & ((rows.y == label) if label is not None else True)
            blocks = rng.permutation(np.unique(rows.block[here]))
            first = rng.integers(count)
            for i, block in enumerate(blocks):
                part[here & (rows.block == block)] = (first + i) % count
    return [(np.flatnonzero(part != f), np.flatnonzero(part == f)) for f in range(count)]


def _blocks(group: np.ndarray, size: int) -> np.ndarray:
    """Numbers of blocks of rows that follow one another in a task."""
    number = np.zeros(len(group), int)
    for task in np.unique(group):
        here = np.flatnonzero(group == task)
        number[here] = here[0] + np.arange(len(here)) // size
    return number


def _made_up(kind: str) -> Rows:
    """A small table of the same kind: 12 tasks in two groups, 5 features of unlike sizes."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(12), 40)
    x = rng.normal(size=(len(group), 5))
    ways = rng.normal(size=(2, 3, 5))[group % 2] + 0.3 * rng.normal(size=(12, 3, 5))[group]
    said = np.einsum("nd,nkd->nk", x, ways) + 0.5 * rng.normal(size=(len(group), 3))
    rare, classes = np.where(said[:, 0] > 1.0, 1.0, -1.0), said.argmax(axis=1).astype(float)
    y = {"numbers": 10.0 + said[:, 0], "rare": rare, "classes": classes}[kind]
    return Rows(x * [1.0, 100.0, 0.1, 1.0, 1.0], y, group, _blocks(group, 4 if kind == "classes" else 1))
