"""MOCHA: Algorithm 1, and its proximal form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax import _check
from mocha_jax._adaptive import AdaptiveServer
from mocha_jax._algorithm import Info
from mocha_jax._dual import OMEGA_EVERY, DualMethod, MochaState
from mocha_jax._local import STEP_FLOPS, ascend
from mocha_jax._math import safe_ratio, zero_tangent
from mocha_jax._objective import node_vectors
from mocha_jax._problem import Problem
from mocha_jax._pytree import Hyperparameter, static
from mocha_jax._rows import BACKENDS, Profile, time_major
from mocha_jax._server import DualServer, DualState, Local, ProximalServer
from mocha_jax._subproblem import Subproblems, theta_of
from mocha_jax._work import Request, Work
from mocha_jax.coupling import SIGMA_PRIME_RULES

SERVERS = ("proximal", "dual")

# Passes after which a measurement of theta reports the bound that it has reached.
_THETA_PASSES = 5000


class SubproblemMethod(DualMethod):
    """Every node works on its subproblem (4). Subclasses say how far."""

    sigma_prime: str = static(default="per_task", kw_only=True)
    gamma: Hyperparameter = dataclasses.field(default=1.0, kw_only=True)
    server: str | None = static(default=None, kw_only=True)
    backend: str = static(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        _check.one_of(name, "sigma_prime", self.sigma_prime, self._rules())
        _check.in_unit_interval(name, open_left=True, gamma=self.gamma)
        if self.server is not None:
            _check.one_of(name, "server", self.server, SERVERS)
        _check.one_of(name, "backend", self.backend, BACKENDS)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.backend == "pallas" and not problem.loss.in_kernel:
            raise ValueError(
                f'{type(self).__name__}: backend="pallas" needs a loss that says it fits the kernel, and '
                f'{type(problem.loss).__name__} does not (see `Loss`, in_kernel=True); use "auto" or "xla".'
            )

    def by_loops(self, problem: Problem) -> Any:
        return self.replace(backend="xla") if self.backend == "auto" and problem.loss.in_kernel else None

    def _rules(self) -> tuple[str, ...]:
        return SIGMA_PRIME_RULES

    def _server(self, problem: Problem) -> Any:
        regularizer = problem.regularizer
        joint = regularizer.learned and regularizer.jointly_convex
        if self.server == "proximal" and not regularizer.jointly_convex:
            raise ValueError(
                f"{type(self).__name__}: the proximal server needs a problem that is convex in W and Omega together, "
                f'and {type(regularizer).__name__} is not; use server="dual".'
            )
        if self.server == "proximal" or (self.server is None and joint):
            return ProximalServer(self.omega_every or 1)
        return self._dual_server()

    def _dual_server(self) -> Any:
        return DualServer(self.sigma_prime, self.omega_every or OMEGA_EVERY, self.gamma, self.smoothing)

    def prepare(self, problem: Problem, profile: Profile = ()) -> Problem:
        data = problem.data
        return problem.replace(data=data.replace(layout=time_major(data, profile, self.backend)))

    def subproblems(self, state: MochaState, problem: Problem) -> Subproblems:
        """The subproblems (4) that the nodes get in the round after `state`."""
        problem = problem if problem.data.layout is not None else self.prepare(problem)
        data, server = problem.data, self._server(problem)
        return Subproblems(
            data, problem.loss, state.beta,
            w=data.to_nodes(state.server.broadcast), q=server.curvature(state.server, data),
        )  # fmt: skip

    def measure_theta(
        self, key: Array, before: MochaState, after: MochaState, problem: Problem, tol: Array
    ) -> tuple[Array, Array]:
        found = self._server(problem).found(after.server, before.beta, after.beta)
        change = (found - before.beta) / jnp.asarray(self.gamma, before.beta.dtype)
        beta = problem.loss.project(before.beta + change, problem.data.y)
        return theta_of(key, self.subproblems(before, problem), beta, tol, passes=_THETA_PASSES)

    def _gamma(self, problem: Problem) -> Array:
        r"""How much of what the nodes find is kept, :math:`\gamma` (Appendix C)."""
        _check.scalar(type(self).__name__, gamma=self.gamma)
        return jnp.asarray(self.gamma, problem.data.dtype)


class Mocha(SubproblemMethod):
    r"""MOCHA (Smith et al. 2017): dual coordinate ascent on all nodes, coupled once a round.

    A round: every node improves its subproblem (4) for as many coordinate steps as its work
    allows and returns :math:`\Delta v`; the server adds them up and broadcasts.

    .. math::
        \beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad V \leftarrow V + \gamma\,\Delta V

    With ``server="dual"`` the server sends :math:`W = \bar M V`, and where :math:`\Omega` is learned, replaces it
    every `omega_every` rounds by the best one for W. With ``server="proximal"`` it solves for W and :math:`\Omega`
    together, close to where they were (see `mocha_jax._server`): on jointly convex problems it ends at the joint
    optimum, which plain alternation approaches ever more slowly or not at all.

    Algorithm 1 as it stands is the dual server with a :math:`\sigma'` that is safe whatever the nodes find, and so
    pessimistic, say ``sigma_prime="per_task"``. By default nodes take bolder steps and keep the last few dual points
    they found, and the dual server weighs these anew in every round, so that the dual never gets worse: see
    `mocha_jax._recombine`. Where a local epoch is far from solving a subproblem, or many tasks are coupled, that saves
    most of the rounds, for a few numbers more in each message, `memory` vectors of dual variables on every node, and
    more work at the server.

    Args:
      local_epochs: passes over a node's own data in a full round, > 0; need not be whole.
      sigma_prime: for the dual server ``"adaptive"``, or a safe rule, see `Coupling.sigma_prime`.
      memory: older points that a node keeps with an adaptive :math:`\sigma'`, >= 1.
      gamma: aggregation parameter :math:`\gamma \in (0, 1]` (Appendix C); an array leaf.
      omega_every: rounds between updates of :math:`\Omega`; default 1 for the proximal server, 10 for the dual one. The
        proximal server lets the nodes go on with the same subproblem in between.
      server: ``"proximal"`` or ``"dual"``; default proximal where Omega is learned in a jointly convex
        problem, dual otherwise.
      smoothing: :math:`\epsilon \ge 0` for the dual server and (14): Omega is fitted to
        :math:`(WW^\top + \epsilon I)^{1/2}`. With 0, the paper's update, Omega never regains a direction that
        W has lost.
      backend: what does the local work: ``"xla"``, loops that XLA compiles; ``"pallas"``, one kernel for each pass
        over the rows, interpreted where there is no accelerator; ``"auto"``, the kernel in what is compiled for GPUs
        and TPUs, in float32 and for losses that say they fit, as the built-in ones do, and the loops otherwise. Up to
        4096 (GPU) or 3000 (TPU) features, on a TPU also 131,072 samples a node; beyond that by loops. Derivatives are
        always those of the loops.

    >>> import jax, numpy as np, mocha_jax as mj
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(20, 3)).astype("f") for _ in range(4)]
    >>> data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(1.0))
    >>> algorithm = Mocha()
    >>> state = algorithm.init(problem)
    >>> work = mj.systems.Full().work(jax.random.key(0), data, algorithm.request(problem))
    >>> state, info = algorithm.step(jax.random.key(1), state, problem, work)
    >>> info.steps.tolist(), state.w.shape
    ([20, 20, 20, 20], (4, 3))
    """

    local_epochs: float = static(default=1.0)
    sigma_prime: str = static(default="adaptive", kw_only=True)
    memory: int = static(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.scalar("Mocha", local_epochs=self.local_epochs)
        _check.positive("Mocha", local_epochs=self.local_epochs)
        _check.integer("Mocha", 1, memory=self.memory)

    def _rules(self) -> tuple[str, ...]:
        return (*SIGMA_PRIME_RULES, "adaptive")

    def _dual_server(self) -> Any:
        if self.sigma_prime != "adaptive":
            return super()._dual_server()
        every = self.omega_every or OMEGA_EVERY
        return AdaptiveServer(DualServer("per_task", every, 1.0, self.smoothing), self.memory)

    def step(self, key: Array, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        if not isinstance(self._server(problem), AdaptiveServer):
            return super().step(key, state, problem, work)
        return _adaptive_step(self, key, state, problem, work)

    def prepare(self, problem: Problem, profile: Profile = ()) -> Problem:
        spread = problem.data.spread
        if spread is not None and isinstance(self._server(problem), AdaptiveServer):
            # The weighing goes back and forth between all tasks: every device does all of it.
            spread = dataclasses.replace(spread, tasks_too=False)
        return super().prepare(problem.replace(data=problem.data.replace(spread=spread)), profile)

    def full_work(self, problem: Problem) -> Array:
        sizes = problem.data.sizes
        steps = jnp.round(self.local_epochs * sizes.astype(problem.data.dtype)).astype(jnp.int32)
        return jnp.maximum(steps, jnp.minimum(sizes, 1))

    def step_flops(self, problem: Problem) -> float:
        return STEP_FLOPS * problem.data.num_features

    def fixed_flops(self, problem: Problem) -> Array | float:
        if not isinstance(self._server(problem), AdaptiveServer):
            return 0.0
        # The predictions of all rows, for the slopes.
        return 2.0 * problem.data.num_features * problem.data.sizes.astype(problem.data.dtype)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        request, server = super().request(problem, round), self._server(problem)
        if not isinstance(server, AdaptiveServer):
            return request
        # Down come sigma' and a weight for every point, up go the slopes of all but the one where the node stands.
        return request.replace(down=request.down + self.memory + 3.0, up=request.up + self.memory + 1.0)

    def _local(self, key: Array, state: MochaState, problem: Problem, work: Work) -> Local:
        sub, full, gamma = self.subproblems(state, problem), self.full_work(problem), self._gamma(problem)
        beta, u, steps = ascend(
            key, sub.loss, sub.data.layout, sub.beta, sub.w, sub.q, work.budget(full),
            passes=math.ceil(self.local_epochs), share=gamma,
        )  # fmt: skip
        done = steps.astype(u.dtype)
        flops = done * self.step_flops(problem) + jnp.where(steps > 0, self.fixed_flops(problem), 0.0)
        info = Info(steps, flops, jnp.zeros_like(work.active))
        return Local(beta, u, gamma * safe_ratio(done, full.astype(u.dtype)), info)


@jax.custom_jvp
def _adaptive_step(
    algorithm: Mocha, key: Array, state: MochaState, problem: Problem, work: Work
) -> tuple[MochaState, Info]:
    """A round whose derivative is that of a round with a safe sigma' from the same point.

    Both have the same fixed point, but only the second is a contraction: once the duals stand still the weights of
    points that hardly differ are arbitrary, and derivatives of rounds with too small a sigma' grow without bound.
    """
    return DualMethod.step(algorithm, key, state, problem, work)


@_adaptive_step.defjvp
def _adaptive_step_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    algorithm, key, state, problem, work = primals
    d_algorithm, _, d_state, d_problem, _ = tangents

    def safe(algorithm: Mocha, beta: Array, v: Array, dual: DualState, problem: Problem) -> tuple[Array, ...]:
        plain = MochaState(state.round, beta, v, dual)
        after, _ = algorithm.replace(sigma_prime="per_task").step(key, plain, problem, work)
        return after.beta, after.v, after.server, node_vectors(problem.data, after.beta)

    at = algorithm, state.beta, state.v, state.server.dual, problem
    along = d_algorithm, d_state.beta, d_state.v, d_state.server.dual, d_problem
    d_beta, d_v, d_dual, d_own = jax.jvp(safe, at, along)[1]
    after, info = _adaptive_step(*primals)
    still, d_info = jax.tree.map(zero_tangent, (after, info))
    d_server = still.server.replace(dual=d_dual, own=d_own)
    return (after, info), (still.replace(beta=d_beta, v=d_v, server=d_server), d_info)
