"""Losses of the margin yz, for labels -1 and +1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import domains
from mocha_jax._core.pytree import Hyperparameter
from mocha_jax._numerics.math import saturating_ratio
from mocha_jax.losses._base import MarginLoss


class Hinge(MarginLoss, in_kernel=True):
    r"""The support vector machine's loss $\max(0, 1 - yz)$.

    $\ell^*(-\beta) = -a$ with $a = y\beta \in [0, 1]$. Not smooth; 1-Lipschitz.

    Examples:
      >>> import jax.numpy as jnp
      >>> Hinge().value(jnp.array([-1.0, 0.5, 2.0]), jnp.array([1.0, 1.0, 1.0])).tolist()
      [2.0, 0.5, 0.0]

    References:
      Cortes and Vapnik, Support-Vector Networks, 1995.
    """

    piecewise_linear: ClassVar[bool] = True

    @property
    def lipschitz(self) -> float:
        return 1.0

    def phi(self, p: Array) -> Array:
        return jnp.maximum(1.0 - p, 0.0)

    def phi_slope(self, p: Array) -> Array:
        return jnp.where(p < 1.0, -jnp.ones_like(p), 0.0)

    def phi_conjugate(self, a: Array) -> Array:
        return -a

    def phi_step(self, a: Array, p: Array, kappa: Array) -> Array:
        return jnp.clip(a + saturating_ratio(1.0 - p, kappa), 0.0, 1.0)

    def phi_fenchel_young(self, p: Array, a: Array) -> Array:
        r = 1.0 - p
        return (1.0 - a) * jnp.maximum(r, 0.0) + a * jnp.maximum(-r, 0.0)

    def phi_change(self, p: Array, before: Array, a: Array) -> Array:
        return (a - before) * (p - 1.0)


class SmoothedHinge(MarginLoss, in_kernel=True):
    r"""The hinge with its kink rounded off over a width gamma.

    0 for $p \ge 1$, $(1-p)^2/2\gamma$ for $1-\gamma \le p \le 1$,
    $1 - p - \gamma/2$ below. $\ell^*(-\beta) = -a + \gamma a^2/2$ on [0, 1].
    $1/\gamma$-smooth and 1-Lipschitz.

    Args:
      gamma: width of the rounded part, > 0; an array leaf.

    References:
      [Shalev-Shwartz and Zhang, Stochastic Dual Coordinate Ascent Methods](https://arxiv.org/abs/1209.1873), 2013.
    """

    domains: ClassVar[Mapping[str, domains.Domain]] = {"gamma": domains.POSITIVE}

    gamma: Hyperparameter = 1.0

    @property
    def smoothness(self) -> Hyperparameter:
        return 1.0 / self.gamma

    @property
    def lipschitz(self) -> float:
        return 1.0

    def phi(self, p: Array) -> Array:
        r = 1.0 - p
        inner = jnp.clip(r, 0.0, self.gamma)
        return inner * inner / (2.0 * self.gamma) + jnp.maximum(r - self.gamma, 0.0)

    def phi_slope(self, p: Array) -> Array:
        return -jnp.clip((1.0 - p) / self.gamma, 0.0, 1.0)

    def phi_conjugate(self, a: Array) -> Array:
        return -a + 0.5 * self.gamma * a * a

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return super()._shift(z, beta, y) + self.gamma * jnp.abs(beta)

    def phi_step(self, a: Array, p: Array, kappa: Array) -> Array:
        return jnp.clip(a + (1.0 - p - self.gamma * a) / (kappa + self.gamma), 0.0, 1.0)

    def phi_fenchel_young(self, p: Array, a: Array) -> Array:
        r, gamma = 1.0 - p, self.gamma
        inner = jnp.clip(r, 0.0, gamma)
        near = (inner - gamma * a) ** 2 / (2.0 * gamma)  # all of it where 0 <= r <= gamma
        above = (1.0 - a) * jnp.maximum(r - gamma, 0.0)
        below = a * jnp.maximum(-r, 0.0)
        return near + above + below

    def phi_change(self, p: Array, before: Array, a: Array) -> Array:
        return (a - before) * (p - 1.0 + 0.5 * self.gamma * (a + before))


class SquaredHinge(MarginLoss, in_kernel=True):
    r"""The squared hinge $\max(0, 1 - yz)^2$ (no 1/2, as in LIBLINEAR).

    $\ell^*(-\beta) = -a + a^2/4$ for $a \ge 0$. 2-smooth; not Lipschitz.

    References:
      Fan et al., LIBLINEAR: A Library for Large Linear Classification, 2008.
    """

    @property
    def smoothness(self) -> float:
        return 2.0

    def phi_bounds(self) -> tuple[float, float]:
        return 0.0, jnp.inf

    def phi(self, p: Array) -> Array:
        return jnp.maximum(1.0 - p, 0.0) ** 2

    def phi_slope(self, p: Array) -> Array:
        return -2.0 * jnp.maximum(1.0 - p, 0.0)

    def phi_conjugate(self, a: Array) -> Array:
        return -a + 0.25 * a * a

    def phi_step(self, a: Array, p: Array, kappa: Array) -> Array:
        return jnp.maximum(a + (1.0 - p - 0.5 * a) / (kappa + 0.5), 0.0)

    def phi_fenchel_young(self, p: Array, a: Array) -> Array:
        r = 1.0 - p
        return (jnp.maximum(r, 0.0) - 0.5 * a) ** 2 + a * jnp.maximum(-r, 0.0)

    def phi_change(self, p: Array, before: Array, a: Array) -> Array:
        return (a - before) * (p - 1.0 + 0.25 * (a + before))


class Logistic(MarginLoss, in_kernel=True):
    r"""The logistic loss $\log(1 + e^{-yz})$.

    $\ell^*(-\beta) = a\log a + (1-a)\log(1-a)$ on [0, 1]. 1/4-smooth, 1-Lipschitz.

    The coordinate step has no closed form. With $\sigma$ the sigmoid and p the
    margin *after* the step, $a = \sigma(-p)$ and

    $$
    p - v - \kappa\,\sigma(-p) = 0, \qquad v = p_0 - \kappa a_0 ,
    $$

    an increasing equation, solved by Newton from a point chosen so that Newton cannot
    overshoot (see the code): six iterations reach rounding for any curvature.
    """

    log_odds: ClassVar[bool] = True

    @property
    def smoothness(self) -> float:
        return 0.25

    @property
    def lipschitz(self) -> float:
        return 1.0

    def phi(self, p: Array) -> Array:
        return jax.nn.softplus(-p)

    def phi_slope(self, p: Array) -> Array:
        return -jax.nn.sigmoid(-p)

    def phi_conjugate(self, a: Array) -> Array:
        return _xlogx(a) + (1.0 - a) * jnp.log1p(-jnp.where(a < 1.0, a, 0.0))  # 1 - a as exact as a

    def _shift(self, z: Array, beta: Array, y: Array) -> Array:
        return 4.0 * (1.0 + jnp.abs(z))  # a sigmoid has a few roundings, whatever its size

    def phi_step(self, a: Array, p: Array, kappa: Array) -> Array:
        # The left side minus the right is convex for p < 0, concave for p > 0, and
        # p -> -p maps one half to the other with v -> -v - kappa. So solve for s = |p| >= 0,
        # where it is concave: Newton started left of the root climbs to it monotonically.
        v = p - kappa * a
        positive = v + 0.5 * kappa <= 0.0  # sign at p = 0: the root is negative ...
        v = jnp.where(positive, -v - kappa, v)  # ... and mirrored
        # Left of the root: 0, v, and, since sigmoid(-s) >= exp(-s)/2, every s with
        # s - v <= (kappa/2) exp(-s); s = log(kappa/2) - log(max(log(kappa/2) - v, 1)) is one.
        half = jnp.log(jnp.maximum(0.5 * kappa, jnp.finfo(kappa.dtype).tiny))
        s = jnp.maximum(jnp.maximum(v, 0.0), half - jnp.log(jnp.maximum(half - v, 1.0)))
        for _ in range(6):
            down = jax.nn.sigmoid(-s)
            s = s - (s - v - kappa * down) / (1.0 + kappa * down * (1.0 - down))
        return jax.nn.sigmoid(jnp.where(positive, s, -s))

    def phi_fenchel_young(self, p: Array, a: Array) -> Array:
        # KL(a || sigmoid(-p)), as two Bregman terms: each is >= 0.
        near, far = jax.nn.sigmoid(-p), jax.nn.sigmoid(p)
        return _relative_entropy(a, near, jax.nn.softplus(p)) + _relative_entropy(1.0 - a, far, jax.nn.softplus(-p))


def _xlogx(a: Array) -> Array:
    ok = a > 0
    return jnp.where(ok, a * jnp.log(jnp.where(ok, a, 1.0)), 0.0)


def _relative_entropy(a: Array, s: Array, minus_log_s: Array) -> Array:
    """``a log(a/s) + s - a >= 0``; the difference is taken before the logarithm if small."""
    t = (s - a) / jnp.where(a > 0, a, 1.0)
    small = (a > 0) & (jnp.abs(t) < 0.5)
    t = jnp.where(small, t, 0.0)
    near = a * (t - jnp.log1p(t))
    far = _xlogx(a) + a * minus_log_s + s - a
    return jnp.maximum(jnp.where(small, near, far), 0.0)
