r"""A penalty on the mean of the tasks, and one with a learned relationship on their deviations from it.

With $\bar w = \tfrac1m W^\top 1$ and $U = W - 1\bar w^\top$ the two live in orthogonal subspaces, and

$$
R(W) = \lambda_0 m\|\bar w\|^2 + S(U), \qquad
R^*(V) = \frac{m\|\bar v\|^2}{4\lambda_0} + S^*(V - 1\bar v^\top):
$$

S is a function of singular values, so that its conjugate and its proximal step at a matrix whose columns add up to 0
are taken at such a matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check, domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.tall import Basis
from mocha_jax._numerics.twofold import additions, halvings, total_by_halves
from mocha_jax.coupling import AboutMean, LowRank, as_matrix
from mocha_jax.coupling._low_rank import mean_and_deviations
from mocha_jax.regularizers._base import Learned, Nearby, rounded, twice_rounded
from mocha_jax.regularizers._probabilistic import Probabilistic
from mocha_jax.regularizers._singular_values import TraceLimited


class DeviationsLearned(Learned):
    """Base class: a subclass chooses the regularizer of the deviations."""

    lam0: Hyperparameter

    @property
    @abstractmethod
    def of_deviations(self) -> TraceLimited:
        """S."""

    def value(self, weights: Array, relation: LowRank | None = None) -> Array:
        if relation is not None:
            return self.coupling(len(weights), relation).energy(weights) + self.offset(relation, weights.shape[1])
        mean, aside = mean_and_deviations(weights)
        return self._of_mean(mean, len(weights)) + self.of_deviations.value(aside)

    def penalty(self, weights: Array, relation: LowRank | None = None) -> Array:
        if relation is not None:
            return self.coupling(len(weights), relation).energy(weights)
        mean, aside = mean_and_deviations(weights)
        return self._of_mean(mean, len(weights)) + self.of_deviations.penalty(aside)

    def _of_mean(self, mean: Array, num_tasks: int) -> Array:
        return jnp.asarray(self.lam0) * num_tasks * jnp.sum(mean**2)

    def conjugate(self, v: Array) -> Array:
        mean, aside = mean_and_deviations(v)
        return 0.5 * self._of_common * len(v) * jnp.sum(mean**2) + self.of_deviations.conjugate(aside)

    @property
    def _of_common(self) -> Array:
        """The curvature of the conjugate along the mean."""
        return 0.5 / jnp.asarray(self.lam0)

    def conjugate_bound(self, norm: Array, num_tasks: int, num_features: int) -> Array:
        # Both parts are squares of norms: it is largest where all of a matrix lies in one of them.
        own = self.of_deviations.conjugate_bound(norm, num_tasks, num_features)
        return jnp.maximum(own, 0.5 * self._of_common * norm**2)

    def coupling(self, num_tasks: int, relation: LowRank | None = None) -> AboutMean:
        own = self.of_deviations
        relation = own.initial_relation(num_tasks, 1) if relation is None else relation
        return AboutMean(self._of_common, own.coupling_of(relation))

    def prox(self, y: Array, rho: Array) -> Array:
        mean, aside = mean_and_deviations(y)
        return self._pulled(mean, rho) + _centred(self.of_deviations.prox(aside, rho))

    def _pulled(self, mean: Array, rho: Array) -> Array:
        return mean * (rho / (rho + 2.0 * jnp.asarray(self.lam0)))

    def prox_start(self, y: Array, usual: Array) -> Basis:
        return self.of_deviations.prox_start(mean_and_deviations(y)[1], usual)

    def prox_nearby(self, y: Array, rho: Array, known: Basis) -> Nearby:
        mean, aside = mean_and_deviations(y)
        nearby, pulled = self.of_deviations.prox_nearby(aside, rho, known), self._pulled(mean, rho)
        return Nearby(
            pulled + _centred(nearby.weights),
            nearby.squares + len(y) * pulled[0] ** 2,
            nearby.squares_of + len(y) * mean[0] ** 2,
            nearby.known,
        )

    def bracket(self, v: Array, error: Array, weights: Array, relation: LowRank | None = None) -> Array:
        of_v, of_w, shared = _Apart(v), _Apart(weights), jnp.mean(error, axis=0, keepdims=True)
        error = error + shared + of_v.lost
        own = self.of_deviations.bracket(of_v.aside, error, of_w.aside, relation) + self._moved(of_w, relation)
        own = own + jnp.sum((jnp.abs(of_v.aside) + error) * of_w.lost)
        # Of the mean the bracket is the square of a distance: nothing is lost in a difference of large numbers.
        implied = self._of_common * of_v.mean
        off = jnp.abs(of_w.mean - implied) + rounded(implied, 8.0) + of_w.lost_of_mean
        off = off + self._of_common * (of_v.lost_of_mean + shared)
        return own + twice_rounded(self._of_mean(off, len(v)))

    def value_error(self, weights: Array, relation: LowRank | None = None) -> Array:
        of_w = _Apart(weights)
        of_mean = rounded(self._of_mean(of_w.mean, len(weights)), 8.0 + 2.0 * additions(weights.size))
        lost = jnp.sum((2.0 * jnp.abs(of_w.mean) + of_w.lost_of_mean) * of_w.lost_of_mean)
        own = self.of_deviations.value_error(of_w.aside, relation) + self._moved(of_w, relation)
        return of_mean + jnp.asarray(self.lam0) * len(weights) * lost + own

    def _moved(self, of_w: _Apart, relation: LowRank | None) -> Array:
        """An upper bound on the error of S from rounded deviations; its root is a norm."""
        steep = self.of_deviations.curvatures(len(of_w.aside), relation)[0]
        lost = 0.5 * steep * jnp.sum(of_w.lost**2)
        return 2.0 * jnp.sqrt(self.of_deviations.penalty(of_w.aside, relation) * lost) + lost

    def curvatures(self, num_tasks: int, relation: LowRank | None = None) -> tuple[Array, Array]:
        steep, flat = self.of_deviations.curvatures(num_tasks, relation)
        return jnp.maximum(steep, 2.0 * jnp.asarray(self.lam0)), jnp.maximum(flat, self._of_common)

    def strong_convexity(self, num_tasks: int) -> Array | None:
        of_deviations = self.of_deviations.strong_convexity(num_tasks)
        if of_deviations is None:
            return None
        return _centred(of_deviations) + self._of_common / num_tasks  # a multiple of the identity, with the mean apart

    def typical_curvature(self, num_tasks: int, num_features: int) -> Array:
        return self.of_deviations.typical_curvature(num_tasks, num_features)

    def initial_relation(self, num_tasks: int, num_features: int) -> LowRank:
        return self.of_deviations.initial_relation(num_tasks, num_features)

    def update_relation(self, relation: LowRank | None, weights: Array, smoothing: Array | float = 0.0) -> LowRank:
        of_deviations = self.of_deviations.update_relation(relation, mean_and_deviations(weights)[1], smoothing)
        return of_deviations.replace(factor=_centred(of_deviations.factor))

    def relation_of(self, omega: Array, num_features: int) -> LowRank:
        inside = mean_and_deviations(mean_and_deviations(0.5 * (omega + omega.T))[1].T)[1]
        of_deviations = self.of_deviations.relation_of(inside, num_features)
        return of_deviations.replace(factor=_centred(of_deviations.factor))

    def check_omega(self, owner: str, name: str, omega: object, num_tasks: int) -> None:
        self.of_deviations.check_omega(owner, name, omega, num_tasks)

    def is_relation(self, relation: object, num_tasks: int, num_features: int) -> bool:
        return self.of_deviations.is_relation(relation, num_tasks, num_features)

    def restart_relation(self, relation: LowRank) -> LowRank:
        own = self.of_deviations.restart_relation(relation)
        return own.replace(factor=_centred(own.factor))

    def extend_relation(self, relation: LowRank, num_tasks: int, num_features: int) -> LowRank:
        own = self.of_deviations.extend_relation(relation, num_tasks, num_features)
        return own.replace(factor=_centred(own.factor))

    def offset(self, relation: LowRank, num_features: int) -> Array | float:
        return self.of_deviations.offset(relation, num_features)

    def fits(self, num_tasks: int) -> Array | bool:
        return self.of_deviations.fits(num_tasks)

    def relationship(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        relation = self.initial_relation(num_tasks, 1) if relation is None else relation
        return mean_and_deviations(mean_and_deviations(jnp.asarray(as_matrix(relation)))[1].T)[1]

    def covariance(self, num_tasks: int, relation: LowRank | None = None) -> Array:
        return self.relationship(num_tasks, relation)


class MeanCovariance(DeviationsLearned):
    r"""Tasks near their mean, whose deviations from it have a learned covariance $\Omega$.

    $$
    R(W, \Omega) = \lambda_0 m\|\bar w\|^2
    + \lambda\left(\tfrac{1}{\sigma^2}\|U\|_F^2 + \mathrm{tr}(U^\top\Omega^{+}U)\right),
    \qquad U = W - 1\bar w^\top,\quad \Omega \succeq 0,\; \Omega 1 = 0,\; \mathrm{tr}\,\Omega = 1
    $$

    Minimised over $\Omega = (UU^\top)^{1/2}/\mathrm{tr}$ it is
    $\lambda_0 m\|\bar w\|^2 + \lambda(\|U\|_F^2/\sigma^2 + \|U\|_*^2)$. It holds both of the usual models of related
    tasks: with a tiny $\sigma^2$, and $\lambda/\sigma^2$ kept, it is that of tasks near their mean (11) with
    $\lambda_1 + \lambda_2 = \lambda/\sigma^2$ and $\lambda_2 = \lambda_0$; where the tasks have no mean in common it is
    (14) with the mean taken out.

    Args:
      lam0: $\lambda_0 > 0$, the penalty of the mean. Of weights that are all the same it is that of one model for all,
        $\lambda_0\|\bar w\|^2$ for every task: little where there are many samples together.
      lam: $\lambda > 0$. Large: all tasks have the mean's weights.
      sigma2: $\sigma^2 > 0$, see `Probabilistic`.

    Examples:
      >>> import jax.numpy as jnp
      >>> r = MeanCovariance(lam0=0.1, lam=0.5)
      >>> w = jnp.array([[2.0, 0.0], [0.0, 0.0]])  # a mean of (1, 0), deviations of (1, 0) and (-1, 0)
      >>> round(float(r.value(w)), 4)  # 0.1 * 2 * 1 + 0.5 * sqrt(2)^2
      1.2
      >>> r.relationship(2, r.update_relation(None, w)).round(4).tolist()
      [[0.5, -0.5], [-0.5, 0.5]]
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {
        "lam0": domains.POSITIVE,
        "lam": domains.POSITIVE,
        "sigma2": domains.POSITIVE_OR_INFINITE,
    }

    lam: Hyperparameter
    sigma2: Hyperparameter = jnp.inf

    @property
    def of_deviations(self) -> Probabilistic:
        return Probabilistic(self.lam, self.sigma2)

    def check_tasks(self, num_tasks: int) -> None:
        check.scalar("MeanCovariance", lam0=self.lam0, lam=self.lam, sigma2=self.sigma2)


def _centred(rows: Array) -> Array:
    return rows - jnp.mean(rows, axis=0, keepdims=True)


class _Apart:
    """The mean of the tasks and their deviations from it, with bounds on what rounding may have done to each."""

    def __init__(self, rows: Array) -> None:
        self.mean, self.aside = mean_and_deviations(rows)
        m, size = len(rows), jnp.mean(jnp.abs(self.aside), axis=0, keepdims=True)
        # What was taken from all is a number, exactly; how far it is from their mean shows in the deviations' own.
        far = jnp.abs(total_by_halves(self.aside)[None]) / m + rounded(size, 4.0 + halvings(m))
        far = far + rounded(rounded(jnp.mean(jnp.abs(rows), axis=0, keepdims=True), additions(m)), 4.0)
        self.lost, self.lost_of_mean = rounded(self.aside, 4.0) + far, rounded(self.mean, 2.0) + far
