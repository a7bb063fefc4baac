r"""The server's side of training that is private at the level of clients.

Its noise, and which nodes it asks, follow from a secret that the operating system's generator draws for every round. An
answer counts in the round that it was asked for, and in no other one, so that every node takes part by chance.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.pytree import Pytree, Tree
from mocha_jax._neural.private_clients import PrivateClients, with_secret
from mocha_jax.federated._network_sides import Training
from mocha_jax.federated._sides import ReceivedAnswers, ServerSide, Sides, register
from mocha_jax.federated._training_sides import TrainingNodeSide, TrainingServerSide, TrainingServerState, TrainingUp


class PrivateServerSide(ServerSide[TrainingServerState, TrainingUp]):
    """The server of such an algorithm."""

    patience = 0
    only_asked = True
    judges = False

    plain: TrainingServerSide
    algorithm: PrivateClients

    @classmethod
    def of(
        cls, algorithm: PrivateClients, regularizer: object, num_tasks: int, num_features: int, dtype: DTypeLike,
        scaling: str,
    ) -> PrivateServerSide:  # fmt: skip
        side = TrainingServerSide.of(algorithm, regularizer, num_tasks, num_features, dtype, scaling)
        return cls(side, algorithm)

    def init(self, counts: Array) -> TrainingServerState:
        return self.plain.init(counts)

    def renewed(self, state: TrainingServerState) -> TrainingServerState:
        secret = np.array([secrets.randbits(32) for _ in state.state.kept.secret], np.uint32)
        return state.replace(state=with_secret(state.state, jnp.asarray(secret)))

    def resume(self, state: TrainingServerState, counts: Array) -> TrainingServerState:
        return self.plain.resume(state, counts)

    def asked(self, key: Array, state: TrainingServerState) -> Array:
        # Of the secret, not of the key: who knows whom it asks, knows more of each than is accounted for.
        selected = self.plain.asked(self.algorithm.secret(state.state), state)
        open = state.state.kept.used < self.algorithm.level.rounds
        return jnp.where(open, jnp.ones_like(state.counts, bool) if selected is None else selected, False)

    def down(self, state: TrainingServerState) -> Pytree:
        return self.plain.down(state)

    def like_up(self) -> TrainingUp:
        return self.plain.like_up()

    def combine(
        self, state: TrainingServerState, round: Array, up: TrainingUp, received: ReceivedAnswers
    ) -> tuple[TrainingServerState, Training]:
        return self.plain.combine(state, round, up, received)

    def weights(self, state: TrainingServerState) -> Tree:
        return self.plain.weights(state)

    def implausible(self, state: TrainingServerState, up: TrainingUp, received: ReceivedAnswers) -> Mapping[str, Array]:
        not_asked = ~self.asked(jax.random.key(0), state)
        return {**self.plain.implausible(state, up, received), "was not asked in this round": not_asked}

    def norms(self, up: TrainingUp) -> Array:
        return self.plain.norms(up)


register(PrivateClients, Sides(TrainingNodeSide.of, PrivateServerSide.of))
