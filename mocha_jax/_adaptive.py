r"""The central node that needs no safe :math:`\sigma'`: it recombines what the nodes have found.

The nodes work on subproblems whose curvature :math:`\sigma'_t\bar M_{tt}` is far below the safe one, so they find
points far from where they stand, and the central node goes as far towards each as the dual allows
(`mocha_jax._recombine`). How far below is learned on the way: where new points get large weights the nodes were too
timid, where they get almost none too bold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._data import TaskData
from mocha_jax._math import safe_ratio
from mocha_jax._objective import Certificate, node_vectors
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree, static
from mocha_jax._recombine import Points, mixed, slopes, weigh
from mocha_jax._server import REFRESH_EVERY, DualServer, DualState, Local
from mocha_jax._spread import everywhere
from mocha_jax.coupling import Coupling

# The least sigma', as a share of the largest safe one's inverse. Where one epoch is far from solving the subproblem it
# pays to be bold even if little is coupled: the point found is farther away, and the mixture takes what is good of it.
_BOLDEST = 1e-3

# The mean weight of new points that sigma' is steered to, by at most that factor a round and partly on a log scale.
_WEIGHT, _FACTOR, _DAMPING = 0.1, 4.0, 0.35


class AdaptiveState(Pytree):
    """The recombining server between rounds."""

    dual: DualState  # its sigma is a safe one
    scale: Array  # [] sigma' of the next round, where that is below the safe one
    own: Array  # [m, d] each node's dual vector
    memory: Points  # [memory, m, ...] older points of every node
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


class AdaptiveServer(Pytree):
    """Algorithm 1 with the aggregation that is best in hindsight."""

    dual: DualServer
    memory: int = static()

    def start(self, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        return self._blank(problem, self.dual.start(problem, beta, v), beta)

    def adopt(self, state: DualState | AdaptiveState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        held = state.dual if isinstance(state, AdaptiveState) else state
        fresh = self._blank(problem, self.dual.adopt(held, problem, beta, v), beta)
        if not isinstance(state, AdaptiveState) or len(state.memory.beta) != self.memory:
            return fresh
        betas = state.memory.beta.astype(beta.dtype)
        memory = jax.vmap(lambda b: self._known(problem.data, problem.loss.project(b, problem.data.y)))(betas)
        return fresh.replace(memory=memory, scale=state.scale.astype(v.dtype), newest=state.newest)

    def extend(self, state: DualState | AdaptiveState, problem: Problem, beta: Array, v: Array) -> AdaptiveState:
        held = state.dual if isinstance(state, AdaptiveState) else state
        return self._blank(problem, self.dual.extend(held, problem, beta, v), beta)

    def _known(self, data: TaskData, beta: Array) -> Points:
        """A point of every node and its dual vector."""
        return Points(beta, data.gathered(node_vectors(data, beta)))

    def _blank(self, problem: Problem, dual: DualState, beta: Array) -> AdaptiveState:
        """Nothing remembered but where the nodes stand."""
        point = self._known(problem.data, beta)
        memory = jax.tree.map(lambda a: jnp.broadcast_to(a, (self.memory, *a.shape)), point)
        nobody = jnp.full((len(beta),), -1, jnp.int32)
        return AdaptiveState(dual, jnp.ones((), beta.dtype), point.v, memory, nobody)

    def curvature(self, state: AdaptiveState, data: TaskData) -> Array:
        return jnp.minimum(state.scale, state.dual.sigma) * state.dual.coupling.diagonal()

    def respond(
        self, problem: Problem, state: AdaptiveState, round: Array, before: Array, local: Local, v: Array
    ) -> tuple[Array, Array, AdaptiveState]:
        data, loss, memory = problem.data, problem.loss, state.memory
        betas = before, local.beta, *memory.beta
        # What the nodes send, in one message.
        slope = slopes(problem, state.model, betas)
        answers = (local.share > 0).astype(slope.dtype)
        sent = data.gathered(jnp.concatenate([local.dv, slope.T, answers[:, None]], axis=1))
        dv, slope, answered = sent[:, : -len(betas)], sent[:, -len(betas) : -1].T, sent[:, -1] > 0
        server = partial(_recombined, data)
        points = state.own, state.own + dv, *memory.v
        given = state.dual.coupling, data.task, points, slope, answered
        weights, mixture = everywhere(data.spread, server, *given)
        beta = loss.project(mixed(weights, betas), data.y)
        own = lax.cond(
            round % REFRESH_EVERY == 0,
            lambda: data.gathered(node_vectors(data, beta)),
            lambda: mixture,
        )
        # A new point takes the place of the one that counts least.
        slot = jnp.argmin(weights[2:], axis=0).astype(jnp.int32)
        put = (jnp.arange(self.memory, dtype=jnp.int32)[:, None] == slot[None]) & answered[None]
        new = Points(local.beta, points[1])
        memory = jax.tree.map(lambda a, b: jnp.where(jnp.expand_dims(put, range(2, b.ndim)), a[None], b), new, memory)
        count = jnp.sum(answered).astype(own.dtype)
        weight = safe_ratio(jnp.sum(jnp.where(answered, weights[1], 0.0)), count)
        factor = jnp.clip(_WEIGHT / jnp.maximum(weight, 1e-6), 1.0 / _FACTOR, _FACTOR) ** _DAMPING
        scale, most = jnp.where(count > 0, state.scale * factor, state.scale), jnp.max(state.dual.sigma)
        v = data.to_tasks(own)
        return (
            beta,
            v,
            AdaptiveState(
                dual=self.dual.follow(problem, state.dual, round, beta, v),
                scale=jnp.clip(scale, _BOLDEST / most, most),
                own=own,
                memory=memory,
                newest=jnp.where(answered, slot, -1),
            ),
        )

    def found(self, state: AdaptiveState, before: Array, after: Array) -> Array:
        """What the nodes had found before it was recombined, ``[m, n]``."""
        node = jnp.arange(len(before))
        return jnp.where(state.newest[:, None] >= 0, state.memory.beta[state.newest, node], before)

    def certify(self, problem: Problem, state: AdaptiveState, beta: Array, v: Array) -> Certificate:
        return self.dual.certify(problem, state.dual, beta, v)

    def omega(self, problem: Problem, state: AdaptiveState) -> Any:
        return state.dual.omega
