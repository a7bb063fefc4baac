"""Task sets from files: flat arrays, the folder of UCI's HAR, and MATLAB files of cells."""

from __future__ import annotations

from collections.abc import Sequence
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
        each task; or a folder with ``X_train.txt``, ``y_train.txt``, ``subject_train.txt`` and the same of ``test``
        somewhere in it.
    """
    if path.is_dir():
        x, y, task, activities = *_uci(path), True
    elif path.suffix == ".mat":
        x, y, task, activities = *_cells(path), False
    else:
        file = np.load(path, allow_pickle=False)
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
    return TaskSet(path.stem, data, mj.losses.Hinge() if classes else mj.losses.Squared(), scale)


def synthetic(key: jax.Array, tasks: int = 30) -> TaskSet:
    """A federation of four groups with very unequal sizes."""
    data = mj.datasets.federation(key, tasks, 60, smallest=20, largest=400).data
    return TaskSet("synthetic", data, mj.losses.Hinge())


def _uci(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples, activities and subjects of UCI's Human Activity Recognition, both of its parts."""

    def both(name: str) -> np.ndarray:
        found = [sorted(folder.rglob(f"{name}_{part}.txt")) for part in ("train", "test")]
        if not all(found):
            raise FileNotFoundError(f"{folder}: has no {name}_train.txt and {name}_test.txt in it.")
        return np.concatenate([np.loadtxt(paths[0], dtype=np.float32) for paths in found])

    return both("X"), both("y"), both("subject").astype(int)


def _cells(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cells X and Y of a MATLAB file, each entry a task."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f"{path}: reading MATLAB files needs SciPy (pip install scipy).") from error
    file = loadmat(path)
    missing = {"X", "Y"} - set(file)
    if missing:
        raise ValueError(
            f"{path}: has no {' and '.join(sorted(missing))}; it must hold cells X and Y, one for each task."
        )
    xs: Sequence[np.ndarray] = [np.asarray(cell) for cell in file["X"].ravel()]
    ys = [np.asarray(cell).ravel() for cell in file["Y"].ravel()]
    return np.concatenate(xs), np.concatenate(ys), np.repeat(np.arange(len(ys)), [len(y) for y in ys])
