r"""A regularizer's half of the optimality conditions, in a form whose Jacobian is symmetric.

The weights at the optimum are $W = \nabla R^*(V)$, but of a regularizer that learns $\Omega$ that gradient
may not exist. With any $\rho > 0$ they are also $W = \mathrm{prox}_{R/\rho}(Q)$ for the
Q that satisfies $\rho(Q - W) = V$, and this does have derivatives. Multiplied by P, the derivative of the
proximal map (symmetric, between 0 and I), the condition's own derivative is $\rho P(I - P)$, symmetric.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree, Relation

if TYPE_CHECKING:
    from mocha_jax.regularizers._base import Regularizer

Unknown = TypeVar("Unknown")  # a tree of arrays


class OptimalityConditions(Pytree, Generic[Unknown]):
    """The conditions of a regularizer, in some unknown of its choice."""

    @abstractmethod
    def unknown(self, weights: Array, v: Array, relation: Any) -> Unknown:
        """The unknown at an optimum."""

    @abstractmethod
    def weights(self, unknown: Unknown) -> Array:
        """W ``[num_tasks, d]``."""

    @abstractmethod
    def relation(self, unknown: Unknown) -> Relation:
        """Omega as the regularizer keeps it."""

    @abstractmethod
    def residual(self, unknown: Unknown, v: Array) -> Unknown:
        """Return what is 0 at the optimum, shaped like the unknown; along V its derivative is minus W's, transposed."""

    @abstractmethod
    def stiffness(self, unknown: Unknown) -> Unknown:
        """The size of the diagonal of the residual's derivative, like the unknown."""


class Proximal(OptimalityConditions[Array]):
    """The conditions of a regularizer that has a proximal map; the unknown is Q ``[num_tasks, d]``."""

    regularizer: Regularizer
    rho: Array  # []

    def unknown(self, weights: Array, v: Array, relation: Relation) -> Array:
        return weights + v / self.rho

    def weights(self, unknown: Array) -> Array:
        return jnp.asarray(self.regularizer.prox(unknown, self.rho))

    def relation(self, unknown: Array) -> Relation:
        return self.regularizer.update_relation(None, self.weights(unknown))

    def residual(self, unknown: Array, v: Array) -> Array:
        fixed, at = lax.stop_gradient((self, unknown))
        _, pull = jax.vjp(fixed.weights, at)
        return jnp.asarray(pull(self.rho * (unknown - self.weights(unknown)) - v)[0])

    def stiffness(self, unknown: Array) -> Array:
        return jnp.full_like(unknown, 0.25 * self.rho)
