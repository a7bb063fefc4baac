r"""Both sides of VIRTUAL.

What comes down is the posterior s over the shared parameters. A node takes the factor out of it that the server holds
of it, $s_i^{held}$, refines its factor and its private parameters against the rest, and sends the **whole** new
factor: it replaces whatever the server holds, so that the posterior is the product of factors at all times, and an
answer that was lost leaves nothing behind in it. The private parameters stay here.

Which of its answers the server holds, a node learns with the next message: it remembers the factors of the last few.
Taking out any other one would leave a part of its own evidence in the rest, and count it twice. What was lost is not
dropped all the same: training begins from the node's latest factor, from the mean of $s\,s_i / s_i^{held}$, and from
its latest private parameters. So the work of a lost answer is not lost. Where it begins decides nothing about where a
refinement leads. Damping begins at the factor held, though: however many answers were lost, the posterior moves by
no more than it may.

Of a node that has not answered yet, the server holds a power of the first density, and says which. That is known
whatever the node has done. A node that does not know the factor held, for it began from nothing or the server went
back further than it remembers, answers once with its factor and no work, and is whole from its next turn on.

The server keeps the product of the factors that nodes have sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.bayesian import VirtualState, each_of, each_of_count, product
from mocha_jax._neural.clients import clients_at_once, over_clients, whose_turn
from mocha_jax._neural.gaussian import DiagonalGaussian
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.refinement import Own, RefinementAnswer
from mocha_jax._neural.virtual import Virtual
from mocha_jax.federated._dual_sides import UNKNOWN, invalid_round, known_answers, oldest
from mocha_jax.federated._network_sides import (
    Training,
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

# Answers whose factors a node keeps, the one held among them: at most so many less one may be under way at a time.
REMEMBERED = 4


class VirtualDown(Pytree):
    """The message of the server."""

    posterior: DiagonalGaussian  # [m, p] s
    clients: Array  # [m] int32 K, those with samples
    first: Array  # [m] power of the first density that stands for a node without an answer
    steps: Array  # [m] int32 how many to do; below 0 those of a full round


class VirtualUp(Pytree):
    """The answer of nodes."""

    factor: DiagonalGaussian  # [m, p] s_i, all of it
    loss: Array  # [m] mean over the training of the free energy for each sample; 0 without any
    refined: Array  # [m] int32 1 where it is the factor of a refinement that was finite
    diverged: Array  # [m] int32 1 where the refinement was not, and the factor is the one before it
    samples: Array  # [m] int32


class SentFactors(Pytree):
    """The answers that nodes have sent."""

    round: Array  # [m, k] int32; below 0: none
    factor: DiagonalGaussian  # [m, k, p]


class VirtualNodeState(Pytree):
    """The state that nodes keep between rounds."""

    factor: DiagonalGaussian  # [m, p] the latest; of a node that no message has reached anything
    private: DiagonalGaussian  # [m, q] c_i
    loss: Array  # [m] of the last training; infinite before any
    incarnation: Array  # [m] int32 of the server that sent the last message; below 0: none has
    sent: SentFactors


class VirtualNodeSide(NodeSide[VirtualNodeState, VirtualDown, VirtualUp]):
    """Nodes that refine their factors and private parameters."""

    algorithm: Virtual
    problem: Prediction

    @classmethod
    def of(cls, algorithm: Virtual, data: TaskData, likelihood: Likelihood) -> VirtualNodeSide:
        _check_factors("Node", algorithm)
        return cls(algorithm, problem_of(algorithm, data, likelihood))

    def init(self) -> VirtualNodeState:
        m, dtype, k = self.problem.data.num_nodes, self.problem.data.dtype, REMEMBERED
        shared, own = self.algorithm.vectors(dtype)
        private = self.algorithm.first_state(jnp.ones((m,), bool), shared, own).private
        none, rounds = jnp.zeros((m, k, shared.size), dtype), jnp.full((m, k), UNKNOWN, jnp.int32)
        factor, sent = DiagonalGaussian(none[:, 0], none[:, 0]), SentFactors(rounds, DiagonalGaussian(none, none))
        return VirtualNodeState(factor, private, jnp.full((m,), jnp.inf, dtype), rounds[:, 0], sent)

    def reject_reason(self, state: VirtualNodeState, header: Header, down: VirtualDown) -> str:
        if why := invalid_round(state.incarnation, state.sent.round, header):
            return why
        if down.clients < 1 or not 0 <= down.first <= 1:
            power = float(down.first[0])
            return f"sent {int(down.clients[0])} clients and a power of {power:g} for those without an answer"
        return "sent a posterior with a precision below 0" if np.min(down.posterior.precision) < 0 else ""

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> VirtualDown:
            m, dtype = self.problem.data.num_nodes, self.problem.data.dtype
            none = jnp.zeros((m, self.algorithm.vectors(dtype)[0].size), dtype)
            number = jnp.zeros((m,), jnp.int32)
            return VirtualDown(DiagonalGaussian(none, none), number, number.astype(dtype), number)

        return {"VirtualDown": jax.eval_shape(some)}

    def weights(self, state: VirtualNodeState, down: VirtualDown) -> Tree:
        to_shared, to_private, join = self.algorithm.apart(self.problem.data.dtype)
        return join(jax.vmap(to_shared)(down.posterior.mean), jax.vmap(to_private)(state.private.mean))

    def work(
        self, key: Array, state: VirtualNodeState, header: Header, down: VirtualDown
    ) -> tuple[VirtualNodeState, Array, VirtualUp]:
        data = self.problem.data
        shared, _ = self.algorithm.vectors(data.dtype)
        whole, each = self.algorithm.whole(shared), each_of_count(down.clients, data.dtype)
        rounds = known_answers(state.incarnation, state.sent.round, header)
        silent = header.held == 0
        is_held = (rounds == header.held[:, None]) & ~silent[:, None]
        knows_held = silent | jnp.any(is_held, axis=1)
        # At most one factor of each node is marked.
        remembered = jax.tree.map(lambda a: jnp.sum(jnp.where(is_held[:, :, None], a, 0.0), axis=1), state.sent.factor)
        factor_held = _chosen(silent, _powers(whole, down.first), remembered)
        # A node that no message has reached has no factor: it is what stands for it at the server.
        begun = _chosen(knows_held, factor_held, _powers(whole, each))
        latest = _chosen(state.incarnation < 0, begun, state.factor)
        own, refined, diverged = self._refined(key, state, header, down, each, knows_held, factor_held, latest)
        same = jnp.all((latest.precision == factor_held.precision) & (latest.shift == factor_held.shift), axis=1)
        # Of a node that does not know it, the server has nothing of what was remembered.
        earlier = state.sent.replace(round=jnp.where(knows_held[:, None], rounds, UNKNOWN))
        sent = _with_answer(earlier, is_held, header.round, own.factor)
        up = VirtualUp(own.factor, jnp.where(refined > 0, own.loss, 0.0), refined, diverged, data.sizes)
        held = jnp.where(knows_held & same, header.held, UNKNOWN)
        return VirtualNodeState(own.factor, own.private, own.loss, header.incarnation, sent), held, up

    def _refined(
        self, key: Array, state: VirtualNodeState, header: Header, down: VirtualDown, each: Array, knows_held: Array,
        factor_held: DiagonalGaussian, latest: DiagonalGaussian,
    ) -> tuple[Own, Array, Array]:  # fmt: skip
        """Refine: all that is the nodes' own then, which refinements were finite ``[m]`` and which were not."""
        algorithm, problem, data = self.algorithm, self.problem, self.problem.data
        shared, own_like = algorithm.vectors(data.dtype)
        start = down.posterior * (latest / factor_held)
        start = start.replace(precision=jnp.maximum(start.precision, latest.precision))  # but for rounding it is more
        begin = jnp.where(start.shift == 0, shared[None, :], start.mean)
        full = algorithm.full_work(problem)
        budget = jnp.where(knows_held, steps_of(down.steps, full), 0)

        def client(
            key: Array, data: TaskData, place: Array, node: Array, budget: Array, row: tuple[Own, Array, Array]
        ) -> tuple[tuple[Own, Array, Array], tuple[()]]:
            own, _, _ = row
            posterior, factor = row_of(down.posterior, node), row_of(factor_held, node)
            inputs = algorithm.inputs(key, posterior, begin[node], own_like, problem.likelihood, each[node])
            before = Own(factor, own.private, own.loss)
            new, answer = algorithm.refine(inputs, data, place, header.task[node], budget, before, own.factor)
            factor = jax.tree.map(lambda a, b: jnp.where(answer.good > 0, a, b), new.factor, own.factor)
            return (Own(factor, new.private, new.loss), answer.good, answer.bad), ()

        none = jnp.zeros((data.num_nodes,), jnp.int32)
        row = Own(latest, state.private, state.loss), none, none
        return over_clients(
            data, budget, clients_at_once(algorithm.at_once), client, key, row, ()
        )[0]  # fmt: skip


class VirtualServerState(Pytree):
    """The state of the server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    first: Array  # [m] power of the first density that stands for a node without an answer; 0 of the others
    state: VirtualState  # with factors of all nodes; of private parameters it has none, [m, 0]


class VirtualServerSide(ServerSide[VirtualServerState, VirtualUp]):
    """The server of VIRTUAL."""

    judges = False

    algorithm: Virtual
    num_tasks: int = static()
    dtype: DTypeLike = static()

    @classmethod
    def of(
        cls, algorithm: Virtual, regularizer: object, num_tasks: int, num_features: int, dtype: DTypeLike, scaling: str
    ) -> VirtualServerSide:
        # The features are the model's: of sequences it does not see all of them.
        no_regularizer(algorithm, regularizer)
        _check_factors("Server", algorithm)
        if isinstance(algorithm.order, tuple) and max(algorithm.order) >= num_tasks:
            raise ValueError(f"Server: order names client {max(algorithm.order)}, but there are {num_tasks}.")
        if scaling != "sum":
            raise ValueError("Server: the likelihoods of Virtual count every sample; use loss_scaling='sum'.")
        return cls(algorithm, num_tasks, dtype)

    def _shared(self) -> Array:
        return self.algorithm.vectors(self.dtype)[0]

    def init(self, counts: Array) -> VirtualServerState:
        present, shared = counts > 0, self._shared()
        state = self.algorithm.first_state(present, shared, jnp.zeros((0,), shared.dtype))
        return VirtualServerState(counts, self._firsts(present), state)

    def _firsts(self, present: Array) -> Array:
        return present.astype(self.dtype) * each_of(present, self.dtype)

    def resume(self, state: VirtualServerState, counts: Array) -> VirtualServerState:
        """Take out the factors of nodes that have left; those that join have none before their first answer.

        Nodes without an answer so far stand for their share of the first density among the nodes there are now.
        """
        present, before = counts > 0, state.state
        first = jnp.where(present & (state.first > 0), self._firsts(present), jnp.zeros_like(state.first))
        factors = _chosen(first > 0, _powers(self.algorithm.whole(before.first), first), before.factors)
        factors = jax.tree.map(lambda a: where(present, a, jnp.zeros_like(a)), factors)
        losses = where(present, before.losses, jnp.full_like(before.losses, jnp.inf))
        return VirtualServerState(
            counts, first, before.replace(posterior=product(factors), factors=factors, losses=losses)
        )  # fmt: skip

    def asked(self, key: Array, state: VirtualServerState) -> Array | None:
        if self.algorithm.parallel:
            return None
        return whose_turn(state.counts > 0, state.state.round, self.algorithm.order, self.algorithm.seed)

    def down(self, state: VirtualServerState) -> VirtualDown:
        m = self.num_tasks
        posterior = jax.tree.map(lambda a: a[None], state.state.posterior)
        clients = jnp.broadcast_to(jnp.sum(state.counts > 0, dtype=jnp.int32), (m,))
        return VirtualDown(posterior, clients, state.first, jnp.full((m,), -1, jnp.int32))

    def like_up(self) -> VirtualUp:
        def some() -> VirtualUp:
            m, shared = self.num_tasks, self._shared()
            none, number = jnp.zeros((m, shared.size), shared.dtype), jnp.zeros((m,), jnp.int32)
            return VirtualUp(DiagonalGaussian(none, none), number.astype(shared.dtype), number, number, number)

        return jax.eval_shape(some)

    def combine(
        self, state: VirtualServerState, round: Array, up: VirtualUp, received: ReceivedAnswers
    ) -> tuple[VirtualServerState, Training]:
        before = state.state
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        factors = _chosen(received.any, up.factor, before.factors)
        losses = where(received.any & (up.refined > 0), up.loss, before.losses)
        change = jax.tree.map(partial(jnp.sum, axis=0), factors / before.factors)
        good, bad = total_of(received.any, (up.refined, up.diverged))
        after = before.heard(Own(factors, before.private, losses), RefinementAnswer(change, good, bad))
        first = jnp.where(received.any, jnp.zeros_like(state.first), state.first)
        return VirtualServerState(counts, first, after), training(after, counts)

    def weights(self, state: VirtualServerState) -> Tree:
        """The means of the shared parameters; of a network of `networks.SplitParameters` the private ones are None."""
        to_shared, _, join = self.algorithm.apart(self.dtype)
        return join(to_shared(state.state.mean), None)

    def implausible(self, state: VirtualServerState, up: VirtualUp, received: ReceivedAnswers) -> Mapping[str, Array]:
        return {
            **implausible_numbers(up.samples, refined=up.refined, diverged=up.diverged),
            "sent a factor with a precision below 0": jnp.min(up.factor.precision, axis=1, initial=0.0) < 0,
        }


def _check_factors(owner: str, algorithm: Virtual) -> None:
    """Raise where clients are to send parts of their factors."""
    if algorithm.sent != 1.0:
        raise ValueError(
            f"{owner}: nodes send the whole factor, so that an answer makes up for those that were lost; use Virtual "
            f"with sent=1.0, got {algorithm.sent:g}."
        )


def _powers(gaussian: DiagonalGaussian, power: Array) -> DiagonalGaussian:
    """One DiagonalGaussian ``[p]`` to the powers of all nodes ``[m]``, ``[m, p]``."""
    return DiagonalGaussian(power[:, None] * gaussian.precision[None, :], power[:, None] * gaussian.shift[None, :])


def _chosen(mask: Array, new: DiagonalGaussian, old: DiagonalGaussian) -> DiagonalGaussian:
    """The new ones of some nodes, and the old ones of the others."""
    return DiagonalGaussian(where(mask, new.precision, old.precision), where(mask, new.shift, old.shift))


def _with_answer(sent: SentFactors, is_held: Array, round: Array, factor: DiagonalGaussian) -> SentFactors:
    """Put another answer in place of the oldest, but not of the one that the server holds, marked ``[m, k]``."""
    slot = oldest(sent.round, is_held)
    factors = jax.tree.map(lambda a, new: jnp.where(slot[:, :, None], new[:, None, :], a), sent.factor, factor)
    return SentFactors(jnp.where(slot, round[:, None], sent.round), factors)


register(Virtual, Sides(VirtualNodeSide.of, VirtualServerSide.of))
