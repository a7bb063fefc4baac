"""Sums of sizes and their squares: the common form of the trace norm and the norm of joint sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax.regularizers._base import Regularizer


class SumOfSizes(Regularizer):
    r"""$\lambda\sum_i s_i + \lambda_2\sum_i s_i^2$ of sizes $s \ge 0$ of W, such as its singular values.

    Every size has a scale $\omega$, learned: $\lambda s = \min_\omega \tfrac{\lambda}{2}(s^2/\omega + \omega)$,
    reached at $\omega = s$. A subclass says what the sizes are, and what maps them back to weights.
    """

    learned: ClassVar[bool] = True
    domains: ClassVar[Mapping[str, domains.Domain]] = {"lam": domains.POSITIVE, "lam2": domains.POSITIVE}

    lam: Hyperparameter
    lam2: Hyperparameter

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar(type(self).__name__, lam=self.lam, lam2=self.lam2)

    @property
    def usual(self) -> Array:
        """The size at which both terms are equal."""
        return 0.5 * jnp.asarray(self.lam) / jnp.asarray(self.lam2)

    def curvature_of(self, scales: Array) -> Array:
        r"""Eigenvalues of $\bar M$ from the scales."""
        return scales / (jnp.asarray(self.lam) + 2.0 * jnp.asarray(self.lam2) * scales)

    def curvatures(self, num_tasks: int, relation: Any = None) -> tuple[Array, Array]:
        return 1.0 / self.curvature_of(self.usual), 0.5 / jnp.asarray(self.lam2)

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        return self.curvature_of(self.usual)

    def value_of(self, sizes: Array) -> Array:
        """R minimised over the scales."""
        return jnp.asarray(self.lam) * jnp.sum(sizes) + jnp.asarray(self.lam2) * jnp.sum(sizes**2)

    def penalty_of(self, sizes: Array) -> Array:
        """R at the best scales, without the term that is theirs alone."""
        return 0.5 * jnp.asarray(self.lam) * jnp.sum(sizes) + jnp.asarray(self.lam2) * jnp.sum(sizes**2)

    def conjugate_of(self, sizes: Array) -> Array:
        """The conjugate, from the sizes of V."""
        return 0.25 * jnp.sum(jnp.maximum(sizes - jnp.asarray(self.lam), 0.0) ** 2) / jnp.asarray(self.lam2)

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # Also the R* of an error, which may add to what is above lam already: R* is 1/(2 lam2)-smooth.
        return 0.25 * norm**2 / jnp.asarray(self.lam2)

    def shrunk(self, sizes: Array, rho: Array) -> Array:
        """Sizes of the proximal step, from those of its argument."""
        return jnp.maximum(rho * sizes - jnp.asarray(self.lam), 0.0) / (rho + 2.0 * jnp.asarray(self.lam2))
