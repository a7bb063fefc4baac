r"""One client's refinement in VIRTUAL: what is trained, and what Gaussians that stands for.

What the optimizer sees is the logarithm of the precision of $s_i^{new}$, to which that of $s / s_i$, a sum
of positive numbers, is added: every trained vector stands for densities.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._neural.gaussian import Gaussian, divergence


class Trained(NamedTuple):
    """The parameters that a client's optimizer sees."""

    mean: Array  # [p] of s
    log_precision: Array  # [p] of s_i, not of s
    own_mean: Array  # [q]
    own_log_precision: Array  # [q]


class Refinement(NamedTuple):
    """The quantities that stay fixed while a client trains."""

    rest: Gaussian  # [p] s / s_i, the factors of the others
    prior: Gaussian  # [p] p_i, the client's share of the shared prior
    own_prior: Gaussian  # [q]

    @classmethod
    def of(cls, posterior: Gaussian, factor: Gaussian, prior: Gaussian, own_prior: Gaussian) -> Refinement:
        """Take the client's factor out; rounding must not take what is a sum of positive numbers below 0."""
        rest = posterior / factor
        return cls(rest.replace(precision=jnp.maximum(rest.precision, 0.0)), prior, own_prior)

    def begin(self, mean: Array, factor: Gaussian, own: Gaussian, first: Array, fresh: Array) -> Trained:
        """Begin from the client's last answer, or where it is `fresh` with a first precision."""
        fresh = fresh | (factor.precision <= 0)
        logs = jnp.where(fresh, jnp.log(first), jnp.log(jnp.where(fresh, 1.0, factor.precision)))
        return Trained(mean, logs, own.mean, jnp.log(own.precision))

    def posterior(self, v: Trained) -> Gaussian:
        """Over the shared parameters, s."""
        return Gaussian.of(v.mean, jnp.exp(v.log_precision) + self.rest.precision)

    def own(self, v: Trained) -> Gaussian:
        """Over the client's own parameters, c_i."""
        return Gaussian.of(v.own_mean, jnp.exp(v.own_log_precision))

    def factor(self, v: Trained) -> Gaussian:
        """The client's factor, s_i."""
        return Gaussian(jnp.exp(v.log_precision), (self.posterior(v) / self.rest).shift)

    def divergences(self, v: Trained) -> Array:
        """Both of the free energy (3)."""
        return divergence(self.posterior(v), self.prior * self.rest) + divergence(self.own(v), self.own_prior)


def most_of(share: float, old: Gaussian, new: Gaussian, posterior: Gaussian) -> Gaussian:
    """The new factor where the posterior moves by most of its standard deviations, the old one elsewhere."""
    moved = posterior * (new / old)
    size = jnp.abs(moved.mean - posterior.mean) * jnp.sqrt(posterior.precision)
    choice = size >= jnp.quantile(size, 1.0 - share)
    return jax.tree.map(partial(jnp.where, choice), new, old)
