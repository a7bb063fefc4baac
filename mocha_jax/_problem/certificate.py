r"""Certificates that hold for the numbers as they are: with everything that rounding may hide.

Of weights W and duals $\beta$, both as they are stored, the gap is a sum of non-negative terms,

$$
P(W) - D(\beta) = \sum_t\sum_i c_{ti}\left[\ell(z_{ti}) + \ell^*(-\beta_{ti}) + z_{ti}\beta_{ti}\right]
+ \left[R(W) + R^*(V) - \langle V, W\rangle\right], \qquad z_{ti} = w_t^\top x_{ti},\quad
v_t = \sum_i c_{ti}\beta_{ti}x_{ti},
$$

and each is bounded from above. Predictions z and dual vectors V are computed in two floats
(`mocha_jax._numerics.twofold`) and come with a bound on their error. A term of the first kind is convex in z, hence
largest at one end of the interval in which z lies. The last bracket is a squared distance, for which the regularizer
answers (`Regularizer.bracket`): of a given relationship by a bound on every operation, of a learned one by the usual
estimates for singular values.

Rounding matters where the optimum is tiny beside the terms of the gap, as on separable data with a small
$\lambda$: a margin that floats round to 1 costs nothing there, and the true one does.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Relation
from mocha_jax._numerics import twofold
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._numerics.twofold import Pair, additions
from mocha_jax._problem.gap import Certificate, assembled, jointly_bounded
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss
from mocha_jax.regularizers import JointSparse


@on_purpose
def certificate(problem: Problem, beta: Array, relation: Relation = None, weights: Array | None = None) -> Certificate:
    r"""Certify a dual point: any feasible `beta` ``[m, n]``, from any source.

    Derives V from `beta` and, unless there are weights to certify, $W = \bar M V$ from V. Then adds up the
    Fenchel-Young terms and what rounding may hide of them.

    Args:
      problem: the problem.
      beta: dual variables; where infeasible the gap is infinite.
      relation: Omega where it is learned, as the regularizer keeps it: ``solution.relation``; default the initial one.
      weights: what to certify ``[num_tasks, d]``; default the weights that `beta` implies.
    """
    check.instance("certificate", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    data, regularizer = problem.data, problem.regularizer
    beta = check.floats("certificate", "beta", beta, data.y.shape)
    relation = regularizer.known_relation("certificate", relation, data.num_tasks, data.num_features)
    vectors = _dual_vectors(problem, beta)
    if weights is None:
        weights = regularizer.coupling(data.num_tasks, relation).apply(vectors[0])
    else:
        weights = check.floats("certificate", "weights", weights, (data.num_tasks, data.num_features))
    return _certified(problem, beta, vectors, weights, relation)


def proven(
    problem: Problem,
    beta: Array,
    weights: Array,
    relation: Relation,
    change: Array | float = 0.0,
    gap_before: Array | float = math.inf,
) -> Certificate:
    """Certify any weights by any dual point.

    Args:
      problem: the problem.
      beta: dual variables ``[m, n]``.
      weights: ``[num_tasks, d]``.
      relation: Omega where it is learned, as the regularizer keeps it.
      change: see `certify`.
      gap_before: see `certify`.
    """
    return _certified(problem, beta, _dual_vectors(problem, beta), weights, relation, change, gap_before)


@on_purpose
def free_intercept(problem: Problem, beta: Array, relation: Relation, weights: Array) -> Certificate:
    r"""Certify weights for the problem whose intercept is not penalised; arguments as `certificate`.

    The dual of that problem has a constraint more for every task, $\sum_i c_{ti}\beta_{ti} = 0$. Of the duals that are
    positive, or of those that are negative, whichever weigh more are made smaller by one factor until it holds. That
    costs little where the intercept was hardly penalised, as by ``pack_tasks(..., intercept=10.0)``. With a constant
    feature s the weights found are at most what the best intercepts b cost there from the optimum: with a given
    relationship of order $\lambda b^2/s^2$; with (14), whose penalty is the square of a sum of singular values,
    $2\lambda\|W\|_*\|b\|/s + \lambda\|b\|^2/s^2$.

    The bound counts what rounding leaves of the sum, times the intercepts here, for those of the optimum.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> rng = np.random.default_rng(0)
      >>> xs = [rng.normal(size=(40, 2)).astype("f") for _ in range(3)]
      >>> ys = [np.sign(x[:, 0] + t) for t, x in enumerate(xs)]
      >>> data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=10.0)
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Independent(0.01))
      >>> s = mj.solve(problem, tol=1e-4)
      >>> bool(mj.free_intercept(problem, s.state.beta, s.relation, s.weights).relative_gap < 0.01)
      True
    """
    check.instance("free_intercept", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    data, regularizer = problem.data, problem.regularizer
    if not data.intercept:
        raise ValueError("free_intercept: problem must have samples with an intercept; pack them with intercept=10.0.")
    if isinstance(regularizer, JointSparse):
        raise ValueError("free_intercept: JointSparse learns a scale of the intercept; there is no such certificate.")
    beta = check.floats("free_intercept", "beta", beta, data.y.shape)
    weights = check.floats("free_intercept", "weights", weights, (data.num_tasks, data.num_features))
    relation = regularizer.known_relation("free_intercept", relation, data.num_tasks, data.num_features)
    up, down = (data.to_tasks(jnp.sum(data.weighted(jnp.maximum(a, 0.0)), axis=1)) for a in (beta, -beta))
    less = jnp.minimum(up, down)
    shrink = [data.to_nodes(safe_ratio(less, a))[:, None] for a in (up, down)]
    beta = jnp.where(beta > 0, beta * shrink[0], beta * shrink[1])
    return _certified(problem, beta, _dual_vectors(problem, beta), weights, relation, free=1)


def _dual_vectors(problem: Problem, beta: Array) -> Pair:
    """V of the duals and a bound on its error, each ``[num_tasks, d]``."""
    data, unit = problem.data, 0.5 * jnp.finfo(beta.dtype).eps
    limits = jnp.finfo(beta.dtype)
    factors, lost = twofold.product(data.weight, beta)
    v, error = data.map_samples(twofold.combine_with_error, (), factors, lost)
    # What is lost of a factor may itself be lost, being too small.
    error = error + 16.0 * limits.tiny * beta.shape[1] * data.longest[:, None]
    v, added = _sums(problem, v)
    # Errors are squared in what follows, and the squares must be numbers.
    return v, data.to_tasks(error) * (1.0 + 4.0 * unit * data.num_nodes) + added + 2.0 * limits.tiny**0.5


def _sums(problem: Problem, by_node: Array) -> Pair:
    """Add up the nodes of every task, with a bound on the error."""
    data = problem.data
    if not data.shared:
        return data.to_tasks(by_node), jnp.zeros((), by_node.dtype)
    return twofold.added(by_node, data.to_tasks, data.to_nodes)


def _certified(
    problem: Problem,
    beta: Array,
    vectors: Pair,
    weights: Array,
    relation: Relation,
    change: Array | float = 0.0,
    gap_before: Array | float = math.inf,
    free: int = 0,
) -> Certificate:
    """The certificate; with `free`, of the problem in which so many features, the last ones, are not penalised."""
    data, regularizer, unit = problem.data, problem.regularizer, 0.5 * jnp.finfo(beta.dtype).eps
    z, error = data.map_samples(twofold.times_with_error, (data.to_nodes(weights),))
    terms, losses, moved = _of_samples(problem.node_loss, z, error, data.y, beta)
    # The terms are not negative, so that adding them up costs a few roundings of the result.
    more = 1.0 + unit * (16.0 + 2.0 * additions(beta.size))
    task_gaps, added = _sums(problem, jnp.sum(data.weighted(terms), axis=1))
    task_gaps = jnp.where(_admissible(problem), more * (task_gaps + added), jnp.nan)
    empirical = jnp.sum(data.weighted(losses))
    of_data = more * jnp.sum(data.weighted(moved)) + (more - 1.0) * empirical
    penalised = data.num_features - free
    of_free = jnp.sum(jnp.abs(weights[:, penalised:]) * (jnp.abs(vectors[0]) + vectors[1])[:, penalised:])
    vectors, weights = (vectors[0][:, :penalised], vectors[1][:, :penalised]), weights[:, :penalised]
    offset = regularizer.offset(relation, penalised)
    value = regularizer.penalty(weights, relation)
    vanished = _vanished(problem, relation) + of_free
    of_data = of_data + vanished + 4.0 * unit * (empirical + jnp.abs(value) + jnp.abs(offset))
    rounding = of_data + regularizer.value_error(weights, relation)
    joint = None
    if jointly_bounded(problem):
        least = regularizer.value(weights)
        joint = least, vanished + regularizer.bracket(*vectors, weights), None
        of_joint = of_data + regularizer.value_error(weights) + 4.0 * unit * jnp.abs(least)
        rounding = jnp.maximum(rounding, of_joint)
    at_omega = value, vanished + regularizer.bracket(*vectors, weights, relation)
    return assembled(problem, task_gaps, empirical, at_omega, joint, offset, change, gap_before, rounding)


def _admissible(problem: Problem) -> Array:
    """Tell whether samples have valid weights and labels, [] bool; it works for traced ones too."""
    data = problem.data
    fine = (data.weight >= 0) & jnp.isfinite(data.weight * data.y)
    if problem.loss.label_rule:
        fine = fine & (problem.node_loss.admits(data.y) | (data.weight == 0))
    return jnp.all(fine)


def _vanished(problem: Problem, relation: Relation) -> Array:
    """Bound what is lost of numbers too small to be kept: a few of that size in every term, with its factors."""
    data, tiny = problem.data, jnp.finfo(problem.data.dtype).tiny
    of_losses = 1.0 + (0.0 if problem.loss.smoothness is None else jnp.asarray(problem.loss.smoothness))
    terms = jnp.sum(data.weight) * of_losses + data.weight.size
    steep, flat = problem.regularizer.curvatures(data.num_tasks, relation)
    return 32.0 * tiny * (terms + data.num_tasks * data.num_features * (1.0 + steep + flat))


def _of_samples(loss: Loss, z: Array, error: Array, y: Array, beta: Array) -> tuple[Array, Array, Array]:
    """Return a bound on every sample's term, its loss, and a bound on that loss's rounding."""
    eps = jnp.finfo(z.dtype).eps
    feasible = loss.project(beta, y) == beta
    value = loss.value(z, y)
    # A convex function differs within the interval from its value in the middle by at most as much as at the ends.
    moved = jnp.maximum(*(loss.value(end, y) for end in loss.ends(z, error, beta, y))) - value
    terms = jnp.where(feasible, loss.fenchel_young_bound(z, error, beta, y), jnp.inf)
    return terms, value, moved + 8.0 * eps * jnp.abs(value)
