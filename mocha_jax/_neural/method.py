"""The declaration of a method of federated training: pure functions of a client and of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import optax
from jax import Array

from mocha_jax._core.pytree import Hyperparameter, PyTree, SameTree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.client import Client, Phase
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Params


class Answer(NamedTuple):
    """A client's answer. The server hears sums and rows."""

    total: PyTree = ()  # a tree that is summed over the clients
    row: PyTree = ()  # a tree that the server receives from each client
    loss: Array | float = 0.0  # [] mean over the training, for the history


class ServerParts(NamedTuple):
    """The server's trees."""

    shared: PyTree = ()  # goes to all clients
    rows: PyTree = ()  # [m, ...] each goes to its client
    kept: PyTree = ()  # stays here


class ServerRound(NamedTuple):
    """A server in a round: what it has and what it hears."""

    parts: ServerParts
    total: PyTree  # the sum of the clients' `Answer.total`
    sent: PyTree  # [m, ...] `Answer.row` of each client that answered; of others anything
    answered: Array  # [m] bool
    weight: Array  # [] total weight c_k of those that answered
    weights: Array  # [m] c_k of all clients; 0 of one without data
    numbers: Mapping[str, Array]  # the method's, by name
    optimizer: optax.GradientTransformation

    def average(self, total: SameTree) -> SameTree:
        """Divide a sum over clients, each times its weight, by their weight."""
        return jax.tree.map(lambda a: safe_ratio(a, self.weight), total)

    def step(self, gradient: Tree, params: SameTree, state: optax.OptState) -> tuple[SameTree, optax.OptState]:
        """Take a step of the server's optimizer."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optimizers assume it
            updates, state = self.optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state


class Beginning(NamedTuple):
    """The beginning of a run, which depends on no data."""

    # The network's first parameters, by the number of their draw; the server's is 0.
    begin: Callable[[Array | int], PyTree]
    numbers: Mapping[str, Array]  # the method's, by name
    optimizer: optax.GradientTransformation  # the server's
    clients: int


class Method(NamedTuple):
    """A method of federated training, as pure functions; static.

    Args:
      start: ``start(b)``, the server's first trees, at a `Beginning`.
      client: ``client(c, own)``, a `Client`'s round: what it keeps, and its `Answer`. An answer with a number that is
        not finite is left out, and its client keeps what it had.
      server: ``server(s)``, a `ServerRound`: the trees after it.
      sends: ``sends(shared, row)``, an `Answer` whose trees have the shapes of the clients'. Default: a total like
        `shared`.
      own: ``own(b, node)``, what a client keeps before its first round. Default: nothing.
      global_model: ``global_model(shared, kept)``, the parameters that predict for all clients; `kept` is empty at a
        node. Default: `shared`.
      personal_model: in place of it, ``personal_model(shared, row, own)``, those that predict for one.
      wraps: ``wraps(optimizer)``, the client optimizer of the first phase, made of the caller's. Default: that one.
      joins: ``joins(shared, row, first)``, what stands for `own`'s tree at a client that comes when training is over.
        Default: that tree.
      ready: ``ready(c, own)``, what stands for `own` there, made on the client's samples by what the server has now,
        as fine-tuning does; it is not kept. Default: `own`.
      decodes: ``decodes(shared, row, sent)``, what an `Answer.row` says where it is a code, for a limit on the norm of
        answers. Default: the row.
      check: ``check(numbers, data)``, raises where the method's numbers do not fit the clients'.
      name: of the method in messages and where it is printed.
    """

    start: Callable[[Beginning], ServerParts]
    client: Callable[[Client, PyTree], tuple[PyTree, Answer]]
    server: Callable[[ServerRound], ServerParts]
    sends: Callable[[PyTree, PyTree], Answer] | None = None
    own: Callable[[Beginning, Array], PyTree] | None = None
    global_model: Callable[[PyTree, PyTree], Params] | None = None
    personal_model: Callable[[PyTree, PyTree, PyTree], Params] | None = None
    wraps: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None
    joins: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    ready: Callable[[Client, PyTree], PyTree] | None = None
    decodes: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    check: Callable[[Mapping[str, Hyperparameter], TaskData], None] | None = None
    name: str = "Composed"


class Declared(NamedTuple):
    """The declaration of an algorithm."""

    method: Method
    numbers: Mapping[str, Hyperparameter] = {}  # noqa: RUF012  (never changed)
    phases: tuple[Phase, ...] = ()  # of the clients' training after the first one
    tuning: tuple[Phase, ...] = ()  # of what makes them ready
    gradients: float = 1.0  # of a batch that a step of the first phase computes, which is its price
    optimizer: optax.GradientTransformation = optax.identity()  # the server's
