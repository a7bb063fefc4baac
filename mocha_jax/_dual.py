r"""Federated dual ascent: what MOCHA and its dual rivals have in common.

A round: every node changes its duals as its work allows and returns :math:`\Delta v`; the server adds them up
and broadcasts.

.. math:: \beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad V \leftarrow V + \gamma\,\Delta V
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm, Info
from mocha_jax._objective import Certificate, conjugates, dual_vectors, node_vectors
from mocha_jax._problem import Problem
from mocha_jax._proof import proven
from mocha_jax._pytree import Hyperparameter, Pytree, static
from mocha_jax._server import REFRESH_EVERY, DualServer, Local, ProximalServer, ProximalState
from mocha_jax._transfers import on_purpose
from mocha_jax._work import Work

# Rounds between two updates of Omega by alternation, where none is asked for.
OMEGA_EVERY = 10

# How often duals may be halved to suit another problem.
_HALVINGS = 24


class MochaState(Pytree):
    """All that MOCHA and its dual rivals carry from round to round."""

    round: Array  # [] int32
    beta: Array  # [m, n] dual variables
    v: Array  # [num_tasks, d] v_t = sum_i c_i beta_i x_i
    server: Any  # DualState or ProximalState

    @property
    def w(self) -> Array:
        """The model, ``[num_tasks, d]``."""
        return self.server.model


class DualMethod(Algorithm[Problem]):
    """Duals on the nodes, weights at the server. A subclass says what a node does in a round."""

    omega_every: int | None = static(default=None, kw_only=True)
    smoothing: Hyperparameter = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check.nonnegative(name, smoothing=self.smoothing)
        if self.omega_every is not None:
            _check.integer(name, 1, omega_every=self.omega_every)

    @abstractmethod
    def _local(self, key: Array, state: MochaState, problem: Problem, work: Work) -> Local:
        """What every node makes of the broadcast weights."""

    def _server(self, problem: Problem) -> Any:
        return DualServer("per_task", self.omega_every or OMEGA_EVERY, 1.0, self.smoothing)

    def init(self, problem: Problem) -> MochaState:
        """Start from beta = 0, projected on the dual domain."""
        self.expect(problem)
        beta = problem.loss.project(jnp.zeros_like(problem.data.y), problem.data.y)
        v = dual_vectors(problem.data, beta)
        return MochaState(jnp.zeros((), jnp.int32), beta, v, self._server(problem).start(problem, beta, v))

    def adopt(self, state: MochaState, problem: Problem) -> MochaState:
        """Keep the duals, the round and what the server learned; derive everything else from the problem."""
        server, data = self._server_of(state, problem), problem.data
        if state.beta.shape != data.y.shape or state.v.shape != (data.num_tasks, data.num_features):
            raise ValueError(
                f"{type(self).__name__}: the state has duals {state.beta.shape} and weights {state.v.shape}, but "
                f"the problem's data needs {data.y.shape} and {(data.num_tasks, data.num_features)}; it belongs to "
                f"other data."
            )
        beta = problem.loss.project(state.beta.astype(data.y.dtype), data.y)
        v = dual_vectors(data, beta)
        return MochaState(state.round, beta, v, server.adopt(state.server, problem, beta, v))

    def _server_of(self, state: Any, problem: Problem) -> Any:
        """The server for this problem, which a state of the same kind can be given to."""
        self.expect(problem)
        name, server = type(self).__name__, self._server(problem)
        if not isinstance(state, MochaState):
            raise ValueError(f"{name}: the state is a {type(state).__name__}, not one of a dual method.")
        if isinstance(server, ProximalServer) != isinstance(state.server, ProximalState):
            raise ValueError(
                f"{name}: the state holds a {type(state.server).__name__}, which is none of a "
                f"{type(server).__name__}; choose the same server and kind of regularizer as in the run it comes from."
            )
        return server

    def carry(self, state: MochaState, problem: Problem) -> MochaState:
        r"""The duals shrunk by the power of two that is best for this problem.

        With a regularizer ten times weaker nearly the same weights belong to a tenth of the duals; to start from all
        of them is worse than to start from none.
        """
        data, loss, regularizer = problem.data, problem.loss, problem.regularizer
        state = self.adopt(state, problem)
        if regularizer.learned and regularizer.jointly_convex:
            quadratic = regularizer.conjugate(state.v)
        else:
            quadratic = regularizer.coupling(data.num_tasks, self.omega(state, problem)).linear().conjugate(state.v)

        def dual(scale: Array) -> Array:
            return -jnp.sum(conjugates(data, loss, loss.project(scale * state.beta, data.y))) - scale**2 * quadratic

        scales = 0.5 ** jnp.arange(_HALVINGS, dtype=data.dtype)
        best = scales[jnp.argmax(lax.map(dual, scales))]
        return self.adopt(state.replace(beta=best * state.beta), problem)

    @on_purpose
    def extend(self, state: MochaState, problem: Problem) -> MochaState:
        """Continue the state of a trained federation on a problem with new tasks after the old ones.

        Old tasks keep their duals; new ones start from none, and from the average task: its weights with the
        proximal server, its row of Omega with the dual one. Both are then re-estimated like all others.

        >>> import numpy as np, mocha_jax as mj
        >>> rng = np.random.default_rng(0)
        >>> def device(n):
        ...     x = rng.normal(size=(n, 3)).astype("f")
        ...     return mj.pack_tasks([x], [np.sign(x[:, 0])], loss_scaling="task_mean")
        >>> data = device(20).append(device(30))
        >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))
        >>> algorithm = mj.Mocha()
        >>> solution = mj.solve(problem, algorithm, tol=1e-3)
        >>> larger = problem.replace(data=data.append(device(5)))
        >>> joined = mj.solve(larger, algorithm, tol=1e-3, state=algorithm.extend(solution.state, larger))
        >>> joined.omega.shape
        (3, 3)
        """
        server, data = self._server_of(state, problem), problem.data
        m, n = state.beta.shape
        old_tasks, d = state.v.shape
        if data.num_nodes < m or data.y.shape[1] < n or data.num_tasks < old_tasks or data.num_features != d:
            raise ValueError(
                f"{type(self).__name__}: the state has {m} nodes x {n} rows, {old_tasks} tasks and {d} features; "
                f"the data has {data.num_nodes} x {data.y.shape[1]}, {data.num_tasks} and {data.num_features}. "
                f"New tasks go after the old ones: problem.data.append(new)."
            )
        beta = jnp.pad(state.beta, [(0, data.num_nodes - m), (0, data.y.shape[1] - n)])
        beta = problem.loss.project(beta, data.y)
        v = dual_vectors(data, beta)
        return MochaState(state.round, beta, v, server.extend(state.server, problem, beta, v))

    def step(self, key: Array, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        data = problem.data
        local = self._local(key, state, problem, work)
        round = state.round + 1
        fresh = round % REFRESH_EVERY == 0
        change = lax.cond(fresh, lambda: node_vectors(data, local.beta), lambda: local.dv)
        v = data.to_tasks(change) + jnp.where(fresh, 0.0, state.v)
        beta, v, answer = self._server(problem).respond(problem, state.server, round, state.beta, local, v)
        return state.replace(round=round, beta=beta, v=v, server=answer), local.info

    def certify(self, state: MochaState, problem: Problem) -> Certificate:
        # Of V as it follows from the duals: the V that is carried along has rounding of its own, which the terms of
        # the gap do not see.
        v = dual_vectors(problem.data, state.beta)
        return self._server(problem).certify(problem, state.server, state.beta, v)

    def prove(self, state: MochaState, problem: Problem) -> Certificate:
        server = self._server(problem)
        updates = server.updates(state.server)
        return proven(problem, state.beta, self.weights(state), self.omega(state, problem), *updates)

    def weights(self, state: MochaState) -> Array:
        return state.w

    def omega(self, state: MochaState, problem: Problem) -> Any:
        return self._server(problem).omega(problem, state.server)
