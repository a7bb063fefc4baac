"""The server's side of a dual method: any server of the library, without samples and without dual variables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mocha_jax._algorithms.subproblem_method import SubproblemMethod
from mocha_jax._core.pytree import Pytree, Relation, Tree, static, tree
from mocha_jax._problem.certificate import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax._problem.terms import DualTerms
from mocha_jax.federated._certifying import believed, best_bound, certified, unknown
from mocha_jax.federated._dual_node import DualDown, DualNodes, DualUp
from mocha_jax.federated._plausible import implausible
from mocha_jax.federated._sides import Heard, ServerSide, Sides, register, where
from mocha_jax.federated._silent_data import absent
from mocha_jax.losses import Squared
from mocha_jax.regularizers import Regularizer
from mocha_jax.servers._base import NodeUpdate
from mocha_jax.systems._base import Info


class DualHeld(Pytree):
    """The state of the server of a dual method between rounds."""

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

    def problem_of(self, counts: Array) -> Problem:
        """The problem, as far as it is known here, of nodes with so many samples ``[m]``."""
        # The loss is the nodes'; of this one nothing is asked.
        return Problem(absent(counts, self.num_features, self.dtype, self.loss_scaling), Squared(), self.regularizer)

    def init(self, counts: Array) -> DualHeld:
        problem, dtype = self.problem_of(counts), self.dtype
        v, none = jnp.zeros((self.num_tasks, self.num_features), dtype), jnp.zeros((self.num_tasks,), dtype)
        terms = DualTerms(none, none, none)
        rule = self.algorithm.server_for(problem).init(problem, unknown(terms), v)
        return DualHeld(counts, v, terms, jnp.full((), -jnp.inf, dtype), rule)

    def resume(self, state: DualHeld, counts: Array) -> DualHeld:
        problem, first = self.problem_of(counts), self.init(counts)
        v, terms = jax.tree.map(partial(where, counts > 0), (state.v, state.terms), (first.v, first.terms))
        rule = self.algorithm.server_for(problem).resume(state.rule, problem, unknown(terms), v)
        # It bounds the optimum of another problem than the one there is now.
        return DualHeld(counts, v, terms, first.bound, rule)

    def down(self, state: DualHeld) -> DualDown:
        problem = self.problem_of(state.counts)
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
        return self.problem_of(state.counts).relationship(self.num_tasks, self.relation(state))

    def combine(self, state: DualHeld, round: Array, up: DualUp, heard: Heard) -> tuple[DualHeld, Certificate]:
        counts = where(heard.any & (state.counts > 0), up.samples, state.counts)
        problem = self.problem_of(counts)
        server = self.algorithm.server_for(problem)
        before = believed(state.bound, heard)
        quality = certified(problem, server, state.rule, state.v, state.terms, heard, up, heard.exact, before)
        v, terms = jax.tree.map(partial(where, heard.any), (up.v, up.terms), (state.v, state.terms))
        share, none = jnp.where(heard.any, up.share, 0.0), jnp.zeros_like(up.share)
        update: Any = NodeUpdate(unknown(terms), v - state.v, share, Info(counts, none, heard.any))
        _, v, rule = server.aggregate(problem, state.rule, round, update.beta, update, v)
        complete = jnp.all(heard.ever | (counts == 0))
        bound = best_bound(problem, server.relation(problem, rule), terms, v, complete, before)
        return DualHeld(counts, v, terms, bound, rule), quality

    def doubts(self, state: DualHeld, up: DualUp, heard: Heard) -> Mapping[str, Array]:
        return implausible(state.v, state.terms, self.down(state), up, heard)

    def held(self, state: DualHeld) -> Array:
        return state.v

    def norms(self, up: DualUp) -> Array:
        return jnp.sqrt(jnp.sum(up.v**2, axis=1))

    def weights(self, state: DualHeld) -> Array:
        return state.rule.model

    def relation(self, state: DualHeld) -> Relation:
        problem = self.problem_of(state.counts)
        return self.algorithm.server_for(problem).relation(problem, state.rule)


register(SubproblemMethod, Sides(DualNodes.of, DualCentre))
