r"""Regularizers whose learned :math:`\Omega` is limited by its trace: (12) and (14).

Both are functions of singular values only, and jointly convex. With s the singular values of W and m tasks:

- the best Omega has W's left singular vectors and eigenvalues from s: `_fit`;
- minimised over Omega, R is a function of s, and its conjugate one of the singular values of V;
- the proximal step in W *and* Omega is one function of the singular values of its argument.

Omega is kept as ``rest * I + F F'`` with F ``[m, min(m, d)]`` (`coupling.LowRank`): with many tasks nothing
of size m x m exists.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._math import matmul, safe_ratio
from mocha_jax._pytree import Pytree, static
from mocha_jax.coupling import Coupling, LowRank, as_matrix
from mocha_jax.regularizers._base import Regularizer, fenchel_young_bound
from mocha_jax.spectral import left_spectral_map, safe_sqrt, singular_values, spectral_map, thin_svd

# Roundings of the largest singular value in each, as LAPACK finds them: about one, seen up to 800 x 800.
_NOISE = 2.0


class TraceLimited(Regularizer):
    r"""What (12) and (14) share; a subclass says what happens to singular values."""

    learned: ClassVar[bool] = True

    @abstractmethod
    def _total(self) -> Array:
        """The trace of Omega."""

    @abstractmethod
    def _fit(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        """Eigenvalues of the best Omega ``[r]``, and the one shared by all other directions."""

    @abstractmethod
    def _curvature(self, omega: Array) -> Array:
        r"""Eigenvalues of :math:`\bar M` from those of Omega."""

    @abstractmethod
    def _value(self, s: Array) -> Array:
        """R minimised over Omega."""

    @abstractmethod
    def _conjugate(self, v: Array) -> Array:
        """The conjugate of `_value`, from the singular values of V in falling order."""

    @abstractmethod
    def _prox(self, y: Array, rho: Array) -> Array:
        """Singular values of the proximal step, from those of its argument in falling order."""

    def value(self, weights: Array, omega: LowRank | None = None) -> Array:
        if omega is None:
            return self._value(singular_values(weights))
        # tr(W' inv(M) W) / 2, infinite where W leaves the range of a singular Omega.
        coupling = self._coupling_of(omega)
        u, f, _ = thin_svd(coupling.factor)
        along = jnp.sum(matmul(u.T, weights) ** 2, axis=1)
        aside = jnp.sum((weights - matmul(u, matmul(u.T, weights))) ** 2)
        energy, curvature = jnp.append(along, aside), jnp.append(coupling.base + f**2, coupling.base)
        nothing = energy <= jnp.finfo(energy.dtype).eps * jnp.sum(energy)
        free = curvature <= jnp.finfo(energy.dtype).eps * jnp.max(curvature)
        terms = jnp.where(free, jnp.where(nothing, 0.0, jnp.inf), energy / jnp.where(free, 1.0, curvature))
        return 0.5 * jnp.sum(terms)

    def conjugate(self, v: Array) -> Array:
        return self._conjugate(singular_values(v))

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # It is largest where all of a matrix lies in one direction.
        return self._conjugate(jnp.zeros(min(num_tasks, num_features), norm.dtype).at[0].set(norm))

    def joint_bracket(self, v: Array, error: Array, weights: Array) -> Array:
        of_error = self.conjugate_bound(jnp.sqrt(jnp.sum(error**2)), *v.shape)
        return fenchel_young_bound(self.value(weights), self.conjugate(v), v, weights, error, of_error)

    def value_error(self, weights: Array, omega: LowRank | None = None) -> Array:
        if omega is not None:
            return super().value_error(weights, omega)
        # The noise of small singular values is of the size of the largest's rounding, and of one sign.
        s = singular_values(weights)
        noise = _NOISE * jnp.finfo(s.dtype).eps * jnp.max(s, initial=0.0)
        return super().value_error(weights) + self._value(s + noise) - self._value(jnp.maximum(s - noise, 0.0))

    def prox(self, y: Array, rho: Array) -> Array:
        return spectral_map(_prox_values, y, (self, rho))

    def initial_omega(self, num_tasks: int, num_features: int) -> LowRank:
        total = jnp.asarray(self._total())
        factor = jnp.zeros((num_tasks, min(num_tasks, num_features)), total.dtype)
        return LowRank(total / num_tasks, factor)

    def update_omega(self, omega: Any, weights: Array, smoothing: Array | float = 0.0) -> LowRank:
        m, d = weights.shape
        fit = _Fit(self, jnp.asarray(smoothing, weights.dtype), m)
        rest = self._fit(singular_values(weights), m, fit.smoothing)[1]
        apply = spectral_map if m >= d else left_spectral_map
        return LowRank(rest, apply(_omega_factor_values, weights, fit))

    def restart_omega(self, omega: LowRank) -> LowRank:
        return self._rescaled(omega)

    def extend_omega(self, omega: LowRank, num_tasks: int, num_features: int) -> LowRank:
        old, rank = omega.factor.shape
        rows = jnp.broadcast_to(jnp.mean(omega.factor, axis=0, keepdims=True), (num_tasks - old, rank))
        more = min(num_tasks, num_features) - rank  # more tasks can need more columns
        factor = jnp.pad(jnp.concatenate([omega.factor, rows]), [(0, 0), (0, more)])
        known = self._rescaled(LowRank(omega.base, factor))
        # Besides, their share of the trace is spread evenly: a new task may differ from all others.
        return mixed(known, jnp.asarray((num_tasks - old) / num_tasks, omega.factor.dtype), self._total())

    def _rescaled(self, omega: LowRank) -> LowRank:
        """The record with its trace put right."""
        scale = safe_ratio(jnp.asarray(self._total()), len(omega.factor) * omega.base + jnp.sum(omega.factor**2))
        return LowRank(scale * omega.base, safe_sqrt(scale) * omega.factor)

    def coupling(self, num_tasks: int, omega: LowRank | None = None) -> Coupling:
        return self._coupling_of(self.initial_omega(num_tasks, 1) if omega is None else omega)

    def _coupling_of(self, omega: LowRank) -> LowRank:
        params = self, jnp.asarray(omega.base)
        return LowRank(self._curvature(params[1]), spectral_map(_coupling_factor_values, omega.factor, params))

    def relationship(self, num_tasks: int, omega: LowRank | None = None) -> Array:
        return jnp.asarray(as_matrix(self.initial_omega(num_tasks, 1) if omega is None else omega))

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        rank = min(num_tasks, num_features)
        return self._curvature(jnp.minimum(jnp.asarray(self._total()) / rank, 1.0))


def mixed(omega: LowRank, share: Array, total: Array) -> LowRank:
    """So much of the identity mixed in that the trace stays `total`."""
    even = total / len(omega.factor)
    return LowRank((1.0 - share) * omega.base + share * even, safe_sqrt(1.0 - share) * omega.factor)


class _Fit(Pytree):
    """What `_omega_factor_values` depends on besides the singular values."""

    regularizer: Any
    smoothing: Array
    num_tasks: int = static()


def _omega_factor_values(s: Array, fit: _Fit) -> Array:
    values, rest = fit.regularizer._fit(s, fit.num_tasks, fit.smoothing)
    return safe_sqrt(values - rest)


def _coupling_factor_values(f: Array, params: Any) -> Array:
    regularizer, rest = params
    return safe_sqrt(regularizer._curvature(rest + f**2) - regularizer._curvature(rest))


def _prox_values(y: Array, params: Any) -> Array:
    regularizer, rho = params
    return regularizer._prox(y, rho)
