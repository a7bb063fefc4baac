"""Kernels by features: what they approximate, and the kernel methods themselves by other means."""

from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.gaussian_process import kernels
from sklearn.svm import SVC

import mocha_jax as mj
from mocha_jax import features
from tests import zoo

R = mj.regularizers
GAMMA = 0.7
M, D = 4, 3


def gram(data, gamma=GAMMA):
    """The kernel of all real samples, by scikit-learn, with their tasks, labels and weights."""
    real = np.asarray(data.weight) > 0
    x = np.asarray(data.x)[real]
    task = np.broadcast_to(np.arange(data.num_tasks)[:, None], real.shape)[real]
    return kernels.RBF((0.5 / gamma) ** 0.5)(x), task, np.asarray(data.y)[real], np.asarray(data.weight)[real]


def in_features(data, gamma=GAMMA):
    return features.transform(data, features.Nystroem(features.GaussianKernel(gamma), features.landmarks(data)))


def test_random_features_approximate_as_they_say():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, D)))
    exact = kernels.RBF((0.5 / GAMMA) ** 0.5)(np.asarray(x))
    np.testing.assert_allclose(features.GaussianKernel(GAMMA)(x, x), exact, atol=1e-12)

    def product(key, num_features=50):
        phi = features.RandomFourier(key, D, num_features, GAMMA)(x)
        return phi @ phi.T

    draws = jax.vmap(product)(jax.random.split(jax.random.key(1), 4000))
    np.testing.assert_allclose(draws.mean(0), exact, atol=5 / np.sqrt(50 * 4000))  # five standard deviations
    assert draws.std(0).max() <= 1.05 / np.sqrt(50)
    np.testing.assert_allclose(jnp.diagonal(draws[0]), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_landmarks_reproduce_the_kernel_with_them_and_bound_it_elsewhere():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, D)))
    kernel = features.GaussianKernel(GAMMA)
    phi = features.Nystroem(kernel, x[:10])
    product, exact = phi(x) @ phi(x).T, kernel(x, x)
    np.testing.assert_allclose(product[:, :10], exact[:, :10], atol=1e-12)
    assert (jnp.diagonal(product) <= jnp.diagonal(exact) + 1e-12).all()
    assert np.linalg.eigvalsh(exact - product).min() > -1e-12  # what is left is a kernel
    np.testing.assert_allclose(features.Nystroem(kernel, x)(x) @ features.Nystroem(kernel, x)(x).T, exact, atol=1e-12)
    twice = jnp.concatenate([x, x])  # eigenvalues that are 0
    again = features.Nystroem(kernel, twice)(x)
    np.testing.assert_allclose(again @ again.T, exact, atol=1e-10)


@pytest.mark.slow
def test_the_dual_on_gram_matrices_with_a_kernel_of_tasks():
    # max over duals of sum c y b - <u, (M x K) u> / 2, u = c y b and M x K the product of the two kernels.
    data = zoo.data(m=M, d=D, loss_scaling="task_mean")
    regularizer = R.Graph(zoo.laplacian(M), 0.2, 0.05)
    problem = mj.Problem(in_features(data), mj.losses.Hinge(), regularizer)
    solution = mj.solve(problem, tol=1e-9, max_rounds=20_000)
    of_inputs, task, y, c = gram(data)
    of_tasks = np.linalg.inv(0.4 * zoo.laplacian(M) + 0.1 * np.eye(M))
    product = of_tasks[np.ix_(task, task)] * of_inputs
    b = cp.Variable(len(y))
    root = np.linalg.cholesky(product + 1e-12 * np.eye(len(y)))
    dual = cp.Maximize(c @ b - 0.5 * cp.sum_squares(root.T @ cp.multiply(c * y, b)))
    best = cp.Problem(dual, [b >= 0, b <= 1]).solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11)
    np.testing.assert_allclose(solution.certificate.primal, best, rtol=1e-7)
    np.testing.assert_allclose(solution.certificate.dual, best, rtol=1e-7)
    z = problem.data.predictions(solution.weights)[np.asarray(data.weight) > 0]
    np.testing.assert_allclose(z, product @ (c * y * b.value), atol=1e-4)


@pytest.mark.slow
def test_ridge_regression_in_closed_form():
    data = zoo.data(m=M, d=D, regression=True, loss_scaling="task_mean")
    problem = mj.Problem(in_features(data), mj.losses.Squared(), R.MeanRegularized(0.2, 0.05))
    solution = mj.solve(problem, tol=1e-12, max_rounds=20_000)
    of_inputs, task, y, c = gram(data)
    centre = np.eye(M) - np.full((M, M), 1 / M)
    of_tasks = np.linalg.inv(0.4 * centre + 0.1 * np.eye(M))
    product = of_tasks[np.ix_(task, task)] * of_inputs
    expected = product @ np.linalg.solve(product + np.diag(1 / c), y)  # the mean of a Gaussian process
    z = problem.data.predictions(solution.weights)[np.asarray(data.weight) > 0]
    np.testing.assert_allclose(z, expected, atol=1e-6)


@pytest.mark.slow
def test_a_support_vector_machine_per_task_is_scikit_learns():
    data = zoo.data(m=M, d=D, low=20, high=30)
    lam, unpenalised = 0.3, 1e4  # scikit-learn's intercept is free: as good as, with a feature so large

    def kernel(a, b):
        return features.GaussianKernel(GAMMA)(a, b) + unpenalised

    mapped = features.transform(data, features.Nystroem(kernel, features.landmarks(data)))
    solution = mj.solve(mj.Problem(mapped, mj.losses.Hinge(), R.Independent(lam)), tol=1e-9, max_rounds=100_000)
    z = mapped.predictions(solution.weights)
    for t in range(M):
        real = np.asarray(data.weight[t]) > 0
        x, y = np.asarray(data.x[t])[real], np.asarray(data.y[t])[real]
        theirs = SVC(C=0.5 / lam, kernel="rbf", gamma=GAMMA, tol=1e-8).fit(x, y).decision_function(x)
        np.testing.assert_allclose(z[t][real], theirs, atol=2e-3)


@pytest.mark.slow
def test_derivatives_of_a_kernels_width():
    data = zoo.data(m=M, d=D, regression=True, loss_scaling="task_mean")
    at = features.landmarks(data)[:6]
    target = np.random.default_rng(7).normal(size=(M, 6))

    def outer(gamma):
        mapped = features.transform(data, features.Nystroem(features.GaussianKernel(gamma), at))
        problem = mj.Problem(mapped, mj.losses.Squared(), R.MeanRegularized(0.2, 0.05))
        return jnp.sum(mj.solve(problem, tol=1e-12, max_rounds=20_000).weights * target)

    def closed(gamma):
        x = np.asarray(features.Nystroem(features.GaussianKernel(gamma), at)(data.x))
        y, c = np.asarray(data.y), np.asarray(data.weight)
        of_tasks = 0.4 * (np.eye(M) - np.full((M, M), 1 / M)) + 0.1 * np.eye(M)
        system = np.kron(of_tasks, np.eye(6))
        for t in range(M):
            system[6 * t : 6 * t + 6, 6 * t : 6 * t + 6] += (x[t].T * c[t]) @ x[t]
        right = np.concatenate([(x[t].T * c[t]) @ y[t] for t in range(M)])
        return np.sum(np.linalg.solve(system, right).reshape(M, 6) * target)

    expected = (closed(GAMMA + 1e-4) - closed(GAMMA - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(outer)(GAMMA), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "network", [mj.networks.MLP(784, 10, (20,)), mj.networks.CNN((28, 28, 1), 10, channels=(2, 3), hidden=5)]
)
@pytest.mark.thin(1)
def test_heads_are_the_last_layer(network, key):
    params = network.init(key)
    x = jnp.asarray(np.random.default_rng(0).random((2, 3, 784)), params[-1].w.dtype)
    hidden = features.Body(network, params)(x)
    with jax.numpy_rank_promotion("allow"):
        outputs = network.apply(params, x.reshape(6, 784)).reshape(2, 3, 10)
        again = hidden @ params[-1].w + params[-1].b
    np.testing.assert_allclose(again, outputs, rtol=1e-5, atol=1e-6)


def test_landmarks_are_real_samples():
    data = zoo.data(m=M, d=D)
    assert features.landmarks(data).shape == (int(data.sizes.sum()), D)
    some = features.landmarks(data, 7, jax.random.key(1))
    assert some.shape == (7, D)
    rows = {tuple(row) for row in np.asarray(data.x)[np.asarray(data.weight) > 0].tolist()}
    assert {tuple(row) for row in some.tolist()} <= rows
    assert features.transform(data, lambda x: x, intercept=True).x.shape[-1] == D + 1


NO_FUNCTION: Any = 3.0
BAD = {
    "odd": (lambda: features.RandomFourier(jax.random.key(0), 3, 5, 1.0), "num_features must be even"),
    "width": (lambda: features.RandomFourier(jax.random.key(0), 3, 4, 1.0)(jnp.ones((2, 4))), "must have 3 features"),
    "landmark width": (
        lambda: features.Nystroem(features.GaussianKernel(1.0), jnp.ones((2, 3)))(jnp.ones(4)),
        "3 features",
    ),
    "kernel": (lambda: features.Nystroem(NO_FUNCTION, jnp.ones((2, 3))), "kernel must be"),
    "shape": (lambda: features.transform(zoo.data(m=M, d=D), lambda x: x[0]), "feature_map must make"),
    "params": (lambda: features.Body(mj.networks.MLP(3, 2), [1.0]), "tuple of layers"),
    "count": (lambda: features.landmarks(zoo.data(m=M, d=D), 10_000), "count must be"),
    "gamma": (lambda: features.GaussianKernel(-1.0), "gamma must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
