r"""Both sides of the methods that train networks by a client's and a server's function, `FedAvg` among them.

What comes down are the server's trees for all clients, and those for this one. A node does its client's round and
sends what the server is to sum up, its own row, and the total weight of its samples.

**A round of which the server does not hear has not happened.** A node that keeps something between rounds, as of
SCAFFOLD or Ditto, remembers what it kept with each of its last answers, and goes on from the one that the server
holds, as the next message says. So what nodes keep and what the server heard belong together whatever is lost; a node
that restarts from nothing begins as a new one. Of federated averaging nodes keep nothing. An answer to an earlier
message is a change from the trees of that time, and is applied to the present ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.pytree import PyTree, Pytree, SameTree, Tree, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.rounds import NO_ROUND
from mocha_jax._neural.clients import clients_at_once, over_clients
from mocha_jax._neural.composed import Sampling
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.private_gradients import Spent
from mocha_jax._neural.training_state import Heard, Sent, TrainingState
from mocha_jax._neural.trees import first_row, zeros_like
from mocha_jax.federated._absent_data import absent
from mocha_jax.federated._dual_sides import UNKNOWN, invalid_round, known_answers, oldest
from mocha_jax.federated._network_sides import (
    Training,
    check_paths,
    implausible_numbers,
    no_regularizer,
    problem_of,
    row_of,
    steps_of,
    total_of,
    training,
)
from mocha_jax.federated._sides import Header, NodeSide, ReceivedAnswers, ServerSide, Sides, register, where
from mocha_jax.likelihoods import Likelihood
from mocha_jax.systems import Full
from mocha_jax.systems._base import Request

Record = TypeVar("Record")

# Answers whose trees a node keeps, the one held among them: at most so many less one may be under way at a time.
REMEMBERED = 4


class TrainingDown(Pytree):
    """The message of the server."""

    shared: Tree = tree()  # [m, ...] for all clients
    row: Tree = tree()  # [m, ...] for each
    steps: Array  # [m] int32 how many to do; below 0 those of a full round


class TrainingUp(Pytree):
    """The answer of nodes."""

    total: Tree = tree()  # [m, ...] what the server sums up
    row: Tree = tree()  # [m, ...] what it receives of each
    weight: Array  # [m] of the samples; 0 without a step, or where the training was not finite
    loss: Array  # [m] mean over the training, times the weight
    diverged: Array  # [m] int32 1 where it was not finite
    samples: Array  # [m] int32


class TrainingNodeState(Pytree):
    """The state that nodes keep between rounds, where their method keeps anything."""

    incarnation: Array  # [m] int32 of the server that sent the last message; below 0: none has
    round: Array  # [m, k] int32 of the last answers; below 0: none
    own: Tree = tree()  # [m, k, ...] what was kept with them


KeptByNodes = TrainingNodeState | tuple[()]  # a method whose nodes keep nothing has no state


class TrainingNodeSide(NodeSide[KeptByNodes, TrainingDown, TrainingUp]):
    """Nodes that do a client's round."""

    algorithm: Sampling
    problem: Prediction

    @classmethod
    def of(cls, algorithm: Sampling, data: TaskData, likelihood: Likelihood) -> NodeSide:
        problem = problem_of(algorithm, data, likelihood)
        _check_names(algorithm, data.dtype)
        side = cls(algorithm, problem)
        if algorithm.privacy is None:
            return side
        if max(map(jnp.ndim, (algorithm.privacy.noise, algorithm.privacy.steps))):
            raise ValueError("Node: privacy must be of this node alone, e.g. algorithm.privacy.client(3) of client 3.")
        return PrivateNodeSide(side)

    def init(self) -> KeptByNodes:
        m, dtype = self.problem.data.num_nodes, self.problem.data.dtype
        own = jax.eval_shape(lambda: self.algorithm.first_own(jnp.arange(m, dtype=jnp.int32), dtype))
        if not jax.tree.leaves(own):
            return ()
        rounds = jnp.full((m, REMEMBERED), UNKNOWN, jnp.int32)
        kept = jax.tree.map(lambda a: jnp.zeros((m, REMEMBERED, *a.shape[1:]), a.dtype), own)
        return TrainingNodeState(rounds[:, 0], rounds, kept)

    def reject_reason(self, state: KeptByNodes, header: Header, down: TrainingDown) -> str:
        return invalid_round(state.incarnation, state.round, header) if isinstance(state, TrainingNodeState) else ""

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> TrainingDown:
            m, dtype = self.problem.data.num_nodes, self.problem.data.dtype
            parts = self.algorithm.first_parts(m, dtype)
            return TrainingDown(of_each(parts.shared, m), parts.rows, jnp.zeros((m,), jnp.int32))

        return {"TrainingDown": jax.eval_shape(some)}

    def _kept(self, state: TrainingNodeState, header: Header) -> tuple[Tree, Array, Array]:
        """The trees to go on from ``[m, ...]``, whether the server knows them ``[m]``, the answer held ``[m, k]``."""
        rounds = known_answers(state.incarnation, state.round, header)
        is_held = (rounds == header.held[:, None]) & (header.held > 0)[:, None]
        holds = jnp.any(is_held, axis=1)
        silent = (header.held == 0) & ~holds
        own = self._or_first(silent, header.task, state, jnp.where(holds[:, None], is_held, _latest(state)))
        return own, silent | holds, is_held

    def _or_first(self, begins: Array, nodes: Array, state: TrainingNodeState, marks: Array) -> Tree:
        """The trees marked ``[m, k]``; of nodes that begin, or have not answered yet, the first ones."""
        begins |= jnp.all(state.round < 0, axis=1)
        first = self.algorithm.first_own(nodes, self.problem.data.dtype)
        return jax.tree.map(partial(where, begins), first, _picked(state.own, marks))

    def weights(self, state: KeptByNodes, down: TrainingDown) -> Tree:
        algorithm, problem, method = self.algorithm, self.problem, self.algorithm.declared().method
        if method.personal_model is None:
            model = method.global_model
            return down.shared if model is None else jax.vmap(lambda shared: model(shared, ()))(down.shared)
        own: Tree = ()
        if isinstance(state, TrainingNodeState):
            numbers = jnp.zeros(state.incarnation.shape, jnp.int32)
            own = self._or_first(numbers > 0, numbers, state, _latest(state))
        if method.ready is not None:
            own = algorithm.ready_at(
                lambda node: algorithm.inputs(algorithm.tuning_key, row_of(down.shared, node), problem), down.row, own,
                problem,
            )  # fmt: skip
        return jax.vmap(method.personal_model)(down.shared, down.row, own)

    def work(
        self, key: Array, state: KeptByNodes, header: Header, down: TrainingDown
    ) -> tuple[KeptByNodes, Array, TrainingUp]:
        algorithm, problem, data = self.algorithm, self.problem, self.problem.data
        m, zero = data.num_nodes, jnp.zeros((data.num_nodes,), data.dtype)
        own: Tree = ()
        known, is_held = jnp.ones((m,), bool), jnp.ones((m, 1), bool)
        if isinstance(state, TrainingNodeState):
            own, known, is_held = self._kept(state, header)

        def client(
            down: TrainingDown, data: TaskData, place: Array, node: Array, budget: Array,
            kept: tuple[PyTree, Sent, Heard],
        ) -> tuple[tuple[PyTree, Sent, Heard], tuple[()]]:  # fmt: skip
            inputs = algorithm.inputs(key, row_of(down.shared, node), problem)
            c = algorithm.at_client(inputs, row_of(down.row, node), data, place, header.task[node], budget)
            (own, sent), heard = algorithm.answer(c, kept[0], kept[1])
            return (own, sent, heard), ()

        like = algorithm.answer_like(algorithm.first_parts(1, data.dtype))
        none = Heard(zeros_like(like.total, m), zero, zero, zero.astype(jnp.int32))
        begin = own, Sent(zeros_like(like.row, m), jnp.zeros((m,), bool)), none
        budget = steps_of(down.steps, algorithm.full_work(problem))
        (own, sent, heard), _ = over_clients(data, budget, clients_at_once(algorithm.at_once), client, down, begin, ())
        up = TrainingUp(heard.total, sent.row, heard.weight, heard.loss, heard.diverged, data.sizes)
        if not isinstance(state, TrainingNodeState):
            return (), header.held, up  # never ahead of what the server knows
        slot = oldest(state.round, is_held)
        kept = jax.tree.map(partial(_put, slot), state.own, own)
        rounds = jnp.where(slot, header.round[:, None], state.round)
        return TrainingNodeState(header.incarnation, rounds, kept), jnp.where(known, header.held, UNKNOWN), up


class PrivateNodeState(Pytree):
    """The state of private nodes between rounds."""

    spent: Spent  # so far, whether or not the server has heard of it
    rest: KeptByNodes = tree()


class PrivateNodeSide(NodeSide[PrivateNodeState, TrainingDown, TrainingUp]):
    """Nodes that take no more steps than their privacy allows, and draw noise that only they can know."""

    plain: TrainingNodeSide

    def init(self) -> PrivateNodeState:
        return PrivateNodeState(Spent.nothing(self.plain.problem.data.num_nodes), self.plain.init())

    def own_key(self, key: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, secrets.randbits(32)), secrets.randbits(32))

    def like_down(self) -> Mapping[str, Tree]:
        return self.plain.like_down()

    def reject_reason(self, state: PrivateNodeState, header: Header, down: TrainingDown) -> str:
        return self.plain.reject_reason(state.rest, header, down)

    def weights(self, state: PrivateNodeState, down: TrainingDown) -> Tree:
        if self.plain.algorithm.declared().method.ready is not None:
            raise ValueError("Node: a private node is not tuned for its weights, which would spend at every call.")
        return self.plain.weights(state.rest, down)

    def work(
        self, key: Array, state: PrivateNodeState, header: Header, down: TrainingDown
    ) -> tuple[PrivateNodeState, Array, TrainingUp]:
        algorithm, problem = self.plain.algorithm, self.plain.problem
        wanted = steps_of(down.steps, algorithm.full_work(problem))
        budget, spent = algorithm.allowed(wanted, state.spent, problem.data, header.task)
        rest, held, up = self.plain.work(key, state.rest, header, down.exchange(steps=budget))
        return PrivateNodeState(spent, rest), held, up


def _latest(state: TrainingNodeState) -> Array:
    """Mark the last answer of each node, ``[m, k]``."""
    return jnp.arange(state.round.shape[1])[None, :] == jnp.argmax(state.round, axis=1)[:, None]


def _picked(kept: SameTree, marks: Array) -> SameTree:
    """Take one of k of each node, ``[m, ...]``, as marked ``[m, k]``."""
    place = jnp.argmax(marks, axis=1)
    return jax.tree.map(lambda a: a[jnp.arange(len(place)), place], kept)


def _put(slot: Array, kept: Array, new: Array) -> Array:
    return jnp.where(slot.reshape(*slot.shape, *(1,) * (kept.ndim - 2)), new[:, None], kept)


class TrainingServerState(Pytree):
    """The state of the server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    weights: Array  # [m] total weights of their samples: as answers say, before the first one by their number
    state: TrainingState  # what nodes keep is not in it


class TrainingServerSide(ServerSide[TrainingServerState, TrainingUp]):
    """The server of such a method."""

    judges = False

    algorithm: Sampling
    num_tasks: int = static()
    dtype: DTypeLike = static()
    loss_scaling: str = static()

    @classmethod
    def of(
        cls, algorithm: Sampling, regularizer: object, num_tasks: int, num_features: int, dtype: DTypeLike, scaling: str
    ) -> TrainingServerSide:
        # The features are the model's: of sequences it does not see all of them.
        no_regularizer(algorithm, regularizer)
        _check_names(algorithm, dtype)
        return cls(algorithm, num_tasks, dtype, scaling)

    def init(self, counts: Array) -> TrainingServerState:
        parts, zero = self.algorithm.first_parts(self.num_tasks, self.dtype), jnp.zeros((), jnp.int32)
        state = TrainingState(
            zero, *parts, (), (), jnp.full((), jnp.inf, self.dtype), zero, zero, ()
        )  # fmt: skip
        return TrainingServerState(counts, self._weights(counts), state)

    def _weights(self, counts: Array) -> Array:
        return (counts if self.loss_scaling == "sum" else jnp.minimum(counts, 1)).astype(self.dtype)

    def resume(self, state: TrainingServerState, counts: Array) -> TrainingServerState:
        return state.replace(counts=counts, weights=where(counts > 0, state.weights, jnp.zeros_like(state.weights)))

    def asked(self, key: Array, state: TrainingServerState) -> Array | None:
        zero = jnp.zeros((), self.dtype)
        request = Request(state.state.round, jnp.ones_like(state.counts), zero, zero, zero, zero)
        selected, data = self.algorithm.select_nodes(Full()), absent(state.counts, 1, self.dtype)
        return selected.work(jax.random.fold_in(key, NO_ROUND), data, request).active

    def down(self, state: TrainingServerState) -> TrainingDown:
        steps = jnp.full((self.num_tasks,), -1, jnp.int32)
        return TrainingDown(of_each(state.state.shared, 1), state.state.rows, steps)

    def like_up(self) -> TrainingUp:
        def some() -> TrainingUp:
            m, zero = self.num_tasks, jnp.zeros((self.num_tasks,), self.dtype)
            like, none = self.algorithm.answer_like(self.algorithm.first_parts(1, self.dtype)), zero.astype(jnp.int32)
            return TrainingUp(of_each(like.total, m), of_each(like.row, m), zero, zero, none, none)

        return jax.eval_shape(some)

    def combine(
        self, state: TrainingServerState, round: Array, up: TrainingUp, received: ReceivedAnswers
    ) -> tuple[TrainingServerState, Training]:
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        good = received.any & (up.weight > 0)
        weights = jnp.where(good, up.weight, state.weights)
        total = total_of(received.any, Heard(up.total, up.weight, up.loss, up.diverged))
        after = self.algorithm.heard(state.state, total, Sent(up.row, good), weights)
        return TrainingServerState(counts, weights, after), training(after, counts)

    def weights(self, state: TrainingServerState) -> Tree:
        """The parameters that predict, where nodes keep nothing of them; else what goes to all nodes."""
        method = self.algorithm.declared().method
        if method.personal_model is not None and (method.own is not None or method.ready is not None):
            return state.state.shared
        return self.algorithm.weights(state.state)

    def implausible(self, state: TrainingServerState, up: TrainingUp, received: ReceivedAnswers) -> Mapping[str, Array]:
        most = up.samples.astype(up.weight.dtype) if self.loss_scaling == "sum" else jnp.ones_like(up.weight)
        light = (up.weight >= 0) & (up.weight <= most * (1.0 + 1e-3))
        return {
            **implausible_numbers(up.samples, diverged=up.diverged),
            "says that its samples weigh less than nothing, or more than so many can": ~light,
        }

    def norms(self, up: TrainingUp) -> Array:
        decodes = self.algorithm.declared().method.decodes
        if decodes is None:
            return super().norms(up)
        parts = self.algorithm.first_parts(1, self.dtype)
        says = partial(decodes, parts.shared, jax.tree.map(first_row, parts.rows))
        return super().norms(up.exchange(row=jax.vmap(says)(up.row)))


def of_each(record: Record, m: int) -> Record:
    """The record of each of m nodes."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a[None], (m, *a.shape)), record)


def _check_names(algorithm: Sampling, dtype: DTypeLike) -> None:
    """Raise where messages could not tell arrays apart by name."""

    def trees() -> tuple[Tree, ...]:
        parts = algorithm.first_parts(1, dtype)
        return parts.shared, parts.rows, algorithm.answer_like(parts)

    for each in jax.eval_shape(trees):
        check_paths(algorithm, each)


register(Sampling, Sides(TrainingNodeSide.of, TrainingServerSide.of))
