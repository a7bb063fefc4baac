r"""Regularizers whose learned $\Omega$ is limited by its trace: (12) and (14)."""

from __future__ import annotations

from abc import abstractmethod

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.spectral import safe_sqrt
from mocha_jax.coupling import LowRank
from mocha_jax.regularizers._spectral import Spectral, with_average_tasks

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
        known = self._rescaled(with_average_tasks(relation, num_tasks, num_features))
        # Besides, their share of the trace is spread evenly: a new task may differ from all others.
        new = (num_tasks - len(relation.factor)) / num_tasks
        return mixed(known, jnp.asarray(new, relation.factor.dtype), self.trace())

    def _rescaled(self, relation: LowRank) -> LowRank:
        """The record with its trace put right."""
        scale = safe_ratio(
            jnp.asarray(self.trace()), len(relation.factor) * relation.base + jnp.sum(relation.factor**2)
        )
        return LowRank(scale * relation.base, safe_sqrt(scale) * relation.factor)

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        rank = min(num_tasks, num_features)
        return self.curvature_of(jnp.minimum(jnp.asarray(self.trace()) / rank, 1.0))


def mixed(relation: LowRank, share: Array, total: Array) -> LowRank:
    """Mix in that share of the identity such that the trace stays `total`."""
    even = total / len(relation.factor)
    return LowRank((1.0 - share) * relation.base + share * even, safe_sqrt(1.0 - share) * relation.factor)
