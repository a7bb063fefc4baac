r"""The node's side of a dual method: Algorithm 1 and the proximal server, of which a node sees no difference.

A node keeps its duals, and the vectors $v$ of its last few answers. What comes down are weights w, a curvature q, and
which of those answers the server holds. Of $v_{\mathrm{held}}$, the node's share of (4) is

$$
\min_{\beta}\; \sum_i c_i\,\ell^*(-\beta_i) + \langle w, u\rangle + \tfrac q2\|u\|^2, \qquad u = v - v_{\mathrm{held}},
$$

whatever the node has done since. So it goes on from where it stands, from the gradient there, $w + q\,(v -
v_{\mathrm{held}})$: an answer that was lost or is late costs no work, and a safe curvature stays safe. What goes up is
the whole vector v, not its change: the next answer that arrives makes up for those that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.subproblem_method import SubproblemMethod
from mocha_jax._core.pytree import Pytree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.subproblem import Subproblems
from mocha_jax._problem.problem import Problem
from mocha_jax._problem.terms import DualTerms, dual_terms, gap_terms
from mocha_jax.federated._sides import Header, NodeSide
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Independent
from mocha_jax.systems._base import Work

# Answers whose vectors a node keeps. Which of them the server holds it learns with the next message; of more than that
# in a row that were lost or are under way, it answers once with its vector and no work.
REMEMBERED = 8

# In place of a round's number.
NOBODY = -1


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


class Sent(Pytree):
    """The answers that nodes have sent."""

    round: Array  # [m, k] int32; 0 before the first, below 0: none
    v: Array  # [m, k, d]
    done: Array  # [m, k] work up to then


class DualMine(Pytree):
    """The state that nodes keep between rounds."""

    beta: Array  # [m, n] duals
    v: Array  # [m, d] their dual vectors
    done: Array  # [m] work so far, in full rounds
    life: Array  # [m] int32 of the server that sent the last message; below 0: none has
    sent: Sent

    @property
    def duals(self) -> Array:
        return self.beta


class DualNodes(NodeSide):
    """Nodes of a method whose local work is on the subproblems (4)."""

    algorithm: SubproblemMethod
    problem: Problem

    @classmethod
    def of(cls, algorithm: SubproblemMethod, data: TaskData, loss: Loss) -> DualNodes:
        # The regularizer is the server's; of this one nothing is asked.
        return cls(algorithm, algorithm.laid_out(Problem(data, loss, Independent(1.0)).unnamed()))

    def init(self) -> DualMine:
        data = self.problem.data
        m, d, k = data.num_nodes, data.num_features, REMEMBERED
        beta = self.problem.node_loss.project(jnp.zeros_like(data.y), data.y)
        # Of a node that has never answered the server holds nothing, that is 0.
        rounds = jnp.full((m, k), NOBODY, jnp.int32).at[:, 0].set(0)
        sent = Sent(rounds, jnp.zeros((m, k, d), data.dtype), jnp.zeros((m, k), data.dtype))
        life = jnp.full((m,), NOBODY, jnp.int32)
        return DualMine(beta, data.node_vectors(beta), jnp.zeros((m,), data.dtype), life, sent)

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> DualDown:
            data = self.problem.data
            number = jnp.zeros((data.num_nodes,), data.dtype)
            vector = jnp.zeros((data.num_nodes, data.num_features), data.dtype)
            return DualDown(vector, vector, number, number.astype(jnp.int32))

        return {"DualDown": jax.eval_shape(some)}

    def weights(self, mine: DualMine, down: DualDown) -> Array:
        return down.model

    def work(self, key: Any, mine: DualMine, header: Header, down: DualDown) -> tuple[DualMine, Array, DualUp]:
        data, loss = self.problem.data, self.problem.node_loss
        rounds = known_answers(mine, header)
        at = rounds == header.held[:, None]
        known = jnp.any(at, axis=1)
        held = jnp.where(known[:, None], jnp.sum(jnp.where(at[:, :, None], mine.sent.v, 0.0), axis=1), mine.v)
        held_done = jnp.where(known, jnp.sum(jnp.where(at, mine.sent.done, 0.0), axis=1), mine.done)
        start = down.start + down.curvature[:, None] * (mine.v - held)
        beta, share = self.improved(key, mine.beta, start, down, known)
        v, done = data.node_vectors(beta), mine.done + share
        gap, value = gap_terms(data, loss, mine.beta, down.model)
        up = DualUp(v, jnp.minimum(done - held_done, 1.0), gap, value, dual_terms(data, loss, beta), data.sizes)
        sent = added(mine.sent.replace(round=jnp.where(known[:, None], rounds, NOBODY)), at, header.round, v, done)
        since = jnp.where(known & jnp.all(mine.v == held, axis=1), header.held, NOBODY)
        return DualMine(beta, v, done, header.life, sent), since, up

    def held_of(self, mine: DualMine, header: Header) -> tuple[Array, Array]:
        at = known_answers(mine, header) == header.held[:, None]
        return jnp.sum(jnp.where(at[:, :, None], mine.sent.v, 0.0), axis=1), jnp.any(at, axis=1)

    def sent_as(self, mine: DualMine, header: Header, up: DualUp, v: Array) -> tuple[DualMine, DualUp]:
        here = mine.sent.round == header.round[:, None]
        sent = mine.sent.replace(v=jnp.where(here[:, :, None], v[:, None, :], mine.sent.v))
        lost = jnp.sqrt(jnp.sum((up.v - v) ** 2, axis=1))
        more = lost * (1.0 + jnp.finfo(v.dtype).eps * (4.0 + v.shape[1]))  # the rounding of it included
        return mine.replace(sent=sent), up.replace(v=v, terms=up.terms.replace(error=up.terms.error + more))

    def doubts(self, mine: DualMine, header: Header, down: DualDown) -> str:
        return odd(mine.life, mine.sent.round, header, down)

    def improved(self, key: Any, beta: Array, start: Array, down: Any, may: Array) -> tuple[Array, Array]:
        """Find better duals, and tell the share of a full round that it took.

        Args:
          key: of the round's draws, or what was drawn.
          beta: duals ``[m, n]``.
          start: the weights that belong to them ``[m, d]``.
          down: for curvature and steps.
          may: ``[m]`` bool which nodes do any work.
        """
        algorithm, data = self.algorithm, self.problem.data
        full = algorithm.full_work(self.problem)
        steps = jnp.where(may, jnp.where(down.steps < 0, full, jnp.minimum(down.steps, full)), 0)
        given = Subproblems(data, self.problem.node_loss, beta, w=start, q=down.curvature)
        drawn = algorithm.draw(key, self.problem)
        update = algorithm.improve(drawn, given, self.problem, Work(steps, steps > 0))
        return update.beta, update.share


def odd(life: Array, answered: Array, header: Header, down: Any) -> str:
    """Say what is wrong with a message to a node that has answered some rounds of a server's life; empty: nothing."""
    if why := misnumbered(life, answered, header):
        return why
    if down.curvature < 0:
        return f"sent the curvature {float(down.curvature[0])}, which must be >= 0"
    return f"asked for {int(down.steps[0])} steps, which must be >= -1" if down.steps < -1 else ""


def misnumbered(life: Array, answered: Array, header: Header) -> str:
    """Say what is wrong with the round of a message; empty: nothing."""
    last = int(np.max(answered)) if header.life == np.asarray(life) else NOBODY
    if header.round <= last:
        return (
            f"sent round {int(header.round[0])}, and round {last} is answered already; a server that goes on from "
            f"an earlier state needs another life"
        )
    return ""


def known_answers(mine: Any, header: Header) -> Array:
    """Rounds of the answers that a server may hold ``[m, k]``: of this life of it, and before this round."""
    same = (header.life == mine.life) | (mine.life < 0)
    return jnp.where(same[:, None] & (mine.sent.round < header.round[:, None]), mine.sent.round, NOBODY)


def added(sent: Sent, held: Array, round: Array, v: Array, done: Array) -> Sent:
    """Put another answer in place of the oldest, but not of the one that the server holds, marked ``[m, k]``."""
    here = place_of_next(sent.round, held)
    return Sent(
        jnp.where(here, round[:, None], sent.round),
        jnp.where(here[:, :, None], v[:, None, :], sent.v),
        jnp.where(here, done[:, None], sent.done),
    )


def place_of_next(rounds: Array, held: Array) -> Array:
    """Mark the place for another answer ``[m, k]``: of the oldest that is not the one held, marked ``[m, k]``."""
    last = jnp.iinfo(jnp.int32).max
    slot = jnp.argmin(jnp.where(held & (rounds >= 0), last, rounds), axis=1)
    return jnp.arange(rounds.shape[1])[None, :] == slot[:, None]
