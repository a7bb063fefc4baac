"""Algorithms whose server samples clients, and those of a method's own functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static, summary, tree
from mocha_jax._neural.client import Phase
from mocha_jax._neural.client_server import ClientServer
from mocha_jax._neural.method import Declared, Method
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.trainer import of_optax
from mocha_jax.systems import Sampled, System


class Sampling(ClientServer):
    """A method whose server asks a share of the clients and has an optimizer."""

    server_optimizer: optax.GradientTransformation = static(default=optax.sgd(1.0))
    fraction: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.name
        of_optax(name, "server_optimizer", self.server_optimizer, "optax.sgd(1.0)")
        check.in_unit_interval(name, fraction=self.fraction)
        check.scalar(name, fraction=self.fraction)

    def check(self, problem: Prediction) -> None:
        super().check(problem)
        declared = self.declared()
        if declared.method.check is not None:
            declared.method.check(declared.numbers, problem.data)

    def select_nodes(self, systems: System) -> System:
        if isinstance(self.fraction, int | float) and self.fraction == 1:
            return systems
        return systems & Sampled(jnp.maximum(jnp.asarray(self.fraction), 1e-9))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all methods have, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)}

    def with_method(self, method: Method) -> Composed:
        """Return the algorithm with other functions, and everything else as it has it."""
        declared = self.declared()
        return Composed(
            **self.settings, method=method, numbers=dict(declared.numbers), phases=declared.phases,
            tuning=declared.tuning, gradients=declared.gradients,
        )  # fmt: skip


class Composed(Sampling):
    r"""Federated training by a method's own functions.

    Args:
      model: from `mocha_jax.networks`.
      client_optimizer: of the clients' first phase, called "local"; it begins anew in every round.
      server_optimizer: of the server; default ``optax.sgd(1.0)``.
      method: the functions.
      numbers: hyperparameters of the method by name, array leaves.
      phases: of the clients' training after the first one.
      tuning: phases of `Method.ready`, which are no part of a round.
      gradients: gradients of a batch that a step of the first phase computes, for its price.
      fraction: C, the share of the clients with data that is asked in a round; at least one is.
      local_epochs: passes of a client over its samples in the first phase.
      batch_size: samples of a step there; None for all at once.
      rate: factor of the clients' updates, a learning rate to map over.
      seed: of the first parameters.
      at_once: clients trained together, see `Local`.
    """

    method: Method = static(kw_only=True)
    numbers: Mapping[str, Hyperparameter] = tree(default_factory=dict, kw_only=True)
    phases: tuple[Phase, ...] = static(default=(), kw_only=True)
    tuning: tuple[Phase, ...] = static(default=(), kw_only=True)
    gradients: float = static(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check.instance("Composed", "method", self.method, Method, "Method(start, client, server)")
        super().__post_init__()

    @property
    def name(self) -> str:
        return self.method.name

    def __repr__(self) -> str:
        settings = self.settings
        made_of = {field: settings.pop(field) for field in ("model", "client_optimizer")}
        return summary(self, made_of | dict(self.numbers) | settings, self.name)

    def declared(self) -> Declared:
        return Declared(
            self.method, self.numbers, self.phases, self.tuning, self.gradients, self.server_optimizer
        )  # fmt: skip
