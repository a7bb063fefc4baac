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

from mocha_jax import _check
from mocha_jax._math import matmul, safe_ratio
from mocha_jax._pytree import Hyperparameter, Pytree, static
from mocha_jax.coupling import Coupling, LowRank, as_matrix
from mocha_jax.regularizers._base import Regularizer
from mocha_jax.spectral import left_spectral_map, safe_sqrt, singular_values, spectral_map, thin_svd, water_fill


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
        return _mixed(known, jnp.asarray((num_tasks - old) / num_tasks, omega.factor.dtype), self._total())

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


def _mixed(omega: LowRank, share: Array, total: Array) -> LowRank:
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


class Probabilistic(TraceLimited):
    r"""Tasks drawn from a Gaussian of unknown covariance :math:`\Omega`, eq. (14); positive and negative relations.

    .. math:: R(W, \Omega) = \lambda\left(\tfrac{1}{\sigma^2}\|W\|_F^2 + \mathrm{tr}(W^\top\Omega^{-1}W)\right),
       \qquad \Omega \succeq 0,\; \mathrm{tr}\,\Omega = 1

    Minimised over :math:`\Omega = (WW^\top)^{1/2}/\mathrm{tr}` it is
    :math:`\lambda(\|W\|_F^2/\sigma^2 + \|W\|_*^2)`, the squared nuclear norm (W is ``[m, d]``).

    Args:
      lam: :math:`\lambda > 0`. Large: all weights go to 0. The :math:`\tfrac{\lambda'}{2}` of code that minimises
        :math:`\tfrac{\lambda'}{2}\mathrm{tr}(W^\top\Omega^{-1}W)` is ``lam = lambda' / 2``, ``sigma2 = inf``.
      sigma2: :math:`\sigma^2 > 0`; infinity drops the ridge, and tiny leaves nothing but a ridge
        :math:`\lambda/\sigma^2`: independent tasks.

    >>> import jax.numpy as jnp
    >>> r = Probabilistic(lam=0.5, sigma2=jnp.inf)
    >>> w = jnp.diag(jnp.array([3.0, 1.0]))
    >>> float(r.value(w))  # 0.5 * (3 + 1)^2
    8.0
    >>> bool(jnp.allclose(r.relationship(2, r.update_omega(None, w)), w / 4))
    True
    """

    lam: Hyperparameter
    sigma2: Hyperparameter = jnp.inf

    def __post_init__(self) -> None:
        _check.positive("Probabilistic", lam=self.lam)
        _check.positive_or_infinite("Probabilistic", sigma2=self.sigma2)

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("Probabilistic", lam=self.lam, sigma2=self.sigma2)

    def covariance(self, num_tasks: int, omega: Any = None) -> Array:
        return self.relationship(num_tasks, omega)

    @property
    def _ridge(self) -> Array:
        return 2.0 * jnp.asarray(self.lam) / jnp.asarray(self.sigma2)

    def _total(self) -> Array:
        return jnp.ones_like(jnp.asarray(self.lam))

    def _fit(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        # Minimises tr((W'W + smoothing I) inv(Omega)): an Omega of full rank, which can grow into directions W lacks.
        roots, least = safe_sqrt(s**2 + smoothing), safe_sqrt(smoothing)
        trace = jnp.sum(roots) + (num_tasks - len(s)) * least
        return jnp.where(trace > 0, safe_ratio(roots, trace), 1.0 / num_tasks), jnp.where(
            trace > 0, safe_ratio(least, trace), 1.0 / num_tasks
        )

    def _curvature(self, omega: Array) -> Array:
        lam, sigma2 = jnp.asarray(self.lam), jnp.asarray(self.sigma2)
        return 0.5 / lam * omega / (1.0 + omega / sigma2)  # never an inverse of Omega

    def _value(self, s: Array) -> Array:
        return 0.5 * self._ridge * jnp.sum(s**2) + jnp.asarray(self.lam) * jnp.sum(s) ** 2

    def _conjugate(self, v: Array) -> Array:
        # max over s >= 0 of v's - ridge |s|^2 / 2 - lam (sum s)^2; s_i = max(v_i - 2 lam T, 0) / ridge, T = sum s.
        lam = jnp.asarray(self.lam)
        total = self._trace_norm(v, self._ridge)
        excess = jnp.maximum(v - 2.0 * lam * total, 0.0)
        return lam * total**2 + 0.5 * safe_ratio(jnp.sum(excess**2), self._ridge)

    def _prox(self, y: Array, rho: Array) -> Array:
        stiffness = rho + self._ridge
        total = self._trace_norm(rho * y, stiffness)
        return jnp.maximum(rho * y - 2.0 * jnp.asarray(self.lam) * total, 0.0) / stiffness

    def _trace_norm(self, v: Array, stiffness: Array) -> Array:
        """T with sum_i max(v_i - 2 lam T, 0) = stiffness T: the largest of its values for the k largest v alone."""
        k = jnp.arange(1, len(v) + 1, dtype=v.dtype)
        return jnp.max(jnp.cumsum(v) / (stiffness + 2.0 * jnp.asarray(self.lam) * k))


class Clustered(TraceLimited):
    r"""Tasks in k clusters, relaxed to a convex set, eq. (12).

    .. math:: R(W, \Omega) = \lambda\,\mathrm{tr}(W^\top(\eta I + \Omega)^{-1}W), \qquad
       0 \preceq \Omega \preceq I,\; \mathrm{tr}\,\Omega = k

    Minimised over :math:`\Omega` it is :math:`\lambda\sum_i s_i^2/(\eta + \omega_i)` with the singular
    values s of W and :math:`\omega_i = \mathrm{clip}(c s_i - \eta, 0, 1)`, :math:`\sum_i\omega_i = k`.

    Args:
      lam: :math:`\lambda > 0`.
      eta: :math:`\eta > 0`, how far tasks may leave the k shared directions. Large: independent tasks with ridge
        :math:`\lambda/\eta`. Tiny: W of rank about k.
      k: number of clusters, in (0, number of tasks]; need not be whole. With k = m every eigenvalue is 1:
        independent tasks with ridge :math:`\lambda/(1+\eta)`.

    >>> import jax.numpy as jnp
    >>> r = Clustered(lam=1.0, eta=0.5, k=1)
    >>> w = jnp.diag(jnp.array([4.0, 0.1]))
    >>> r.relationship(2, r.update_omega(None, w)).round(3).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """

    lam: Hyperparameter
    eta: Hyperparameter
    k: Hyperparameter

    def __post_init__(self) -> None:
        _check.positive("Clustered", lam=self.lam, eta=self.eta, k=self.k)

    def check_tasks(self, num_tasks: int) -> None:
        _check.scalar("Clustered", lam=self.lam, eta=self.eta, k=self.k)
        if (k := _check.concrete(self.k)) is not None and k > num_tasks:
            raise ValueError(
                f"Clustered: k = {k:g} clusters need at least as many tasks, but the data has {num_tasks}."
            )

    def covariance(self, num_tasks: int, omega: Any = None) -> Array:
        omega = self.relationship(num_tasks, omega)
        return omega + jnp.asarray(self.eta) * jnp.eye(num_tasks, dtype=omega.dtype)

    def restart_omega(self, omega: LowRank) -> LowRank:
        # Put the trace right, then mix in as much of the identity as brings the largest eigenvalue down to 1.
        omega = self._rescaled(omega)
        mean = jnp.asarray(self._total()) / len(omega.factor)
        largest = omega.base + jnp.max(singular_values(omega.factor)) ** 2
        share = jnp.clip(safe_ratio(largest - 1.0, largest - mean), 0.0, 1.0)
        return _mixed(omega, share, self._total())

    def extend_omega(self, omega: LowRank, num_tasks: int, num_features: int) -> LowRank:
        return self.restart_omega(super().extend_omega(omega, num_tasks, num_features))

    def _total(self) -> Array:
        return jnp.asarray(self.k, jnp.result_type(self.lam))

    def _fit(self, s: Array, num_tasks: int, smoothing: Array) -> tuple[Array, Array]:
        # No use for smoothing: eta keeps every direction alive.
        values = water_fill(s, jnp.asarray(self.eta), self._total())
        positive = values > 0
        others = num_tasks - jnp.sum(positive, dtype=s.dtype)
        rest = jnp.maximum(safe_ratio(self._total() - jnp.sum(values), others), 0.0)
        return jnp.where(positive, values, rest), rest

    def _curvature(self, omega: Array) -> Array:
        return 0.5 * (jnp.asarray(self.eta) + omega) / jnp.asarray(self.lam)

    def _value(self, s: Array) -> Array:
        filled = water_fill(s, jnp.asarray(self.eta), self._total())
        return jnp.asarray(self.lam) * jnp.sum(s**2 / (jnp.asarray(self.eta) + filled))

    def _conjugate(self, v: Array) -> Array:
        first_k = jnp.clip(self._total() - jnp.arange(len(v), dtype=v.dtype), 0.0, 1.0)
        return jnp.sum(self._curvature(first_k) * v**2) / 2.0

    def _prox(self, y: Array, rho: Array) -> Array:
        lam, eta = jnp.asarray(self.lam), jnp.asarray(self.eta)
        filled = water_fill(y, eta + 2.0 * lam / rho, self._total())
        pull = rho * (eta + filled)
        return y * pull / (2.0 * lam + pull)
