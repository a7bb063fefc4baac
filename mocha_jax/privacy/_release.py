"""Weights of a convex problem that may be published: the certified answer, with noise."""

from __future__ import annotations

import math
import secrets

import jax
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree
from mocha_jax._data.task_data import TaskData
from mocha_jax._driver.solution import Solution
from mocha_jax._problem.problem import Problem
from mocha_jax.privacy._accounting import accounting, check_delta


class Release(Pytree):
    """Weights with noise, and what it was made of."""

    weights: np.ndarray  # [m, d]
    sensitivity: float | np.ndarray  # of the weights, in the norm of A; or of every row [m], in its own
    noise: float | np.ndarray  # standard deviation, in that norm


@on_purpose
def release(
    solution: Solution, *, epsilon: float, delta: float, bound: float, gap: float, key: Array | None = None
) -> Release:
    r"""Publish the weights of all tasks with $(\varepsilon, \delta)$-differential privacy of every sample.

    With $R(W) = \tfrac12\mathrm{tr}(W^\top A W)$, or that and a convex term, a loss of Lipschitz constant L and
    samples no longer than B, the objective is strongly convex in the norm
    $\lVert W\rVert_A^2 = \mathrm{tr}(W^\top A W)$. So another sample of task t in place of one moves the minimiser by
    at most $2c_tLB\sqrt{(A^{-1})_{tt}}$, with $c_t$ the sample's weight in the objective; and an answer whose certified
    duality gap is at most g is within $\sqrt{2g}$ of the minimiser of its own data. Two answers to neighbouring data
    sets therefore differ by at most

    $$
    \Delta = 2LB\max_t c_t\sqrt{(A^{-1})_{tt}} + 2\sqrt{2g},
    $$

    and $W + \sigma A^{-1/2}Z$ with a standard normal Z is private by the Gaussian mechanism, with the least
    $\sigma$ for $\Delta$ (Balle and Wang 2018). Neighbouring data sets differ in one sample of one task, in features
    and label; the numbers of samples, L, A, B and g are public.

    It covers every use of the published weights, and nothing else that was made of the samples: no other model, gap,
    loss or validation score, and no features' means or spreads. A search over strengths needs a budget for
    each candidate, and the data must be solved to g whatever they are.

    Args:
      solution: of a problem with a regularizer whose `strong_convexity` is known: any with a given relationship, where
        A is its own; `Probabilistic` and `MeanCovariance` with a finite sigma2, `TraceNorm` and `JointSparse`, where A
        is their ridge, for `MeanCovariance` with the mean's. And with a loss that is Lipschitz: `Hinge`,
        `SmoothedHinge`, `Logistic`, `Absolute`, `Huber`, `Quantile`, `EpsilonInsensitive`, `Ordinal`, or one of your
        own, whose `lipschitz` is believed: one that is too small voids the guarantee.
      epsilon: the budget.
      delta: the same.
      bound: B. A longer sample is an error: cut or scale samples first, without looking at others.
      gap: g, absolute, chosen before seeing the data; ``float(solution.gap)``, or the joint gap where a relationship is
        learned, must be at most that.
      key: of the noise, in tests. Default: one that only the operating system's generator knows.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> length = np.linalg.norm(data.x, axis=2, keepdims=True)
      >>> data = data.replace(x=data.x / np.maximum(1.0, length))
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(1.0, 1.0))
      >>> solution = mj.solve(problem, tol=1e-6)
      >>> published = mj.privacy.release(solution, epsilon=1.0, delta=1e-5, bound=1.0, gap=1e-3)
      >>> published.weights.shape, round(published.sensitivity, 2)
      ((6, 5), 0.18)

    References:
      - [Chaudhuri, Monteleoni, Sarwate, Differentially Private Empirical Risk Minimization](
        https://arxiv.org/abs/0912.0071), 2011, Algorithm 1, of a minimiser that is exact.
      - [Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy](https://arxiv.org/abs/1805.06530),
        2018.
    """
    owner = "release"
    pulls, inverse = _checked(owner, solution, epsilon, delta, bound, gap, key)
    moved = float(np.max(pulls * np.sqrt(np.diag(inverse))))
    sensitivity = moved + 2.0 * math.sqrt(2.0 * gap)
    noise = sensitivity * _deviation(epsilon, delta)
    weights = with_noise(solution, noise * root_of(inverse), drawing(key))
    return Release(weights, sensitivity, noise)


@on_purpose
def release_to_nodes(
    solution: Solution, *, epsilon: float, delta: float, bound: float, gap: float, key: Array | None = None
) -> Release:
    r"""Give every node its own weights, so that they say little of any sample of another node.

    The row of a node depends on the samples of another one through the relation alone. With A as in `release`, let
    M have its diagonal and minus the absolute values of its other entries; for `Independent`, `MeanRegularized` and
    the `Graph` of a Laplacian it is A itself. Where M is positive definite, another sample of node s in
    place of one moves row t of the minimiser by at most $2c_sLB(M^{-1})_{ts}$: with $\delta_u$ the change of row u
    and convex losses, $a_{tt}\lVert\delta_t\rVert\le\sum_{u\ne t}|a_{tu}|\lVert\delta_u\rVert$ for $t\ne s$ and
    $2c_sLB$ more for s, and $M^{-1}$ has no negative entry. An answer with a certified gap of at most g is within
    $\sqrt{2g(A^{-1})_{tt}}$ of the minimiser in row t, so that what node t receives has the sensitivity

    $$
    \Delta_t = \max_{s\ne t} 2c_sLB(M^{-1})_{ts} + 2\sqrt{2g(A^{-1})_{tt}},
    $$

    and noise of its own. The more nodes share a relation, the less has to be added: of `MeanRegularized` the first
    term falls as 1/m. Each node by itself is the adversary, it knows its own samples; nodes that
    pool what they receive are not covered, nor are all rows together: for those there is `release`.

    Args:
      solution: as in `release`, as are the others.
      epsilon: the budget, for what one node receives.
      delta: the same.
      bound: B.
      gap: g.
      key: of the noise, in tests. Default: one that only the operating system's generator knows.

    Returns:
      A release with a sensitivity and a noise ``[m]`` for every node.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 60, 5).data
      >>> length = np.linalg.norm(data.x, axis=2, keepdims=True)
      >>> data = data.replace(x=data.x / np.maximum(1.0, length))
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(1.0, 1.0))
      >>> solution = mj.solve(problem, tol=1e-7)
      >>> settings = {"epsilon": 1.0, "delta": 1e-5, "bound": 1.0, "gap": 1e-6}
      >>> own, joint = (f(solution, **settings) for f in (mj.privacy.release_to_nodes, mj.privacy.release))
      >>> own.weights.shape, own.noise.shape
      ((60, 5), (60,))
      >>> added = [np.abs(published.weights - solution.weights).mean() for published in (own, joint)]
      >>> bool(added[0] < 0.1 * added[1])
      True
    """
    owner = "release_to_nodes"
    pulls, inverse = _checked(owner, solution, epsilon, delta, bound, gap, key)
    if solution.problem.regularizer.learned:
        name = type(solution.problem.regularizer).__name__
        raise ValueError(f"{owner}: {name} learns its relationship, for which no bound is known; `release` takes it.")
    others = pulls * _influence(owner, inverse)
    np.fill_diagonal(others, 0.0)
    sensitivity = others.max(axis=1) + 2.0 * np.sqrt(2.0 * gap * np.diag(inverse))
    noise = sensitivity * _deviation(epsilon, delta)
    return Release(with_noise(solution, np.diag(noise), drawing(key)), sensitivity, noise)


def check_settings(owner: str, epsilon: float, delta: float, bound: float, gap: float, key: Array | None) -> None:
    """Raise unless all of them are what a release takes."""
    check.scalar(owner, epsilon=epsilon, delta=delta, bound=bound, gap=gap)
    check.positive(owner, epsilon=epsilon, bound=bound, gap=gap)
    check_delta(owner, delta)
    if key is not None:
        check.key(owner, key)


def reached_gap(solution: Solution) -> float:
    """The gap that is certified of the weights, whatever the relationship."""
    joint = solution.joint_gap if solution.problem.regularizer.learned else None
    return float(solution.gap if joint is None else joint)


def _checked(
    owner: str, solution: Solution, epsilon: float, delta: float, bound: float, gap: float, key: Array | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return how much a sample of each task can pull, 2cLB ``[m]``, and the inverse of A ``[m, m]``."""
    check.instance(owner, "solution", solution, Solution, "solve(problem)")
    check_settings(owner, epsilon, delta, bound, gap, key)
    problem = solution.problem
    if not isinstance(problem, Problem):
        raise ValueError(f"{owner}: weights of networks have no certificate; train them with privacy.with_budget.")
    pulls, inverse = pulls_and_inverse(owner, problem, float(bound))
    reached = reached_gap(solution)
    if not reached <= gap:
        raise ValueError(
            f"{owner}: the certified gap is {reached:.3g}, more than {gap:g}: solve on with a smaller tol."
        )
    return pulls, inverse


def _deviation(epsilon: float, delta: float) -> float:
    """The standard deviation of the Gaussian mechanism for a sensitivity of 1."""
    # The accountant's numbers overflow where e^epsilon does; a smaller epsilon is a stronger claim.
    return float(accounting().get_sigma_gaussian(min(float(epsilon), 500.0), float(delta)))


def drawing(key: Array | None) -> np.random.Generator:
    """Make the generator of noise: without a key, of a seed that only the operating system's generator knows."""
    return np.random.default_rng(
        secrets.randbits(256) if key is None else np.asarray(jax.random.key_data(key)).tolist()
    )


def root_of(matrix: np.ndarray) -> np.ndarray:
    """The root of a symmetric matrix that is not negative."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T


def with_noise(solution: Solution, root: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Add a root of the noise's covariance times standard normal numbers to the weights ``[m, d]``."""
    drawn = generator.normal(size=np.shape(solution.weights))
    noisy: np.ndarray = np.asarray(solution.weights, float) + root @ drawn
    return noisy.astype(solution.weights.dtype)


def _influence(owner: str, inverse: np.ndarray) -> np.ndarray:
    """The inverse of M ``[m, m]``."""
    a = np.linalg.inv(inverse)
    comparison = 2.0 * np.diag(np.diag(a)) - np.abs(a)
    if np.linalg.eigvalsh(comparison)[0] <= 1e-6 * np.max(np.diag(a)):
        raise ValueError(
            f"{owner}: the relation has entries of both signs that are too large for the bound; `release` takes them."
        )
    return np.linalg.inv(comparison)


def pulls_and_inverse(owner: str, problem: Problem, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how much a sample of each task can pull, 2cLB ``[m]``, and the inverse of A ``[m, m]``."""
    data, regularizer = problem.data, problem.regularizer
    inverse = regularizer.strong_convexity(data.num_tasks)
    if inverse is None:
        raise ValueError(
            f"{owner}: no bound is known for {type(regularizer).__name__} without a ridge, which is not strongly "
            f"convex; there is one for relationships that are given, and for TraceNorm, JointSparse, and Probabilistic "
            f"and MeanCovariance with a finite sigma2."
        )
    slope = problem.loss.lipschitz
    if slope is None:
        raise ValueError(f"{owner}: {type(problem.loss).__name__} has no Lipschitz constant; Huber or Logistic do.")
    weight = np.asarray(data.weight, float)
    lengths = np.linalg.norm(np.asarray(data.x, float), axis=2)
    longest = float(np.max(np.where(weight > 0, lengths, 0.0), initial=0.0))
    if longest > bound * (1.0 + 1e-6):
        raise ValueError(f"{owner}: a sample has length {longest:.6g}, more than bound={bound:g}.")
    return 2.0 * float(np.max(slope)) * bound * heaviest(data), np.asarray(inverse, float)


def heaviest(data: TaskData) -> np.ndarray:
    """The largest weight of a sample of each task ``[m]``."""
    largest = np.zeros(data.num_tasks)
    np.maximum.at(largest, np.asarray(data.task), np.asarray(data.weight, float).max(axis=1))
    return largest
