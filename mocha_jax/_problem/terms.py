"""Terms of a certificate that a node computes of its own samples and dual variables, a few numbers each."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree
from mocha_jax._data.task_data import TaskData
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
