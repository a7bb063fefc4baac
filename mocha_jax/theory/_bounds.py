"""Bounds on the gap after a number of rounds, and the rounds that suffice: Theorems 1 and 2."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Relation
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem
from mocha_jax.theory._constants import Real, safe_scaling, sigma, steepness


@on_purpose
def dual_bound(start: Real, rounds: Real, s: Real, theta_bar: Real, gamma: Real = 1.0) -> Array:
    r"""The distance of the dual from its optimum after a number of rounds, (26), in expectation.

    $$
    (1 - s\gamma(1-\bar\Theta))^h\,[D(\alpha^{(0)}) - D(\alpha^\star)]
    $$

    Args:
      start: the distance at the start, or a bound on it such as the gap there.
      rounds: h.
      s: from `rate`.
      theta_bar: from `assumption2`.
      gamma: aggregation parameter.

    Returns:
      The bound.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.nonnegative("dual_bound", start=start, rounds=rounds)
    _check_progress("dual_bound", s, theta_bar, gamma)
    start, rounds, s, theta_bar, gamma = _as_jax_takes(
        "dual_bound", start=start, rounds=rounds, s=s, theta_bar=theta_bar, gamma=gamma
    )
    return jnp.asarray(start) * (1.0 - s * gamma * (1.0 - theta_bar)) ** jnp.asarray(rounds, float)


@on_purpose
def gap_bound(start: Real, rounds: Real, s: Real, theta_bar: Real, gamma: Real = 1.0) -> Array:
    r"""A bound on the duality gap after a number of rounds, (27), in expectation and for smooth losses.

    $$
    \mathbb{E}[G(\alpha^{(H)})] \le
    \frac{\mathbb{E}[D(\alpha^{(H)}) - D(\alpha^\star)]}{s\gamma(1-\bar\Theta)}
    \le \frac{(1 - s\gamma(1-\bar\Theta))^H}{s\gamma(1-\bar\Theta)}\,[D(\alpha^{(0)}) - D(\alpha^\star)]
    $$

    A round gains at least the share $s\gamma(1-\bar\Theta)$ of the gap (23), and no more than the distance left. So the
    rounds after which the gap is expected within $\epsilon$ are those that `theorem1` has for the dual and
    ``tol`` $= s\gamma(1-\bar\Theta)\,\epsilon$. Arguments as in `dual_bound`; without progress it is infinite.

    Returns:
      The last bound of (27).

    Examples:
      >>> bound, progress = gap_bound(8.0, 0, s=0.5, theta_bar=0.5), 0.5 * (1 - 0.5)
      >>> float(bound)  # 8 / progress
      32.0
      >>> rounds = theorem1(8.0, tol=1e-3 * progress, s=0.5, theta_bar=0.5)
      >>> bool(gap_bound(8.0, rounds, 0.5, 0.5) <= 1e-3)
      True

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.nonnegative("gap_bound", start=start, rounds=rounds)
    _check_progress("gap_bound", s, theta_bar, gamma)
    start, rounds, s, theta_bar, gamma = _as_jax_takes(
        "gap_bound", start=start, rounds=rounds, s=s, theta_bar=theta_bar, gamma=gamma
    )
    progress = jnp.asarray(s * gamma * (1.0 - theta_bar))
    left = dual_bound(start, rounds, s, theta_bar, gamma)
    return jnp.where(progress > 0, safe_ratio(left, progress), jnp.inf)


@on_purpose
def theorem1(start: Real, tol: Real, s: Real, theta_bar: Real, gamma: Real = 1.0) -> Array:
    r"""Rounds after which the dual is expected within `tol` of its optimum, for smooth losses, (6).

    $$
    H \ge \frac{1}{(1-\bar\Theta)\,s\,\gamma}\log\frac{D(\alpha^{(0)}) - D(\alpha^\star)}{\epsilon}
    $$

    The paper bounds the distance at the start by n; here it is an argument. Other arguments as in `dual_bound`.

    Returns:
      The number of rounds H, rounded up.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.nonnegative("theorem1", start=start)
    check.positive("theorem1", tol=tol)
    _check_progress("theorem1", s, theta_bar, gamma)
    start, tol, s, theta_bar, gamma = _as_jax_takes(
        "theorem1", start=start, tol=tol, s=s, theta_bar=theta_bar, gamma=gamma
    )
    wanted = jnp.log(jnp.maximum(jnp.asarray(start) / tol, 1.0))
    rounds = wanted / jnp.abs((1.0 - theta_bar) * s * gamma)  # which may be -0
    return jnp.where(wanted > 0, jnp.ceil(rounds), 0.0)


def _as_jax_takes(owner: str, **values: Real) -> tuple[Real, ...]:
    """The numbers, and arrays where they were lists."""
    return tuple(check.number(owner, name, value) for name, value in values.items())


def _check_progress(owner: str, s: Real, theta_bar: Real, gamma: Real) -> None:
    """The ranges of the factors of a round's progress."""
    check.in_unit_interval(owner, s=s, theta_bar=theta_bar)
    check.in_unit_interval(owner, open_left=True, gamma=gamma)


@on_purpose
def theorem2(
    problem: Problem, start: Real, tol: Real, theta_bar: Real, relation: Relation = None,
    *, sigma_prime: str = "per_task", gamma: Real = 1.0,
) -> tuple[Array, Array]:  # fmt: skip
    r"""Rounds after which the average dual iterate is expected within `tol` of the optimum, for Lipschitz losses, (7).

    With $a = \gamma(1-\bar\Theta)$ and $K = 4L^2\sum_t\sigma'_t\sigma_t\sum_i c_{ti}$, the paper's
    $4L^2\sigma\sigma'$,

    $$
    H = H_0 + \Big\lceil\frac2a\max\Big(1, \frac{K}{2\epsilon}\Big)\Big\rceil, \quad
    H_0 = \Big\lceil h_0 + \frac{4K}{a\epsilon}\Big\rceil, \quad
    h_0 = \Big[1 + \frac1a\log\frac{2\,[D(\alpha^{(0)}) - D(\alpha^\star)]}{K}\Big]_+ .
    $$

    The paper's $n^2$ belongs to an objective that is a mean over n samples; ours is the sum (1).

    Returns:
      $H_0$ and H: the average is over the rounds in between, as `mocha_jax.Averaged` keeps it.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("theorem2", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.nonnegative("theorem2", start=start)
    check.positive("theorem2", tol=tol)
    _check_progress("theorem2", 1.0, theta_bar, gamma)
    start, tol, theta_bar, gamma = _as_jax_takes("theorem2", start=start, tol=tol, theta_bar=theta_bar, gamma=gamma)
    difficulty = sigma(problem, relation) * safe_scaling(problem, relation, sigma_prime, gamma)
    k = steepness("theorem2", problem, difficulty)
    a = jnp.asarray(gamma * (1.0 - theta_bar))
    early = jnp.maximum(1.0 + jnp.log(2.0 * jnp.asarray(start) / k) / a, 0.0)
    first = jnp.ceil(early + 4.0 * k / (a * tol))
    return first, first + jnp.ceil(2.0 / a * jnp.maximum(1.0, k / (2.0 * tol)))
