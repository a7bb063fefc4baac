"""A model for each client at the server, which draws neighbours together: FedU and FedAMP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, SameTree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.client import Client
from mocha_jax._neural.clients import Pull
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts, ServerRound
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.networks import Network, Params
from mocha_jax.personalized._parts import (
    ClientOptions,
    composed,
    everywhere,
    own_model,
    row_model,
    same_model,
    without_server_optimizer,
)


def fedu(
    model: Network, client_optimizer: optax.GradientTransformation, *, graph: ArrayLike,
    strength: Hyperparameter = 0.01, server_rate: Hyperparameter = 0.1, **options: Unpack[ClientOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedU: personal models that the server moves along the Laplacian of a graph of the clients.

    $$
    \min_W \sum_k f_k(w_k) + \tfrac\eta4 \sum_{k,l} a_{kl} \|w_k - w_l\|^2, \qquad
    w_k \leftarrow w_k - \tilde\mu\,\eta \sum_{l} a_{kl} (w_k - w_l),
    $$

    where the server's step comes after the clients' own, over the neighbours that answered, as in the authors' code.
    Its fixed point is off the optimum by the size of the steps; the optimum of a convex loss, with a certificate, is
    that of `regularizers.Graph`.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      graph: $a$, ``[m, m]``, symmetric and not negative.
      strength: $\eta$.
      server_rate: $\tilde\mu$; the authors take the clients' rate times the number of their steps.
      **options: of `Composed`; the server has no optimizer.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, numpy as np, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fedu(mj.networks.MLP(5, 2), optax.sgd(0.1), graph=np.ones((6, 6)))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Dinh et al., A New Look and Convergence Rate of Federated Multi-Task Learning with Laplacian Regularization](https://arxiv.org/abs/2102.07148),
        2021, Algorithm 1.
    """
    matrix = check.square("fedu", "graph", graph)
    known = check.concrete(matrix)
    if known is not None and not np.allclose(known, known.T, rtol=1e-5, atol=0.0):
        raise ValueError("fedu: graph must be symmetric; (graph + graph.T) / 2 is.")
    numbers = {"graph": matrix, "strength": strength, "server_rate": server_rate}
    without_server_optimizer("fedu", options)
    return composed("fedu", FEDU, model, client_optimizer, numbers, options)


def _has_all(numbers: Mapping[str, Hyperparameter], data: TaskData) -> None:
    """Raise where the graph leaves a client out that has data."""
    sizes, known = check.concrete(data.sizes), np.shape(numbers["graph"])[0]
    if sizes is not None and np.any(sizes[known:] > 0):
        raise ValueError(f"fedu: graph must be [m, m], of all {len(sizes)} clients; it is of {known}.")


def _models_of_all(b: Beginning) -> ServerParts:
    return ServerParts(rows=everywhere(b.begin(0), b.clients))


def _row_of_row(shared: Tree, row: Params) -> Answer:
    return Answer(row=row)


def _from_row(c: Client, own: Tree) -> tuple[Tree, Answer]:
    done = c.train(c.row)
    return own, Answer(row=done.params, loss=done.loss)


def _along_the_laplacian(s: ServerRound) -> ServerParts:
    models, present = _renewed(s, s.parts.rows), s.answered.astype(s.weights.dtype)
    more = len(present) - len(s.numbers["graph"])
    if more < 0:
        raise ValueError(f"fedu: graph must be [m, m], of the {len(present)} clients; it is of {len(present) - more}.")
    # Clients without data that fill up devices have no neighbours.
    graph = jnp.pad(s.numbers["graph"], (0, more)) * present[:, None] * present[None, :]
    pulls = s.numbers["server_rate"] * s.numbers["strength"] * (jnp.diag(jnp.sum(graph, axis=1)) - graph)
    return s.parts._replace(rows=jax.tree.map(lambda a: a - jnp.tensordot(pulls, a, 1), models))


def _renewed(s: ServerRound, models: SameTree) -> SameTree:
    """Put the models of the clients that answered in place of their last ones, ``[m, ...]``."""

    def either(new: Array, old: Array) -> Array:
        return jnp.where(s.answered.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(either, s.sent, models)


FEDU = Method(_models_of_all, _from_row, _along_the_laplacian, _row_of_row, personal_model=row_model, check=_has_all)


def fedamp(
    model: Network, client_optimizer: optax.GradientTransformation, *, strength: Hyperparameter = 1.0,
    attention: Hyperparameter = 0.1, sharpness: Hyperparameter = 1.0, **options: Unpack[ClientOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedAMP: personal models pulled to clouds of models, in which similar ones count most.

    The server makes of the models $w_k$ of all clients

    $$
    u_k = w_k - \alpha \sum_{l \ne k} A'\big(\|w_k - w_l\|^2\big)\,(w_k - w_l), \qquad
    A'(x) = \tfrac1\sigma e^{-x/\sigma},
    $$

    and client k trains its own on $f_k(w) + \tfrac{\lambda}{2\alpha}\|w - u_k\|^2$. Every cloud is an average as long
    as $\alpha (m-1) \le \sigma$: with the defaults up to 11 clients. For more take `attention` of at most
    ``sharpness / (m - 1)``, and `strength` in proportion.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      strength: $\lambda$.
      attention: $\alpha > 0$.
      sharpness: $\sigma > 0$, on the scale of squared distances of models.
      **options: of `Composed`; the server has no optimizer.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fedamp(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data](https://arxiv.org/abs/2007.03797),
        2021, Algorithm 1.
    """
    check.positive("fedamp", attention=attention, sharpness=sharpness)
    numbers = {"strength": strength, "attention": attention, "sharpness": sharpness}
    without_server_optimizer("fedamp", options)
    return composed("fedamp", FEDAMP, model, client_optimizer, numbers, options)


def _clouds_of_all(b: Beginning) -> ServerParts:
    models = everywhere(b.begin(0), b.clients)
    return ServerParts(rows=models, kept=models)


def _toward_cloud(c: Client, own: Params) -> tuple[Params, Answer]:
    strength = c.numbers["strength"] / c.numbers["attention"]
    done = c.train(own, pull=Pull(strength, c.row))
    return done.params, Answer(row=done.params, loss=done.loss)


def _attentive(s: ServerRound) -> ServerParts:
    models, sharpness = _renewed(s, s.parts.kept), s.numbers["sharpness"]
    flat = jnp.concatenate([a.reshape(len(a), -1) for a in jax.tree.leaves(models)], axis=1)
    real = (s.weights > 0).astype(flat.dtype)
    # By products of deviations from the mean: of the differences there are m as often.
    aside = flat - safe_ratio(matmul(real, flat), jnp.sum(real))[None, :]
    products = matmul(aside, aside.T)
    own = jnp.diagonal(products)
    squares = jnp.maximum(own[:, None] + own[None, :] - 2.0 * products, 0.0)
    near = s.numbers["attention"] / sharpness * jnp.exp(-squares / sharpness) * real[:, None] * real[None, :]
    pulls = jnp.diag(jnp.sum(near, axis=1)) - near
    return ServerParts(rows=jax.tree.map(lambda a: a - jnp.tensordot(pulls, a, 1), models), kept=models)


def _from_cloud(shared: Tree, row: Params, first: Params) -> Params:
    return row


FEDAMP = Method(
    _clouds_of_all, _toward_cloud, _attentive, _row_of_row, own=same_model, personal_model=own_model, joins=_from_cloud
)
