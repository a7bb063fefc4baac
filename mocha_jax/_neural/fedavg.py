"""Federated averaging and its relatives, one network for all clients; and networks of the clients alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._algorithms.base import State
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._model.likelihoods import Likelihood
from mocha_jax._neural.clients import at_once, over_clients
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import Trainer, all_finite, failures, mean_loss, mean_of_known, of_optax
from mocha_jax._neural.training import Batch, train
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Params
from mocha_jax.systems import Sampled, System
from mocha_jax.systems._work import Info, Work

Carried = TypeVar("Carried", bound=State)


class FedAvgState(State):
    """All that federated averaging carries from round to round."""

    params: Any = tree()  # of the model
    server: optax.OptState = tree()  # state of the server's optimizer
    loss: Array  # [] mean over the training of the last round; infinite before any
    diverged: Array  # [] int32 updates left out so far because they were not finite
    failed: Array  # [] int32 of them in a row, up to now


class FedAvg(Trainer):
    r"""Federated averaging (McMahan et al. 2017), and what differs from it in a setting.

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
    cuts a client's steps, and who does not answer is not averaged.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round, at every client from the same state: noise that
        it draws from a key of its own (``optax.add_noise``) is the same for all.
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
        params, dtype = self.start(problem), problem.data.dtype
        return FedAvgState(
            jnp.zeros((), jnp.int32), params, self.server_optimizer.init(params), jnp.full((), jnp.inf, dtype),
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def resume(self, state: FedAvgState, problem: Prediction) -> FedAvgState:
        return resumed("FedAvg", state, self.init, problem)

    def step(self, key: Array, state: FedAvgState, problem: Prediction, work: Work) -> tuple[FedAvgState, Info]:
        data, full = problem.data, self.full_work(problem)
        budget, zero = work.budget(full), jnp.zeros((), data.dtype)
        totals = jax.tree.map(jnp.zeros_like, state.params), zero, zero, jnp.zeros((), jnp.int32)

        def client(
            given: tuple[Array, Params, Likelihood, Hyperparameter | None, Array],
            data: TaskData, place: Array, node: Array, budget: Array, _: tuple[()],
        ) -> tuple[tuple[()], tuple[Params, Array, Array, Array]]:  # fmt: skip
            key, params, likelihood, proximal, rate = given

            def loss(p: Params, batch: Batch, key: Array) -> Array:
                value = mean_loss(self.model, likelihood, p, batch, key)
                if proximal is None:
                    return value
                squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), p, params)
                return value + 0.5 * proximal * sum(jax.tree.leaves(squares))

            start = self.client_optimizer.init(params)
            done = train(jax.random.fold_in(key, node), data, place, budget, self.schedule, self.client_optimizer,
                         loss, params, start, rate)  # fmt: skip
            finite = all_finite((done.params, done.loss))
            weight = jnp.where(finite, jnp.sum(data.weight[place]), 0.0)
            change = jax.tree.map(lambda a, b: jnp.where(finite, weight * (a - b), 0.0), params, done.params)
            return (), (change, weight, jnp.where(finite, weight * done.loss, 0.0), (~finite).astype(jnp.int32))

        given = key, state.params, problem.likelihood, self.proximal, jnp.asarray(self.rate, data.dtype)
        _, (change, weight, loss, diverged) = over_clients(
            data, budget, at_once(self.at_once), client, given, (), totals
        )
        gradient = jax.tree.map(lambda a: safe_ratio(a, weight), change)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optimizers assume it
            updates, server = self.server_optimizer.update(gradient, state.server, state.params)
            params = optax.apply_updates(state.params, updates)
        heard = weight > 0
        params, server = jax.tree.map(partial(jnp.where, heard), (params, server), (state.params, state.server))
        after = FedAvgState(
            state.round + 1, params, server, jnp.where(heard, safe_ratio(loss, weight), state.loss),
            state.diverged + diverged, failures(state.failed, heard.astype(jnp.int32), diverged),
        )  # fmt: skip
        return after, info(self, problem, budget)

    def parameters(self, state: FedAvgState, problem: Prediction, node: Array | int) -> Any:
        return state.params

    def whose(self, problem: Prediction) -> Array:
        return jnp.zeros(problem.judged_on.num_nodes, jnp.int32)

    def weights(self, state: FedAvgState) -> Params:
        return state.params


Own = tuple[Params, optax.OptState, Array]  # a client's parameters, optimizer and mean loss


class LocalState(State):
    """All that separate training carries from round to round."""

    params: Any = tree()  # of every client, ``[m, ...]``
    optimizer: optax.OptState = tree()  # of every client, ``[m, ...]``
    losses: Array  # [m] mean over its last training; infinite before any
    diverged: Array  # [] int32 trainings left out so far because they were not finite
    failed: Array  # [] int32 of them in a row, up to now

    @property
    def loss(self) -> Array:
        """Mean over the clients that have trained."""
        return mean_of_known(self.losses)


class Local(Trainer):
    """Every client trains a network of its own and nobody talks to anybody; with one client, the global baseline.

    Train on ``problem.merged()``, which has all samples with one client, for a model of centralised data: it is judged
    on the same held-out samples, task by task. A training that is not finite is left out and counted.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients, from optax; it goes on from round to round.
      local_epochs: passes of a client over its samples in a round.
      batch_size: samples of a step; None for all of a client's.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together by `vmap`, the rest in turn; default 1 on a CPU, whose caches that suits best,
        and 16 elsewhere.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> train, test = data.replace(y=(data.y > 0).astype(data.dtype)).split(jax.random.key(1), 0.75)
      >>> problem = mj.Prediction(train, test=test)
      >>> algorithm = mj.Local(mj.networks.MLP(5, 2), optax.adam(1e-2), batch_size=10)
      >>> alone = mj.solve(problem, algorithm, tol=None, max_rounds=10)
      >>> together = mj.solve(problem.merged(), algorithm, tol=None, max_rounds=10)
      >>> alone.weights[0].w.shape, together.weights[0].w.shape
      ((6, 5, 2), (1, 5, 2))
    """

    carries = LocalState

    def init(self, problem: Prediction) -> LocalState:
        m, dtype = problem.data.num_nodes, problem.data.dtype
        params = jax.vmap(lambda node: self.start(problem, node))(jnp.arange(m))
        return LocalState(
            jnp.zeros((), jnp.int32), params, jax.vmap(self.client_optimizer.init)(params),
            jnp.full(m, jnp.inf, dtype), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32),
        )  # fmt: skip

    def resume(self, state: LocalState, problem: Prediction) -> LocalState:
        return resumed("Local", state, self.init, problem)

    def message(self, problem: Prediction) -> tuple[float, float]:
        return 0.0, 0.0

    def step(self, key: Array, state: LocalState, problem: Prediction, work: Work) -> tuple[LocalState, Info]:
        data = problem.data
        budget = work.budget(self.full_work(problem))

        def client(
            given: tuple[Array, Likelihood, Array], data: TaskData, place: Array, node: Array, budget: Array, own: Own
        ) -> tuple[Own, tuple[Array, Array]]:
            key, likelihood, rate = given
            params, optimizer, before = own
            done = train(jax.random.fold_in(key, node), data, place, budget, self.schedule, self.client_optimizer,
                         partial(mean_loss, self.model, likelihood), params, optimizer, rate)  # fmt: skip
            finite = all_finite((done.params, done.loss))
            new = jax.tree.map(partial(jnp.where, finite), (done.params, done.optimizer, done.loss), own)
            return new, (finite.astype(jnp.int32), (~finite).astype(jnp.int32))

        given = key, problem.likelihood, jnp.asarray(self.rate, data.dtype)
        (params, optimizer, losses), (good, bad) = over_clients(
            data, budget, at_once(self.at_once), client, given, (state.params, state.optimizer, state.losses),
            (jnp.zeros((), jnp.int32),) * 2,
        )  # fmt: skip
        failed = failures(state.failed, good, bad)
        return LocalState(state.round + 1, params, optimizer, losses, state.diverged + bad, failed), info(
            self, problem, budget
        )

    def parameters(self, state: LocalState, problem: Prediction, node: Array | int) -> Any:
        return jax.tree.map(lambda a: a[node], state.params)

    def weights(self, state: LocalState) -> Params:
        return state.params


def info(algorithm: Trainer, problem: Prediction, budget: Array) -> Info:
    """Every client did its budget."""
    flops = budget.astype(problem.data.dtype) * algorithm.step_flops(problem)
    return Info(budget, flops, jnp.zeros(len(budget), bool))


def resumed(owner: str, state: Carried, init: Callable[[Prediction], Carried], problem: Prediction) -> Carried:
    """The state, if it is one of this algorithm for such a problem."""
    wanted = jax.eval_shape(init, problem)
    same = str(jax.tree.structure(state)) == str(jax.tree.structure(wanted))
    if not same or any(a.shape != b.shape for a, b in zip(*map(jax.tree.leaves, (state, wanted)), strict=True)):
        raise ValueError(f"{owner}: the state belongs to another algorithm, another model or other data.")
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), state, wanted)
