"""A client in a round, with the operations that methods of federated training are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from mocha_jax._core.pytree import PyTree, SameTree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Batch, Pull, Schedule, Trained, in_random_order, train
from mocha_jax._neural.prediction import ROWS
from mocha_jax._neural.private_gradients import OfClient, private_losses, private_mean_loss
from mocha_jax._neural.trainer import mean_loss
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params
from mocha_jax.networks._base import outputs

LOCAL = "local"  # the first phase of every round

# Folded into a client's key for phases after the first one, for batches drawn besides, and for those that compare
# models; epochs count below them.
_PHASES, _DRAWS, _COMPARED = np.uint32(2**32 - 2**16), np.uint32(2**32 - 2**17), np.uint32(2**32 - 2**18)

Objective = Callable[[PyTree, Batch, Array], Array]  # of parameters, a batch and a key
Gradient = Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]  # of the same: a loss, and a direction of ascent


class Phase(NamedTuple):
    """A phase of a client's training after the first one; static. Its defaults are those of the first."""

    name: str
    optimizer: optax.GradientTransformation | None = None
    epochs: int | None = None
    full_batch: bool = False  # all samples at once
    gradients: float = 1.0  # of a batch that a step computes, which is its price


class PhaseTraining(NamedTuple):
    """Optimizer, epochs and batches of a client in a phase; static."""

    optimizer: optax.GradientTransformation
    schedule: Schedule
    gradients: float = 1.0

    def of(self, phase: Phase) -> PhaseTraining:
        """Return the optimizer, epochs and batches of another phase."""
        epochs = self.schedule.epochs if phase.epochs is None else phase.epochs
        batch = None if phase.full_batch else self.schedule.batch
        schedule = self.schedule.with_settings(epochs, batch)
        return PhaseTraining(phase.optimizer or self.optimizer, schedule, phase.gradients)


class Client(NamedTuple):
    """A client in a round: what it received, and its operations.

    A method's functions of a client are written for one client and mapped over all of them.
    """

    shared: PyTree  # what the server sends to all
    row: PyTree  # what the server sends to this client alone
    numbers: Mapping[str, Array]  # the method's, by name
    rate: Array  # [] factor of every update
    key: Array  # of this client in this round
    data: TaskData  # has its samples
    place: Array  # [] int32 where
    node: Array  # [] int32 its number among all
    steps: Mapping[str, Array]  # [] int32 of each phase
    phases: Mapping[str, PhaseTraining]
    network: Network
    likelihood: Likelihood
    privacy: OfClient | None = None  # None: its answers may say anything of its samples

    @property
    def weight(self) -> Array:
        """The total weight of its samples, []: their number with ``loss_scaling="sum"``, 1 with ``"task_mean"``."""
        return jnp.sum(self.data.weight[self.place])

    def mean_loss(self, params: Params, batch: Batch, key: Array | None) -> Array:
        """Return the weighted mean loss of a batch, the objective of plain training; privacy leaves its gradient."""
        if self.privacy is not None:
            return private_mean_loss(mean_loss, self.network, self.likelihood, params, batch, key, self.privacy)
        return mean_loss(self.network, self.likelihood, params, batch, key)

    def train(
        self, params: SameTree, objective: Objective | None = None, *, gradient: Gradient | None = None,
        pull: Pull | None = None, phase: str = LOCAL, optimizer: optax.OptState | None = None,
        weight: Array | None = None,
    ) -> Trained[SameTree]:  # fmt: skip
        """Train for the steps of a phase.

        Args:
          params: where to begin.
          objective: ``objective(params, batch, key)``, differentiated. Default `mean_loss`.
          gradient: in place of its gradient, ``gradient(params, batch, key)``: a loss and a direction of ascent.
          pull: a term of the objective beside it, of which the loss that is reported says nothing.
          phase: by name; its budget, optimizer and batches.
          optimizer: state of the optimizer. Default: it begins anew.
          weight: ``[n]`` of the samples, positive where they are real. Default the data's.
        """
        phases = list(self.phases)
        how = self.phases[phase]
        key = self.key if phase == phases[0] else jax.random.fold_in(self.key, _PHASES + np.uint32(phases.index(phase)))
        step = how.optimizer if self.privacy is None else by_gradients(how.optimizer)
        begin = step.init(params) if optimizer is None else optimizer
        if gradient is None:
            gradient = jax.value_and_grad(self.mean_loss if objective is None else objective)
        weight = self.data.weight[self.place] if weight is None else weight
        return train(key, self.data, self.place, weight, self.steps[phase], how.schedule, step, gradient,
                     params, begin, self.rate, pull)  # fmt: skip

    def losses(self, params: Params) -> Array:
        """Compute the loss of each of its samples, ``[n]``; 0 for padding."""
        self._only_gradients("losses of samples")

        def some(rows: tuple[Array, Array, Array]) -> Array:
            x, y = self.likelihood.parts(rows[0].astype(rows[1].dtype), rows[1])
            losses = self.likelihood.loss(outputs(self.network, params, x, y.shape), y)
            return jnp.where(rows[2] > 0, losses.reshape(len(rows[1]), -1).sum(axis=1), 0.0)

        data, place, weight = self.data, self.place, self.data.weight[self.place]
        every = jnp.arange(len(weight), dtype=jnp.int32)
        # In place of padding the first real row, which a model can always predict; it counts for nothing.
        rows = jnp.where(weight > 0, every, jnp.argmax(weight > 0).astype(jnp.int32))
        x, y = data.x[place, rows], data.y[place, rows]
        return lax.map(some, (x[:, None], y[:, None], weight[:, None]), batch_size=ROWS)[:, 0]

    def loss(self, params: Params) -> Array:
        """Compute the weighted mean loss of all its samples, []."""
        weight = self.data.weight[self.place]
        return safe_ratio(jnp.sum(weight * self.losses(params)), jnp.sum(weight))

    def compared(self, models: Params, batches: Array | int = 1, phase: str = LOCAL) -> tuple[Array, Client]:
        """Compute the mean loss of its samples by each of some models ``[k, ...]``, ``[k]``, to compare them.

        Of a private client it is the sum over so many batches of what `private_losses` tells: each counts as a step.

        Returns:
          The losses; the client with the steps that they leave it.
        """
        if self.privacy is None:
            return lax.map(self.loss, models), self
        how, key = self.privacy, jax.random.fold_in(self.key, _COMPARED)
        data, place, weight = self.data, self.place, self.data.weight[self.place]
        batch_of = self.phases[phase].schedule.batches(key, weight > 0)

        def add(i: Array, total: Array) -> Array:
            rows, real = batch_of(i)
            batch = Batch(
                data.x[place, rows].astype(data.dtype), data.y[place, rows], jnp.where(real, weight[rows], 0.0)
            )
            of_step = jax.random.fold_in(key, i)
            return total + private_losses(mean_loss, self.network, self.likelihood, models, batch, of_step, how)

        losses = lax.fori_loop(0, batches, add, jnp.zeros(len(jax.tree.leaves(models)[0]), data.dtype))
        left = jnp.maximum(self.steps[phase] - batches, 0)
        return losses, self._replace(steps={**self.steps, phase: left})

    def batch(self, key: Array, phase: str = LOCAL) -> Batch:
        """Draw another batch of a phase's size, without replacement; all samples where it is as large as that."""
        self._only_gradients("batches of its own")
        data, place = self.data, self.place
        weight, room = data.weight[place], self.phases[phase].schedule.room(data)
        places = jnp.arange(room, dtype=jnp.int32)
        size = jnp.sum(weight > 0, dtype=jnp.int32)
        # What is missing are samples of the client again, with weight 0.
        order = in_random_order(jax.random.fold_in(key, _DRAWS), weight > 0)
        rows = order[places % jnp.maximum(size, 1)]
        weight = jnp.where(places < size, weight[rows], 0.0)
        return Batch(data.x[place, rows].astype(data.dtype), data.y[place, rows], weight)

    def _only_gradients(self, what: str) -> None:
        """Raise where a method of private clients looks at samples in another way."""
        if self.privacy is not None:
            raise ValueError(f"ExampleLevel: the method reads {what}, and privacy covers gradients of mean_loss alone.")


def by_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leave an optimizer the gradient of a step alone: a line search would compute others, with the same noise."""

    def update(updates: SameTree, state: optax.OptState, params: Tree | None = None) -> tuple[SameTree, optax.OptState]:
        return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def divided(budget: Array, phases: Mapping[str, PhaseTraining], data: TaskData, place: Array) -> dict[str, Array]:
    """Divide a client's budget of steps among phases in proportion to their full work."""
    if len(phases) < 2:
        return dict.fromkeys(phases, budget)
    ends = jnp.cumsum(jnp.stack([phase.schedule.steps(data)[place] for phase in phases.values()]), dtype=jnp.int32)
    share = safe_ratio(budget.astype(data.dtype), ends[-1].astype(data.dtype))
    steps = jnp.diff(jnp.round(share * ends.astype(data.dtype)).astype(jnp.int32), prepend=jnp.zeros((1,), jnp.int32))
    return dict(zip(phases, steps, strict=True))
