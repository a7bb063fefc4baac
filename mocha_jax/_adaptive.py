r"""The central node that needs no safe :math:`\sigma'`: it recombines what the nodes have found.

The nodes work on subproblems whose curvature :math:`\sigma'_t\bar M_{tt}` is far below the safe one, so they find
points far from where they stand, and the central node goes as far towards each as the dual allows
(`mocha_jax._recombine`). How far below is learned on the way: where new points get large weights the nodes were too
timid, where they get almost none too bold. It is one factor for all nodes, for what they find fits together or does
not, times one for each that stays close to 1, for some are nearer to their optimum than others or answer less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._data import TaskData
from mocha_jax._math import safe_ratio
from mocha_jax._objective import Certificate, node_vectors
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree, static
from mocha_jax._recombine import Point, expand, mixed, slopes, weigh
from mocha_jax._server import REFRESH_EVERY, DualServer, DualState, Local
from mocha_jax._spread import everywhere
from mocha_jax.coupling import Coupling
from mocha_jax.losses import Loss

# The least sigma', as a share of the largest safe one's inverse. Where one epoch is far from solving the subproblem it
# pays to be bold even if little is coupled: the point found is farther away, and the mixture takes what is good of it.
_BOLDEST = 1e-3

# The mean weight of new points that sigma' is steered to, on a log scale by this share of the way, and no more than
# that factor is seen; and a node's weight to the mean of all.
_WEIGHT, _SHARE, _OWN_SHARE, _FACTOR = 0.1, 0.3, 0.1, 4.0

# Within that factor of what is common a node's own sigma' stays.
_LEAN = 2.0


class AdaptiveState(Pytree):
    """The recombining server between rounds."""

    dual: DualState  # its sigma is a safe one
    scale: Array  # [] sigma' of the next round, where that is below the safe one
    lean: Array  # [m] times this
    own: Array  # [m, d] each node's dual vector
    memory: tuple[Point, ...]  # older points of every node
    newest: Array  # [m] int32 which of them was found in the last round, -1 for nodes that did not answer

    @property
    def omega(self) -> Any:
        return self.dual.omega

    @property
    def coupling(self) -> Coupling:
        return self.dual.coupling

    @property
    def gap_before(self) -> Array:
        """The gap just before Omega was last replaced, []."""
        return self.dual.gap_before

    @property
    def model(self) -> Array:
        """W, ``[num_tasks, d]``."""
        return self.dual.model

    @property
    def broadcast(self) -> Array:
        """What the nodes start their round from."""
        return self.dual.model


def _recombined(
    data: TaskData, coupling: Coupling, task: Array, v: Sequence[Array], slope: Array, answered: Array
) -> tuple[Array, Array]:
    """On one device: the weights of all points ``[p, m]``, and every node's mixture of dual vectors ``[m, d]``."""
    data = data.replace(spread=None, task=task, num_tasks=data.num_tasks)

    def apply(u: Array) -> Array:
        return data.to_nodes(coupling.apply(data.to_tasks(u)))

    weights = weigh(v, slope, apply, data.to_nodes(coupling.diagonal()), answered)
    return weights, mixed(weights, v)


def _mixed_duals(loss: Loss, weights: tuple[Array, ...], *rows: Array) -> Array:
    """Every node's mixture of its dual points, feasible to the last bit; the labels come last."""
    *betas, y = rows
    return loss.project(mixed(weights, betas), y)


def _exchanged(_: tuple[()], put: tuple[Array], old: Array, new: Array) -> Array:
    """The new dual point where it was put."""
    return jnp.where(expand(*put, old), new, old)


def _damped(ratio: Array, share: Array | float) -> Array:
    """A factor that goes a share of the way, on a log scale."""
    return jnp.clip(ratio, 1.0 / _FACTOR, _FACTOR) ** share


class AdaptiveServer(Pytree):
    """Algorithm 1 with the aggregation that is best in hindsight."""

    dual: DualServer
    memory: int = static()

    def start(self, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        return self._blank(problem, self.dual.start(problem, beta, v), beta)

    def adopt(self, state: DualState | AdaptiveState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        held = state.dual if isinstance(state, AdaptiveState) else state
        fresh = self._blank(problem, self.dual.adopt(held, problem, beta, v), beta)
        if not isinstance(state, AdaptiveState) or len(state.memory) != self.memory:
            return fresh
        betas = (problem.loss.project(point.beta.astype(beta.dtype), problem.data.y) for point in state.memory)
        memory = tuple(self._known(problem.data, b) for b in betas)
        scale, lean = state.scale.astype(v.dtype), state.lean.astype(v.dtype)
        return fresh.replace(memory=memory, scale=scale, lean=lean, newest=state.newest)

    def extend(self, state: DualState | AdaptiveState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        held = state.dual if isinstance(state, AdaptiveState) else state
        return self._blank(problem, self.dual.extend(held, problem, beta, v), beta)

    def _known(self, data: TaskData, beta: Array) -> Point:
        """A point of every node and its dual vector."""
        return Point(beta, data.gathered(node_vectors(data, beta)))

    def _blank(self, problem: Problem, dual: DualState, beta: Array) -> AdaptiveState:
        """Nothing remembered but where the nodes stand."""
        point = self._known(problem.data, beta)
        nobody = jnp.full((len(beta),), -1, jnp.int32)
        one = jnp.ones_like(beta[:, 0])
        return AdaptiveState(dual, jnp.ones((), beta.dtype), one, point.v, (point,) * self.memory, nobody)

    def curvature(self, state: AdaptiveState, data: TaskData) -> Array:
        safe, own = data.to_nodes(state.dual.sigma), data.to_nodes(state.dual.coupling.diagonal())
        return jnp.minimum(state.scale * state.lean, safe) * own

    def respond(
        self, problem: Problem, state: AdaptiveState, round: Array, before: Array, local: Local, v: Array
    ) -> tuple[Array, Array, AdaptiveState]:
        data, loss, memory = problem.data, problem.loss, state.memory
        betas = before, local.beta, *(point.beta for point in memory)
        # What the nodes send, in one message.
        slope = slopes(problem, state.model, betas)
        answers = jnp.where(local.share > 0, 1.0, jnp.where(data.sizes > 0, 0.0, -1.0)).astype(slope.dtype)
        sent = data.gathered(jnp.concatenate([local.dv, slope.T, answers[:, None]], axis=1))
        dv, slope, answers = sent[:, : -len(betas)], sent[:, -len(betas) : -1].T, sent[:, -1]
        answered, real = answers > 0, jnp.sum(answers >= 0).astype(slope.dtype)
        server = partial(_recombined, data)
        points = state.own, state.own + dv, *(point.v for point in memory)
        given = state.dual.coupling.linear(), data.task, points, slope, answered
        weights, mixture = everywhere(data.spread, server, *given)
        beta = data.each_row(_mixed_duals, loss, tuple(weights), *betas, data.y)
        own = lax.cond(
            round % REFRESH_EVERY == 0,
            lambda: data.gathered(node_vectors(data, beta)),
            lambda: mixture,
        )
        # A new point takes the place of the one that counts least; what rounding makes of no weight is none.
        older = jnp.where(weights[2:] > jnp.finfo(weights.dtype).eps ** 0.75, weights[2:], 0.0)
        slot = jnp.argmin(older, axis=0).astype(jnp.int32)
        memory = tuple(
            Point(
                data.each_row(_exchanged, (), (put,), point.beta, local.beta),
                jnp.where(put[:, None], points[1], point.v),
            )
            for put, point in ((answered & (slot == j), point) for j, point in enumerate(memory))
        )
        count = jnp.sum(answered).astype(own.dtype)
        weight = safe_ratio(jnp.sum(jnp.where(answered, weights[1], 0.0)), count)
        # Those that did not answer have not shown anything.
        share = _SHARE * safe_ratio(count, real)
        scale, most = state.scale * _damped(_WEIGHT / jnp.maximum(weight, 1e-6), share), jnp.max(state.dual.sigma)
        lean = state.lean * _damped(weight / jnp.maximum(weights[1], 1e-2), _OWN_SHARE)
        v = data.to_tasks(own)
        return (
            beta,
            v,
            AdaptiveState(
                dual=self.dual.follow(problem, state.dual, round, beta, v),
                scale=jnp.clip(scale, _BOLDEST / most, most),
                lean=jnp.where(answered, jnp.clip(lean, 1.0 / _LEAN, _LEAN), state.lean),
                own=own,
                memory=memory,
                newest=jnp.where(answered, slot, -1),
            ),
        )

    def found(self, state: AdaptiveState, before: Array, after: Array) -> Array:
        """What the nodes had found before it was recombined, ``[m, n]``."""
        for j, point in enumerate(state.memory):
            before = jnp.where(state.newest[:, None] == j, point.beta, before)
        return before

    def certify(self, problem: Problem, state: AdaptiveState, beta: Array, v: Array) -> Certificate:
        return self.dual.certify(problem, state.dual, beta, v)

    def updates(self, state: AdaptiveState) -> tuple[Array, Array]:
        return self.dual.updates(state.dual)

    def omega(self, problem: Problem, state: AdaptiveState) -> Any:
        return state.dual.omega
