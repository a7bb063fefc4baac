"""Training whose clients may have budgets of privacy: steps that each may take, and those that it has taken."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Schedule
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.private_gradients import ByChance, ExampleLevel, Spent, check_same_weights
from mocha_jax._neural.trainer import Trainer
from mocha_jax._neural.training_state import TrainingState
from mocha_jax._numerics.math import safe_ratio


class BudgetedTrainer(Trainer):
    """Base class of trainers that may be private, each client within its budget."""

    privacy: ExampleLevel | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy is not None:
            name = self.name
            check.instance(name, "privacy", self.privacy, ExampleLevel, "privacy.ExampleLevel(noise=1.0, steps=100)")

    def check(self, problem: Prediction) -> None:
        super().check(problem)
        if self.privacy is not None:
            # A sample's gradient is weighed by its share of the largest weight, which so would change all others.
            check_same_weights(self.name, problem.data)

    @property
    def schedule(self) -> Schedule:
        settings = self.local_epochs, self.batch_size
        return Schedule(*settings) if self.privacy is None else ByChance(*settings)

    @abstractmethod
    def tuning_steps(self, data: TaskData) -> Array:
        """Steps by which each client is made ready, ``[m]`` int32."""

    def planned_steps(self, problem: Prediction, rounds: int) -> Array:
        """Steps of so many full rounds and of what follows them, ``[m]`` int32."""
        return rounds * self.full_work(problem) + self.tuning_steps(problem.data)

    def taken(self, problem: Prediction, state: TrainingState) -> Spent:
        """Return what clients have spent, with the steps by which each is made ready."""
        nodes = jnp.arange(problem.data.num_nodes, dtype=jnp.int32)
        return self._after(state.spent, self.tuning_steps(problem.data), problem.data, nodes)

    def sampling(self, problem: Prediction, samples: int) -> tuple[float, bool]:
        """The chance of each of so many samples to be in a batch, and whether a batch has room for all of them."""
        rows = problem.data.y.shape[1]
        return min(self.schedule.size(rows), samples) / samples, self.schedule.rows(rows) >= samples

    def first_spent(self, m: int) -> PyTree:
        """Return what clients have spent before the first round, a `Spent`; nothing without privacy."""
        return () if self.privacy is None else Spent.nothing(m)

    def allowed(self, budget: Array, spent: PyTree, data: TaskData, nodes: Array | None = None) -> tuple[Array, PyTree]:
        """The steps of a round that privacy leaves, ``[m]`` int32, and what clients have spent after it, a `Spent`.

        Args:
          budget: ``[m]`` int32 steps.
          spent: of `first_spent`, up to now.
          data: of the clients.
          nodes: ``[m]`` int32 their numbers among all. Default: they are all.
        """
        if self.privacy is None:
            return budget, ()
        nodes = jnp.arange(len(budget), dtype=jnp.int32) if nodes is None else nodes
        reserved = self.tuning_steps(data)
        budget = jnp.minimum(budget, self.privacy.left(spent.steps + reserved, nodes))
        return budget, self._after(spent, budget, data, nodes)

    def _after(self, spent: Spent, steps: Array, data: TaskData, nodes: Array) -> Spent:
        """After so many more steps of each ``[m]``."""
        if self.privacy is None:
            return spent
        sizes = data.sizes.astype(jnp.float32)
        batch = jnp.minimum(jnp.float32(self.schedule.size(data.y.shape[1])), sizes)
        share = safe_ratio(batch, sizes)
        return spent.after(steps, self.privacy.noise_of(nodes, jnp.float32), share)

    def exhausted(self, state: TrainingState, problem: Prediction) -> Array:
        if self.privacy is None:
            return super().exhausted(state, problem)
        data = problem.data
        some, _ = self.allowed(jnp.ones_like(data.sizes), state.spent, data)
        return jnp.sum((data.sizes > 0) & (some == 0), dtype=jnp.int32)

    def reported(self, loss: Array) -> Array:
        """The training's loss as far as it may be known: NaN with privacy."""
        return loss if self.privacy is None else jnp.full_like(loss, jnp.nan)
