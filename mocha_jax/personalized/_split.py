"""Networks in two parts, one averaged and one of every client's own: FedPer, FedRep, LG-FedAvg, FedBN."""

from __future__ import annotations

from typing import Unpack

import jax
import optax
from jax import Array

from mocha_jax._core.pytree import PyTree, Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.clients import Batch
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.fedavg import averaged
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts
from mocha_jax._neural.trees import difference, scaled
from mocha_jax.networks import Network, Params, Parted, SplitParameters
from mocha_jax.networks._wrapped import paths
from mocha_jax.personalized._parts import TrainingOptions, check_made_of, composed, phase


def fedper(
    model: Network, client_optimizer: optax.GradientTransformation, *, private: tuple[str, ...] | None = None,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedPer: federated averaging of the first layers, and last layers of every client's own.

    A client trains both parts together and sends the first layers alone. All clients begin with the same last layers.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      private: paths of the parameters that stay at the client, see `networks.Parted`; default the last layer. Of a
        model with `networks.SplitParameters`, its private ones.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fedper(mj.networks.MLP(5, 2, (4,)), optax.sgd(0.1))
      >>> weights = mj.solve(problem, algorithm, tol=None, max_rounds=5).weights
      >>> weights.shared[0].w.shape, weights.private[1].w.shape
      ((5, 4), (6, 4, 2))

    References:
      - [Arivazhagan et al., Federated Learning with Personalization Layers](https://arxiv.org/abs/1912.00818), 2019.
    """
    check_made_of("fedper", model, client_optimizer)
    return composed("fedper", JOINT, parted(model, private), client_optimizer, {}, options)


def lg_fedavg(
    model: Network, client_optimizer: optax.GradientTransformation, *, private: tuple[str, ...] | None = None,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose LG-FedAvg: representations of every client's own, and federated averaging of the last layer.

    All clients begin with the same representation, as in the authors' code, which takes that of a run of `FedAvg`.
    For a device that took no part the paper averages what all clients' models predict: ``solution.model`` does with
    ``unseen="mean"``.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      private: paths of the parameters that stay at the client, see `networks.Parted`; default all but the last layer.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import optax, mocha_jax as mj
      >>> mj.personalized.lg_fedavg(mj.networks.MLP(5, 2, (4,)), optax.sgd(0.1)).model.private
      ('0/w', '0/b')

    References:
      - [Liang et al., Think Locally, Act Globally](https://arxiv.org/abs/2001.01523), 2020, Algorithm 1.
    """
    check_made_of("lg_fedavg", model, client_optimizer)
    if private is None:
        last = Parted(model).private or ()
        private = tuple(path for path in paths(model) if path.partition("/")[0] not in last)
    return composed("lg_fedavg", JOINT, parted(model, private), client_optimizer, {}, options)


def fedbn(
    model: Network, client_optimizer: optax.GradientTransformation, *, private: tuple[str, ...] | None = None,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedBN: federated averaging of all but the normalisation layers, which stay at the clients.

    All clients begin with the same normalisation.

    Args:
      model: one with normalisation layers, e.g. of another library by `networks.Model`. Running statistics of batches
        are no parameters; a model that needs them is to normalise by its batch.
      client_optimizer: of the clients; it begins anew in every round.
      private: paths of the parameters that stay at the client, see `networks.Parted`; default those with "norm" or
        "bn" in their path.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, mocha_jax as mj
      >>> def initialise(key):
      ...     return {"dense": jax.random.normal(key, (5, 2)), "norm": {"scale": jnp.ones(5)}}
      >>> model = mj.networks.Model(initialise, lambda p, x: (x * p["norm"]["scale"]) @ p["dense"])
      >>> mj.personalized.fedbn(model, optax.sgd(0.1)).model.private
      ('norm/scale',)

    References:
      - [Li et al., FedBN: Federated Learning on Non-IID Features](https://arxiv.org/abs/2102.07623), 2021, Algorithm 1.
    """
    check_made_of("fedbn", model, client_optimizer)
    if private is None:
        private = tuple(path for path in paths(model) if "norm" in path.lower() or "bn" in path.lower())
        if not private:
            raise ValueError(
                f"fedbn: the model has no normalisation layer; name the private parameters out of "
                f"{', '.join(paths(model))}."
            )
    return composed("fedbn", JOINT, parted(model, private), client_optimizer, {}, options)


def fedrep(
    model: Network, client_optimizer: optax.GradientTransformation, *, private: tuple[str, ...] | None = None,
    body_optimizer: optax.GradientTransformation | None = None, body_epochs: int = 1,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedRep: a representation $\phi$ that all share, and a head $h_k$ of every client's own.

    A client trains its head for `local_epochs` with the representation that it received, and then the representation
    for `body_epochs` with the new head. It sends the representation. All clients begin with the same head.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the head; it begins anew in every round.
      private: paths of the head's parameters, see `networks.Parted`; default the last layer.
      body_optimizer: of the representation, where it is another one.
      body_epochs: of the representation in a round; the authors train it for one, and the head for ten.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fedrep(mj.networks.MLP(5, 2, (4,)), optax.sgd(0.1), local_epochs=5)
      >>> weights = mj.solve(problem, algorithm, tol=None, max_rounds=5).weights
      >>> weights.shared[0].w.shape, weights.private[1].w.shape
      ((5, 4), (6, 4, 2))

    References:
      - [Collins et al., Exploiting Shared Representations](https://arxiv.org/abs/2102.07078), 2021, Algorithm 1.
    """
    check_made_of("fedrep", model, client_optimizer)
    body = phase("fedrep", "body", body_optimizer, body_epochs)
    return composed("fedrep", FEDREP, parted(model, private), client_optimizer, {}, options, phases=(body,))


def parted(model: Network, private: tuple[str, ...] | None) -> Network:
    """A model whose parameters are in two parts."""
    if isinstance(model, Network) and private is None and isinstance(_shapes(model), SplitParameters):
        return model
    return Parted(model, private)


def _shapes(model: Network) -> PyTree:
    return jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))


def _shared_part(b: Beginning) -> ServerParts:
    params = b.begin(0).shared
    return ServerParts(params, (), b.optimizer.init(params))


def _private_part(b: Beginning, _: Array) -> Params:
    return b.begin(0).private  # the same at all clients, so that the averaged part fits every private one


def _both_parts(shared: Params, row: Tree, own: Params) -> SplitParameters:
    return SplitParameters(shared, own)


def _jointly(c: Client, own: Params) -> tuple[Params, Answer]:
    done = c.train(SplitParameters(c.shared, own))
    change = scaled(c.weight, difference(c.shared, done.params.shared))
    return done.params.private, Answer(change, loss=done.loss)


JOINT = Method(_shared_part, _jointly, averaged, own=_private_part, personal_model=_both_parts)


def _head_then_body(c: Client, own: Params) -> tuple[Params, Answer]:
    def of_head(head: Params, batch: Batch, key: Array) -> Array:
        return c.mean_loss(SplitParameters(c.shared, head), batch, key)

    head = c.train(own, of_head)

    def of_body(body: Params, batch: Batch, key: Array) -> Array:
        return c.mean_loss(SplitParameters(body, head.params), batch, key)

    body = c.train(c.shared, of_body, phase="body")
    return head.params, Answer(scaled(c.weight, difference(c.shared, body.params)), loss=head.loss)


FEDREP = Method(_shared_part, _head_then_body, averaged, own=_private_part, personal_model=_both_parts)
