r"""An interior point method over all tasks: second-order steps for losses with kinks.

Such a loss is a sum of functions with one kink each. Between the bounds of its dual one with the kink at $-\phi$ has a
linear conjugate, $\ell^*(-\beta) = \phi\beta$ plus a constant, and the duals of a sample add up to its own. With
multipliers $p, q > 0$ of the distances $a, b > 0$ of a dual from its lower and upper bound the optimum satisfies

$$
\phi + z - p + q = 0, \qquad pa = 0, \qquad qb = 0, \qquad W = \bar M V(\beta),
$$

and a step of Newton's method goes to where the products are $\mu$ in place of 0. Eliminated sample by sample, it is the
step of `Newton` with the curvatures $1/(p/a + q/b)$ (Ferris and Munson 2002). Each round is one of Mehrotra's: a first
solution, with $\mu = 0$, tells how small a $\mu$ is within reach and corrects for the products of changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.base import Drawn
from mocha_jax._algorithms.primal_method import SecondOrderMethod, SecondOrderState
from mocha_jax._algorithms.second_derivatives import curvature
from mocha_jax._core.pytree import Pytree
from mocha_jax._node.dealt import of_parts
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem
from mocha_jax.systems._base import Info, Request, Work

# The share of the longest feasible step that is taken.
_SHARE = 0.98

# A ridge on every dual, in roundings of the largest curvature that the coupling gives it: without one the systems
# become singular in floating point (Friedlander and Orban 2012).
_RIDGE = 8.0

# The products aimed at are those that the predictor step would leave, as a share of today's, to this power
# (Mehrotra 1992).
_EXPONENT = 3

# A state belongs to this problem where its gap is at most so many times the one it had. A step is refused that makes
# the gap so many times the smallest one so far: rounding limits the steps then.
_SAME, _WORSE = 4.0, 2.0

# A round is idle where the gap has not become less and is so many times what the products say that it is: what is more
# is rounding. After so many rounds more do not help.
_ROUNDED, _IDLE = 1e3, 8


class Interior(Pytree):
    """Distances of the duals of all pieces from their bounds, with multipliers; or a change of these."""

    below: Array  # [k, m, n] from the lower bound
    above: Array  # [k, m, n] to the upper bound
    lower: Array  # [k, m, n] multiplier of the lower bound
    upper: Array  # [k, m, n]

    def products(self) -> tuple[Array, Array]:
        """Products with the multipliers, which are 0 at the optimum."""
        return self.lower * self.below, self.upper * self.above


class InteriorState(SecondOrderState):
    """The state of the interior point method between two rounds."""

    point: Interior
    gap: Array  # [] the smallest so far
    idle: Array  # [] int32 rounds one after the other that only rounding kept from gaining

    @property
    def settled(self) -> Array:
        return self.idle >= _IDLE

    def moved(self, move: Callable[..., Array]) -> InteriorState:
        """Padding is in the middle between bounds of its own."""
        fields = jax.tree.leaves(self.point)
        by_row = jnp.moveaxis(jnp.concatenate([*fields, self.beta[None]]), 0, 2)
        pieces = len(fields[0])
        middle = np.r_[np.full(4 * pieces, 0.5), 0.0]
        *moved, beta = jnp.split(jnp.moveaxis(move(by_row, middle), 2, 0), [pieces * i for i in range(1, 5)])
        return self.replace(beta=beta[0], point=Interior(*moved))


class InteriorPoint(SecondOrderMethod):
    r"""An interior point method for losses with kinks and a given relationship.

    For `Hinge`, `Absolute`, `Quantile`, `EpsilonInsensitive` and `Ordinal`, which are piecewise linear, and `PerTask`
    of one kind of them (of `Ordinal`, with as many thresholds in every task). Ten to thirty rounds reach a relative gap
    of 1e-4, whatever the regularizer's strength. In a round nodes send a matrix of $d (d + 1) / 2$ numbers, two vectors
    and how far they can go, and the server solves the system of `Newton` twice.

    The method is for one machine and few features: a round needs the answers of all nodes for all of their samples. If
    any is missing the server repeats it.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1e-3, 1e-5))
      >>> solution = mj.solve(problem, InteriorPoint(), tol=1e-4)
      >>> solution.status.name, solution.rounds <= 25
      ('CONVERGED', True)

    References:
      - Ferris and Munson, Interior-Point Methods for Massive Support Vector Machines, 2002.
      - Mehrotra, On the Implementation of a Primal-Dual Interior Point Method, 1992.
    """

    def check(self, problem: Problem) -> None:
        super().check(problem)
        _expect_piecewise_linear(problem)

    def init(self, problem: Problem) -> InteriorState:
        """Start from W = 0 in the middle between the bounds."""
        self.expect(problem)
        _expect_piecewise_linear(problem)
        problem = of_parts(problem)
        data = problem.data
        w, nothing = jnp.zeros((data.num_tasks, data.num_features), data.dtype), jnp.zeros((), data.dtype)
        point = _begun(problem)
        coupling, never = problem.regularizer.coupling(data.num_tasks), jnp.full((), jnp.inf, data.dtype)
        zero = jnp.zeros((), jnp.int32)
        return InteriorState(zero, w, None, coupling, never, nothing, _duals(problem, point), point, never, zero)

    def resume(self, state: InteriorState, problem: Problem) -> InteriorState:
        """Keep the point if it is one of this problem: near the bounds there is no way to another's optimum."""
        state, fresh = self.kept(state, problem, InteriorState), self.init(problem)
        shape = len(fresh.point.below), *problem.data.y.shape
        if state.point.below.shape != shape:
            raise ValueError(
                f"InteriorPoint: the state has duals {state.point.below.shape}, of pieces of the loss, nodes and "
                f"samples, and the problem has {shape}."
            )
        state, problem = self.to_layout(state, problem), of_parts(problem)
        w, point, gap = jax.tree.map(lambda a: a.astype(problem.data.dtype), (state.w, state.point, state.gap))
        kept = fresh.replace(w=w, point=point, beta=_duals(problem, point), gap=gap)
        same = (self.certify(kept, problem).gap <= _SAME * gap) & _is_between(problem, point)
        return jax.tree.map(partial(jnp.where, same), kept, fresh).replace(round=state.round)

    def warm_start(self, state: InteriorState, problem: Problem) -> InteriorState:
        return self.init(problem).replace(round=self.kept(state, problem, InteriorState).round)

    def fixed_flops(self, problem: Problem) -> Array:
        """Three predictions and two sums."""
        return 10.0 * problem.data.num_features * problem.data.sizes.astype(problem.data.dtype)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        request, d = super().request(problem, round), problem.data.num_features
        up, down = (jnp.asarray(count, problem.data.dtype) for count in (d * (d + 5) // 2 + 4, 2 * d + 3))
        return request.replace(up=up, down=down)

    def step(self, key: Drawn, state: InteriorState, problem: Problem, work: Work) -> tuple[InteriorState, Info]:
        full = self.full_work(problem)
        steps = work.budget(full)
        fixed = jnp.where(steps > 0, self.fixed_flops(problem), 0.0)
        flops = steps.astype(problem.data.dtype) * self.step_flops(problem) + fixed
        problem = of_parts(problem)
        w, point = _stepped(problem, state)
        after = state.replace(w=w, point=point, beta=_duals(problem, point))
        gap = self.certify(after, problem).gap
        after = after.replace(gap=jnp.minimum(gap, state.gap))
        numbers = jnp.isfinite(gap) & jnp.all(jnp.isfinite(point.lower + point.upper))
        answered, better = jnp.all(steps >= full), numbers & (gap <= _WORSE * state.gap)
        after = jax.tree.map(partial(jnp.where, answered & better), after, state)
        idle = ~better | ((gap > _ROUNDED * _products(problem, after.point)) & (gap > 0.75 * state.gap))
        idle = jnp.where(answered, jnp.where(idle, state.idle + 1, 0), state.idle)
        after = after.replace(round=state.round + 1, idle=idle)
        return after, Info(steps, flops, jnp.zeros_like(work.active))


def _stepped(problem: Problem, state: InteriorState) -> tuple[Array, Interior]:
    """Go as far as the bounds allow in the direction that Mehrotra's method chooses."""
    data, point = problem.data, state.point
    _, width, slope = _bounds(problem)
    z = data.predictions(state.w)
    most = data.to_nodes(state.coupling.diagonal()) * data.longest**2
    ridge = _RIDGE * jnp.finfo(data.dtype).eps * most[:, None] * data.weight
    stiff = point.lower / point.below + point.upper / point.above + ridge[None]
    bend = _weighted(problem, 1.0 / stiff)
    step = state.coupling.newton_system(curvature(data, jnp.sum(bend, axis=0)))
    short = state.coupling.apply(data.dual_vectors(state.beta)) - state.w

    def change(lower: Array, upper: Array) -> tuple[Array, Interior]:
        """Solve for the products with the multipliers to become these, to first order."""
        pull = -bend * (slope + z[None] - lower / point.below + upper / point.above)
        dw, scaled = step(short, jnp.sum(pull, axis=0))
        db = _real(problem, safe_ratio(_divided(bend, pull, scaled), data.weight[None]))
        more = (
            (lower - point.lower * db) / point.below - point.lower,
            (upper + point.upper * db) / point.above - point.upper,
        )
        return dw, Interior(db, -db, *more)

    weights, zero = 2.0 * len(width) * jnp.sum(data.weight), jnp.zeros((), z.dtype)  # of all products
    now = _products(problem, point) / weights  # their mean

    def correct(_: Array, carry: tuple[Array, Interior, Array, Array]) -> tuple[Array, Interior, Array, Array]:
        """Change for products of `aim` and for those of the last change; see what it would leave of them."""
        _, way, _, aim = carry
        dw, way = change(aim - way.lower * way.below, aim - way.upper * way.above)
        longest = _longest_step(problem, point, way)
        left = _products(problem, _moved(point, way, jnp.minimum(longest, 1.0))) / weights
        return dw, way, longest, jnp.clip(safe_ratio(left, now) ** _EXPONENT, 0.0, 1.0) * now

    nothing = jnp.zeros_like(state.w), jax.tree.map(jnp.zeros_like, point), zero, zero
    dw, way, longest, _ = lax.fori_loop(0, 2, correct, nothing)
    share = jnp.minimum(_SHARE * longest, 1.0)
    moved = _moved(point, way, share)
    # Of the two distances the smaller one is exact.
    nearer = moved.below < moved.above
    below = jnp.where(nearer, moved.below, width - moved.above)
    return state.w + share * dw, moved.replace(below=below, above=jnp.where(nearer, width - moved.below, moved.above))


def _divided(bend: Array, pull: Array, scaled: Array) -> Array:
    r"""Divide $\rho - bXD$ ``[m, n]`` among the pieces, with $b_k$ and $\rho_k$ ``[k, m, n]`` for b and $\rho$."""
    if len(bend) == 1:
        return scaled[None]
    moved = safe_ratio(jnp.sum(pull, axis=0) - scaled, jnp.sum(bend, axis=0))
    each = pull - bend * moved[None]
    # The piece with the largest curvature has what the others leave: of its own terms little would remain.
    largest = jnp.arange(len(bend))[:, None, None] == jnp.argmax(bend, axis=0)[None]
    return each + jnp.where(largest, (scaled - jnp.sum(each, axis=0))[None], 0.0)


def _moved(point: Interior, way: Interior, share: Array) -> Interior:
    return jax.tree.map(lambda a, d: a + share * d, point, way)


def _longest_step(problem: Problem, point: Interior, way: Interior) -> Array:
    """Return the share of the way at whose end something that must be positive is 0."""

    def least(a: Array, d: Array) -> Array:
        return jnp.min(jnp.where((d < 0) & (problem.data.weight > 0)[None], safe_ratio(a, -d), jnp.inf))

    return jnp.min(jnp.stack(jax.tree.leaves(jax.tree.map(least, point, way))))


def _products(problem: Problem, point: Interior) -> Array:
    """Add up the products: the duality gap of a point that satisfies all other conditions."""
    lower, upper = point.products()
    return jnp.sum(_weighted(problem, lower + upper))


def _bounds(problem: Problem) -> tuple[Array, Array, Array]:
    """Return the lower bounds of the pieces' duals, how far the upper ones are, and their conjugates' slopes."""
    data = problem.data
    pieces = problem.node_loss.pieces(data.y)
    low, high, kink = (
        jnp.stack([jnp.broadcast_to(getattr(piece, name), data.y.shape).astype(data.dtype) for piece in pieces])
        for name in ("low", "high", "kink")
    )
    return low, jnp.where((data.weight > 0)[None], high - low, 1.0), _real(problem, -kink)


def _duals(problem: Problem, point: Interior) -> Array:
    low, width, _ = _bounds(problem)
    beta = jnp.where(point.below < point.above, low + point.below, low + width - point.above)
    own = problem.node_loss.project(jnp.sum(beta, axis=0), problem.data.y)
    return jnp.where(problem.data.weight > 0, own, 0.0)


def _real(problem: Problem, by_piece: Array) -> Array:
    return jnp.where((problem.data.weight > 0)[None], by_piece, 0.0)


def _weighted(problem: Problem, by_piece: Array) -> Array:
    return _real(problem, problem.data.weight[None] * by_piece)


def _begun(problem: Problem) -> Interior:
    """Start in the middle, with multipliers that the slopes at z = 0 ask for."""
    _, width, slope = _bounds(problem)
    scale = jnp.sum(_weighted(problem, jnp.abs(slope))) / (len(slope) * jnp.sum(problem.data.weight))
    scale = jnp.where(scale > 0, scale, 1.0)
    return Interior(0.5 * width, 0.5 * width, jnp.maximum(slope, 0.0) + scale, jnp.maximum(-slope, 0.0) + scale)


def _is_between(problem: Problem, point: Interior) -> Array:
    """Tell whether distances add up to those between the bounds of this problem."""
    _, width, _ = _bounds(problem)
    return jnp.all(jnp.abs(point.below + point.above - width) <= 1e-3 * width)


def _expect_piecewise_linear(problem: Problem) -> None:
    loss, regularizer = problem.loss, problem.regularizer
    if not loss.piecewise_linear:
        other = "Newton()" if loss.smoothness is not None else "Mocha()"
        raise ValueError(
            f"InteriorPoint: {type(loss).__name__} is not divided into pieces with one kink, alike in all tasks; use "
            f"{other}, or one of Hinge, Absolute, Quantile, EpsilonInsensitive and Ordinal."
        )
    if regularizer.learned:
        raise ValueError(
            f"InteriorPoint: {type(regularizer).__name__} learns the relationship, and this method is for a given one; "
            f"use Mocha()."
        )
