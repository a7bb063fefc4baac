"""The server's side of a dual method: any server of the library, without samples and without dual variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.subproblem_method import SubproblemMethod
from mocha_jax._core.pytree import Pytree, Relation, Tree, static, tree
from mocha_jax._problem.certificate import Certificate, jointly_bounded, lower_bound
from mocha_jax._problem.problem import Problem
from mocha_jax._problem.terms import DualTerms, Reported
from mocha_jax.federated._absent import absent
from mocha_jax.federated._dual_node import DualDown, DualNodes, DualUp
from mocha_jax.federated._plausible import implausible
from mocha_jax.federated._sides import Heard, ServerSide, Sides, register, where
from mocha_jax.losses import Squared
from mocha_jax.regularizers import Regularizer
from mocha_jax.servers._base import NodeUpdate, Server
from mocha_jax.systems._work import Info


class DualHeld(Pytree):
    """All that the server of a dual method carries from round to round."""

    counts: Array  # [m] int32 samples of every node; 0 of one that has left
    v: Array  # [m, d] the dual vectors that it holds
    terms: DualTerms  # of the same duals
    bound: Array  # [] the best lower bound on the optimum so far
    rule: Any = tree()  # what the server of the library carries


class DualCentre(ServerSide):
    """The central node of a method whose local work is on the subproblems (4)."""

    algorithm: SubproblemMethod
    regularizer: Regularizer
    num_tasks: int = static()
    num_features: int = static()
    dtype: DTypeLike = static()
    loss_scaling: str = static()

    def _problem(self, counts: Array) -> Problem:
        # The loss is the nodes'; of this one nothing is asked.
        return Problem(absent(counts, self.num_features, self.dtype, self.loss_scaling), Squared(), self.regularizer)

    def init(self, counts: Array) -> DualHeld:
        problem, dtype = self._problem(counts), self.dtype
        v, none = jnp.zeros((self.num_tasks, self.num_features), dtype), jnp.zeros((self.num_tasks,), dtype)
        terms = DualTerms(none, none, none)
        rule = self.algorithm.server_for(problem).init(problem, _unknown(terms), v)
        return DualHeld(counts, v, terms, jnp.full((), -jnp.inf, dtype), rule)

    def resume(self, state: DualHeld, counts: Array) -> DualHeld:
        problem, first = self._problem(counts), self.init(counts)
        v, terms = jax.tree.map(partial(where, counts > 0), (state.v, state.terms), (first.v, first.terms))
        rule = self.algorithm.server_for(problem).resume(state.rule, problem, _unknown(terms), v)
        # It bounds the optimum of another problem than the one there is now.
        return DualHeld(counts, v, terms, first.bound, rule)

    def down(self, state: DualHeld) -> DualDown:
        problem = self._problem(state.counts)
        curvature = self.algorithm.server_for(problem).curvature(state.rule, problem.data)
        all_of_them = jnp.full((self.num_tasks,), -1, jnp.int32)
        return DualDown(state.rule.broadcast, state.rule.model, curvature, all_of_them)

    def like_up(self) -> Tree:
        def some() -> DualUp:
            number = jnp.zeros((self.num_tasks,), self.dtype)
            vector = jnp.zeros((self.num_tasks, self.num_features), self.dtype)
            terms = DualTerms(number, number, number)
            return DualUp(vector, number, number, number, terms, number.astype(jnp.int32))

        return jax.eval_shape(some)

    def omega(self, state: DualHeld) -> Array:
        return self._problem(state.counts).relationship(self.num_tasks, self.relation(state))

    def combine(self, state: DualHeld, round: Array, up: DualUp, heard: Heard) -> tuple[DualHeld, Certificate]:
        counts = where(heard.any & (state.counts > 0), up.samples, state.counts)
        problem = self._problem(counts)
        server = self.algorithm.server_for(problem)
        quality = self._quality(problem, server, state, up, heard)
        v, terms = jax.tree.map(partial(where, heard.any), (up.v, up.terms), (state.v, state.terms))
        share, none = jnp.where(heard.any, up.share, 0.0), jnp.zeros_like(up.share)
        update: Any = NodeUpdate(_unknown(terms), v - state.v, share, Info(counts, none, heard.any))
        _, v, rule = server.aggregate(problem, state.rule, round, update.beta, update, v)
        return DualHeld(counts, v, terms, self._bound(problem, server, state, terms, v, rule, heard), rule), quality

    def _quality(self, problem: Problem, server: Server, state: DualHeld, up: DualUp, heard: Heard) -> Certificate:
        """Certify the model that went down, as far as the answers tell."""
        gone = state.counts == 0
        known, exact = jnp.all(gone | heard.now), jnp.all(gone | (heard.now & heard.exact))
        gap, value = jnp.where(heard.now & heard.exact, up.gap, 0.0), jnp.where(heard.now, up.value, 0.0)
        found = server.certify(problem, state.rule, cast(Any, Reported(gap, value, state.terms)), state.v)
        return as_far_as_known(problem, found, known, exact, state.bound)

    def _bound(
        self, problem: Problem, server: Server, state: DualHeld, terms: DualTerms, v: Array, rule: Any, heard: Heard
    ) -> Array:
        """The best lower bound on the optimum; where Omega is learned and nothing bounds that, on that for Omega."""
        regularizer, (m, d) = problem.regularizer, v.shape
        offset: Array | float = 0.0
        of_error: Callable[[Array], Array]
        if jointly_bounded(problem):
            conjugate, before = regularizer.conjugate(v), state.bound
            of_error = partial(regularizer.conjugate_bound, num_tasks=m, num_features=d)
        else:
            relation = server.relation(problem, rule)
            coupling = regularizer.coupling(m, relation)
            conjugate, offset = coupling.conjugate(v), regularizer.offset(relation, d)
            before = jnp.full_like(state.bound, -jnp.inf) if regularizer.learned else state.bound
            steep = regularizer.curvatures(m, relation)[1]
            of_error = partial(_quadratic, steep)
        bound = lower_bound(problem.data, terms, conjugate, of_error) + offset
        return jnp.maximum(before, jnp.where(jnp.all(heard.ever | (state.counts == 0)), bound, -jnp.inf))

    def doubts(self, state: DualHeld, up: DualUp, heard: Heard) -> Mapping[str, Array]:
        return implausible(state.v, state.terms, self.down(state), up, heard)

    def held(self, state: DualHeld) -> Array:
        return state.v

    def norms(self, up: DualUp) -> Array:
        return jnp.sqrt(jnp.sum(up.v**2, axis=1))

    def weights(self, state: DualHeld) -> Array:
        return state.rule.model

    def relation(self, state: DualHeld) -> Relation:
        problem = self._problem(state.counts)
        return self.algorithm.server_for(problem).relation(problem, state.rule)


def _quadratic(steep: Array, norm: Array) -> Array:
    return 0.5 * steep * norm**2


def _unknown(terms: DualTerms) -> Any:
    """In place of duals: of the model to come nobody has reported anything."""
    infinite = jnp.full_like(terms.conjugate, jnp.inf)
    return Reported(infinite, infinite, terms)


def as_far_as_known(problem: Problem, found: Certificate, known: Array, exact: Array, bound: Array) -> Certificate:
    """The certificate where the answers tell all of it; otherwise what a lower bound from before leaves of it.

    Args:
      problem: the problem.
      found: from the answers that there are.
      known: [] bool all nodes have told their losses of the model.
      exact: [] bool and the terms of its gap, with the duals that the server's vectors belong to.
      bound: [] a lower bound on the optimum.
    """
    infinite, learned = jnp.full_like(bound, jnp.inf), problem.regularizer.learned
    rounding = 4.0 * jnp.finfo(bound.dtype).eps * jnp.abs(found.primal)
    gap = jnp.where(exact, found.gap, jnp.maximum(found.primal - bound, 0.0) + rounding)
    gap = jnp.where(known, gap, infinite)
    dual, joint_gap = jnp.where(exact, found.dual, bound), jnp.where(exact, found.joint_gap, infinite)
    joint_dual = jnp.where(exact, found.joint_dual, -infinite)
    if not learned:
        joint_gap, joint_dual = gap, dual
    some = found.replace(
        primal=jnp.where(known, found.primal, infinite), gap=gap, dual=dual,
        joint_primal=jnp.where(known, found.joint_primal, infinite), joint_gap=joint_gap, joint_dual=joint_dual,
        relative_gap=jnp.where(exact, found.relative_gap, _relative(gap, found.primal)),
        relative_joint_gap=_relative(joint_gap, found.joint_primal),
    )  # fmt: skip
    if problem.regularizer.jointly_convex:
        some = some.replace(residual=some.relative_joint_gap)
    else:
        some = some.replace(residual=jnp.where(exact, found.residual, infinite))
    return some.with_bound(problem, bound) if jointly_bounded(problem) else some


def _relative(gap: Array, primal: Array) -> Array:
    """A gap in units of the objective; infinite where it is not known."""
    finite = jnp.isfinite(gap)
    gap = jnp.where(finite, gap, 0.0)
    size = jnp.maximum(jnp.maximum(jnp.abs(primal), jnp.abs(primal - gap)), jnp.finfo(gap.dtype).tiny)
    return jnp.where(finite, gap / size, jnp.inf)


register(SubproblemMethod, Sides(DualNodes.of, DualCentre))
