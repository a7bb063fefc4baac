r"""The server of Algorithm 1.

$W = \bar M V$ for an $\Omega$ that is held for some rounds and then replaced by the best one for W. The
nodes' subproblems have curvature $\sigma'_t \bar M_{tt}$, safe for the coupling $\bar M$ of that Omega.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Hyperparameter, Pytree, Relation, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.gap import Certificate, certify_implied
from mocha_jax._problem.problem import Problem
from mocha_jax.coupling import Coupling
from mocha_jax.regularizers import Learned
from mocha_jax.servers._base import (
    Aggregator,
    NodeUpdate,
    Schedule,
    ServerState,
    cast,
    first_relation,
    gain_of_updating,
    is_due,
    keep_relation,
    same_kind,
)


class DualState(Pytree):
    """The server of Algorithm 1 between rounds."""

    relation: Relation  # as the regularizer keeps it; None where Omega is given
    coupling: Coupling
    sigma: Array  # [num_tasks] sigma'_t
    own: Array  # [num_tasks] each task's own curvature, the coupling's diagonal
    stiffness: Array  # [num_tasks] their product, the curvature of a node's subproblem; kept: a kernel less a round
    model: Array  # [num_tasks, d] W = coupling.apply(V)
    gap_before: Array  # [] gap just before Omega was last replaced, infinite before that
    change: Array  # [] by how much replacing it lowered the objective, infinite before that

    @property
    def broadcast(self) -> Array:
        """The weights that the nodes start their round from."""
        return self.model


def alternating(state: Any) -> DualState:
    """Return the part of a state that belongs to Algorithm 1: a `DualState` is one, and others may hold one."""
    return getattr(state, "dual", state)


class DualServer(Aggregator):
    """Alternate between W, which follows V, and Omega, which follows W every `omega_every` rounds.

    Args:
      sigma_prime: a safe rule, see `Coupling.sigma_prime`.
      omega_every: rounds between updates of Omega, a number or a schedule, see `Mocha`.
      gamma: aggregation parameter.
      smoothing: epsilon, see `Mocha`.
      initial_omega: Omega_0 ``[num_tasks, num_tasks]``; default the regularizer's own.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    holds_omega: ClassVar[bool] = True

    sigma_prime: str = static()
    omega_every: Schedule = static()
    gamma: Hyperparameter
    smoothing: Hyperparameter
    initial_omega: Hyperparameter | None = None

    def can_resume(self, state: object) -> bool:
        return isinstance(alternating(state), DualState)

    def init(self, problem: Problem, beta: Array, v: Array) -> DualState:
        nothing = jnp.zeros((), v.dtype)
        first = first_relation(problem, self.initial_omega)
        return self._with(problem, first, v, nothing + jnp.inf, nothing + jnp.inf)

    def resume(self, state: ServerState, problem: Problem, beta: Array, v: Array) -> DualState:
        last = alternating(state)
        return self._settled(problem, keep_relation(problem, last.relation, self.initial_omega), v, last.gap_before)

    def add_tasks(self, state: ServerState, problem: Problem, beta: Array, v: Array) -> DualState:
        last, learned, relation = alternating(state), problem.regularizer.learned, first_relation(problem, None)
        if learned and same_kind(last.relation, relation):
            relation = learned.extend_relation(last.relation, *v.shape)
        return self._settled(problem, cast(relation, v.dtype), v, last.gap_before)

    def _settled(self, problem: Problem, relation: Relation, v: Array, gap_before: Array) -> DualState:
        """A state whose `change` is what replacing Omega now would gain: what it last gained was on another problem."""
        state = self._with(problem, relation, v, gap_before.astype(v.dtype), jnp.full((), jnp.inf, v.dtype))
        return state.replace(change=gain_of_updating(problem, state.model, relation))

    def _with(self, problem: Problem, relation: Relation, v: Array, gap_before: Array, change: Array) -> DualState:
        """Everything that follows from Omega and V."""
        data = problem.data
        coupling = data.constrain_tasks(problem.regularizer.coupling(data.num_tasks, relation))
        sigma = coupling.sigma_prime(self.sigma_prime, jnp.asarray(self.gamma, v.dtype), data.nodes_per_task)
        # What is the same for all tasks would lie whole on every device.
        sigma, own = data.constrain_tasks((sigma, coupling.diagonal()))
        return DualState(relation, coupling, sigma, own, sigma * own, coupling.apply(v), gap_before, change)

    def curvature(self, state: DualState, data: TaskData) -> Array:
        return data.to_nodes(state.stiffness)

    def aggregate(
        self, problem: Problem, state: DualState, round: Array, before: Array, update: NodeUpdate, v: Array
    ) -> tuple[Array, Array, DualState]:
        return update.beta, v, self.update_model(problem, state, round, update.beta, v)

    def update_model(self, problem: Problem, state: DualState, round: Array, beta: Array, v: Array) -> DualState:
        """W follows V, and when it is due Omega follows W."""
        state = state.replace(model=state.coupling.apply(v))
        if not (learned := problem.regularizer.learned):
            return state
        due = is_due(self.omega_every, round)
        return lax.cond(due, lambda: self._relearn(problem, learned, state, beta, v), lambda: state)

    def _relearn(self, problem: Problem, learned: Learned, state: DualState, beta: Array, v: Array) -> DualState:
        w = state.model
        before = self.certify(problem, state, beta, v).gap
        relation = learned.update_relation(state.relation, w, jnp.asarray(self.smoothing, w.dtype))
        value = state.coupling.value(v, w) + learned.offset(state.relation, w.shape[1])
        least = learned.value(w, None if learned.jointly_convex else relation)
        return self._with(problem, relation, v, before, jnp.maximum(value - least, 0.0))

    def certify(self, problem: Problem, state: DualState, beta: Array, v: Array) -> Certificate:
        return certify_implied(problem, beta, v, state.relation, state.coupling, state.change, state.gap_before)

    def omega_updates(self, state: DualState) -> tuple[Array, Array]:
        return state.change, state.gap_before

    def relation(self, problem: Problem, state: DualState) -> Relation:
        return state.relation
