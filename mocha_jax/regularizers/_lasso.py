"""The map from V to W where single entries of Omega are penalised: a lasso."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._numerics.lasso import lasso
from mocha_jax._numerics.math import matmul
from mocha_jax.coupling import Coupling, Dense


class Lasso(Coupling):
    r"""$R(W) = \tfrac12\mathrm{tr}(W^\top A W) + \lambda_1\|W\|_1$, whose $\nabla R^*$ is not linear.

    $R^*$ is as smooth as without the penalty, so sigma' of $\bar M = A^{-1}$ is safe here too.
    """

    inverse: Dense  # the operator without the penalty
    precision: Array  # [m, m] A
    lam1: Array  # []

    dense = True

    def apply(self, v: Array) -> Array:
        return lasso(self.precision, v, self.lam1, self.inverse.apply(v))

    def quadratic_majorizer(self) -> Dense:
        return self.inverse

    def diagonal(self) -> Array:
        return self.inverse.diagonal()

    def row_sums(self, nodes: Array) -> Array:
        return self.inverse.row_sums(nodes)

    def spectral_bound(self, nodes: Array) -> Array:
        return self.inverse.spectral_bound(nodes)

    def gradient(self, w: Array) -> Array:
        return matmul(self.precision, w) + self.lam1 * jnp.sign(w)

    def prox(self, y: Array, rho: Array) -> Array:
        stiff = self.precision + rho * jnp.eye(len(y), dtype=y.dtype)
        return lasso(stiff, rho * y, self.lam1, y)

    def conjugate(self, v: Array) -> Array:
        w = self.apply(v)
        return jnp.sum(v * w) - self.value(v, w)

    def value(self, v: Array, w: Array) -> Array:
        return 0.5 * jnp.sum(w * matmul(self.precision, w)) + self.lam1 * jnp.sum(jnp.abs(w))

    def slack_bound(self, v: Array, error: Array, w: Array) -> Array:
        """An upper bound on `slack` for all V within `error` of v that allows for rounding."""
        m, unit = len(v), 0.5 * jnp.finfo(v.dtype).eps
        r = v - matmul(self.precision, w)
        lost = error + unit * ((m + 8.0) * matmul(jnp.abs(self.precision), jnp.abs(w)) + 2.0 * jnp.abs(v) + jnp.abs(r))
        p = jnp.clip(r, -self.lam1, self.lam1)
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0) + (lost + 4.0 * unit * self.lam1) * jnp.abs(w)
        # What is off by at most its size plus the error, as the norm that the quadratic form is.
        norm = jnp.sqrt(self.inverse.conjugate_bound(r - p, self.precision))
        row = jnp.max(jnp.sum(jnp.abs(self.inverse.matrix), axis=1))
        return (norm + jnp.sqrt(row * jnp.sum(lost**2))) ** 2 + jnp.sum(penalty)

    def slack(self, v: Array, w: Array) -> Array:
        # With the nearest subgradient p of the penalty, R*(v) <= |v - p|^2 / 2 in the metric of M: two terms >= 0.
        r = v - matmul(self.precision, w)
        p = jnp.clip(r, -self.lam1, self.lam1)
        off = r - p
        penalty = jnp.maximum(self.lam1 * jnp.abs(w) - p * w, 0.0)
        return jnp.maximum(0.5 * jnp.sum(off * matmul(self.inverse.matrix, off)), 0.0) + jnp.sum(penalty)
