r"""The accuracy of local solutions: the gap of every node's subproblem (4), and solving it to a given accuracy.

From duals $\beta^0$ and weights w a node with curvature q minimises

$$
G(\beta) = \sum_i c_i\,\ell^*(-\beta_i) + \langle w, u\rangle + \tfrac q2\|u\|^2,
\qquad u = \sum_i c_i(\beta_i - \beta^0_i)x_i .
$$

With predictions $z = X(w + q u)$ its own duality gap is a sum of Fenchel-Young terms, all >= 0,
$\mathrm{gap} = \sum_i c_i\,F(z_i, \beta_i) \ge G(\beta) - G^\star$, and for any other duals a

$$
G(a) - G(\beta) = \sum_i c_i\,[F(z_i, a_i) - F(z_i, \beta_i)] + \tfrac q2\|u_a - u\|^2 .
$$

Nothing here is a difference of objectives, so theta is accurate however small it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.pytree import Pytree
from mocha_jax._node.local_solver import Subproblems, ascend, visiting_orders
from mocha_jax._numerics.math import safe_ratio


class LocalSolution(Pytree):
    """Subproblems that were solved until they were good enough."""

    beta: Array  # [m, n] the duals reached
    u: Array  # [m, d] the change of each node's dual vector
    gap: Array  # [m] bound on G(beta) - G*
    possible: Array  # [m] bound on G(start) - G*
    noise: Array  # [m] a gap below this cannot be told from 0
    steps: Array  # [m] int32 coordinate updates
    checks: Array  # [m] int32 how often a node computed its gap

    @property
    def theta(self) -> Array:
        r"""A bound on $\theta$ of `beta`, ``[m]``: gap over what was possible, or 0."""
        return safe_ratio(self.gap, self.possible)

    def reached(self, theta: Array) -> Array:
        """Tell whether the gap certifies `theta`, or is nothing but rounding, ``[m]``."""
        return (self.gap <= theta * self.possible) | (self.gap <= self.noise)


def solve_to(key: Array, sub: Subproblems, theta: Array, budget: Array, *, passes: int) -> LocalSolution:
    """Every node makes passes over its rows until its own gap certifies `theta`, or its budget is spent.

    Args:
      key: a JAX random key; the key is consumed.
      sub: the subproblems.
      theta: relative accuracy, [] or ``[m]``.
      budget: coordinate steps of each node at most, ``[m]`` int32.
      passes: passes at most.
    """
    sizes = sub.data.sizes

    def unfinished(s: LocalSolution) -> Array:
        return (s.steps < budget) & ~s.reached(theta)

    def check(s: LocalSolution, wanted: Array) -> LocalSolution:
        z = sub.predictions(s.u)
        gap = sub.fenchel_young(z, s.beta)
        possible = sub.fenchel_young(z, sub.beta) + sub.distance(s.u)
        checks = s.checks + wanted.astype(jnp.int32)
        possible = jnp.maximum(possible, gap)
        return s.replace(gap=gap, possible=possible, noise=sub.noise(z, s.beta), checks=checks)

    def one_pass(carry: tuple[Array, LocalSolution]) -> tuple[Array, LocalSolution]:
        i, s = carry
        steps = jnp.where(unfinished(s), jnp.minimum(sizes, budget - s.steps), 0)
        # The rest of a subproblem is one with the same curvature, begun where the last pass ended.
        w = sub.w + sub.q[:, None] * s.u
        orders = visiting_orders(jax.random.fold_in(key, i), sub.data, 1)
        beta, du, done = ascend(orders, sub.loss, sub.data, s.beta, w, sub.q, steps)
        return i + 1, check(s.replace(beta=beta, u=s.u + du, steps=s.steps + done), steps > 0)

    nothing = jnp.zeros_like(sizes)
    start = LocalSolution(sub.beta, jnp.zeros_like(sub.w), sub.q, sub.q, sub.q, nothing, nothing)
    carry = jnp.zeros((), jnp.int32), check(start, (budget > 0) & (sizes > 0))
    return lax.while_loop(lambda c: (c[0] < passes) & jnp.any(unfinished(c[1])), one_pass, carry)[1]


def theta_of(key: Array, sub: Subproblems, beta: Array, tol: Array, *, passes: int) -> tuple[Array, Array]:
    r"""$\theta$ of the duals `beta` ``[m, n]``, eq. (5), from the subproblems' optima.

    Returns:
      theta ``[m]``: exactly 1 where the duals did not change, NaN where there was nothing to gain but what rounding
      hides; and a bound on its error ``[m]``, at most `tol` unless that took more than so many passes,
      or more digits than there are.
    """
    best = solve_to(key, sub, tol, jnp.full_like(sub.data.sizes, jnp.iinfo(jnp.int32).max), passes=passes)
    z = sub.predictions(best.u)

    def above(duals: Array) -> Array:
        """G(duals) - G*, to within best.gap."""
        return sub.fenchel_young(z, duals) + sub.distance(sub.data.node_vectors(duals - best.beta))

    possible = above(sub.beta)
    visible = possible > sub.noise(z, sub.beta)
    moved = jnp.any(jnp.where(sub.data.weight > 0, beta != sub.beta, False), axis=1)
    theta = jnp.where(moved, jnp.clip(safe_ratio(above(beta), possible), 0.0, 1.0), 1.0)
    return jnp.where(visible, theta, jnp.nan), jnp.where(visible, safe_ratio(best.gap, possible), jnp.nan)
