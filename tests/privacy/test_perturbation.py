"""Objective perturbation: its theorem against exact densities, and its weights against a convex solver."""

import math
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from scipy import integrate, stats

import mocha_jax as mj
from mocha_jax.privacy._perturbation import _divergence, _largest, with_linear_term
from mocha_jax.privacy._release import drawing, root_of
from tests import oracles

R = mj.regularizers
SETTINGS: Any = {"epsilon": 1.0, "delta": 1e-4, "bound": 1.0, "gap": 1e-9}


def data(m=3, n=8, d=2, seed=0, labels=(-1.0, 1.0)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, n, d))
    x /= np.maximum(1.0, np.linalg.norm(x, axis=2, keepdims=True))
    y = rng.choice(labels, (m, n)) if isinstance(labels, tuple) else labels * rng.normal(size=(m, n))
    return mj.pack_tasks(list(x), list(y), dtype=np.float64, loss_scaling="task_mean")


def divergence(epsilon, ratio):
    """E(1 - exp(epsilon - ratio^2 / 2 - ratio n))_+ of a standard normal n, by quadrature."""

    def integrand(n):
        return max(0.0, 1.0 - math.exp(epsilon - ratio**2 / 2 - ratio * n)) * stats.norm.pdf(n)

    least = epsilon / ratio - ratio / 2
    return integrate.quad(integrand, least, max(least, 0.0) + 12.0, epsabs=1e-14, limit=300)[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
@pytest.mark.thin(6)
def test_the_divergence_is_its_integral(epsilon, ratio):
    assert _divergence(epsilon, ratio) == pytest.approx(divergence(epsilon, ratio), rel=1e-7, abs=1e-14)


@pytest.mark.parametrize("epsilon", [0.1, 3.0, 400.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-3])
@pytest.mark.thin(4)
def test_the_ratio_is_the_largest(epsilon, delta):
    ratio = _largest(epsilon, delta, share=0.3)

    def both(ratio):
        return 2 * _divergence(epsilon, ratio) + 2 * _divergence(epsilon, 0.3 * ratio)

    assert both(ratio) <= delta <= both(ratio * (1 + 1e-5))


def test_the_divergence_is_convex_in_the_square_of_the_ratio_up_to_the_limit():
    # Of large budgets, whose divergence falls to nothing at small ratios, above a thousandth of the limit.
    for epsilon in (0.01, 0.3, 1.0, 6.0, 30.0):
        squares = 2 * (math.hypot(1.0, epsilon) - 1) * np.linspace(1e-3, 1.0, 400)
        values = np.array([_divergence(epsilon, math.sqrt(square)) for square in squares])
        assert np.diff(values, 2).min() >= -1e-13


REGULARIZERS = {
    "each alone": (R.Independent(0.3), oracles.independent(0.3)),
    "mean": (R.MeanRegularized(0.3, 0.1), oracles.mean_regularized(0.3, 0.1)),
    "trace norm": (R.TraceNorm(0.1, 0.2), lambda w: 0.1 * cp.normNuc(w) + 0.2 * cp.sum_squares(w)),
    "covariance": (R.Probabilistic(0.05, 0.5), oracles.squared_nuclear_norm(0.05, 0.5)),
}
LOSSES = {
    "logistic": mj.losses.Logistic(),
    "smoothed_hinge": mj.losses.SmoothedHinge(0.5),
    "huber": mj.losses.Huber(0.7),
}


@pytest.mark.parametrize(
    ("regularizer", "loss", "algorithm"),
    [
        ("mean", "logistic", None),
        ("covariance", "huber", None),
        pytest.param("trace norm", "smoothed_hinge", None, marks=pytest.mark.extended),
        pytest.param("each alone", "logistic", mj.Mocha(), marks=pytest.mark.extended),
        pytest.param("mean", "huber", mj.Mocha(server="dual"), marks=pytest.mark.extended),
    ],
)
def test_it_is_the_minimiser_of_the_perturbed_objective_with_noise(regularizer, loss, algorithm, key):
    problem = mj.Problem(
        data(labels=3.0 if loss == "huber" else (-1.0, 1.0)), LOSSES[loss], REGULARIZERS[regularizer][0]
    )
    found = mj.privacy.objective_perturbation(problem, algorithm=algorithm, max_rounds=20_000, key=key, **SETTINGS)
    generator, penalty = drawing(key), REGULARIZERS[regularizer][1]
    b = np.linalg.cholesky(found.linear) @ generator.normal(size=(3, 2))
    _, best = oracles.optimum(problem.data, loss, lambda w: penalty(w) + cp.sum(cp.multiply(b, w)), tol=1e-10)
    root = root_of(np.asarray(problem.regularizer.strong_convexity(3)))
    np.testing.assert_allclose(found.weights - found.noise * root @ generator.normal(size=(3, 2)), best, atol=2e-4)
    assert np.abs(best).max() > 0.1


def of_huber(z, y):
    return np.clip(z - y, -0.5, 0.5), (np.abs(z - y) < 0.5).astype(float)


def of_logistic(z, y):
    chance = 1 / (1 + np.exp(y * z))
    return -y * chance, chance * (1 - chance)


class Exact:
    """The objective of two coupled tasks: its gradient, its Hessian, and many minimisers at once."""

    def __init__(self, x, y, loss, a):
        self.x, self.y, self.loss, self.a, self.share = x, y, loss, a, 1 / x.shape[1]

    def gradient_and_hessian(self, w):
        m, d = w.shape[1:]
        slope, bend = self.loss(np.einsum("mnd,kmd->kmn", self.x, w), self.y)
        gradient = self.share * np.einsum("kmn,mnd->kmd", slope, self.x) + np.einsum("st,ktd->ksd", self.a, w)
        hessian = np.tile(np.kron(self.a, np.eye(d)), (len(w), 1, 1))
        blocks = self.share * np.einsum("kmn,mnd,mne->kmde", bend, self.x, self.x)
        for t in range(m):
            hessian[:, t * d : (t + 1) * d, t * d : (t + 1) * d] += blocks[:, t]
        return gradient, hessian

    def minimisers(self, b):
        w = np.zeros_like(b)
        for _ in range(40):
            gradient, hessian = self.gradient_and_hessian(w)
            w = w - 0.8 * np.linalg.solve(hessian, (gradient + b).reshape(len(b), -1, 1)).reshape(b.shape)
        assert np.abs(self.gradient_and_hessian(w)[0] + b).max() < 1e-6
        return w

    def log_density(self, w, precision):
        gradient, hessian = self.gradient_and_hessian(w)
        return np.linalg.slogdet(hessian)[1] - 0.5 * np.einsum("ksd,st,ktd->k", gradient, precision, gradient)


def test_noise_is_what_the_theorem_needs():
    given, gap = data(m=3, n=8), 1e-4
    given = given.replace(weight=given.weight * np.array([[1.0], [0.5], [0.1]]))
    problem = mj.Problem(given, mj.losses.Logistic(), R.MeanRegularized(0.3, 0.05))
    found = mj.privacy.objective_perturbation(problem, **(SETTINGS | {"gap": gap, "bound": 2.0}))
    spread = np.linalg.inv(2 * (0.3 * (np.eye(3) - 1 / 3) + 0.05 * np.eye(3)))[0, 0]
    of_gap = 2 * math.sqrt(2 * gap) / found.noise
    for heaviest, inverse in zip(np.array([1.0, 0.5, 0.1]) / 8, np.diag(np.linalg.inv(found.linear)), strict=True):
        ratio = math.hypot(2 * heaviest * 2.0 * math.sqrt(inverse), of_gap)
        left = 1.0 - math.log(1 + 0.25 * heaviest * 2.0**2 * spread)
        claimed = 2 * divergence(left, ratio) + 2 * divergence(left, of_gap)
        assert 0.999 * SETTINGS["delta"] < claimed <= SETTINGS["delta"] * (1 + 1e-9)


SLOPES = {
    "logistic": (mj.losses.Logistic(), of_logistic, 1.0, 0.25),
    "huber": (mj.losses.Huber(0.5), of_huber, 0.5, 1.0),
}


@pytest.mark.parametrize(
    ("name", "ridge", "near"),
    [
        pytest.param("logistic", 0.05, 1.0, marks=pytest.mark.extended),
        pytest.param("huber", 0.3, 0.0, marks=pytest.mark.extended),
        ("huber", 3.0, 30.0),
    ],
)
def test_no_neighbour_tells_more_than_is_claimed_by_exact_densities(name, ridge, near):
    # Of the exact minimiser: the noise on the weights is left out.
    (loss, function, slope, bend), rng, m, n, d = SLOPES[name], np.random.default_rng(0), 2, 2, 2
    a = 2 * (0.2 * (np.eye(m) - 1 / m) + ridge * np.eye(m))
    logarithm = math.log(1 + bend / n * np.linalg.inv(a)[0, 0])
    settings: Any = {"epsilon": 1.0, "delta": 0.02, "bound": 1.0, "gap": 1e-6}
    tells, of_bend = {1.0: 0.0, 0.5: 0.0}, []
    for case in range(6):
        x = rng.normal(size=(m, n, d))
        x /= np.linalg.norm(x, axis=2, keepdims=True)
        y = rng.choice([-1.0, 1.0], (m, n)) * (1.0 if name == "logistic" else 30.0)
        other_x, other_y = x.copy(), y.copy()
        y[0, 0], other_y[0, 0] = near, -abs(y[0, 0])  # huber is curved at 0
        if case % 2:
            other_x[0, 0] = (-x[0, 0, 1], x[0, 0, 0])
        packed = mj.pack_tasks(list(x), list(y), dtype=np.float64, loss_scaling="task_mean")
        problem = mj.Problem(packed, loss, R.MeanRegularized(0.2, ridge))
        linear = mj.privacy.objective_perturbation(problem, **settings).linear
        pair = Exact(x, y, function, a), Exact(other_x, other_y, function, a)
        changes = slope / n * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]) @ np.stack([x[0, 0], other_x[0, 0]])
        for one, other in (pair, pair[::-1]):
            for factor in tells:
                precision = np.linalg.inv(factor**2 * linear)
                b = factor * np.linalg.cholesky(linear) @ rng.normal(size=(4_000, m, d))
                w = one.minimisers(b)
                lost = one.log_density(w, precision) - other.log_density(w, precision)
                tells[factor] = max(tells[factor], np.mean(np.maximum(0.0, 1.0 - np.exp(1.0 - lost))))
                # What the densities of B tell, at most; the rest is what the determinants do.
                of_b = b.transpose(0, 2, 1) @ precision[0] @ changes.T + 0.5 * precision[0, 0] * np.sum(
                    changes**2, axis=1
                )
                of_bend.append(np.max(lost - of_b.max(axis=1)))
    assert max(of_bend) <= logarithm + 1e-6
    assert tells[1.0] <= 0.02
    if ridge == 3.0:  # where curvatures hardly count
        assert tells[0.5] > 0.02
    elif name == "huber":
        assert max(of_bend) > 0.5 * logarithm


@pytest.mark.parametrize(
    ("regularizer", "steps"),
    [
        (R.Independent(np.array([0.3, 0.1, 0.7])), None),
        (R.MeanRegularized(0.3, 0.02), None),
        (R.Graph(np.array([[1.0, -1.0, 0.0], [-1.0, 3.0, -2.0], [0.0, -2.0, 2.0]]), 0.3, 0.02), None),
        (R.PerFeature(R.MeanRegularized(0.3, 0.02), np.array([2.0, 0.5])), "second feature"),
        (R.Probabilistic(0.1, 0.7), "flat"),
        (R.TraceNorm(0.1, 0.2), "flat"),
        (R.JointSparse(0.1, 0.2), "flat"),
        (R.MeanCovariance(0.2, 0.1, 0.7), "flat"),
    ],
)
@pytest.mark.thin(3)
def test_regularizers_are_as_convex_as_they_say(regularizer, steps):
    a, rng = np.linalg.inv(np.asarray(regularizer.strong_convexity(3))), np.random.default_rng(0)

    def bend(w, step):
        """How much R bends along a step, and the quadratic form of A."""
        high, middle, low = (float(regularizer.value(w + s * step)) for s in (1.0, 0.0, -1.0))
        return high - 2 * middle + low, np.sum(step * (a @ step))

    for _ in range(200):
        own, form = bend(rng.normal(size=(3, 2)), 0.5 * rng.normal(size=(3, 2)))
        assert own >= form - 1e-9
    # And it is not much more convex: in some place and direction R bends by just that.
    if steps is None:
        own, form = bend(rng.normal(size=(3, 2)), rng.normal(size=(3, 2)))
    elif steps == "second feature":
        own, form = bend(rng.normal(size=(3, 2)), rng.normal(size=(3, 1)) * [0.0, 1.0])
    else:  # where the sum of singular values, or of columns' lengths, is linear: one grows by what another shrinks
        first, second = np.array([1.0, -1.0, 0.0]) / math.sqrt(2), np.array([1.0, 1.0, -2.0]) / math.sqrt(6)
        own, form = bend(2.0 * np.stack([first, second], axis=1), 0.5 * np.stack([first, -second], axis=1))
    assert own == pytest.approx(form, rel=1e-6)


def test_no_convexity_is_known_without_a_ridge():
    for regularizer in (
        R.Probabilistic(0.1),
        R.MeanCovariance(0.1, 0.1),
        R.SparsePrecision(0.1, 0.1, 0.1, 1.0),
        R.Clustered(0.1, 0.1, 2),
    ):
        assert regularizer.strong_convexity(3) is None


@pytest.mark.parametrize(
    "regularizer", [R.MeanCovariance(0.2, 0.05, 0.5), pytest.param(R.TraceNorm(0.02, 0.2), marks=pytest.mark.extended)]
)
def test_weights_with_a_learned_relation_are_as_near_as_a_release_claims(regularizer):
    shares = []
    for seed in range(4):
        problem = mj.Problem(data(seed=seed, labels=2.0), mj.losses.Huber(0.5), regularizer)
        other = problem.replace(data=problem.data.replace(y=problem.data.y.at[1, 0].multiply(-30.0)))
        one, two = (mj.solve(p, tol=1e-9, max_rounds=20_000) for p in (problem, other))
        released = mj.privacy.release(one, epsilon=1.0, delta=1e-5, bound=1.0, gap=1e-6)
        a = np.linalg.inv(np.asarray(regularizer.strong_convexity(3)))
        change = np.asarray(one.weights - two.weights)
        shares.append(math.sqrt(np.sum(change * (a @ change))) / released.sensitivity)
    assert 0.1 < max(shares) <= 1.0


def test_nodes_that_share_a_task_and_a_task_without_samples():
    given = data(m=4)
    given = given.replace(task=np.array([0, 1, 0, 2]), weight=given.weight.at[3].set(0.0))
    problem = mj.Problem(given, mj.losses.Logistic(), R.MeanRegularized(0.3, 0.1))
    b = np.arange(6.0).reshape(3, 2)
    _, best = oracles.optimum(given, "logistic", lambda w: oracles.mean_regularized(0.3, 0.1)(w)
                              + cp.sum(cp.multiply(b * [[1], [1], [0]], w)))  # fmt: skip
    solution = mj.solve(with_linear_term(problem, b), tol=1e-10)
    np.testing.assert_allclose(solution.weights, best, atol=1e-4)
    assert not mj.privacy.objective_perturbation(problem, **SETTINGS).linear[2].any()


def test_noise_is_drawn_anew():
    problem = mj.Problem(data(), mj.losses.Logistic(), R.MeanRegularized(0.3, 0.1))
    first, second = (mj.privacy.objective_perturbation(problem, **SETTINGS).weights for _ in range(2))
    assert np.abs(first - second).min() > 0


@pytest.mark.parametrize(
    ("loss", "regularizer", "changes", "says"),
    [
        (mj.losses.Hinge(), R.Independent(0.3), {}, "Hinge is not smooth"),
        (mj.losses.Squared(), R.Independent(0.3), {}, "no Lipschitz constant"),
        (mj.losses.Logistic(), R.Probabilistic(0.3), {}, "not strongly convex"),
        (mj.losses.Logistic(), R.Independent(1e-3), {"epsilon": 0.1}, "regularize more"),
        (mj.losses.Logistic(), R.Independent(0.3), {"bound": 0.5}, "more than bound"),
        (mj.losses.Logistic(), R.Independent(0.3), {"gap": 1e-30}, "the certified gap is"),
        (mj.losses.Logistic(), R.Independent(0.3), {"max_rounds": 1, "algorithm": mj.Mocha()}, "the certified gap is"),
    ],
)
@pytest.mark.filterwarnings("ignore::mocha_jax.NotConverged")
@pytest.mark.thin(3)
def test_what_no_theorem_covers_is_refused(loss, regularizer, changes, says):
    with pytest.raises(ValueError, match=says):
        mj.privacy.objective_perturbation(mj.Problem(data(), loss, regularizer), **(SETTINGS | changes))
