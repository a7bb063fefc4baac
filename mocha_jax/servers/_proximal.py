r"""The server that updates W and Omega together, close to their last values.

It never holds an Omega. With a centre C it minimises R over W *and* Omega close to C,

$$
Z = \arg\min_W \min_\Omega\; R(W, \Omega) - \langle V, W\rangle + \tfrac{\rho}{2}\|W - C\|_F^2
= \mathrm{prox}_{R/\rho}(C + V/\rho),
$$

and moves the centre there, for every task by the share f of its work that was done:
$C^+_t = C_t + f_t (Z_t - C_t)$. The nodes start from $Z + C^+ - C$, with curvature
$1/\rho$: the proximal term does not couple the nodes, so no sigma' is needed. When all nodes do all their
work this is the alternating direction method of multipliers, equivalently the primal-dual method of
Chambolle and Pock, with one epoch of dual coordinate ascent for its local step; where only some answer,
the others' centres wait for them. The joint problem needs no smoothing and no schedule: singular
values reach 0 and leave it by themselves.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree, Relation, Tree, static, tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.gap import Certificate, certify, fenchel_young
from mocha_jax._problem.problem import Problem
from mocha_jax.servers._base import Aggregator, NodeUpdate, Schedule, cast, every_round, is_due

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


class Since(Pytree):
    """The changes since the last proximal step."""

    moved: Array  # [num_tasks, d] change of V
    share: Array  # [num_tasks] work done, as a share of a full round, at most 1


class ProximalState(Pytree):
    """The proximal server between rounds."""

    center: Array  # [num_tasks, d] C
    model: Array  # [num_tasks, d] Z
    broadcast: Array  # [num_tasks, d] what the nodes start their round from
    since: Since | None  # the last proximal step; None where every round takes one
    known: Tree = tree()  # from that step, what makes the next one cheaper
    rho: Array  # []
    steps: Array  # [] int32 proximal steps since rho was first set
    curvature: Array  # [] the regularizer's typical curvature then


class ProximalServer(Aggregator):
    """Solve for W and Omega together, close to where they were.

    Args:
      omega_every: rounds between proximal steps, a number or a schedule, see `Mocha`; in between the nodes go on with
        the same subproblem.

    References:
      - Boyd et al., Distributed Optimization via the Alternating Direction Method of Multipliers, 2011.
      - Chambolle and Pock, A First-Order Primal-Dual Algorithm for Convex Problems, 2011.
    """

    omega_every: Schedule = static()

    def can_resume(self, state: object) -> bool:
        return isinstance(state, ProximalState)

    def init(self, problem: Problem, beta: Array, v: Array) -> ProximalState:
        curvature = self._typical_curvature(problem, v)
        rho, start = 1.0 / curvature, jnp.zeros((), jnp.int32)
        first = problem.regularizer.prox_nearby(v / rho, rho, self._known(problem, v / rho, rho))
        w = first.weights
        return ProximalState(jnp.zeros_like(v), w, w, self._nothing(v), first.known, rho, start, curvature)

    def _known(self, problem: Problem, y: Array, rho: Array) -> Tree:
        """Return the initial state of the proximal map, at Y."""
        data = problem.data
        of_v = jnp.max(data.longest) * jnp.max(jnp.sum(jnp.abs(data.weight * data.y), axis=1))  # were the duals labels
        of_v = jnp.where(of_v > 0, of_v, 1.0)  # of labels that are 0, or samples elsewhere, that tells nothing
        return lax.stop_gradient(problem.regularizer.prox_start(y, of_v / rho))

    def _nothing(self, v: Array) -> Since | None:
        """No movement since the last proximal step."""
        return None if every_round(self.omega_every) else Since(jnp.zeros_like(v), jnp.zeros_like(v[:, 0]))

    def _typical_curvature(self, problem: Problem, v: Array) -> Array:
        return jnp.asarray(problem.regularizer.typical_curvature(*v.shape), v.dtype)

    def resume(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        # Any centre will do, and what is certified is derived from model and V afresh. The step size is set
        # in proportion where the regularizer is another one.
        state, curvature = cast(state, v.dtype), self._typical_curvature(problem, v)
        if (state.since is None) != every_round(self.omega_every):
            state = state.replace(since=self._nothing(v))
        same = curvature == state.curvature
        return state.replace(
            rho=jnp.where(same, state.rho, state.rho * state.curvature / curvature),
            # On another problem that step size is a good guess, and the first few rounds say little about it.
            steps=jnp.where(same, state.steps, jnp.minimum(state.steps, _RHO_KNOWN_STEPS)),
            curvature=curvature,
        )

    def add_tasks(self, state: ProximalState, problem: Problem, beta: Array, v: Array) -> ProximalState:
        def grown(rows: Array) -> Array:
            return jnp.concatenate([rows, jnp.broadcast_to(jnp.mean(rows, axis=0), (len(v) - len(rows), v.shape[1]))])

        state = cast(state, v.dtype)
        rows = {name: grown(getattr(state, name)) for name in ("center", "model", "broadcast")}
        known = self._known(problem, rows["center"] + v / state.rho, state.rho)
        since, steps = self._nothing(v), jnp.zeros_like(state.steps)
        return self.resume(state.replace(**rows, since=since, known=known, steps=steps), problem, beta, v)

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
        of_task = data.to_tasks(size)
        share = safe_ratio(data.to_tasks(update.share * size), of_task)
        share = jnp.where(of_task > 0, share, 1.0)  # for a task without samples there is no node to wait for
        if state.since is None:
            return self._step(problem, state, Since(dv, share), v)
        since = Since(state.since.moved + dv, jnp.minimum(state.since.share + share, 1.0))
        return lax.cond(
            is_due(self.omega_every, round),
            lambda: self._step(problem, state, since, v).replace(since=self._nothing(v)),
            # Until the next step every node continues with the same proximal problem, which does not couple them.
            lambda: state.replace(broadcast=state.broadcast + dv / state.rho, since=since),
        )

    def _step(self, problem: Problem, state: ProximalState, since: Since, v: Array) -> ProximalState:
        prox = problem.regularizer.prox_nearby(state.center + v / state.rho, state.rho, state.known)
        model, step = prox.weights, since.share[:, None] * (prox.weights - state.center)
        least = (_MIN_ROUNDINGS * jnp.finfo(v.dtype).eps) ** 2
        # By columns first: with what makes them, and then all at once. Y has what rounding there is of V / rho.
        columns = [jnp.sum(a**2, axis=0) for a in (since.moved, step)]
        moved, stepped, of_w, of_y = jnp.sum(jnp.stack([*columns, prox.squares, prox.squares_of]), axis=1)
        telling = (moved > least * state.rho**2 * of_y) & (stepped > least * of_w)
        squared = jnp.where(telling, safe_ratio(moved, stepped) / state.rho**2, 0.0)
        # Of the new number: an accelerator would copy the old one, to count in its place and still read it here.
        steps = state.steps + 1
        damping = _RHO_DAMPING / (1.0 + (steps.astype(v.dtype) - 1.0) / _RHO_HORIZON)
        bound = math.log(_RHO_FACTOR)
        log_ratio = jnp.clip(0.5 * jnp.log(jnp.where(squared > 0, squared, 1.0)), -bound, bound)
        return ProximalState(
            center=state.center + step,
            model=model,
            broadcast=model + step,
            since=None,
            known=prox.known,
            rho=jnp.maximum(state.rho * jnp.exp(damping * log_ratio), _MIN_RHO / state.curvature),
            steps=steps,
            curvature=state.curvature,
        )

    def certify(self, problem: Problem, state: ProximalState, beta: Array, v: Array) -> Certificate:
        regularizer, w, relation = problem.regularizer, state.model, self.relation(problem, state)
        coupling = regularizer.coupling(problem.data.num_tasks, relation)
        value = regularizer.penalty(w)  # Omega is the best one for W
        slack = fenchel_young(value, coupling.conjugate(v), v, w)
        return certify(problem, beta, v, w, value, slack, regularizer.offset(relation, w.shape[1]))

    def relation(self, problem: Problem, state: ProximalState) -> Relation:
        learned = problem.regularizer.learned
        return learned.update_relation(None, state.model) if learned else None
