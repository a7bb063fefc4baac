"""The quality of an answer, as all algorithms report it and the drivers read it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree


class Quality(Pytree):
    """Base class of an answer's quality, which `Algorithm.certify` returns and histories keep."""

    residual: Array  # [] what a solve compares with its tolerance

    @property
    @abstractmethod
    def finite(self) -> Array:
        """True if more rounds make sense, [] bool."""

    @property
    def bound(self) -> Array:
        """Lower bound on the optimum, valid for all later rounds, []; minus infinity if unknown."""
        return jnp.full_like(self.residual, -jnp.inf)

    def with_bound(self, problem: Any, bound: Array) -> Self:
        """Tighten with a lower bound from an earlier round."""
        return self

    def summary(self) -> Self:
        """Without what is large."""
        return self
