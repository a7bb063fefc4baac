"""Task sets from files: flat arrays, and what `datasets` reads of HAR, the vehicle sensors and MATLAB's cells."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import mocha_jax as mj

# Of HAR's activities, the one that the paper tells from the rest.
_SITTING = 4


class TaskSet(NamedTuple):
    """Tasks of one file, and the loss that suits their labels."""

    name: str
    data: mj.TaskData
    loss: mj.losses.Loss
    scale: float = 1.0  # of the labels, where they were standardised


def load(path: Path) -> TaskSet:
    """Tasks with task means and an intercept, as in the paper.

    Labels -1 and +1 are classes; the activities of HAR become sitting against the rest; any other labels are
    standardised and regressed.

    Args:
      path: an ``.npz`` of flat ``X``, ``y`` and ``task`` (or ``subject``); a ``.mat`` of cells ``X`` and ``Y``, one for
        each task; UCI's folder of HAR; or that of the vehicle sensors, ``events``.
    """
    if path.is_dir() or path.suffix == ".mat":
        name, users, activities = _users(path)
        x, y = np.concatenate(users.xs), np.concatenate(users.ys)
        task = np.repeat(np.arange(len(users.names)), [len(labels) for labels in users.ys])
    else:
        file, name = np.load(path, allow_pickle=False), path.stem
        x, y, activities = file["X"], file["y"], "subject" in file.files
        task = file["subject" if activities else "task"]
    if activities:
        y = np.where(y == _SITTING, 1.0, -1.0)
    classes = set(np.unique(y).tolist()) <= {-1.0, 1.0}
    scale = 1.0 if classes else float(y.std())
    if not classes:
        y = (y - y.mean()) / scale
    x, y = x.astype(np.float32), y.astype(np.float32)
    data = mj.pack_tasks(x, y, task, loss_scaling="task_mean", intercept=True)
    return TaskSet(name, data, mj.losses.Hinge() if classes else mj.losses.Squared(), scale)


def each(paths: Sequence[Path], otherwise: TaskSet) -> Iterable[TaskSet]:
    """The task sets of some files, one after the other; absent ones are named and skipped. Without any another one."""
    for path in paths:
        if not path.exists():
            print(f"{path} is not here: skipped", file=sys.stderr)
    return (load(path) for path in paths if path.exists()) if paths else [otherwise]


def synthetic(key: jax.Array, tasks: int = 30) -> TaskSet:
    """A federation of four groups with very unequal sizes."""
    data = mj.datasets.federation(key, tasks, 60, smallest=20, largest=400).data
    return TaskSet("synthetic", data, mj.losses.Hinge())


def _users(path: Path) -> tuple[str, mj.datasets.Users, bool]:
    """A name, what a reader of the library finds there, and whether its labels are activities."""
    if path.suffix == ".mat":
        return path.stem, mj.datasets.cells(path), False
    if any(path.rglob("*evfeat*.txt")):
        return "vehicles", mj.datasets.vehicle(path), False
    return path.stem, mj.datasets.har(path), True
