"""One model for all clients, with corrections of what pulls their training apart: SCAFFOLD, FedDyn."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.clients import Batch, Pull
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import difference, scaled
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Network, Params
from mocha_jax.personalized._parts import (
    ClientOptions,
    TrainingOptions,
    composed,
    no_correction,
    without_server_optimizer,
)


def scaffold(
    model: Network, client_optimizer: optax.GradientTransformation, **options: Unpack[TrainingOptions]
) -> Composed:
    r"""Compose SCAFFOLD: federated averaging whose clients correct their gradients by control variates.

    A client steps along $\nabla f_k(y) - u_k + u$ from the server's model, and keeps the mean of its gradients on the
    way for its next $u_k$ (option II of the paper); the server's $u$ is the mean of all $u_k$. So clients that take
    many steps still reach the optimum of $\sum_k c_k f_k$, where `FedAvg` does not. Means and sums weigh clients
    by $c_k$; the paper weighs them alike, as ``loss_scaling="task_mean"`` does.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients, ``optax.sgd`` in the paper; it begins anew in every round.
      **options: of `Composed`; ``server_optimizer=optax.sgd(eta)`` is the paper's global step.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.scaffold(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (5, 2)

    References:
      - [Karimireddy et al., SCAFFOLD](https://arxiv.org/abs/1910.06378), 2020, Algorithm 1.
    """
    return composed("scaffold", SCAFFOLD, model, client_optimizer, {}, options)


class Controlled(NamedTuple):
    """A model and the control variate of all clients; changes of both."""

    model: Params
    control: Params


def _summed(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the sum of all gradients beside an optimizer's state."""

    def init(params: Params) -> Params:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Params, state: Params, params: Params | None = None) -> tuple[Params, Params]:
        return updates, jax.tree.map(jnp.add, state, updates)

    return optax.chain(optax.GradientTransformation(init, update), optimizer)


def _no_control(b: Beginning) -> ServerParts:
    params = b.begin(0)
    return ServerParts(Controlled(params, jax.tree.map(jnp.zeros_like, params)), (), b.optimizer.init(params))


def _controlled(c: Client, own: Params) -> tuple[Params, Answer]:
    model, control = c.shared
    correction = difference(control, own)

    def gradient(params: Params, batch: Batch, key: Array) -> tuple[Array, Params]:
        value, gradient = jax.value_and_grad(c.mean_loss)(params, batch, key)
        return value, jax.tree.map(jnp.add, gradient, correction)

    done = c.train(model, gradient=gradient)
    steps = done.steps.astype(done.loss.dtype)
    # Without the correction, the mean of the gradients along the way: (x - y) / (K eta) - u + u_k of a plain descent.
    new = jax.tree.map(lambda total, a: safe_ratio(total, steps) - a, done.optimizer[0], correction)
    change = Controlled(difference(model, done.params), difference(new, own))
    return new, Answer(scaled(c.weight, change), loss=done.loss)


def _controlling(s: ServerRound) -> ServerParts:
    model, control = s.parts.shared
    params, state = s.step(s.average(s.total.model), model, s.parts.kept)
    everybody = jnp.sum(s.weights)
    control = jax.tree.map(lambda a, b: a + safe_ratio(b, everybody), control, s.total.control)
    return s.parts._replace(shared=Controlled(params, control), kept=state)


def _controlled_model(shared: Controlled, kept: Tree) -> Params:
    return shared.model


SCAFFOLD = Method(
    _no_control, _controlled, _controlling, own=no_correction, global_model=_controlled_model, wraps=_summed
)


def feddyn(
    model: Network, client_optimizer: optax.GradientTransformation, *, strength: Hyperparameter = 0.1,
    **options: Unpack[ClientOptions],
) -> Composed:  # fmt: skip
    r"""Compose FedDyn: federated averaging with a dynamic regularizer, whose clients agree at the optimum.

    A client trains from the server's model $\theta$ on

    $$
    f_k(\theta_k) - \langle g_k, \theta_k \rangle + \tfrac\alpha2 \|\theta_k - \theta\|^2, \qquad
    g_k \leftarrow g_k - \alpha(\theta_k - \theta),
    $$

    so that $g_k$ becomes its gradient. The server subtracts $h/\alpha$ from the average, with $h$ the mean of all
    $g_k$. Means are weighed by $c_k$: alike with ``loss_scaling="task_mean"``, as in the paper.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      strength: $\alpha > 0$; the authors try 0.1, 0.01 and 0.001.
      **options: of `Composed`; the server has no optimizer.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.feddyn(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (5, 2)

    References:
      - [Acar et al., Federated Learning Based on Dynamic Regularization](https://arxiv.org/abs/2111.04263), 2021.
    """
    without_server_optimizer("feddyn", options)
    check.positive("feddyn", strength=strength)
    return composed("feddyn", FEDDYN, model, client_optimizer, {"strength": strength}, options)


def _no_gradient(b: Beginning) -> ServerParts:
    params = b.begin(0)
    return ServerParts(params, (), jax.tree.map(jnp.zeros_like, params))


def _dynamic(c: Client, own: Params) -> tuple[Params, Answer]:
    # The gradient g_k that it keeps and the pull together: <-g_k, v> + lambda / 2 |v - w|^2 pulls to w + g_k / lambda.
    strength = c.numbers["strength"]
    done = c.train(c.shared, pull=Pull(strength, jax.tree.map(lambda w, g: w + g / strength, c.shared, own)))
    change = difference(c.shared, done.params)
    new = jax.tree.map(lambda g, a: g + strength * a, own, change)
    return new, Answer(scaled(c.weight, change), loss=done.loss)


def _dynamic_server(s: ServerRound) -> ServerParts:
    strength, everybody = s.numbers["strength"], jnp.sum(s.weights)
    h = jax.tree.map(lambda h, a: h + strength * safe_ratio(a, everybody), s.parts.kept, s.total)
    params = jax.tree.map(lambda w, a, h: w - a - h / strength, s.parts.shared, s.average(s.total), h)
    return s.parts._replace(shared=params, kept=h)


FEDDYN = Method(_no_gradient, _dynamic, _dynamic_server, own=no_correction)
