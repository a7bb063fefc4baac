r"""The central node that needs no safe $\sigma'$: it recombines the points that the nodes have found.

Node k keeps points $\beta_{k0}$ (where it stands), $\beta_{k1}$ (what it has just found) and some older
ones. All are feasible, so are their mixtures, and since $\ell^*$ is convex, moving to a mixture changes the dual
by at most

$$
\sum_{k,j} a_{kj}\,\gamma_{kj} + R^*\Big(\sum_j a_{kj} (v_{kj} - v_{k0})\Big), \qquad
\gamma_{kj} = \sum_i c_{ki}\left[\ell^*(-\beta_{kji}) - \ell^*(-\beta_{k0i}) + z_{ki}(\beta_{kji} - \beta_{k0i})
\right],
$$

z the predictions of the weights W that were broadcast. The central node knows this bound: the vectors v it was sent
anyway, and of every point one number $\gamma$, its slope. It minimises it over weights in a simplex per node
(`mocha_jax.servers._quadratic_programs`) and sends them back, a few numbers a node. Whatever the nodes found, the dual
never gets worse, so no safe $\sigma'$ is needed: that would be one weight for all nodes and rounds, chosen before
anything was found. In the primal, this is a bundle method: every node's data term is replaced by the largest of a few
of its lower bounds, and R is kept as it is.

Near the optimum a slope is a small difference of large numbers, and a gap can be as large as the square root of what
the dual lacks: to see an improvement as a difference of two values of the dual would be to stop at a gap of
$\sqrt\epsilon$. So nodes add up $\gamma$ sample by sample, from the change of each dual
(`Loss.fenchel_young_change`); lengths are measured relative to each node's longest, for duals are as small as
$\lambda$; and mixtures are told by their distance from where a node stands: one that does not move stays what
it is to the last bit.

The curvature $\sigma'_t\bar M_{tt}$ of the nodes' subproblems is far below the safe one, so that they find points far
from where they stand. How far below is learned on the way: where new points get large weights the nodes were too timid,
where they get almost none too bold. It is one factor for all nodes, for what they find fits together or does not, times
one for each that stays close to 1, for some are nearer to their optimum than others or answer less often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.devices import on_every_device
from mocha_jax._core.pytree import Pytree, Relation, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio, total
from mocha_jax._problem.gap import Certificate
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss
from mocha_jax.servers._base import REFRESH_EVERY, Aggregator, NodeUpdate, ServerState, is_due
from mocha_jax.servers._dual import DualServer, DualState
from mocha_jax.servers._quadratic_programs import Consensus, Tasks, best_mixture, consensus
from mocha_jax.servers._quadratic_programs_kernels import by_platform
from mocha_jax.systems._base import Request

# The least sigma', as a share of the largest safe one's inverse. Where one epoch is far from solving the subproblem it
# pays to be bold even if little is coupled: the point found is farther away, and the mixture takes what is good of it.
_SMALLEST_SIGMA = 1e-3

# The mean weight of new points that sigma' is steered to, on a log scale by this share of the way, and no more than
# that factor is seen; and a node's weight to the mean of all.
_TARGET_WEIGHT, _RATE, _NODE_RATE, _MAX_FACTOR = 0.1, 0.3, 0.1, 4.0

# Within that factor of what is common a node's own sigma' stays.
_NODE_RANGE = 2.0


class DualPoint(Pytree):
    """A dual point of every node, with what the central node knows of it."""

    beta: Array  # [m, n]
    v: Array  # [m, d] each node's dual vector


def slopes(problem: Problem, model: Array, betas: Sequence[Array]) -> Array:
    r"""$\gamma$ ``[p - 1, m]`` of all points but the first, where each node stands.

    Args:
      problem: the problem.
      model: the weights W ``[num_tasks, d]`` that the first points imply.
      betas: the p points, each ``[m, n]``.
    """
    return jnp.stack(problem.data.sum_over_rows(_slopes, problem.node_loss, problem.data.to_nodes(model), *betas))


def _slopes(loss: Loss, z: Array, y: Array, current: Array, *betas: Array) -> list[Array]:
    """Return every sample's slope. Both points have the same loss at z: what changes is the Fenchel-Young term."""
    return [loss.fenchel_young_change(z, current, beta, y) for beta in betas]


def mixture_of_points(weights: Iterable[Array], points: Iterable[Array]) -> Array:
    """Every node's mixture of p points ``[m, ...]``, with p weights ``[m]`` that sum to one."""
    (_, *shares), (first, *others) = weights, points
    return first + total(expand(a, point) * (point - first) for a, point in zip(shares, others, strict=True))


def expand(by_node: Array, like: Array) -> Array:
    """``[m]`` to ``[m, 1, ...]``."""
    return jnp.expand_dims(by_node, range(by_node.ndim, like.ndim))


class AdaptiveState(Pytree):
    """The recombining server between rounds."""

    dual: DualState  # its sigma is a safe one
    scale: Array  # [] sigma' of the next round, where that is below the safe one
    node_scale: Array  # [m] times this
    own: Array  # [m, d] each node's dual vector
    memory: tuple[DualPoint, ...]  # older points of every node
    consensus: Consensus  # what the weighing needs of the coupling
    newest: Array  # [m] int32 which of them was found in the last round, -1 for nodes that did not answer

    @property
    def relation(self) -> Relation:
        return self.dual.relation

    @property
    def model(self) -> Array:
        """W, ``[num_tasks, d]``."""
        return self.dual.model

    @property
    def broadcast(self) -> Array:
        """The weights that the nodes start their round from."""
        return self.dual.model


def _divided(data: TaskData) -> bool:
    """Tell whether every device weighs the points of its own nodes; otherwise every device weighs all."""
    return data.sharding is not None and data.sharding.split_tasks and not data.shared


def _to_weighing(data: TaskData, by_node: Array) -> Array:
    return by_node if _divided(data) else data.replicated(by_node)


def _received(data: TaskData, dv: Array, slope: Array, answers: Array) -> tuple[Array, Array, Array]:
    """Bring what the nodes send to where the points are weighed, in one message."""
    if data.sharding is None or _divided(data):
        return dv, slope, answers
    sent = data.replicated(jnp.concatenate([dv, slope.T, answers[:, None]], axis=1))
    count = len(slope)
    return sent[:, : -count - 1], sent[:, -count - 1 : -1].T, sent[:, -1]


def _recombined(backend: str, tasks: Tasks, v: Sequence[Array], slope: Array, answered: Array) -> tuple[Array, Array]:
    """The weights of all points ``[p, m]``, and every node's mixture of dual vectors ``[m, d]``."""
    weights = best_mixture(v, slope, tasks, answered, by_platform(backend))
    return weights, mixture_of_points(weights, v)


def mixed_duals(loss: Loss, weights: tuple[Array, ...], *rows: Array) -> Array:
    """Every node's mixture of its dual points, feasible to the last bit; the labels come last."""
    *betas, y = rows
    return loss.project(mixture_of_points(weights, betas), y)


def _exchanged(_: tuple[()], put: tuple[Array], old: Array, new: Array) -> Array:
    """The new dual point where it was put."""
    return jnp.where(expand(*put, old), new, old)


def _least(weights: Array, slope: Array) -> Array:
    """Choose the old point that makes room for a new one ``[m]``, from weights and slopes ``[p, m]``."""
    # What rounding makes of no weight is none. Of several such points the steepest leads nowhere: while a far point is
    # kept, near ones move little.
    uphill = safe_ratio(jnp.maximum(slope, 0.0), jnp.max(jnp.abs(slope), axis=0, keepdims=True))
    counts = jnp.where(weights > jnp.finfo(weights.dtype).eps ** 0.5, weights, -uphill)
    return jnp.argmin(counts, axis=0).astype(jnp.int32)


def _steered(ratio: Array, share: Array | float) -> Array:
    """A factor that goes a share of the way, on a log scale."""
    return jnp.clip(ratio, 1.0 / _MAX_FACTOR, _MAX_FACTOR) ** share


class AdaptiveServer(Aggregator):
    """Recombine the points that the nodes have found to increase the dual of Algorithm 1 most.

    Args:
      dual: what becomes of W and Omega afterwards.
      memory: older points that a node keeps, >= 1.
      backend: what weighs the points, as in `Mocha`.

    References:
      Lions and Mercier, Splitting Algorithms for the Sum of Two Nonlinear Operators, 1979.
    """

    holds_omega: ClassVar[bool] = True

    dual: DualServer
    memory: int = static()
    backend: str = static(default="auto")

    def can_resume(self, state: object) -> bool:
        return self.dual.can_resume(state)

    def init(self, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        return self.blank(self.dual.init(problem, beta, v), self._point(problem.data, beta))

    def resume(self, state: ServerState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        fresh = self.blank(self.dual.resume(state, problem, beta, v), self._point(problem.data, beta))
        if not isinstance(state, AdaptiveState) or len(state.memory) != self.memory:
            return fresh
        betas = (problem.node_loss.project(point.beta.astype(beta.dtype), problem.data.y) for point in state.memory)
        memory = tuple(self._point(problem.data, b) for b in betas)
        scale, node_scale = state.scale.astype(v.dtype), state.node_scale.astype(v.dtype)
        return fresh.replace(memory=memory, scale=scale, node_scale=node_scale, newest=state.newest)

    def add_tasks(self, state: ServerState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        return self.blank(self.dual.add_tasks(state, problem, beta, v), self._point(problem.data, beta))

    def _point(self, data: TaskData, beta: Array) -> DualPoint:
        """A point of every node and its dual vector."""
        return DualPoint(beta, _to_weighing(data, data.node_vectors(beta)))

    def blank(self, dual: DualState, point: DualPoint) -> AdaptiveState:
        """A state that remembers only the current point of the nodes."""
        none = jnp.full((len(point.v),), -1, jnp.int32)
        one = jnp.ones_like(point.v[:, 0])
        memory, scale = (point,) * self.memory, jnp.ones((), point.v.dtype)
        return AdaptiveState(dual, scale, one, point.v, memory, self._consensus(dual), none)

    def _consensus(self, dual: DualState) -> Consensus:
        return consensus(dual.coupling.quadratic_majorizer())

    def _tasks(self, data: TaskData, state: AdaptiveState) -> Tasks:
        coupling = state.dual.coupling.quadratic_majorizer()
        sharding = data.sharding if _divided(data) else None
        task, counts = None, data.constrain_tasks(jnp.ones((data.num_tasks,), data.dtype))
        if data.shared:
            task = data.replicated(jnp.where(data.sizes > 0, data.task, data.num_tasks))
            counts = data.replicated(jnp.maximum(data.nodes_per_task, 1.0))
        return Tasks(coupling, state.consensus, task, counts, data.num_nodes, sharding)

    def curvature(self, state: AdaptiveState, data: TaskData) -> Array:
        safe, own = data.to_nodes(state.dual.sigma), data.to_nodes(state.dual.own)
        return jnp.minimum(state.scale * state.node_scale, safe) * own

    def aggregate(
        self, problem: Problem, state: AdaptiveState, round: Array, before: Array, update: NodeUpdate, v: Array
    ) -> tuple[Array, Array, AdaptiveState]:
        data, loss, memory = problem.data, problem.node_loss, state.memory
        betas = before, update.beta, *(point.beta for point in memory)
        slope = slopes(problem, state.model, betas)
        answers = jnp.where(update.share > 0, 1.0, jnp.where(data.sizes > 0, 0.0, -1.0)).astype(slope.dtype)
        dv, slope, answers = _received(data, update.dv, slope, answers)
        answered, real = answers > 0, jnp.sum(answers >= 0).astype(slope.dtype)
        points = state.own, state.own + dv, *(point.v for point in memory)
        weights, mixture, slot = self.weigh(data, state, points, slope, answered)
        beta = data.map_rows(mixed_duals, loss, tuple(weights), *betas, data.y)
        own = _to_weighing(data, data.renewed(mixture, beta, round % REFRESH_EVERY, REFRESH_EVERY))
        memory = tuple(
            DualPoint(
                data.map_rows(_exchanged, (), (put,), point.beta, update.beta),
                jnp.where(put[:, None], points[1], point.v),
            )
            for put, point in ((answered & (slot == j), point) for j, point in enumerate(memory))
        )
        v = data.to_tasks(own)
        dual = self.dual.update_model(problem, state.dual, round, beta, v)
        return beta, v, self.followed(problem, state, round, dual, own, memory, (weights[1], slot), answered, real)

    def weigh(
        self, data: TaskData, state: AdaptiveState, points: Sequence[Array], slope: Array, answered: Array
    ) -> tuple[Array, Array, Array]:
        """Weigh the points of all nodes, and choose the old one that makes room for the one just found.

        Args:
          data: for what tasks the nodes have.
          state: the state before.
          points: dual vectors ``[m, d]``: where the nodes stand, what they have found, and those remembered.
          slope: of all points but the first ``[p - 1, m]``.
          answered: ``[m]`` bool.

        Returns:
          The weights ``[p, m]``, the mixture of dual vectors ``[m, d]``, and the number of the old point ``[m]``.
        """
        alone = None if _divided(data) else data.sharding
        work = partial(_recombined, self.backend)
        weights, mixture = on_every_device(alone, work, self._tasks(data, state), points, slope, answered)
        return weights, mixture, _least(weights[2:], slope[1:])

    def followed(
        self, problem: Problem, state: AdaptiveState, round: Array, dual: DualState, own: Array,
        memory: tuple[DualPoint, ...], newest: tuple[Array, Array], answered: Array, real: Array,
    ) -> AdaptiveState:  # fmt: skip
        """The state after a round, with the curvatures of the next one steered by what the last ones were good for.

        Args:
          problem: the problem.
          state: the state before.
          round: the number of the round.
          dual: what has become of W and Omega.
          own: where the nodes stand now ``[m, d]``.
          memory: the points they remember.
          newest: the weight of what each node found ``[m]``, and where it is remembered ``[m]`` int32.
          answered: ``[m]`` bool.
          real: nodes with data [].
        """
        new_weight, slot = newest
        count = jnp.sum(answered).astype(own.dtype)
        weight = safe_ratio(jnp.sum(jnp.where(answered, new_weight, 0.0)), count)
        # Those that did not answer have not shown anything.
        share = _RATE * safe_ratio(count, real)
        scale = state.scale * _steered(_TARGET_WEIGHT / jnp.maximum(weight, 1e-6), share)
        most = jnp.max(state.dual.sigma)
        node_scale = state.node_scale * _steered(weight / jnp.maximum(new_weight, 1e-2), _NODE_RATE)
        return AdaptiveState(
            dual=dual,
            scale=jnp.clip(scale, _SMALLEST_SIGMA / most, most),
            node_scale=jnp.where(answered, jnp.clip(node_scale, 1.0 / _NODE_RANGE, _NODE_RANGE), state.node_scale),
            own=own,
            memory=memory,
            consensus=self._next_consensus(problem, state, round, dual),
            newest=jnp.where(answered, slot, -1),
        )

    def _next_consensus(self, problem: Problem, state: AdaptiveState, round: Array, dual: DualState) -> Consensus:
        if not problem.regularizer.learned:
            return state.consensus
        due = is_due(self.dual.omega_every, round)
        return lax.cond(due, lambda: self._consensus(dual), lambda: state.consensus)

    def local_duals(self, state: AdaptiveState, before: Array, after: Array) -> Array:
        for j, point in enumerate(state.memory):
            before = jnp.where(state.newest[:, None] == j, point.beta, before)
        return before

    def certify(self, problem: Problem, state: AdaptiveState, beta: Array, v: Array) -> Certificate:
        return self.dual.certify(problem, state.dual, beta, v)

    def omega_updates(self, state: AdaptiveState) -> tuple[Array, Array]:
        return self.dual.omega_updates(state.dual)

    def relation(self, problem: Problem, state: AdaptiveState) -> Relation:
        return state.dual.relation

    def node_flops(self, problem: Problem) -> Array:
        # The predictions of all rows, for the slopes.
        return 2.0 * problem.data.num_features * problem.data.sizes.astype(problem.data.dtype)

    def message(self, request: Request) -> Request:
        # Down come sigma' and a weight for every point, up go the slopes of all but the one where the node stands.
        return request.replace(down=request.down + self.memory + 3.0, up=request.up + self.memory + 1.0)

    def differentiated(self, state: AdaptiveState) -> tuple[Aggregator, DualState]:
        """A round of Algorithm 1 with a safe sigma' from the same point.

        Both have the same fixed point, but only that one is a contraction: once the duals stand still the weights of
        points that hardly differ are arbitrary, and derivatives of rounds with too small a sigma' grow without bound.
        """
        return self.dual, state.dual

    def tangent(self, still: AdaptiveState, change: DualState, d_vectors: Array) -> AdaptiveState:
        return still.replace(dual=change, own=d_vectors)
