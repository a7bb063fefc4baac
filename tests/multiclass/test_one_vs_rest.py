"""One class against the rest, beside scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

import mocha_jax as mj


def ragged(m=3, classes=4):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 5)) for n in rng.integers(30, 50, m)]
    return xs, [(x @ rng.normal(size=(5, classes))).argmax(1) for x in xs]


def test_local_models_are_scikit_learns():
    (xs, ys), lam = ragged(), 0.02
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    found = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Hinge(), mj.regularizers.Independent(lam)), tol=1e-9, max_rounds=5000
    )
    assert (found.certificate.relative_gap <= 1e-9).all()
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        svm = LinearSVC(loss="hinge", fit_intercept=False, C=1 / (2 * lam * len(y)), tol=1e-9, max_iter=1_000_000)
        theirs = OneVsRestClassifier(svm).fit(x, y)
        w = np.stack([e.coef_[0] for e in theirs.estimators_])
        np.testing.assert_allclose(found.weights[:, t], w, atol=2e-4)
        np.testing.assert_array_equal(found.predict(data)[t, : len(y)], theirs.predict(x))
        np.testing.assert_allclose(found.error_rate(data, per_task=True)[t], (theirs.predict(x) != y).mean())


def test_a_class_that_a_task_has_not_seen_is_no_trouble():
    xs, ys = ragged()
    ys[1] = np.minimum(ys[1], 1)
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True)
    found = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Logistic(), mj.regularizers.Probabilistic(1e-2)), classes=5
    )
    assert found.weights.shape == (5, 3, 6)
    assert bool(jnp.isfinite(found.weights).all())
    assert int(found.predict(data).max()) <= 3


def test_a_model_that_is_not_a_number_has_no_error_rate():
    xs, ys = ragged()
    data = mj.pack_tasks(xs, ys)
    found = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Hinge(), mj.regularizers.Independent(1.0)), max_rounds=2
    )
    spoilt = found.replace(weights=found.weights.at[2, 1].set(jnp.nan))
    assert np.isnan(spoilt.error_rate(data, per_task=True)).tolist() == [False, True, False]
    np.testing.assert_array_equal(
        spoilt.error_rate(data, per_task=True)[::2], found.error_rate(data, per_task=True)[::2]
    )


def test_what_is_no_class_is_said():
    xs, ys = ragged()
    data = mj.pack_tasks(xs, [np.where(y > 0, 1, -1) for y in ys])

    def make(data):
        return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))

    with pytest.raises(ValueError, match="labels must be 0, 1"):
        mj.one_vs_rest(data, make)
    with pytest.raises(ValueError, match="classes must be an integer >= 4"):
        mj.one_vs_rest(mj.pack_tasks(xs, ys), make, classes=2)
