"""Second-order methods on nodes of very different sizes, which are put into buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import mocha_jax as mj
from mocha_jax._node.buckets import bucket_sizes, time_major
from tests import zoo

L, R = mj.losses, mj.regularizers
CASES = {
    "features, near the mean": (mj.Newton(), L.Logistic(), R.MeanRegularized(0.1, 0.02), 4),
    "features that are scaled": (mj.Newton(), L.Logistic(), R.PerFeature(R.MeanRegularized(0.1, 0.02), np.arange(1.0, 5.0)), 4),
    "squared, alone": (mj.Newton(), L.Squared(), R.Independent(0.05), 4),
    "samples, alone": (mj.Newton(), L.Logistic(), R.Independent(0.05), 50),
    "samples, near the mean": (mj.Newton(), L.Logistic(), R.MeanRegularized(0.1, 0.02), 50),
    "samples that are scaled": (mj.Newton(), L.Logistic(), R.PerFeature(R.MeanRegularized(0.1, 0.02), np.linspace(1, 2, 50)), 50),
    "kinks, near the mean": (mj.InteriorPoint(), L.Hinge(), R.MeanRegularized(0.1, 0.02), 4),
    "kinks, alone": (mj.InteriorPoint(), L.Absolute(), R.Independent(0.05), 50),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thin(2)
def test_buckets_change_no_round_and_no_certificate(case, key, monkeypatch):
    algorithm, loss, regularizer, d = CASES[case]
    rng = np.random.default_rng(0)
    sizes = [40, *rng.integers(2, 6, 9), 17]
    xs = [rng.normal(size=(n, d)) for n in sizes]
    ys = [np.sign(x[:, 0] + 0.3) + (0.0 if loss.binary else rng.normal(size=len(x))) for x in xs]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    problem = mj.Problem(data, loss, regularizer)
    plain = mj.solve(problem, algorithm, tol=1e-9, max_rounds=30, record_every=1)
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    assert len(bucket_sizes(data)) > 1
    dealt = mj.solve(problem, algorithm, tol=1e-9, max_rounds=30, record_every=1)
    assert plain.rounds == dealt.rounds
    np.testing.assert_allclose(dealt.weights, plain.weights, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(dealt.state.beta, plain.state.beta, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(dealt.history.primal, plain.history.primal, rtol=1e-9)
    np.testing.assert_allclose(dealt.dual, plain.dual, rtol=1e-8)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
def test_devices_have_buckets_of_their_own(monkeypatch):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)) for n in (40, 3, 4, 2, 38, 5, 3, 4)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
    regularizer = R.PerFeature(R.MeanRegularized(0.1, 0.02), np.arange(1.0, 5.0))
    problem = mj.Problem(data, L.Logistic(), regularizer)
    plain = mj.solve(problem, mj.Newton(), tol=1e-9)
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    mesh = jax.make_mesh((2,), ("nodes",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    shared_out = mj.shard(problem, mesh)
    assert len(bucket_sizes(shared_out.data)) > 1
    dealt = mj.solve(shared_out, mj.Newton(), tol=1e-9)
    assert plain.rounds == dealt.rounds
    np.testing.assert_allclose(dealt.weights, plain.weights, rtol=1e-7, atol=1e-9)


def test_work_on_the_samples_of_a_bucket_sees_its_own_rows(monkeypatch):
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    data = mj.pack_tasks(*zoo.ragged(seed=1, m=8, d=3, low=2, high=30))
    dealt, given, seen = time_major(data, bucket_sizes(data)), jnp.arange(8.0), []

    def work(x, by_node, by_row):
        seen.append(x.shape[:2])
        return (
            by_node[:, None] * jnp.sum(by_row[:, :, None] * x, axis=1),
            by_row * x[:, :, 0],
            x @ jnp.swapaxes(x, 1, 2),
        )

    for a, b in zip(
        dealt.map_samples(work, (given,), data.weight), data.map_samples(work, (given,), data.weight), strict=True
    ):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12)
    rows = {shape[1] for shape in seen}
    assert len(rows) > 1


def test_scaled_samples_are_scaled_in_every_layout(monkeypatch):
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    data, scale = mj.pack_tasks(*zoo.ragged(seed=1, m=8, d=3, low=2, high=30)), jnp.array([1.0, 2.0, 0.5])
    w = jnp.ones((8, 3))
    for laid_out in (data, time_major(data), time_major(data, bucket_sizes(data))):
        scaled = laid_out.with_features_scaled(scale)
        np.testing.assert_allclose(
            scaled.weighted(scaled.predictions(w)), data.weighted(data.predictions(w * scale[None, :])), rtol=1e-12
        )
        np.testing.assert_allclose(
            scaled.longest, jnp.sqrt(jnp.max(jnp.sum((data.x * scale[None, None, :]) ** 2, 2), 1)), rtol=1e-6
        )
