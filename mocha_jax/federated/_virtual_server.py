"""The server's side of VIRTUAL: the product of the factors that nodes have sent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._neural.bayesian import VirtualState, each_of, product
from mocha_jax._neural.clients import whose_turn
from mocha_jax._neural.gaussian import DiagonalGaussian
from mocha_jax._neural.refinement import Own, RefinementAnswer
from mocha_jax._neural.virtual import Virtual
from mocha_jax.federated._sides import Heard, ServerSide, Sides, register, where
from mocha_jax.federated._training import Training, doubtful, no_regularizer, total_of, training
from mocha_jax.federated._virtual_node import VirtualDown, VirtualNodes, VirtualUp, chosen, powers, whole_factors


class VirtualHeld(Pytree):
    """The state of the server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    first: Array  # [m] power of the first density that stands for a node which has not been heard; 0 of the others
    state: VirtualState  # with factors of all nodes; of private parameters it has none, [m, 0]


class VirtualCentre(ServerSide):
    """The server of VIRTUAL."""

    judges = False

    algorithm: Virtual
    num_tasks: int = static()
    dtype: DTypeLike = static()

    @classmethod
    def of(
        cls, algorithm: Virtual, regularizer: object, num_tasks: int, num_features: int, dtype: DTypeLike, scaling: str
    ) -> VirtualCentre:
        # The features are the model's: of sequences it does not see all of them.
        no_regularizer(algorithm, regularizer)
        whole_factors("Server", algorithm)
        if isinstance(algorithm.order, tuple) and max(algorithm.order) >= num_tasks:
            raise ValueError(f"Server: order names client {max(algorithm.order)}, but there are {num_tasks}.")
        if scaling != "sum":
            raise ValueError("Server: the likelihoods of Virtual count every sample; use loss_scaling='sum'.")
        return cls(algorithm, num_tasks, dtype)

    def _shared(self) -> Array:
        return self.algorithm.vectors(self.dtype)[0]

    def init(self, counts: Array) -> VirtualHeld:
        there, shared = counts > 0, self._shared()
        state = self.algorithm.first_state(there, shared, jnp.zeros((0,), shared.dtype))
        return VirtualHeld(counts, self._firsts(there), state)

    def _firsts(self, there: Array) -> Array:
        return there.astype(self.dtype) * each_of(there, self.dtype)

    def resume(self, state: VirtualHeld, counts: Array) -> VirtualHeld:
        """Take out the factors of nodes that have left; those that join have none before their first answer.

        Nodes that were not heard yet stand for their share of the first density among the nodes there are now.
        """
        there, before = counts > 0, state.state
        first = jnp.where(there & (state.first > 0), self._firsts(there), jnp.zeros_like(state.first))
        factors = chosen(first > 0, powers(self.algorithm.whole(before.first), first), before.factors)
        factors = jax.tree.map(lambda a: where(there, a, jnp.zeros_like(a)), factors)
        losses = where(there, before.losses, jnp.full_like(before.losses, jnp.inf))
        return VirtualHeld(
            counts, first, before.replace(posterior=product(factors), factors=factors, losses=losses)
        )  # fmt: skip

    def asked(self, key: Array, state: VirtualHeld) -> Array | None:
        if self.algorithm.parallel:
            return None
        return whose_turn(state.counts > 0, state.state.round, self.algorithm.order, self.algorithm.seed)

    def down(self, state: VirtualHeld) -> VirtualDown:
        m = self.num_tasks
        posterior = jax.tree.map(lambda a: a[None], state.state.posterior)
        clients = jnp.broadcast_to(jnp.sum(state.counts > 0, dtype=jnp.int32), (m,))
        return VirtualDown(posterior, clients, state.first, jnp.full((m,), -1, jnp.int32))

    def like_up(self) -> Tree:
        def some() -> VirtualUp:
            m, shared = self.num_tasks, self._shared()
            none, number = jnp.zeros((m, shared.size), shared.dtype), jnp.zeros((m,), jnp.int32)
            return VirtualUp(DiagonalGaussian(none, none), number.astype(shared.dtype), number, number, number)

        return jax.eval_shape(some)

    def combine(self, state: VirtualHeld, round: Array, up: VirtualUp, heard: Heard) -> tuple[VirtualHeld, Training]:
        before = state.state
        counts = where(heard.any & (state.counts > 0), up.samples, state.counts)
        factors = chosen(heard.any, up.factor, before.factors)
        losses = where(heard.any & (up.refined > 0), up.loss, before.losses)
        change = jax.tree.map(partial(jnp.sum, axis=0), factors / before.factors)
        good, bad = total_of(heard.any, (up.refined, up.diverged))
        after = before.heard(Own(factors, before.private, losses), RefinementAnswer(change, good, bad))
        first = jnp.where(heard.any, jnp.zeros_like(state.first), state.first)
        return VirtualHeld(counts, first, after), training(after, counts)

    def weights(self, state: VirtualHeld) -> Any:
        """The means of the shared parameters; of a network of `networks.SplitParameters` the private ones are None."""
        to_shared, _, join = self.algorithm.apart(self.dtype)
        return join(to_shared(state.state.mean), None)

    def doubts(self, state: VirtualHeld, up: VirtualUp, heard: Heard) -> Mapping[str, Array]:
        return {
            **doubtful(up.samples, refined=up.refined, diverged=up.diverged),
            "sent a factor with a precision below 0": jnp.min(up.factor.precision, axis=1, initial=0.0) < 0,
        }


register(Virtual, Sides(VirtualNodes.of, VirtualCentre.of))
