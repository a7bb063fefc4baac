"""Training whose clients may have budgets of privacy: steps that each may take, and those that it has taken."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Schedule
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.private_gradients import ByChance, ExampleLevel
from mocha_jax._neural.trainer import Trainer
from mocha_jax._neural.training_state import TrainingState


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
        weight = check.concrete(problem.data.weight) if self.privacy is not None else None
        if weight is None:
            return
        # A sample's gradient is weighed by its share of the largest weight, so the largest one would change all others.
        # Weights that differ by a millionth are alike but for rounding.
        least = np.where(weight > 0, weight, np.inf).min(axis=1, initial=np.inf)
        if (uneven := weight.max(axis=1, initial=0.0) > 1.000001 * least).any():
            raise ValueError(
                f"{self.name}: samples of client {int(uneven.argmax())} have different weights; privacy is proven for "
                f"samples that count the same."
            )

    @property
    def schedule(self) -> Schedule:
        settings = self.local_epochs, self.batch_size
        return Schedule(*settings) if self.privacy is None else ByChance(*settings)

    @abstractmethod
    def tuning_steps(self, data: TaskData) -> Array:
        """Steps by which each client is made ready, ``[m]`` int32."""

    def first_spent(self, m: int) -> PyTree:
        """The steps that clients have spent before the first round, ``[m]`` int32; nothing without privacy."""
        return () if self.privacy is None else jnp.zeros((m,), jnp.int32)

    def allowed(self, budget: Array, spent: PyTree, data: TaskData, nodes: Array | None = None) -> tuple[Array, PyTree]:
        """The steps of a round that privacy leaves, ``[m]`` int32, and what clients have spent after it.

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
        budget = jnp.minimum(budget, self.privacy.left(spent + reserved, nodes))
        return budget, spent + budget

    def exhausted(self, state: TrainingState, problem: Prediction) -> Array:
        if self.privacy is None:
            return super().exhausted(state, problem)
        data = problem.data
        some, _ = self.allowed(jnp.ones_like(data.sizes), state.spent, data)
        return jnp.sum((data.sizes > 0) & (some == 0), dtype=jnp.int32)

    def reported(self, loss: Array) -> Array:
        """The training's loss as far as it may be known: NaN with privacy."""
        return loss if self.privacy is None else jnp.full_like(loss, jnp.nan)
