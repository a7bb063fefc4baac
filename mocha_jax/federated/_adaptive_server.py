"""The adaptive server's side: it knows the vectors of the nodes' dual points, and tells them how to mix these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._core.pytree import Pytree, Relation, Tree, tree
from mocha_jax._problem.certificate import Certificate, DualTerms
from mocha_jax.federated._adaptive_node import AdaptiveDown, AdaptiveNodes, AdaptiveUp
from mocha_jax.federated._certifying import believed, best_bound, certified, unknown
from mocha_jax.federated._dual_server import DualCentre
from mocha_jax.federated._plausible import implausible_points
from mocha_jax.federated._sides import Heard, ServerSide, Sides, register, where
from mocha_jax.servers._adaptive import AdaptiveServer, DualPoint

# Rounds whose models a server remembers: so late an answer may be.
_REMEMBERED = 8


class AdaptiveHeld(Pytree):
    """The state of the adaptive server between rounds."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    terms: tuple[DualTerms, ...]  # of the points where nodes stand and those they remember
    weights: Array  # [m, p] of the points in the last answer of every node
    slot: Array  # [m] int32 which point it forgets; below 0: none, for it found nothing
    models: Array  # [r, m, d] of the last rounds, the newest first
    bound: Array  # [] the best lower bound on the optimum so far
    rule: Any = tree()  # what the server of the library carries


class AdaptiveCentre(ServerSide):
    """The central node that weighs the points that nodes have found."""

    patience = _REMEMBERED - 1
    from_held = True

    plain: DualCentre
    server: AdaptiveServer

    def init(self, counts: Array) -> AdaptiveHeld:
        m, d, dtype = self.plain.num_tasks, self.plain.num_features, self.plain.dtype
        none, v = jnp.zeros((m,), dtype), jnp.zeros((m, d), dtype)
        terms = DualTerms(none, none, none)
        problem = self.plain.problem_of(counts)
        rule = self.server.blank(self.server.dual.init(problem, unknown(terms), v), _known(v))
        points = 1 + self.server.memory
        return AdaptiveHeld(
            counts, (terms,) * points, jnp.zeros((m, 1 + points), dtype).at[:, 0].set(1.0), jnp.zeros((m,), jnp.int32),
            jnp.broadcast_to(rule.model, (_REMEMBERED, m, d)), jnp.full((), -jnp.inf, dtype), rule,
        )  # fmt: skip

    def resume(self, state: AdaptiveHeld, counts: Array) -> AdaptiveHeld:
        problem, first, here = self.plain.problem_of(counts), self.init(counts), counts > 0
        own, terms = jax.tree.map(
            lambda a, b: where(here, a, b), (state.rule.own, state.terms), (first.rule.own, first.terms)
        )
        dual = self.server.dual.resume(state.rule.dual, problem, unknown(terms[0]), own)
        memory = tuple(_known(where(here, point.v, own)) for point in state.rule.memory)
        rule = self.server.blank(dual, _known(own)).replace(
            memory=memory, scale=state.rule.scale, node_scale=state.rule.node_scale, newest=state.rule.newest
        )
        models = jnp.concatenate([rule.model[None], state.models[1:]])
        # It bounds the optimum of another problem than the one there is now.
        return state.replace(counts=counts, terms=terms, models=models, bound=first.bound, rule=rule)

    def down(self, state: AdaptiveHeld) -> AdaptiveDown:
        curvature = self.server.curvature(state.rule, self.plain.problem_of(state.counts).data)
        steps = jnp.full_like(state.counts, -1)
        return AdaptiveDown(state.rule.broadcast, curvature, steps, state.weights, state.slot)

    def like_up(self) -> Tree:
        def some() -> AdaptiveUp:
            number = jnp.zeros((self.plain.num_tasks,), self.plain.dtype)
            vector = jnp.zeros((self.plain.num_tasks, self.plain.num_features), self.plain.dtype)
            slope = jnp.zeros((self.plain.num_tasks, 1 + self.server.memory), self.plain.dtype)
            terms, whole = DualTerms(number, number, number), number.astype(jnp.int32)
            return AdaptiveUp(vector, number, number, number, slope, terms, terms, whole, whole)

        return jax.eval_shape(some)

    def doubts(self, state: AdaptiveHeld, up: AdaptiveUp, heard: Heard) -> Mapping[str, Array]:
        return implausible_points(state.rule.own, state.terms[0], self.down(state), up, heard)

    def norms(self, up: AdaptiveUp) -> Array:
        return jnp.sqrt(jnp.sum(up.vector**2, axis=1))

    def combine(
        self, state: AdaptiveHeld, round: Array, up: AdaptiveUp, heard: Heard
    ) -> tuple[AdaptiveHeld, Certificate]:
        counts = where(heard.any & (state.counts > 0), up.samples, state.counts)
        problem, server, rule = self.plain.problem_of(counts), self.server, state.rule
        anew = heard.any & (up.anew > 0)
        # What a node reports is of its duals; the vector that the server has mixed for them has errors of its own.
        drift = jnp.where(anew, up.stands.error, jnp.maximum(up.stands.error, state.terms[0].error))
        reported = up.stands.replace(error=drift)
        standing = jax.tree.map(lambda a, b: where(heard.any, a, b), reported, state.terms[0])
        exact = heard.exact & ~anew
        before = jax.tree.map(lambda a, b: where(exact, a, b), reported, state.terms[0])
        least = believed(state.bound, heard)
        quality = certified(problem, server, rule, rule.own, before, heard, up, exact, least)
        # A node that begins anew stands at the one point that it has.
        own = where(anew, up.vector, rule.own)
        memory = tuple(where(anew, own, point.v) for point in rule.memory)
        known = (standing, *(jax.tree.map(lambda a, b: where(anew, a, b), standing, t) for t in state.terms[1:]))
        answered = heard.any & ~anew & (up.share > 0)
        real = jnp.sum(counts > 0).astype(own.dtype)
        points = own, where(answered, up.vector, own), *memory
        # Slopes are of the model that the node had: the one now is another where the answer is late.
        moved = rule.model - state.models[heard.late, jnp.arange(len(own))]
        late = jnp.stack([jnp.sum(moved * (point - own), axis=1) for point in points[1:]])
        slope = jnp.where(answered, up.slope.T + late, 0.0)
        weights, mixture, slot = server.weigh(problem.data, rule, points, slope, answered)
        terms = known[0], up.found, *known[1:]
        mixed = _mixed_terms(weights, terms, mixture)
        put = [answered & (slot == j) for j in range(server.memory)]
        kept = tuple(
            jax.tree.map(lambda new, old, p=p: where(p, new, old), up.found, old)
            for p, old in zip(put, known[1:], strict=True)
        )
        remembered = tuple(_known(where(p, points[1], old)) for p, old in zip(put, memory, strict=True))
        dual = server.dual.update_model(problem, rule.dual, round, unknown(mixed), mixture)
        after = server.followed(problem, rule, round, dual, mixture, remembered, (weights[1], slot), answered, real)
        bound = best_bound(problem, dual.relation, mixed, mixture, jnp.all(heard.ever | (counts == 0)), least)
        return AdaptiveHeld(
            counts, (mixed, *kept), where(heard.any, weights.T, state.weights),
            where(heard.any, after.newest, state.slot),
            jnp.concatenate([after.model[None], state.models[:-1]]), bound, after,
        ), quality  # fmt: skip

    def weights(self, state: AdaptiveHeld) -> Array:
        return state.rule.model

    def relation(self, state: AdaptiveHeld) -> Relation:
        return state.rule.relation

    def omega(self, state: AdaptiveHeld) -> Array:
        return self.plain.problem_of(state.counts).relationship(self.plain.num_tasks, self.relation(state))


def _known(v: Array) -> DualPoint:
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


def centre_of(algorithm: Mocha, *rest: Any) -> ServerSide:
    """The side of the server that the algorithm has for this problem."""
    plain = DualCentre(algorithm, *rest)
    server = algorithm.server_for(plain.problem_of(jnp.ones((plain.num_tasks,), jnp.int32)))
    return AdaptiveCentre(plain, server) if isinstance(server, AdaptiveServer) else plain


register(Mocha, Sides(AdaptiveNodes.of, centre_of))
