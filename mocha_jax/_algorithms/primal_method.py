"""Methods that move the weights themselves; the slopes of the losses give their dual point."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Self, TypeVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.base import Algorithm, OwnState, State
from mocha_jax._core.pytree import Relation
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import BucketSizes
from mocha_jax._node.dealt import Dealt, deal, dealt_sizes, of_parts
from mocha_jax._problem.certificate import proven
from mocha_jax._problem.gap import Certificate, certify, fenchel_young
from mocha_jax._problem.problem import Problem
from mocha_jax.coupling import Coupling


class PrimalState(State):
    """Weights and their coupling; a subclass decides whether it keeps their dual point."""

    w: Array  # [num_tasks, d] the model
    relation: Relation  # as the regularizer keeps it; None where Omega is given
    coupling: Coupling
    gap_before: Array  # [] gap just before Omega was last replaced, infinite before that
    change: Array  # [] by how much replacing it lowered the objective, infinite before that

    @property
    @abstractmethod
    def duals(self) -> Array | None:
        """See `State`."""


Moved = TypeVar("Moved", bound=PrimalState)


class PrimalMethod(Algorithm[Problem]):
    r"""Weights at the server. Their certificate uses the dual point $\beta = -\ell'(z)$, or one that a method has."""

    def kept(self, state: object, problem: Problem, kind: type[Moved]) -> Moved:
        """Return a state of this kind, if its weights are those of such a problem."""
        self.expect(problem)
        shape = problem.data.num_tasks, problem.data.num_features
        if not isinstance(state, kind) or state.w.shape != shape:
            raise ValueError(
                f"{type(self).__name__}: the state is not one of its own with weights {shape}; it belongs to another "
                f"algorithm or to other data."
            )
        return state

    def certify(self, state: PrimalState, problem: Problem) -> Certificate:
        w, beta, regularizer = state.w, self._dual_point(problem, state), problem.regularizer
        v = problem.data.dual_vectors(beta)
        offset = regularizer.offset(state.relation, problem.data.num_features)
        value = regularizer.penalty(w, state.relation)
        if regularizer.learned or state.coupling.quadratic_majorizer() is not state.coupling:
            slack = fenchel_young(value, state.coupling.conjugate(v), v, w)
        else:  # R is quadratic, so this is the same without a difference of large numbers
            slack = regularizer.value(w - state.coupling.apply(v))
        return certify(problem, beta, v, w, value, slack, offset, state.change, state.gap_before)

    def prove(self, state: PrimalState, problem: Problem) -> Certificate:
        beta = self._dual_point(problem, state)
        return proven(problem, beta, state.w, state.relation, state.change, state.gap_before)

    def _dual_point(self, problem: Problem, state: OwnState) -> Array:
        """Return feasible duals ``[m, n]``. Default: the slopes of the losses at the weights."""
        return slopes_at(problem, problem.data.predictions(state.w))

    def weights(self, state: PrimalState) -> Array:
        return state.w

    def relation(self, state: PrimalState, problem: Problem) -> Relation:
        return state.relation


class SecondOrderState(PrimalState):
    """The state of a second-order method. Within a run arrays ``[m, n]`` are ``[b, r]`` where the rows are `Dealt`."""

    beta: Array  # [m, n] the dual point of w

    @property
    def duals(self) -> Array:
        return self.beta

    @abstractmethod
    def moved(self, move: Callable[..., Array]) -> Self:
        """Move what is per row by ``move(array, fill)``, `Dealt.deal` or `Dealt.gather`."""


Moving = TypeVar("Moving", bound=SecondOrderState)


class SecondOrderMethod(PrimalMethod):
    """A primal method whose nodes need nothing but sums over their samples, which may be `Dealt`."""

    def bucketing(self, data: TaskData) -> BucketSizes:
        return dealt_sizes(data)

    def prepare(self, problem: Problem, bucketing: BucketSizes = ()) -> Problem:
        return problem.exchange(data=deal(problem.data, bucketing)) if bucketing else problem

    def to_layout(self, state: Moving, problem: Problem) -> Moving:
        layout = problem.data.layout
        return state.moved(layout.deal) if isinstance(layout, Dealt) else state

    def from_layout(self, state: Moving, problem: Problem) -> Moving:
        layout = problem.data.layout
        return state.moved(layout.gather) if isinstance(layout, Dealt) else state

    def settle(self, state: SecondOrderState, problem: Problem) -> SecondOrderState:
        """Keep it: weights and duals are what the certificate is of."""
        return state

    def certify(self, state: PrimalState, problem: Problem) -> Certificate:
        return super().certify(state, of_parts(problem))

    def prove(self, state: PrimalState, problem: Problem) -> Certificate:
        return super().prove(state, of_parts(problem))

    def full_work(self, problem: Problem) -> Array:
        return problem.data.sizes

    def step_flops(self, problem: Problem) -> float:
        """A sample's part of the Hessian, of which a half is enough."""
        return float(problem.data.num_features * (problem.data.num_features + 1))

    def _dual_point(self, problem: Problem, state: SecondOrderState) -> Array:
        return state.beta


def slopes_at(problem: Problem, z: Array) -> Array:
    r"""Return $-\ell'(z)$ of predictions ``[m, n]``, feasible duals."""
    loss, y = problem.node_loss, problem.data.y
    return loss.project(jnp.negative(loss.derivative(z, y)), y)
