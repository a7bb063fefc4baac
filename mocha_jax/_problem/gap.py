"""The objective and its certificate, as pure functions; and the terms that a node adds, a few numbers each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, Relation, summary
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.problem import Problem, Quality
from mocha_jax.coupling import Coupling
from mocha_jax.losses import Loss


class DualTerms(Pytree):
    """The nodes' share of a lower bound on the optimum."""

    conjugate: Array  # [m] sum of c l*(-beta), rounded up
    size: Array  # [m] sum of its terms' sizes
    error: Array  # [m] bound on the norm of what is lost of the node's dual vector


class Reported(Pytree):
    """The terms that nodes have reported, in place of their dual variables, where these are elsewhere."""

    gap: Array  # [m] data terms of the gap; infinite where they are not known
    value: Array  # [m] losses
    terms: DualTerms


Duals = Array | Reported  # dual variables [m, n], or what is known of them


def conjugates(data: TaskData, loss: Loss, beta: Array) -> Array:
    r"""$\sum_i c_{ki}\,\ell^*(-\beta_{ki})$ of every node: duals ``[m, n]`` to ``[m]``."""
    return jnp.sum(data.weighted(loss.conjugate(beta, data.y)), axis=1)


def dual_terms(data: TaskData, loss: Loss, beta: Duals) -> DualTerms:
    """The terms of the dual objective; each entry of V may have n roundings."""
    if isinstance(beta, Reported):
        return beta.terms
    terms = data.weighted(loss.conjugate_bound(beta, data.y))
    length = data.longest * jnp.sum(data.weight * jnp.abs(beta), axis=1)
    error = 0.5 * jnp.finfo(beta.dtype).eps * (2.0 + beta.shape[1]) * length
    return DualTerms(jnp.sum(terms, axis=1), jnp.sum(jnp.abs(terms), axis=1), error)


def gap_terms(data: TaskData, loss: Loss, beta: Duals, w: Array) -> tuple[Array, Array]:
    """The data terms of the gap and of the objective, each ``[m]``, at weights ``[m, d]``."""
    if isinstance(beta, Reported):
        return beta.gap, beta.value
    gaps, values = data.sum_over_rows(_gap_and_value, loss, w, beta)
    return gaps, values


def _gap_and_value(loss: Loss, z: Array, y: Array, beta: Array) -> tuple[Array, Array]:
    """Return the Fenchel-Young term and the loss of every sample."""
    feasible = loss.project(beta, y) == beta
    return jnp.where(feasible, loss.fenchel_young(z, beta, y), jnp.inf), loss.value(z, y)


class Certificate(Quality):
    r"""Bounds on the distance of weights and a dual point from the optimum.

    For the Omega at hand ``dual <= optimum <= P(W) <= optimum + gap``. Where Omega is learned and the problem convex in
    W and Omega together, the ``joint`` numbers say the same of the optimum over both. Where Omega is given they repeat
    the others; where the problem is not jointly convex, nothing bounds that optimum: ``joint_gap`` is infinite,
    ``joint_dual`` minus infinity. ``residual`` is the relative joint gap where there is one.

    In a history these numbers are as floats give them. In a `Solution`, and from `mocha_jax.certificate`, all that
    rounding may hide is counted (see `certificate`), and `rounding` says how far ``primal`` may be from P(W).
    """

    primal: Array  # [] P(W, Omega)
    dual: Array  # [] -D(beta) in the paper's sign, a lower bound on the optimum for this Omega
    gap: Array  # [] primal - dual less the rounding, >= 0
    relative_gap: Array  # [] gap / max(|primal|, |dual|)
    task_gaps: Array  # [num_tasks] each task's share of the data terms of the gap, >= 0, eq. (20)
    joint_primal: Array  # [] min over Omega of P(W, Omega)
    joint_dual: Array  # [] a lower bound on the optimum over W and Omega
    joint_gap: Array  # [] distance of joint_primal from a lower bound on the joint optimum
    relative_joint_gap: Array  # []
    gap_before: Array  # [] the gap just before Omega was last replaced; infinite where it was not
    rounding: Array | None = None  # [] bound on the distance of primal from P(W, Omega); None in a history

    @property
    def finite(self) -> Array:
        return (abs(self.gap) < math.inf) & (abs(self.primal) < math.inf)

    @property
    def bound(self) -> Array:
        return self.joint_dual

    def with_bound(self, problem: Problem, bound: Array) -> Certificate:
        """Tighten with a joint dual bound from an earlier round: each bound is valid alone, and so is each gap.

        A better bound need not give the better gap: bounds are less all rounding, and the bracket of the gap is not.
        """
        if not problem.regularizer.learned:
            return self
        lost = 4.0 * jnp.finfo(bound.dtype).eps * jnp.abs(self.joint_primal)
        rounding = lost if self.rounding is None else lost + self.rounding
        by_bound = jnp.maximum(self.joint_primal - bound, 0.0) + rounding
        better = by_bound < self.joint_gap
        gap = jnp.where(better, by_bound, self.joint_gap)
        relative = jnp.where(better, _relative(gap, self.joint_primal), self.relative_joint_gap)
        return self.replace(
            joint_dual=jnp.where(bound > self.joint_dual, bound, self.joint_dual),
            joint_gap=gap,
            relative_joint_gap=relative,
            residual=jnp.where(better, relative, self.residual),
        )

    def __repr__(self) -> str:
        names = ("primal", "dual", "gap", "relative_gap", "joint_gap", "relative_joint_gap")
        return summary(self, {name: getattr(self, name) for name in names})

    def summary(self) -> Certificate:
        return self.replace(task_gaps=None)


@on_purpose
def objective(problem: Problem, weights: Array, relation: Relation = None) -> Array:
    """P(W, Omega) for any weights ``[num_tasks, d]``: data term plus regularizer, a scalar.

    Where Omega is learned and left out, it is minimised over: the joint objective of W.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.ones((2, 3), "f")], [np.ones(2)])
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
      >>> float(mj.objective(problem, np.zeros((1, 3), "f")))
      2.0
    """
    check.instance("objective", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    data, loss = problem.data, problem.node_loss
    weights = check.floats("objective", "weights", weights, (data.num_tasks, data.num_features))
    if relation is not None:
        problem.regularizer.known_relation("objective", relation, data.num_tasks, data.num_features)
    losses = loss.value(data.predictions(weights), data.y)
    return jnp.sum(data.weighted(losses)) + problem.regularizer.value(weights, relation)


def jointly_bounded(problem: Problem) -> bool:
    """Tell whether every dual point bounds the optimum over W and a learned Omega."""
    return problem.regularizer.learned is not None and problem.regularizer.jointly_convex


def certify_implied(
    problem: Problem,
    beta: Duals,
    v: Array,
    relation: Relation,
    coupling: Coupling,
    change: Array | float = 0.0,
    gap_before: Array | float = math.inf,
) -> Certificate:
    r"""The certificate of the weights that V implies, $W = \nabla R^*(V)$."""
    w = coupling.apply(v)
    offset = problem.regularizer.offset(relation, problem.data.num_features)
    return certify(problem, beta, v, w, coupling.value(v, w), coupling.slack(v, w), offset, change, gap_before)


def certify(
    problem: Problem,
    beta: Duals,
    v: Array,
    w: Array,
    value: Array,
    slack: Array | float,
    offset: Array | float = 0.0,
    change: Array | float = 0.0,
    gap_before: Array | float = math.inf,
) -> Certificate:
    r"""The certificate of a dual point and weights.

    The gap is a sum of Fenchel-Young terms, of the losses and of the regularizer:

    $$
    \sum_t\sum_i c_{ti}\left[\ell(z_{ti}) + \ell^*(-\beta_{ti}) + z_{ti}\beta_{ti}\right]
    + \left[R(W) + R^*(V) - \langle V, W\rangle\right].
    $$

    Each bracket is non-negative. Those of the losses are computed so, without a difference of large numbers;
    so is the last one where the weights follow from V, and it is rounded up where they do not. The dual is
    reported as primal minus gap. The joint gap has the same data terms, and in the last bracket R minimised
    over Omega and its conjugate.

    Args:
      problem: the problem.
      beta: dual variables ``[m, n]``, or what nodes have reported of them.
      v: the dual vectors of `beta` ``[num_tasks, d]``.
      w: the weights ``[num_tasks, d]``.
      value: R(W, Omega), without `offset`.
      slack: the last bracket for this Omega, 0 where $W = \nabla R^*(V)$.
      offset: the terms of R that do not depend on W; they count in the objective, not in relative gaps.
      change: by how much Omega last lowered the objective; part of the residual where there is no joint gap.
      gap_before: the gap just before that.
    """
    data, regularizer = problem.data, problem.regularizer
    node_gaps, values = gap_terms(data, problem.node_loss, beta, data.to_nodes(w))
    task_gaps, joint = data.to_tasks(node_gaps), None
    if jointly_bounded(problem):
        least, conjugate = regularizer.value(w), regularizer.conjugate(v)
        # In exact arithmetic never below the bracket for one Omega.
        bracket = jnp.maximum(fenchel_young(least, conjugate, v, w), slack)
        of_error = partial(regularizer.conjugate_bound, num_tasks=data.num_tasks, num_features=data.num_features)
        joint = least, bracket, lower_bound(data, dual_terms(data, problem.node_loss, beta), conjugate, of_error)
    return assembled(problem, task_gaps, jnp.sum(values), (value, slack), joint, offset, change, gap_before)


def assembled(
    problem: Problem,
    task_gaps: Array,
    empirical: Array,
    at_omega: tuple[Array, Array | float],
    joint: tuple[Array, Array, Array | None] | None,
    offset: Array | float,
    change: Array | float,
    gap_before: Array | float,
    rounding: Array | None = None,
) -> Certificate:
    """A certificate from its parts.

    Args:
      problem: the problem; outside of the domain of its hyperparameters there is no certificate.
      task_gaps: each task's share of the data terms ``[num_tasks]``.
      empirical: the data term of the objective.
      at_omega: R(W, Omega) without `offset`, and the last bracket.
      joint: the same minimised over Omega, on jointly convex problems that learn it, and a lower bound on the optimum;
        default what follows from the rest.
      offset: see `certify`.
      change: see `certify`.
      gap_before: see `certify`.
      rounding: bound on the error of the objective, where it is known.
    """
    regularizer, (value, slack) = problem.regularizer, at_omega
    gap = jnp.where(problem.admissible, jnp.sum(task_gaps) + slack, jnp.nan)
    primal, counted = empirical + value + offset, empirical + value
    if not regularizer.learned:
        joint_primal, joint_gap = primal, gap
    elif joint is not None:
        joint_primal, joint_gap = empirical + joint[0], jnp.sum(task_gaps) + joint[1]
    else:
        joint_primal, joint_gap = primal, jnp.full_like(gap, jnp.inf)
    joint_gap = jnp.where(problem.admissible, joint_gap, jnp.nan)
    relative = _relative(joint_gap, joint_primal)
    lost = jnp.zeros_like(gap) if rounding is None else rounding
    joint_dual = joint_primal - joint_gap - lost
    if regularizer.learned:  # it may be compared with other rounds' numbers: nothing may be gained by rounding
        joint_dual = joint_dual - 4.0 * jnp.finfo(gap.dtype).eps * (jnp.abs(joint_primal) + joint_gap)
    if joint is not None and joint[2] is not None:
        joint_dual = jnp.where(problem.admissible, joint[2], jnp.nan)
    return Certificate(
        relative if regularizer.jointly_convex else _relative(gap + change, counted, gap),
        primal, primal - gap - lost, gap, _relative(gap, counted), task_gaps,
        joint_primal, joint_dual, joint_gap, relative, jnp.asarray(gap_before, gap.dtype), rounding,
    )  # fmt: skip


def lower_bound(data: TaskData, terms: DualTerms, conjugate: Array, of_error: Callable[[Array], Array]) -> Array:
    r"""A lower bound on an optimum, $-\sum c\,\ell^*(-\beta) - R^*(V)$, less what rounding may have added.

    It is kept for later rounds, so that it must hold by itself.

    Args:
      data: for tasks and features.
      terms: what the nodes know of it.
      conjugate: R*(V), [].
      of_error: from the Frobenius norm of any error of V to its R*, at most.
    """
    missed = of_error(jnp.sqrt(jnp.sum(data.to_tasks(terms.error) ** 2)))
    moved = 2.0 * jnp.sqrt(jnp.maximum(conjugate, 0.0)) * jnp.sqrt(missed) + missed
    roundings = jnp.finfo(conjugate.dtype).eps * (8.0 + 2.0 * math.sqrt(min(data.num_tasks, data.num_features)))
    return -jnp.sum(terms.conjugate) - conjugate - moved - roundings * (jnp.sum(terms.size) + conjugate)


def fenchel_young(value: Array, conjugate: Array, v: Array, w: Array) -> Array:
    r"""$R(W) + R^*(V) - \langle V, W\rangle \ge 0$, rounded up by what its three terms may have lost."""
    inner = jnp.sum(v * w)
    rounding = 8.0 * jnp.finfo(inner.dtype).eps * (jnp.abs(value) + jnp.abs(conjugate) + jnp.abs(inner))
    return jnp.maximum(value + conjugate - inner, 0.0) + rounding


def _relative(distance: Array, primal: Array, gap: Array | None = None) -> Array:
    """A distance over the larger of two bounds, the objective and that less the gap; infinite where either is."""
    dual = primal - (distance if gap is None else gap)
    scale = jnp.maximum(jnp.maximum(jnp.abs(primal), jnp.abs(dual)), jnp.finfo(primal.dtype).tiny)
    return jnp.where((distance == jnp.inf) | (scale == jnp.inf), jnp.inf, distance / scale)
