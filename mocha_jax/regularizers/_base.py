"""The contract of regularizers, and their half of the optimality conditions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import coupling as couplings
from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Pytree, Relation, Tree
from mocha_jax._numerics.twofold import total_by_halves
from mocha_jax.coupling import Coupling

Unknown = TypeVar("Unknown")  # a tree of arrays

OwnRelation = Any  # the `Relation` that a regularizer chooses for itself: the interface can name no narrower type


class OptimalityConditions(Pytree, Generic[Unknown]):
    r"""A regularizer's half of the optimality conditions, in some unknown of its choice, with a symmetric Jacobian.

    The weights at the optimum are $W = \nabla R^*(V)$, but of a regularizer that learns $\Omega$ that gradient
    may not exist. With any $\rho > 0$ they are also $W = \mathrm{prox}_{R/\rho}(Q)$ for the
    Q that satisfies $\rho(Q - W) = V$, and this does have derivatives. Multiplied by P, the derivative of the
    proximal map (symmetric, between 0 and I), the condition's own derivative is $\rho P(I - P)$, symmetric.
    """

    @abstractmethod
    def unknown(self, weights: Array, v: Array, relation: OwnRelation) -> Unknown:
        """The unknown at an optimum."""

    @abstractmethod
    def weights(self, unknown: Unknown) -> Array:
        """W ``[num_tasks, d]``."""

    @abstractmethod
    def relation(self, unknown: Unknown) -> Relation:
        """Omega as the regularizer keeps it; None where it is given."""

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
        learned = self.regularizer.learned
        return learned.update_relation(None, self.weights(unknown)) if learned else None

    def residual(self, unknown: Array, v: Array) -> Array:
        fixed, point = lax.stop_gradient((self, unknown))
        _, pull = jax.vjp(fixed.weights, point)
        return jnp.asarray(pull(self.rho * (unknown - self.weights(unknown)) - v)[0])

    def stiffness(self, unknown: Array) -> Array:
        return jnp.full_like(unknown, 0.25 * self.rho)


class Nearby(NamedTuple):
    """The outcome of one of many proximal steps."""

    weights: Array  # [m, d] W
    squares: Array  # [d] numbers that add up to |W|^2
    squares_of: Array  # [d] and to |Y|^2
    known: Tree  # what makes the next one cheaper, a tree of arrays


class Regularizer(Pytree):
    r"""A regularizer R(W, Omega), quadratic in the weights W ``[m, d]`` for a given relationship Omega.

    Where Omega is given it is part of the regularizer, and every argument `relation` is None. Where it is learned, by a
    `Learned`, `relation` is a record of it, and ``value(weights)`` is the minimum over it.
    """

    separate: ClassVar[bool] = False  # whether tasks have nothing to do with each other
    jointly_convex: ClassVar[bool] = True  # whether R is convex in both at once
    frozen_fields: ClassVar[tuple[str, ...]] = ()  # fields that are no strengths: counts, matrices
    domains: ClassVar[Mapping[str, domains.Domain]] = {}  # where its numbers must lie

    def __post_init__(self) -> None:
        domains.require(self, self.domains)

    @property
    def learned(self) -> Learned | None:
        """The regularizer itself, where it learns Omega; None where that is given."""
        return self if isinstance(self, Learned) else None

    @property
    def admissible(self) -> Array:
        """True if the hyperparameters lie in their domains, [] bool; it works for traced values too."""
        return domains.contain(self, self.domains)

    def fits(self, num_tasks: int) -> Array | bool:
        """Tell whether its numbers suit that many tasks."""
        return True

    @abstractmethod
    def value(self, weights: Array, relation: OwnRelation = None) -> Array:
        """R(W, Omega); where Omega is learned and left out, the minimum over it."""

    @abstractmethod
    def coupling(self, num_tasks: int, relation: OwnRelation = None) -> Coupling:
        r"""The operator $\bar M = A^{-1}$ for R = tr(W' A W)/2; default for the initial Omega."""

    @abstractmethod
    def relationship(self, num_tasks: int, relation: OwnRelation = None) -> Array:
        r"""The relationship matrix $\Omega$ of the model, ``[m, m]``."""

    def covariance(self, num_tasks: int, relation: OwnRelation = None) -> Array:
        r"""Write out the covariance of the tasks under the prior that R is, ``[m, m]``, up to scale.

        $\bar M$, the inverse of the quadratic form; where the model names a covariance, that.
        """
        return jnp.asarray(couplings.as_matrix(self.coupling(num_tasks, relation)))

    def offset(self, relation: OwnRelation, num_features: int) -> Array | float:
        """The terms of R that do not depend on the weights."""
        return 0.0

    def penalty(self, weights: Array, relation: OwnRelation = None) -> Array:
        """R(W, Omega) without `offset`."""
        return self.value(weights, relation)

    def curvatures(self, num_tasks: int, relation: OwnRelation = None) -> tuple[Array, Array]:
        """The largest curvature of R, about, and of its conjugate, at most: by what the smallest squares grow."""
        coupling = self.coupling(num_tasks, relation)
        diagonal = coupling.diagonal()
        return 1.0 / jnp.min(diagonal), jnp.max(coupling.row_sums(jnp.ones_like(diagonal)))

    def strong_convexity(self, num_tasks: int) -> Array | None:
        r"""The inverse of a matrix A ``[m, m]`` with which $R(W) - \tfrac12\mathrm{tr}(W^\top A W)$ is convex.

        R is the minimum over Omega where that is learned; then the default is None, no such matrix is known. An answer
        with a gap of at most g is within $\sqrt{2g}$ of the optimum in the norm of A, on which `privacy` rests.
        """
        return None if self.learned else couplings.as_matrix(self.coupling(num_tasks))

    def conjugate(self, v: Array) -> Array:
        r"""The conjugate of ``value`` at V ``[m, d]``: $\max_\Omega R^*_\Omega(V)$ where Omega is learned."""
        return self.coupling(len(v)).conjugate(v)

    def prox(self, y: Array, rho: Array) -> Array:
        r"""$\arg\min_W R(W) + \tfrac{\rho}{2}\|W - Y\|_F^2$, with Omega minimised over where it is learned."""
        return self.coupling(len(y)).prox(y, rho)

    def prox_start(self, y: Array, usual: Array) -> Tree:
        """Tell what `prox_nearby` takes to be known before the first of many, a tree of arrays. Default: nothing.

        Args:
          y: the first argument.
          usual: the size of those that follow, where that one is 0.
        """
        return ()

    def prox_nearby(self, y: Array, rho: Array, known: Any) -> Nearby:
        """`prox`, by means of what is known from the last one at a point nearby. Default: nothing.

        But for rounding the weights do not depend on what is known.
        """
        weights = self.prox(y, rho)
        return Nearby(weights, jnp.sum(weights**2, axis=0), jnp.sum(y**2, axis=0), known)

    def bracket(self, v: Array, error: Array, weights: Array, relation: OwnRelation = None) -> Array:
        r"""An upper bound on $R(W) + R^*(V') - \langle V', W\rangle \ge 0$ for all V' within `error` of V.

        Of a given Omega without the terms that do not depend on W: how far W is from $\nabla R^*(V')$. Here it is
        the difference of its terms, plus what these may have lost; a model that knows better overrides it.

        Args:
          v: dual vectors ``[m, d]``.
          error: bound on the error of each of their entries ``[m, d]``.
          weights: W ``[m, d]``.
          relation: as in `value`.
        """
        coupling = self.coupling(len(v), relation)
        value = self.penalty(weights, relation)
        # R* of the error, by rows of M: |M| is at most the diagonal matrix of its row sums.
        row = coupling.row_sums(jnp.ones_like(coupling.diagonal()))
        of_error = 0.5 * jnp.sum(row[:, None] * error**2)
        return fenchel_young_bound(value, coupling.conjugate(v), v, weights, error, of_error, math.sqrt(len(v)))

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        r"""$R^*(V)$ of any V of that Frobenius norm, minimised over Omega, at most.

        Here of one with a single entry: no direction is dearer where R depends on singular values alone.
        """
        return self.conjugate(jnp.zeros((num_tasks, num_features), norm.dtype).at[0, 0].set(norm))

    def value_error(self, weights: Array, relation: OwnRelation = None) -> Array:
        """An upper bound on the rounding error of ``value(weights, relation)``."""
        return rounded(self.value(weights, relation), _roundings(weights))

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        r"""The size of $\bar M$ in the directions that matter; a starting value for step sizes."""
        return jnp.mean(self.coupling(num_tasks).diagonal())

    def optimality(self, num_tasks: int, num_features: int) -> OptimalityConditions[Any]:
        """The conditions for an optimum, to be differentiated."""
        return Proximal(self, lax.stop_gradient(1.0 / self.typical_curvature(num_tasks, num_features)))

    def check_tasks(self, num_tasks: int) -> None:
        """Raise if the hyperparameters do not fit that many tasks."""

    def check_features(self, num_features: int) -> None:
        """Raise if the hyperparameters do not fit that many features."""

    def known_relation(self, owner: str, relation: Relation, num_tasks: int, num_features: int) -> Relation:
        """Return a given record of Omega, or else the first one; raise if it is not one of this regularizer's."""
        if relation is not None:
            raise ValueError(
                f"{owner}: relation must be left out: the relationship of {type(self).__name__} is given, not learned."
            )
        return None


class Learned(Regularizer):
    """Base class of regularizers whose Omega is found together with the weights.

    They keep it as a record, a `Relation` whose type a subclass names in its methods: a matrix, a factor.
    """

    @abstractmethod
    def initial_relation(self, num_tasks: int, num_features: int) -> Relation:
        """Omega before anything is known of the weights."""

    @abstractmethod
    def update_relation(self, relation: OwnRelation, weights: Array, smoothing: Array | float = 0.0) -> Relation:
        """The Omega that minimises R(W, Omega) for these weights; `smoothing` as in `Mocha`."""

    @abstractmethod
    def relation_of(self, omega: Array, num_features: int) -> Relation:
        """The record of a given Omega ``[m, m]``."""

    @abstractmethod
    def extend_relation(self, relation: OwnRelation, num_tasks: int, num_features: int) -> Relation:
        """The record with new tasks appended, each related to the others as the average task is."""

    def restart_relation(self, relation: OwnRelation) -> Relation:
        """A record of a problem of the same shape, made feasible for this regularizer."""
        return relation

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        """Raise if a matrix is not an Omega of that many tasks. A subclass adds its own conditions."""
        check.array(owner, name, omega, (num_tasks, num_tasks))
        check.positive_semidefinite(owner, name, omega)

    def is_relation(self, relation: object, num_tasks: int, num_features: int) -> bool:
        """Tell whether something is a record of Omega, by its structure and shapes."""
        initial = jax.eval_shape(lambda: self.initial_relation(num_tasks, num_features))
        return _form(relation) == _form(initial)

    def bracket(self, v: Array, error: Array, weights: Array, relation: OwnRelation = None) -> Array:
        if relation is not None:
            return super().bracket(v, error, weights, relation)
        of_error = self.conjugate_bound(jnp.sqrt(jnp.sum(error**2)), *v.shape)
        return fenchel_young_bound(self.value(weights), self.conjugate(v), v, weights, error, of_error)

    def known_relation(self, owner: str, relation: Relation, num_tasks: int, num_features: int) -> Relation:
        if relation is None:
            return self.initial_relation(num_tasks, num_features)
        if not self.is_relation(relation, num_tasks, num_features):
            raise ValueError(
                f"{owner}: relation must be Omega as {type(self).__name__} keeps it, for {num_tasks} tasks and "
                f"{num_features} features, such as solution.relation; got {check.shown(relation)}."
            )
        return relation


def _form(record: object) -> tuple[str, list[tuple[int, ...]]]:
    """Describe a record's structure and the shapes of its arrays."""
    return str(jax.tree.structure(record)), [np.shape(leaf) for leaf in jax.tree.leaves(record)]


def rounded(size: Array, times: float) -> Array:
    """Return the size of that many roundings of a number."""
    return 0.5 * times * jnp.finfo(size.dtype).eps * jnp.abs(size)


def twice_rounded(bound: Array) -> Array:
    """A bound whose own rounding counts, too: its terms are not negative, so a few roundings of itself do."""
    return bound * (1.0 + 128.0 * jnp.finfo(bound.dtype).eps)


def fenchel_young_bound(
    value: Array, conjugate: Array, v: Array, w: Array, error: Array, of_error: Array, more: float = 0.0
) -> Array:
    r"""An upper bound on $R(W) + R^*(V') - \langle V', W\rangle$ for V' within `error` of V, from its three terms.

    $R^*$ is half the square of a norm, so that an error E adds at most
    $2\sqrt{R^*(V) R^*(E)} + R^*(E)$. Of singular values it is assumed, as LAPACK does, that their errors are a
    few roundings of the largest; of other sums that roundings add up as the square root of their number.

    Args:
      value: R(W).
      conjugate: $R^*(V)$.
      v: V ``[m, d]``.
      w: W ``[m, d]``.
      error: bound on the error of each entry of V ``[m, d]``.
      of_error: $R^*$ of any matrix with such entries, at most.
      more: roundings of the terms besides those of their singular values.
    """
    inner, size = total_by_halves((v * w).ravel()), jnp.sum(jnp.abs(v * w))
    lost = rounded(jnp.abs(value) + jnp.abs(conjugate) + size, _roundings(v) + more)
    moved = 2.0 * jnp.sqrt(jnp.maximum(conjugate, 0.0)) * jnp.sqrt(of_error) + of_error + jnp.sum(jnp.abs(w) * error)
    return jnp.maximum(value + conjugate - inner, 0.0) + lost + moved


def _roundings(a: Array) -> float:
    """Estimate the roundings in the sum of the squares of a matrix's singular values."""
    return 16.0 + 4.0 * math.sqrt(min(a.shape))
