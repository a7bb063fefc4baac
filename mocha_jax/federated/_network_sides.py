"""The parts that the sides of `FedAvg` and `Virtual` share."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.bayesian import VirtualState
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import Trainer
from mocha_jax._neural.training_state import TrainingState
from mocha_jax._problem.problem import Quality
from mocha_jax.federated._sides import where
from mocha_jax.likelihoods import Likelihood

Record = TypeVar("Record")


class Training(Quality):
    """The quality of networks as far as a server knows it: their training loss.

    ``residual`` is infinite, since the networks are not evaluated on held-out samples.
    """

    loss: Array  # [] as `Evaluation` has it: of FedAvg mean over the training of the last round with answers, of
    # VIRTUAL mean over the last trainings of all nodes that answered; infinite before any
    diverged: Array  # [] int32 answers left out so far because their training was not finite
    alive: Array  # [] bool false where as many of them in a row as there are nodes were not finite

    @property
    def finite(self) -> Array:
        return jnp.asarray(self.alive)


def training(state: TrainingState | VirtualState, counts: Array) -> Training:
    """The quality of a state, after the answers of nodes with so many samples ``[m]``."""
    nodes = jnp.maximum(jnp.sum(counts > 0, dtype=jnp.int32), 1)
    return Training(jnp.full_like(state.loss, jnp.inf), state.loss, state.diverged, state.failed < nodes)


def problem_of(algorithm: Trainer, data: TaskData, likelihood: Likelihood) -> Prediction:
    """The problem of a node that has these samples."""
    check.instance("Node", "loss", likelihood, Likelihood, "likelihoods.Categorical()")
    problem = Prediction(data, likelihood)
    algorithm.check(problem)
    return problem.unnamed()


def no_regularizer(algorithm: Trainer, regularizer: object) -> None:
    """Raise where there is one."""
    if regularizer is not None:
        raise ValueError(f"Server: {algorithm.name} has no regularizer, got {check.shown(regularizer)}; pass None.")


def check_paths(algorithm: Trainer, params: Tree) -> None:
    """Raise where two parameters' paths have the same name: arrays of messages go by these."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(
            f"{algorithm.name}: the model's parameters have {twice[0]} twice; name them so that messages can "
            f"tell them apart."
        )


def steps_of(asked: Array, full: Array) -> Array:
    """Steps that nodes do ``[m]`` int32: those of a full round where below 0 are asked for, and never more."""
    return jnp.where(asked < 0, full, jnp.minimum(asked, full))


def row_of(record: Record, node: Array) -> Record:
    """Take one node's row of what came down: its arrays have a row for every node, or one for all."""
    return jax.tree.map(lambda a: a[jnp.minimum(node, len(a) - 1)], record)


def total_of(answered: Array, answers: Record) -> Record:
    """The sum of the answers of the nodes that answered, ``[m, ...]`` to ``[...]``."""
    return jax.tree.map(lambda a: jnp.sum(where(answered, a, jnp.zeros_like(a)), axis=0, dtype=a.dtype), answers)


def implausible_numbers(samples: Array, **flags: Array) -> dict[str, Array]:
    """Mark what is wrong with the numbers that every answer has, ``[m]`` bool each."""
    marks = {"says that it has no sample; of a node without any, see Server.leave": samples < 1}
    for name, flag in flags.items():
        marks[f"sent a number for {name} that is neither 0 nor 1"] = (flag < 0) | (flag > 1)
    return marks
