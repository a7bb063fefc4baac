"""The conditions of the convergence theorems, as far as a history shows them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree
from mocha_jax.theory._constants import Real


class Assumption2(Pytree):
    r"""Assumption 2 as far as a history shows it."""

    p: Array  # [m] share of the rounds in which theta was 1, of those in which it is known; NaN where none is
    p_max: Array  # []
    theta_hat: Array  # [m] mean theta of the other rounds; NaN where there were none
    theta_max: Array  # [] the largest of these
    theta_bar: Array  # [] p_max + (1 - p_max) theta_max, Lemma 3

    @property
    def holds(self) -> bool:
        """True where p_max < 1 and Theta_max < 1."""
        return bool((self.p_max < 1) & (self.theta_max < 1))

    @property
    def violators(self) -> list[int]:
        """Nodes that never made progress."""
        return [int(k) for k in jnp.flatnonzero(self.p >= 1)]


@on_purpose
def assumption2(theta: Array | np.ndarray) -> Assumption2:
    r"""Estimate the quantities of Assumption 2 from $\theta_t^h$ ``[rounds, m]``.

    Args:
      theta: ``history.nodes.theta``; NaN, where a subproblem had nothing to gain, counts nowhere.

    Returns:
      The estimates, an `Assumption2`.

    Examples:
      >>> import jax.numpy as jnp
      >>> seen = assumption2(jnp.array([[1.0, 0.2], [0.4, 0.6], [0.6, 0.0]]))
      >>> [round(float(v), 3) for v in (seen.p_max, seen.theta_max, seen.theta_bar)], seen.holds
      ([0.333, 0.5, 0.667], True)

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    theta = check.floats("assumption2", "theta", theta, ("rounds", "nodes"))
    if (seen := check.concrete(theta)) is not None:
        check.in_unit_interval("assumption2", theta=np.where(np.isnan(seen), 0.0, seen))
    measured, dropped = ~jnp.isnan(theta), theta == 1

    def mean(values: Array, mask: Array, empty: float) -> Array:
        count = jnp.sum(mask, axis=0).astype(theta.dtype)
        total = jnp.sum(jnp.where(mask, values, 0.0), axis=0)
        return jnp.where(count > 0, total / jnp.maximum(count, 1.0), empty)

    p = mean(dropped.astype(theta.dtype), measured, jnp.nan)
    theta_hat = mean(theta, measured & ~dropped, jnp.nan)
    p_max = jnp.nanmax(p)  # NaN, and the assumption not shown to hold, where nothing is known of any node
    theta_max = jnp.max(jnp.where(jnp.isnan(theta_hat), 0.0, theta_hat))
    return Assumption2(p, p_max, theta_hat, theta_max, p_max + (1.0 - p_max) * theta_max)


class Corollary8(Pytree):
    """The conditions for convergence in the limit that a record suggests."""

    bounded: Array  # [] bool: p and Theta stay away from 1
    slow: Array  # [] bool: (1 - p)(1 - Theta) falls more slowly than 1 / h


@on_purpose
def corollary8(p: Array | np.ndarray, theta_hat: Real = 0.0) -> Corollary8:
    r"""Corollary 8's conditions on $p_t^h$ and $\hat\Theta_t^h$ ``[rounds, tasks]``.

    Either suffices: $\limsup p < 1$ and $\limsup\hat\Theta < 1$; or
    $(1-p_t^h)(1-\hat\Theta_t^h) = \omega(1/h)$ for every task. Limits cannot be read off finitely many rounds:
    the first is judged by the second half of the record, the second by the slope of its logarithm there.

    Returns:
      A flag for each of the two conditions, a `Corollary8`.

    Examples:
      >>> import jax.numpy as jnp
      >>> h = jnp.arange(1, 1001.0)[:, None]
      >>> [bool(corollary8(p).slow) for p in (1 - h**-0.5, 1 - 0.5 / h, jnp.full_like(h, 0.9))]
      [True, False, True]

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.in_unit_interval("corollary8", p=p, theta_hat=theta_hat)
    p, theta_hat = jnp.asarray(p, float), jnp.asarray(theta_hat, float)
    if p.ndim != 2 or len(p) < 4:
        raise ValueError(f"corollary8: p must be [rounds, tasks] with 4 rounds or more, got shape {p.shape}.")
    if theta_hat.ndim > 2 or any(n not in (1, k) for n, k in zip(theta_hat.shape[::-1], p.shape[::-1], strict=False)):
        raise ValueError(
            f"corollary8: theta_hat must be a number or an array like p, {p.shape}, got shape {theta_hat.shape}."
        )
    half = len(p) // 2
    progress = ((1.0 - p) * (1.0 - theta_hat))[half:]
    h = jnp.log(jnp.arange(half + 1, len(p) + 1, dtype=p.dtype))[:, None]
    h = h - jnp.mean(h)
    tiny = jnp.finfo(p.dtype).tiny
    slope = jnp.sum(h * jnp.log(jnp.maximum(progress, tiny)), axis=0) / jnp.sum(h**2)
    stays = jnp.min(progress, axis=0) > 0
    # At a rate of exactly 1 / h the condition fails; a fitted slope is never exact.
    return Corollary8(jnp.all(stays & (slope > -0.05)), jnp.all(stays & (slope > -0.95)))
