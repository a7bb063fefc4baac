"""Problems with two classes, one for each of several, in one record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, static, tree
from mocha_jax._data.layouts import AsStored
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem


def require_labels(owner: str, data: TaskData, count: int) -> None:
    """Refuse labels other than 0, 1, ..., count - 1; traced labels are not checked."""
    y, real = check.concrete(data.y), check.concrete(data.weight)
    if y is None or real is None:
        return
    labels = y[real > 0]
    if ((labels < 0) | (labels >= count) | (labels != labels.round())).any():
        raise ValueError(f"{owner}: labels must be 0, 1, ..., {count - 1}, got {check.shown(labels)}.")


def count_classes(owner: str, data: TaskData, classes: int | None) -> int:
    """The number of classes: as given, by their names, or one more than the largest label."""
    check.instance(owner, "data", data, TaskData, "pack_tasks(xs, ys)")
    y = np.where(np.asarray(data.weight) > 0, np.asarray(data.y), 0.0)
    if (y != np.round(y)).any() or y.min() < 0:
        raise ValueError(f"{owner}: labels must be 0, 1, ...; map yours with np.unique(y, return_inverse=True)[1].")
    least = int(y.max()) + 1
    if classes is None:
        return max(least, len(data.names.classes or ()))
    check.integer(owner, least, classes=classes)
    return int(classes)


Result = TypeVar("Result")  # a tree of arrays
Make = Callable[[TaskData], Problem]


class EachClass(Pytree):
    """The problem of every class against the rest; what all have, such as the samples, is there once."""

    classes: Array  # [classes] int32 their numbers
    shared: list[Array | None] = tree()  # of every leaf of a problem; None where classes differ
    own: list[Array | None] = tree()  # [classes, ...]; None where they do not
    structure: jax.tree_util.PyTreeDef = static()  # of the problems

    @property
    def common(self) -> Problem:
        """The problem with what all classes have; None in the place of what they have not."""
        return cast(Problem, jax.tree.unflatten(self.structure, self.shared))

    @property
    def size(self) -> int:
        """Count its numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    def map(self, work: Callable[[Problem], Result]) -> Result:
        """Do something for one class after the other, ``[classes, ...]``."""

        def one(own: tuple[Array, list[Array | None]]) -> Result:
            leaves = [b if a is None else a for a, b in zip(self.shared, own[1], strict=True)]
            return work(jax.tree.unflatten(self.structure, leaves))

        return cast(Result, lax.map(one, (self.classes, self.own)))


def each_class(owner: str, data: TaskData, make: Make, classes: int) -> tuple[EachClass, Problem]:
    """Make the problem of every class; also return that of the first, to ask for what it is called.

    Nothing that `make` depends on is part of a compiled program, so that programs are found again.

    Args:
      owner: who asks, for messages.
      data: samples with labels 0, 1, ..., classes - 1.
      make: the problem for labels -1 and +1.
      classes: how many.
    """
    check.function(owner, "make", make, "lambda data: Problem(data, loss, regularizer)")
    y, names = np.asarray(data.y), data.names.replace(classes=None)  # labels -1 and +1 have no names
    problems: list[Problem] = []
    leaves: list[list[Array]] = []  # of every class
    structures: dict[jax.tree_util.PyTreeDef, int] = {}  # and the first class that has it
    for k in range(classes):
        labels = jnp.asarray(np.where(y == k, 1.0, -1.0), data.dtype)
        problem = make(data.exchange(y=labels, names=names, layout=AsStored()))
        check.instance(owner, "what make returns", problem, Problem, "Problem(data, loss, regularizer)")
        if problem.data.y.shape != data.y.shape:
            raise ValueError(f"{owner}: what make returns must have the rows of the data, {data.y.shape}.")
        of_problem, structure = jax.tree.flatten(problem.unnamed())
        problems = problems or [problem]
        first = leaves[0] if leaves else of_problem
        if structures.setdefault(structure, k) != 0:
            raise ValueError(f"{owner}: what make returns must be of one kind for all classes, whatever the labels.")
        leaves.append([a if _same(a, b) else b for a, b in zip(first, of_problem, strict=True)])
    columns = list(zip(*leaves, strict=True))
    common = [all(leaf is column[0] for leaf in column) for column in columns]
    shared = [column[0] if same else None for column, same in zip(columns, common, strict=True)]
    own = [None if same else jnp.stack(column) for column, same in zip(columns, common, strict=True)]
    return EachClass(jnp.arange(classes, dtype=jnp.int32), shared, own, structure), problems[0]


def _same(one: Array, other: Array) -> bool:
    return one is other or (one.shape == other.shape and np.array_equal(one, other))
