r"""Dual coordinate ascent whose messages hardly depend on any one sample."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._algorithms.dual_method import OMEGA_EVERY
from mocha_jax._algorithms.primal_method import PrimalMethod, PrimalState
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, Relation, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.private_gradients import ExampleLevel, Spent, check_same_weights
from mocha_jax._numerics.math import EXACT, safe_ratio, uniform_bits
from mocha_jax._problem.problem import Problem
from mocha_jax.coupling import Coupling
from mocha_jax.losses import Loss
from mocha_jax.servers._base import Schedule, checked_schedule, gain_of_updating, is_due, keep_relation
from mocha_jax.systems._base import Info, Work

# Floating-point operations of a sample, per feature: its prediction (2) and the addition of its multiple (2).
_SAMPLE_FLOPS = 4.0

# Of 2^32, and so much less than all that a share in float32 times it is never above the share of 2^32.
_ALL = 2.0**32 * (1.0 - 2.0**-22)


class NodeState(Pytree):
    """The state that nodes keep between rounds."""

    beta: Array  # [m, n] duals, which stay there
    told: Array  # [m, d] the sum of all that each has published
    spent: Spent  # a step is a round in which it published anything


class PrivateSdcaState(PrimalState):
    """The state of `PrivateSdca` between rounds."""

    nodes: NodeState

    @property
    def duals(self) -> None:
        return None  # the weights do not follow from them


class PrivateSdca(PrimalMethod):
    r"""Mini-batch dual ascent with differential privacy of every sample: MOCHA's messages with noise.

    The weights follow from sums over samples, $W = \bar M V$ with $v_t = \sum_i c_i\beta_ix_i$. A node keeps its duals
    $\beta$. In a round it draws each of its samples with probability q, by itself; takes for each the step $\delta_i$
    of its dual that is best for a multiple a of the curvature of all of them together, cut to $|\delta_i|\,\|x_i\|
    \le C$; and publishes

    $$
    u = c\Bigl(\sum_i \delta_i x_i + \mathcal N(0, z^2C^2 I)\Bigr).
    $$

    The server adds u to v. Weights, means of tasks and a learned relationship are computed of what is published.

    **Theorem.** Rounds of one node are as private as so many Gaussian mechanisms with noise z on Poisson samples of
    share q: the duals need no noise. Let data D have a sample j that D' lacks, and let the adversary know the draws of
    all other samples, which have one law under both. A sample's dual is a function of that sample, its own draws, and
    what was published before; so the sum over the others is the same under D and D'. Under D', u is Gaussian around
    it. Under D it is a mixture over j's draws of Gaussians around it, or, if j is drawn, around a point at most C away;
    and j is drawn by a coin that is independent of all before. Its divergences from the former, both ways, are at most
    those of the sampled Gaussian mechanism, since they are convex; and they add up over the rounds.

    **Assumptions.** A node's number of samples is public, and its samples have the same weight: others are refused.
    Its noise is drawn where the adversary cannot predict it: in a simulation it follows from the run's key, which shows
    what privacy costs and protects nothing. The duals stay secret, and so do the objective, the gaps and the steps of
    a history, which are computed from the samples.

    `with_budget` chooses the noise for an $(\varepsilon, \delta)$. A node that has taken the rounds that it may
    publishes nothing more.

    Args:
      privacy: noise z, rounds, and clip C in the unit of labels times features; None has neither noise nor limit.
      share: q in (0, 1].
      caution: a, of the curvature with which all steps together are safe; smaller ones are faster, and less stable.
      omega_every: rounds between updates of Omega where it is learned, default 10; a number or a schedule.
      smoothing: as in `Mocha`; default the mean square length of the tasks' weights.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5, smallest=200, largest=300).data
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(10.0, 1.0))
      >>> private = mj.privacy.with_budget(
      ...     mj.privacy.PrivateSdca(), problem, epsilon=3.0, delta=1e-3, rounds=40, clip=0.1
      ... )
      >>> solution = mj.solve(problem, private, tol=None, max_rounds=40)
      >>> bool((mj.privacy.spent(private, problem, solution.state, delta=1e-3) <= 3.0).all())
      True

    References:
      - [Damaskinos et al., Differentially Private Stochastic Coordinate Descent](https://arxiv.org/abs/2006.07272),
        2020.
      - [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """

    privacy: ExampleLevel | None = None
    share: Hyperparameter = 0.3
    caution: Hyperparameter = 0.2
    omega_every: Schedule = static(default=OMEGA_EVERY)
    smoothing: Hyperparameter | None = dataclasses.field(default=None)

    def __post_init__(self) -> None:
        name = "PrivateSdca"
        if self.privacy is not None:
            check.instance(name, "privacy", self.privacy, ExampleLevel, "privacy.ExampleLevel(noise=1.0, steps=100)")
        check.in_unit_interval(name, open_left=True, share=self.share)
        check.positive(name, caution=self.caution)
        if self.smoothing is not None:
            check.nonnegative(name, smoothing=self.smoothing)
        object.__setattr__(self, "omega_every", checked_schedule(name, self.omega_every))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_same_weights(self.name, problem.data)
        check_starts_at_zero(self.name, problem.node_loss, problem.data)

    def init(self, problem: Problem) -> PrivateSdcaState:
        """Start from W = 0 and duals of 0."""
        self.expect(problem)
        data = problem.data
        shape = data.num_tasks, data.num_features
        told = jnp.zeros((data.num_nodes, data.num_features), data.dtype)
        nodes = NodeState(jnp.zeros_like(data.y), told, Spent.nothing(data.num_nodes))
        relation = problem.regularizer.known_relation(self.name, None, *shape)
        return self._state(problem, jnp.zeros((), jnp.int32), nodes, relation)

    def resume(self, state: PrivateSdcaState, problem: Problem) -> PrivateSdcaState:
        state, data = self.kept(state, problem, PrivateSdcaState), problem.data
        if state.nodes.beta.shape != data.y.shape:
            raise ValueError(
                f"{self.name}: the state has duals {state.nodes.beta.shape}, but the problem's data needs "
                f"{data.y.shape}; it belongs to other data."
            )
        beta = problem.node_loss.project(state.nodes.beta.astype(data.dtype), data.y)
        nodes = state.nodes.replace(beta=beta, told=state.nodes.told.astype(data.dtype))
        return self._state(problem, state.round, nodes, keep_relation(problem, state.relation))

    def _state(self, problem: Problem, round: Array, nodes: NodeState, relation: Relation) -> PrivateSdcaState:
        w, coupling = self.model(problem, nodes.told, relation)
        never = jnp.full((), jnp.inf, w.dtype)
        return PrivateSdcaState(round, w, relation, coupling, never, gain_of_updating(problem, w, relation), nodes)

    def model(self, problem: Problem, told: Array, relation: Relation) -> tuple[Array, Coupling]:
        """The weights that follow from what nodes have published and from Omega, and its coupling."""
        coupling = problem.regularizer.coupling(problem.data.num_tasks, relation)
        return coupling.apply(problem.data.to_tasks(told)), coupling

    def updated(self, problem: Problem, round: Array, told: Array, relation: Relation) -> Relation:
        """Omega after a round: where it is learned and due, the best one for the weights."""
        learned = problem.regularizer.learned
        if learned is None:
            return relation
        w = self.model(problem, told, relation)[0]
        smoothing = jnp.mean(jnp.sum(w**2, axis=1)) if self.smoothing is None else jnp.asarray(self.smoothing, w.dtype)
        due = is_due(self.omega_every, round)
        return lax.cond(due, lambda: learned.update_relation(relation, w, smoothing), lambda: relation)

    def full_work(self, problem: Problem) -> Array:
        check.scalar(self.name, share=self.share)
        share = jnp.asarray(self.share, problem.data.dtype)
        return jnp.ceil(share * problem.data.sizes.astype(share.dtype)).astype(jnp.int32)

    def step_flops(self, problem: Problem) -> float:
        return _SAMPLE_FLOPS * problem.data.num_features

    def step(self, key: Array, state: PrivateSdcaState, problem: Problem, work: Work) -> tuple[PrivateSdcaState, Info]:
        data = problem.data
        stiffness = data.to_nodes(safe_curvature(state.coupling, data))
        full = self.full_work(problem)
        numbers = jnp.arange(data.num_nodes, dtype=jnp.int32)
        nodes, drawn = self.published(
            key, state.nodes, numbers, problem, data.to_nodes(state.w), stiffness, work.budget(full)
        )
        round = state.round + 1
        after = self._state(problem, round, nodes, self.updated(problem, round, nodes.told, state.relation))
        return after, Info(drawn, drawn.astype(data.dtype) * self.step_flops(problem), jnp.zeros_like(work.active))

    def published(
        self, key: Array, state: NodeState, numbers: Array, problem: Problem, w: Array, stiffness: Array, steps: Array
    ) -> tuple[NodeState, Array]:
        """Do the nodes' part of a round.

        Args:
          key: of the round; what follows from it is secret.
          state: of the nodes.
          numbers: of the nodes among all ``[m]`` int32, for what differs between their budgets.
          problem: their samples.
          w: the weights that came down ``[m, d]``.
          stiffness: with which all steps of a node together are safe ``[m]``.
          steps: samples in the mean ``[m]``, at most those of `full_work`; with fewer, fewer are drawn.

        Returns:
          Their state after it, and how many samples were drawn ``[m]``, which is not published.
        """
        data, loss, dtype = problem.data, problem.node_loss, problem.data.dtype
        of_draws, of_noise = jax.random.split(key)
        may = steps > 0
        if self.privacy is not None:
            may &= self.privacy.left(state.spent.steps, numbers) > 0
        full = self.full_work(problem)
        share = jnp.asarray(self.share, dtype) * jnp.minimum(safe_ratio(steps.astype(dtype), full.astype(dtype)), 1.0)
        bits = jax.vmap(lambda k: uniform_bits(jax.random.fold_in(of_draws, k), data.y.shape[1]))(numbers)
        chance = (share * _ALL).astype(jnp.uint32)
        drawn = (data.weight > 0) & may[:, None] & ((bits < chance[:, None]) | (share >= 1.0)[:, None])

        weight = jnp.max(data.weight, axis=1)  # of each of a node's samples
        squares = jnp.sum(jnp.square(data.x.astype(dtype)), axis=2)
        together = jnp.asarray(self.caution, dtype) * share * data.sizes.astype(dtype) * weight * stiffness
        z = jnp.einsum("mnd,md->mn", data.x.astype(dtype), w, precision=EXACT)
        change = loss.dual_step(state.beta, z, data.y, together[:, None] * squares) - state.beta
        # Of weights that overflow: a node that would not answer them would tell something of its samples.
        change = jnp.where(jnp.isfinite(change), change, 0.0)
        noise, multiple = jnp.zeros_like(w), jnp.zeros_like(share)
        if self.privacy is not None:
            clip, multiple = jnp.asarray(self.privacy.clip, dtype), self.privacy.noise_of(numbers, dtype)
            limit = safe_ratio(clip, jnp.sqrt(squares))
            change = jnp.clip(change, -limit, limit)
            normal = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(of_noise, k), w.shape[1:], dtype))(numbers)
            noise = (multiple * clip)[:, None] * normal
        change = jnp.where(drawn, change, 0.0)
        said = jnp.einsum("mn,mnd->md", change, data.x.astype(dtype), precision=EXACT) + noise
        told = state.told + jnp.where(may[:, None], weight[:, None] * said, 0.0)
        beta = loss.project(state.beta + change, data.y)
        spent = state.spent.after(may.astype(jnp.int32), multiple, share)
        return NodeState(beta, told, spent), jnp.sum(drawn, axis=1, dtype=jnp.int32)

    def planned_steps(self, problem: Problem, rounds: int) -> Array:
        """See `BudgetedTrainer`."""
        return jnp.full((problem.data.num_nodes,), rounds, jnp.int32)

    def taken(self, problem: Problem, state: PrivateSdcaState) -> Spent:
        """See `BudgetedTrainer`."""
        return state.nodes.spent

    def sampling(self, problem: Problem, samples: int) -> tuple[float, bool]:
        """See `BudgetedTrainer`."""
        return float(self.share), True


def safe_curvature(coupling: Coupling, data: TaskData) -> Array:
    """Curvatures with which all nodes may change their vectors at once, of every task."""
    return coupling.sigma_prime("per_task", 1.0, data.nodes_per_task) * coupling.diagonal()


def check_starts_at_zero(owner: str, loss: Loss, data: TaskData) -> None:
    """Raise where duals of 0 are not feasible: then a sum of changes would not be the sum."""
    first = check.concrete(jnp.where(data.weight > 0, loss.project(jnp.zeros_like(data.y), data.y), 0.0))
    if first is not None and first.any():
        raise ValueError(f"{owner}: duals of 0 are not feasible for {type(loss).__name__}; take another loss.")
