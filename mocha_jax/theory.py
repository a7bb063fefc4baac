r"""The convergence theory of the paper (section 4, appendices C and D) as functions of measured quantities.

Everything is in the units of this library: the objective is the sum (1), not its mean, and samples
have weights c. With $\|\beta\|_c^2 = \sum_i c_i\beta_i^2$ in place of the paper's Euclidean norm every proof
stands as it is; with unit weights the two agree. $\sigma'$ may differ from task to task (Remark 5).

Examples:
  The bound of Theorem 1 beside what happened, with 30 % of the nodes missing in every round:

  >>> import jax, mocha_jax as mj
  >>> from mocha_jax import theory
  >>> data = mj.datasets.federation(jax.random.key(0), 5, 4, smallest=6, largest=12).data
  >>> problem = mj.Problem(data, mj.losses.SmoothedHinge(1.0), mj.regularizers.MeanRegularized(1.0, 1.0))
  >>> run = dict(num_rounds=20, systems=mj.systems.Dropout(0.3), watch=mj.Watch(theta=1e-6))
  >>> state, history = mj.run(problem, mj.Mocha(server="dual", sigma_prime="per_task"), jax.random.key(1), **run)
  >>> seen = theory.assumption2(history.nodes.theta)
  >>> seen.holds
  True
  >>> s = theory.rate(problem)
  >>> start = float(mj.certificate(problem, 0 * problem.data.y).gap)
  >>> tolerance = 1e-2 * float(history.primal[-1])
  >>> allowed = theory.theorem1(start, tolerance, s, seen.theta_bar)
  >>> needed = int((history.gap > tolerance).sum()) + 1
  >>> needed < 6 < int(allowed)
  True
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._algorithms.dual_method import MochaState
from mocha_jax._algorithms.subproblem_method import SubproblemMethod
from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Relation
from mocha_jax._core.transfers import on_purpose
from mocha_jax._numerics.math import safe_ratio
from mocha_jax._problem.certificate import conjugates
from mocha_jax._problem.problem import Problem
from mocha_jax._server.dual import DualServer, DualState

__all__ = [
    "Assumption2",
    "assumption2",
    "Corollary8",
    "corollary8",
    "dual_bound",
    "lemma4",
    "rate",
    "sigma",
    "theorem1",
    "theorem2",
]


def __dir__() -> list[str]:
    return __all__


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
    """
    check.instance("sigma", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.scalar("sigma", tol=tol)
    check.positive("sigma", tol=tol)
    data, regularizer = problem.data, problem.regularizer
    least = jnp.asarray(check.number("sigma", "tol", tol), data.dtype)
    regularizer.check_relation("sigma", relation, data.num_tasks, data.num_features)
    if relation is None:
        relation = regularizer.initial_relation(data.num_tasks, data.num_features)

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
    """
    check.instance("rate", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    if problem.loss.smoothness is None:
        raise ValueError(
            f"rate: the problem's loss {type(problem.loss).__name__} is not smooth, so Theorem 1 does not apply; see "
            f"theorem2."
        )
    check.in_unit_interval("rate", open_left=True, gamma=gamma)
    mu = jnp.asarray(problem.loss.mu, problem.data.dtype)
    difficulty = sigma(problem, relation) * _safe_scaling(problem, relation, sigma_prime, gamma)
    return jnp.min(mu / (mu + difficulty))


def _safe_scaling(problem: Problem, relation: Relation, rule: str, gamma: Real) -> Array:
    r"""The scaling $\sigma'$ of every node, ``[m]``."""
    data, regularizer = problem.data, problem.regularizer
    if relation is None:
        relation = regularizer.initial_relation(data.num_tasks, data.num_features)
    coupling = regularizer.coupling(data.num_tasks, relation)
    return data.to_nodes(coupling.sigma_prime(rule, gamma, data.nodes_per_task))


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

    Examples:
      >>> import jax.numpy as jnp
      >>> seen = assumption2(jnp.array([[1.0, 0.2], [0.4, 0.6], [0.6, 0.0]]))
      >>> [round(float(v), 3) for v in (seen.p_max, seen.theta_max, seen.theta_bar)], seen.holds
      ([0.333, 0.5, 0.667], True)
    """
    theta = check.floats("assumption2", "theta", theta, ("rounds", "nodes"))
    if (seen := check.concrete(theta)) is not None:
        check.in_unit_interval("assumption2", theta=np.where(np.isnan(seen), 0.0, seen))
    known, dropped = ~jnp.isnan(theta), theta == 1

    def mean(values: Array, where: Array, empty: float) -> Array:
        count = jnp.sum(where, axis=0).astype(theta.dtype)
        total = jnp.sum(jnp.where(where, values, 0.0), axis=0)
        return jnp.where(count > 0, total / jnp.maximum(count, 1.0), empty)

    p = mean(dropped.astype(theta.dtype), known, jnp.nan)
    theta_hat = mean(theta, known & ~dropped, jnp.nan)
    p_max = jnp.nanmax(p)  # NaN, and the assumption not shown to hold, where nothing is known of any node
    theta_max = jnp.max(jnp.where(jnp.isnan(theta_hat), 0.0, theta_hat))
    return Assumption2(p, p_max, theta_hat, theta_max, p_max + (1.0 - p_max) * theta_max)


@on_purpose
def dual_bound(start: Real, rounds: Real, s: Real, theta_bar: Real, gamma: Real = 1.0) -> Array:
    r"""The distance of the dual from its optimum after so many rounds, (26), in expectation.

    $$
    (1 - s\gamma(1-\bar\Theta))^h\,[D(\alpha^{(0)}) - D(\alpha^\star)]
    $$

    Args:
      start: the distance at the start, or a bound on it such as the gap there.
      rounds: h.
      s: from `rate`.
      theta_bar: from `assumption2`.
      gamma: aggregation parameter.
    """
    check.nonnegative("dual_bound", start=start, rounds=rounds)
    _check_progress("dual_bound", s, theta_bar, gamma)
    start, rounds, s, theta_bar, gamma = _as_jax_takes(
        "dual_bound", start=start, rounds=rounds, s=s, theta_bar=theta_bar, gamma=gamma
    )
    return jnp.asarray(start) * (1.0 - s * gamma * (1.0 - theta_bar)) ** jnp.asarray(rounds, float)


@on_purpose
def theorem1(start: Real, tol: Real, s: Real, theta_bar: Real, gamma: Real = 1.0) -> Array:
    r"""Rounds after which the dual is expected within `tol` of its optimum, for smooth losses, (6).

    $$
    H \ge \frac{1}{(1-\bar\Theta)\,s\,\gamma}\log\frac{D(\alpha^{(0)}) - D(\alpha^\star)}{\epsilon}
    $$

    The paper bounds the distance at the start by n; here it is an argument. Other arguments as in `dual_bound`.
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
    """The ranges of what a round's progress is the product of."""
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
      $H_0$ and H: the average is over the rounds in between.
    """
    check.instance("theorem2", "problem", problem, Problem, "Problem(data, loss, regularizer)")
    check.nonnegative("theorem2", start=start)
    check.positive("theorem2", tol=tol)
    _check_progress("theorem2", 1.0, theta_bar, gamma)
    start, tol, theta_bar, gamma = _as_jax_takes("theorem2", start=start, tol=tol, theta_bar=theta_bar, gamma=gamma)
    lipschitz = problem.loss.lipschitz
    if lipschitz is None:
        raise ValueError(f"theorem2: {type(problem.loss).__name__} is not Lipschitz; see theorem1.")
    difficulty = sigma(problem, relation) * _safe_scaling(problem, relation, sigma_prime, gamma)
    k = 4.0 * jnp.asarray(lipschitz) ** 2 * jnp.sum(difficulty * jnp.sum(problem.data.weight, axis=1))
    a = jnp.asarray(gamma * (1.0 - theta_bar))
    early = jnp.maximum(1.0 + jnp.log(2.0 * jnp.asarray(start) / k) / a, 0.0)
    first = jnp.ceil(early + 4.0 * k / (a * tol))
    return first, first + jnp.ceil(2.0 / a * jnp.maximum(1.0, k / (2.0 * tol)))


class Corollary8(Pytree):
    """The conditions for convergence in the limit that a record suggests."""

    bounded: Array  # [] bool: p and Theta stay away from 1
    slow: Array  # [] bool: (1 - p)(1 - Theta) falls more slowly than 1 / h


@on_purpose
def corollary8(p: Array | np.ndarray, theta_hat: Real = 0.0) -> Corollary8:
    r"""Corollary 8's conditions on $p_t^h$ and $\hat\Theta_t^h$ ``[rounds, tasks]``.

    Either suffices: $\limsup p < 1$ and $\limsup\hat\Theta < 1$; or
    $(1-p_t^h)(1-\hat\Theta_t^h) = \relation(1/h)$ for every task. Limits cannot be read off finitely many rounds:
    the first is judged by the second half of the record, the second by the slope of its logarithm there.

    Examples:
      >>> import jax.numpy as jnp
      >>> h = jnp.arange(1, 1001.0)[:, None]
      >>> [bool(corollary8(p).slow) for p in (1 - h**-0.5, 1 - 0.5 / h, jnp.full_like(h, 0.9))]
      [True, False, True]
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


@on_purpose
def lemma4(problem: Problem, algorithm: SubproblemMethod, before: MochaState, after: MochaState) -> tuple[Array, Array]:
    r"""Both sides of (18) for one round of the dual server, from the states before and after it.

    $$
    D(\alpha + \gamma\Delta\alpha) \le (1-\gamma)D(\alpha)
    + \gamma\sum_t G_t^{\sigma'}(\Delta\alpha_t; v, \alpha_t)
    $$

    Omega must not have been replaced in between.
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
    found = before.beta + (after.beta - before.beta) / gamma

    def dual(beta: Array) -> Array:
        v = data.dual_vectors(beta)
        return jnp.sum(conjugates(data, problem.node_loss, beta)) + coupling.conjugate(v)

    # The constants c(alpha) of the subproblems add up to R*(v).
    local = jnp.sum(sub.value(problem.node_loss.project(found, data.y))) + coupling.conjugate(before.v)
    return dual(after.beta), (1.0 - gamma) * dual(before.beta) + gamma * local
