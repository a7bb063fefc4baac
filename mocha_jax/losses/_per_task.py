"""A separate loss for every task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, tree
from mocha_jax.losses._base import Loss, Piece

Found = TypeVar("Found")  # an array, or a tuple of some
Duals = Callable[[Array], Array]  # duals as one of the losses takes them


class PerTask(Loss):
    r"""Every task's own loss $\ell_t$, as in eq. (1) of the paper.

    Tasks may differ in hyperparameters, in the kind of loss, or in both. Of k kinds a coordinate step computes k steps
    and takes the task's own; what differs in hyperparameters only costs nothing. Conjugates, steps and certificates
    are those of the losses, so that a solve is as exact as with one of them. As its smoothness and Lipschitz constant
    it gives the largest of its tasks', with which the bounds of `theory` hold for all of them.

    The losses are kept by kind, their hyperparameters as arrays ``[num_tasks, 1]``: its methods take arrays with a row
    for every task.

    Args:
      losses: one loss per task; or, with `which`, the losses to choose from; or a single loss whose hyperparameters are
        numbers and arrays ``[num_tasks]``.
      which: the place in `losses` of each task's loss, integers ``[num_tasks]``.

    Examples:
      Two tasks with labels -1 and +1, one with real ones:

      >>> import numpy as np, mocha_jax as mj
      >>> x = np.random.default_rng(0).normal(size=(3, 20, 4)).astype("f")
      >>> data = mj.pack_tasks(list(x), [np.sign(x[0, :, 0]), np.sign(x[1, :, 0]), x[2, :, 0]])
      >>> loss = mj.losses.PerTask([mj.losses.Hinge(), mj.losses.Squared()], which=[0, 0, 1])
      >>> solution = mj.solve(mj.Problem(data, loss, mj.regularizers.MeanRegularized(1.0, 1.0)), tol=1e-3)
      >>> solution.status.name, type(loss.of_task(2)).__name__
      ('CONVERGED', 'Squared')

      A quantile of its own for every task:

      >>> loss = mj.losses.PerTask(mj.losses.Quantile(np.array([0.25, 0.5, 0.75])))
      >>> loss.value(np.zeros((3, 1)), np.ones((3, 1))).tolist()
      [[0.25], [0.5], [0.75]]

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    kinds: tuple[Loss, ...] = tree()  # with hyperparameters of all tasks; those of tasks of other kinds only fill up
    which: Array  # [num_tasks, 1] each task's kind

    def __init__(self, losses: Loss | Sequence[Loss], which: ArrayLike | Sequence[int] | None = None) -> None:
        listed = [losses] if isinstance(losses, Loss) else check.sequence("PerTask", "losses", losses)
        for i, loss in enumerate(listed):
            check.instance("PerTask", f"losses[{i}]", loss, Loss, "losses.Hinge()")
            if isinstance(loss, PerTask):
                raise ValueError(f"PerTask: losses[{i}] is a PerTask itself; pass the losses of the tasks.")
        kinds, kind = _by_kind(cast(list[Loss], listed), _numbered(cast(list[Loss], listed), which))
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "which", kind)

    def replace(self, **changes: object) -> Self:
        return self.exchange(**changes)

    @property
    def num_tasks(self) -> int:
        """The number of tasks it is for."""
        return self.which.shape[0]

    def of_nodes(self, task: Array) -> PerTask:
        return jax.tree.map(lambda a: a[task], self)

    def of_task(self, task: int) -> Loss:
        kind = self.kinds[int(self.which[task, 0])]
        return jax.tree.map(lambda a: a[task, 0], kind)

    def check_tasks(self, num_tasks: int) -> None:
        if self.num_tasks != num_tasks:
            raise ValueError(f"PerTask: there are losses for {self.num_tasks} tasks, and data of {num_tasks}.")

    @property
    def binary(self) -> bool:  # type: ignore[override]
        return all(kind.binary for kind in self.kinds)

    @property
    def scored_by(self) -> str:  # type: ignore[override]
        metrics_of = {kind.scored_by for kind in self.kinds}
        return metrics_of.pop() if len(metrics_of) == 1 else super().scored_by

    @property
    def in_kernel(self) -> bool:  # type: ignore[override]
        return all(kind.in_kernel for kind in self.kinds)

    @property
    def piecewise_linear(self) -> bool:  # type: ignore[override]
        return len(self.kinds) == 1 and self.kinds[0].piecewise_linear  # others may have more pieces

    @property
    def admissible(self) -> Array:
        return jnp.all(jnp.stack([kind.admissible for kind in self.kinds]))

    @property
    def smoothness(self) -> Hyperparameter | None:
        return self._largest([kind.smoothness for kind in self.kinds])

    @property
    def lipschitz(self) -> Hyperparameter | None:
        return self._largest([kind.lipschitz for kind in self.kinds])

    def _largest(self, bounds: list[Hyperparameter | None]) -> Array | None:
        """The largest of all tasks' own bounds, None where one has none."""
        if any(bound is None for bound in bounds):
            return None
        own = [jnp.where(self.which == k, jnp.asarray(bound), -jnp.inf) for k, bound in enumerate(bounds)]
        return jnp.max(jnp.stack(own))

    @property
    def label_rule(self) -> str:
        return next((kind.label_rule for kind in self.kinds if kind.label_rule), "")

    def admits(self, y: Array) -> Array:
        own = [(self.which != k) | kind.admits(y) for k, kind in enumerate(self.kinds)]
        return jnp.all(jnp.stack(own), axis=0)

    def _own(self, of: Callable[[Loss, Duals, Array], Found], y: Array) -> Found:
        """Compute ``of(loss, duals, labels)`` with each sample's own loss.

        The other losses of a sample get a label and duals that any loss takes: what they make of them is thrown away,
        but where it were no number, its derivative would still be none.
        """
        of_tasks = of(self.kinds[0], *self._given(0, y))
        for k, kind in enumerate(self.kinds[1:], 1):
            choose = partial(jnp.where, self.which == k)
            of_tasks = jax.tree.map(choose, of(kind, *self._given(k, y)), of_tasks)
        return of_tasks

    def _given(self, k: int, y: Array) -> tuple[Duals, Array]:
        """Make duals and labels fit for loss k."""
        if len(self.kinds) == 1:
            return lambda beta: beta, y
        of_kind, project = self.which == k, self.kinds[k].project
        label = jnp.where(of_kind, y, 1.0)
        return lambda beta: jnp.where(of_kind, beta, project(beta, label)), label

    def decide(self, z: Array) -> Array:
        return self._own(lambda loss, _, y: loss.decide(z), jnp.ones_like(z))

    def value(self, z: Array, y: Array) -> Array:
        return self._own(lambda loss, _, y: loss.value(z, y), y)

    def derivative(self, z: Array, y: Array) -> Array:
        return self._own(lambda loss, _, y: loss.derivative(z, y), y)

    def conjugate(self, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.conjugate(duals(beta), y), y)

    def conjugate_bound(self, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.conjugate_bound(duals(beta), y), y)

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        return self._own(lambda loss, _, y: loss.dual_bounds(y), y)

    def pieces(self, y: Array) -> Sequence[Piece]:
        [kind] = self.kinds
        return kind.pieces(y)

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.dual_step(duals(beta), g, y, kappa), y)

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.fenchel_young(z, duals(beta), y), y)

    def fenchel_young_bound(self, z: Array, error: Array, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.fenchel_young_bound(z, error, duals(beta), y), y)

    def ends(self, z: Array, error: Array, beta: Array, y: Array) -> tuple[Array, Array]:
        return self._own(lambda loss, duals, y: loss.ends(z, error, duals(beta), y), y)

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, duals, y: loss.fenchel_young_change(z, duals(before), duals(beta), y), y)

    def project(self, beta: Array, y: Array) -> Array:
        return self._own(lambda loss, _, y: loss.project(beta, y), y)


def _numbered(losses: list[Loss], which: ArrayLike | Sequence[int] | None) -> np.ndarray:
    """Number each task's loss, ``[num_tasks]``."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(losses)]
    lengths = {shape[0] for shape in shapes if shape}
    if not losses:
        raise ValueError("PerTask: losses is empty; pass one per task, or some and which of them each task has.")
    if any(len(shape) > 1 for shape in shapes) or len(lengths) > 1:
        raise ValueError("PerTask: hyperparameters must be numbers or arrays [num_tasks], all of as many tasks.")
    if which is not None:
        check.array("PerTask", "which", which, ("num_tasks",), "iu")
        numbers = np.asarray(which)
        if not numbers.size or numbers.min() < 0 or numbers.max() >= len(losses):
            raise ValueError(
                f"PerTask: which must hold each task's place in losses, from 0 to {len(losses) - 1}, got "
                f"{check.shown(which)}."
            )
    elif len(losses) > 1 or not lengths:
        numbers = np.arange(len(losses))
    else:
        numbers = np.zeros(min(lengths), int)
    if lengths and lengths != {len(numbers)}:
        raise ValueError(f"PerTask: there are {len(numbers)} tasks, and hyperparameters of {lengths.pop()}.")
    return numbers


def _by_kind(losses: list[Loss], which: np.ndarray) -> tuple[tuple[Loss, ...], np.ndarray]:
    """Put losses of one kind together: their hyperparameters by task ``[num_tasks, 1]``, and each task's kind."""
    members: dict[jax.tree_util.PyTreeDef, list[int]] = {}
    for i in np.unique(which).tolist():
        members.setdefault(jax.tree.structure(losses[i]), []).append(i)
    kinds, kind = [], np.zeros(len(losses), int)
    for k, tasks in enumerate(members.values()):
        kind[tasks] = k
        place = np.zeros(len(losses), int)  # of other kinds' tasks: that of the first
        place[tasks] = np.arange(len(tasks))
        kinds.append(jax.tree.map(partial(_by_task, place[which]), *(losses[i] for i in tasks)))
    return tuple(kinds), kind[which][:, None]


def _by_task(row: np.ndarray, *leaves: Hyperparameter) -> ArrayLike:
    """A hyperparameter of every task ``[num_tasks, 1]``; each leaf is a number or has one of every task."""
    # NumPy where it can: a program for every count of losses were compiled otherwise.
    arrays = jnp if any(isinstance(leaf, jax.Array) for leaf in leaves) else np
    columns = [arrays.broadcast_to(arrays.asarray(leaf), row.shape) for leaf in leaves]
    return arrays.stack(columns, axis=1)[np.arange(len(row)), row][:, None]
