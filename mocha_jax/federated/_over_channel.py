"""A simulation of both sides with a channel between them: answers are lost, late, double or short."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.averaged import Wrapper
from mocha_jax._algorithms.base import Drawn, State
from mocha_jax._algorithms.mocha import SubproblemMethod
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Relation, static
from mocha_jax._neural.trees import count_numbers
from mocha_jax._problem.certificate import proven
from mocha_jax._problem.gap import Certificate, certify, fenchel_young
from mocha_jax._problem.problem import Problem
from mocha_jax.compression import Sending
from mocha_jax.federated._adaptive_sides import AdaptiveNodeState, AdaptiveServerState
from mocha_jax.federated._coded_answers import SendingNodeSide
from mocha_jax.federated._dual_sides import DualNodeState, DualServerState
from mocha_jax.federated._sides import Header, NodeSide, ReceivedAnswers, ServerSide, sides_of, where
from mocha_jax.systems import Channel, Fate
from mocha_jax.systems._base import Info, Request, Work

# Folded into a round's key for the channel's luck.
_LUCK = 7


class Transit(Pytree):
    """The answers of the last rounds, some of them still under way; the slot of a round is its number modulo r."""

    up: Pytree  # [r, m, ...]
    round: Array  # [r, m] int32
    held: Array  # [r, m] int32 see `Header`
    arrives: Array  # [r, m] int32 the round in which it does; below 0: never
    again: Array  # [r, m] int32 and for a second time


class ChannelState(State):
    """The state of both sides and the channel between rounds."""

    held: Array  # [m] int32 the round of every node's last answer that the server holds
    late: Array  # [] int32 answers so far that arrived late and were taken
    refused: Array  # [] int32 answers so far that arrived and were not
    transit: Transit
    nodes: DualNodeState | AdaptiveNodeState
    server: DualServerState | AdaptiveServerState

    @property
    def duals(self) -> Array:
        """The duals of all nodes, where they stand."""
        return self.nodes.duals


class OverChannel(Wrapper):
    """A dual method with a channel between nodes and server; both sides are those of `Node` and `Server`.

    Every node has its own task. The model is the server's, and its certificate uses the actual duals of the nodes,
    not the server's knowledge of them.

    Args:
      algorithm: `Mocha` or `Cocoa`.
      channel: from `mocha_jax.systems`, `Unreliable` or `Clock`.
      max_staleness: answers to messages up to that many rounds old are accepted; default all are, as far
        as the server remembers.
      sending: the form in which the nodes' vectors travel, e.g. ``compression.Quantized()``. Default: as they are.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> channel = mj.systems.Unreliable(lost=0.3, late=0.3, most=5, duplicated=0.05)
      >>> solution = mj.solve(problem, mj.federated.OverChannel(mj.Mocha(), channel), tol=1e-3)
      >>> solution.status.name
      'CONVERGED'
      >>> safe, lossless = mj.Mocha(server="proximal"), mj.systems.Unreliable()
      >>> one_bit = mj.compression.Rotated(mj.compression.Quantized(1))
      >>> for form in (None, one_bit):
      ...     solution = mj.solve(problem, mj.federated.OverChannel(safe, lossless, sending=form), tol=1e-3)
      ...     print(solution.status.name, solution.rounds < 30)
      CONVERGED True
      CONVERGED True
    """

    channel: Channel
    max_staleness: int | None = static(default=None)
    sending: Sending | None = None

    def __post_init__(self) -> None:
        check.instance("OverChannel", "algorithm", self.algorithm, SubproblemMethod, "Mocha()")
        check.instance("OverChannel", "channel", self.channel, Channel, "systems.Unreliable(lost=0.3)")
        if self.max_staleness is not None:
            check.integer("OverChannel", 0, max_staleness=self.max_staleness)
        if self.sending is not None:
            check.instance("OverChannel", "sending", self.sending, Sending, "compression.Quantized()")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.data.shared or problem.data.num_nodes != problem.data.num_tasks:
            raise ValueError("OverChannel: data must have one node for each task; a server tells nodes by their tasks.")
        if self.sending is not None and not hasattr(like := self._sides(problem)[1].like_up(), "v"):
            raise ValueError(
                f"OverChannel: sending is for answers with one vector v, and {type(like).__name__} has several; "
                "Mocha(server='proximal') has such answers."
            )

    def _sides(self, problem: Problem) -> tuple[NodeSide, ServerSide]:
        data, sides = problem.data, sides_of("OverChannel", self.algorithm)
        return sides.node(self.algorithm, data, problem.loss), sides.server(
            self.algorithm, problem.regularizer, data.num_tasks, data.num_features, data.dtype, data.loss_scaling
        )

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        request = super().request(problem, round)
        if self.sending is None:
            return request
        vector = jax.ShapeDtypeStruct((1, problem.data.num_features), problem.data.dtype)
        code, _ = jax.eval_shape(self.sending.encode, jax.ShapeDtypeStruct((1,), jnp.int32), vector, vector)
        return request.replace(up=request.up + (count_numbers(code) - problem.data.num_features))

    def init(self, problem: Problem) -> ChannelState:
        self.expect(problem)
        self.check(problem)
        node_side, server_side = self._sides(problem)
        m, rounds = problem.data.num_nodes, self.channel.most + 1
        nodes, zero = node_side.init(), jnp.zeros((), jnp.int32)
        up = jax.tree.map(lambda like: jnp.zeros((rounds, *like.shape), like.dtype), server_side.like_up())
        none = jnp.full((rounds, m), -1, jnp.int32)
        transit = Transit(up, none, none, none, none)
        server = server_side.init(problem.data.sizes)
        return ChannelState(zero, jnp.zeros((m,), jnp.int32), zero, zero, transit, nodes, server)

    def resume(self, state: ChannelState, problem: Problem) -> ChannelState:
        check.instance("OverChannel", "state", state, ChannelState, "solution.state")
        if state.duals.shape != problem.data.y.shape:
            raise ValueError(
                f"OverChannel: the state has duals {state.duals.shape}, and the problem's data needs "
                f"{problem.data.y.shape}; it belongs to other data."
            )
        return state

    def warm_start(self, state: ChannelState, problem: Problem) -> ChannelState:
        raise ValueError("OverChannel: nodes and server go on with the problem they have; begin another one anew.")

    def draw(self, key: Drawn, problem: Problem) -> tuple[Drawn, Array]:
        if isinstance(key, tuple):
            return key
        return self.algorithm.draw(key, problem), jax.random.fold_in(key, _LUCK)

    def step(self, key: Drawn, state: ChannelState, problem: Problem, work: Work) -> tuple[ChannelState, Info]:
        node_side, server_side = self._sides(problem)
        (drawn, luck), data, round = self.draw(key, problem), problem.data, state.round + 1
        budget = work.budget(self.full_work(problem))
        if self.channel.waits:
            budget = jnp.where(jnp.any(state.transit.arrives >= round, axis=0), 0, budget)
        asked = budget > 0
        rounds = jnp.full_like(state.held, 1) * round
        header = Header(rounds, jnp.zeros_like(rounds), state.held, jnp.arange(len(rounds), dtype=jnp.int32))
        down = server_side.down(state.server).replace(steps=budget)
        if self.sending is None:
            nodes, held, up = node_side.work(drawn, state.nodes, header, down)
        else:
            nodes, held, coded = SendingNodeSide(node_side, self.sending).work(drawn, state.nodes, header, down)
            up = coded.rest  # its vector is the one that the server decodes
        nodes = jax.tree.map(lambda new, old: where(asked, new, old), nodes, state.nodes)
        fate = self.channel.fate(luck, data, self.request(problem, state.round).replace(steps=budget))
        transit = _sent(state.transit, round, asked, up, held, fate)
        taken, received, refused = _arrived(transit, round, state.held, server_side, self.max_staleness)
        slot = jnp.where(received.any, taken % len(transit.round), 0)
        answers = jax.tree.map(lambda a: a[slot, jnp.arange(a.shape[1])], transit.up)
        server, _ = server_side.combine(state.server, round, answers, received)
        late = state.late + jnp.sum(received.any & ~received.now, dtype=jnp.int32)
        flops = budget.astype(data.dtype) * self.step_flops(problem) + jnp.where(asked, self.fixed_flops(problem), 0.0)
        after = ChannelState(
            round, jnp.where(received.any, taken, state.held), late, state.refused + refused, transit, nodes, server
        )  # fmt: skip
        return after, Info(budget, flops, jnp.zeros_like(asked))

    def certify(self, state: ChannelState, problem: Problem) -> Certificate:
        data, regularizer, w = problem.data, problem.regularizer, self.weights(state)
        relation, v = self.relation(state, problem), data.dual_vectors(state.duals)
        value = regularizer.penalty(w, relation)
        slack = fenchel_young(value, regularizer.coupling(data.num_tasks, relation).conjugate(v), v, w)
        return certify(problem, state.duals, v, w, value, slack, regularizer.offset(relation, data.num_features))

    def prove(self, state: ChannelState, problem: Problem) -> Certificate:
        return proven(problem, state.duals, self.weights(state), self.relation(state, problem))

    def weights(self, state: ChannelState) -> Array:
        return state.server.rule.model

    def relation(self, state: ChannelState, problem: Problem) -> Relation:
        return self._sides(problem)[1].relation(state.server)


def _sent(transit: Transit, round: Array, asked: Array, up: Pytree, held: Array, fate: Fate) -> Transit:
    """Put a round's answers on their way, in place of those that have arrived by now."""
    slot = round % len(transit.round)

    def arrival(rounds: Array) -> Array:
        return jnp.where(asked & (rounds >= 0), round + rounds, -1)

    ups = jax.tree.map(lambda all, one: all.at[slot].set(one), transit.up, up)
    return Transit(
        ups, transit.round.at[slot].set(jnp.where(asked, round, -1)), transit.held.at[slot].set(held),
        transit.arrives.at[slot].set(arrival(fate.arrives)), transit.again.at[slot].set(arrival(fate.again)),
    )  # fmt: skip


def _arrived(
    transit: Transit, round: Array, held: Array, side: ServerSide, most: int | None
) -> tuple[Array, ReceivedAnswers, Array]:
    """Choose of the answers that have arrived from every node the newest one that a server takes.

    Returns:
      Its round ``[m]``, below 0 where there is none; the answers of which the server then knows; how many it refuses.
    """
    patience = side.patience if most is None else min(side.patience, most)
    arriving = (transit.arrives == round).astype(jnp.int32) + (transit.again == round).astype(jnp.int32)
    good = (arriving > 0) & (transit.round > held[None, :]) & (round - transit.round <= patience)
    if side.from_held:
        good = good & (transit.held == held[None, :])
    taken = jnp.max(jnp.where(good, transit.round, -1), axis=0)
    answered = taken >= 0
    went_on_from = jnp.max(jnp.where(transit.round == taken[None, :], transit.held, -1), axis=0)
    received = ReceivedAnswers(
        any=answered,
        now=answered & (taken == round),
        exact=answered & (went_on_from == held),
        ever=answered | (held > 0),
        late=jnp.where(answered, round - taken, 0),
        denied=jnp.zeros_like(answered),
    )
    refused = jnp.sum(arriving, dtype=jnp.int32) - jnp.sum(answered, dtype=jnp.int32)
    return taken, received, refused
