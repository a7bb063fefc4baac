"""Synthetic federations have the truth they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax import datasets


def test_covariances_are_what_they_say(key):
    clusters = np.asarray(datasets.clusters(6, 3, within=0.8, across=-0.2))
    assert clusters[0].tolist() == [1.0, 0.8, -0.2, -0.2, -0.2, -0.2]
    with pytest.raises(ValueError, match="positive semi-definite"):
        datasets.clusters(6, 3, within=0.8, across=-0.7)
    low_rank = datasets.low_rank(key, 20, 3, noise=0.1)
    values = np.linalg.eigvalsh(low_rank)
    np.testing.assert_allclose(values[:17], 0.1, atol=1e-9)
    np.testing.assert_allclose(np.diag(low_rank), 1.0)
    laplacian, covariance = datasets.sparse_graph(key, 30, degree=4.0)
    np.testing.assert_allclose(laplacian.sum(1), 0.0, atol=1e-12)
    precision = np.linalg.inv(covariance)
    np.testing.assert_array_equal(np.abs(precision) > 1e-6, np.asarray(laplacian) != 0)
    degree = float(jnp.mean(jnp.diagonal(laplacian)))
    assert 2.0 < degree < 6.0


def test_weights_have_the_covariance(key):
    covariance = datasets.clusters(8, 2, within=0.7)
    weights = datasets.sample_weights(key, covariance, 20_000)
    np.testing.assert_allclose(np.cov(weights, bias=True), covariance, atol=0.05)


@pytest.mark.slow
def test_labels_follow_the_weights(key):
    weights = datasets.sample_weights(key, datasets.clusters(6, 2), 5)
    sizes = datasets.skewed_sizes(key, 6, 5, 2000)
    assert sorted(sizes)[0] == 5
    assert sorted(sizes)[-1] == 2000
    data = datasets.classification(key, weights, sizes, label_noise=0.1)
    assert data.sizes.tolist() == sizes.tolist()
    errors = mj.metrics.error_rate(weights, data, per_task=True)
    assert abs(float(np.average(errors, weights=sizes)) - 0.1) < 0.02
    assert (np.asarray(data.x)[np.asarray(data.weight) == 0] == 0).all()
    np.testing.assert_allclose(data.weight.sum(1), 1.0)
    targets = datasets.regression(key, weights, sizes, noise=0.3)
    assert abs(float(mj.metrics.rmse(weights, targets, per_task=True)[int(np.argmax(sizes))]) - 0.3) < 0.03


KEY, W = jax.random.key(0), jnp.ones((2, 3))
IMPOSSIBLE = {
    "noise of a share": (lambda: datasets.low_rank(KEY, 4, 2, noise=5.0), r"low_rank: noise must be in \[0, 1\]"),
    "no factors": (lambda: datasets.low_rank(KEY, 4, -1), "low_rank: rank must be an integer >= 1"),
    "no clusters": (lambda: datasets.clusters(0, 2), "clusters: num_tasks must be an integer >= 1"),
    "more clusters than tasks": (lambda: datasets.clusters(2, 3), "num_clusters must be at most num_tasks, 2, got 3"),
    "correlation": (lambda: datasets.clusters(2, 1, within=1.5), r"clusters: within must be in \[0, 1\)"),
    "negative neighbours": (lambda: datasets.sparse_graph(KEY, 4, degree=-1.0), "degree must be finite and >= 0"),
    "rivalry": (lambda: datasets.sparse_graph(KEY, 4, strength=-9.0), "strength must be finite and >= 0"),
    "no covariance": (lambda: datasets.sample_weights(KEY, -jnp.eye(2), 3), "sample_weights: covariance must be positive"),
    "too few": (lambda: datasets.skewed_sizes(KEY, 3, 0, 9), "smallest must be an integer >= 1"),
    "backwards": (lambda: datasets.federation(KEY, smallest=9, largest=3), "smallest must be at most largest, 3, got 9"),
    "flips": (lambda: datasets.classification(KEY, W, np.array([3, 3]), label_noise=7.0), r"label_noise must be in \[0, 1\]"),
    "negative size": (lambda: datasets.regression(KEY, W, np.array([3, -3])), "sizes must be integers >= 1"),
    "sizes of others": (lambda: datasets.regression(KEY, W, np.array([3])), r"sizes must be an array \[2\]"),
    "anti-noise": (lambda: datasets.regression(KEY, W, np.array([3, 3]), noise=-1.0), "noise must be finite and >= 0"),
    "other tasks": (lambda: datasets.federation(KEY, 3, covariance=jnp.eye(4)), r"covariance must be an array \[3, 3\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_federation_can_be_is_refused(name):
    make, message = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_related_tasks_are_learned_better_together():
    truth = datasets.federation(jax.random.key(0))
    train, test = truth.data.split(jax.random.key(1), 0.75)
    linked = np.asarray(truth.covariance) > 0.5
    laplacian = np.diag(linked.sum(1)) - linked.astype(float)
    together = mj.regularizers.Graph(laplacian, 0.02, 0.005)
    errors = []
    for regularizer in (mj.regularizers.Independent(0.005), together):
        solution = mj.solve(mj.Problem(train, mj.losses.Hinge(), regularizer), tol=1e-3, max_rounds=3000)
        errors.append(float(mj.metrics.error_rate(solution.weights, test)))
    assert errors[1] < 0.8 * errors[0]
