"""MOCHA: Algorithm 1, and its proximal form."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax import _check
from mocha_jax._algorithm import Algorithm, Info
from mocha_jax._local import ascend, time_major
from mocha_jax._math import safe_ratio
from mocha_jax._objective import Certificate, dual_vectors
from mocha_jax._problem import Problem
from mocha_jax._pytree import Hyperparameter, Pytree, static
from mocha_jax._server import DualServer, DualState, ProximalServer, ProximalState
from mocha_jax.coupling import SIGMA_PRIME_RULES
from mocha_jax.systems import Work

# Rounds between two recomputations of V from beta. Adding a round's change to V costs one
# rounding error; this keeps their sum below what a certificate in float32 can see.
_REFRESH_EVERY = 64

# Rounds between two updates of Omega by alternation, where none is asked for.
_OMEGA_EVERY = 10

SERVERS = ("proximal", "dual")


class MochaState(Pytree):
    """All that MOCHA carries from round to round."""

    round: Array  # [] int32
    beta: Array  # [m, n] dual variables
    v: Array  # [num_tasks, d] v_t = sum_i c_i beta_i x_i
    server: Any  # DualState or ProximalState

    @property
    def w(self) -> Array:
        """The model, ``[num_tasks, d]``."""
        return self.server.model


class Mocha(Algorithm):
    r"""MOCHA (Smith et al. 2017): dual coordinate ascent on all nodes, coupled once a round.

    A round: every node improves its subproblem (4) for as many coordinate steps as its work
    allows and returns :math:`\Delta v`; the server adds them up and broadcasts.

    .. math::
        \beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad V \leftarrow V + \gamma\,\Delta V

    With ``server="dual"`` this is Algorithm 1: the server sends :math:`W = \bar M V`, and where :math:`\Omega` is
    learned, replaces it every `omega_every` rounds by the best one for W. With ``server="proximal"`` it solves
    for W and :math:`\Omega` together, close to where they were (see `mocha_jax._server`): on jointly convex
    problems it ends at the joint optimum, which plain alternation approaches ever more slowly or not at all.

    Args:
      local_epochs: passes over a node's own data in a full round, > 0; need not be whole.
      sigma_prime: rule for :math:`\sigma'`, see `Coupling.sigma_prime`; for the dual server.
      gamma: aggregation parameter :math:`\gamma \in (0, 1]` (Appendix C); an array leaf.
      omega_every: rounds between updates of :math:`\Omega`; default 1 for the proximal server, 10 for the dual one. The
        proximal server lets the nodes go on with the same subproblem in between.
      server: ``"proximal"`` or ``"dual"``; default proximal where Omega is learned in a jointly convex
        problem, dual otherwise.
      smoothing: :math:`\epsilon \ge 0` for the dual server and (14): Omega is fitted to
        :math:`(WW^\top + \epsilon I)^{1/2}`. With 0, the paper's update, Omega never regains a direction that
        W has lost.

    >>> import jax, numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(1.0))
    >>> algorithm = Mocha()
    >>> state = algorithm.init(problem)
    >>> work = mj.systems.Full().work(jax.random.key(0), data, algorithm.full_work(problem))
    >>> state, info = algorithm.step(jax.random.key(1), state, problem, work)
    >>> info.steps.tolist(), state.w.shape
    ([20, 20, 20, 20], (4, 3))
    """

    local_epochs: float = static(default=1.0)
    sigma_prime: str = static(default="per_task")
    gamma: Hyperparameter = 1.0
    omega_every: int | None = static(default=None)
    server: str | None = static(default=None)
    smoothing: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        _check.positive("Mocha", local_epochs=self.local_epochs)
        _check.one_of("Mocha", "sigma_prime", self.sigma_prime, SIGMA_PRIME_RULES)
        _check.in_unit_interval("Mocha", open_left=True, gamma=self.gamma)
        _check.nonnegative("Mocha", smoothing=self.smoothing)
        if self.omega_every is not None:
            _check.integer("Mocha", 1, omega_every=self.omega_every)
        if self.server is not None:
            _check.one_of("Mocha", "server", self.server, SERVERS)

    def _server(self, problem: Problem) -> Any:
        regularizer = problem.regularizer
        joint = regularizer.learned and regularizer.jointly_convex
        if self.server == "proximal" and not regularizer.jointly_convex:
            raise ValueError(
                f"Mocha: the proximal server needs a problem that is convex in W and Omega together, and "
                f'{type(regularizer).__name__} is not; use server="dual".'
            )
        if self.server == "proximal" or (self.server is None and joint):
            return ProximalServer(self.omega_every or 1)
        return DualServer(self.sigma_prime, self.omega_every or _OMEGA_EVERY, self.gamma, self.smoothing)

    def prepare(self, problem: Problem) -> Problem:
        return problem.replace(layout=time_major(problem.data))

    def init(self, problem: Problem) -> MochaState:
        """Start from beta = 0, projected on the dual domain."""
        beta = problem.loss.project(jnp.zeros_like(problem.data.y), problem.data.y)
        v = dual_vectors(problem.data, beta)
        return MochaState(jnp.zeros((), jnp.int32), beta, v, self._server(problem).start(problem, v))

    def adopt(self, state: MochaState, problem: Problem) -> MochaState:
        """Keep the duals, the round and what the server learned; derive everything else from the problem."""
        data, server = problem.data, self._server(problem)
        if state.beta.shape != data.y.shape or state.v.shape != (data.num_tasks, data.num_features):
            raise ValueError(
                f"Mocha: the state has duals {state.beta.shape} and weights {state.v.shape}, but this data needs "
                f"{data.y.shape} and {(data.num_tasks, data.num_features)}; it belongs to other data."
            )
        kind: type = ProximalState if isinstance(server, ProximalServer) else DualState
        if not isinstance(state.server, kind):
            raise ValueError(
                f"Mocha: the state holds a {type(state.server).__name__}, but these settings need a {kind.__name__}; "
                f"choose the same server and kind of regularizer as in the run it comes from."
            )
        beta = problem.loss.project(state.beta.astype(data.y.dtype), data.y)
        v = dual_vectors(data, beta)
        return MochaState(state.round, beta, v, server.adopt(state.server, problem, v))

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
        data, (m, n) = problem.data, state.beta.shape
        old_tasks, d = state.v.shape
        if data.num_nodes < m or data.y.shape[1] < n or data.num_tasks < old_tasks or data.num_features != d:
            raise ValueError(
                f"Mocha: the state has {m} nodes x {n} rows, {old_tasks} tasks and {d} features; the data has "
                f"{data.num_nodes} x {data.y.shape[1]}, {data.num_tasks} and {data.num_features}. New tasks go after "
                f"the old ones: problem.data.append(new)."
            )
        beta = jnp.pad(state.beta, [(0, data.num_nodes - m), (0, data.y.shape[1] - n)])
        beta = problem.loss.project(beta, data.y)
        v, server = dual_vectors(data, beta), self._server(problem)
        return MochaState(state.round, beta, v, server.extend(state.server, problem, v))

    def full_work(self, problem: Problem) -> Array:
        sizes = problem.data.sizes
        steps = jnp.round(self.local_epochs * sizes.astype(problem.data.x.dtype)).astype(jnp.int32)
        return jnp.maximum(steps, jnp.minimum(sizes, 1))

    def step(self, key: Array, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        data, loss, server = problem.data, problem.loss, self._server(problem)
        rows = problem.layout if problem.layout is not None else time_major(data)
        beta, du, steps = ascend(
            key, loss, rows, state.beta,
            w=data.to_nodes(state.server.broadcast),
            q=data.to_nodes(server.curvature(state.server, data)),
            steps=work.budget(),
            passes=math.ceil(self.local_epochs),
        )  # fmt: skip
        gamma = jnp.asarray(self.gamma, data.x.dtype)
        beta = loss.project(state.beta + gamma * (beta - state.beta), data.y)
        round, dv = state.round + 1, gamma * data.to_tasks(du)
        v = lax.cond(round % _REFRESH_EVERY == 0, lambda: dual_vectors(data, beta), lambda: state.v + dv)
        done, full = (data.to_tasks(a.astype(dv.dtype)) for a in (steps, self.full_work(problem)))
        answer = server.respond(problem, state.server, round, beta, v, dv, gamma * safe_ratio(done, full))
        return state.replace(round=round, beta=beta, v=v, server=answer), Info(steps)

    def certify(self, state: MochaState, problem: Problem) -> Certificate:
        return self._server(problem).certify(problem, state.server, state.beta, state.v)

    def weights(self, state: MochaState) -> Array:
        return state.w

    def omega(self, state: MochaState, problem: Problem) -> Any:
        return self._server(problem).omega(problem, state.server)
