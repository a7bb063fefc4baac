"""One model for all clients that does not forget the worst of them: q-FFL and agnostic federated learning."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import difference, scaled
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Network, Params
from mocha_jax.personalized._parts import ClientOptions, composed, without_server_optimizer


def q_ffl(
    model: Network, client_optimizer: optax.GradientTransformation, *, fairness: Hyperparameter = 1.0,
    lipschitz: Hyperparameter = 10.0, **options: Unpack[ClientOptions],
) -> Composed:  # fmt: skip
    r"""Compose q-FedAvg: federated averaging in which clients with larger losses count more.

    $$
    \min_w \sum_k \frac{c_k}{q+1} f_k(w)^{q+1}, \qquad
    w \leftarrow w - \frac{\sum_k c_k F_k^q \Delta_k}{\sum_k c_k \big(q F_k^{q-1} \|\Delta_k\|^2 + L F_k^q\big)},
    \qquad \Delta_k = L\,(w - w_k),
    $$

    with $F_k = f_k(w)$ over all samples of the client, and $w_k$ its model after training. With $q = 0$ it is
    `FedAvg`. With ``local_epochs=1, batch_size=None`` and a rate of $1/L$ it is q-FedSGD.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      fairness: q; the authors try 0.001 to 15, and 1 to 5 most often.
      lipschitz: L, the inverse of the rate that `FedAvg` does well with.
      **options: of `Composed`; the server has no optimizer.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.q_ffl(mj.networks.MLP(5, 2), optax.sgd(0.1), fairness=2.0)
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (5, 2)

    References:
      - [Li et al., Fair Resource Allocation in Federated Learning](https://arxiv.org/abs/1905.10497), 2020,
        Algorithm 2.
    """
    check.positive("q_ffl", lipschitz=lipschitz)
    numbers = {"fairness": fairness, "lipschitz": lipschitz}
    without_server_optimizer("q_ffl", options)
    return composed("q_ffl", Q_FFL, model, client_optimizer, numbers, options)


class FairChange(NamedTuple):
    """A change of the model, and what the sum of changes is divided by."""

    model: Params
    norm: Array  # []


def _plain_model(b: Beginning) -> ServerParts:
    return ServerParts(b.begin(0))


def _with_norm(shared: Params, row: Tree) -> Answer:
    return Answer(FairChange(shared, jnp.zeros((), jax.tree.leaves(shared)[0].dtype)))


def _fair_client(c: Client, own: Tree) -> tuple[Tree, Answer]:
    q, smooth = c.numbers["fairness"], c.numbers["lipschitz"]
    loss = jnp.maximum(c.loss(c.shared), 1e-10)  # which has a power of q - 1
    done = c.train(c.shared)
    change = scaled(smooth, difference(c.shared, done.params))
    length = sum(jnp.sum(a**2) for a in jax.tree.leaves(change))
    power = loss**q
    norm = q * power / loss * length + smooth * power
    return own, Answer(FairChange(scaled(c.weight * power, change), c.weight * norm), loss=done.loss)


def _fair_server(s: ServerRound) -> ServerParts:
    change, norm = s.total
    return s.parts._replace(shared=jax.tree.map(lambda w, a: w - safe_ratio(a, norm), s.parts.shared, change))


Q_FFL = Method(_plain_model, _fair_client, _fair_server, _with_norm)


def afl(
    model: Network, client_optimizer: optax.GradientTransformation, *, mixture_rate: Hyperparameter = 0.1,
    **options: Unpack[ClientOptions],
) -> Composed:  # fmt: skip
    r"""Compose agnostic federated learning: the model that is best for the worst mixture of the clients.

    $$
    \min_w \max_{\lambda \in \Delta} \sum_k \lambda_k f_k(w), \qquad
    \lambda \leftarrow \Pi_\Delta\big(\lambda + \gamma\,(f_1(w), \dots, f_m(w))\big),
    $$

    where the clients' changes are summed with the weights $\lambda_k$, and both sides move from the old pair. With
    ``local_epochs=1, batch_size=None`` these are gradient steps, as in the paper; with more steps the average of
    models is a heuristic. The average of the models of all rounds predicts. A client that does not answer counts with
    a loss of 0 in that round.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      mixture_rate: $\gamma$.
      **options: of `Composed`; the server has no optimizer.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.afl(mj.networks.MLP(5, 2), optax.sgd(0.1), batch_size=None)
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (5, 2)

    References:
      - [Mohri et al., Agnostic Federated Learning](https://arxiv.org/abs/1902.00146), 2019, Algorithm 1.
    """
    without_server_optimizer("afl", options)
    return composed("afl", AFL, model, client_optimizer, {"mixture_rate": mixture_rate}, options)


class IterateAverage(NamedTuple):
    """The average of the models so far, and of how many it is."""

    model: Params
    rounds: Array  # []


def _even_mixture(b: Beginning) -> ServerParts:
    params = b.begin(0)
    dtype = jax.tree.leaves(params)[0].dtype
    average = IterateAverage(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), dtype))
    return ServerParts(params, jnp.full((b.clients,), 1.0 / b.clients, dtype), average)


def _with_loss(shared: Params, row: Array) -> Answer:
    return Answer(shared, row)


def _agnostic_client(c: Client, own: Tree) -> tuple[Tree, Answer]:
    loss, done = c.loss(c.shared), c.train(c.shared)
    return own, Answer(scaled(c.row, difference(c.shared, done.params)), loss, done.loss)


def _agnostic_server(s: ServerRound) -> ServerParts:
    real = s.weights > 0
    # At first the mixture is over all clients, those without data among them.
    everybody = jnp.sum(jnp.where(real, s.parts.rows, 0.0))
    params = jax.tree.map(lambda w, a: w - safe_ratio(a, everybody), s.parts.shared, s.total)
    losses = jnp.where(s.answered, s.sent, 0.0)
    mixture = _onto_simplex(s.parts.rows + s.numbers["mixture_rate"] * losses, real)
    count = s.parts.kept.rounds + 1.0
    average = jax.tree.map(lambda a, w: a + (w - a) / count, s.parts.kept.model, params)
    return ServerParts(params, mixture, IterateAverage(average, count))


def _onto_simplex(point: Array, real: Array) -> Array:
    """Project onto the simplex over the real entries: subtract a number and clip at 0, so that the sum is 1."""
    lowest = jnp.finfo(point.dtype).min / 4
    ordered = -jnp.sort(-jnp.where(real, point, lowest))
    surplus = (jnp.cumsum(ordered) - 1.0) / jnp.arange(1, len(point) + 1, dtype=point.dtype)
    count = jnp.sum((ordered > surplus) & (ordered > lowest), dtype=jnp.int32)
    return jnp.where(real, jnp.maximum(point - surplus[jnp.maximum(count - 1, 0)], 0.0), 0.0)


def _average_model(shared: Params, kept: IterateAverage | tuple[()]) -> Params:
    if not isinstance(kept, IterateAverage):  # at a node, which receives the last model
        return shared
    started = kept.rounds > 0
    return jax.tree.map(lambda a, b: jnp.where(started, a, b), kept.model, shared)


AFL = Method(_even_mixture, _agnostic_client, _agnostic_server, _with_loss, global_model=_average_model)
