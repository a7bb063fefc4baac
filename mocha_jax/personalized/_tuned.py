"""One model for all clients, which each of them adapts to its samples: fine-tuning and Per-FedAvg."""

from __future__ import annotations

from typing import Unpack

import jax
import optax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Tree
from mocha_jax._neural.client import Client, Phase
from mocha_jax._neural.clients import Batch
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.fedavg import averaged, first_model, send_change
from mocha_jax._neural.method import Answer, Method
from mocha_jax._neural.trees import difference, scaled
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.networks import Network, Params
from mocha_jax.personalized._parts import TrainingOptions, composed, own_model, phase


def fine_tuned(
    model: Network, client_optimizer: optax.GradientTransformation, *, tuning_epochs: int = 5,
    tuning_optimizer: optax.GradientTransformation | None = None, **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose federated averaging with fine-tuning: each client predicts by the server's model, trained on.

    Rounds are those of `FedAvg`. Whenever predictions are judged, and at the end of `solve`, every client trains the
    server's model for `tuning_epochs` on its samples; nothing of that goes back. After `run`, ``algorithm.weights`` are
    NaN until ``algorithm.resume(state, problem)``.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients; it begins anew in every round.
      tuning_epochs: of the fine-tuning.
      tuning_optimizer: of the fine-tuning, where it is another one.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.fine_tuned(mj.networks.MLP(5, 2), optax.sgd(0.1))
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Li et al., Ditto: Fair and Robust Federated Learning](https://arxiv.org/abs/2012.04221), 2021, which compares
        with it.
    """
    tuning = phase("fine_tuned", "tuning", tuning_optimizer, tuning_epochs)
    return composed("fine_tuned", FINE_TUNED, model, client_optimizer, {}, options, tuning=(tuning,))


def _tuned(c: Client, own: Tree) -> Params:
    return c.train(c.shared, phase="tuning").params


FINE_TUNED = Method(first_model, send_change, averaged, personal_model=own_model, ready=_tuned)


def per_fedavg(
    model: Network, client_optimizer: optax.GradientTransformation, *, inner_rate: Hyperparameter = 0.01,
    second_order: bool = False, tuning_steps: int = 1, **options: Unpack[TrainingOptions],
) -> Composed:  # fmt: skip
    r"""Compose Per-FedAvg: a model that one gradient step on a client's samples makes good for it, as in MAML.

    $$
    \min_w \sum_k c_k f_k\big(w - \alpha \nabla f_k(w)\big), \qquad
    \nabla = \big(I - \alpha \nabla^2 f_k(w)\big)\, \nabla f_k\big(w - \alpha \nabla f_k(w)\big).
    $$

    The inner gradient is of another batch than the outer one, the Hessian of a third. Without the second order the
    Hessian is left out (FO); with it, its product is exact where the paper's HF takes a finite difference. Clients
    predict by the server's model after `tuning_steps` steps of rate $\alpha$ on all their samples.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the outer steps; it begins anew in every round.
      inner_rate: $\alpha$.
      second_order: whether the Hessian takes part; a step then costs about twice as much.
      tuning_steps: of a client before it predicts.
      **options: of `Composed`.

    Returns:
      The algorithm, to be used like `FedAvg`.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.personalized.per_fedavg(mj.networks.MLP(5, 2), optax.sgd(0.1), inner_rate=0.05)
      >>> mj.solve(problem, algorithm, tol=None, max_rounds=5).weights[0].w.shape
      (6, 5, 2)

    References:
      - [Fallah et al., Personalized Federated Learning: A Meta-Learning Approach](https://arxiv.org/abs/2002.07948),
        2020, Algorithm 1.
    """
    check.flag("per_fedavg", second_order=second_order)
    check.integer("per_fedavg", 1, tuning_steps=tuning_steps)
    tuning = Phase("tuning", optax.sgd(1.0), int(tuning_steps), full_batch=True)
    method, gradients = (SECOND_ORDER, 4.0) if second_order else (FIRST_ORDER, 2.0)
    return composed("per_fedavg", method, model, client_optimizer, {"inner_rate": inner_rate}, options,
                    tuning=(tuning,), gradients=gradients)  # fmt: skip


def _adapted(c: Client, params: Params, key: Array) -> Params:
    """Take a step along the gradient of another batch."""
    gradient = jax.grad(c.mean_loss)(params, c.batch(key), key)
    return difference(params, scaled(c.numbers["inner_rate"], gradient))


def _first_order(c: Client, own: Tree) -> tuple[Tree, Answer]:
    def gradient(params: Params, batch: Batch, key: Array) -> tuple[Array, Params]:
        return jax.value_and_grad(c.mean_loss)(_adapted(c, params, key), batch, key)

    done = c.train(c.shared, gradient=gradient)
    return own, Answer(scaled(c.weight, difference(c.shared, done.params)), loss=done.loss)


def _second_order(c: Client, own: Tree) -> tuple[Tree, Answer]:
    def gradient(params: Params, batch: Batch, key: Array) -> tuple[Array, Params]:
        value, outer = jax.value_and_grad(c.mean_loss)(_adapted(c, params, key), batch, key)
        third = jax.random.fold_in(key, 1)
        at = c.batch(third)
        _, product = jax.jvp(lambda p: jax.grad(c.mean_loss)(p, at, third), (params,), (outer,))
        return value, difference(outer, scaled(c.numbers["inner_rate"], product))

    done = c.train(c.shared, gradient=gradient)
    return own, Answer(scaled(c.weight, difference(c.shared, done.params)), loss=done.loss)


def _stepped(c: Client, own: Tree) -> Params:
    def gradient(params: Params, batch: Batch, key: Array) -> tuple[Array, Params]:
        value, gradient = jax.value_and_grad(c.mean_loss)(params, batch, key)
        # Updates are multiplied by the clients' rate, and this step is of another one.
        return value, scaled(safe_ratio(c.numbers["inner_rate"], c.rate), gradient)

    return c.train(c.shared, gradient=gradient, phase="tuning").params


FIRST_ORDER = Method(first_model, _first_order, averaged, personal_model=own_model, ready=_stepped)
SECOND_ORDER = Method(first_model, _second_order, averaged, personal_model=own_model, ready=_stepped)
