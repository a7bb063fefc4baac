r"""Algorithms around a dual method, whose rounds ask the nodes for that method's work; the averaged iterate."""

from __future__ import annotations

from typing import Self

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.base import Algorithm, Drawn, State
from mocha_jax._algorithms.dual_method import DualMethod, MochaState
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Relation
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import BucketSizes
from mocha_jax._problem.certificate import proven
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax.servers._dual import alternating
from mocha_jax.systems import System
from mocha_jax.systems._base import Info, Request, Work


class Wrapper(Algorithm[Problem]):
    """Base class of algorithms that transform the rounds of a dual method; their cost is the method's."""

    algorithm: DualMethod

    def check(self, problem: Problem) -> None:
        self.algorithm.check(problem)

    def select_nodes(self, systems: System) -> System:
        return self.algorithm.select_nodes(systems)

    def by_loops(self, problem: Problem) -> Self | None:
        other = self.algorithm.by_loops(problem)
        return None if other is None else self.replace(algorithm=other)

    def bucketing(self, data: TaskData) -> BucketSizes:
        return self.algorithm.bucketing(data)

    @property
    def lays_out(self) -> bool:
        return self.algorithm.lays_out

    def prepare(self, problem: Problem, bucketing: BucketSizes = ()) -> Problem:
        return self.algorithm.prepare(problem, bucketing)

    def full_work(self, problem: Problem) -> Array:
        return self.algorithm.full_work(problem)

    def step_flops(self, problem: Problem) -> Array | float:
        return self.algorithm.step_flops(problem)

    def fixed_flops(self, problem: Problem) -> Array | float:
        return self.algorithm.fixed_flops(problem)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        return self.algorithm.request(problem, round)


class AveragedState(State):
    """The state of a dual method, and the mean of its iterates."""

    inner: MochaState  # of the method itself
    beta: Array  # [m, n] the mean of the dual variables
    v: Array  # [num_tasks, d] and of the dual vectors, which belong to it
    count: Array  # [] int32 of how many rounds

    @property
    def duals(self) -> Array:
        return self.beta


class Averaged(Wrapper):
    r"""A dual method that returns the mean of its iterates, as in Theorem 2.

    $$
    \bar\alpha = \frac{1}{H - H_0}\sum_{h=H_0+1}^{H}\alpha^{(h)}
    $$

    Rounds are those of the method, bit for bit. What is recorded, certified and returned belongs to $\bar\alpha$: its
    dual vectors are the mean of theirs, for these are linear in the duals, its weights $\bar M\bar V$ for the Omega
    at hand. Up to round $H_0$ it is the last iterate. It costs one more vector of duals on every node and no message.
    Of a loss without curvature, such as the hinge, the last iterate may swing about the optimum, and the mean is what
    the theorem bounds; where the method converges linearly the last iterate is better.

    Args:
      algorithm: `algorithm1`, or another method whose server alternates between W and Omega (`servers.DualServer`
        or `servers.AdaptiveServer`).
      after: $H_0 \ge 0$, the first of what `theory.theorem2` returns; an array leaf.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.01, 0.01))
      >>> method = mj.algorithm1(sigma_prime="per_task")
      >>> last, one = mj.run(problem, method, jax.random.key(1), num_rounds=10)
      >>> mean, other = mj.run(problem, Averaged(method, after=2), jax.random.key(1), num_rounds=10)
      >>> bool((mean.inner.beta == last.beta).all()), int(mean.count)
      (True, 8)
      >>> bool(other.dual[-1] >= one.dual[2:].mean())  # the dual is concave
      True

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    after: Hyperparameter = 0

    def __post_init__(self) -> None:
        check.instance("Averaged", "algorithm", self.algorithm, DualMethod, "algorithm1()")
        check.nonnegative("Averaged", after=self.after)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        self._check_server(problem)

    def _check_server(self, problem: Problem) -> None:
        server = self.algorithm.server_for(problem)
        if not server.holds_omega:
            raise ValueError(
                f"Averaged: the weights of a {type(server).__name__} do not follow from the duals alone, so that there "
                f'is nothing to average; use algorithm1(), or server="dual".'
            )

    def init(self, problem: Problem) -> AveragedState:
        self.expect(problem)
        self._check_server(problem)
        return _begun(self.algorithm.init(problem))

    def resume(self, state: AveragedState | MochaState, problem: Problem) -> AveragedState:
        """Keep the mean; of the state of the method alone, begin one."""
        self.expect(problem)
        self._check_server(problem)
        if not isinstance(state, AveragedState):
            return _begun(self.algorithm.resume(state, problem))
        inner = self.algorithm.resume(state.inner, problem)
        beta = problem.node_loss.project(state.beta.astype(inner.beta.dtype), problem.data.y)
        return AveragedState(inner.round, inner, beta, problem.data.dual_vectors(beta), state.count)

    def warm_start(self, state: AveragedState | MochaState, problem: Problem) -> AveragedState:
        # The iterates of another problem do not count for this one.
        inner = state.inner if isinstance(state, AveragedState) else state
        return _begun(self.algorithm.warm_start(inner, problem))

    def draw(self, key: Drawn, problem: Problem) -> Drawn:
        return self.algorithm.draw(key, problem)

    def step(self, key: Drawn, state: AveragedState, problem: Problem, work: Work) -> tuple[AveragedState, Info]:
        inner, info = self.algorithm.step(key, state.inner, problem, work)
        counted = inner.round.astype(problem.data.dtype) > jnp.asarray(self.after, problem.data.dtype)
        count = jnp.where(counted, state.count + 1, 0)
        share = 1.0 / jnp.maximum(count, 1).astype(inner.v.dtype)

        def mean(old: Array, new: Array) -> Array:
            # In this form it equals the new one exactly if that is the first.
            return jnp.where(count > 1, old + share * (new - old), new)

        return AveragedState(inner.round, inner, mean(state.beta, inner.beta), mean(state.v, inner.v), count), info

    def measure_theta(
        self, key: Array, before: AveragedState, after: AveragedState, problem: Problem, tol: Array
    ) -> tuple[Array, Array]:
        return self.algorithm.measure_theta(key, before.inner, after.inner, problem, tol)

    def certify(self, state: AveragedState, problem: Problem) -> Certificate:
        beta = problem.node_loss.project(state.beta, problem.data.y)
        v = problem.data.dual_vectors(beta)
        return self.algorithm.server_for(problem).certify(problem, state.inner.server, beta, v)

    def prove(self, state: AveragedState, problem: Problem) -> Certificate:
        updates = self.algorithm.server_for(problem).omega_updates(state.inner.server)
        beta = problem.node_loss.project(state.beta, problem.data.y)
        return proven(problem, beta, self.weights(state), self.relation(state, problem), *updates)

    def weights(self, state: AveragedState) -> Array:
        return jnp.asarray(alternating(state.inner.server).coupling.apply(state.v))

    def relation(self, state: AveragedState, problem: Problem) -> Relation:
        return self.algorithm.relation(state.inner, problem)


def _begun(inner: MochaState) -> AveragedState:
    """The state before the first mean: that of the method."""
    return AveragedState(inner.round, inner, inner.beta, inner.v, jnp.zeros((), jnp.int32))
