"""The constants of a problem: Definition 6, the rate s of Theorem 1, and what the losses' steepness adds up to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Relation
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.problem import Problem

Real = Array | np.ndarray | float

_MAX_ITERATIONS = 10_000


@on_purpose
def sigma(problem: Problem, relation: Relation = None, *, tol: float = 1e-4) -> Array:
    r"""Definition 6 for every node, ``[m]``.

    $$
    \sigma_t = \max_\beta \frac{\|X_t C_t\beta\|_{M_t}^2}{\|\beta\|_c^2}
    = \bar M_{tt}\,\lambda_{\max}\Big(\sum_i c_i x_i x_i^\top\Big)
    $$

    by power iteration from a random start, until the residual is below `tol` times the value; the residual is added.
    Eigenvalues that close to the largest cannot be told from it.

    Args:
      problem: the problem.
      relation: Omega where it is learned, as the regularizer keeps it; default the initial one.
      tol: relative accuracy, about.

    Returns:
      $\sigma_t$ of every node, ``[m]``.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("sigma", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.scalar("sigma", tol=tol)
    check.positive("sigma", tol=tol)
    data, regularizer = problem.data, problem.regularizer
    least = jnp.asarray(check.number("sigma", "tol", tol), data.dtype)
    relation = regularizer.known_relation("sigma", relation, data.num_tasks, data.num_features)

    def apply(u: Array) -> Array:
        return data.weighted_sums(data.weight * data.node_predictions(u))

    def norm(u: Array) -> Array:
        return jnp.linalg.norm(u, axis=1, keepdims=True)

    def improve(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        i, u, _, _ = carry
        image = apply(u)
        value = jnp.sum(u * image, axis=1, keepdims=True)
        return i + 1, safe_ratio(image, norm(image)), value, norm(image - value * u)

    def unfinished(carry: tuple[Array, Array, Array, Array]) -> Array:
        i, _, value, residual = carry
        return (i < 2) | ((i < _MAX_ITERATIONS) & jnp.any(residual > least * value))

    start = jax.random.normal(jax.random.key(0), (data.num_nodes, data.num_features), data.dtype)
    nothing = jnp.zeros((data.num_nodes, 1), data.dtype)
    carry = jnp.zeros((), jnp.int32), start / norm(start), nothing, nothing
    _, _, value, residual = lax.while_loop(unfinished, improve, carry)
    own = data.to_nodes(regularizer.coupling(data.num_tasks, relation).diagonal())
    return own * (value + residual)[:, 0]


@on_purpose
def rate(problem: Problem, relation: Relation = None, *, sigma_prime: str = "per_task", gamma: Real = 1.0) -> Array:
    r"""The constant s of Theorem 1: $\min_t \mu / (\mu + \sigma_t\sigma'_t)$, from the proof of Lemma 6.

    Args:
      problem: the problem; its loss must be smooth.
      relation: as in `sigma`.
      sigma_prime: rule for $\sigma'$.
      gamma: aggregation parameter.

    Returns:
      s, a scalar.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("rate", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    if problem.loss.smoothness is None:
        raise ValueError(
            f"rate: the problem's loss {type(problem.loss).__name__} is not smooth, so Theorem 1 does not apply; see "
            f"theorem2."
        )
    check.in_unit_interval("rate", open_left=True, gamma=gamma)
    mu = jnp.asarray(problem.loss.mu, problem.data.dtype)
    difficulty = sigma(problem, relation) * safe_scaling(problem, relation, sigma_prime, gamma)
    return jnp.min(mu / (mu + difficulty))


def safe_scaling(problem: Problem, relation: Relation, rule: str, gamma: Real) -> Array:
    r"""The scaling $\sigma'$ of every node, ``[m]``."""
    data, regularizer = problem.data, problem.regularizer
    relation = regularizer.known_relation("sigma_prime", relation, data.num_tasks, data.num_features)
    coupling = regularizer.coupling(data.num_tasks, relation)
    return data.to_nodes(coupling.sigma_prime(rule, gamma, data.nodes_per_task))


def steepness(owner: str, problem: Problem, difficulty: Array) -> Array:
    r"""$4L^2\sum_k d_k\sum_i c_{ki}$ of Lipschitz losses, for numbers d of the nodes ``[m]``."""
    lipschitz = problem.loss.lipschitz
    if lipschitz is None:
        raise ValueError(f"{owner}: {type(problem.loss).__name__} is not Lipschitz; see theorem1.")
    return 4.0 * jnp.asarray(lipschitz) ** 2 * jnp.sum(difficulty * jnp.sum(problem.data.weight, axis=1))
