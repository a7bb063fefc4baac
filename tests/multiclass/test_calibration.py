"""Calibrated probabilities beside scikit-learn's and a general optimiser's."""

from typing import Any

import numpy as np
import pytest
import scipy.optimize
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV

import mocha_jax as mj
from mocha_jax.multiclass._calibration import sigmoid_fit
from tests.multiclass.problems import hinge, packed


class Given(ClassifierMixin, BaseEstimator):
    """Decision values that are given as features."""

    def fit(self, z, y):
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, z):
        return z

    def predict(self, z):
        return self.classes_[z.argmax(1)]


def scikit_learns(z, y):
    """The probabilities of decision values ``[k, classes]`` after they were calibrated on themselves."""
    return CalibratedClassifierCV(Given(), method="sigmoid", ensemble=False, cv=2).fit(z, y).predict_proba(z)


@pytest.mark.parametrize("case", ["mixed", "separated", "large", "rare"])
def test_the_fit_is_a_general_optimisers(case):
    rng = np.random.default_rng(1)
    z = rng.normal(size=60)
    positive = {"mixed": z + rng.normal(size=60) > 0.3, "separated": z > 0, "large": z > 0.1, "rare": z == z.max()}[
        case
    ]
    z = z * (1e4 if case == "large" else 1.0)
    a, b = sigmoid_fit(z, positive)
    many = positive.sum()
    target = np.where(positive, (many + 1) / (many + 2), 1 / (60 - many + 2))

    def value(w):
        s = w[0] * z / np.abs(z).max() + w[1]
        return np.sum(np.logaddexp(0, s) - target * s)

    best = scipy.optimize.minimize(value, [1.0, 0.0], method="BFGS", options={"gtol": 1e-9})
    assert value([a * np.abs(z).max(), b]) <= best.fun + 1e-9
    np.testing.assert_allclose([a * np.abs(z).max(), b], best.x, rtol=1e-4)


def test_values_that_are_all_the_same_give_the_share_of_the_class():
    a, b = sigmoid_fit(np.full(10, 3.0), np.arange(10) < 4)
    want = (4 * 5 / 6 + 6 / 8) / 10
    np.testing.assert_allclose(expit(3 * a + b), want, rtol=1e-6)
    a, b = sigmoid_fit(np.linspace(-1, 1, 10), np.zeros(10, bool))
    np.testing.assert_allclose(expit(np.array([-a + b, a + b])), 1 / 12, rtol=1e-6)


@pytest.mark.slow
def test_probabilities_are_scikit_learns_of_values_that_were_held_out(key):
    data = packed()
    options: Any = dict(tol=1e-6, max_rounds=3000)
    found = mj.multiclass.calibrated(mj.one_vs_rest(data, hinge), data, hinge, key=key, folds=3, **options)
    # By hand, fold by fold.
    part, real, y = (np.asarray(a) for a in (data.folds(key, 3), data.weight > 0, data.y))
    z = np.zeros((*y.shape, 4))
    for fold in range(3):
        model = mj.one_vs_rest(data.keep(part != fold), hinge, classes=4, **options)
        z[part == fold] = np.asarray(model.decision_function(data))[part == fold]
    theirs = scikit_learns(z[real], y[real])
    slope, offset = np.asarray(found.calibration).T
    ours = expit(slope * z[real] + offset)
    np.testing.assert_allclose(ours / ours.sum(1, keepdims=True), theirs, atol=2e-3)
    # Of the model itself: its own decision values, by the same two numbers a class.
    own = expit(slope * np.asarray(found.decision_function(data))[real] + offset)
    proba = np.asarray(found.predict_proba(data))[real]
    np.testing.assert_allclose(proba, own / own.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(found.model.predict_proba(data.x[0][:5], 0), found.predict_proba(data)[0, :5], rtol=1e-6)
    assert (found.predict(data) == mj.one_vs_rest(data, hinge).predict(data)).all()


def test_the_fit_on_given_values_is_scikit_learns():
    rng = np.random.default_rng(2)
    y = rng.integers(0, 3, 90)
    z = np.eye(3)[y] + rng.normal(size=(90, 3))
    fitted = np.array([sigmoid_fit(z[:, k], y == k) for k in range(3)])
    p = expit(fitted[:, 0] * z + fitted[:, 1])
    np.testing.assert_allclose(p / p.sum(1, keepdims=True), scikit_learns(z, y), atol=1e-5)


@pytest.mark.slow
def test_solves_that_did_not_converge_are_said(key):
    data = packed()
    model = mj.one_vs_rest(data, hinge)
    every = r"calibrated: classes 0 \(.*\), 1 \(.*\), 2 \(.*\), 3 \(.*\) did not reach tol=1e-12 in max_rounds=1 rounds"
    with pytest.warns(mj.NotConverged, match=every):
        mj.multiclass.calibrated(model, data, hinge, key=key, folds=2, tol=1e-12, max_rounds=1)
