"""How good an answer is: what all algorithms report and the drivers look at."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from mocha_jax._pytree import Pytree


class Quality(Pytree):
    """How good an answer is: what `Algorithm.certify` returns and histories keep."""

    residual: Array  # [] what a solve compares with its tolerance

    @property
    @abstractmethod
    def finite(self) -> Array:
        """Whether it makes sense to go on, [] bool."""

    @property
    def bound(self) -> Array:
        """What of this still holds for later answers: a lower bound on the optimum, -infinity without one, []."""
        return jnp.full_like(self.residual, -jnp.inf)

    def with_bound(self, problem: Any, bound: Array) -> Self:
        """The same in the light of a bound found earlier."""
        return self

    def summary(self) -> Self:
        """Without what is large."""
        return self
