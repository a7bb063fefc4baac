"""The objective and its certificate, as pure functions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._data import TaskData
from mocha_jax._math import EXACT
from mocha_jax._problem import Problem
from mocha_jax._pytree import Pytree
from mocha_jax.coupling import Coupling


class Certificate(Pytree):
    r"""How far a dual point and the weights it implies are from the optimum, provably.

    ``dual <= optimum <= primal``, so ``primal`` is within ``gap`` of the optimum.
    """

    primal: Array  # [] P(W)
    dual: Array  # [] -D(beta) in the paper's sign, a lower bound on the optimum
    gap: Array  # [] primal - dual, >= 0
    relative_gap: Array  # [] gap / max(|primal|, |dual|)
    task_gaps: Array  # [num_tasks] each task's share of the gap, >= 0, eq. (20)


def predictions(data: TaskData, weights: Array) -> Array:
    """:math:`z_{ti} = w_t^T x_{ti}`: weights ``[num_tasks, d]`` to ``[m, n]``."""
    if weights.shape != (data.num_tasks, data.num_features):
        raise ValueError(f"weights must be [{data.num_tasks}, {data.num_features}] for this data, got {weights.shape}.")
    return jnp.einsum("mnd,md->mn", data.x, data.to_nodes(weights), precision=EXACT)


def objective(problem: Problem, weights: Array) -> Array:
    """P(W) for any weights ``[num_tasks, d]``: data term plus regularizer, a scalar.

    >>> import numpy as np, mocha_jax as mj
    >>> data = mj.pack_tasks([np.ones((2, 3), "f")], [np.ones(2)])
    >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    >>> float(mj.objective(problem, np.zeros((1, 3), "f")))
    2.0
    """
    data, loss = problem.data, problem.loss
    weights = jnp.asarray(weights)
    losses = loss.value(predictions(data, weights), data.y)
    return jnp.sum(_weighted(data, losses)) + problem.regularizer.value(weights)


def dual_vectors(data: TaskData, beta: Array) -> Array:
    r""":math:`v_t = \sum_i c_{ti}\beta_{ti}x_{ti}`: duals ``[m, n]`` to ``[num_tasks, d]``."""
    per_node = jnp.einsum("mn,mnd->md", data.weight * beta, data.x, precision=EXACT)
    return data.to_tasks(per_node)


def certificate(problem: Problem, beta: Array, coupling: Coupling | None = None) -> Certificate:
    r"""Certify a dual point: any feasible `beta` ``[m, n]``, from whatever source.

    Derives V from `beta` and :math:`W = \bar M V` from V, then sums the Fenchel-Young terms.

    Args:
      problem: the problem.
      beta: dual variables; where infeasible the gap is infinite.
      coupling: the operator to certify for; default the regularizer's own.
    """
    if beta.shape != problem.data.y.shape:
        raise ValueError(f"beta must be {list(problem.data.y.shape)} for this data, got {list(beta.shape)}.")
    if coupling is None:
        coupling = problem.regularizer.coupling(problem.data.num_tasks)
    v = dual_vectors(problem.data, beta)
    return certify(problem, beta, v, coupling.apply(v))


def certify(problem: Problem, beta: Array, v: Array, w: Array) -> Certificate:
    r"""The certificate where :math:`w = \nabla R^*(v)` is at hand already.

    Then :math:`R(W) = R^*(V) = \tfrac12\langle V, W\rangle` and the gap is

    .. math:: \sum_t\sum_i c_{ti}\left[\ell(z_{ti}) + \ell^*(-\beta_{ti}) + z_{ti}\beta_{ti}\right].

    Each bracket is non-negative and computed so: summing them loses no digits, where the
    difference of two large objectives would. The dual is reported as primal minus gap.
    """
    data, loss = problem.data, problem.loss
    z = predictions(data, w)
    feasible = loss.project(beta, data.y) == beta
    terms = jnp.where(feasible, loss.fenchel_young(z, beta, data.y), jnp.inf)
    task_gaps = data.to_tasks(jnp.sum(_weighted(data, terms), axis=1))
    gap = jnp.sum(task_gaps)
    primal = jnp.sum(_weighted(data, loss.value(z, data.y))) + 0.5 * jnp.sum(v * w)
    dual = primal - gap
    scale = jnp.maximum(jnp.maximum(jnp.abs(primal), jnp.abs(dual)), jnp.finfo(gap.dtype).tiny)
    return Certificate(primal, dual, gap, gap / scale, task_gaps)


def _weighted(data: TaskData, terms: Array) -> Array:
    """Times c, with padding cut off rather than multiplied: 0 times infinity is not 0."""
    return jnp.where(data.weight > 0, data.weight * terms, 0.0)
