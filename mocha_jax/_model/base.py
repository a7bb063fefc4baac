"""Base classes of models: tasks and features are found by their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._data.frames import check_dense, check_frames, is_missing, samples_of
from mocha_jax._data.names import DataFrame, Names, columns_in_order, columns_of, listed, places
from mocha_jax._data.task_data import TaskData

UNSEEN = ("error", "mean")

HowTrained: TypeAlias = Mapping[str, Any]  # texts, numbers and mappings of names to them, as JSON has them


class NamedModel(ABC):
    """Base class of models of several tasks, which are found by name."""

    num_features: int  # length of a sample, without the intercept
    names: Names
    trained: HowTrained

    @property
    @abstractmethod
    def num_tasks(self) -> int:
        """The number of tasks; 1 of a global model."""

    @property
    def tasks(self) -> tuple[Hashable, ...]:
        """The names of the tasks, or their numbers if they have none."""
        return tuple(range(self.num_tasks)) if self.names.tasks is None else self.names.tasks

    @property
    def _for_everybody(self) -> bool:
        """Tell whether it predicts samples of all tasks alike."""
        return self.num_tasks == 1 and self.names.tasks is None

    def _asked(self, x: ArrayLike, task: object, unseen: str) -> tuple[np.ndarray, np.ndarray]:
        """Samples ``[k, d]`` as `pack_tasks` makes them, and the task of each; -1 of one that is new."""
        check_dense("predict", "x", x)
        check_frames("predict", "x", x)
        if (columns := columns_of("predict", x)) is not None:
            x, columns, task = self._of_frame(x, columns, task)
        samples, width = samples_of("predict", x, columns), self.num_features
        if samples is None or samples.ndim != 2 or samples.shape[1] != width or samples.dtype.kind not in "fiub":
            raise ValueError(f"predict: x must be samples [k, {width}] of numbers, got {check.shown(x)}.")
        return samples, self._places(task, len(samples), unseen)

    def _of_frame(
        self, frame: DataFrame, columns: tuple[str, ...], task: object
    ) -> tuple[DataFrame, tuple[str, ...], object]:
        """The features of a data frame, their names, and the tasks: its column where `task` is the name of one."""
        wanted = columns if self.names.features is None else self.names.features
        if isinstance(task, str) and task in columns and task not in self.tasks:
            if self.names.features is None:
                wanted = tuple(name for name in columns if name != task)
            task = frame[frame.columns[columns.index(task)]]
        if wanted != columns:
            frame = frame[[frame.columns[i] for i in columns_in_order("predict: x", columns, wanted)]]
        return frame, wanted, task

    def _places(self, task: object, count: int, unseen: str) -> np.ndarray:
        """The task of each sample; -1 of one that is new."""
        check.one_of("predict", "unseen", unseen, UNSEEN)
        if self._for_everybody:
            return np.zeros(count, int)
        if task is None:
            if self.num_tasks > 1:
                raise ValueError(
                    f"predict: say whose samples they are: task is one of {listed(self.tasks)}, or one for each sample."
                )
            return np.zeros(count, int)
        wanted = _names_of("predict", task, count)
        if unseen == "error":
            return places("predict", "task", wanted, self.tasks)
        numbers = {name: i for i, name in enumerate(self.tasks)}
        return np.array([numbers.get(name, -1) for name in wanted], int)

    def __repr__(self) -> str:
        how = f", {self.trained['message']}" if "message" in self.trained else ""
        return f"{type(self).__name__}({self._size()}{how})"

    def _size(self) -> str:
        return f"{self.num_tasks} task{'' if self.num_tasks == 1 else 's'}, {self.num_features} features"


def matched(names: Names, num_tasks: int, num_features: int, data: TaskData) -> tuple[np.ndarray, np.ndarray]:
    """Find the tasks and the features of a data set among those of a model: the place of each."""
    check.instance("model", "data", data, TaskData, "pack_tasks(xs, ys, like=train)")
    theirs = data.names
    if names.tasks is not None and theirs.tasks is not None:
        order = places("model", "task", theirs.tasks, names.tasks)
    elif num_tasks in (1, data.num_tasks):
        order = np.arange(num_tasks)
    else:
        raise ValueError(
            f"model: the data has {data.num_tasks} tasks without names, and the model {num_tasks}; pack both "
            f"with groups, and the data like those for training."
        )
    columns = np.arange(num_features)
    if names.features is not None and theirs.features is not None:
        columns_in_order("model: the data", theirs.features, names.features)
        columns = places("model", "feature", theirs.features, names.features)
    return order, columns


def checked_numbers(owner: str, name: str, value: object, shape: tuple[int | str, ...]) -> np.ndarray:
    """An array of numbers of that shape, as NumPy's."""
    check.array(owner, name, value, shape)
    if (array := check.concrete(value)) is None or array.dtype.kind not in "fiub":
        raise ValueError(f"{owner}: {name} must be numbers, got {check.shown(value)}.")
    return array


def finite(owner: str, name: str, value: object, shape: tuple[int | str, ...]) -> np.ndarray:
    """An array of finite numbers of that shape, as NumPy's."""
    array = checked_numbers(owner, name, value, shape)
    if not np.isfinite(array).all():
        raise ValueError(f"{owner}: {name} must be finite, but some are NaN or infinite, as where a solve diverged.")
    return array


def check_names(owner: str, names: object, **counts: int | None) -> None:
    """Raise unless there are as many names as the weights have tasks, features and classes, or none."""
    check.instance(owner, "names", names, Names, "that of pack_tasks(...)")
    for what, count in counts.items():
        each_name = getattr(names, what)
        if None not in (each_name, count) and len(each_name) != count:
            raise ValueError(f"{owner}: names has {len(each_name)} {what}, but weights are of {count}.")


def _names_of(owner: str, task: object, count: int) -> list[Hashable]:
    """The name of the task of every sample."""
    if isinstance(task, str | int | float | np.generic):
        names: list[object] = [task] * count
    else:  # a list, a column of a data frame, an array
        several = isinstance(task, Iterable) and not isinstance(task, Set | Mapping) and getattr(task, "ndim", 1) > 0
        names = list(task) if several else []  # type: ignore[call-overload]
        if len(names) != count:
            raise ValueError(
                f"{owner}: task must be a name, or one for each of the {count} samples; got {check.shown(task)}."
            )
    plain = [each.item() if isinstance(each, np.generic) else each for each in names]
    for i, each in enumerate(plain):
        if not isinstance(each, Hashable) or (each is not None and is_missing(each)):
            raise ValueError(f"{owner}: task must be names, but that of sample {i} is {each!r}.")
    return plain


class WeightsModel(NamedModel):
    """Base class of models with weights of every task, ``[..., num_tasks, d]``."""

    weights: np.ndarray
    intercept: np.ndarray  # [..., num_tasks]

    @property
    def num_tasks(self) -> int:
        """The number of tasks; 1 of a global model."""
        return self.weights.shape[-2]

    @property
    def num_features(self) -> int:  # type: ignore[override]
        """Length of a sample, without the intercept."""
        return self.weights.shape[-1]

    def weights_for(self, data: TaskData) -> np.ndarray:
        """The weights of the tasks of a data set, found by their names ``[..., tasks of the data, d + intercept]``."""
        order, columns = matched(self.names, self.num_tasks, self.weights.shape[-1], data)
        weights, intercept = self.weights[..., order, :][..., columns], self.intercept[..., order]
        if data.scaling is not None:
            weights, intercept = data.scaling.of_raw(weights, intercept)
        if np.any(intercept) and not data.intercept:
            raise ValueError("model: it has an intercept, and the data was packed without one; pass intercept=True.")
        return np.concatenate([weights, intercept[..., None] / data.intercept], axis=-1) if data.intercept else weights

    def _scored(self, x: ArrayLike, task: object, unseen: str) -> tuple[np.ndarray, np.ndarray]:
        """Predictions ``[..., k]``, and the task of each sample; -1 of one that is new."""
        samples, tasks = self._asked(x, task, unseen)
        samples = samples.astype(self.weights.dtype)
        weights, intercept = self.weights, self.intercept
        if (tasks < 0).any():
            weights = np.concatenate([weights, weights.mean(axis=-2, keepdims=True)], axis=-2)
            intercept = np.concatenate([intercept, intercept.mean(axis=-1, keepdims=True)], axis=-1)
        z = [np.einsum("kd,kd->k", samples, each[tasks]) for each in weights.reshape(-1, *weights.shape[-2:])]
        return np.reshape(z, (*weights.shape[:-2], len(samples))) + intercept[..., tasks], tasks
