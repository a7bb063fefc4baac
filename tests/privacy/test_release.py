"""Published weights: the sensitivity that is claimed against minimisers found elsewhere, and the noise."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from scipy import optimize, stats

import mocha_jax as mj
from mocha_jax.privacy._release import _influence, pulls_and_inverse

M, N, D = 3, 4, 2
LOSSES = {
    "logistic": (mj.losses.Logistic(), lambda z, y: np.logaddexp(0.0, -y * z), lambda z, y: -y / (1 + np.exp(y * z))),
    "huber": (
        mj.losses.Huber(0.5),
        lambda z, y: np.where(abs(z - y) <= 0.5, 0.5 * (z - y) ** 2, 0.5 * (abs(z - y) - 0.25)),
        lambda z, y: np.clip(z - y, -0.5, 0.5),
    ),
}
GRAPH = np.array([[1.0, -1.0, 0.0], [-1.0, 3.0, -2.0], [0.0, -2.0, 2.0]])  # a Laplacian
REGULARIZERS = {
    "independent": (mj.regularizers.Independent(0.05), 0.1 * np.eye(M)),
    "mean": (mj.regularizers.MeanRegularized(0.3, 0.02), 0.6 * (np.eye(M) - 1 / M) + 0.04 * np.eye(M)),
}


def quadratic(regularizer):
    """A of R(W) = tr(W'AW)/2, of its values."""
    basis = np.eye(M)

    def value(a):
        return float(regularizer.value(np.asarray(a)[:, None]))

    plain = [value(basis[i]) for i in range(M)]
    return np.array([[value(basis[i] + basis[j]) - plain[i] - plain[j] for j in range(M)] for i in range(M)])


def minimiser(xs, ys, loss, slope, a, share):
    def both(flat):
        w = flat.reshape(M, D)
        z = np.einsum("mnd,md->mn", xs, w)
        value = share * loss(z, ys).sum() + 0.5 * np.sum(w * (a @ w))
        return value, (share * np.einsum("mn,mnd->md", slope(z, ys), xs) + a @ w).ravel()

    return optimize.minimize(both, np.zeros(M * D), jac=True, method="BFGS", options={"gtol": 1e-9}).x.reshape(M, D)


def samples(rng, bound):
    x = rng.normal(size=(M, N, D))
    return x * bound * rng.choice([0.3, 1.0], (M, N, 1)) / np.linalg.norm(x, axis=2, keepdims=True)


def problem_of(xs, ys, loss, regularizer, scaling="task_mean"):
    data = mj.pack_tasks(list(xs), list(ys), dtype=np.float64, loss_scaling=scaling)
    return mj.Problem(data, loss, regularizer)


def sensitivity(problem, bound, gap=1e-30):
    pulls, inverse = pulls_and_inverse("release", problem, bound)
    return float(np.max(pulls * np.sqrt(np.diag(inverse)))) + 2 * math.sqrt(2 * gap)


@pytest.mark.parametrize(("kind", "pairs"), [("logistic", 60), pytest.param("logistic", 10_000, marks=pytest.mark.slow),
                                             ("huber", 20)])  # fmt: skip
@pytest.mark.parametrize("relation", [*REGULARIZERS, "graph"])
@pytest.mark.thin(3)
def test_another_sample_moves_the_minimiser_by_no_more_than_is_claimed(kind, relation, pairs):
    loss, value, slope = LOSSES[kind]
    regularizer = mj.regularizers.Graph(GRAPH, 0.3, 0.02) if relation == "graph" else REGULARIZERS[relation][0]
    a = quadratic(regularizer)
    if relation != "graph":
        np.testing.assert_allclose(a, REGULARIZERS[relation][1], atol=1e-12)
    rng, bound, shares = np.random.default_rng(0), 1.5, []
    for _ in range(pairs):
        xs, ys = samples(rng, bound), rng.choice([-1.0, 1.0], (M, N))
        others, labels, t = xs.copy(), ys.copy(), rng.integers(M)
        # Samples that pull against each other move the most.
        others[t, 0], labels[t, 0] = (
            (-xs[t, 0], ys[t, 0]) if rng.random() < 0.5 else (samples(rng, bound)[0, 0], -ys[t, 0])
        )
        claimed = sensitivity(problem_of(xs, ys, loss, regularizer), bound)
        change = minimiser(xs, ys, value, slope, a, 1 / N) - minimiser(others, labels, value, slope, a, 1 / N)
        shares.append(math.sqrt(np.sum(change * (a @ change))) / claimed)
    assert 0.2 < max(shares) <= 1.0 + 1e-6


MIXED = np.array([[1.0, 0.3, -0.4], [0.3, 1.0, 0.2], [-0.4, 0.2, 1.0]])


@pytest.mark.parametrize("relation", ["mean", "laplacian", "mixed"])
@pytest.mark.parametrize("pairs", [40, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.thin(3)
def test_another_sample_moves_the_rows_of_other_nodes_by_no_more_than_is_claimed(relation, pairs):
    loss, value, slope = LOSSES["huber"]
    regularizer = {
        "mean": mj.regularizers.MeanRegularized(3.0, 2.0),
        "laplacian": mj.regularizers.Graph(GRAPH, 3.0, 2.0),
        "mixed": mj.regularizers.Graph(MIXED, 3.0, 2.0),
    }[relation]
    a, rng, bound, shares = quadratic(regularizer), np.random.default_rng(4), 1.5, []
    m = 2 * np.diag(np.diag(a)) - np.abs(a)
    for _ in range(pairs):
        xs, ys = samples(rng, bound), 3.0 * rng.choice([-1.0, 1.0], (M, N))
        others, s = ys.copy(), rng.integers(M)
        xs[s, 0] *= bound / np.linalg.norm(xs[s, 0])
        others[s, 0] = -ys[s, 0]
        pulls, inverse = pulls_and_inverse("release", problem_of(xs, ys, loss, regularizer), bound)
        claimed = pulls[s] * _influence("release_to_nodes", inverse)[:, s]
        np.testing.assert_allclose(claimed, 2 * 0.5 * bound / N * np.linalg.inv(m)[:, s], rtol=1e-6)
        change = minimiser(xs, ys, value, slope, a, 1 / N) - minimiser(xs, others, value, slope, a, 1 / N)
        shares.append(np.linalg.norm(change, axis=1) / claimed)
    assert np.max(shares) <= 1 + 1e-5
    assert np.max(shares) > (0.6 if relation == "mixed" else 0.9)


def test_what_nodes_receive_has_noise_for_the_samples_of_the_others():
    solution, a = solved(), REGULARIZERS["mean"][1]
    found = mj.privacy.release_to_nodes(solution, **SETTINGS)
    inverse = np.linalg.inv(a)
    expected = 2 / N * (inverse - np.diag(np.diag(inverse))).max(axis=1) + 2 * np.sqrt(2e-6 * np.diag(inverse))
    np.testing.assert_allclose(found.sensitivity, expected, rtol=1e-6)
    np.testing.assert_allclose(found.noise / found.sensitivity, mj.privacy.release(solution, **SETTINGS).noise
                               / mj.privacy.release(solution, **SETTINGS).sensitivity)  # fmt: skip


@pytest.mark.extended
def test_every_node_has_noise_of_its_own():
    solution, keys = solved(), jax.random.split(jax.random.key(1), 400)
    found = mj.privacy.release_to_nodes(solution, **SETTINGS)
    draws = [mj.privacy.release_to_nodes(solution, key=k, **SETTINGS).weights for k in keys]
    off = (np.stack(draws) - np.asarray(solution.weights)) / np.asarray(found.noise)[:, None]
    np.testing.assert_allclose(np.cov(off.reshape(len(off), -1).T), np.eye(M * D), atol=0.25)


def test_nothing_but_the_gap_goes_from_node_to_node_without_a_relation():
    found = mj.privacy.release_to_nodes(solved(regularizer=mj.regularizers.Independent(0.5)), **SETTINGS)
    np.testing.assert_allclose(found.sensitivity, 2 * math.sqrt(2e-6), rtol=1e-6)


def test_a_relation_without_a_bound_is_refused():
    omega = np.array([[1.0, 0.9, -0.9], [0.9, 1.0, -0.9], [-0.9, -0.9, 1.0]])
    solution = solved(regularizer=mj.regularizers.Graph(omega, 1.0, 0.01), tol=1e-8)
    with pytest.raises(ValueError, match="release_to_nodes: the relation has entries of both signs"):
        mj.privacy.release_to_nodes(solution, **(SETTINGS | {"gap": 1.0}))
    assert mj.privacy.release(solution, **(SETTINGS | {"gap": 1.0})).weights.shape == (M, D)


def test_the_bound_is_nearly_reached():
    # Far from their labels two samples pull with all the slope that the loss has, and a strong ridge keeps it so.
    loss, value, slope = LOSSES["huber"]
    rng, bound, regularizer = np.random.default_rng(3), 1.5, mj.regularizers.Independent(20.0)
    xs, ys = samples(rng, bound), rng.choice([-1.0, 1.0], (M, N))
    xs[0, 0] *= bound / np.linalg.norm(xs[0, 0])
    others = ys.copy()
    others[0, 0] = -ys[0, 0]
    a, claimed = 40.0 * np.eye(M), sensitivity(problem_of(xs, ys, loss, regularizer), bound)
    change = minimiser(xs, ys, value, slope, a, 1 / N) - minimiser(xs, others, value, slope, a, 1 / N)
    assert 0.95 < math.sqrt(np.sum(change * (a @ change))) / claimed <= 1.0 + 1e-6


@pytest.mark.parametrize("scaling", [pytest.param("sum", marks=pytest.mark.extended), "task_mean"])
@pytest.mark.extended
def test_an_answer_with_a_gap_is_as_near_as_is_claimed(scaling):
    loss, value, slope = LOSSES["logistic"]
    rng, regularizer = np.random.default_rng(1), REGULARIZERS["mean"][0]
    a, share = REGULARIZERS["mean"][1], 1.0 if scaling == "sum" else 1 / N
    xs, ys = samples(rng, 1.5), rng.choice([-1.0, 1.0], (M, N))
    problem, best = problem_of(xs, ys, loss, regularizer, scaling), minimiser(xs, ys, value, slope, a, share)
    for rounds in (1, 3, 8):
        solution = mj.solve(problem, mj.Mocha(), tol=None, max_rounds=rounds)
        off = np.asarray(solution.weights) - best
        assert math.sqrt(np.sum(off * (a @ off))) <= math.sqrt(2 * float(solution.gap)) * (1 + 1e-9)


def solved(tol=1e-9, **changes):
    rng = np.random.default_rng(2)
    given = {"loss": mj.losses.Logistic(), "regularizer": REGULARIZERS["mean"][0]} | changes
    return mj.solve(problem_of(samples(rng, 1.0), rng.choice([-1.0, 1.0], (M, N)), **given), tol=tol)


SETTINGS: Any = {"epsilon": 1.0, "delta": 1e-5, "bound": 1.0, "gap": 1e-6}


@pytest.mark.extended
def test_noise_is_that_of_the_gaussian_mechanism_in_the_norm_of_the_regularizer():
    solution, a = solved(), REGULARIZERS["mean"][1]
    found = [mj.privacy.release(solution, key=k, **SETTINGS) for k in jax.random.split(jax.random.key(0), 400)]
    one = found[0]
    assert one.sensitivity == pytest.approx(sensitivity(solution.problem, 1.0, 1e-6))
    # Balle and Wang 2018, theorem 8, at the noise over the sensitivity.
    z = one.noise / one.sensitivity
    delta = stats.norm.cdf(0.5 / z - z) - math.e * stats.norm.cdf(-0.5 / z - z)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    off = np.stack([(r.weights - np.asarray(solution.weights)) for r in found]) / one.noise
    white = np.einsum("st,ktd->ksd", np.linalg.cholesky(a).T, off).reshape(len(found), -1)
    np.testing.assert_allclose(np.cov(white.T), np.eye(M * D), atol=0.25)
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=0.2)


def test_noise_of_a_release_is_drawn_anew():
    solution = solved()
    first, second = (mj.privacy.release(solution, **SETTINGS).weights for _ in range(2))
    assert np.abs(first - second).min() > 0


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"loss": mj.losses.Squared()}, {}, "no Lipschitz constant"),
        pytest.param(
            {"regularizer": mj.regularizers.Probabilistic(0.1), "tol": 1e-4},
            {},
            "not strongly convex",
            marks=pytest.mark.extended,
        ),
        ({}, {"gap": 1e-15}, "solve on with a smaller tol"),
        ({}, {"bound": 0.9}, "more than bound"),
        ({}, {"delta": 1.0}, "below 1"),
    ],
)
def test_what_no_theorem_covers_is_refused(changes, settings, says):
    with pytest.raises(ValueError, match=says):
        mj.privacy.release(solved(**changes), **(SETTINGS | settings))


@pytest.mark.extended
def test_networks_are_pointed_to_training():
    problem = mj.Prediction(solved().problem.data.replace(y=np.ones((M, N))))
    solution = mj.solve(problem, mj.Local(mj.networks.MLP(D, 2), __import__("optax").sgd(0.1)), tol=None, max_rounds=1)
    with pytest.raises(ValueError, match="with_budget"):
        mj.privacy.release(solution, **SETTINGS)
