"""Problems: data, loss and regularizer."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import NodeSharding, on_device, on_purpose
from mocha_jax._core.pytree import Pytree, Relation
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.base import HowTrained
from mocha_jax._model.network import NetworkModel
from mocha_jax.losses import Loss
from mocha_jax.networks import Network, Params
from mocha_jax.regularizers import Regularizer


class Quality(Pytree):
    """Base class of an answer's quality, which `Algorithm.certify` returns and histories keep."""

    residual: Array  # [] what a solve compares with its tolerance

    @property
    @abstractmethod
    def finite(self) -> Array:
        """True if more rounds make sense, [] bool."""

    @property
    def bound(self) -> Array:
        """Lower bound on the optimum, valid for all later rounds, []; minus infinity if unknown."""
        return jnp.full_like(self.residual, -jnp.inf)

    def with_bound(self, problem: Any, bound: Array) -> Self:
        """Tighten with a lower bound from an earlier round."""
        return self

    def summary(self) -> Self:
        """Without what is large."""
        return self


class Federated(Pytree):
    """Base class of problems: all that `run`, `solve` and `shard` ask of one."""

    data: TaskData

    convex: ClassVar[bool] = False  # whether its optimum is certified and has derivatives
    solvers: ClassVar[str] = ""  # the algorithms for it, to be named in an error

    @property
    @abstractmethod
    def criterion_name(self) -> str:
        """The name of the quantity that a solve compares with its tolerance."""

    @property
    @abstractmethod
    def objective_name(self) -> str:
        """The name of the quantity that must stay finite."""

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return type(self).__name__

    @property
    def jointly_convex(self) -> bool:
        """Tell whether it is convex in W and Omega together. Default: no."""
        return False

    def relationship(self, num_tasks: int, relation: Relation) -> Array:
        """Write out Omega, ``[num_tasks, num_tasks]``, where the problem has one."""
        raise AttributeError(f"a {type(self).__name__} has no matrix Omega")

    def covariance(self, num_tasks: int, relation: Relation) -> Array:
        """Write out the tasks' covariance, ``[num_tasks, num_tasks]``, where the problem has one."""
        raise AttributeError(f"a {type(self).__name__} has no covariance of tasks")

    def placement(self, sharding: NodeSharding) -> NodeSharding:
        """Name the part of the server's work that is divided among devices. Default: nothing."""
        return sharding

    def unnamed(self) -> Self:
        """Leave out the names, which are no part of a program: of other ones nothing is compiled anew."""
        data = self.data.unnamed()
        return self if data is self.data else self.exchange(data=data)

    def network_model(self, network: Network, parameters: Params, trained: HowTrained) -> NetworkModel:
        """The model of trained parameters with the names of this problem's data, where a network is what is trained."""
        raise AttributeError(f"a {type(self).__name__} has no model with names")

    def remarks(self, quality: Any) -> str:
        """Return what a solve's message adds about an answer; empty where there is nothing."""
        return ""

    def aim(self, tol: float) -> float:
        """The recorded residual at which rounds end, so that the answer is within `tol` when everything is counted."""
        return tol

    @property
    def rounding_level(self) -> float:
        """The recorded residual below which rounding explains that rounds gain no more. Default: none."""
        return -math.inf


class Problem(Federated):
    r"""The convex problem $\min_W \sum_t\sum_i c_{ti}\,\ell(w_t^\top x_{ti}, y_{ti}) + R(W)$.

    Hyperparameters are cast to the data's dtype here, once, so that a Python number and an
    array of any float type compile to the same program.

    Args:
      data: from `pack_tasks`.
      loss: from `mocha_jax.losses`.
      regularizer: from `mocha_jax.regularizers`.
    """

    loss: Loss
    regularizer: Regularizer

    convex = True
    solvers = "Mocha, Newton, InteriorPoint, Cocoa, MiniBatchSdca, MiniBatchSgd and privacy.PrivateSdca"

    @property
    def criterion_name(self) -> str:
        if not self.regularizer.jointly_convex:
            return "residual"
        return "relative joint gap" if self.regularizer.learned else "relative gap"

    @property
    def objective_name(self) -> str:
        return "gap"

    @property
    def model_name(self) -> str:
        return type(self.regularizer).__name__

    @property
    def jointly_convex(self) -> bool:
        return self.regularizer.jointly_convex

    def relationship(self, num_tasks: int, relation: Relation) -> Array:
        return _relationship(self.regularizer, num_tasks, relation)

    def covariance(self, num_tasks: int, relation: Relation) -> Array:
        return _covariance(self.regularizer, num_tasks, relation)

    def placement(self, sharding: NodeSharding) -> NodeSharding:
        # What couples all pairs of tasks is applied on every device; anything else where tasks can be dealt out evenly.
        m = self.data.num_tasks
        # Of shapes alone: a relation of many tasks is large.
        coupling = jax.eval_shape(lambda r: r.coupling(m), self.regularizer)
        return dataclasses.replace(sharding, split_tasks=not coupling.dense and m % sharding.devices == 0)

    def aim(self, tol: float) -> float:
        # Some roundings of the objective may be hidden from a recorded gap, hundreds where a round more pays for them;
        # most of a tiny tolerance is not for them.
        eps = float(jnp.finfo(self.data.dtype).eps)
        return max(tol - min(max(0.1 * tol, 32.0 * eps), 1024.0 * eps), 0.5 * tol)

    @property
    def rounding_level(self) -> float:
        return 64.0 * float(jnp.finfo(self.data.dtype).eps)

    @property
    def admissible(self) -> Array:
        """True where all hyperparameters lie in their domain, [] bool; without that nothing is certified."""
        return self.loss.admissible & self.regularizer.admissible & self.regularizer.fits(self.data.num_tasks)

    @on_purpose
    def __post_init__(self) -> None:
        check.instance("Problem", "data", self.data, TaskData, "pack_tasks(xs, ys)")
        check.instance("Problem", "loss", self.loss, Loss, "Hinge()")
        check.instance("Problem", "regularizer", self.regularizer, Regularizer, "Independent(0.1)")
        dtype = self.data.dtype
        for name in ("loss", "regularizer"):
            record = getattr(self, name)
            check.representable(type(record).__name__, record, dtype)
            object.__setattr__(self, name, jax.tree.map(lambda leaf: on_device(leaf, dtype), record))
        self.loss.check_tasks(self.data.num_tasks)
        self.regularizer.check_tasks(self.data.num_tasks)
        self.regularizer.check_features(self.data.num_features)
        if self.loss.label_rule:
            _check_labels(self.data, self.loss)

    @property
    def node_loss(self) -> Loss:
        """The loss of every node: what differs between tasks is an array ``[m, 1]``."""
        return self.loss.of_nodes(self.data.task)


@partial(jax.jit, static_argnames="num_tasks")
def _relationship(regularizer: Regularizer, num_tasks: int, relation: Relation) -> Array:
    return regularizer.relationship(num_tasks, relation)


@partial(jax.jit, static_argnames="num_tasks")
def _covariance(regularizer: Regularizer, num_tasks: int, relation: Relation) -> Array:
    return regularizer.covariance(num_tasks, relation)


def _check_labels(data: TaskData, loss: Loss) -> None:
    y, weight, task = (check.of_this_process(a) for a in (data.y, data.weight, data.task))
    if y is None or weight is None or task is None or any(map(check.hidden, jax.tree.leaves(loss))):
        return
    with jax.ensure_compile_time_eval():
        of_nodes: Any = loss.of_nodes  # of NumPy's arrays too, for which nothing has to be compiled
        wrong = ~np.asarray(of_nodes(task).admits(y)) & (weight > 0)
    if wrong.any():
        node, row = np.argwhere(wrong)[0]
        task_loss = loss.of_task(int(task[node]))
        rule = task_loss.label_rule
        labels = np.unique(y[weight > 0])
        if task_loss.binary and len(labels) > 2 and labels[0] >= 0 and (labels == labels.round()).all():
            rule = f"labels -1 and +1; for classes 0, 1, ..., {labels[-1]:g} use one_vs_rest(data, make)"
        raise ValueError(
            f"{data.names.task(int(task[node]))}{f' (node {node})' if data.shared else ''}: "
            f"has label {y[node, row]:g}, but {type(task_loss).__name__} needs {rule}."
        )
