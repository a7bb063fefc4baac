r"""MOCHA: Algorithm 1, and its proximal form; and the methods in general whose nodes work on the subproblems (4)."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Self

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.base import Drawn, Draws
from mocha_jax._algorithms.dual_method import OMEGA_EVERY, DualMethod, MochaState
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import BACKENDS, BucketSizes, bucket_sizes, time_major
from mocha_jax._node.local_accuracy import theta_of
from mocha_jax._node.local_solver import STEP_FLOPS, Subproblems, ascend, visiting_orders
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.gap import jointly_bounded
from mocha_jax._problem.problem import Problem
from mocha_jax.coupling import SIGMA_PRIME_RULES
from mocha_jax.servers._adaptive import AdaptiveServer
from mocha_jax.servers._base import Aggregator, NodeUpdate, Schedule
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
    custom_server: Aggregator | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check.one_of(name, "sigma_prime", self.sigma_prime, self._rules())
        check.in_unit_interval(name, open_left=True, gamma=self.gamma)
        if self.server is not None:
            check.one_of(name, "server", self.server, SERVERS)
        check.one_of(name, "backend", self.backend, BACKENDS)
        if self.custom_server is not None:
            check.instance(
                name, "custom_server", self.custom_server, Aggregator, "a subclass of mocha_jax.servers.Aggregator"
            )

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

    def server_for(self, problem: Problem) -> Aggregator:
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

    def _dual_server(self) -> Aggregator:
        every = self.omega_every or OMEGA_EVERY
        return DualServer(self.sigma_prime, every, self.gamma, self.smoothing, self.initial_omega)

    def step(self, key: Drawn, state: MochaState, problem: Problem, work: Work) -> tuple[MochaState, Info]:
        return super().step(key, state, self.laid_out(problem), work)

    def local_update(
        self, drawn: Drawn, server: Aggregator, state: MochaState, problem: Problem, work: Work
    ) -> NodeUpdate:
        subproblems = self._subproblems(server, state, problem)
        return self.improve(drawn, subproblems, problem, work, server.node_flops(problem))

    @abstractmethod
    def improve(
        self, drawn: Drawn, subproblems: Subproblems, problem: Problem, work: Work, extra_flops: Array | float = 0.0
    ) -> NodeUpdate:
        """Do every node's work of a round on these subproblems.

        Args:
          drawn: from `draw`.
          subproblems: of all nodes.
          problem: for its samples, which are those of the subproblems.
          work: how much each node does.
          extra_flops: what a round costs a node for the server's sake, [] or ``[m]``.
        """

    def bucketing(self, data: TaskData) -> BucketSizes:
        return bucket_sizes(data)

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

    def _subproblems(self, server: Aggregator, state: MochaState, problem: Problem) -> Subproblems:
        problem = self.laid_out(problem)
        data = problem.data
        return Subproblems(
            data, problem.node_loss, state.beta,
            w=data.to_nodes(state.server.broadcast), q=server.curvature(state.server, data),
        )  # fmt: skip

    def measure_theta(
        self, key: Array, before: MochaState, after: MochaState, problem: Problem, tol: Array
    ) -> tuple[Array, Array]:
        local = self.server_for(problem).local_duals(after.server, before.beta, after.beta)
        change = (local - before.beta) / jnp.asarray(self.gamma, before.beta.dtype)
        beta = problem.node_loss.project(before.beta + change, problem.data.y)
        return theta_of(key, self.subproblems(before, problem), beta, tol, passes=_THETA_PASSES)

    def _gamma(self, problem: Problem) -> Array:
        r"""Return the aggregation parameter $\gamma$ (Appendix C) in the data's dtype."""
        check.scalar(type(self).__name__, gamma=self.gamma)
        return jnp.asarray(self.gamma, problem.data.dtype)


class Mocha(SubproblemMethod):
    r"""MOCHA (Smith et al. 2017): dual coordinate ascent on all nodes, coupled once a round.

    A round: every node improves its subproblem (4) for as many coordinate steps as its work
    allows and returns $\Delta v$; the server adds them up and broadcasts.

    $$
    \beta \leftarrow \beta + \gamma\,\Delta\beta, \qquad V \leftarrow V + \gamma\,\Delta V
    $$

    With ``server="dual"`` the server sends $W = \bar M V$, and where $\Omega$ is learned, replaces it
    every `omega_every` rounds by the best one for W. With ``server="proximal"`` it solves for W and $\Omega$
    together, close to their last values (`servers.ProximalServer`): on jointly convex problems it ends at the joint
    optimum, which plain alternation approaches ever more slowly or not at all.

    Algorithm 1 as published, `algorithm1`, is the dual server with a $\sigma'$ that is always safe,
    and so pessimistic. By default nodes take bolder steps and keep the last few dual points they found, and the
    dual server weighs these anew in every round, so that the dual never gets worse (`servers.AdaptiveServer`).
    Where a local epoch is far from solving a subproblem, or many tasks are coupled, that saves most of the rounds, for
    a few numbers more in each message, `memory` vectors of dual variables on every node, and more work at the server.

    Args:
      local_epochs: passes over a node's own data in a full round, > 0; need not be whole.
      sigma_prime: for the dual server ``"adaptive"``, or a safe rule, see `Coupling.sigma_prime`.
      memory: older points that a node keeps with an adaptive $\sigma'$, >= 1.
      gamma: aggregation parameter $\gamma \in (0, 1]$ (Appendix C); an array leaf.
      omega_every: rounds $H_i$ before the i-th update of $\Omega$: a number, or a tuple of them whose last one
        repeats; default 1 for the proximal server, 10 for the dual one. The
        proximal server lets the nodes continue with the same subproblem in between.
      server: ``"proximal"`` or ``"dual"``; default proximal where Omega is learned in a jointly convex
        problem, dual otherwise.
      smoothing: $\epsilon \ge 0$ for the dual server and (14): Omega is fitted to
        $(WW^\top + \epsilon I)^{1/2}$. With 0, the paper's update, Omega never regains a direction that
        W has lost.
      initial_omega: $\Omega_0$ for the dual server ``[num_tasks, num_tasks]``, positive semi-definite and
        feasible for the regularizer; default the regularizer's own, with no task related to another. An array leaf.
      backend: the program of the local work: ``"xla"``, loops that XLA compiles; ``"pallas"``, one kernel for each pass
        over the rows, interpreted where there is no accelerator; ``"auto"``, the kernel in what is compiled for GPUs
        and TPUs, in float32 and for losses marked for it, as the built-in ones are, and the loops otherwise. Up to
        4096 (GPU) or 3000 (TPU) features, on a TPU also 131,072 samples a node; beyond that loops are used. Derivatives
        are always those of the loops.
      custom_server: a server of your own, in place of the built-in ones; a subclass of `servers.Aggregator`.

    Examples:
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

    References:
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
      - [Shalev-Shwartz and Zhang, Stochastic Dual Coordinate Ascent Methods](https://arxiv.org/abs/1209.1873), 2013.
    """

    local_epochs: float = static(default=1.0)
    sigma_prime: str = static(default="adaptive", kw_only=True)
    memory: int = static(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.scalar("Mocha", local_epochs=self.local_epochs)
        check.positive("Mocha", local_epochs=self.local_epochs)
        check.integer("Mocha", 1, memory=self.memory)

    def _rules(self) -> tuple[str, ...]:
        return (*SIGMA_PRIME_RULES, "adaptive")

    def _dual_server(self) -> Aggregator:
        if self.sigma_prime != "adaptive":
            return super()._dual_server()
        every = self.omega_every or OMEGA_EVERY
        dual = DualServer("per_task", every, 1.0, self.smoothing, self.initial_omega)
        return AdaptiveServer(dual, self.memory, self.backend)

    def by_loops(self, problem: Problem) -> Mocha | None:
        # Points are weighed by a kernel whatever the loss.
        if self.sigma_prime == "adaptive" and self.backend == "auto":
            return self.replace(backend="xla")
        return super().by_loops(problem)

    def full_work(self, problem: Problem) -> Array:
        sizes = problem.data.sizes
        steps = jnp.round(self.local_epochs * sizes.astype(problem.data.dtype)).astype(jnp.int32)
        return jnp.maximum(steps, jnp.minimum(sizes, 1))

    def step_flops(self, problem: Problem) -> float:
        return STEP_FLOPS * problem.data.num_features

    def draw(self, key: Array | Draws, problem: Problem) -> Draws:
        """Draw the order in which the nodes visit their rows, for every pass."""
        if isinstance(key, Draws):
            return key
        return Draws(visiting_orders(key, self.laid_out(problem).data, math.ceil(self.local_epochs)))

    def improve(
        self, drawn: Draws, subproblems: Subproblems, problem: Problem, work: Work, extra_flops: Array | float = 0.0
    ) -> NodeUpdate:
        full, gamma = self.full_work(problem), self._gamma(problem)
        beta, u, steps = ascend(
            drawn.orders,
            subproblems.loss,
            subproblems.data,
            subproblems.beta,
            subproblems.w,
            subproblems.q,
            work.budget(full),
            share=gamma,
        )
        done = steps.astype(u.dtype)
        flops = done * self.step_flops(problem) + jnp.where(steps > 0, extra_flops, 0.0)
        info = Info(steps, flops, jnp.zeros_like(work.active))
        return NodeUpdate(beta, u, gamma * safe_ratio(done, full.astype(u.dtype)), info)


def algorithm1(
    local_epochs: float = 1.0,
    *,
    sigma_prime: str = "lemma9",
    gamma: Hyperparameter = 1.0,
    omega_every: Schedule | None = None,
    initial_omega: Hyperparameter | None = None,
) -> Mocha:
    r"""Return Algorithm 1 of the paper as published: `Mocha` with the dual server and a safe $\sigma'$.

    The lines of the algorithm correspond to these arguments, here and of `run` or `solve`:

    - *Input*: data and loss are the problem's; $\Omega_0$ is `initial_omega`.
    - *Starting point* $\alpha^{(0)} = 0, v^{(0)} = 0$. (If the duals of a loss cannot be 0, the nearest feasible ones.)
    - *Set $\sigma'$ and $H_i$*: `sigma_prime` is the rule, applied to every new $\Omega$; `omega_every` has $H_0, H_1,
      \dots$, the federated iterations before each update of $\Omega$.
    - *Call the local solver, returning a $\theta_t^h$-approximate solution*: coordinate ascent for as many steps as
      ``systems`` says, at most `local_epochs` passes.
    - *Update, return, reduce*: with $\gamma$ of Appendix C; 1, as in Algorithm 1, by default.
    - *Update $\Omega$ centrally based on $w(\alpha)$*: ``problem.regularizer.learned.update_relation``.

    Args:
      local_epochs: passes over a node's own data in a full round.
      sigma_prime: ``"lemma9"``, eq. (29), one number for all tasks; or ``"per_task"``, Remark 5.
      gamma: aggregation parameter $\gamma \in (0, 1]$.
      omega_every: $H_i$: one number of rounds, default 10, or a tuple whose last one repeats.
      initial_omega: $\Omega_0$, see `Mocha`; default no task related to another.

    Returns:
      The algorithm.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 4, 6).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1))
      >>> alike = 0.9 * np.ones((4, 4)) / 4 + 0.1 * np.eye(4) / 4  # trace 1
      >>> method = algorithm1(omega_every=(2, 5, 10), initial_omega=alike)
      >>> def omega_after(rounds):
      ...     state, _ = mj.run(problem, method, jax.random.key(1), num_rounds=rounds)
      ...     return problem.relationship(4, method.relation(state, problem))
      >>> omegas = {rounds: omega_after(rounds) for rounds in (1, 2, 6, 7)}
      >>> bool(np.allclose(omegas[1], alike, atol=1e-6)), bool(np.allclose(omegas[2], alike, atol=1e-3))
      (True, False)
      >>> bool(np.allclose(omegas[6], omegas[2])), bool(np.allclose(omegas[7], omegas[2], atol=1e-3))
      (True, False)

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    return Mocha(
        local_epochs, server="dual", sigma_prime=sigma_prime, gamma=gamma, omega_every=omega_every,
        initial_omega=initial_omega,
    )  # fmt: skip
