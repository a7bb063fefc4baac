"""Networks of the clients alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._core.pytree import Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.client_server import ClientServer
from mocha_jax._neural.method import Answer, Beginning, Declared, Method, ServerParts, ServerRound
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import mean_of_known
from mocha_jax._neural.training_state import TrainingState
from mocha_jax.networks import Params
from mocha_jax.systems._base import Info, Work

Own = tuple[Params, optax.OptState, Array]  # a client's parameters, optimizer and mean loss


class Local(ClientServer):
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

    def declared(self) -> Declared:
        return Declared(Method(_nothing, _train_on, _unchanged, own=self._first, personal_model=_own_params))

    def _first(self, b: Beginning, node: Array) -> Own:
        """A client's parameters, optimizer and mean loss before any training."""
        params = b.begin(node)
        return params, self.client_optimizer.init(params), jnp.full((), jnp.inf, jax.tree.leaves(params)[0].dtype)

    def step(self, key: Array, state: TrainingState, problem: Prediction, work: Work) -> tuple[TrainingState, Info]:
        after, info = super().step(key, state, problem, work)
        return after.exchange(loss=self.reported(mean_of_known(after.own[2]))), info


def _nothing(b: Beginning) -> ServerParts:
    return ServerParts()


def _train_on(c: Client, own: Own) -> tuple[Own, Answer]:
    """Train the client's network on from where it is."""
    params, optimizer, _ = own
    done = c.train(params, optimizer=optimizer)
    return (done.params, done.optimizer, done.loss), Answer(loss=done.loss)


def _unchanged(s: ServerRound) -> ServerParts:
    return s.parts


def _own_params(shared: Tree, row: Tree, own: Own) -> Params:
    return own[0]
