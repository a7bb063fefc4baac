r"""Federated dual ascent: the common part of MOCHA and its dual rivals.

A round: every node changes its duals as its work allows and returns $\Delta v$; the server adds them up
and broadcasts.

$$
\beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad V \leftarrow V + \gamma\,\Delta V
$$
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, Drawn, State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, Relation, static
from mocha_jax._numerics.math import zero_tangent
from mocha_jax._problem.certificate import proven
from mocha_jax._problem.gap import Certificate, conjugates, jointly_bounded
from mocha_jax._problem.problem import Problem
from mocha_jax.servers._base import REFRESH_EVERY, Aggregator, NodeUpdate, OwnState, Schedule, checked_schedule
from mocha_jax.systems._base import Info, Request, Work

# Rounds between two updates of Omega by alternation, where none is asked for.
OMEGA_EVERY = 10

# How often duals may be halved to suit another problem.
_HALVINGS = 24


class MochaState(State):
    """The state of MOCHA and its dual rivals between rounds."""

    beta: Array  # [m, n] dual variables
    v: Array  # [num_tasks, d] v_t = sum_i c_i beta_i x_i
    server: OwnState

    @property
    def duals(self) -> Array:
        return self.beta

    @property
    def w(self) -> Array:
        """The model, ``[num_tasks, d]``."""
        return self.server.model


class DualMethod(Algorithm[Problem]):
    """Duals on the nodes, weights at the server. A subclass defines the work of a node in a round."""

    omega_every: Schedule | None = static(default=None, kw_only=True)
    smoothing: Hyperparameter = dataclasses.field(default=0.0, kw_only=True)
    initial_omega: Hyperparameter | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check.nonnegative(name, smoothing=self.smoothing)
        if self.omega_every is not None:
            object.__setattr__(self, "omega_every", checked_schedule(name, self.omega_every))
        if self.initial_omega is not None:
            check.positive_semidefinite(name, "initial_omega", self.initial_omega)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        self._check_initial_omega(problem)

    def _check_initial_omega(self, problem: Problem) -> None:
        if self.initial_omega is None:
            return
        name, regularizer = type(self).__name__, problem.regularizer
        if not regularizer.learned:
            raise ValueError(
                f"{name}: initial_omega must be left out: the relationship of {type(regularizer).__name__} is given, "
                f"not learned."
            )
        if not self.server_for(problem).holds_omega:
            raise ValueError(
                f'{name}: initial_omega is for a server that holds an Omega for some rounds, as server="dual" does; '
                f"the {type(self.server_for(problem)).__name__} does not."
            )
        regularizer.learned.check_omega(name, "initial_omega", self.initial_omega, problem.data.num_tasks)

    @abstractmethod
    def server_for(self, problem: Problem) -> Aggregator:
        """Choose the server for a problem; every other method asks here."""

    @abstractmethod
    def local_update(
        self, drawn: Drawn, server: Aggregator, state: MochaState, problem: Problem, work: Work
    ) -> NodeUpdate:
        """Do every node's work of a round, from the broadcast weights, with what `draw` drew."""

    def init(self, problem: Problem) -> MochaState:
        """Start from beta = 0, projected on the dual domain."""
        self.expect(problem)
        self._check_initial_omega(problem)
        beta = problem.node_loss.project(jnp.zeros_like(problem.data.y), problem.data.y)
        v = problem.data.dual_vectors(beta)
        return MochaState(jnp.zeros((), jnp.int32), beta, v, self.server_for(problem).init(problem, beta, v))

    def resume(self, state: MochaState, problem: Problem) -> MochaState:
        """Keep the duals, the round and what the server learned; derive everything else from the problem."""
        server, data = self._server_of(state, problem), problem.data
        if state.beta.shape != data.y.shape or state.v.shape != (data.num_tasks, data.num_features):
            raise ValueError(
                f"{type(self).__name__}: the state has duals {state.beta.shape} and weights {state.v.shape}, but "
                f"the problem's data needs {data.y.shape} and {(data.num_tasks, data.num_features)}; it belongs to "
                f"other data. Where data.join(new) added samples or tasks, start from add_tasks(state, problem)."
            )
        beta = problem.node_loss.project(state.beta.astype(data.y.dtype), data.y)
        v = data.dual_vectors(beta)
        return MochaState(state.round, beta, v, server.resume(state.server, problem, beta, v))

    def _server_of(self, state: object, problem: Problem) -> Aggregator:
        """The server for this problem, which a state of the same kind can be given to."""
        self.expect(problem)
        name, server = type(self).__name__, self.server_for(problem)
        if not isinstance(state, MochaState):
            raise ValueError(f"{name}: the state is a {type(state).__name__}, not one of a dual method.")
        if not server.can_resume(state.server):
            raise ValueError(
                f"{name}: the state holds a {type(state.server).__name__}, which is none of a "
                f"{type(server).__name__}; choose the same server and kind of regularizer as in the run it comes from."
            )
        return server

    def warm_start(self, state: MochaState, problem: Problem) -> MochaState:
        r"""The duals shrunk by the power of two that is best for this problem.

        With a regularizer ten times weaker nearly the same weights belong to a tenth of the duals; to start from all
        of them is worse than to start from none.
        """
        data, loss, regularizer = problem.data, problem.node_loss, problem.regularizer
        state = self.resume(state, problem)
        if jointly_bounded(problem):
            quadratic = regularizer.conjugate(state.v)
        else:
            coupling = regularizer.coupling(data.num_tasks, self.relation(state, problem))
            quadratic = coupling.quadratic_majorizer().conjugate(state.v)

        def dual(scale: Array) -> Array:
            return -jnp.sum(conjugates(data, loss, loss.project(scale * state.beta, data.y))) - scale**2 * quadratic

        scales = 0.5 ** jnp.arange(_HALVINGS, dtype=data.dtype)
        best = scales[jnp.argmax(lax.map(dual, scales))]
        return self.resume(state.replace(beta=best * state.beta), problem)

    @on_purpose
    def add_tasks(self, state: MochaState, problem: Problem) -> MochaState:
        """Continue the state of a trained federation with more samples of old tasks, or with new tasks after them.

        The data is the old one, joined with what is new: `TaskData.join`, `TaskData.append`. Old samples keep their
        duals; new ones start from none, and new tasks from the average task: its weights with the proximal server, its
        row of Omega with the dual one. Both are then re-estimated like all others.

        Examples:
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
          >>> joined = mj.solve(larger, algorithm, tol=1e-3, state=algorithm.add_tasks(solution.state, larger))
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
        beta = problem.node_loss.project(beta, data.y)
        v = data.dual_vectors(beta)
        return MochaState(state.round, beta, v, server.add_tasks(state.server, problem, beta, v))

    def step(self, key: Drawn, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        server, drawn = self.server_for(problem), self.draw(key, problem)
        if server.differentiated(state.server)[0] is server:
            return _round(self, server, drawn, state, problem, work)
        return _round_with_another_derivative(self, server, drawn, state, problem, work)

    def fixed_flops(self, problem: Problem) -> Array | float:
        return self.server_for(problem).node_flops(problem)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        request = super().request(problem, round)
        return self.server_for(problem).message(request)

    def certify(self, state: MochaState, problem: Problem) -> Certificate:
        # Of V as it follows from the duals: the V that is carried along has rounding of its own, which the terms of
        # the gap do not see.
        v = problem.data.dual_vectors(state.beta)
        return self.server_for(problem).certify(problem, state.server, state.beta, v)

    def prove(self, state: MochaState, problem: Problem) -> Certificate:
        updates = self.server_for(problem).omega_updates(state.server)
        return proven(problem, state.beta, self.weights(state), self.relation(state, problem), *updates)

    def weights(self, state: MochaState) -> Array:
        return state.w

    def relation(self, state: MochaState, problem: Problem) -> Relation:
        return self.server_for(problem).relation(problem, state.server)


def _round(
    algorithm: DualMethod, server: Aggregator, drawn: Drawn, state: MochaState, problem: Problem, work: Work
) -> tuple[MochaState, Info]:
    """Do one round with this server."""
    data = problem.data
    update = algorithm.local_update(drawn, server, state, problem, work)
    round = state.round + 1
    if data.shared:  # of single nodes nothing is known but what they add
        fresh = round % REFRESH_EVERY == 0
        change = lax.cond(fresh, lambda: data.node_vectors(update.beta), lambda: update.dv)
        v = data.to_tasks(change) + jnp.where(fresh, 0.0, state.v)
    else:
        own = data.to_nodes(state.v) + update.dv
        v = data.to_tasks(data.renewed(own, update.beta, round % REFRESH_EVERY, REFRESH_EVERY))
    beta, v, after = server.aggregate(problem, state.server, round, state.beta, update, v)
    return state.replace(round=round, beta=beta, v=v, server=after), update.info


@jax.custom_jvp
def _round_with_another_derivative(
    algorithm: DualMethod, server: Aggregator, drawn: Drawn, state: MochaState, problem: Problem, work: Work
) -> tuple[MochaState, Info]:
    """Do one round whose derivative is that of a round with another server, `Aggregator.differentiated`."""
    return _round(algorithm, server, drawn, state, problem, work)


Round = tuple[DualMethod, Aggregator, Drawn, MochaState, Problem, Work]
Done = tuple[MochaState, Info]


@_round_with_another_derivative.defjvp
def _round_jvp(primals: Round, tangents: Round) -> tuple[Done, Done]:
    algorithm, server, drawn, state, problem, work = primals
    d_algorithm, d_server, _, d_state, d_problem, _ = tangents

    def other_round(
        algorithm: DualMethod, server: Aggregator, state: MochaState, problem: Problem
    ) -> tuple[MochaState, Array]:
        other_server, server_state = server.differentiated(state.server)
        after, _ = _round(algorithm, other_server, drawn, state.replace(server=server_state), problem, work)
        return after, problem.data.node_vectors(after.beta)

    point, direction = (algorithm, server, state, problem), (d_algorithm, d_server, d_state, d_problem)
    change, d_vectors = jax.jvp(other_round, point, direction)[1]
    after, info = _round_with_another_derivative(*primals)
    still, d_info = jax.tree.map(zero_tangent, (after, info))
    d_after = still.replace(beta=change.beta, v=change.v, server=server.tangent(still.server, change.server, d_vectors))
    return (after, info), (d_after, d_info)
