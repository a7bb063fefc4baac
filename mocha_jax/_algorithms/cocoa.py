"""CoCoA (Ma et al. 2015) in the multi-task setting: MOCHA with one accuracy for all nodes and rounds."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.mocha import SubproblemMethod
from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, static
from mocha_jax._node.local_accuracy import solve_to
from mocha_jax._node.local_solver import STEP_FLOPS, Subproblems, part_way
from mocha_jax._problem.problem import Problem
from mocha_jax.servers._base import NodeUpdate
from mocha_jax.systems._base import Info, Work


class Cocoa(SubproblemMethod):
    r"""CoCoA: every node solves its subproblem to the same relative accuracy $\theta$, however long it takes.

    After every pass over its rows a node computes the duality gap g of its subproblem, and stops as soon as
    that certifies eq. (5):

    $$
    \theta_t^h \le \frac{g}{g + G(0) - G(\Delta\alpha)} \le \theta .
    $$

    A node whose work runs out first is *capped*: ``history.capped`` counts these. What the gaps cost is charged. A gap
    that is nothing but rounding stops a node too. The loop has an open end, so there is no reverse-mode derivative.

    Args:
      theta: relative accuracy in [0, 1); with 0 a node goes on until its gap is nothing but rounding, or it is capped.
      max_epochs: passes over its own data that a node makes in a round at most, an integer >= 1.
      sigma_prime: a safe rule, see `Coupling.sigma_prime`.
      gamma: as in `Mocha`.
      omega_every: as in `Mocha`.
      server: as in `Mocha`.
      smoothing: as in `Mocha`.
      initial_omega: as in `Mocha`.
      backend: as in `Mocha`.
      custom_server: as in `Mocha`.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
      >>> solution = mj.solve(problem, Cocoa(0.3), tol=1e-3)
      >>> solution.status.name, int(solution.history.capped.max())
      ('CONVERGED', 0)

    References:
      [Ma et al., Adding vs. Averaging in Distributed Primal-Dual Optimization](https://arxiv.org/abs/1502.03508), 2015.
    """

    theta: Hyperparameter
    max_epochs: int = static(default=100)
    sigma_prime: str = static(default="per_task", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.in_unit_interval("Cocoa", open_right=True, theta=self.theta)
        check.integer("Cocoa", 1, math.inf, max_epochs=self.max_epochs)

    def full_work(self, problem: Problem) -> Array:
        # So many passes or as many steps as an int32 can count.
        sizes = problem.data.sizes
        most = jnp.iinfo(jnp.int32).max // jnp.maximum(sizes, 1)
        return jnp.minimum(most, min(self.max_epochs, jnp.iinfo(jnp.int32).max)) * sizes

    def _gap_flops(self, problem: Problem) -> Array:
        """Operations of one gap: the predictions of all rows, w + q u before that and q |u|^2 / 2 after, ``[m]``."""
        d, rows = problem.data.num_features, problem.data.sizes.astype(problem.data.dtype)
        return 2.0 * d * rows + 4.0 * d

    def step_flops(self, problem: Problem) -> Array:
        # With its share of the gap after the pass.
        rows = jnp.maximum(problem.data.sizes, 1).astype(problem.data.dtype)
        return STEP_FLOPS * problem.data.num_features + self._gap_flops(problem) / rows

    def fixed_flops(self, problem: Problem) -> Array:
        # A gap before the first pass, and after the last one a whole one though it may have been cut short.
        return 2.0 * self._gap_flops(problem) + super().fixed_flops(problem)

    def improve(
        self, drawn: Array, subproblems: Subproblems, problem: Problem, work: Work, extra_flops: Array | float = 0.0
    ) -> NodeUpdate:
        budget = work.budget(self.full_work(problem))
        check.scalar("Cocoa", theta=self.theta)
        theta = jnp.asarray(self.theta, subproblems.w.dtype)
        solution = solve_to(
            drawn, subproblems, theta, budget, passes=min(int(self.max_epochs), jnp.iinfo(jnp.int32).max)
        )
        took_part = (budget > 0) & (problem.data.sizes > 0)
        checks, steps = (a.astype(subproblems.w.dtype) for a in (solution.checks, solution.steps))
        flops = steps * (STEP_FLOPS * problem.data.num_features) + checks * self._gap_flops(problem)
        flops = flops + jnp.where(took_part, extra_flops, 0.0)
        info = Info(solution.steps, flops, took_part & ~solution.reached(theta))
        gamma = self._gamma(problem)
        beta = part_way(subproblems.loss, gamma, subproblems.beta, solution.beta, subproblems.data.y)
        return NodeUpdate(beta, gamma * solution.u, gamma * took_part.astype(subproblems.w.dtype), info)
