"""The lemmas about a single round: both sides, or the side that promises something."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.dual_method import MochaState
from mocha_jax._algorithms.mocha import SubproblemMethod
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree, Relation
from mocha_jax._problem.gap import conjugates
from mocha_jax._problem.problem import Problem
from mocha_jax.servers._dual import DualServer, DualState
from mocha_jax.theory._constants import Real, safe_scaling, sigma, steepness


@on_purpose
def lemma4(problem: Problem, algorithm: SubproblemMethod, before: MochaState, after: MochaState) -> tuple[Array, Array]:
    r"""Both sides of (18) for one round of the dual server, from the states before and after it.

    $$
    D(\alpha + \gamma\Delta\alpha) \le (1-\gamma)D(\alpha)
    + \gamma\sum_t G_t^{\sigma'}(\Delta\alpha_t; v, \alpha_t)
    $$

    Omega must not have been replaced in between.

    Returns:
      The left-hand side and the right-hand side.

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("lemma4", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.instance("lemma4", "algorithm", algorithm, SubproblemMethod, 'Mocha(server="dual")')
    for name, state in (("before", before), ("after", after)):
        check.instance("lemma4", name, state, MochaState, "algorithm.init(problem)")
    if not isinstance(before.server, DualState):
        raise ValueError('lemma4: the states have no safe sigma\'; use Mocha(server="dual", sigma_prime="per_task").')
    if not isinstance(algorithm.server_for(problem), DualServer):
        raise ValueError('lemma4: algorithm must have a safe sigma\', as Mocha(server="dual", sigma_prime="per_task").')
    if not problem.data.y.shape == before.beta.shape == after.beta.shape:
        raise ValueError(
            f"lemma4: the states must be of the problem, whose data needs duals {problem.data.y.shape}; before has "
            f"{before.beta.shape}, after {after.beta.shape}."
        )
    data, coupling = problem.data, before.server.coupling
    gamma = jnp.asarray(algorithm.gamma, data.dtype)
    sub = algorithm.subproblems(before, problem)
    full_beta = before.beta + (after.beta - before.beta) / gamma

    def dual(beta: Array) -> Array:
        v = data.dual_vectors(beta)
        return jnp.sum(conjugates(data, problem.node_loss, beta)) + coupling.conjugate(v)

    # The constants c(alpha) of the subproblems add up to R*(v).
    local = jnp.sum(sub.value(problem.node_loss.project(full_beta, data.y))) + coupling.conjugate(before.v)
    return dual(after.beta), (1.0 - gamma) * dual(before.beta) + gamma * local


class Lemma5(Pytree):
    """The right-hand side of Lemma 5 and what it is made of."""

    progress: Array  # [] what a round gains at least, (19)
    gap: Array  # [m] G_t, (20), each node's share of the duality gap
    spread: Array  # [m] J_t, (21)
    target: Array  # [m, n] u_t, (22), the duals that a node moves towards


@on_purpose
def lemma5(
    problem: Problem, beta: Array | np.ndarray, s: Real, theta_bar: Real, relation: Relation = None,
    *, sigma_prime: str = "per_task", gamma: Real = 1.0,
) -> Lemma5:  # fmt: skip
    r"""Bound from below what one round from these duals gains, (19), in expectation and for any s in [0, 1].

    $$
    \mathbb{E}[D(\alpha^{(h)}) - D(\alpha^{(h+1)})] \ge
    \gamma\sum_t(1-\bar\Theta)\Big(s\,G_t - \frac{\sigma'_t s^2}{2}J_t\Big)
    $$

    $$
    G_t = \sum_i c_{ti}[\ell^*(-\beta_{ti}) + \ell(z_{ti}) + \beta_{ti}z_{ti}], \quad
    J_t = -\frac{\mu(1-s)}{\sigma'_t s}\|u_t-\beta_t\|_c^2 + \|X_tC_t(u_t-\beta_t)\|_{M_t}^2, \quad
    -u_{ti} \in \partial\ell(z_{ti})
    $$

    with the predictions $z_{ti} = w_t(\beta)^\top x_{ti}$, for nodes in place of tasks where they share one. It is
    what the step $s(u_t - \beta_t)$ gains, so that for squared losses, of which nothing is estimated, and a node that
    can do no better than such a step, it is exact. (22) has $u_t$ without the sign: then
    (20) is not what the step gains, and (19) does not hold.

    Args:
      problem: the problem.
      beta: feasible duals ``[m, n]``, at which the round begins.
      s: length of the step, in [0, 1].
      theta_bar: $\bar\Theta$; or the $\theta_t^h$ of this very round, one per node ``[m]``, and the bound is on what
        it gains, without expectation.
      relation: as in `sigma`.
      sigma_prime: rule for $\sigma'$.
      gamma: aggregation parameter.

    Returns:
      The bound and its parts, a `Lemma5`.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 5, 4, smallest=6, largest=12).data
      >>> problem = mj.Problem(data, mj.losses.SmoothedHinge(1.0), mj.regularizers.MeanRegularized(1.0, 1.0))
      >>> algorithm = mj.Mocha(server="dual", sigma_prime="per_task")
      >>> state = algorithm.init(problem)
      >>> after, history = mj.run(problem, algorithm, jax.random.key(0), num_rounds=1, watch=mj.Watch(theta=1e-6))
      >>> gained = history.dual[-1] - algorithm.certify(state, problem).dual
      >>> promised = lemma5(problem, state.beta, mj.theory.rate(problem), history.nodes.theta[0])
      >>> bool(0 < promised.progress < gained), promised.spread.shape, promised.target.shape == data.y.shape
      (True, (5,), True)

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("lemma5", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    data, loss, regularizer = problem.data, problem.node_loss, problem.regularizer
    beta = check.floats("lemma5", "beta", beta, data.y.shape).astype(data.dtype)
    check.scalar("lemma5", s=s, gamma=gamma)
    check.in_unit_interval("lemma5", s=s, theta_bar=theta_bar)
    check.in_unit_interval("lemma5", open_left=True, gamma=gamma)
    if jnp.shape(theta_bar) not in ((), (data.num_nodes,)):
        raise ValueError(
            f"lemma5: theta_bar must be a number or one per node [{data.num_nodes}], got shape {jnp.shape(theta_bar)}."
        )
    relation = regularizer.known_relation("lemma5", relation, data.num_tasks, data.num_features)
    s, theta_bar, gamma = (jnp.asarray(check.number("lemma5", "s", a), data.dtype) for a in (s, theta_bar, gamma))
    coupling = regularizer.coupling(data.num_tasks, relation)
    scaling = safe_scaling(problem, relation, sigma_prime, gamma)
    z = data.node_predictions(data.to_nodes(coupling.apply(data.dual_vectors(beta))))
    # On the padding there is nothing to move.
    target = jnp.where(data.weight > 0, loss.project(-loss.derivative(z, data.y), data.y), beta)
    gap = jnp.sum(data.weighted(loss.fenchel_young(z, beta, data.y)), axis=1)
    change = target - beta
    length = jnp.sum(data.weighted(change**2), axis=1)
    energy = data.to_nodes(coupling.diagonal()) * jnp.sum(data.node_vectors(change) ** 2, axis=1)
    mu = jnp.asarray(loss.mu, data.dtype)
    convexity = mu * (1.0 - s) * length
    # With J_t multiplied out, for at s = 0 it may be minus infinity.
    gained = s * gap + 0.5 * s * convexity - 0.5 * scaling * s**2 * energy
    spread = energy - jnp.where(convexity > 0, convexity / jnp.where(convexity > 0, scaling * s, 1.0), 0.0)
    return Lemma5(gamma * jnp.sum((1.0 - theta_bar) * gained), gap, spread, target)


@on_purpose
def lemma7(problem: Problem, relation: Relation = None) -> Array:
    r"""The largest that $J = \sum_t J_t$ of `lemma5` can be where losses are L-Lipschitz, (24), a scalar.

    $$
    J \le 4L^2\sum_t\sigma_t\sum_i c_{ti}
    $$

    Feasible duals lie between -L and L, and so do the targets $u_t$. With one sample a node, a loss as steep as L and a
    dual at the wrong end, it is an equality.

    Args:
      problem: the problem; its loss must be Lipschitz.
      relation: as in `sigma`.

    Returns:
      The bound, a scalar.

    Examples:
      >>> import numpy as np, mocha_jax as mj
      >>> data = mj.pack_tasks([np.ones((1, 3), "f")], [np.zeros(1)])
      >>> problem = mj.Problem(data, mj.losses.Absolute(), mj.regularizers.Independent(0.5))
      >>> float(lemma7(problem)), float(lemma5(problem, np.array([[-1.0]], "f"), 1.0, 0.0).spread.sum())
      (12.0, 12.0)

    References:
      [Smith et al., Federated Multi-Task Learning](https://arxiv.org/abs/1705.10467), 2017.
    """
    check.instance("lemma7", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    return steepness("lemma7", problem, sigma(problem, relation))
