r"""Regularizers that are functions of singular values alone.

With s the singular values of W and m tasks:

- the best Omega has W's left singular vectors and eigenvalues from s: `fit_eigenvalues`;
- minimised over Omega, R is a function of s, and its conjugate one of the singular values of V;
- the proximal step in W *and* Omega is one function of the singular values of its argument.

Omega is kept as ``rest * I + F F'`` with F ``[m, min(m, d)]`` (`coupling.LowRank`): with many tasks nothing
of size m x m exists. Where a run begins with a given Omega, F is ``[m, m]`` and stays so.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._numerics.tall import Basis, basis_of
from mocha_jax.coupling import Coupling, LowRank, as_matrix
from mocha_jax.regularizers._base import Learned, Nearby
from mocha_jax.spectral import (
    contract,
    left_spectral_map,
    matrix_sqrt,
    safe_sqrt,
    singular_values,
    spectral_map,
)

# Roundings of the largest singular value in each, as LAPACK finds them: about one, seen up to 800 x 800.
_NOISE = 2.0


class Spectral(Learned):
    r"""Base class of jointly convex regularizers that depend on singular values; a subclass defines how."""

    prox_by_sums: ClassVar[bool] = False  # whether there is a `spectral_prox_by_sums`

    @abstractmethod
    def initial_relation(self, num_tasks: int, num_features: int) -> LowRank: ...

    @abstractmethod
    def fit_eigenvalues(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        """Eigenvalues of the best Omega ``[r]``, and the one shared by all other directions."""

    @abstractmethod
    def curvature_of(self, relation: Array) -> Array:
        r"""Eigenvalues of $\bar M$ from those of Omega."""

    @abstractmethod
    def spectral_value(self, s: Array) -> Array:
        """R minimised over Omega."""

    def spectral_penalty(self, s: Array) -> Array:
        """R at the best Omega without `offset`. Default: all of it."""
        return self.spectral_value(s)

    @abstractmethod
    def spectral_conjugate(self, v: Array) -> Array:
        """The conjugate of `spectral_value`, from the singular values of V in falling order."""

    @abstractmethod
    def spectral_prox(self, y: Array, rho: Array) -> Array:
        """Singular values of the proximal step, from those of its argument in falling order."""

    def spectral_prox_by_sums(self, y: Array, rho: Array) -> Array:
        """`spectral_prox` by elementwise operations and sums over all alone, of y in any order with zeros added.

        A kernel that works on matrices of the width of W does it too.
        """
        raise NotImplementedError

    def value(self, weights: Array, relation: LowRank | None = None) -> Array:
        if relation is None:
            return self.spectral_value(singular_values(weights))
        return self.coupling_of(relation).energy(weights) + self.offset(relation, weights.shape[1])

    def conjugate(self, v: Array) -> Array:
        return self.spectral_conjugate(singular_values(v))

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # It is largest where all of a matrix lies in one direction.
        return self.spectral_conjugate(jnp.zeros(min(num_tasks, num_features), norm.dtype).at[0].set(norm))

    def value_error(self, weights: Array, relation: LowRank | None = None) -> Array:
        if relation is not None:
            return super().value_error(weights, relation)
        # The noise of small singular values is of the size of the largest's rounding, and of one sign.
        s = singular_values(weights)
        noise = _NOISE * jnp.finfo(s.dtype).eps * jnp.max(s, initial=0.0)
        return (
            super().value_error(weights)
            + self.spectral_value(s + noise)
            - self.spectral_value(jnp.maximum(s - noise, 0.0))
        )

    def penalty(self, weights: Array, relation: LowRank | None = None) -> Array:
        if relation is None:
            return self.spectral_penalty(singular_values(weights))
        return self.coupling_of(relation).energy(weights)

    def prox(self, y: Array, rho: Array) -> Array:
        return spectral_map(_prox_values, y, (self, rho))

    def prox_start(self, y: Array, usual: Array) -> Basis:
        return basis_of(y if y.shape[0] >= y.shape[1] else y.T, usual)

    def prox_nearby(self, y: Array, rho: Array, known: Basis) -> Nearby:
        by_sums = _prox_values_by_sums if self.prox_by_sums else None
        contracted = contract(_prox_values, y, (self, rho), known, by_sums)
        of_w, of_y = (jnp.pad(s**2, (0, y.shape[1] - len(s))) for s in (contracted.values, contracted.of))
        return Nearby(contracted.matrix, of_w, of_y, contracted.basis)

    def update_relation(self, relation: LowRank | None, weights: Array, smoothing: Array | float = 0.0) -> LowRank:
        m, d = weights.shape
        fit = _SpectralFit(self, jnp.asarray(smoothing, weights.dtype), m)
        rest = self.fit_eigenvalues(singular_values(weights), m, fit.smoothing)[1]
        apply = spectral_map if m >= d else left_spectral_map
        return LowRank(rest, as_wide_as(relation, apply(_omega_factor_values, weights, fit)))

    def relation_of(self, omega: Array, num_features: int) -> LowRank:
        return LowRank(jnp.zeros((), omega.dtype), matrix_sqrt(0.5 * (omega + omega.T)))

    def is_relation(self, relation: object, num_tasks: int, num_features: int) -> bool:
        return is_low_rank(relation, num_tasks, num_features)

    def coupling(self, num_tasks: int, relation: LowRank | None = None) -> Coupling:
        return self.coupling_of(self.initial_relation(num_tasks, 1) if relation is None else relation)

    def coupling_of(self, relation: LowRank) -> LowRank:
        """The coupling for an Omega."""
        return coupling_of(self, relation)

    def relationship(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        return jnp.asarray(as_matrix(self.initial_relation(num_tasks, 1) if relation is None else relation))


class Curved(Protocol):
    """A regularizer whose coupling has Omega's eigenvectors."""

    def curvature_of(self, eigenvalues: Array) -> Array:
        r"""Eigenvalues of $\bar M$ from those of Omega."""


def coupling_of(regularizer: Curved, relation: LowRank) -> LowRank:
    """The coupling for an Omega ``base * I + F F'``, which is of that form too."""
    params = regularizer, jnp.asarray(relation.base)
    return LowRank(regularizer.curvature_of(params[1]), spectral_map(_coupling_factor_values, relation.factor, params))


def as_wide_as(relation: LowRank | None, factor: Array) -> Array:
    """A factor with as many columns as that of the record that it replaces."""
    more = 0 if relation is None else relation.factor.shape[1] - factor.shape[1]
    return jnp.pad(factor, ((0, 0), (0, max(more, 0))))


def with_average_tasks(relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
    """The record with the average task's row appended for every new task."""
    old, rank = relation.factor.shape
    rows = jnp.broadcast_to(jnp.mean(relation.factor, axis=0, keepdims=True), (num_tasks - old, rank))
    more = max(min(num_tasks, num_features) - rank, 0)  # more tasks can need more columns
    return LowRank(relation.base, jnp.pad(jnp.concatenate([relation.factor, rows]), [(0, 0), (0, more)]))


def is_low_rank(relation: object, num_tasks: int, num_features: int) -> bool:
    """Tell whether a record is one of so many tasks, with columns for what the weights can teach or more."""
    if not isinstance(relation, LowRank) or np.shape(relation.base) != () or np.ndim(relation.factor) != 2:
        return False
    rows, columns = np.shape(relation.factor)
    return rows == num_tasks and min(num_tasks, num_features) <= columns <= num_tasks


class _SpectralFit(Pytree):
    """The arguments of `_omega_factor_values` besides the singular values."""

    regularizer: Spectral
    smoothing: Array
    num_tasks: int = static()


def _omega_factor_values(s: Array, fit: _SpectralFit) -> Array:
    values, rest = fit.regularizer.fit_eigenvalues(s, fit.num_tasks, fit.smoothing)
    return safe_sqrt(values - rest)


def _coupling_factor_values(f: Array, params: tuple[Curved, Array]) -> Array:
    regularizer, rest = params
    return safe_sqrt(regularizer.curvature_of(rest + f**2) - regularizer.curvature_of(rest))


def _prox_values(y: Array, params: tuple[Spectral, Array]) -> Array:
    regularizer, rho = params
    return regularizer.spectral_prox(y, rho)


def _prox_values_by_sums(y: Array, params: tuple[Spectral, Array]) -> Array:
    regularizer, rho = params
    return regularizer.spectral_prox_by_sums(y, rho)


# How far the trace of a given Omega may be from what it must be, as a share.
_TRACE_TOLERANCE = 1e-3


class TraceLimited(Spectral):
    r"""Base class of (12) and (14); a subclass defines the map of singular values."""

    @abstractmethod
    def trace(self) -> Array:
        """The trace of Omega."""

    def initial_relation(self, num_tasks: int, num_features: int) -> LowRank:
        total = jnp.asarray(self.trace())
        factor = jnp.zeros((num_tasks, min(num_tasks, num_features)), total.dtype)
        return LowRank(total / num_tasks, factor)

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        super().check_omega(owner, name, omega, num_tasks)
        a, total = check.concrete(omega), check.concrete(self.trace())
        if a is not None and total is not None and not abs(np.trace(a) - total) <= _TRACE_TOLERANCE * total:
            raise ValueError(
                f"{owner}: {name} must have trace {total:g}, as {type(self).__name__} asks, got {np.trace(a):g}; scale "
                f"it."
            )

    def restart_relation(self, relation: LowRank) -> LowRank:
        return self._rescaled(relation)

    def extend_relation(self, relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
        rescaled = self._rescaled(with_average_tasks(relation, num_tasks, num_features))
        # Besides, their share of the trace is spread evenly: a new task may differ from all others.
        new = (num_tasks - len(relation.factor)) / num_tasks
        return mixed_with_identity(rescaled, jnp.asarray(new, relation.factor.dtype), self.trace())

    def _rescaled(self, relation: LowRank) -> LowRank:
        """The record with its trace put right."""
        scale = safe_ratio(
            jnp.asarray(self.trace()), len(relation.factor) * relation.base + jnp.sum(relation.factor**2)
        )
        return LowRank(scale * relation.base, safe_sqrt(scale) * relation.factor)

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        rank = min(num_tasks, num_features)
        return self.curvature_of(jnp.minimum(jnp.asarray(self.trace()) / rank, 1.0))


def mixed_with_identity(relation: LowRank, share: Array, total: Array) -> LowRank:
    """Mix in that share of the identity such that the trace stays `total`."""
    even = total / len(relation.factor)
    return LowRank((1.0 - share) * relation.base + share * even, safe_sqrt(1.0 - share) * relation.factor)
