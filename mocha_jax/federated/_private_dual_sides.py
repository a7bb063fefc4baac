r"""Both sides of `privacy.PrivateSdca`.

A node sends the sum of all that it has published, so that an answer makes up for those that were lost. It draws its
noise where only it can know it, and counts every round that it has worked for, whether or not its answer arrived.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree, Relation, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem, Quality
from mocha_jax.federated._dual_sides import UNKNOWN, LinearServerSide, invalid_message
from mocha_jax.federated._network_sides import implausible_numbers, steps_of
from mocha_jax.federated._sides import Header, NodeSide, ReceivedAnswers, Sides, register, where
from mocha_jax.losses import Loss
from mocha_jax.privacy import PrivateSdca
from mocha_jax.privacy._sdca import NodeState, safe_curvature
from mocha_jax.regularizers import Independent


class PrivateSdcaDown(Pytree):
    """The message of the server."""

    model: Array  # [m, d]
    curvature: Array  # [m] with which all steps of a node together are safe
    steps: Array  # [m] int32 samples in the mean; below 0 those of a full round


class PrivateSdcaUp(Pytree):
    """The answer of nodes."""

    told: Array  # [m, d] the sum of all that each has published
    samples: Array  # [m] int32


class PrivateSdcaNodeState(Pytree):
    """The state that nodes keep between rounds."""

    incarnation: Array  # [m] int32 of the server that sent the last message; below 0: none has
    round: Array  # [m] int32 of the last answer; 0 before the first
    nodes: NodeState


class PrivateSdcaNodeSide(NodeSide[PrivateSdcaNodeState, PrivateSdcaDown, PrivateSdcaUp]):
    """Nodes that publish noisy sums, as long as their privacy allows."""

    algorithm: PrivateSdca
    problem: Problem

    @classmethod
    def of(cls, algorithm: PrivateSdca, data: TaskData, loss: Loss) -> PrivateSdcaNodeSide:
        # Nodes never use this regularizer: theirs is the server's.
        problem = Problem(data, loss, Independent(1.0))
        level = algorithm.privacy
        if level is None:
            raise ValueError("Node: PrivateSdca needs privacy here, e.g. PrivateSdca(privacy.ExampleLevel(2.0, 40)).")
        if max(map(jnp.ndim, (level.noise, level.steps))):
            raise ValueError("Node: privacy must be of this node alone, e.g. algorithm.privacy.client(3) of client 3.")
        algorithm.check(problem)
        return cls(algorithm, problem.unnamed())

    def init(self) -> PrivateSdcaNodeState:
        nodes = self.algorithm.init(self.problem).nodes
        none = jnp.zeros_like(nodes.spent.steps)
        return PrivateSdcaNodeState(none + UNKNOWN, none, nodes)

    def own_key(self, key: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, secrets.randbits(32)), secrets.randbits(32))

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> PrivateSdcaDown:
            data = self.problem.data
            number = jnp.zeros((data.num_nodes,), data.dtype)
            vector = jnp.zeros((data.num_nodes, data.num_features), data.dtype)
            return PrivateSdcaDown(vector, number, number.astype(jnp.int32))

        return {"PrivateSdcaDown": jax.eval_shape(some)}

    def reject_reason(self, state: PrivateSdcaNodeState, header: Header, down: PrivateSdcaDown) -> str:
        return invalid_message(state.incarnation, state.round, header, down.curvature, down.steps)

    def weights(self, state: PrivateSdcaNodeState, down: PrivateSdcaDown) -> Array:
        return down.model

    def work(
        self, key: Array, state: PrivateSdcaNodeState, header: Header, down: PrivateSdcaDown
    ) -> tuple[PrivateSdcaNodeState, Array, PrivateSdcaUp]:
        algorithm, problem = self.algorithm, self.problem
        steps = steps_of(down.steps, algorithm.full_work(problem))
        nodes, _ = algorithm.published(key, state.nodes, header.task, problem, down.model, down.curvature, steps)
        known = (state.incarnation == header.incarnation) | (state.incarnation < 0)
        held = jnp.where(known & (state.round == header.held), header.held, UNKNOWN)
        after = PrivateSdcaNodeState(header.incarnation, header.round, nodes)
        return after, held, PrivateSdcaUp(nodes.told, problem.data.sizes)


class PrivateSdcaServerState(Pytree):
    """The state of the server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    told: Array  # [m, d] what it holds of each
    relation: Relation


class Published(Quality):
    """The quality of weights that follow from noisy sums alone: ``residual`` is infinite, nothing else is known."""

    fine: Array  # [] bool whether the weights are numbers

    @property
    def finite(self) -> Array:
        return jnp.asarray(self.fine)


class PrivateSdcaServerSide(LinearServerSide[PrivateSdcaServerState, PrivateSdcaUp]):
    """The server, which adds up and computes weights and Omega of the sums."""

    judges = False

    algorithm: PrivateSdca

    def init(self, counts: Array) -> PrivateSdcaServerState:
        shape = self.num_tasks, self.num_features
        relation = self.problem_of(counts).regularizer.known_relation("Server", None, *shape)
        return PrivateSdcaServerState(counts, jnp.zeros(shape, self.dtype), relation)

    def resume(self, state: PrivateSdcaServerState, counts: Array) -> PrivateSdcaServerState:
        return state.replace(counts=counts, told=where(counts > 0, state.told, jnp.zeros_like(state.told)))

    def down(self, state: PrivateSdcaServerState) -> PrivateSdcaDown:
        problem = self.problem_of(state.counts)
        w, coupling = self.algorithm.model(problem, state.told, state.relation)
        return PrivateSdcaDown(w, safe_curvature(coupling, problem.data), jnp.full((self.num_tasks,), -1, jnp.int32))

    def like_up(self) -> PrivateSdcaUp:
        vector = jax.ShapeDtypeStruct((self.num_tasks, self.num_features), self.dtype)
        return jax.eval_shape(lambda told: PrivateSdcaUp(told, jnp.zeros((self.num_tasks,), jnp.int32)), vector)

    def combine(
        self, state: PrivateSdcaServerState, round: Array, up: PrivateSdcaUp, received: ReceivedAnswers
    ) -> tuple[PrivateSdcaServerState, Published]:
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        told = where(received.any, up.told, state.told)
        relation = self.algorithm.updated(self.problem_of(counts), round, told, state.relation)
        after = PrivateSdcaServerState(counts, told, relation)
        fine = jnp.all(jnp.isfinite(self.weights(after)))
        return after, Published(jnp.full((), jnp.inf, self.dtype), fine)

    def implausible(
        self, state: PrivateSdcaServerState, up: PrivateSdcaUp, received: ReceivedAnswers
    ) -> Mapping[str, Array]:
        return implausible_numbers(up.samples)

    def norms(self, up: PrivateSdcaUp) -> Array:
        return jnp.sqrt(jnp.sum(up.told**2, axis=1))

    def weights(self, state: PrivateSdcaServerState) -> Array:
        return self.algorithm.model(self.problem_of(state.counts), state.told, state.relation)[0]

    def relation(self, state: PrivateSdcaServerState) -> Relation:
        return state.relation

    def omega(self, state: PrivateSdcaServerState) -> Array:
        return self.problem_of(state.counts).relationship(self.num_tasks, state.relation)


register(PrivateSdca, Sides(PrivateSdcaNodeSide.of, PrivateSdcaServerSide))
