"""Weights of a convex problem that may be published: the minimiser of an objective with a random linear term."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, Pytree
from mocha_jax._driver.solution import Solution, Status
from mocha_jax._driver.solve import solve
from mocha_jax._problem.problem import Problem
from mocha_jax.losses import Loss
from mocha_jax.privacy._release import (
    check_settings,
    drawing,
    heaviest,
    pulls_and_inverse,
    reached_gap,
    root_of,
    with_noise,
)


class Perturbed(Pytree):
    """Weights of an objective with noise, and how much of it there is."""

    weights: np.ndarray  # [m, d]
    linear: np.ndarray  # [m, m] covariance of the linear term among tasks, S
    noise: float  # standard deviation of what was added to the weights, in the norm of A


@on_purpose
def objective_perturbation(
    problem: Problem, *, epsilon: float, delta: float, bound: float, gap: float,
    algorithm: Algorithm | None = None, max_rounds: int = 1000, key: Array | None = None,
) -> Perturbed:  # fmt: skip
    r"""Publish the weights that minimise an objective with a random linear term: $(\varepsilon, \delta)$-private.

    `release` adds its noise to the weights, as much in every direction. Here it is in the objective,

    $$
    \min_W \sum_t\sum_i c_{ti}\ell(w_t^\top x_{ti}, y_{ti}) + R(W) + \langle B, W\rangle, \qquad
    B_{\cdot j} \sim \mathcal N(0, S),
    $$

    so that weights which the samples determine well move little. It needs less noise where the data are many or the
    regularizer is weak, and a loss that is smooth. It takes every regularizer that `release` does.

    **Theorem.** Let the loss have slopes of at most L and curvatures of at most H, let no sample be longer than the
    bound r, and let $R(W) - \tfrac12\mathrm{tr}(W^\top A W)$ be convex. The weights are an answer with a certified gap
    of at most g, published with noise of covariance $\tau^2A^{-1}$. With c the largest weight of task t's samples,

    $$
    k_t = \log\bigl(1 + cHr^2(A^{-1})_{tt}\bigr), \qquad \mu = 2\sqrt{2g}/\tau, \qquad
    T_t^2 = 4c^2L^2r^2(S^{-1})_{tt} + \mu^2,
    $$

    and $\delta(\varepsilon, T) = \Phi(T/2 - \varepsilon/T) - e^\varepsilon\Phi(-T/2 - \varepsilon/T)$, they are
    $(\varepsilon, \delta)$-private, for neighbours that differ in one sample of task t, if

    $$
    2\,\delta(\varepsilon - k_t, T_t) + 2\,\delta(\varepsilon - k_t, \mu) \le \delta
    \quad\text{and}\quad T_t^2 \le 2\sqrt{1 + (\varepsilon - k_t)^2} - 2 .
    $$

    *Proof*, of a smooth R first. By the optimality conditions B is a function of the exact W and of the data,
    one to one, so the density of W is that of B times the determinant of the Hessian. Neighbours' Hessians differ by
    a matrix of rank one each, and so their determinants by a factor of at most $e^{k_t}$: the rest is at least A. B
    differs in row t, by $\Delta = c(ax - a'x')$ with slopes a and a' that depend on W. Let n be B, and D be $\Delta$ in
    row t, both multiplied by $S^{-1/2}$: n is standard normal, and the logarithm of the ratio of normal densities is
    $\langle n, D\rangle + |D|^2/2$. That is convex in a and a', so it is the largest where both are L or -L: at
    $\pm D_1$ or $\pm D_2$, with $|D_1|^2 + |D_2|^2 \le 4c^2L^2r^2(S^{-1})_{tt}$. Publish W, and then the answer with
    its noise: given W, those of neighbours differ by at most $2\sqrt{2g}$, which adds $\mu n' + \mu^2/2$ with a
    standard normal n'. So the divergence of both is at most the sum of those of four Gaussian mechanisms,
    $2\delta(\varepsilon - k_t, T_1) + 2\delta(\varepsilon - k_t, T_2)$ with $T_i^2 = |D_i|^2 + \mu^2$. As a function of
    $T^2$ the divergence is convex up to the limit above, and the sum the largest where $D_2$ is 0. Any other convex R
    is the limit of smooth ones, whose minimisers converge for every B, and the property is kept in the limit (Kifer,
    Smith and Thakurta 2012).

    S is chosen by what is public: $S = K(A + \mathrm{diag}(e))K$ with a diagonal K and with e what the losses'
    curvatures may add to A in the mean over the features. Where the samples say nothing it is as good as noise on the
    weights, and independent noise for every task is where A is nothing beside e.

    It covers every use of the published weights, the relationship that follows from them among them, and nothing else
    that was made of the samples; as for `release`, the numbers of samples are public, a search over strengths needs a
    budget for each candidate, and the problem must be solved to g whatever the data are. The problem is solved in the
    clear.

    Args:
      problem: with a regularizer as `release` takes it, and a loss that is smooth and Lipschitz: `SmoothedHinge`,
        `Logistic`, `Huber`, or one of your own, whose `lipschitz` and `smoothness` are believed.
      epsilon: the budget. It must be more than all $k_t$, or the strength is too small for it.
      delta: the same.
      bound: r. A longer sample is an error: cut or scale samples first, without looking at others.
      gap: g, absolute, chosen before seeing the data. The smaller, the less noise is added to the weights.
      algorithm: by which the problem is solved, as in `solve`.
      max_rounds: the most that it may take to reach g; beyond that, an error.
      key: of the noise, in tests. Default: one that only the operating system's generator knows.

    Examples:
      >>> import jax, numpy as np, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5, smallest=200, largest=400).data
      >>> length = np.linalg.norm(data.x, axis=2, keepdims=True)
      >>> data = data.replace(x=data.x / np.maximum(1.0, length))
      >>> problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.MeanRegularized(0.03, 0.01))
      >>> settings = {"epsilon": 2.0, "delta": 1e-5, "bound": 1.0, "gap": 1e-6}
      >>> best = mj.solve(problem, tol=1e-7)
      >>> published = mj.privacy.objective_perturbation(problem, **settings)
      >>> other = mj.privacy.release(best, **settings)
      >>> off = [float(np.linalg.norm(found.weights - best.weights)) for found in (published, other)]
      >>> off[0] < 0.7 * off[1]
      True

    References:
      - [Chaudhuri, Monteleoni, Sarwate, Differentially Private Empirical Risk Minimization](
        https://arxiv.org/abs/0912.0071), 2011, Algorithm 2.
      - [Kifer, Smith, Thakurta, Private Convex Empirical Risk Minimization and High-dimensional Regression](
        https://proceedings.mlr.press/v23/kifer12.html), 2012.
      - Iyengar et al., Towards Practical Differentially Private Convex Optimization, 2019, of answers that are near.
      - [Redberg, Koskela, Wang, Improving the Privacy and Practicality of Objective Perturbation for Differentially
        Private Linear Learners](https://arxiv.org/abs/2401.00583), 2023, of one sample more or less.
    """
    owner = "objective_perturbation"
    check.instance(
        owner, "problem", problem, Problem, "Problem(data, losses.Logistic(), regularizers.Independent(1.0))"
    )
    check_settings(owner, epsilon, delta, bound, gap, key)
    check.integer(owner, 1, max_rounds=max_rounds)
    pulls, inverse = pulls_and_inverse(owner, problem, float(bound))
    curvature = problem.loss.smoothness
    if curvature is None:
        raise ValueError(
            f"{owner}: the problem's {type(problem.loss).__name__} is not smooth; Logistic or SmoothedHinge are."
        )
    slope, curvature = (float(np.max(np.asarray(most))) for most in (problem.loss.lipschitz, curvature))
    most = min(float(epsilon), 500.0)  # e^epsilon overflows beyond; a smaller epsilon is a stronger claim
    logarithms = np.log1p(pulls * bound * curvature / (2.0 * slope) * np.diag(inverse))
    if np.max(logarithms) >= most:
        raise ValueError(
            f"{owner}: with bound={bound:g} and this regularizer, curvatures alone cost {np.max(logarithms):.3g} of "
            f"the budget epsilon={epsilon:g}: regularize more, or weigh samples less."
        )
    shape, root = _shape(problem, inverse, curvature * float(bound) ** 2)
    linear, noise = _noises(pulls, inverse, shape, root, most - logarithms, float(delta), 2.0 * math.sqrt(2.0 * gap))
    generator = drawing(key)
    b = linear @ generator.normal(size=(len(pulls), problem.data.num_features))
    solution = _solved(owner, with_linear_term(problem, b), float(gap), algorithm, max_rounds)
    return Perturbed(with_noise(solution, noise * root_of(inverse), generator), linear @ linear.T, noise)


def _noises(
    pulls: np.ndarray, inverse: np.ndarray, shape: np.ndarray, root: np.ndarray, left: np.ndarray, delta: float,
    drift: float,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Return a root of S ``[m, m]``, and tau, for a budget `left` ``[m]`` of every task and answers that far apart."""
    # For T = 1, noise in the objective moves the weights by `move`^2 d in the mean square in the norm of A, and noise
    # on them by `added`^2 d: T^2 is shared where their sum is about the least, at least half of it for the objective.
    unit = (pulls * np.sqrt(np.diag(shape)))[:, None] * root
    move = math.sqrt(float(np.sum(np.linalg.solve(inverse, shape @ unit) * (shape @ unit))))
    added = drift * math.sqrt(len(pulls))
    share = min(0.5, added / (move + added))
    of_drift = math.sqrt(share) * _largest(min(left), delta, share=math.sqrt(share))
    ratios = np.array([_largest(own, delta, fixed=of_drift) for own in left])
    return unit / np.sqrt(ratios**2 - of_drift**2)[:, None], drift / of_drift


def _shape(problem: Problem, inverse: np.ndarray, curvature: float) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the inverse ``[m, m]`` and a root of $A + \mathrm{diag}(e)$, with e what the losses' curvatures may add.

    Samples of that length in all directions alike and as curved as can be would add e to every feature's.
    """
    data = problem.data
    weight = np.zeros(data.num_tasks)
    np.add.at(weight, np.asarray(data.task), np.asarray(data.weight, float).sum(axis=1))
    stiffness = np.linalg.inv(inverse) + np.diag(curvature * weight / data.num_features)
    return np.linalg.inv(stiffness), np.linalg.cholesky(0.5 * (stiffness + stiffness.T))


def _solved(owner: str, problem: Problem, gap: float, algorithm: Algorithm | None, max_rounds: int) -> Solution:
    """Solve until the absolute gap is small enough."""
    tol, state, rounds = 1e-4, None, max_rounds
    while True:
        solution = solve(problem, algorithm, tol=tol, max_rounds=rounds, state=state)
        reached, state, rounds = reached_gap(solution), solution.state, rounds - int(solution.rounds)
        if reached <= gap:
            return solution
        if solution.status != Status.CONVERGED or rounds < 1:
            raise ValueError(f"{owner}: the certified gap is {reached:.3g}, more than {gap:g}: {solution.message}.")
        tol *= 0.5 * gap / reached


def _largest(epsilon: float, delta: float, share: float = 0.0, fixed: float = 0.0) -> float:
    """The largest T that the theorem allows with a mu of so much, or that share of T."""
    low, high = 0.0, math.sqrt(2.0 * (math.hypot(1.0, epsilon) - 1.0))
    for _ in range(60):
        middle = 0.5 * (low + high)
        both = _divergence(epsilon, middle) + _divergence(epsilon, share * middle + fixed)
        low, high = (middle, high) if 2.0 * both <= delta else (low, middle)
    return low


def _divergence(epsilon: float, ratio: float) -> float:
    r"""$\Phi(T/2 - \varepsilon/T) - e^\varepsilon\Phi(-T/2 - \varepsilon/T)$, of a Gaussian mechanism."""
    if ratio == 0.0:
        return 0.0
    below, above = (math.erfc((epsilon / ratio + sign * ratio / 2.0) / math.sqrt(2.0)) for sign in (-1.0, 1.0))
    return 0.5 * (below - math.exp(epsilon) * above)


def with_linear_term(problem: Problem, b: np.ndarray) -> Problem:
    r"""Add $\langle B, W\rangle$ to the objective: a sample -b / c for every task, whose loss is -z, with weight c."""
    data = problem.data
    x, y, weight = (np.asarray(a) for a in (data.x, data.y, data.weight))
    marker = 2.0 * np.max(np.abs(y), initial=0.0) + 3.0
    tasks, nodes = np.unique(np.asarray(data.task), return_index=True)
    share = heaviest(data)[tasks]
    rows, labels, weights = np.zeros_like(x[:, :1]), np.zeros_like(y[:, :1]), np.zeros_like(weight[:, :1])
    rows[nodes, 0] = -b[tasks] / np.where(share > 0, share, 1.0)[:, None]
    labels[nodes, 0], weights[nodes, 0] = marker, share
    grown = data.replace(
        x=np.concatenate([x, rows], axis=1),
        y=np.concatenate([y, labels], axis=1),
        weight=np.concatenate([weight, weights], axis=1),
        sharding=None,
    )
    return problem.replace(data=grown, loss=OrLinear(problem.loss, jnp.asarray(marker, y.dtype)))


class OrLinear(Loss):
    r"""A loss, and of samples with a certain label $\ell(z) = -z$, whose dual is 1."""

    loss: Loss
    marker: Hyperparameter  # that label, which no other sample has

    def of_nodes(self, task: Array) -> Loss:
        return self.exchange(loss=self.loss.of_nodes(task))

    def of_task(self, task: int) -> Loss:
        return self.exchange(loss=self.loss.of_task(task))

    def check_tasks(self, num_tasks: int) -> None:
        self.loss.check_tasks(num_tasks)

    @property
    def smoothness(self) -> Hyperparameter | None:
        return self.loss.smoothness

    @property
    def lipschitz(self) -> Hyperparameter | None:
        own = self.loss.lipschitz
        return None if own is None else jnp.maximum(jnp.asarray(own), 1.0)

    def _split(self, y: Array) -> tuple[Array, Array]:
        """Tell which samples have the linear loss, and give them a label that any loss takes."""
        linear = y == self.marker
        return linear, jnp.where(linear, jnp.ones_like(y), y)

    def admits(self, y: Array) -> Array:
        linear, y = self._split(y)
        return linear | self.loss.admits(y)

    def value(self, z: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, -z, self.loss.value(z, y))

    def derivative(self, z: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, -jnp.ones_like(z), self.loss.derivative(z, y))

    def conjugate(self, beta: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, jnp.where(beta == 1.0, 0.0, jnp.inf), self.loss.conjugate(beta, y))

    def conjugate_bound(self, beta: Array, y: Array) -> Array:
        linear, own = self._split(y)
        return jnp.where(linear, self.conjugate(beta, y), self.loss.conjugate_bound(beta, own))

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        linear, y = self._split(y)
        low, high = self.loss.dual_bounds(y)
        return jnp.where(linear, jnp.ones_like(low), low), jnp.where(linear, jnp.ones_like(high), high)

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, jnp.ones_like(beta), self.loss.dual_step(beta, g, y, kappa))

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, jnp.where(beta == 1.0, 0.0, jnp.inf), self.loss.fenchel_young(z, beta, y))

    def fenchel_young_bound(self, z: Array, error: Array, beta: Array, y: Array) -> Array:
        linear, own = self._split(y)
        bound = self.loss.fenchel_young_bound(z, error, beta, own)
        return jnp.where(linear, self.fenchel_young(z, beta, y), bound)

    def fenchel_young_change(self, z: Array, before: Array, beta: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, jnp.zeros_like(z), self.loss.fenchel_young_change(z, before, beta, y))

    def ends(self, z: Array, error: Array, beta: Array, y: Array) -> tuple[Array, Array]:
        return self.loss.ends(z, error, beta, self._split(y)[1])

    def project(self, beta: Array, y: Array) -> Array:
        linear, y = self._split(y)
        return jnp.where(linear, jnp.ones_like(beta), self.loss.project(beta, y))
