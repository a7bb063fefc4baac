"""The paper's mini-batch rivals: few samples per round, whose updates the server combines."""

from __future__ import annotations

from typing import Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Algorithm, Draws
from mocha_jax._algorithms.dual_method import OMEGA_EVERY, DualMethod, MochaState
from mocha_jax._algorithms.primal_method import PrimalMethod, PrimalState
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, Relation, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.local_solver import visiting_order
from mocha_jax._numerics.math import EXACT, safe_ratio
from mocha_jax._problem.problem import Problem
from mocha_jax.regularizers import Learned
from mocha_jax.servers._base import (
    Aggregator,
    NodeUpdate,
    Schedule,
    checked_schedule,
    gain_of_updating,
    is_due,
    keep_relation,
)
from mocha_jax.servers._dual import DualServer
from mocha_jax.systems._base import Info, Work

# Floating-point operations of a sample, per feature: its prediction (2) and the addition of its multiple (2).
_SAMPLE_FLOPS = 4.0


class _Batch(Pytree):
    """Some rows of every node with their contents."""

    rows: Array  # [m, b] which
    real: Array  # [m, b] bool; the others are filled up with any row and count nothing
    x: Array  # [m, b, d]
    y: Array  # [m, b]
    weight: Array  # [m, b] 0 where not real
    count: Array  # [m] int32 real ones


def _batch_of(drawn: Draws, data: TaskData, sizes: Array, limit: int) -> _Batch:
    """The first ``sizes[k]`` rows of node k in that order, at most `limit`.

    All nodes go through their rows in one common random order; restricted to a node's own rows it is uniform.
    """
    (order,), (m, n) = drawn.orders, data.y.shape
    real = data.weight[:, order] > 0
    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    count = jnp.minimum(jnp.minimum(sizes, data.sizes), limit)
    slot = jnp.where(real & (rank < count[:, None]), rank, limit)
    node = jnp.arange(m)[:, None]
    rows = jnp.zeros((m, limit), order.dtype).at[node, slot].set(jnp.broadcast_to(order, (m, n)), mode="drop")
    chosen = jnp.arange(limit, dtype=jnp.int32)[None, :] < count[:, None]
    x, y, weight = (a[node, rows] for a in (data.x, data.y, data.weight))
    return _Batch(rows, chosen, x.astype(data.dtype), y, jnp.where(chosen, weight, 0.0), count)


def _limit(owner: str, batch: object, limit: int | None) -> int | None:
    """The rows to make room for: the largest batch where that is known."""
    check.integers(owner, 1, batch=batch)
    sizes = check.concrete(batch)
    if limit is None:
        return None if sizes is None else int(sizes.max())
    check.integer(owner, 1, limit=limit)
    if sizes is not None and sizes.max() > limit:
        raise ValueError(f"{owner}: batch {sizes.max()} exceeds limit {limit}.")
    return limit


def _batch_work(batch: Hyperparameter | int, limit: int | None, data: TaskData) -> tuple[Array, int]:
    """Samples each node uses in a full round ``[m]``, and the rows to make room for."""
    size = jnp.asarray(batch, jnp.int32)
    if size.ndim:
        raise ValueError("batch is an array: map over it with jax.vmap, the algorithm as argument.")
    most = data.y.shape[1] if limit is None else min(limit, data.y.shape[1])
    return jnp.minimum(data.sizes, jnp.clip(size, 0, most)), most


class _Batched(Algorithm[Problem]):
    """An algorithm with a batch and room for it."""

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; the room follows a changed batch."""
        if "batch" in changes:
            changes = {"limit": None, **changes}
        return super().replace(**changes)

    def draw(self, key: Array | Draws, problem: Problem) -> Draws:
        """Draw the order in which batches take rows."""
        return key if isinstance(key, Draws) else Draws((visiting_order(key, problem.data.y.shape[1]),))


class MiniBatchSdca(_Batched, DualMethod):
    r"""Mini-batch stochastic dual coordinate ascent (E.3).

    Every node takes a random batch of its samples and finds for each the best change of its dual variable *as
    if it were the only one* in the federation; the sum of all is scaled by $\beta / b$, b the size of the
    mini-batch over all nodes. With $\beta = 1$ that is averaging, which is always safe; with
    $\beta = b$ adding up, which can diverge. In between one has to tune.

    Args:
      batch: samples of each node, an integer >= 1; all where it has fewer.
      beta: $\beta \ge 1$; beyond b it acts as b.
      limit: rows to make room for where `batch` is traced; default the largest batch known.
      omega_every: rounds between updates of Omega where it is learned, default 10; a number or a schedule.
      smoothing: as in `Mocha`.
      initial_omega: as in `Mocha`.

    Tuning grids are one call, see `grid`.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> solution = mj.solve(problem, MiniBatchSdca(batch=8, beta=12.0), tol=1e-2)
      >>> solution.status.name
      'CONVERGED'

    References:
      [Takáč et al., Mini-Batch Primal and Dual Methods for SVMs](https://arxiv.org/abs/1303.2314), 2013.
    """

    batch: int | Array | np.ndarray = 1
    beta: Hyperparameter = 1.0
    limit: int | None = static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "limit", _limit("MiniBatchSdca", self.batch, self.limit))
        check.at_least("MiniBatchSdca", 1.0, beta=self.beta)

    def full_work(self, problem: Problem) -> Array:
        return _batch_work(self.batch, self.limit, problem.data)[0]

    def step_flops(self, problem: Problem) -> float:
        return _SAMPLE_FLOPS * problem.data.num_features

    def server_for(self, problem: Problem) -> Aggregator:
        return DualServer("per_task", self.omega_every or OMEGA_EVERY, 1.0, self.smoothing, self.initial_omega)

    def local_update(
        self, drawn: Draws, server: Aggregator, state: MochaState, problem: Problem, work: Work
    ) -> NodeUpdate:
        data, loss, dtype = problem.data, problem.node_loss, problem.data.dtype
        check.scalar("MiniBatchSdca", beta=self.beta)
        full, limit = _batch_work(self.batch, self.limit, data)
        batch = _batch_of(drawn, data, work.budget(full), limit)
        node = jnp.arange(data.num_nodes)[:, None]
        old = state.beta[node, batch.rows]
        z = jnp.einsum("mbd,md->mb", batch.x, data.to_nodes(state.server.model), precision=EXACT)
        own = data.to_nodes(state.server.coupling.diagonal())[:, None]
        kappa = own * batch.weight * jnp.sum(batch.x**2, axis=2)
        total = jnp.sum(batch.count).astype(dtype)
        scale = jnp.minimum(safe_ratio(jnp.asarray(self.beta, dtype), total), 1.0)
        new = loss.project(old + scale * (loss.dual_step(old, z, batch.y, kappa) - old), batch.y)
        change = jnp.where(batch.real, new - old, 0.0)
        beta = loss.project(state.beta.at[node, batch.rows].add(change), data.y)
        dv = jnp.einsum("mb,mbd->md", batch.weight * change, batch.x, precision=EXACT)
        done = batch.count.astype(dtype)
        info = Info(batch.count, done * self.step_flops(problem), jnp.zeros_like(work.active))
        return NodeUpdate(beta, dv, safe_ratio(done, full.astype(dtype)), info)


class SgdState(PrimalState):
    """The state of mini-batch SGD between rounds."""

    @property
    def duals(self) -> None:
        return None


class MiniBatchSgd(_Batched, PrimalMethod):
    r"""Mini-batch stochastic subgradient descent on the primal (E.3).

    In round h, with batches $B_k$ of the $n_k$ samples of node k, for every task of which a node answers,

    $$
    w_t \leftarrow w_t - \eta_h\Big[\sum_{k \in t} \frac{n_k}{|B_k|}\sum_{i\in B_k} c_i\,\ell'(z_i)\,x_i
    + \partial_t R(W)\Big], \qquad \eta_h = \eta\,(1 + h / h_0)^{-p} .
    $$

    The bracket is an unbiased estimate of a subgradient of P; with a batch of all samples it is one. Where only
    some nodes of a task answer, they stand for all of it. Where Omega is singular, all weights are kept in its range.
    The certificate uses the dual point
    $\beta = -\ell'(z)$ of the current weights.

    Args:
      batch: samples of each node, an integer >= 1; all where it has fewer.
      step_size: $\eta > 0$.
      power: $p \ge 0$: 0 for a constant step, 1/2 or 1 for the usual decays.
      horizon: $h_0 > 0$, rounds after which the decay begins to tell.
      limit: rows to make room for where `batch` is traced; default the largest batch known.
      omega_every: rounds between updates of Omega where it is learned, default 10; a number or a schedule.
      smoothing: as in `Mocha`. With (14) and 0 the curvature of R grows without bound as Omega loses directions,
        and a constant step diverges.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Independent(0.1))
      >>> solution = mj.solve(problem, MiniBatchSgd(batch=8, step_size=0.1), tol=1e-2)
      >>> solution.status.name
      'CONVERGED'

    References:
      Shalev-Shwartz et al., Pegasos: Primal Estimated Sub-Gradient Solver for SVM, 2007.
    """

    batch: int | Array | np.ndarray = 1
    step_size: Hyperparameter = 0.1
    power: Hyperparameter = 0.5
    horizon: Hyperparameter = 1.0
    limit: int | None = static(default=None)
    omega_every: Schedule | None = static(default=None)
    smoothing: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", _limit("MiniBatchSgd", self.batch, self.limit))
        check.positive("MiniBatchSgd", step_size=self.step_size, horizon=self.horizon)
        check.nonnegative("MiniBatchSgd", power=self.power, smoothing=self.smoothing)
        if self.omega_every is not None:
            object.__setattr__(self, "omega_every", checked_schedule("MiniBatchSgd", self.omega_every))

    def init(self, problem: Problem) -> SgdState:
        """Start from W = 0."""
        self.expect(problem)
        data = problem.data
        w = jnp.zeros((data.num_tasks, data.num_features), data.dtype)
        relation = problem.regularizer.known_relation("MiniBatchSgd", None, *w.shape)
        return self._state(problem, jnp.zeros((), jnp.int32), w, relation, jnp.inf, jnp.inf)

    def resume(self, state: SgdState, problem: Problem) -> SgdState:
        state, data = self.kept(state, problem, SgdState), problem.data
        relation = keep_relation(problem, state.relation)
        w = state.w.astype(data.dtype)
        change = gain_of_updating(problem, w, relation)
        return self._state(problem, state.round, w, relation, state.gap_before.astype(w.dtype), change)

    def _state(
        self,
        problem: Problem,
        round: Array,
        w: Array,
        relation: Relation,
        gap_before: Array | float,
        change: Array | float,
    ) -> SgdState:
        coupling = problem.regularizer.coupling(problem.data.num_tasks, relation)
        gap_before, change = (jnp.asarray(a, w.dtype) for a in (gap_before, change))
        return SgdState(round, coupling.project_to_range(w), relation, coupling, gap_before, change)

    def full_work(self, problem: Problem) -> Array:
        return _batch_work(self.batch, self.limit, problem.data)[0]

    def step_flops(self, problem: Problem) -> float:
        return _SAMPLE_FLOPS * problem.data.num_features

    def step(self, key: Array | Draws, state: SgdState, problem: Problem, work: Work) -> tuple[SgdState, Info]:
        data, loss, dtype = problem.data, problem.node_loss, problem.data.dtype
        check.scalar("MiniBatchSgd", step_size=self.step_size, power=self.power, horizon=self.horizon)
        full, limit = _batch_work(self.batch, self.limit, data)
        batch = _batch_of(self.draw(key, problem), data, work.budget(full), limit)
        z = jnp.einsum("mbd,md->mb", batch.x, data.to_nodes(state.w), precision=EXACT)
        slope = jnp.where(batch.real, batch.weight * loss.derivative(z, batch.y), 0.0)
        sizes, done = data.sizes.astype(dtype), batch.count.astype(dtype)
        gradient = jnp.einsum("mb,mbd->md", slope, batch.x, precision=EXACT) * safe_ratio(sizes, done)[:, None]
        answered = data.to_tasks(jnp.where(done > 0, sizes, 0.0))
        stand_for_all = safe_ratio(data.to_tasks(sizes), answered)[:, None]
        gradient = stand_for_all * data.to_tasks(gradient) + state.coupling.gradient(state.w)
        eta = self.step_size * (1.0 + state.round.astype(dtype) / self.horizon) ** -jnp.asarray(self.power)
        w = jnp.where(answered[:, None] > 0, state.w - eta * gradient, state.w)
        state = state.replace(round=state.round + 1, w=state.coupling.project_to_range(w))
        if learned := problem.regularizer.learned:
            due = is_due(self.omega_every or OMEGA_EVERY, state.round)
            state = lax.cond(due, lambda: self._relearn(problem, learned, state), lambda: state)
        return state, Info(batch.count, done * self.step_flops(problem), jnp.zeros_like(work.active))

    def _relearn(self, problem: Problem, learned: Learned, state: SgdState) -> SgdState:
        w, before = state.w, self.certify(state, problem).gap
        relation = learned.update_relation(state.relation, w, jnp.asarray(self.smoothing, w.dtype))
        return self._state(problem, state.round, w, relation, before, gain_of_updating(problem, w, state.relation))
