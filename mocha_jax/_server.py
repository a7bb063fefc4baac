r"""The central node: what it makes of the nodes' :math:`\Delta v`, and what it broadcasts.

Two servers. A node's work is the same for both (`_local.ascend`): a quadratic model of R* around the current V,
with the gradient ``broadcast`` and the curvature ``curvature``.

`DualServer` is Algorithm 1: :math:`W = \bar M V` for an :math:`\Omega` that is held for some rounds and then
replaced. The model's curvature is :math:`\sigma'_t \bar M_{tt}`, safe for the coupling.

`ProximalServer` never holds an Omega. With a centre C it minimises R over W *and* Omega close to C,

.. math::
    Z = \arg\min_W \min_\Omega\; R(W, \Omega) - \langle V, W\rangle + \tfrac{\rho}{2}\|W - C\|_F^2
      = \mathrm{prox}_{R/\rho}(C + V/\rho),

and moves the centre there, for every task by the share f of its work that was done:
:math:`C^+_t = C_t + f_t (Z_t - C_t)`. The nodes start from :math:`Z + C^+ - C`, with curvature
:math:`1/\rho`: the proximal term couples nobody, so no sigma' is needed. When all nodes do all their
work this is the alternating direction method of multipliers, equivalently the primal-dual method of
Chambolle and Pock, with one epoch of dual coordinate ascent for its local step; where only some answer,
the others' centres wait for them. The joint problem needs no smoothing and no schedule: singular
values reach 0 and leave it by themselves.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._algorithm import Info
from mocha_jax._data import TaskData
from mocha_jax._math import safe_ratio
from mocha_jax._objective import Certificate, certify, certify_implied, fenchel_young
from mocha_jax._problem import Problem
from mocha_jax._pytree import Hyperparameter, Pytree, fields_of, static
from mocha_jax.coupling import Coupling

# Rounds between two recomputations of V from beta. Adding a round's change to V costs one rounding error; this keeps
# their sum below what a certificate in float32 can see, also where the weights are V over a tiny lambda (after 64
# rounds it did not), for a fiftieth of a local epoch a round.
REFRESH_EVERY = 8

# rho follows the ratio of the last dual to the last primal movement, half-way at first and ever less, on a log scale: a
# step size that keeps changing would keep the method from converging. Nothing moves by more than the factor at once.
_RHO_DAMPING, _RHO_HORIZON, _RHO_FACTOR = 0.5, 10.0, 30.0

# The least rho, times the regularizer's typical curvature: below it W swings so widely that the ratio is of the swings
# alone and rho falls for ever (four task sets, five lambdas: slower than without in two cases, both quick anyway).
_RHO_LEAST = 0.5

# Movements of fewer roundings say nothing about rho: where it followed them in float32, it grew a hundredfold after the
# gap had reached 1e-4 and took it back to 1e-2 (land mines, Omega given).
_TELLING = 1e3

# So many steps count on another problem, of those that found rho on the last one.
_RHO_KNOWN = 50


def _cast(record: Any, dtype: Any) -> Any:
    """Every real number in the given precision."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, record)


def _same_kind(a: Any, b: Any) -> bool:
    return str(jax.tree.structure(a)) == str(jax.tree.structure(b))


def _alike(a: Any, b: Any) -> bool:
    """Whether two records are of the same kind and shapes."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return _same_kind(a, b) and all(jnp.shape(p) == jnp.shape(q) for p, q in zip(x, y, strict=True))


def keep_omega(problem: Problem, omega: Any) -> Any:
    """A record of Omega for this problem: a given one as far as it fits, otherwise the initial one."""
    data, regularizer = problem.data, problem.regularizer
    initial = regularizer.initial_omega(data.num_tasks, data.num_features)
    # Of another kind of regularizer, nothing of Omega can be kept.
    return regularizer.restart_omega(_cast(omega, data.dtype)) if _alike(omega, initial) else initial


def gain_of_updating(problem: Problem, w: Array, omega: Any) -> Array:
    """By how much the best Omega for these weights lowers the objective; infinite where the joint gap says more."""
    regularizer = problem.regularizer
    if not regularizer.learned or regularizer.jointly_convex:
        return jnp.full((), jnp.inf, w.dtype)
    better = regularizer.value(w, regularizer.update_omega(omega, w))
    return jnp.maximum(regularizer.value(w, omega) - better, 0.0)


class Local(Pytree):
    """What the nodes make of a round."""

    beta: Array  # [m, n] duals, feasible
    dv: Array  # [m, d] change of each node's dual vector
    share: Array  # [m] how much of its full work each node did, 0 to 1
    info: Info


class DualState(Pytree):
    """The server of Algorithm 1 between rounds."""

    omega: Any  # as the regularizer keeps it; None where Omega is given
    coupling: Coupling
    sigma: Array  # [num_tasks] sigma'_t
    model: Array  # [num_tasks, d] W = coupling.apply(V)
    gap_before: Array  # [] gap just before Omega was last replaced, infinite before that
    change: Array  # [] by how much replacing it lowered the objective, infinite before that

    @property
    def broadcast(self) -> Array:
        """What the nodes start their round from."""
        return self.model


class DualServer(Pytree):
    """W follows V; Omega follows W every so many rounds."""

    sigma_prime: str = static()
    omega_every: int = static()
    gamma: Hyperparameter
    smoothing: Hyperparameter

    def start(self, problem: Problem, beta: Array, v: Array) -> DualState:
        data = problem.data
        omega = problem.regularizer.initial_omega(data.num_tasks, data.num_features)
        nothing = jnp.zeros((), v.dtype)
        return self._with(problem, omega, v, nothing + jnp.inf, nothing + jnp.inf)

    def adopt(self, state: DualState, problem: Problem, beta: Array, v: Array) -> DualState:
        return self._settled(problem, keep_omega(problem, state.omega), v, state.gap_before)

    def extend(self, state: DualState, problem: Problem, beta: Array, v: Array) -> DualState:
        regularizer = problem.regularizer
        initial = regularizer.initial_omega(*v.shape)
        grown = regularizer.extend_omega(state.omega, *v.shape) if _same_kind(state.omega, initial) else initial
        return self._settled(problem, _cast(grown, v.dtype), v, state.gap_before)

    def _settled(self, problem: Problem, omega: Any, v: Array, gap_before: Array) -> DualState:
        """A state whose `change` is what replacing Omega now would gain: what it last gained was on another problem."""
        state = self._with(problem, omega, v, gap_before.astype(v.dtype), jnp.full((), jnp.inf, v.dtype))
        return state.replace(change=gain_of_updating(problem, state.model, omega))

    def _with(self, problem: Problem, omega: Any, v: Array, gap_before: Array, change: Array) -> DualState:
        """Everything that follows from Omega and V."""
        data = problem.data
        coupling = data.place_tasks(problem.regularizer.coupling(data.num_tasks, omega))
        sigma = coupling.sigma_prime(self.sigma_prime, jnp.asarray(self.gamma, v.dtype), data.nodes_per_task)
        return DualState(omega, coupling, sigma, coupling.apply(v), gap_before, change)

    def curvature(self, state: DualState, data: TaskData) -> Array:
        return data.to_nodes(state.sigma * state.coupling.diagonal())

    def respond(
        self, problem: Problem, state: DualState, round: Array, before: Array, local: Local, v: Array
    ) -> tuple[Array, Array, DualState]:
        return local.beta, v, self.follow(problem, state, round, local.beta, v)

    def follow(self, problem: Problem, state: DualState, round: Array, beta: Array, v: Array) -> DualState:
        """W follows V, and when it is due Omega follows W."""
        state = state.replace(model=state.coupling.apply(v))
        if not problem.regularizer.learned:
            return state
        due = round % self.omega_every == 0
        return lax.cond(due, lambda: self._relearn(problem, state, beta, v), lambda: state)

    def found(self, state: DualState, before: Array, after: Array) -> Array:
        return after

    def _relearn(self, problem: Problem, state: DualState, beta: Array, v: Array) -> DualState:
        regularizer, w = problem.regularizer, state.model
        before = self.certify(problem, state, beta, v).gap
        omega = regularizer.update_omega(state.omega, w, jnp.asarray(self.smoothing, w.dtype))
        held = state.coupling.value(v, w) + regularizer.offset(state.omega, w.shape[1])
        least = regularizer.value(w) if regularizer.jointly_convex else regularizer.value(w, omega)
        return self._with(problem, omega, v, before, jnp.maximum(held - least, 0.0))

    def certify(self, problem: Problem, state: DualState, beta: Array, v: Array) -> Certificate:
        return certify_implied(problem, beta, v, state.omega, state.coupling, state.change, state.gap_before)

    def updates(self, state: DualState) -> tuple[Array, Array]:
        """What the last update of Omega gained, and the gap just before it."""
        return state.change, state.gap_before

    def omega(self, problem: Problem, state: DualState) -> Any:
        return state.omega


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


class ProximalServer(Pytree):
    """W and Omega together, close to where they were."""

    omega_every: int = static()

    def start(self, problem: Problem, beta: Array, v: Array) -> ProximalState:
        zero = jnp.zeros_like(v)
        curvature = self._typical_curvature(problem, v)
        rho = 1.0 / curvature
        model = problem.regularizer.prox(v / rho, rho)
        start = jnp.zeros((), jnp.int32)
        return ProximalState(zero, model, model, zero, jnp.zeros_like(v[:, 0]), rho, start, curvature)

    def _typical_curvature(self, problem: Problem, v: Array) -> Array:
        return jnp.asarray(problem.regularizer.typical_curvature(*v.shape), v.dtype)

    def adopt(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        # Any centre will do, and what is certified is derived from model and V afresh. The step size is set
        # in proportion where the regularizer is another one.
        state, curvature = _cast(state, v.dtype), self._typical_curvature(problem, v)
        same = curvature == state.curvature
        return state.replace(
            rho=jnp.where(same, state.rho, state.rho * state.curvature / curvature),
            # On another problem that step size is a good guess, and the first few rounds say little about it.
            steps=jnp.where(same, state.steps, jnp.minimum(state.steps, _RHO_KNOWN)),
            curvature=curvature,
        )

    def extend(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        def grown(rows: Array, fill: Array) -> Array:
            new = jnp.broadcast_to(fill, (len(v) - len(rows), *rows.shape[1:]))
            return jnp.concatenate([rows, new])

        state, none = _cast(state, v.dtype), jnp.zeros((), v.dtype)
        grown_state = state.replace(
            **{name: grown(w, jnp.mean(w, axis=0)) for name, w in fields_of(state).items() if w.ndim == 2},
            share=grown(state.share, none),
            steps=jnp.zeros_like(state.steps),
        )
        return self.adopt(grown_state.replace(moved=grown(state.moved, none)), problem, beta, v)

    def curvature(self, state: ProximalState, data: TaskData) -> Array:
        # Nodes that share a task see one another's changes only after the round.
        return data.to_nodes(jnp.maximum(data.nodes_per_task, 1.0) / state.rho)

    def respond(
        self, problem: Problem, state: ProximalState, round: Array, before: Array, local: Local, v: Array
    ) -> tuple[Array, Array, ProximalState]:
        return local.beta, v, self._follow(problem, state, round, local, v)

    def _follow(self, problem: Problem, state: ProximalState, round: Array, local: Local, v: Array) -> ProximalState:
        data = problem.data
        dv, size = data.to_tasks(local.dv), data.sizes.astype(v.dtype)
        share = safe_ratio(data.to_tasks(local.share * size), data.to_tasks(size))
        state = state.replace(moved=state.moved + dv, share=jnp.minimum(state.share + share, 1.0))
        if self.omega_every == 1:
            return self._step(problem, state, v)
        return lax.cond(
            round % self.omega_every == 0,
            lambda: self._step(problem, state, v),
            # Until the next step every node goes on with the same proximal problem, which couples nobody.
            lambda: state.replace(broadcast=state.broadcast + dv / state.rho),
        )

    def found(self, state: ProximalState, before: Array, after: Array) -> Array:
        return after

    def _step(self, problem: Problem, state: ProximalState, v: Array) -> ProximalState:
        model = problem.regularizer.prox(state.center + v / state.rho, state.rho)
        step = state.share[:, None] * (model - state.center)
        least, moved, stepped = (_TELLING * jnp.finfo(v.dtype).eps) ** 2, jnp.sum(state.moved**2), jnp.sum(step**2)
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
            rho=jnp.maximum(state.rho * jnp.exp(damping * log_ratio), _RHO_LEAST / state.curvature),
            steps=state.steps + 1,
            curvature=state.curvature,
        )

    def certify(self, problem: Problem, state: ProximalState, beta: Array, v: Array) -> Certificate:
        regularizer, w = problem.regularizer, state.model
        coupling = regularizer.coupling(problem.data.num_tasks, self.omega(problem, state))
        value = regularizer.value(w)  # Omega is the best one for W
        slack = fenchel_young(value, coupling.conjugate(v), v, w)
        return certify(problem, beta, v, w, value, slack)

    def updates(self, state: ProximalState) -> tuple[float, float]:
        """Omega is part of every step, not updated now and then."""
        return 0.0, math.inf

    def omega(self, problem: Problem, state: ProximalState) -> Any:
        return problem.regularizer.update_omega(None, state.model)
