"""Both sides of the adaptive server: nodes remember a few dual points, and mix them with the server's weights.

The server knows of every point its dual vector and its slope, see `mocha_jax.servers._adaptive`; the points stay on the
node. What a node found in a round counts once the server has weighed it, which a later message says. Until then it
starts from where it stood, and keeps what it found in its last few answers: which of them arrived, and when, it cannot
know.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.base import Drawn
from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._core.pytree import Pytree, Relation, Tree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.gap import Certificate, DualTerms, dual_terms, gap_terms
from mocha_jax.federated._dual_sides import (
    REMEMBERED,
    UNKNOWN,
    DualDown,
    DualNodeSide,
    DualNodeState,
    DualServerSide,
    DualUp,
    invalid_message,
    known_answers,
)
from mocha_jax.federated._partial_certificate import best_bound, certified, undenied, unknown_terms
from mocha_jax.federated._plausible import implausible_points
from mocha_jax.federated._sides import Header, NodeSide, ReceivedAnswers, ServerSide, Sides, register, where
from mocha_jax.losses import Loss
from mocha_jax.regularizers import Regularizer
from mocha_jax.servers._adaptive import AdaptiveServer, AdaptiveState, DualPoint, mixed_duals, slopes

# Rounds whose models a server remembers: so late an answer may be.
_MODELS = 8


class AdaptiveDown(Pytree):
    """The message of the adaptive server."""

    start: Array  # [m, d] the weights from which the nodes start, which are those to be certified
    curvature: Array  # [m]
    steps: Array  # [m] int32 how many to do; below 0 those of a full round
    weights: Array  # [m, p] of the points: where a node stood, what it found in its last answer, what it remembers
    slot: Array  # [m] int32 which point it forgets for the one found; below 0: none

    @property
    def as_dual(self) -> DualDown:
        return DualDown(self.start, self.start, self.curvature, self.steps)


class AdaptiveUp(Pytree):
    """The answer of the adaptive server's nodes."""

    vector: Array  # [m, d] the dual vector of what was found; of a node that begins anew, of where it stands
    share: Array  # [m] of a full round's work
    gap: Array  # [m] data terms of the gap of the model, with the duals where the node stands
    value: Array  # [m] losses of the model
    slope: Array  # [m, p - 1] of all points but the first
    stands: DualTerms  # of the duals where it stands
    found: DualTerms  # of those that it found
    anew: Array  # [m] int32 1: it does not have the points that the server knows, and has none but where it stands
    samples: Array  # [m] int32

    @property
    def as_dual(self) -> DualUp:
        """The answer as that of a node that has just this vector."""
        return DualUp(self.vector, self.share, self.gap, self.value, self.found, self.samples)


class NodePoints(Pytree):
    """The dual points of nodes."""

    found: Array  # [m, k, n] in the last answers, which the server has not weighed as far as is known
    answer: Array  # [m, k] int32 the rounds of those answers; below 0: none
    memory: tuple[Array, ...]  # [m, n] older ones
    mixed: Array  # [m] int32 the round of the last answer that the server has weighed; 0 before the first


class AdaptiveNodeState(Pytree):
    """The state that nodes keep between rounds."""

    dual: DualNodeState  # where they stand
    points: NodePoints

    @property
    def duals(self) -> Array:
        return self.dual.beta


class AdaptiveNodeSide(NodeSide[AdaptiveNodeState, AdaptiveDown | DualDown, AdaptiveUp | DualUp]):
    """Nodes of `Mocha` whose server may be adaptive, as it is unless Omega is learned."""

    dual: DualNodeSide
    memory: int = static()

    @classmethod
    def of(cls, algorithm: Mocha, data: TaskData, loss: Loss) -> NodeSide:
        dual = DualNodeSide.of(algorithm, data, loss)
        plain = algorithm.server == "proximal" or algorithm.sigma_prime != "adaptive" or algorithm.custom_server
        return dual if plain else cls(dual, algorithm.memory)

    def init(self) -> AdaptiveNodeState:
        dual = self.dual.init()
        found = jnp.broadcast_to(dual.beta[:, None], (len(dual.beta), REMEMBERED, dual.beta.shape[1]))
        none = jnp.full(found.shape[:2], UNKNOWN, jnp.int32)
        mixed = jnp.zeros_like(dual.incarnation)
        return AdaptiveNodeState(dual, NodePoints(found, none, (dual.beta,) * self.memory, mixed))

    def held_vectors(self, state: AdaptiveNodeState, header: Header) -> tuple[Array, Array]:
        return self.dual.held_vectors(state.dual, header)

    def with_decoded(
        self, state: AdaptiveNodeState, header: Header, up: AdaptiveUp | DualUp, v: Array
    ) -> tuple[AdaptiveNodeState, DualUp]:
        assert isinstance(up, DualUp)
        dual, up = self.dual.with_decoded(state.dual, header, up, v)
        return state.replace(dual=dual), up

    def reject_reason(self, state: AdaptiveNodeState, header: Header, down: AdaptiveDown | DualDown) -> str:
        if isinstance(down, DualDown):
            return self.dual.reject_reason(state.dual, header, down)
        weights = np.asarray(down.weights)
        if not ((weights >= 0).all() and abs(float(weights.sum()) - 1.0) < 1e-3):
            return "sent invalid weights of points: they must be >= 0 and add up to 1"
        return invalid_message(state.dual.incarnation, state.points.answer, header, down.curvature, down.steps)

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> AdaptiveDown:
            data = self.dual.problem.data
            number, m = jnp.zeros((data.num_nodes,), data.dtype), data.num_nodes
            vector, weights = jnp.zeros((m, data.num_features), data.dtype), jnp.zeros((m, 2 + self.memory), data.dtype)
            whole = number.astype(jnp.int32)
            return AdaptiveDown(vector, number, whole, weights, whole)

        return {**self.dual.like_down(), "AdaptiveDown": jax.eval_shape(some)}

    def weights(self, state: AdaptiveNodeState, down: AdaptiveDown | DualDown) -> Array:
        return down.model if isinstance(down, DualDown) else down.start

    def work(
        self, key: Drawn, state: AdaptiveNodeState, header: Header, down: AdaptiveDown | DualDown
    ) -> tuple[AdaptiveNodeState, Array, AdaptiveUp | DualUp]:
        if isinstance(down, DualDown):
            dual, held, answer = self.dual.work(key, state.dual, header, down)
            return state.replace(dual=dual), held, answer
        problem, loss = self.dual.problem, self.dual.problem.node_loss
        answers = known_answers(state.dual.incarnation, state.points.answer, header)
        data, (has_points, new, beta, memory) = problem.data, self._mixed(state, header, down, answers)
        found, share = self.dual.improved(key, beta, down.start, down.curvature, down.steps, has_points)
        found = jnp.where(has_points[:, None], found, beta)
        # A node has its weights by itself: its data has no other task.
        slope = slopes(problem, down.start, (beta, found, *memory)).T
        gap, value = gap_terms(data, loss, beta, down.start)
        stands, of_found = (dual_terms(data, loss, b) for b in (beta, found))
        anew = (~has_points).astype(jnp.int32)
        up = AdaptiveUp(data.node_vectors(found), share, gap, value, slope, stands, of_found, anew, data.sizes)
        # What was found from where a node stood before is of no use now.
        answers = jnp.where((has_points & ~new)[:, None], answers, UNKNOWN)
        oldest = jnp.arange(REMEMBERED)[None, :] == jnp.argmin(answers, axis=1)[:, None]
        points = NodePoints(
            jnp.where(oldest[:, :, None], found[:, None], state.points.found),
            jnp.where(oldest, header.round[:, None], answers), memory, jnp.where(has_points, header.held, UNKNOWN),
        )  # fmt: skip
        dual = state.dual.replace(beta=beta, incarnation=header.incarnation)
        return AdaptiveNodeState(dual, points), header.held, up

    def _mixed(
        self, state: AdaptiveNodeState, header: Header, down: AdaptiveDown, answers: Array
    ) -> tuple[Array, Array, Array, tuple[Array, ...]]:
        """Mix the points with the server's weights.

        Returns:
          Which nodes have the points that the server knows, and which of them mix them now ``[m]``; where they stand
          now ``[m, n]``, and what they remember.
        """
        points, problem, dual = state.points, self.dual.problem, state.dual
        same = (header.incarnation == dual.incarnation) | (dual.incarnation < 0)
        is_held = answers == header.held[:, None]
        new = jnp.any(is_held, axis=1)
        has_points = new | (same & (points.mixed == header.held))
        found = jnp.sum(jnp.where(is_held[:, :, None], points.found, 0.0), axis=1)
        found = jnp.where(new[:, None], found, dual.beta)
        one = jnp.zeros_like(down.weights).at[:, 0].set(1.0)
        weights = jnp.where(new[:, None], down.weights, one)
        betas = dual.beta, found, *points.memory
        data, loss = problem.data, problem.node_loss
        beta = data.map_rows(mixed_duals, loss, tuple(weights.T), *betas, data.y)
        put = [(new & (down.slot == j))[:, None] for j in range(self.memory)]
        memory = tuple(jnp.where(p, found, old) for p, old in zip(put, points.memory, strict=True))
        return has_points, new, beta, tuple(jnp.where(has_points[:, None], point, beta) for point in memory)


class AdaptiveServerState(Pytree):
    """The state of the adaptive server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    terms: tuple[DualTerms, ...]  # of the points where nodes stand and those they remember
    weights: Array  # [m, p] of the points in the last answer of every node
    slot: Array  # [m] int32 which point it forgets; below 0: none, for it found nothing
    models: Array  # [r, m, d] of the last rounds, the newest first
    bound: Array  # [] the best lower bound on the optimum so far
    rule: AdaptiveState  # of the server of the library


class AdaptiveServerSide(ServerSide[AdaptiveServerState, AdaptiveUp]):
    """The server that weighs the points that nodes have found."""

    patience = _MODELS - 1
    from_held = True

    dual: DualServerSide
    server: AdaptiveServer

    def init(self, counts: Array) -> AdaptiveServerState:
        m, d, dtype = self.dual.num_tasks, self.dual.num_features, self.dual.dtype
        none, v = jnp.zeros((m,), dtype), jnp.zeros((m, d), dtype)
        terms = DualTerms(none, none, none)
        problem = self.dual.problem_of(counts)
        rule = self.server.blank(self.server.dual.init(problem, unknown_terms(terms), v), _server_point(v))
        points = 1 + self.server.memory
        return AdaptiveServerState(
            counts, (terms,) * points, jnp.zeros((m, 1 + points), dtype).at[:, 0].set(1.0), jnp.zeros((m,), jnp.int32),
            jnp.broadcast_to(rule.model, (_MODELS, m, d)), jnp.full((), -jnp.inf, dtype), rule,
        )  # fmt: skip

    def resume(self, state: AdaptiveServerState, counts: Array) -> AdaptiveServerState:
        problem, first, present = self.dual.problem_of(counts), self.init(counts), counts > 0
        own, terms = jax.tree.map(
            lambda a, b: where(present, a, b), (state.rule.own, state.terms), (first.rule.own, first.terms)
        )
        dual = self.server.dual.resume(state.rule.dual, problem, unknown_terms(terms[0]), own)
        memory = tuple(_server_point(where(present, point.v, own)) for point in state.rule.memory)
        rule = self.server.blank(dual, _server_point(own)).replace(
            memory=memory, scale=state.rule.scale, node_scale=state.rule.node_scale, newest=state.rule.newest
        )
        models = jnp.concatenate([rule.model[None], state.models[1:]])
        # It bounds the optimum of another problem than the one there is now.
        return state.replace(counts=counts, terms=terms, models=models, bound=first.bound, rule=rule)

    def down(self, state: AdaptiveServerState) -> AdaptiveDown:
        curvature = self.server.curvature(state.rule, self.dual.problem_of(state.counts).data)
        steps = jnp.full_like(state.counts, -1)
        return AdaptiveDown(state.rule.broadcast, curvature, steps, state.weights, state.slot)

    def like_up(self) -> AdaptiveUp:
        def some() -> AdaptiveUp:
            number = jnp.zeros((self.dual.num_tasks,), self.dual.dtype)
            vector = jnp.zeros((self.dual.num_tasks, self.dual.num_features), self.dual.dtype)
            slope = jnp.zeros((self.dual.num_tasks, 1 + self.server.memory), self.dual.dtype)
            terms, whole = DualTerms(number, number, number), number.astype(jnp.int32)
            return AdaptiveUp(vector, number, number, number, slope, terms, terms, whole, whole)

        return jax.eval_shape(some)

    def implausible(self, state: AdaptiveServerState, up: AdaptiveUp, received: ReceivedAnswers) -> Mapping[str, Array]:
        return implausible_points(state.rule.own, state.terms[0], self.down(state), up, received)

    def norms(self, up: AdaptiveUp) -> Array:
        return jnp.sqrt(jnp.sum(up.vector**2, axis=1))

    def combine(
        self, state: AdaptiveServerState, round: Array, up: AdaptiveUp, received: ReceivedAnswers
    ) -> tuple[AdaptiveServerState, Certificate]:
        counts = where(received.any & (state.counts > 0), up.samples, state.counts)
        problem, server, rule = self.dual.problem_of(counts), self.server, state.rule
        anew = received.any & (up.anew > 0)
        # What a node reports is of its duals; the vector that the server has mixed for them has errors of its own.
        drift = jnp.where(anew, up.stands.error, jnp.maximum(up.stands.error, state.terms[0].error))
        reported = up.stands.replace(error=drift)
        standing = jax.tree.map(lambda a, b: where(received.any, a, b), reported, state.terms[0])
        exact = received.exact & ~anew
        before = jax.tree.map(lambda a, b: where(exact, a, b), reported, state.terms[0])
        least = undenied(state.bound, received)
        quality = certified(problem, server, rule, rule.own, before, received, up, exact, least)
        # A node that begins anew stands at the one point that it has.
        own = where(anew, up.vector, rule.own)
        memory = tuple(where(anew, own, point.v) for point in rule.memory)
        older = tuple(jax.tree.map(lambda a, b: where(anew, a, b), standing, t) for t in state.terms[1:])
        answered = received.any & ~anew & (up.share > 0)
        real = jnp.sum(counts > 0).astype(own.dtype)
        points = own, where(answered, up.vector, own), *memory
        # Slopes are of the model that the node had: the one now is another where the answer is late.
        moved = rule.model - state.models[received.late, jnp.arange(len(own))]
        late = jnp.stack([jnp.sum(moved * (point - own), axis=1) for point in points[1:]])
        slope = jnp.where(answered, up.slope.T + late, 0.0)
        weights, mixture, slot = server.weigh(problem.data, rule, points, slope, answered)
        terms = standing, up.found, *older
        mixed = _mixed_terms(weights, terms, mixture)
        put = [answered & (slot == j) for j in range(server.memory)]
        kept = tuple(
            jax.tree.map(lambda new, old, p=p: where(p, new, old), up.found, old)
            for p, old in zip(put, older, strict=True)
        )
        remembered = tuple(_server_point(where(p, points[1], old)) for p, old in zip(put, memory, strict=True))
        dual = server.dual.update_model(problem, rule.dual, round, unknown_terms(mixed), mixture)
        after = server.followed(problem, rule, round, dual, mixture, remembered, (weights[1], slot), answered, real)
        bound = best_bound(problem, dual.relation, mixed, mixture, jnp.all(received.ever | (counts == 0)), least)
        return AdaptiveServerState(
            counts, (mixed, *kept), where(received.any, weights.T, state.weights),
            where(received.any, after.newest, state.slot),
            jnp.concatenate([after.model[None], state.models[:-1]]), bound, after,
        ), quality  # fmt: skip

    def weights(self, state: AdaptiveServerState) -> Array:
        return state.rule.model

    def relation(self, state: AdaptiveServerState) -> Relation:
        return state.rule.relation

    def omega(self, state: AdaptiveServerState) -> Array:
        return self.dual.problem_of(state.counts).relationship(self.dual.num_tasks, self.relation(state))


def _server_point(v: Array) -> DualPoint:
    """A point of which the server has the vectors only."""
    return DualPoint(jnp.zeros((len(v), 0), v.dtype), v)


def _mixed_terms(weights: Array, terms: tuple[DualTerms, ...], mixture: Array) -> DualTerms:
    """Bound the terms of mixtures by those of the points: conjugates are convex."""
    used = [(a, t) for a, t in zip(weights, terms, strict=True)]
    conjugate, size, error = (
        sum((jnp.where(a > 0, a * getattr(t, name), 0.0) for a, t in used), jnp.zeros_like(weights[0]))
        for name in ("conjugate", "size", "error")
    )
    eps = jnp.finfo(mixture.dtype).eps
    # The server mixes vectors and the node duals, each with roundings of its own; if no node moves there are none.
    longest = jnp.sqrt(jnp.sum(mixture**2, axis=1))
    lost = jnp.where(weights[0] < 1, 4.0 * eps * len(used) * longest, 0.0)
    return DualTerms(conjugate + 2.0 * eps * len(used) * size, size, error + lost)


def server_side(
    algorithm: Mocha, regularizer: Regularizer, num_tasks: int, num_features: int, dtype: DTypeLike, scaling: str
) -> ServerSide:
    """The side of the server that the algorithm has for this problem."""
    dual = DualServerSide(algorithm, regularizer, num_tasks, num_features, dtype, scaling)
    server = algorithm.server_for(dual.problem_of(jnp.ones((num_tasks,), jnp.int32)))
    return AdaptiveServerSide(dual, server) if isinstance(server, AdaptiveServer) else dual


register(Mocha, Sides(AdaptiveNodeSide.of, server_side))
