"""Metrics against scikit-learn, task by task."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import mocha_jax as mj
from tests import zoo


@pytest.mark.parametrize("owner", [None, [0, 1, 1, 2, 0]])
def test_against_scikit_learn(owner):
    xs, ys = zoo.ragged(low=10, high=30)
    data = mj.pack_tasks(xs, ys, task=owner).pad(nodes=7, rows=33)
    owner = np.arange(5) if owner is None else np.asarray(owner)
    w = np.round(np.random.default_rng(0).normal(size=(owner.max() + 1, 4)), 1)
    error, auc, rmse = [], [], []
    for t in range(owner.max() + 1):
        x, y = (np.concatenate([a[k] for k in np.flatnonzero(owner == t)]) for a in (xs, ys))
        z = x @ w[t]
        error.append(np.mean(z * y <= 0))
        auc.append(roc_auc_score(y, z))
        rmse.append(np.sqrt(np.mean((z - y) ** 2)))
    for metric, want in ((mj.metrics.error_rate, error), (mj.metrics.auc, auc), (mj.metrics.rmse, rmse)):
        np.testing.assert_allclose(metric(jnp.asarray(w), data, per_task=True), want, rtol=1e-12)
        np.testing.assert_allclose(metric(jnp.asarray(w), data), np.mean(want), rtol=1e-12)


def test_ties_one_class_and_global_weights():
    data = mj.pack_tasks([np.ones((4, 1)), np.arange(3.0)[:, None]], [np.array([1.0, -1, 1, -1]), np.ones(3)])
    scores = mj.metrics.auc(jnp.ones((1, 1)), data, per_task=True)
    assert scores[0] == 0.5
    assert np.isnan(scores[1])
    assert mj.metrics.auc(jnp.ones((1, 1)), data) == 0.5
    assert mj.metrics.error_rate(jnp.ones((1, 1)), data, per_task=True).tolist() == [0.5, 1 / 3]
    with pytest.raises(ValueError, match=r"weights must be an array \[2, 1\]"):
        mj.metrics.error_rate(jnp.ones((3, 1)), data)


@pytest.mark.parametrize("owner", [None, [0, 1, 1, 2, 0]])
def test_predictions_that_are_not_numbers_are_never_good(owner):
    xs, ys = zoo.ragged(low=10, high=30)
    data = mj.pack_tasks(xs, ys, task=owner).pad(nodes=7, rows=33)
    w = jnp.ones((data.num_tasks, 4)).at[1].set(jnp.nan)
    for metric in (mj.metrics.error_rate, mj.metrics.auc, mj.metrics.rmse):
        assert np.isnan(metric(w, data, per_task=True)).tolist() == [t == 1 for t in range(data.num_tasks)]
        assert np.isnan(metric(w, data))
