"""Certificates from what nodes report: all of them, or a lower bound where some are silent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Relation
from mocha_jax._problem.gap import Certificate, DualTerms, Reported, jointly_bounded, lower_bound
from mocha_jax._problem.problem import Problem
from mocha_jax.federated._sides import ReceivedAnswers
from mocha_jax.servers._base import Aggregator, ServerState


class _Evaluated(Protocol):
    @property
    def gap(self) -> Array:
        """Data terms of the gap ``[m]``."""

    @property
    def value(self) -> Array:
        """Losses ``[m]``."""


def unknown_terms(terms: DualTerms) -> Any:
    """Unknown terms in place of duals: no node has reported on the next model yet."""
    infinite = jnp.full_like(terms.conjugate, jnp.inf)
    return Reported(infinite, infinite, terms)


def certified(
    problem: Problem, server: Aggregator, rule: ServerState, v: Array, terms: DualTerms, received: ReceivedAnswers,
    up: _Evaluated, exact: Array, bound: Array,
) -> Certificate:  # fmt: skip
    """Certify the model that went down, as far as the answers tell.

    Args:
      problem: with nodes that are counted on.
      server: of the library.
      rule: its state when the model went down.
      v: the dual vectors that it held ``[m, d]``.
      terms: of the same duals.
      received: which nodes answered.
      up: what they say of the model.
      exact: ``[m]`` bool whose gap is with those duals.
      bound: [] a lower bound on the optimum.
    """
    gone, exact = problem.data.sizes == 0, received.now & exact
    gap, value = jnp.where(exact, up.gap, 0.0), jnp.where(received.now, up.value, 0.0)
    certificate = server.certify(problem, rule, cast(Any, Reported(gap, value, terms)), v)
    return _as_far_as_known(problem, certificate, jnp.all(gone | received.now), jnp.all(gone | exact), bound)


def undenied(bound: Array, received: ReceivedAnswers) -> Array:
    """The best lower bound so far; none where a node has denied what it rests on."""
    return jnp.where(jnp.any(received.denied), -jnp.inf, bound)


def best_bound(
    problem: Problem, relation: Relation, terms: DualTerms, v: Array, complete: Array, before: Array
) -> Array:
    """The best lower bound on the optimum; where Omega is learned and nothing bounds that, on the one for Omega.

    Args:
      problem: the problem.
      relation: Omega where it is learned.
      terms: of the duals that the server's vectors belong to.
      v: those vectors ``[m, d]``.
      complete: [] bool whether the terms of all nodes are known.
      before: [] the best one before.
    """
    regularizer, (m, d) = problem.regularizer, v.shape
    offset: Array | float = 0.0
    of_error: Callable[[Array], Array]
    if jointly_bounded(problem):
        conjugate = regularizer.conjugate(v)
        of_error = partial(regularizer.conjugate_bound, num_tasks=m, num_features=d)
    else:
        coupling = regularizer.coupling(m, relation)
        conjugate, offset = coupling.conjugate(v), regularizer.offset(relation, d)
        of_error = partial(_quadratic, regularizer.curvatures(m, relation)[1])
        if regularizer.learned:
            before = jnp.full_like(before, -jnp.inf)
    bound = lower_bound(problem.data, terms, conjugate, of_error) + offset
    return jnp.maximum(before, jnp.where(complete, bound, -jnp.inf))


def _quadratic(steep: Array, norm: Array) -> Array:
    return 0.5 * steep * norm**2


def _as_far_as_known(
    problem: Problem, certificate: Certificate, evaluated: Array, exact: Array, bound: Array
) -> Certificate:
    """The certificate where the answers tell all of it; otherwise the part that an earlier lower bound allows.

    Args:
      problem: the problem.
      certificate: from the answers that there are.
      evaluated: [] bool all nodes have reported their losses of the model.
      exact: [] bool and the terms of its gap, with the duals that the server's vectors belong to.
      bound: [] a lower bound on the optimum.
    """
    infinite, learned = jnp.full_like(bound, jnp.inf), problem.regularizer.learned
    rounding = 4.0 * jnp.finfo(bound.dtype).eps * jnp.abs(certificate.primal)
    gap = jnp.where(exact, certificate.gap, jnp.maximum(certificate.primal - bound, 0.0) + rounding)
    gap = jnp.where(evaluated, gap, infinite)
    dual, joint_gap = jnp.where(exact, certificate.dual, bound), jnp.where(exact, certificate.joint_gap, infinite)
    joint_dual = jnp.where(exact, certificate.joint_dual, -infinite)
    if not learned:
        # Computed in floats, the dual of an exact round may exceed the optimum by a rounding; the bound does not.
        joint_gap, dual, joint_dual = gap, bound, bound
    bounded = certificate.replace(
        gap=gap, dual=dual, joint_gap=joint_gap, joint_dual=joint_dual,
        relative_gap=jnp.where(exact, certificate.relative_gap, _relative(gap, certificate.primal)),
        relative_joint_gap=_relative(joint_gap, certificate.joint_primal),
    )  # fmt: skip
    if problem.regularizer.jointly_convex:
        bounded = bounded.replace(residual=bounded.relative_joint_gap)
    else:
        bounded = bounded.replace(residual=jnp.where(exact, certificate.residual, infinite))
    if jointly_bounded(problem):
        bounded = bounded.with_bound(problem, bound)
    hidden = {
        name: jnp.where(evaluated, getattr(bounded, name), infinite)
        for name in ("primal", "joint_primal", "relative_gap", "joint_gap", "relative_joint_gap", "residual")
    }
    return bounded.replace(**hidden)


def _relative(gap: Array, primal: Array) -> Array:
    """A gap in units of the objective; infinite where it is not known."""
    finite = jnp.isfinite(gap)
    gap = jnp.where(finite, gap, 0.0)
    size = jnp.maximum(jnp.maximum(jnp.abs(primal), jnp.abs(primal - gap)), jnp.finfo(gap.dtype).tiny)
    return jnp.where(finite, gap / size, jnp.inf)
