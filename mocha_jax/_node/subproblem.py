r"""The nodes' subproblems (4): how nearly solved they are, and solving them to a given accuracy.

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
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.ascent import ascend, visiting_orders
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.terms import conjugates
from mocha_jax.losses import Loss

# An improvement below so many roundings of its terms cannot be told from none.
_ROUNDING = 16.0


class Subproblems(Pytree):
    """The subproblems of all nodes in one round."""

    data: TaskData  # laid out for `ascend`
    loss: Loss
    beta: Array  # [m, n] the duals at the start of the round
    w: Array  # [m, d] each node's weights
    q: Array  # [m] each node's curvature

    def predictions(self, u: Array) -> Array:
        """Z = X(w + q u), ``[m, n]``."""
        return self.data.node_predictions(self.w + self.q[:, None] * u)

    def fenchel_young(self, z: Array, beta: Array) -> Array:
        """Each node's sum of c F(z, beta), ``[m]``."""
        return jnp.sum(self.data.weighted(self.loss.fenchel_young(z, beta, self.data.y)), axis=1)

    def noise(self, z: Array, beta: Array) -> Array:
        """Bound the rounding of a sum of Fenchel-Young terms, ``[m]``."""
        terms = self.data.weighted(jnp.abs(z * beta) + jnp.abs(self.loss.value(z, self.data.y)))
        return _ROUNDING * jnp.finfo(z.dtype).eps * jnp.sum(terms, axis=1)

    def distance(self, u: Array) -> Array:
        """The quadratic term, q |u|^2 / 2, ``[m]``."""
        return 0.5 * self.q * jnp.sum(u**2, axis=1)

    def value(self, beta: Array) -> Array:
        r"""$G(\beta)$ of every node, ``[m]``."""
        u = self.data.node_vectors(beta - self.beta)
        return conjugates(self.data, self.loss, beta) + jnp.sum(self.w * u, axis=1) + self.distance(u)


class LocalSolution(Pytree):
    """Subproblems that were solved until they were good enough."""

    beta: Array  # [m, n] the duals reached
    u: Array  # [m, d] the change of each node's dual vector
    gap: Array  # [m] bound on G(beta) - G*
    room: Array  # [m] bound on G(start) - G*
    noise: Array  # [m] a gap below this cannot be told from 0
    steps: Array  # [m] int32 coordinate updates
    checks: Array  # [m] int32 how often a node computed its gap

    @property
    def theta(self) -> Array:
        r"""A bound on $\theta$ of `beta`, ``[m]``: gap / room, or 0 without room."""
        return safe_ratio(self.gap, self.room)

    def reached(self, theta: Array) -> Array:
        """Tell whether the gap certifies `theta`, or is nothing but rounding, ``[m]``."""
        return (self.gap <= theta * self.room) | (self.gap <= self.noise)


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
        room = sub.fenchel_young(z, sub.beta) + sub.distance(s.u)
        checks = s.checks + wanted.astype(jnp.int32)
        return s.replace(gap=gap, room=jnp.maximum(room, gap), noise=sub.noise(z, s.beta), checks=checks)

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

    room = above(sub.beta)
    visible = room > sub.noise(z, sub.beta)
    moved = jnp.any(jnp.where(sub.data.weight > 0, beta != sub.beta, False), axis=1)
    theta = jnp.where(moved, jnp.clip(safe_ratio(above(beta), room), 0.0, 1.0), 1.0)
    return jnp.where(visible, theta, jnp.nan), jnp.where(visible, safe_ratio(best.gap, room), jnp.nan)
