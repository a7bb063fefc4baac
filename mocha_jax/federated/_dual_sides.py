r"""Both sides of a dual method: Algorithm 1 and the proximal server, of which a node sees no difference.

A node keeps its duals, and the vectors $v$ of its last few answers. What comes down are weights w, a curvature q, and
which of those answers the server holds. Of $v_{\mathrm{held}}$, the node's share of (4) is

$$
\min_{\beta}\; \sum_i c_i\,\ell^*(-\beta_i) + \langle w, u\rangle + \tfrac q2\|u\|^2, \qquad u = v - v_{\mathrm{held}},
$$

whatever the node has done since. So it goes on from where it stands, from the gradient there, $w + q\,(v -
v_{\mathrm{held}})$: an answer that was lost or is late costs no work, and a safe curvature stays safe. What goes up is
the whole vector v, not its change: the next answer that arrives makes up for those that did not.

The server's side is any server of the library, without samples and without dual variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Algorithm, Drawn
from mocha_jax._algorithms.mocha import SubproblemMethod
from mocha_jax._core.pytree import Pytree, Relation, Tree, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.local_solver import Subproblems
from mocha_jax._problem.gap import Certificate, DualTerms, dual_terms, gap_terms
from mocha_jax._problem.problem import Problem
from mocha_jax.federated._absent_data import absent
from mocha_jax.federated._partial_certificate import best_bound, certified, undenied, unknown_terms
from mocha_jax.federated._plausible import implausible_vectors
from mocha_jax.federated._sides import (
    Header,
    NodeSide,
    ReceivedAnswers,
    ServerSide,
    Sides,
    State,
    UpRecord,
    register,
    where,
)
from mocha_jax.losses import Loss, Squared
from mocha_jax.regularizers import Independent, Regularizer
from mocha_jax.servers._base import NodeUpdate, ServerState
from mocha_jax.systems._base import Info, Work

# Answers whose vectors a node keeps. Which of them the server holds it learns with the next message; of more than that
# in a row that were lost or are under way, it answers once with its vector and no work.
REMEMBERED = 8

# In place of the number of a round or of an incarnation.
UNKNOWN = -1


class DualDown(Pytree):
    """The message of a dual method's server."""

    start: Array  # [m, d] the weights from which the nodes start
    model: Array  # [m, d] the weights to be certified
    curvature: Array  # [m]
    steps: Array  # [m] int32 how many to do; below 0 those of a full round


class DualUp(Pytree):
    """The answer of a dual method's nodes."""

    v: Array  # [m, d] the whole dual vector
    share: Array  # [m] of a full round's work, done since the answer that the server holds
    gap: Array  # [m] data terms of the gap of the model, with the duals before this round
    value: Array  # [m] losses of the model
    terms: DualTerms  # of the duals after it
    samples: Array  # [m] int32


class SentVectors(Pytree):
    """The answers that nodes have sent."""

    round: Array  # [m, k] int32; 0 before the first, below 0: none
    v: Array  # [m, k, d]
    done: Array  # [m, k] work up to then


class DualNodeState(Pytree):
    """The state that nodes keep between rounds."""

    beta: Array  # [m, n] duals
    v: Array  # [m, d] their dual vectors
    done: Array  # [m] work so far, in full rounds
    incarnation: Array  # [m] int32 of the server that sent the last message; below 0: none has
    sent: SentVectors

    @property
    def duals(self) -> Array:
        return self.beta


class DualNodeSide(NodeSide[DualNodeState, DualDown, DualUp]):
    """Nodes of a method whose local work is on the subproblems (4)."""

    algorithm: SubproblemMethod
    problem: Problem

    @classmethod
    def of(cls, algorithm: SubproblemMethod, data: TaskData, loss: Loss) -> DualNodeSide:
        # Nodes never use this regularizer: theirs is the server's.
        return cls(algorithm, algorithm.laid_out(Problem(data, loss, Independent(1.0)).unnamed()))

    def init(self) -> DualNodeState:
        data = self.problem.data
        m, d, k = data.num_nodes, data.num_features, REMEMBERED
        beta = self.problem.node_loss.project(jnp.zeros_like(data.y), data.y)
        # Of a node that has never answered the server holds nothing, that is 0.
        rounds = jnp.full((m, k), UNKNOWN, jnp.int32).at[:, 0].set(0)
        sent = SentVectors(rounds, jnp.zeros((m, k, d), data.dtype), jnp.zeros((m, k), data.dtype))
        incarnation = jnp.full((m,), UNKNOWN, jnp.int32)
        return DualNodeState(beta, data.node_vectors(beta), jnp.zeros((m,), data.dtype), incarnation, sent)

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> DualDown:
            data = self.problem.data
            number = jnp.zeros((data.num_nodes,), data.dtype)
            vector = jnp.zeros((data.num_nodes, data.num_features), data.dtype)
            return DualDown(vector, vector, number, number.astype(jnp.int32))

        return {"DualDown": jax.eval_shape(some)}

    def weights(self, state: DualNodeState, down: DualDown) -> Array:
        return down.model

    def work(
        self, key: Drawn, state: DualNodeState, header: Header, down: DualDown
    ) -> tuple[DualNodeState, Array, DualUp]:
        data, loss = self.problem.data, self.problem.node_loss
        rounds = known_answers(state.incarnation, state.sent.round, header)
        is_held = rounds == header.held[:, None]
        knows_held = jnp.any(is_held, axis=1)
        v_held = jnp.where(
            knows_held[:, None], jnp.sum(jnp.where(is_held[:, :, None], state.sent.v, 0.0), axis=1), state.v
        )
        done_held = jnp.where(knows_held, jnp.sum(jnp.where(is_held, state.sent.done, 0.0), axis=1), state.done)
        start = down.start + down.curvature[:, None] * (state.v - v_held)
        beta, share = self.improved(key, state.beta, start, down.curvature, down.steps, knows_held)
        v, done = data.node_vectors(beta), state.done + share
        gap, value = gap_terms(data, loss, state.beta, down.model)
        up = DualUp(v, jnp.minimum(done - done_held, 1.0), gap, value, dual_terms(data, loss, beta), data.sizes)
        earlier = state.sent.replace(round=jnp.where(knows_held[:, None], rounds, UNKNOWN))
        sent = _with_answer(earlier, is_held, header.round, v, done)
        held = jnp.where(knows_held & jnp.all(state.v == v_held, axis=1), header.held, UNKNOWN)
        return DualNodeState(beta, v, done, header.incarnation, sent), held, up

    def held_vectors(self, state: DualNodeState, header: Header) -> tuple[Array, Array]:
        is_held = known_answers(state.incarnation, state.sent.round, header) == header.held[:, None]
        return jnp.sum(jnp.where(is_held[:, :, None], state.sent.v, 0.0), axis=1), jnp.any(is_held, axis=1)

    def with_decoded(self, state: DualNodeState, header: Header, up: DualUp, v: Array) -> tuple[DualNodeState, DualUp]:
        is_this = state.sent.round == header.round[:, None]
        sent = state.sent.replace(v=jnp.where(is_this[:, :, None], v[:, None, :], state.sent.v))
        lost = jnp.sqrt(jnp.sum((up.v - v) ** 2, axis=1))
        more = lost * (1.0 + jnp.finfo(v.dtype).eps * (4.0 + v.shape[1]))  # the rounding of it included
        return state.replace(sent=sent), up.replace(v=v, terms=up.terms.replace(error=up.terms.error + more))

    def reject_reason(self, state: DualNodeState, header: Header, down: DualDown) -> str:
        return invalid_message(state.incarnation, state.sent.round, header, down.curvature, down.steps)

    def improved(
        self, key: Drawn, beta: Array, start: Array, curvature: Array, steps: Array, may: Array
    ) -> tuple[Array, Array]:
        """Find better duals, and tell the share of a full round that it took.

        Args:
          key: of the round's draws, or what was drawn.
          beta: duals ``[m, n]``.
          start: the weights that belong to them ``[m, d]``.
          curvature: of the subproblems ``[m]``.
          steps: how many to do ``[m]``; below 0 those of a full round.
          may: ``[m]`` bool which nodes do any work.
        """
        algorithm, data = self.algorithm, self.problem.data
        full = algorithm.full_work(self.problem)
        steps = jnp.where(may, jnp.where(steps < 0, full, jnp.minimum(steps, full)), 0)
        subproblems = Subproblems(data, self.problem.node_loss, beta, w=start, q=curvature)
        drawn = algorithm.draw(key, self.problem)
        update = algorithm.improve(drawn, subproblems, self.problem, Work(steps, steps > 0))
        return update.beta, update.share


class DualServerState(Pytree):
    """The state of the server of a dual method between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    v: Array  # [m, d] the dual vectors that it holds
    terms: DualTerms  # of the same duals
    bound: Array  # [] the best lower bound on the optimum so far
    rule: ServerState = tree()  # of the server of the library


class LinearServerSide(ServerSide[State, UpRecord]):
    """Base class of the servers of linear models, which know the problem but for its samples and its loss."""

    algorithm: Algorithm
    regularizer: Regularizer
    num_tasks: int = static()
    num_features: int = static()
    dtype: DTypeLike = static()
    loss_scaling: str = static()

    def problem_of(self, counts: Array) -> Problem:
        """The problem, as far as it is known here, of nodes with so many samples ``[m]``."""
        # The server never uses this loss: losses are the nodes'.
        return Problem(absent(counts, self.num_features, self.dtype, self.loss_scaling), Squared(), self.regularizer)


class DualServerSide(LinearServerSide[DualServerState, DualUp]):
    """The server of a method whose local work is on the subproblems (4)."""

    algorithm: SubproblemMethod

    def init(self, counts: Array) -> DualServerState:
        problem, dtype = self.problem_of(counts), self.dtype
        v, none = jnp.zeros((self.num_tasks, self.num_features), dtype), jnp.zeros((self.num_tasks,), dtype)
        terms = DualTerms(none, none, none)
        rule = self.algorithm.server_for(problem).init(problem, unknown_terms(terms), v)
        return DualServerState(counts, v, terms, jnp.full((), -jnp.inf, dtype), rule)

    def resume(self, state: DualServerState, counts: Array) -> DualServerState:
        problem, first = self.problem_of(counts), self.init(counts)
        v, terms = jax.tree.map(partial(where, counts > 0), (state.v, state.terms), (first.v, first.terms))
        rule = self.algorithm.server_for(problem).resume(state.rule, problem, unknown_terms(terms), v)
        # It bounds the optimum of another problem than the one there is now.
        return DualServerState(counts, v, terms, first.bound, rule)

    def down(self, state: DualServerState) -> DualDown:
        problem = self.problem_of(state.counts)
        curvature = self.algorithm.server_for(problem).curvature(state.rule, problem.data)
        full = jnp.full((self.num_tasks,), -1, jnp.int32)
        return DualDown(state.rule.broadcast, state.rule.model, curvature, full)

    def like_up(self) -> DualUp:
        def some() -> DualUp:
            number = jnp.zeros((self.num_tasks,), self.dtype)
            vector = jnp.zeros((self.num_tasks, self.num_features), self.dtype)
            terms = DualTerms(number, number, number)
            return DualUp(vector, number, number, number, terms, number.astype(jnp.int32))

        return jax.eval_shape(some)

    def omega(self, state: DualServerState) -> Array:
        return self.problem_of(state.counts).relationship(self.num_tasks, self.relation(state))

    def combine(
        self, state: DualServerState, round: Array, up: DualUp, received: ReceivedAnswers
    ) -> tuple[DualServerState, Certificate]:
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        problem = self.problem_of(counts)
        server = self.algorithm.server_for(problem)
        before = undenied(state.bound, received)
        quality = certified(problem, server, state.rule, state.v, state.terms, received, up, received.exact, before)
        v, terms = jax.tree.map(partial(where, received.any), (up.v, up.terms), (state.v, state.terms))
        share, none = jnp.where(received.any, up.share, 0.0), jnp.zeros_like(up.share)
        update = NodeUpdate(unknown_terms(terms), v - state.v, share, Info(counts, none, received.any))
        _, v, rule = server.aggregate(problem, state.rule, round, update.beta, update, v)
        complete = jnp.all(received.ever | (counts == 0))
        bound = best_bound(problem, server.relation(problem, rule), terms, v, complete, before)
        return DualServerState(counts, v, terms, bound, rule), quality

    def implausible(self, state: DualServerState, up: DualUp, received: ReceivedAnswers) -> Mapping[str, Array]:
        return implausible_vectors(state.v, state.terms, self.down(state), up, received)

    def held_vectors(self, state: DualServerState) -> Array:
        return state.v

    def norms(self, up: DualUp) -> Array:
        return jnp.sqrt(jnp.sum(up.v**2, axis=1))

    def weights(self, state: DualServerState) -> Array:
        return state.rule.model

    def relation(self, state: DualServerState) -> Relation:
        problem = self.problem_of(state.counts)
        return self.algorithm.server_for(problem).relation(problem, state.rule)


def invalid_message(incarnation: Array, answered: Array, header: Header, curvature: Array, steps: Array) -> str:
    """Say what is wrong with a message to a node that has answered some rounds of an incarnation; empty: nothing."""
    if why := invalid_round(incarnation, answered, header):
        return why
    if curvature < 0:
        return f"sent the curvature {float(curvature[0])}, which must be >= 0"
    return f"asked for {int(steps[0])} steps, which must be >= -1" if steps < -1 else ""


def invalid_round(incarnation: Array, answered: Array, header: Header) -> str:
    """Say what is wrong with the round of a message; empty: nothing."""
    last = int(np.max(answered)) if header.incarnation == np.asarray(incarnation) else UNKNOWN
    if header.round <= last:
        return (
            f"sent round {int(header.round[0])}, and round {last} is answered already; a server that goes on from "
            f"an earlier state needs another incarnation"
        )
    return ""


def known_answers(incarnation: Array, answered: Array, header: Header) -> Array:
    """Rounds of the answers that a server may hold ``[m, k]``: to this incarnation of it, and before this round.

    Args:
      incarnation: of the server that sent the last message ``[m]``.
      answered: the rounds of the node's last answers ``[m, k]``.
      header: of the message.
    """
    same = (header.incarnation == incarnation) | (incarnation < 0)
    return jnp.where(same[:, None] & (answered < header.round[:, None]), answered, UNKNOWN)


def _with_answer(sent: SentVectors, is_held: Array, round: Array, v: Array, done: Array) -> SentVectors:
    """Put another answer in place of the oldest, but not of the one that the server holds, marked ``[m, k]``."""
    slot = oldest(sent.round, is_held)
    return SentVectors(
        jnp.where(slot, round[:, None], sent.round),
        jnp.where(slot[:, :, None], v[:, None, :], sent.v),
        jnp.where(slot, done[:, None], sent.done),
    )


def oldest(rounds: Array, is_held: Array) -> Array:
    """Mark the place for another answer ``[m, k]``: of the oldest that is not the one held, marked ``[m, k]``."""
    last = jnp.iinfo(jnp.int32).max
    slot = jnp.argmin(jnp.where(is_held & (rounds >= 0), last, rounds), axis=1)
    return jnp.arange(rounds.shape[1])[None, :] == slot[:, None]


register(SubproblemMethod, Sides(DualNodeSide.of, DualServerSide))
