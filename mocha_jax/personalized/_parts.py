"""Parts that methods of several papers share."""

from __future__ import annotations

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, SameTree, Tree
from mocha_jax._neural.client import Phase
from mocha_jax._neural.composed import Composed
from mocha_jax._neural.method import Beginning, Method
from mocha_jax._neural.trainer import of_optax
from mocha_jax.networks import Network, Params


class ClientOptions(TypedDict, total=False):
    """Options of every method; `Composed` says what they are."""

    fraction: Hyperparameter
    local_epochs: int
    batch_size: int | None
    rate: Hyperparameter
    seed: Hyperparameter | int
    at_once: int | None


class TrainingOptions(ClientOptions, total=False):
    """Options of a method whose server has an optimizer."""

    server_optimizer: optax.GradientTransformation


class Extra(TypedDict, total=False):
    """Additions of a method to `Composed`."""

    phases: tuple[Phase, ...]
    tuning: tuple[Phase, ...]
    gradients: float


def composed(
    owner: str, method: Method, model: Network, optimizer: optax.GradientTransformation,
    numbers: dict[str, Hyperparameter], options: ClientOptions | TrainingOptions, **extra: Unpack[Extra],
) -> Composed:  # fmt: skip
    """Put a method together; raise where a hyperparameter is no number, 0 or more."""
    check_made_of(owner, model, optimizer)
    for name, number in numbers.items():
        if name != "graph":
            check.scalar(owner, **{name: number})
        check.nonnegative(owner, **{name: number})
    return Composed(model, optimizer, method=method._replace(name=owner), numbers=numbers, **extra, **options)


def without_server_optimizer(owner: str, options: ClientOptions) -> None:
    """Raise where an optimizer is given to a server whose step is the method's own."""
    if "server_optimizer" in options:
        raise ValueError(f"{owner}: the server has no optimizer; leave server_optimizer out.")


def check_made_of(owner: str, model: object, optimizer: object) -> None:
    """Raise where these are no network and no optimizer, before others are made of them."""
    check.instance(owner, "model", model, Network, "networks.MLP(784, 10, (200, 200))")
    of_optax(owner, "client_optimizer", optimizer, "optax.sgd(0.1)")


def phase(
    owner: str, name: str, optimizer: optax.GradientTransformation | None, epochs: int | None
) -> Phase:  # fmt: skip
    """Make a phase with the batches of the first one; raise where its settings are none."""
    if epochs is not None:
        check.integer(owner, 1, **{f"{name}_epochs": epochs})
    if optimizer is not None:
        of_optax(owner, f"{name}_optimizer", optimizer, "optax.sgd(0.1)")
    return Phase(name, optimizer, None if epochs is None else int(epochs))


def same_model(b: Beginning, node: Array) -> Params:
    """Keep a network, which begins as the server's."""
    return b.begin(0)


def no_correction(b: Beginning, node: Array) -> Params:
    """Keep a correction of gradients, which begins as zeros."""
    return jax.tree.map(jnp.zeros_like, b.begin(0))


def from_shared(shared: Tree, row: Tree, first: Params) -> Params:
    """Begin with the server's network, as a client that comes late."""
    return shared


def own_model(shared: Tree, row: Tree, own: Params) -> Params:
    """Predict by the network that the client keeps."""
    return own


def row_model(shared: Tree, row: Params, own: Tree) -> Params:
    """Predict by the network that the server has for the client."""
    return row


def everywhere(params: SameTree, m: int) -> SameTree:
    """Repeat a tree for m clients, ``[m, ...]``."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (m, *a.shape)), params)
