"""The simulated federation: how much each node does in a round.

A system turns a key and the round's full workload into `Work`. Systems are pure: the draw
of a node depends on the key, the round and the node, never on padding, on
the number of devices or on how a run was cut into chunks. ``a & b`` does what both allow:

>>> import jax
>>> flaky = Dropout(0.3) & PartialEpochs(0.1, 1.0)
>>> flaky
Both(first=Dropout(p=0.3), second=PartialEpochs(low=0.1, high=1.0))
"""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax import _check
from mocha_jax._data import TaskData
from mocha_jax._pytree import Hyperparameter, Pytree, static


class Work(Pytree):
    """What every node does in one round. No steps, or not active: dropped (theta = 1).

    An algorithm does at most its own full round, whatever it is given.
    """

    steps: Array  # [m] int32 coordinate updates
    active: Array  # [m] bool whether the node answers at all

    def __post_init__(self) -> None:
        if np.ndim(self.steps) != 1 or np.shape(self.steps) != np.shape(self.active):
            raise ValueError(
                f"Work: steps and active must both be [m], got shapes {np.shape(self.steps)} and "
                f"{np.shape(self.active)}."
            )
        if (steps := _check.concrete(self.steps)) is not None and (steps < 0).any():
            node = int(np.argmax(steps < 0))
            raise ValueError(f"Work: node {node} is given {steps[node]} steps; a node that does nothing has 0.")

    def budget(self) -> Array:
        """Steps of the nodes that answer, 0 for the others, ``[m]``."""
        return jnp.where(self.active, self.steps, 0)


class System(Pytree):
    """How nodes behave. Subclasses say it in `work`."""

    @abstractmethod
    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        """The work of one round.

        Args:
          key: this round's key; the key is consumed.
          data: for the nodes' sizes and tasks.
          full: steps of a full round of each node, ``[m]`` int32.
        """

    def __and__(self, other: System) -> Both:
        return Both(self, other)


class Full(System):
    """Every node answers and does all its work."""

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        return Work(full, jnp.ones_like(full, bool))


class Both(System):
    """What two systems both allow: the fewer steps, active where both are."""

    first: System
    second: System

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        a = self.first.work(jax.random.fold_in(key, 0), data, full)
        b = self.second.work(jax.random.fold_in(key, 1), data, full)
        return Work(jnp.minimum(a.steps, b.steps), a.active & b.active)


class PartialEpochs(System):
    """Each node does a uniformly random fraction of its full work, at least one step.

    Args:
      low: smallest fraction, in [0, 1].
      high: largest fraction, in [low, 1].
    """

    low: Hyperparameter
    high: Hyperparameter

    def __post_init__(self) -> None:
        _check_range("PartialEpochs", self.low, self.high)

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        return Work(_uniform_steps(key, full, self.low, self.high), jnp.ones_like(full, bool))


class UniformBudget(System):
    """The paper's stragglers (E.3): steps drawn from [low, high] times the smallest n_t.

    Every node draws from the same range, however much data it has. High variability is
    ``UniformBudget(0.1, 1.0)``, low variability ``UniformBudget(0.9, 1.0)``.

    Args:
      low: smallest fraction of the smallest node's data, in [0, 1].
      high: largest fraction, in [low, 1].
    """

    low: Hyperparameter
    high: Hyperparameter

    def __post_init__(self) -> None:
        _check_range("UniformBudget", self.low, self.high)

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        sizes = data.sizes
        smallest = jnp.min(jnp.where(sizes > 0, sizes, jnp.iinfo(jnp.int32).max))
        steps = _uniform_steps(key, jnp.full_like(sizes, smallest), self.low, self.high)
        return Work(jnp.minimum(steps, full), jnp.ones_like(full, bool))


class Dropout(System):
    r"""Nodes miss a round at random, each on its own: :math:`p_t^h` of Assumption 2.

    Args:
      p: probability of missing a round, in [0, 1]; a number, or one per task ``[num_tasks]``.
    """

    p: Hyperparameter

    def __post_init__(self) -> None:
        _check.in_unit_interval("Dropout", p=self.p)

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        if jnp.ndim(self.p) and jnp.shape(self.p) != (data.num_tasks,):
            raise ValueError(
                f"Dropout: p must be a number or one per task [{data.num_tasks}], got shape {jnp.shape(self.p)}."
            )
        p = jnp.broadcast_to(jnp.asarray(self.p, data.x.dtype), (data.num_tasks,))
        return Work(full, _per_node_uniform(key, full.shape[0], data.x.dtype) >= data.to_nodes(p))


class NeverAnswers(System):
    """Some nodes never answer: the case that Assumption 2 rules out.

    Args:
      nodes: indices of the silent nodes.
    """

    nodes: tuple[int, ...] = static()

    def __post_init__(self) -> None:
        nodes = tuple(int(k) for k in np.atleast_1d(np.asarray(self.nodes, dtype=int)))
        if any(k < 0 for k in nodes):
            raise ValueError(f"NeverAnswers: nodes are counted from 0, got {nodes}.")
        object.__setattr__(self, "nodes", nodes)

    def work(self, key: Array, data: TaskData, full: Array) -> Work:
        if self.nodes and max(self.nodes) >= data.num_nodes:
            raise ValueError(f"NeverAnswers: node {max(self.nodes)} does not exist; there are {data.num_nodes} nodes.")
        silent = np.zeros(data.num_nodes, bool)
        silent[list(self.nodes)] = True
        return Work(full, jnp.asarray(~silent))


def _check_range(owner: str, low: Hyperparameter, high: Hyperparameter) -> None:
    _check.in_unit_interval(owner, low=low, high=high)
    a, b = _check.concrete(low), _check.concrete(high)
    if a is not None and b is not None and np.any(a > b):
        raise ValueError(f"{owner}: low must not exceed high, got {a} > {b}.")


def _uniform_steps(key: Array, full: Array, low: Hyperparameter, high: Hyperparameter) -> Array:
    """Steps uniform in [low, high] times `full`, rounded, at least one where there is work."""
    dtype = jnp.result_type(float)
    share = jnp.asarray(low, dtype) + jnp.asarray(high - low, dtype) * _per_node_uniform(key, full.shape[0], dtype)
    steps = jnp.round(share * full.astype(dtype)).astype(full.dtype)
    return jnp.clip(steps, jnp.minimum(full, 1), full)


def _per_node_uniform(key: Array, count: int, dtype: jnp.dtype) -> Array:
    """Uniform draws in [0, 1), one a node; node k's depends on the key and on k only."""
    return jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(key, k), dtype=dtype))(jnp.arange(count))
