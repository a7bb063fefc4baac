"""Federated averaging and its relatives: one network for all clients."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import State
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Batch, at_once, over_clients, train
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import Trainer, all_finite, failures, info, mean_loss, of_optax, resumed
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Params
from mocha_jax.systems import Sampled, System
from mocha_jax.systems._base import Info, Work


class FedAvgState(State):
    """The state of federated averaging between rounds."""

    params: Any = tree()  # of the model
    server: optax.OptState = tree()  # state of the server's optimizer
    loss: Array  # [] mean over the training of the last round; infinite before any
    diverged: Array  # [] int32 updates left out so far because they were not finite
    failed: Array  # [] int32 of them in a row, up to now


class FedAvgInputs(NamedTuple):
    """The inputs of the clients in a round."""

    key: Array
    params: Params  # of the model
    likelihood: Likelihood
    proximal: Hyperparameter | None
    rate: Array


class FedAvgAnswer(NamedTuple):
    """A client's answer; the server needs only the sum over clients."""

    change: Params  # of the parameters, from where they end to where they began, times the weight
    weight: Array  # [] of the client's samples; 0 where the training was not finite
    loss: Array  # [] mean over the training, times the weight
    diverged: Array  # [] int32 1 where it was not finite


def no_answer(params: Params, dtype: DTypeLike) -> FedAvgAnswer:
    """The sum of none."""
    zero = jnp.zeros((), dtype)
    return FedAvgAnswer(jax.tree.map(jnp.zeros_like, params), zero, zero, jnp.zeros((), jnp.int32))


class FedAvg(Trainer):
    r"""Federated averaging (McMahan et al. 2017), and its variants by settings.

    In a round a share C of the clients each begin with the server's parameters $\theta$, train on their own
    samples for E epochs of mini-batches of B, and return what they have, $\theta_k$. The server takes the average
    change for a gradient,

    $$
    g = \sum_{k \in S} \frac{c_k}{\sum_{j\in S} c_j} (\theta - \theta_k), \qquad
    \theta \leftarrow \theta + \mathrm{update}(g),
    $$

    $c_k$ the total weight of a client's samples, their number with ``loss_scaling="sum"``. By default the update
    is $-g$, and $\theta$ becomes the average of those that answered.

    * **FedSGD**: ``local_epochs=1, batch_size=None``, one step on all samples.
    * **FedProx** (Li et al. 2020): ``proximal=mu`` adds $\tfrac\mu2\|\theta_k-\theta\|^2$ to the clients' losses.
    * **FedAvgM, FedAdam, FedYogi** (Hsu et al. 2019, Reddi et al. 2021):
      ``server_optimizer=optax.sgd(1.0, momentum=0.9)``, ``optax.adam(1e-2, eps=1e-3)``, ``optax.yogi(1e-2)``.

    An update that is not finite is left out, as if its client had not answered, and counted. Systems apply: a budget
    cuts a client's steps, and clients that do not answer are not averaged.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round. What it draws, as ``optax.add_noise`` does, is
        drawn for every client and round by itself.
      server_optimizer: of the server; default ``optax.sgd(1.0)``.
      local_epochs: E.
      batch_size: B; None for all samples at once.
      fraction: C, the share of the clients with data that is asked in a round; at least one is.
      proximal: mu.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together, see `Local`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> train, test = data.replace(y=(data.y > 0).astype(data.dtype)).split(jax.random.key(1), 0.75)
      >>> problem = mj.Prediction(train, test=test)
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2, (16,)), optax.sgd(0.1), batch_size=10)
      >>> solution = mj.solve(problem, algorithm, tol=None, max_rounds=10)
      >>> bool(solution.history.loss[-1] < solution.history.loss[0])
      True

    References:
      - [McMahan et al., Communication-Efficient Learning of Deep Networks](https://arxiv.org/abs/1602.05629), 2017.
      - [Li et al., Federated Optimization in Heterogeneous Networks](https://arxiv.org/abs/1812.06127), 2020.
      - [Hsu et al., Measuring the Effects of Non-Identical Data Distribution](https://arxiv.org/abs/1909.06335), 2019.
      - [Reddi et al., Adaptive Federated Optimization](https://arxiv.org/abs/2003.00295), 2021.
    """

    carries = FedAvgState

    server_optimizer: optax.GradientTransformation = static(default=optax.sgd(1.0))
    fraction: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    proximal: Hyperparameter | None = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        of_optax("FedAvg", "server_optimizer", self.server_optimizer, "optax.sgd(1.0)")
        check.in_unit_interval("FedAvg", fraction=self.fraction)
        check.scalar("FedAvg", fraction=self.fraction)
        if self.proximal is not None:
            check.scalar("FedAvg", proximal=self.proximal)
            check.nonnegative("FedAvg", proximal=self.proximal)
            if isinstance(self.proximal, int | float) and self.proximal == 0:
                object.__setattr__(self, "proximal", None)  # a term of 0 would only cost time

    def select_nodes(self, systems: System) -> System:
        if isinstance(self.fraction, int | float) and self.fraction == 1:
            return systems
        return systems & Sampled(jnp.maximum(jnp.asarray(self.fraction), 1e-9))

    def init(self, problem: Prediction) -> FedAvgState:
        return self.first_state(problem.data.dtype)

    def first_state(self, dtype: DTypeLike) -> FedAvgState:
        """The state before the first round, which depends on no sample."""
        params = self.begin(dtype)
        return FedAvgState(
            jnp.zeros((), jnp.int32), params, self.server_optimizer.init(params), jnp.full((), jnp.inf, dtype),
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def resume(self, state: FedAvgState, problem: Prediction) -> FedAvgState:
        return resumed("FedAvg", state, self.init, problem)

    def step(self, key: Array, state: FedAvgState, problem: Prediction, work: Work) -> tuple[FedAvgState, Info]:
        budget = work.budget(self.full_work(problem))

        def client(
            inputs: FedAvgInputs, data: TaskData, place: Array, node: Array, budget: Array, _: tuple[()]
        ) -> tuple[tuple[()], FedAvgAnswer]:
            return (), self.answer(inputs, data, place, node, budget)

        inputs = self.inputs(key, state.params, problem)
        zero = no_answer(state.params, problem.data.dtype)
        _, total = over_clients(problem.data, budget, at_once(self.at_once), client, inputs, (), zero)
        return self.heard(state, total), info(self, problem, budget)

    def inputs(self, key: Array, params: Params, problem: Prediction) -> FedAvgInputs:
        """The inputs of the clients in a round with that key."""
        return FedAvgInputs(key, params, problem.likelihood, self.proximal, jnp.asarray(self.rate, problem.data.dtype))

    def answer(self, inputs: FedAvgInputs, data: TaskData, place: Array, node: Array, budget: Array) -> FedAvgAnswer:
        """One client's training.

        Args:
          inputs: for this round.
          data: has the client's samples.
          place: [] int32 where.
          node: [] int32 the client's number among all.
          budget: [] int32 steps to do.
        """
        params, proximal = inputs.params, inputs.proximal

        def loss(p: Params, batch: Batch, key: Array) -> Array:
            value = mean_loss(self.model, inputs.likelihood, p, batch, key)
            if proximal is None:
                return value
            squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), p, params)
            return value + 0.5 * proximal * sum(jax.tree.leaves(squares))

        start = self.client_optimizer.init(params)
        done = train(jax.random.fold_in(inputs.key, node), data, place, budget, self.schedule, self.client_optimizer,
                     loss, params, start, inputs.rate)  # fmt: skip
        finite = all_finite((done.params, done.loss))
        weight = jnp.where(finite, jnp.sum(data.weight[place]), 0.0)
        change = jax.tree.map(lambda a, b: jnp.where(finite, weight * (a - b), 0.0), params, done.params)
        return FedAvgAnswer(change, weight, jnp.where(finite, weight * done.loss, 0.0), (~finite).astype(jnp.int32))

    def heard(self, state: FedAvgState, total: FedAvgAnswer) -> FedAvgState:
        """The server's part of a round: the state after it, from the sum of the answers."""
        weight = total.weight
        gradient = jax.tree.map(lambda a: safe_ratio(a, weight), total.change)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optimizers assume it
            updates, server = self.server_optimizer.update(gradient, state.server, state.params)
            params = optax.apply_updates(state.params, updates)
        some = weight > 0
        params, server = jax.tree.map(partial(jnp.where, some), (params, server), (state.params, state.server))
        return FedAvgState(
            state.round + 1, params, server, jnp.where(some, safe_ratio(total.loss, weight), state.loss),
            state.diverged + total.diverged, failures(state.failed, some.astype(jnp.int32), total.diverged),
        )  # fmt: skip

    def parameters(self, state: FedAvgState, problem: Prediction, node: Array | int) -> Any:
        return state.params

    def whose(self, problem: Prediction) -> Array:
        return jnp.zeros(problem.judged_on.num_nodes, jnp.int32)

    def weights(self, state: FedAvgState) -> Params:
        return state.params
