"""Dual methods whose nodes work on the subproblems (4) of the paper."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.dual_method import OMEGA_EVERY, DualMethod, MochaState
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._node.buckets import BACKENDS, BucketSizes, time_major
from mocha_jax._node.subproblem import Subproblems, theta_of
from mocha_jax._problem.certificate import jointly_bounded
from mocha_jax._problem.problem import Problem
from mocha_jax.coupling import SIGMA_PRIME_RULES
from mocha_jax.servers._base import NodeUpdate, Server
from mocha_jax.servers._dual import DualServer
from mocha_jax.servers._proximal import ProximalServer
from mocha_jax.systems._base import Info, Work

SERVERS = ("proximal", "dual")

# Passes after which a measurement of theta reports the bound that it has reached.
_THETA_PASSES = 5000


class SubproblemMethod(DualMethod):
    """Every node works on its subproblem (4). Subclasses set the accuracy."""

    sigma_prime: str = static(kw_only=True)
    gamma: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    server: str | None = static(default=None, kw_only=True)
    backend: str = static(default="auto", kw_only=True)
    custom_server: Server | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check.one_of(name, "sigma_prime", self.sigma_prime, self._rules())
        check.in_unit_interval(name, open_left=True, gamma=self.gamma)
        if self.server is not None:
            check.one_of(name, "server", self.server, SERVERS)
        check.one_of(name, "backend", self.backend, BACKENDS)
        if self.custom_server is not None:
            check.instance(name, "custom_server", self.custom_server, Server, "a subclass of mocha_jax.servers.Server")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.backend == "pallas" and not problem.loss.in_kernel:
            raise ValueError(
                f'{type(self).__name__}: backend="pallas" needs a loss that says it fits the kernel, and '
                f'{type(problem.loss).__name__} does not (see `Loss`, in_kernel=True); use "auto" or "xla".'
            )

    def by_loops(self, problem: Problem) -> Self | None:
        return self.replace(backend="xla") if self.backend == "auto" and problem.loss.in_kernel else None

    def _rules(self) -> tuple[str, ...]:
        return SIGMA_PRIME_RULES

    def server_for(self, problem: Problem) -> Server:
        if self.custom_server is not None:
            return self.custom_server
        regularizer = problem.regularizer
        if self.server == "proximal" and not regularizer.jointly_convex:
            raise ValueError(
                f"{type(self).__name__}: the proximal server needs a problem that is convex in W and Omega together, "
                f'and {type(regularizer).__name__} is not; use server="dual".'
            )
        if self.server == "proximal" or (self.server is None and jointly_bounded(problem)):
            return ProximalServer(self.omega_every or 1)
        return self._dual_server()

    def _dual_server(self) -> Server:
        every = self.omega_every or OMEGA_EVERY
        return DualServer(self.sigma_prime, every, self.gamma, self.smoothing, self.initial_omega)

    def step(self, key: Any, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        return super().step(key, state, self.laid_out(problem), work)

    def local_update(self, drawn: Any, server: Server, state: MochaState, problem: Problem, work: Work) -> NodeUpdate:
        given = self._subproblems(server, state, problem)
        return self.improve(drawn, given, problem, work, server.node_flops(problem))

    @abstractmethod
    def improve(
        self, drawn: Any, given: Subproblems, problem: Problem, work: Work, extra_flops: Array | float = 0.0
    ) -> NodeUpdate:
        """Do every node's work of a round on these subproblems.

        Args:
          drawn: from `draw`.
          given: the subproblems.
          problem: for its samples, which are those of `given`.
          work: how much each node does.
          extra_flops: what a round costs a node for the server's sake, [] or ``[m]``.
        """

    @property
    def lays_out(self) -> bool:
        return True

    def prepare(self, problem: Problem, bucketing: BucketSizes = ()) -> Problem:
        return problem.replace(data=time_major(problem.data, bucketing, self.backend))

    def subproblems(self, state: MochaState, problem: Problem) -> Subproblems:
        """The subproblems (4) that the nodes get in the round after `state`."""
        return self._subproblems(self.server_for(problem), state, problem)

    def laid_out(self, problem: Problem) -> Problem:
        """The problem with its data as the local solver reads it."""
        return problem if problem.data.layout.by_rows else self.prepare(problem)

    def _subproblems(self, server: Server, state: MochaState, problem: Problem) -> Subproblems:
        problem = self.laid_out(problem)
        data = problem.data
        return Subproblems(
            data, problem.node_loss, state.beta,
            w=data.to_nodes(state.server.broadcast), q=server.curvature(state.server, data),
        )  # fmt: skip

    def measure_theta(
        self, key: Array, before: MochaState, after: MochaState, problem: Problem, tol: Array
    ) -> tuple[Array, Array]:
        found = self.server_for(problem).local_duals(after.server, before.beta, after.beta)
        change = (found - before.beta) / jnp.asarray(self.gamma, before.beta.dtype)
        beta = problem.node_loss.project(before.beta + change, problem.data.y)
        return theta_of(key, self.subproblems(before, problem), beta, tol, passes=_THETA_PASSES)

    def _gamma(self, problem: Problem) -> Array:
        r"""Return the aggregation parameter $\gamma$ (Appendix C) in the data's dtype."""
        check.scalar(type(self).__name__, gamma=self.gamma)
        return jnp.asarray(self.gamma, problem.data.dtype)
