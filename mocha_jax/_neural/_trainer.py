"""What all methods that train networks share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm
from mocha_jax._neural._flops import flops
from mocha_jax._neural._prediction import (
    Evaluation,
    Judge,
    Prediction,
    Scores,
    evaluation,
    own_network,
    real_labels,
    score,
)
from mocha_jax._neural._training import Batch, Schedule
from mocha_jax._problem import Federated
from mocha_jax._pytree import Hyperparameter, static
from mocha_jax._work import Request
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params


class Trainer(Algorithm[Prediction]):
    """An algorithm that trains a network by mini-batches at the clients. Its state has fields `loss` and `diverged`.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients, from optax.
      local_epochs: passes of a client over its samples in a round.
      batch_size: samples of a step; None for all of a client's.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together by `vmap`, the rest in turn; default 1 on a CPU, whose caches that suits best,
        and 16 elsewhere.
    """

    solves: ClassVar[type[Federated]] = Prediction

    model: Network
    client_optimizer: optax.GradientTransformation = static()
    local_epochs: int = static(default=1, kw_only=True)
    batch_size: int | None = static(default=10, kw_only=True)
    rate: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    seed: Hyperparameter | int = dataclasses.field(default=0, kw_only=True)
    at_once: int | None = static(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check.instance(name, "model", self.model, Network, "networks.MLP(784, 10, (200, 200))")
        if not isinstance(self.client_optimizer, optax.GradientTransformation):
            raise ValueError(f"{name}: client_optimizer must be of optax, e.g. optax.sgd(0.1); got "
                             f"{self.client_optimizer!r}.")  # fmt: skip
        _check.integer(name, 1, local_epochs=self.local_epochs)
        if self.batch_size is not None:
            _check.integer(name, 1, batch_size=self.batch_size)
        if self.at_once is not None:
            _check.integer(name, 1, at_once=self.at_once)
        _check.nonnegative(name, rate=self.rate)

    @property
    def schedule(self) -> Schedule:
        """How a client goes through its samples."""
        return Schedule(self.local_epochs, self.batch_size)

    def start(self, problem: Prediction, node: Array | int = 0) -> Params:
        """The first parameters, in the data's precision; other ones for every node."""
        key = jax.random.fold_in(jax.random.key(jnp.asarray(self.seed, jnp.uint32)), node)
        dtype = problem.data.dtype
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            params = self.model.init(key)
        return jax.tree.map(lambda a: jnp.asarray(a).astype(dtype), params)

    def size(self, problem: Prediction) -> int:
        """How many parameters the model has."""
        shapes = jax.eval_shape(lambda: self.start(problem))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def full_work(self, problem: Prediction) -> Array:
        return self.schedule.steps(problem.data)

    def step_flops(self, problem: Prediction) -> float:
        """Three times those of a prediction: the gradient takes twice as many again."""
        data, room = problem.data, self.schedule.room(problem.data)
        params = jax.eval_shape(lambda: self.start(problem))
        x = jax.ShapeDtypeStruct((room, data.num_features), data.dtype)
        return 3.0 * flops(lambda p, x: outputs(self.model, p, x), params, x)

    def message(self, problem: Prediction) -> tuple[float, float]:
        """Numbers that a client receives and sends in a round."""
        return (float(self.size(problem)),) * 2

    def request(self, problem: Prediction, round: Array | int = 0) -> Request:
        down, up = self.message(problem)
        return (
            super()
            .request(problem, round)
            .replace(down=jnp.asarray(down, problem.data.dtype), up=jnp.asarray(up, problem.data.dtype))
        )

    def check(self, problem: Prediction) -> None:
        """Raise where the model cannot predict the problem's labels."""
        params = jax.eval_shape(lambda: self.start(problem))
        x = jax.ShapeDtypeStruct((2, problem.data.num_features), problem.data.dtype)
        said = jax.eval_shape(lambda p, x: outputs(self.model, p, x), params, x)
        labels = [
            y for data in (problem.data, problem.test) if data is not None and (y := real_labels(data)) is not None
        ]
        known = np.concatenate(labels) if labels else None
        problem.likelihood.check_outputs(type(self).__name__, said.shape[1], known)

    @abstractmethod
    def judge(self, state: Any, problem: Prediction) -> Judge:
        """Losses and errors of samples, by a client's network."""

    def whose(self, problem: Prediction) -> Array | None:
        """The client whose network is to predict each node judged; None: all of them."""
        return own_network(problem)

    def scores(self, state: Any, problem: Prediction) -> Scores:
        """Loss and error of every task on the samples that the problem is judged on."""
        return score(problem.judged_on, self.judge(state, problem), self.whose(problem), problem.data.sizes > 0)

    def certify(self, state: Any, problem: Prediction) -> Evaluation:
        clients = jnp.sum(problem.data.sizes > 0, dtype=jnp.int32)
        alive = state.failed < jnp.maximum(clients, 1)
        return evaluation(self.scores(state, problem), state.loss, state.diverged, alive)


def failures(before: Array, good: Array, bad: Array) -> Array:
    """Trainings in a row that were not finite."""
    return jnp.where(good > 0, 0, before + bad)


def outputs(model: Network, params: Params, x: Array, key: Array | None = None) -> Array:
    """What the model says; models of other libraries take JAX's usual promotion for granted."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        said = model.apply(params, x, key)
    if said.ndim != 2 or len(said) != len(x):
        raise ValueError(
            f"{type(model).__name__}: outputs for samples {x.shape} must be [{len(x)}, c], got {said.shape}."
        )
    return said


def mean_loss(model: Network, likelihood: Likelihood, params: Params, batch: Batch, key: Array | None) -> Array:
    """Of a batch, weighted."""
    losses = likelihood.loss(outputs(model, params, batch.x, key), batch.y)
    total = jnp.sum(batch.weight)
    return jnp.sum(jnp.where(batch.weight > 0, batch.weight * losses, 0.0)) / jnp.where(total > 0, total, 1.0)


def all_finite(tree: Any) -> Array:
    """Whether every number is."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
