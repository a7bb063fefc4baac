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

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import total
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss


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


def _slopes(loss: Loss, z: Array, y: Array, stands: Array, *betas: Array) -> list[Array]:
    """Return every sample's slope. Both points have the same loss at z: what changes is the Fenchel-Young term."""
    return [loss.fenchel_young_change(z, stands, beta, y) for beta in betas]


def mixed(weights: Iterable[Array], points: Iterable[Array]) -> Array:
    """Every node's mixture of p points ``[m, ...]``, with p weights ``[m]`` that sum to one."""
    (_, *shares), (first, *others) = weights, points
    return first + total(expand(a, point) * (point - first) for a, point in zip(shares, others, strict=True))


def expand(by_node: Array, like: Array) -> Array:
    """``[m]`` to ``[m, 1, ...]``."""
    return jnp.expand_dims(by_node, range(by_node.ndim, like.ndim))
