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

# Models of silent nodes are no longer trusted where losses are higher by that share of the change to first order; trust
# comes back by this factor a round. Chosen on logistic and smoothed hinge losses with drops and sampled nodes.
_SURPRISE, _TRUST = 0.25, 0.7


class Models(Pytree):
    """Second-order models of every node's losses around the base, from what they are to each sample."""

    answered: Array  # [m] int32 1 where the node answered at the base, 0 where it did elsewhere, -1 where never
    value: Array  # [m]
    slopes: Array  # [m, n] -c l' of every sample; within a run as the rows are dealt, as all that is per row
    bend: Array  # [m, n] c l''


class NewtonState(SecondOrderState):
    """The state of Newton's method between two rounds. The server sends ``w`` to the nodes in the next one."""

    z: Array  # [m, n] predictions by w
    models: Models
    base: Array  # [num_tasks, d] the best weights so far; w is on the way from there
    base_z: Array  # [m, n] predictions by the base
    share: Array  # [] of the way from there to the models' optimum
    caution: Array  # [] in [0, 1], how far silent nodes' curvature is taken from their last one to the largest

    def moved(self, move: Callable[..., Array]) -> NewtonState:
        by_row = jnp.stack([self.beta, self.z, self.base_z, self.models.slopes, self.models.bend], axis=2)
        beta, z, base_z, slopes, bend = jnp.moveaxis(move(by_row), 2, 0)
        return self.replace(beta=beta, z=z, base_z=base_z, models=self.models.replace(slopes=slopes, bend=bend))


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

    The server predicts a silent node by its model. Where nodes that answer again have higher losses than theirs said,
    and until that is known, the models of silent nodes are upper bounds, as curved as the loss can be: the second
    moments of a node's samples, which are charged in round 0, times the largest second derivative. So no step that is
    kept raises a bound on the objective; trust comes back while models predict well. Where few nodes answer a round and
    the loss has corners that are hardly smoothed, bounds make small steps, and `Mocha` is faster. A node without time
    for all of its samples sends its gradient, and the server keeps its last Hessian.

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
        models = Models(jnp.full(m, -1, jnp.int32), jnp.zeros(m, dtype), z, _largest(problem))
        coupling, beta = problem.regularizer.coupling(data.num_tasks), slopes_at(problem, z)
        never, none = jnp.full((), jnp.inf, dtype), jnp.zeros((), dtype)
        share = none + _SHORTER  # as if the first one came after a short one
        return NewtonState(
            jnp.zeros((), jnp.int32), w, None, coupling, never, none, beta, z, models, w, z, share, caution=none + 1.0
        )

    def resume(self, state: NewtonState, problem: Problem) -> NewtonState:
        """Keep weights, round and models. Their values may be another problem's, so no node counts as heard before."""
        state = self.kept(state, problem, NewtonState)
        _expect_smooth(problem)
        data = problem.data
        if len(state.z) != data.num_nodes:
            raise ValueError(f"Newton: the state is one of {len(state.z)} nodes, and the data has {data.num_nodes}.")
        state = jax.tree.map(
            lambda a: a.astype(data.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a,
            state.replace(coupling=problem.regularizer.coupling(data.num_tasks)),
        )
        known = state.z.shape == data.y.shape
        models = self.to_layout(state, problem).models if known else self.init(problem).models
        problem = of_parts(problem)
        z, base_z = (problem.data.predictions(w) for w in (state.w, state.base))
        models = models.replace(answered=jnp.full_like(models.answered, -1))
        return state.replace(z=z, base_z=base_z, beta=slopes_at(problem, z), models=models)

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
        answers, sent = (steps > 0) | (work.active & (full == 0)), steps >= full
        flops = steps.astype(problem.data.dtype) * self.step_flops(problem)
        flops = flops + jnp.where(answers, self.fixed_flops(problem), 0.0)
        problem = of_parts(problem)
        data = problem.data
        models, better, caution = _asked(problem, layout, state, answers, answers & sent)
        any_answer = jnp.any(answers)  # without one the round changes nothing
        better &= any_answer
        models = jax.tree.map(partial(jnp.where, any_answer), models, state.models)
        base, base_z = (jnp.where(better, new, old) for new, old in ((state.w, state.base), (state.z, state.base_z)))
        caution = jnp.where(any_answer, caution, state.caution)
        # The share of nodes that will be silent, as now, is judged with caution.
        silent = 1.0 - safe_ratio(*(jnp.sum(which, dtype=data.dtype) for which in (answers & (full > 0), full > 0)))
        bend = models.bend + silent * caution * (_largest(problem) - models.bend)
        direction, left = state.coupling.newton_system(curvature(data, bend))(-base, models.slopes)
        shorter = jnp.where(any_answer, _SHORTER * state.share, state.share)
        share = jnp.where(better, jnp.minimum(state.share / _SHORTER, 1.0), shorter)
        w = base + share * direction
        z = data.predictions(w)
        beta = jnp.where(any_answer, _slopes(problem, z, left), state.beta)
        after = state.replace(
            round=state.round + 1,
            w=w,
            beta=beta,
            z=z,
            models=models,
            base=base,
            base_z=base_z,
            share=share,
            caution=caution,
        )
        return after, Info(steps, flops, jnp.zeros_like(work.active))


def _asked(
    problem: Problem, layout: Layout, state: NewtonState, answers: Array, sent: Array
) -> tuple[Models, Array, Array]:
    """Return the models at the new base, whether that is w, and the caution.

    Where a node has not told its losses at a point, its model takes their place. With a caution of 1 that is an upper
    bound, as curved as the loss can be, so that what is kept lowers a bound on the objective, whoever answers.
    """
    data, loss, old, most = problem.data, problem.node_loss, state.models, _largest(problem)
    moved, own = state.z - state.base_z, data.weighted(state.beta)
    values = add_parts(layout, jnp.sum(data.weighted(loss.value(state.z, data.y)), axis=1))
    known, compared = answers & (old.answered >= 0), answers & (old.answered > 0)
    of_known, both, told, bent = (to_parts(layout, which)[:, None] for which in (known, compared, answers, sent))
    penalty, before, of_step = map(problem.regularizer.value, (state.w, state.base, state.w - state.base))

    def modelled(caution: Array) -> tuple[Array, Array, Array]:
        """Values ``[m]``, slopes and curvatures ``[m, n]`` of silent nodes at w."""
        bend = old.bend + caution * (most - old.bend)
        fall = jnp.sum(moved * (old.slopes - 0.5 * bend * moved), axis=1)
        return old.value - add_parts(layout, fall), old.slopes - bend * moved, bend

    # Rounding errors: of the sums, and of the penalties and predictions that are subtracted.
    rounding = jnp.finfo(data.dtype).eps
    unit, sizes = _ROUNDINGS * rounding, jnp.abs(own) * (jnp.abs(state.z) + jnp.abs(state.base_z))
    subtracted = rounding * (penalty + before + jnp.sum(sizes))
    lost = unit * (jnp.sum(jnp.abs(old.value)) + before) + subtracted
    # Models are too flat where losses are higher than they say, by more than a share of the change to first order.
    surprise = jnp.sum(jnp.where(known, values - modelled(state.caution)[0], 0.0))
    first_order = jnp.abs(jnp.sum(jnp.where(of_known, moved * old.slopes, 0.0)))
    trusting = jnp.where(jnp.any(known), _TRUST, 1.0) * state.caution
    caution = jnp.where(surprise > _SURPRISE * first_order + lost, 1.0, trusting)
    value, slopes, bend = modelled(caution)

    # Of a node that answers for the first time the loss at the base is not known: its model says how it has changed.
    unheard = jnp.where(answers, modelled(jnp.zeros_like(caution))[0], value)
    change = jnp.sum(jnp.where(known, values, unheard) - old.value) + penalty - before
    # R(w) - R(base) is its slope at either end and R(step), which is quadratic.
    ends = jnp.where(both, own, slopes)
    fell, rises = (penalty - before - sign * of_step - jnp.sum(moved * there)
                   for sign, there in ((1.0, old.slopes), (-1.0, ends)))  # fmt: skip
    seen = unit * (jnp.sum(jnp.abs(moved * ends)) + of_step) + subtracted
    kept = (change <= -lost) | ((change <= lost) & (rises <= _RISE * jnp.abs(fell) + seen))

    bend = jnp.where(bent, data.weighted(_second_derivatives(problem, state.z)), jnp.where(told, old.bend, bend))
    at_w = Models(jnp.where(answers, 1, jnp.minimum(old.answered, 0)), jnp.where(answers, values, value),
                  jnp.where(told, own, slopes), bend)  # fmt: skip
    # Where w is not kept, those who had not answered at the base have told a bound on their losses there.
    news = answers & (old.answered <= 0)
    of_news = to_parts(layout, news)[:, None]
    back = add_parts(layout, jnp.sum(moved * (own + 0.5 * most * moved), axis=1))
    at_base = Models(
        jnp.where(news, 0, old.answered), jnp.where(news, values + back, old.value),
        jnp.where(of_news, own + most * moved, old.slopes), jnp.where(of_news, most, old.bend),
    )  # fmt: skip
    return jax.tree.map(partial(jnp.where, kept), at_w, at_base), kept, caution


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
