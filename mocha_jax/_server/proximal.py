r"""The server that takes W and Omega together, close to where they were.

It never holds an Omega. With a centre C it minimises R over W *and* Omega close to C,

$$
Z = \arg\min_W \min_\Omega\; R(W, \Omega) - \langle V, W\rangle + \tfrac{\rho}{2}\|W - C\|_F^2
= \mathrm{prox}_{R/\rho}(C + V/\rho),
$$

and moves the centre there, for every task by the share f of its work that was done:
$C^+_t = C_t + f_t (Z_t - C_t)$. The nodes start from $Z + C^+ - C$, with curvature
$1/\rho$: the proximal term couples nobody, so no sigma' is needed. When all nodes do all their
work this is the alternating direction method of multipliers, equivalently the primal-dual method of
Chambolle and Pock, with one epoch of dual coordinate ascent for its local step; where only some answer,
the others' centres wait for them. The joint problem needs no smoothing and no schedule: singular
values reach 0 and leave it by themselves.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree, Relation, fields_of, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.certificate import Certificate, certify, fenchel_young
from mocha_jax._problem.problem import Problem
from mocha_jax._server.base import NodeUpdate, Server, cast

# rho follows the ratio of the last dual to the last primal movement, half-way at first and ever less, on a log scale: a
# step size that keeps changing would keep the method from converging. Nothing moves by more than the factor at once.
_RHO_DAMPING, _RHO_HORIZON, _RHO_FACTOR = 0.5, 10.0, 30.0

# The least rho, times the regularizer's typical curvature: below it W swings so widely that the ratio is of the swings
# alone and rho falls for ever (four task sets, five lambdas: slower than without in two cases, both quick anyway).
_MIN_RHO = 0.5

# Movements of fewer roundings say nothing about rho: where it followed them in float32, it grew a hundredfold after the
# gap had reached 1e-4 and took it back to 1e-2 (land mines, Omega given).
_MIN_ROUNDINGS = 1e3

# So many steps count on another problem, of those that found rho on the last one.
_RHO_KNOWN_STEPS = 50


class ProximalState(Pytree):
    """The proximal server between rounds."""

    center: Array  # [num_tasks, d] C
    model: Array  # [num_tasks, d] Z
    broadcast: Array  # [num_tasks, d] what the nodes start their round from
    moved: Array  # [num_tasks, d] change of V since the last proximal step
    share: Array  # [num_tasks] work done since then, as a share of a full round, at most 1
    rho: Array  # []
    steps: Array  # [] int32 proximal steps since rho was first set
    curvature: Array  # [] the regularizer's typical curvature then


class ProximalServer(Server):
    """Solve for W and Omega together, close to where they were.

    Args:
      omega_every: rounds between proximal steps; in between the nodes go on with the same subproblem.
    """

    omega_every: int = static()

    def can_resume(self, state: object) -> bool:
        return isinstance(state, ProximalState)

    def init(self, problem: Problem, beta: Array, v: Array) -> ProximalState:
        zero = jnp.zeros_like(v)
        curvature = self._typical_curvature(problem, v)
        rho = 1.0 / curvature
        model = problem.regularizer.prox(v / rho, rho)
        start = jnp.zeros((), jnp.int32)
        return ProximalState(zero, model, model, zero, jnp.zeros_like(v[:, 0]), rho, start, curvature)

    def _typical_curvature(self, problem: Problem, v: Array) -> Array:
        return jnp.asarray(problem.regularizer.typical_curvature(*v.shape), v.dtype)

    def resume(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        # Any centre will do, and what is certified is derived from model and V afresh. The step size is set
        # in proportion where the regularizer is another one.
        state, curvature = cast(state, v.dtype), self._typical_curvature(problem, v)
        same = curvature == state.curvature
        return state.replace(
            rho=jnp.where(same, state.rho, state.rho * state.curvature / curvature),
            # On another problem that step size is a good guess, and the first few rounds say little about it.
            steps=jnp.where(same, state.steps, jnp.minimum(state.steps, _RHO_KNOWN_STEPS)),
            curvature=curvature,
        )

    def add_tasks(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        def grown(rows: Array, fill: Array) -> Array:
            new = jnp.broadcast_to(fill, (len(v) - len(rows), *rows.shape[1:]))
            return jnp.concatenate([rows, new])

        state, none = cast(state, v.dtype), jnp.zeros((), v.dtype)
        grown_state = state.replace(
            **{name: grown(w, jnp.mean(w, axis=0)) for name, w in fields_of(state).items() if w.ndim == 2},
            share=grown(state.share, none),
            steps=jnp.zeros_like(state.steps),
        )
        return self.resume(grown_state.replace(moved=grown(state.moved, none)), problem, beta, v)

    def curvature(self, state: ProximalState, data: TaskData) -> Array:
        # Nodes that share a task see one another's changes only after the round.
        return data.to_nodes(jnp.maximum(data.nodes_per_task, 1.0) / state.rho)

    def aggregate(
        self, problem: Problem, state: ProximalState, round: Array, before: Array, update: NodeUpdate, v: Array
    ) -> tuple[Array, Array, ProximalState]:
        return update.beta, v, self._follow(problem, state, round, update, v)

    def _follow(
        self, problem: Problem, state: ProximalState, round: Array, update: NodeUpdate, v: Array
    ) -> ProximalState:
        data = problem.data
        dv, size = data.to_tasks(update.dv), data.sizes.astype(v.dtype)
        share = safe_ratio(data.to_tasks(update.share * size), data.to_tasks(size))
        state = state.replace(moved=state.moved + dv, share=jnp.minimum(state.share + share, 1.0))
        if self.omega_every == 1:
            return self._step(problem, state, v)
        return lax.cond(
            round % self.omega_every == 0,
            lambda: self._step(problem, state, v),
            # Until the next step every node goes on with the same proximal problem, which couples nobody.
            lambda: state.replace(broadcast=state.broadcast + dv / state.rho),
        )

    def _step(self, problem: Problem, state: ProximalState, v: Array) -> ProximalState:
        model = problem.regularizer.prox(state.center + v / state.rho, state.rho)
        step = state.share[:, None] * (model - state.center)
        least = (_MIN_ROUNDINGS * jnp.finfo(v.dtype).eps) ** 2
        moved, stepped = jnp.sum(state.moved**2), jnp.sum(step**2)
        telling = (moved > least * jnp.sum(v**2)) & (stepped > least * jnp.sum(model**2))
        squared = jnp.where(telling, safe_ratio(moved, stepped) / state.rho**2, 0.0)
        damping = _RHO_DAMPING / (1.0 + state.steps.astype(v.dtype) / _RHO_HORIZON)
        bound = math.log(_RHO_FACTOR)
        log_ratio = jnp.clip(0.5 * jnp.log(jnp.where(squared > 0, squared, 1.0)), -bound, bound)
        return ProximalState(
            center=state.center + step,
            model=model,
            broadcast=model + step,
            moved=jnp.zeros_like(state.moved),
            share=jnp.zeros_like(state.share),
            rho=jnp.maximum(state.rho * jnp.exp(damping * log_ratio), _MIN_RHO / state.curvature),
            steps=state.steps + 1,
            curvature=state.curvature,
        )

    def certify(self, problem: Problem, state: ProximalState, beta: Array, v: Array) -> Certificate:
        regularizer, w = problem.regularizer, state.model
        coupling = regularizer.coupling(problem.data.num_tasks, self.relation(problem, state))
        value = regularizer.value(w)  # Omega is the best one for W
        slack = fenchel_young(value, coupling.conjugate(v), v, w)
        return certify(problem, beta, v, w, value, slack)

    def relation(self, problem: Problem, state: ProximalState) -> Relation:
        return problem.regularizer.update_relation(None, state.model)
