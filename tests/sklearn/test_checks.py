"""scikit-learn's own checks of estimators pass, all of them."""

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from mocha_jax.sklearn import MochaClassifier, MochaRegressor

# Those that fit nothing or little; the others compile a program for every shape that they think of.
QUICK = {
    "check_classifiers_one_label", "check_classifiers_regression_target", "check_complex_data",
    "check_do_not_raise_errors_in_init_or_set_params", "check_estimator_cloneable", "check_estimator_repr",
    "check_estimator_sparse_array", "check_estimator_sparse_matrix", "check_estimator_sparse_tag",
    "check_estimator_tags_renamed", "check_estimators_empty_data_messages",
    "check_estimators_unfitted", "check_fit1d", "check_get_params_invariance", "check_mixin_order",
    "check_no_attributes_set_in_init", "check_parameters_default_constructible",
    "check_requires_y_none", "check_set_params", "check_supervised_y_no_nan", "check_valid_tag_types",
}  # fmt: skip
CHECKS = [
    (estimator, check)
    for of in (MochaRegressor(groups=None, lam=0.01), MochaClassifier(groups=None, lam=0.01))
    for estimator, check in estimator_checks_generator(of)
]


def marked(estimator, check):
    name = check.func.__name__
    marks = () if name in QUICK else (pytest.mark.slow,)
    return pytest.param(estimator, check, id=f"{type(estimator).__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("estimator", "check"), [marked(*case) for case in CHECKS])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def test_there_are_quick_ones_and_others():
    names = {check.func.__name__ for _, check in CHECKS}
    assert len(names & QUICK) > 15
    assert len(names) > 40
