r"""Newton's method on the weights of all tasks: nodes send gradients and Hessians, the server couples them.

The server keeps a second-order model of each node's losses and minimises the sum of all models plus R. While all nodes
answer that is Newton's method; with silent ones it is the incremental one of Rodomanov and Kropotov (2016), and where
losses turn out higher than models said, incremental majorization-minimization (Mairal 2015).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.base import Drawn
from mocha_jax._algorithms.primal_method import SecondOrderMethod, SecondOrderState, slopes_at
from mocha_jax._algorithms.second_derivatives import curvature
from mocha_jax._core.pytree import Pytree
from mocha_jax._data.layouts import Layout
from mocha_jax._node.dealt import add_parts, of_parts, to_parts
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem
from mocha_jax.systems._base import Info, Request, Work

# A step after which the objective is larger is tried again, so much shorter; the next one begins so much longer.
_SHORTER = 0.25

# How many roundings a sum may be off.
_ROUNDINGS = 64.0

# Where rounding hides how the objective has changed, a step is as long as it may be where the objective rises behind it
# by that share of how it fell at the start: the approximate condition of Hager and Zhang 2005.
_RISE = 0.8

# Models of silent nodes are no longer trusted where losses are higher by that share of the change to first order; the
# caution falls by this factor with every node's evidence. Chosen on logistic and smoothed hinge losses, 5 to 50 % of 40
# nodes a round.
_SURPRISE, _TRUST = 0.25, 0.3


class Models(Pytree):
    """Second-order models of every node's losses about its last answer, from what they are to each sample."""

    answered: Array  # [m] int32 1 where that was at the base, 0 where elsewhere, -1 where there was none
    value: Array  # [m]
    z: Array  # [m, n] predictions then; within a run as the rows are dealt, as all that is per row
    slopes: Array  # [m, n] -c l' of every sample
    bend: Array  # [m, n] c l'', of the last answer that had it

    def at(self, z: Array, bend: Array, layout: Layout) -> tuple[Array, Array]:
        """Predict the losses ``[m]`` and slopes ``[m, n]`` at other predictions, with these second derivatives."""
        moved = z - self.z
        fall = jnp.sum(moved * (self.slopes - 0.5 * bend * moved), axis=1)
        return self.value - add_parts(layout, fall), self.slopes - bend * moved


class NewtonState(SecondOrderState):
    """The state of Newton's method between two rounds. The server sends ``w`` to the nodes in the next one."""

    z: Array  # [m, n] predictions by w
    models: Models
    base: Array  # [num_tasks, d] the best weights so far; w is on the way from there
    base_z: Array  # [m, n] predictions by the base
    share: Array  # [] of the way from there to the models' optimum
    caution: Array  # [] in [0, 1], how far the curvature of silent nodes is from their last one to the largest

    def moved(self, move: Callable[..., Array]) -> NewtonState:
        own = self.models
        by_row = jnp.stack([self.beta, self.z, self.base_z, own.z, own.slopes, own.bend], axis=2)
        beta, z, base_z, told, slopes, bend = jnp.moveaxis(move(by_row), 2, 0)
        models = own.replace(z=told, slopes=slopes, bend=bend)
        return self.replace(beta=beta, z=z, base_z=base_z, models=models)


class Newton(SecondOrderMethod):
    r"""Newton's method on all weights at once, for smooth losses and a given relationship.

    In a round every node k sends the gradient and the Hessian of its losses at the weights p that it received. The
    server keeps them as a model,

    $$
    f_k(w) \approx f_k(p) + g_k^\top (w - p) + \tfrac12 (w - p)^\top H_k (w - p),
    $$

    and its next weights minimise the sum of all models plus R. They solve

    $$
    (I + \bar M H)(W^+ - W) = \bar M V - W, \qquad v_t = -\nabla f_t(w_t),
    $$

    by one small system per task and, for tasks near their mean, one for what they share. The squared loss takes one
    round, others a handful. Where the objective has increased, the server takes the step back and tries a quarter of
    it; where the change is less than rounding, the slopes along the step tell.

    A node sends d (d + 3) / 2 + 1 numbers, receives d, and computes some n d^2 operations a round, so the method is for
    few features: on one machine it is faster than `Mocha` up to some tens of them. `costs` charges its messages.

    The server predicts a silent node by its model. In the beginning, and after a round in which nodes that answer again
    have clearly higher losses than their models said, it takes the models of silent nodes for as curved as the loss can
    be, upper bounds: the second moments of a node's samples, which are charged in round 0, times the largest second
    derivative. While models predict well it returns to their own curvature. Where few nodes answer a round and the loss
    has corners that are hardly smoothed, the steps by bounds are small, and `Mocha` is faster. A node without time for
    all of its samples sends its gradient, and the server keeps its last Hessian.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(0.1, 0.01))
      >>> solution = mj.solve(problem, Newton(), tol=1e-4, record_every=1)
      >>> solution.status.name, solution.rounds <= 6
      ('CONVERGED', True)

    References:
      - Rodomanov and Kropotov, A Superlinearly-Convergent Proximal Newton-Type Method, 2016.
      - Mairal, Incremental Majorization-Minimization Optimization, 2015: bounds of silent nodes.
    """

    def check(self, problem: Problem) -> None:
        super().check(problem)
        _expect_smooth(problem)

    def init(self, problem: Problem) -> NewtonState:
        """Start from W = 0, with losses as curved as they can be."""
        self.expect(problem)
        _expect_smooth(problem)
        m, problem = problem.data.num_nodes, of_parts(problem)
        data, dtype = problem.data, problem.data.dtype
        w, z = jnp.zeros((data.num_tasks, data.num_features), dtype), jnp.zeros_like(data.y)
        models = Models(jnp.full(m, -1, jnp.int32), jnp.zeros(m, dtype), z, z, _largest(problem))
        coupling, beta = problem.regularizer.coupling(data.num_tasks), slopes_at(problem, z)
        never, none = jnp.full((), jnp.inf, dtype), jnp.zeros((), dtype)
        share = none + _SHORTER  # as if the first one came after a short one
        return NewtonState(
            jnp.zeros((), jnp.int32), w, None, coupling, never, none, beta, z, models, w, z, share, caution=none + 1.0
        )

    def resume(self, state: NewtonState, problem: Problem) -> NewtonState:
        """Go on from the weights. Models may be those of another problem, so no node counts as heard before."""
        state = self.kept(state, problem, NewtonState)
        _expect_smooth(problem)
        data = problem.data
        if len(state.z) != data.num_nodes:
            raise ValueError(f"Newton: the state is one of {len(state.z)} nodes, and the data has {data.num_nodes}.")
        state = jax.tree.map(
            lambda a: a.astype(data.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a,
            state.replace(coupling=problem.regularizer.coupling(data.num_tasks)),
        )
        if state.z.shape == data.y.shape:
            state = self.to_layout(state, problem)
            old = state.models
            models = old.replace(slopes=old.slopes - old.bend * (state.z - old.z))  # at w
        else:
            models = self.init(problem).models
        problem = of_parts(problem)
        z = problem.data.predictions(state.w)
        models = models.replace(z=z, answered=jnp.full_like(models.answered, -1))
        return state.replace(
            base=state.w, base_z=z, z=z, beta=slopes_at(problem, z), models=models, caution=jnp.ones_like(state.caution)
        )

    def fixed_flops(self, problem: Problem) -> Array:
        """Predictions and the gradient."""
        return 4.0 * problem.data.num_features * problem.data.sizes.astype(problem.data.dtype)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        request, d = super().request(problem, round), problem.data.num_features
        moments = jnp.where(jnp.asarray(round) == 0, d * (d + 1) // 2, 0)
        return request.replace(up=(d * (d + 3) // 2 + 1 + moments).astype(problem.data.dtype))

    def step(self, key: Drawn, state: NewtonState, problem: Problem, work: Work) -> tuple[NewtonState, Info]:
        full, layout = self.full_work(problem), problem.data.layout
        steps = work.budget(full)
        answers, sent = steps > 0, steps >= full
        flops = steps.astype(problem.data.dtype) * self.step_flops(problem)
        flops = flops + jnp.where(answers, self.fixed_flops(problem), 0.0)
        problem = of_parts(problem)
        data, most, nodes = problem.data, _largest(problem), jnp.sum(full > 0, dtype=problem.data.dtype)
        models, better, caution = _asked(problem, layout, state, nodes, answers, answers & sent)
        base, base_z = (jnp.where(better, new, old) for new, old in ((state.w, state.base), (state.z, state.base_z)))
        share = jnp.where(better, jnp.minimum(state.share / _SHORTER, 1.0), _SHORTER * state.share)
        # Caution applies to nodes that were silent at the base, and to others as far as they may be silent next.
        silent = 1.0 - safe_ratio(jnp.sum(answers, dtype=data.dtype), nodes)
        stale = to_parts(layout, models.answered < 1)[:, None]
        own, judged = (models.bend + caution * part * (most - models.bend)
                       for part in (stale.astype(data.dtype), jnp.where(stale, 1.0, silent)))  # fmt: skip
        slopes = models.at(base_z, own, layout)[1]
        direction, left = state.coupling.newton_system(curvature(data, judged))(-base, slopes)
        w = base + share * direction
        z = data.predictions(w)
        after = state.replace(w=w, beta=_slopes(problem, z, left), z=z, models=models, base=base, base_z=base_z,
                              share=share, caution=caution)  # fmt: skip
        # Without an answer the round changes nothing.
        after = jax.tree.map(partial(jnp.where, jnp.any(answers)), after, state)
        return after.replace(round=state.round + 1), Info(steps, flops, jnp.zeros_like(work.active))


def _asked(
    problem: Problem, layout: Layout, state: NewtonState, nodes: Array, answers: Array, sent: Array
) -> tuple[Models, Array, Array]:
    """Return the models after the answers at w, whether w is the new base, and the caution.

    Where a node has not told its losses at a point, its model takes their place. With a caution of 1 that is an upper
    bound, if the node has ever answered.
    """
    data, loss, old, most = problem.data, problem.node_loss, state.models, _largest(problem)
    moved, own = state.z - state.base_z, data.weighted(state.beta)
    values = add_parts(layout, jnp.sum(data.weighted(loss.value(state.z, data.y)), axis=1))
    known, compared = answers & (old.answered >= 0), answers & (old.answered > 0)
    told = to_parts(layout, answers)[:, None]
    penalty, before, of_step = map(problem.regularizer.value, (state.w, state.base, state.w - state.base))

    def modelled(z: Array, caution: Array) -> tuple[Array, Array]:
        return old.at(z, old.bend + caution * (most - old.bend), layout)

    def first_order(slopes: Array) -> Array:
        """The change of the losses ``[m]`` with these slopes."""
        return -add_parts(layout, jnp.sum(moved * slopes, axis=1))

    # Models are too flat where losses are higher than they say, by more than a share of the change to first order.
    slopes = modelled(state.base_z, state.caution)[1]
    surprise, expected = (jnp.sum(jnp.where(known, a, 0.0)) for a in (
        values - modelled(state.z, state.caution)[0], first_order(slopes)))  # fmt: skip
    # Rounding errors: of the sums, and of the penalties and predictions that are subtracted.
    rounding = jnp.finfo(data.dtype).eps
    sizes = jnp.abs(jnp.where(told, own, old.slopes)) * (jnp.abs(state.z) + jnp.abs(state.base_z))
    unit, subtracted = _ROUNDINGS * rounding, rounding * (penalty + before + jnp.sum(sizes))
    lost = unit * (jnp.sum(jnp.abs(old.value)) + before) + subtracted
    trust = _TRUST ** safe_ratio(jnp.sum(known, dtype=data.dtype), nodes)  # with every node's evidence
    caution = jnp.where(surprise > _SURPRISE * jnp.abs(expected) + lost, 1.0, trust * state.caution)

    at_base, slopes = modelled(state.base_z, caution)
    at_w, predicted = modelled(state.z, caution)
    # The change of losses that were not told at the base is bounded by the slopes that are told now: they are convex.
    most_change = first_order(own)
    change = jnp.where(answers, values, at_w) - at_base
    change = jnp.where(answers & ~compared, jnp.where(known, jnp.minimum(change, most_change), most_change), change)
    change = jnp.sum(change) + penalty - before
    # R(w) - R(base) is its slope at either end and R(step), which is quadratic.
    ends = jnp.where(told, own, predicted)
    fell, rises = (penalty - before - sign * of_step - jnp.sum(moved * there)
                   for sign, there in ((1.0, slopes), (-1.0, ends)))  # fmt: skip
    seen = unit * (jnp.sum(jnp.abs(moved * ends)) + of_step) + subtracted
    kept = (change <= -lost) | ((change <= lost) & (rises <= _RISE * jnp.abs(fell) + seen))

    # Where w is not kept, answers at the base count for more than those at w.
    new = answers & (kept | (old.answered < 1))
    answered = jnp.where(new, kept.astype(jnp.int32), jnp.where(kept, jnp.minimum(old.answered, 0), old.answered))
    of_new, bent = (to_parts(layout, which)[:, None] for which in (new, new & sent))
    bend = jnp.where(bent, data.weighted(_second_derivatives(problem, state.z)), old.bend)
    z, slopes = (jnp.where(of_new, a, b) for a, b in ((state.z, old.z), (own, old.slopes)))
    return Models(answered, jnp.where(new, values, old.value), z, slopes, bend), kept, caution


def _largest(problem: Problem) -> Array:
    """Return the largest curvature of the loss times the weight of every row, ``[m, n]``."""
    data = problem.data
    most = jnp.broadcast_to(jnp.asarray(problem.loss.smoothness, data.dtype), (data.num_tasks,))
    return data.to_nodes(most)[:, None] * data.weight


def _slopes(problem: Problem, z: Array, left: Array) -> Array:
    """Return the slopes at the predictions, or those that the models predicted where they are the same up to rounding.

    Where the losses all but vanish, as with fewer samples than features, labels less predictions would be rounding.
    """
    data, loss, slopes = problem.data, problem.node_loss, slopes_at(problem, z)
    predicted = loss.project(safe_ratio(left, data.weight), data.y)
    lost = _ROUNDINGS * jnp.finfo(z.dtype).eps * _second_derivatives(problem, z) * (jnp.abs(z) + jnp.abs(data.y))
    return jnp.where((jnp.abs(predicted - slopes) <= lost) & (data.weight > 0), predicted, slopes)


def _second_derivatives(problem: Problem, z: Array) -> Array:
    r"""Return $\ell''(z)$ of predictions ``[m, n]``; at a kink that of one side."""
    loss, y = problem.node_loss, problem.data.y
    return jax.jvp(lambda z: loss.derivative(z, y), (z,), (jnp.ones_like(z),))[1]


def _expect_smooth(problem: Problem) -> None:
    loss, regularizer = problem.loss, problem.regularizer
    if loss.smoothness is None:
        raise ValueError(f"Newton: {type(loss).__name__} has no second derivative; use Mocha(), or a smooth loss.")
    if regularizer.learned:
        raise ValueError(
            f"Newton: {type(regularizer).__name__} learns the relationship, and this method is for a given one; use "
            f"Mocha()."
        )
