"""Losses of the residual e = z - y, for real labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import saturating_ratio
from mocha_jax.losses._base import Piece, ResidualLoss


class Squared(ResidualLoss, in_kernel=True):
    r"""Half the squared residual, $\tfrac12 (z - y)^2$.

    $\ell^*(-\beta) = \tfrac12\beta^2 - \beta y$. 1-smooth; not Lipschitz. With
    ``Independent(lam)`` the model is ridge regression,
    $w = (X^\top C X + 2\lambda I)^{-1} X^\top C y$.
    """

    scored_by: ClassVar[str] = "rmse"
    quadratic: ClassVar[bool] = True

    @property
    def smoothness(self) -> float:
        return 1.0

    def phi_bounds(self) -> tuple[float, float]:
        return -jnp.inf, jnp.inf

    def phi(self, e: Array) -> Array:
        return 0.5 * e * e

    def phi_slope(self, e: Array) -> Array:
        return e

    def phi_conjugate(self, beta: Array) -> Array:
        return 0.5 * beta * beta

    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        return beta - (e + beta) / (1.0 + kappa)

    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        return 0.5 * (e + beta) ** 2

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return (beta - before) * (e + 0.5 * (beta + before))


class Absolute(ResidualLoss, in_kernel=True):
    r"""The absolute residual $|z - y|$.

    $\ell^*(-\beta) = -\beta y$ on [-1, 1]. Not smooth; 1-Lipschitz.
    """

    piecewise_linear: ClassVar[bool] = True

    @property
    def lipschitz(self) -> float:
        return 1.0

    def phi_bounds(self) -> tuple[float, float]:
        return -1.0, 1.0

    def phi(self, e: Array) -> Array:
        return jnp.abs(e)

    def phi_slope(self, e: Array) -> Array:
        return jnp.sign(e)

    def phi_conjugate(self, beta: Array) -> Array:
        return jnp.zeros_like(beta)

    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        return jnp.clip(beta - saturating_ratio(e, kappa), -1.0, 1.0)

    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        return jnp.maximum(e, 0.0) * (1.0 + beta) + jnp.maximum(-e, 0.0) * (1.0 - beta)

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return (beta - before) * e


class EpsilonInsensitive(ResidualLoss, in_kernel=True):
    r"""Support vector regression's loss $\max(|z - y| - \epsilon, 0)$.

    $\ell^*(-\beta) = \epsilon|\beta| - \beta y$ on [-1, 1]. Not smooth; 1-Lipschitz.

    Args:
      epsilon: half width of the tube without loss, >= 0; an array leaf.

    References:
      Drucker et al., Support Vector Regression Machines, 1997.
    """

    piecewise_linear: ClassVar[bool] = True
    domains: ClassVar[Mapping[str, domains.Domain]] = {"epsilon": domains.NONNEGATIVE}

    epsilon: Hyperparameter = 0.1

    @property
    def lipschitz(self) -> float:
        return 1.0

    def phi_bounds(self) -> tuple[float, float]:
        return -1.0, 1.0

    def pieces(self, y: Array) -> list[Piece]:
        zero, one = jnp.zeros_like(y), jnp.ones_like(y)
        return [Piece(zero, one, y - self.epsilon), Piece(-one, zero, y + self.epsilon)]

    def phi(self, e: Array) -> Array:
        return jnp.maximum(jnp.abs(e) - self.epsilon, 0.0)

    def phi_slope(self, e: Array) -> Array:
        return jnp.where(jnp.abs(e) > self.epsilon, jnp.sign(e), 0.0)

    def phi_conjugate(self, beta: Array) -> Array:
        return jnp.asarray(self.epsilon) * jnp.abs(beta)

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return super()._shift(z, beta, y) + self.epsilon

    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        # Soft thresholding of beta - e/kappa at epsilon/kappa, kept free of 1/kappa: of the
        # three pieces (positive, negative, zero) the one whose sign holds.
        up = beta - saturating_ratio(e + self.epsilon, kappa)
        down = beta - saturating_ratio(e - self.epsilon, kappa)
        return jnp.clip(jnp.maximum(up, 0.0) + jnp.minimum(down, 0.0), -1.0, 1.0)

    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        size, b = jnp.abs(e), beta * jnp.where(e < 0, -1.0, 1.0)
        out, inside = jnp.maximum(size - self.epsilon, 0.0), jnp.maximum(self.epsilon - size, 0.0)
        against = out * (1.0 - jnp.abs(b)) + inside * jnp.abs(b)
        along = out + b * (size + self.epsilon)
        return jnp.where(b < 0, against, along)

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return (beta - before) * e + jnp.asarray(self.epsilon) * (jnp.abs(beta) - jnp.abs(before))


class Huber(ResidualLoss, in_kernel=True):
    r"""Huber's loss: $\tfrac12 e^2$ for $|e| \le \delta$, else $\delta|e| - \tfrac12\delta^2$.

    $\ell^*(-\beta) = \tfrac12\beta^2 - \beta y$ on $[-\delta, \delta]$.
    1-smooth and $\delta$-Lipschitz.

    Args:
      delta: residual beyond which the loss is linear, > 0; an array leaf.

    References:
      Huber, Robust Estimation of a Location Parameter, 1964.
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"delta": domains.POSITIVE}

    delta: Hyperparameter = 1.0

    @property
    def smoothness(self) -> float:
        return 1.0

    @property
    def lipschitz(self) -> Hyperparameter:
        return self.delta

    def phi_bounds(self) -> tuple[Hyperparameter, Hyperparameter]:
        return -self.delta, self.delta

    def phi(self, e: Array) -> Array:
        inner = jnp.minimum(jnp.abs(e), self.delta)
        return inner * (jnp.abs(e) - 0.5 * inner)

    def phi_slope(self, e: Array) -> Array:
        return jnp.clip(e, -self.delta, self.delta)

    def phi_conjugate(self, beta: Array) -> Array:
        return 0.5 * beta * beta

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return super()._shift(z, beta, y) + self.delta

    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        return jnp.clip(beta - (e + beta) / (1.0 + kappa), -self.delta, self.delta)

    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        inner = jnp.clip(e, -self.delta, self.delta)
        beyond = jnp.maximum(jnp.abs(e) - self.delta, 0.0)
        return 0.5 * (inner + beta) ** 2 + beyond * (self.delta + beta * jnp.where(e < 0, -1.0, 1.0))

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return (beta - before) * (e + 0.5 * (beta + before))


class Quantile(ResidualLoss, in_kernel=True):
    r"""The pinball loss $\max(\tau r, (\tau-1) r)$ of $r = y - z$.

    Its minimiser is the conditional quantile of level tau.
    $\ell^*(-\beta) = -\beta y$ on $[\tau - 1, \tau]$. Not smooth;
    $\max(\tau, 1-\tau)$-Lipschitz.

    Args:
      tau: level of the quantile, in (0, 1); an array leaf.

    References:
      Koenker and Bassett, Regression Quantiles, 1978.
    """

    piecewise_linear: ClassVar[bool] = True
    domains: ClassVar[Mapping[str, domains.Domain]] = {"tau": domains.OPEN_UNIT_INTERVAL}

    tau: Hyperparameter = 0.5

    @property
    def lipschitz(self) -> Hyperparameter:
        return jnp.maximum(self.tau, 1.0 - self.tau)

    def phi_bounds(self) -> tuple[Hyperparameter, Hyperparameter]:
        return self.tau - 1.0, self.tau

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        return self.value(z, y)  # tau - 1 is rounded, and with it the slope of one side

    def phi(self, e: Array) -> Array:
        tau = jnp.asarray(self.tau)
        return tau * jnp.maximum(-e, 0.0) + (1.0 - tau) * jnp.maximum(e, 0.0)

    def phi_slope(self, e: Array) -> Array:
        return jnp.where(e > 0, 1.0 - self.tau, jnp.where(e < 0, -self.tau, jnp.zeros_like(e)))

    def phi_conjugate(self, beta: Array) -> Array:
        return jnp.zeros_like(beta)

    def phi_step(self, beta: Array, e: Array, kappa: Array) -> Array:
        return jnp.clip(beta - saturating_ratio(e, kappa), self.tau - 1.0, self.tau)

    def phi_fenchel_young(self, e: Array, beta: Array) -> Array:
        return jnp.maximum(-e, 0.0) * (self.tau - beta) + jnp.maximum(e, 0.0) * (beta - (self.tau - 1.0))

    def phi_change(self, e: Array, before: Array, beta: Array) -> Array:
        return (beta - before) * e
