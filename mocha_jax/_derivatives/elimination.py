r"""The linear system behind a derivative, solved exactly where Newton's method could solve the problem.

With a smooth loss and a given relationship every free dual variable can be eliminated from

$$
P\bigl(\rho(I - P)q - X^\top C\beta\bigr) = r, \qquad -C X P q - C D \beta = s,
$$

where $P = \rho\bar M(I + \rho\bar M)^{-1}$. With $u = Pq$ and $H = X^\top C D^{-1} X$ of the free samples it becomes
the system of a Newton step, $(I + \bar M H)u = (\bar M + I/\rho)r - \bar M X^\top D^{-1}s$, and

$$
C\beta = -D^{-1}s - C D^{-1}Xu, \qquad
q = u + \frac{1}{\rho}\bigl(r + X^\top C\beta + \tfrac{1}{\rho}\bar M^{-1}r\bigr).
$$
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from mocha_jax._algorithms.second_derivatives import curvature
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem

# Second derivatives at most. MINRES takes hundreds or thousands of steps, each of two products with the samples: a
# factorisation is cheaper up to a thousand features or so, whatever the samples.
_MOST = 2**24


def can_eliminate(problem: Problem) -> bool:
    """Tell whether the loss has a curvature and second derivatives are few enough to be factorised."""
    data, d = problem.data, problem.data.num_features
    size = d if data.shared else min(d, data.y.shape[1])
    few = data.num_nodes * size**2 + d**2 <= _MOST
    smooth = problem.loss.smoothness is not None
    return few and smooth and not problem.regularizer.learned and data.sharding is None


def eliminated(
    problem: Problem, rho: Array, flexibility: Array, free: Array
) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
    """Factorise the system, and return what solves it.

    Args:
      problem: the problem.
      rho: of the proximal map whose argument is the unknown.
      flexibility: the inverse of D of every sample ``[m, n]``.
      free: marks the duals that move ``[m, n]``.
    """
    data = problem.data
    coupling = problem.regularizer.coupling(data.num_tasks)
    moves = jnp.where(free, flexibility, 0.0)
    bent = curvature(data, data.weight * moves)
    system = coupling.newton_system(bent)

    def solve(b: tuple[Array, Array]) -> tuple[Array, Array]:
        right, slopes = b
        u, changed = system(right / rho + coupling.apply(right), -moves * slopes)
        unknown = u + (right + bent.sums(changed) + coupling.gradient(right) / rho) / rho
        return unknown, jnp.where(free, safe_ratio(changed, data.weight), 0.0)

    return solve
