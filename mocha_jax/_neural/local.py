"""Networks of the clients alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._algorithms.base import State
from mocha_jax._core.pytree import tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import at_once, over_clients, train
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import Trainer, all_finite, failures, info, mean_loss, mean_of_known, resumed
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Params
from mocha_jax.systems._base import Info, Work

Own = tuple[Params, optax.OptState, Array]  # a client's parameters, optimizer and mean loss


class LocalState(State):
    """The state of separate training between rounds."""

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
    """Every client trains its own network, without communication; with one client, the global baseline.

    Train on ``problem.merged()``, which has all samples with one client, for a model of centralised data: it is
    evaluated on the same held-out samples, task by task. A training that is not finite is left out and counted.

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
            inputs: tuple[Array, Likelihood, Array], data: TaskData, place: Array, node: Array, budget: Array, own: Own
        ) -> tuple[Own, tuple[Array, Array]]:
            key, likelihood, rate = inputs
            params, optimizer, before = own
            done = train(jax.random.fold_in(key, node), data, place, budget, self.schedule, self.client_optimizer,
                         partial(mean_loss, self.model, likelihood), params, optimizer, rate)  # fmt: skip
            finite = all_finite((done.params, done.loss))
            new = jax.tree.map(partial(jnp.where, finite), (done.params, done.optimizer, done.loss), own)
            return new, (finite.astype(jnp.int32), (~finite).astype(jnp.int32))

        inputs = key, problem.likelihood, jnp.asarray(self.rate, data.dtype)
        (params, optimizer, losses), (good, bad) = over_clients(
            data, budget, at_once(self.at_once), client, inputs, (state.params, state.optimizer, state.losses),
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
