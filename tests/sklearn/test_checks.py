"""scikit-learn's own checks of estimators pass, all of them."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from mocha_jax.sklearn import MochaClassifier, MochaRegressor


@parametrize_with_checks([MochaRegressor(), MochaClassifier()])
def test_scikit_learn_checks(estimator, check):
    check(estimator)
