r"""Mixtures of the last few dual points of every node, chosen by the central node.

Node k keeps points $\beta_{k0}$ (where it stands), $\beta_{k1}$ (what it has just found) and some older
ones. All are feasible, so are their mixtures, and since $\ell^*$ is convex, moving to a mixture changes the dual
by at most

$$
\sum_{k,j} a_{kj}\,\gamma_{kj} + R^*\Big(\sum_j a_{kj} (v_{kj} - v_{k0})\Big), \qquad
\gamma_{kj} = \sum_i c_{ki}\left[\ell^*(-\beta_{kji}) - \ell^*(-\beta_{k0i}) + z_{ki}(\beta_{kji} - \beta_{k0i})
\right],
$$

z the predictions of the weights W that were broadcast. The central node knows this bound: the vectors v it was sent
anyway, and of every point one number $\gamma$, its slope. It minimises it over weights in a simplex per node and
sends them back, a few numbers a node. Whatever the nodes found, the dual never gets worse, so no safe $\sigma'$
is needed: that would be one weight for all nodes and rounds, chosen before anything was found. In the primal, this is
a bundle method: every node's data term is replaced by the largest of a few of its lower bounds, and R is kept as it is.

Near the optimum a slope is a small difference of large numbers, and a gap can be as large as the square root of what
the dual lacks: to see an improvement as a difference of two values of the dual would be to stop at a gap of
$\sqrt\epsilon$. So nodes add up $\gamma$ sample by sample, from the change of each dual
(`Loss.fenchel_young_change`); lengths are measured relative to each node's longest, for duals are as small as
$\lambda$; and mixtures are told by their distance from where a node stands: one that does not move stays what
it is to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import EXACT
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss

# The weights are good enough when at most this share of what they gain is left to gain.
_TOLERANCE = 0.1

# Steps between two looks at the tolerance, and how many looks at most.
_STEPS_PER_CHECK, _MAX_CHECKS = 4, 15

# A step that was too long is repeated with at least that much more stiffness.
_BACKTRACK = 1.5

# Points nearer than that, as a share of the squared distance of the farthest, move with its step size.
_MIN_SQUARED_DISTANCE = 1e-6

# No curvature is less than this share of the steepest slope: a step of so many weights ends in a corner anyway, and a
# longer one, of samples that are all zero, would drown them in rounding.
_MIN_CURVATURE = 1e-3


class Point(Pytree):
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
    return jnp.stack(problem.data.sum_over_rows(_slopes, problem.loss, problem.data.to_nodes(model), *betas))


def _slopes(loss: Loss, z: Array, y: Array, stands: Array, *betas: Array) -> list[Array]:
    """Return every sample's slope. Both points have the same loss at z: what changes is the Fenchel-Young term."""
    return [loss.fenchel_young_change(z, stands, beta, y) for beta in betas]


class FistaState(Pytree):
    """Accelerated projected gradient steps on the weights of all points but the first, which gets the rest."""

    a: Array  # [p - 1, m]
    pull: Array  # [p - 1, m] the gradient there
    y: Array  # [p - 1, m] extrapolated
    pull_y: Array  # [p - 1, m] the gradient there
    t: Array  # []
    stiffness: Array  # [] how much more curved than without coupling
    done: Array  # [] bool


def best_mixture(
    v: Sequence[Array], slope: Array, apply: Callable[[Array], Array], curvature: Array, free: Array
) -> Array:
    r"""The best weights ``[p, m]``, to within a tenth of what they gain or as good as some steps make them.

    Args:
      v: the points' dual vectors, each ``[m, d]``; the first is where each node stands.
      slope: of the others, ``[p - 1, m]``.
      apply: $\bar M$ on vectors per node ``[m, d]``.
      curvature: $\bar M_{tt}$ of every node ``[m]``.
      free: which nodes answered ``[m]``; the others stay where they are.
    """
    # Relative to the first point, so that nothing cancels near the optimum: f(a) = <a, slope> + R*(sum_j a_j along_j).
    along = jnp.stack([point - v[0] for point in v[1:]], axis=1)  # [m, p - 1, d]: a node's points together
    flattest = _MIN_CURVATURE * jnp.max(jnp.abs(slope), axis=0, keepdims=True)
    metric, free = jnp.maximum(_metric(along, curvature), flattest), free[None]

    def coupled(a: Array) -> Array:
        pull = apply(jnp.einsum("pm,mpd->md", a, along, precision=EXACT))
        return jnp.einsum("mpd,md->pm", along, pull, precision=EXACT)

    def step(s: FistaState, _: None) -> tuple[FistaState, None]:
        h = s.stiffness * metric
        a = jnp.where(free, nearest_weights(s.y - s.pull_y / h, h), 0.0)
        change = a - s.y
        bent = coupled(change)
        pull = s.pull_y + bent
        # Along the change, how stiff is it indeed? Too long a step is not taken, but a shorter one from where a is.
        needed, counted = jnp.sum(change * bent), jnp.sum(h * change**2)
        short = needed <= counted
        stiffer = s.stiffness * jnp.maximum(_BACKTRACK, needed / jnp.where(short, 1.0, counted))
        again = s.replace(y=s.a, pull_y=s.pull, t=jnp.ones_like(s.t), stiffness=stiffer)
        t = 0.5 + jnp.sqrt(0.25 + s.t**2)
        astray = jnp.sum(h * change * (a - s.a)) < 0  # O'Donoghue and Candes: then momentum starts anew
        ahead = jnp.where(astray, 0.0, (s.t - 1.0) / t)
        taken = s.replace(
            a=a, pull=pull, y=a + ahead * (a - s.a), pull_y=pull + ahead * (pull - s.pull), t=jnp.where(astray, 1.0, t)
        )
        return jax.tree.map(lambda x, y: jnp.where(short, x, y), taken, again), None

    def go_on(s: FistaState) -> FistaState:
        s, _ = lax.scan(step, s, length=_STEPS_PER_CHECK)
        # No other weights gain more than this on top, by convexity.
        least = jnp.minimum(jnp.min(s.pull, axis=0, keepdims=True), 0.0)
        left = jnp.sum(jnp.where(free, jnp.sum(s.a * s.pull, axis=0, keepdims=True) - least, 0.0))
        return s.replace(done=left <= _TOLERANCE * -value(s))

    def value(s: FistaState) -> Array:
        return 0.5 * jnp.sum(s.a * (slope + s.pull))

    stay, one = jnp.zeros_like(slope), jnp.ones((), slope.dtype)
    start = FistaState(stay, slope, stay, slope, one, one, jnp.zeros((), bool))
    found, _ = lax.scan(lambda s, _: (lax.cond(s.done, lambda s: s, go_on, s), None), start, length=_MAX_CHECKS)
    a = jnp.where(value(found) < 0, found.a, stay)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


def _metric(along: Array, curvature: Array) -> Array:
    r"""A metric h ``[p - 1, m]`` with $\sum_j h_{kj} a_{kj}^2 \ge q_k |\sum_j a_{kj} u_{kj}|^2$, u along.

    One number for each point, for old points can be far and new ones near.
    """
    # Relative to each node's largest entry: squares of small numbers would be none.
    size = jnp.max(jnp.abs(along), axis=(1, 2))
    along = along / jnp.where(size > 0, size, 1.0)[:, None, None]
    gram = jnp.einsum("mpd,mqd->mpq", along, along, precision=EXACT)
    tiny = jnp.finfo(along.dtype).tiny ** 0.25
    length = jnp.maximum(jnp.diagonal(gram, axis1=1, axis2=2), tiny)
    length = jnp.maximum(length, _MIN_SQUARED_DISTANCE * jnp.max(length, axis=1, keepdims=True))  # [m, p - 1]
    cosines = gram**2 / (length[:, :, None] * length[:, None, :])
    together = jnp.sqrt(jnp.sum(cosines, axis=(1, 2)) + tiny)
    h = length * (size * (size * curvature) * together)[:, None]
    return jnp.swapaxes(jnp.maximum(h, jnp.finfo(h.dtype).tiny ** 0.5), 0, 1)


def nearest_weights(x: Array, metric: Array) -> Array:
    r"""Projection of every column of x ``[p, m]`` onto $a \ge 0, \sum_j a_j \le 1$ in a metric h ``[p, m]``.

    It is $a_j = [x_j - \tau / h_j]_+$ with the least $\tau \ge 0$ that will do.
    """
    # A set S of points asks for at least tau_S = (sum_S x_j - 1) / (sum_S 1 / h_j), and the right one for tau itself:
    # it is the largest. The right one holds the points no worse than a certain one. (Sorting would take longer.)
    worth, give = x * metric, 1.0 / metric
    among = (worth[:, None] >= worth[None]).astype(x.dtype)  # [point, certain one, m]
    asked = (total(among * x[:, None]) - 1.0) / total(among * give[:, None])
    tau = reduce(jnp.maximum, asked, jnp.zeros_like(x[0]))
    a = jnp.maximum(x - tau[None] * give, 0.0)
    return a / jnp.maximum(total(a), 1.0)[None]


def mixed(weights: Iterable[Array], points: Iterable[Array]) -> Array:
    """Every node's mixture of p points ``[m, ...]``, with p weights ``[m]`` that sum to one."""
    (_, *shares), (first, *others) = weights, points
    return first + total(expand(a, point) * (point - first) for a, point in zip(shares, others, strict=True))


def expand(by_node: Array, like: Array) -> Array:
    """``[m]`` to ``[m, 1, ...]``."""
    return jnp.expand_dims(by_node, range(by_node.ndim, like.ndim))


def total(rows: Iterable[Array]) -> Array:
    """The sum of arrays, one after another: XLA's own reduction over a first axis is slow."""
    return reduce(jnp.add, rows)
