"""Weights of samples are those of scikit-learn's own estimators, and as if samples were repeated."""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from mocha_jax.sklearn import MochaClassifier, MochaRegressor
from tests.sklearn.tables import NAMES, rows

X, Y, SCHOOL = rows()
GRADE = np.digitize(Y, [-0.5, 0.8])
WEIGHT = np.random.default_rng(4).integers(0, 4, len(Y)) * 0.5
EXACT: dict[str, Any] = dict(tol=1e-12, max_iter=20_000)
QUICK = ("independent", "sum"), ("pooled", "task_mean")


def parts(pooled):
    return [(0, SCHOOL != "")] if pooled else [(t, name == SCHOOL) for t, name in enumerate(NAMES)]


@pytest.mark.parametrize(
    ("regularizer", "scaling"),
    [
        pytest.param(regularizer, scaling, marks=() if (regularizer, scaling) in QUICK else pytest.mark.slow)
        for regularizer in ("independent", "pooled")
        for scaling in ("task_mean", "sum")
    ],
)
@pytest.mark.slow
def test_a_regressor_is_ridge_with_weights(regularizer, scaling):
    lam = 0.05 if scaling == "task_mean" else 2.0
    found = MochaRegressor(regularizer=regularizer, loss_scaling=scaling, lam=lam, standardize="centred", **EXACT)
    found.fit(X, Y, groups=SCHOOL, sample_weight=WEIGHT)
    for t, part in parts(regularizer == "pooled"):
        alpha = 2 * lam * (WEIGHT[part].sum() if scaling == "task_mean" else 1)
        want = Ridge(alpha=alpha).fit(X[part], Y[part], sample_weight=WEIGHT[part])
        np.testing.assert_allclose(
            np.r_[found.coef_[t], found.intercept_[t]], np.r_[want.coef_, want.intercept_], atol=1e-5
        )


@pytest.mark.parametrize("regularizer", ["pooled", pytest.param("independent", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_classifier_is_logistic_regression_with_weights(regularizer):
    lam = 0.05
    two, several = (
        MochaClassifier(regularizer=regularizer, lam=lam, intercept=False, **EXACT).fit(
            X, y, groups=SCHOOL, sample_weight=WEIGHT
        )
        for y in (GRADE == 1, GRADE)
    )
    for t, part in parts(regularizer == "pooled"):
        C = 1 / (2 * lam * WEIGHT[part].sum())
        for k in range(3):
            want = LogisticRegression(C=C, fit_intercept=False, tol=1e-12, max_iter=10_000)
            want.fit(X[part], GRADE[part] == k, sample_weight=WEIGHT[part])
            np.testing.assert_allclose(several.coef_[k, t], want.coef_[0], atol=1e-5)
            if k == 1:
                np.testing.assert_allclose(two.coef_[t], want.coef_[0], atol=1e-5)


@pytest.mark.slow
def test_a_weight_says_how_often_a_sample_is_there():
    # Of related groups too, of which one has no sample that counts.
    count = np.where(SCHOOL == "elm", 0, np.random.default_rng(5).integers(0, 3, len(Y)))
    how: dict[str, Any] = dict(lam=0.02, **EXACT)
    weighted = MochaRegressor(**how).fit(X, Y, groups=SCHOOL, sample_weight=count)
    x, y, school = (a.repeat(count, axis=0) for a in (X, Y, SCHOOL))
    repeated = MochaRegressor(**how).fit(x, y, groups=school)
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-5)
    assert weighted.groups_.tolist() == repeated.groups_.tolist() == ["ash", "oak"]
    same = MochaRegressor(lam=0.02).fit(X, Y, groups=SCHOOL, sample_weight=np.full(len(Y), 3.0))
    np.testing.assert_allclose(same.coef_, MochaRegressor(lam=0.02).fit(X, Y, groups=SCHOOL).coef_, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_cross_validation_trains_with_weights():
    lams, far = [1.0, 0.001], np.arange(len(Y)) % 10 == 0
    y = np.where(far, 100.0, Y)  # no sense in a tenth of the samples
    how: dict[str, Any] = dict(regularizer="independent", lam=lams)
    heard, unheard = (
        MochaRegressor(**how).fit(X, y, groups=SCHOOL, sample_weight=np.where(far, w, 1.0)) for w in (1.0, 1e-6)
    )
    assert (unheard.cross_validation_.mean != heard.cross_validation_.mean).all()
    assert unheard.score(X[~far], Y[~far], groups=SCHOOL[~far]) > 0.9
    assert unheard.regularizer_.lam == 0.001


def test_weights_that_are_none_are_named():
    with pytest.raises(ValueError, match="sample_weight must be weights >= 0 that are not all zero, got"):
        MochaRegressor(groups=None).fit(X, Y, sample_weight=np.where(np.arange(120) == 3, -1.0, 1.0))
    with pytest.raises(ValueError, match="sample_weight must be a number for each sample, got 'balanced'"):
        MochaClassifier(groups=None).fit(X, GRADE, sample_weight="balanced")
    with pytest.raises(ValueError, match="weight.*zero"):  # by scikit-learn where it knows
        MochaRegressor(groups=None).fit(X, Y, sample_weight=np.zeros(120))
