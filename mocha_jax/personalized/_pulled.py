"""Models of one's own, near a model of all: Ditto, mean-regularised multi-task learning, pFedMe."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._neural.client import Client
from mocha_jax._neural.clients import Batch, Pull
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.fedavg import averaged, first_model, send_change
from mocha_jax._neural.method import Answer, Method
from mocha_jax._neural.trees import difference, scaled
from mocha_jax.networks import Network, Params
from mocha_jax.personalized._parts import (
    TrainingOptions,
    composed,
    from_shared,
    own_model,
    phase,
    same_model,
)


def ditto(
    model: Network, client_optimizer: optax.GradientTransformation, *, strength: Hyperparameter = 1.0,
    personal_optimizer: optax.GradientTransformation | None = None, personal_epochs: int | None = None,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose Ditto: federated averaging, and a personal model $v_k$ pulled to its model $w$.

    A client trains $w$ as in `FedAvg`, and beside it, from where $v_k$ was, on

    $$
    f_k(v_k) + \tfrac\lambda2 \|v_k - w\|^2
    $$

    with the $w$ that it received. With $\lambda = 0$ clients learn alone, with $\lambda\to\infty$ all predict by $w$.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of both models; it begins anew in every round.
      strength: $\lambda$; the authors choose it by held-out samples out of 0.1, 1 and 2.
      personal_optimizer: of the personal model, where it is another one.
      personal_epochs: of the personal model in a round; default `local_epochs`.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> train, test = data.replace(y=(data.y > 0).astype(data.dtype)).split(jax.random.key(1), 0.75)
      >>> algorithm = mj.personalized.ditto(mj.networks.MLP(5, 2), optax.sgd(0.1), strength=0.5)
      >>> solution = mj.solve(mj.Prediction(train, test=test), algorithm, tol=None, max_rounds=5)
      >>> solution.weights[0].w.shape
      (6, 5, 2)

    References:
      - [Li et al., Ditto: Fair and Robust Federated Learning](https://arxiv.org/abs/2012.04221), 2021, Algorithm 1.
    """
    personal = phase("ditto", "personal", personal_optimizer, personal_epochs)
    return composed("ditto", DITTO, model, client_optimizer, {"strength": strength}, options, phases=(personal,))


def _ditto_client(c: Client, own: Params) -> tuple[Params, Answer]:
    _, answer = send_change(c, ())
    return c.train(own, pull=Pull(c.numbers["strength"], c.shared), phase="personal").params, answer


DITTO = Method(first_model, _ditto_client, averaged, own=same_model, personal_model=own_model, joins=from_shared)


def mr_mtl(
    model: Network, client_optimizer: optax.GradientTransformation, *, strength: Hyperparameter = 1.0,
    **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose mean-regularised multi-task learning: personal models $w_k$ pulled to their mean $\bar w$.

    $$
    \min_{W} \sum_k c_k \Big( f_k(w_k) + \tfrac\lambda2 \|w_k - \bar w\|^2 \Big), \qquad
    \bar w = \frac{\sum_k c_k w_k}{\sum_k c_k}.
    $$

    A client trains its own model on, with the mean that it received; the next mean is over the models of the clients
    that answered. With equal $c_k$ (``loss_scaling="task_mean"``) and a convex loss that includes a ridge
    $\tfrac\mu2\|w_k\|^2$ the optimum is that of ``regularizers.MeanRegularized(strength / 2, mu / 2)``.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      strength: $\lambda$.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.mr_mtl(mj.networks.MLP(5, 2), optax.sgd(0.1), strength=0.5)
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Liu et al., On Privacy and Personalization in Cross-Silo Federated Learning](https://arxiv.org/abs/2206.07902),
        2022.
    """
    return composed("mr_mtl", MR_MTL, model, client_optimizer, {"strength": strength}, options)


def _mean_regularized(c: Client, own: Params) -> tuple[Params, Answer]:
    done = c.train(own, pull=Pull(c.numbers["strength"], c.shared))
    # The average of these changes takes the mean to that of the models sent.
    return done.params, Answer(scaled(c.weight, difference(c.shared, done.params)), loss=done.loss)


MR_MTL = Method(first_model, _mean_regularized, averaged, own=same_model, personal_model=own_model, joins=from_shared)


def pfedme(
    model: Network, client_optimizer: optax.GradientTransformation, *, strength: Hyperparameter = 15.0,
    inner_steps: int = 5, inner_rate: Hyperparameter = 0.01, **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose pFedMe: federated averaging of the Moreau envelopes of the clients' losses.

    $$
    \min_w \sum_k c_k F_k(w), \qquad F_k(w) = \min_{\theta} f_k(\theta) + \tfrac\lambda2 \|\theta - w\|^2,
    \qquad \nabla F_k(w) = \lambda\,(w - \theta_k(w)).
    $$

    In a step the client takes `inner_steps` gradient steps for $\theta$ on its batch, from the last $\theta$ (in the
    first step of a round from $w$), and then one on $w_k$ with $\nabla F_k$. It predicts by its last $\theta$.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of $w_k$; the authors' rates are 0.005 to 0.01 with $\lambda$ 15 to 30.
      strength: $\lambda$.
      inner_steps: K.
      inner_rate: learning rate of $\theta$.
      **options: of `Composed`; ``server_optimizer=optax.sgd(beta)`` is the authors' average with $\beta$.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.pfedme(mj.networks.MLP(5, 2), optax.sgd(0.01))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [T Dinh et al., Personalized Federated Learning with Moreau Envelopes](https://arxiv.org/abs/2006.08848), 2020,
        Algorithm 1.
    """
    check.integer("pfedme", 1, inner_steps=inner_steps)
    numbers = {"strength": strength, "inner_rate": inner_rate, "inner_steps": float(inner_steps)}
    return composed("pfedme", PFEDME, model, client_optimizer, numbers, options, gradients=inner_steps)


class _WithPoint(NamedTuple):
    """A model, and the last minimiser that its envelope was computed by."""

    model: Params
    point: Params


def _beside_point(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Update the model by an optimizer, and the point by minus its direction."""

    def init(params: _WithPoint) -> optax.OptState:
        return optimizer.init(params.model)

    def update(
        updates: _WithPoint, state: optax.OptState, params: _WithPoint | None = None
    ) -> tuple[_WithPoint, optax.OptState]:
        model, state = optimizer.update(updates.model, state, None if params is None else params.model)
        return _WithPoint(model, jax.tree.map(jnp.negative, updates.point)), state

    return optax.GradientTransformation(init, update)


def _pfedme_client(c: Client, own: Params) -> tuple[Params, Answer]:
    strength, rate = c.numbers["strength"], c.numbers["inner_rate"]
    steps = c.numbers["inner_steps"].astype(jnp.int32)

    def envelope(params: _WithPoint, batch: Batch, key: Array) -> tuple[Array, _WithPoint]:
        near = Pull(strength, params.model)

        def step(_: Array, point: Params) -> Params:
            return difference(point, scaled(rate, near.added(point, jax.grad(c.mean_loss)(point, batch, key))))

        point = lax.fori_loop(0, steps, step, params.point)
        ascent = scaled(strength, difference(params.model, point))
        # Updates are multiplied by the client's rate: the point moves all the way.
        return c.mean_loss(point, batch, key), _WithPoint(ascent, scaled(1.0 / c.rate, difference(params.point, point)))

    done = c.train(_WithPoint(c.shared, c.shared), gradient=envelope)
    return done.params.point, Answer(scaled(c.weight, difference(c.shared, done.params.model)), loss=done.loss)


PFEDME = Method(
    first_model, _pfedme_client, averaged, own=same_model, personal_model=own_model, wraps=_beside_point,
    joins=from_shared,
)  # fmt: skip
