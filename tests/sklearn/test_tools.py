"""Estimators work in scikit-learn's pipelines and searches; what drops groups is told so; folds share programs."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import mocha_jax as mj
from mocha_jax import sklearn as of_mocha
from tests.sklearn.tables import FEATURES, frame, rows

X, Y, SCHOOL = rows()
MochaRegressor = partial(
    of_mocha.MochaRegressor, regularizer="independent", lam=0.01
)  # quick, and one program for most
MochaClassifier = partial(of_mocha.MochaClassifier, regularizer="independent", lam=0.01)
FOLDS = KFold(5, shuffle=True, random_state=0)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def scaled(estimator, names=FEATURES, **how):
    """The features scaled, the school left as it is."""
    return make_pipeline(
        ColumnTransformer([("scale", StandardScaler(), names)], remainder="passthrough", **how), estimator
    )


@pytest.mark.slow
def test_pipelines_keep_the_column():
    table, y = frame()
    exact: dict[str, Any] = dict(
        tol=1e-12, max_iter=10_000
    )  # scaled in another order, numbers differ in their last bits
    by_name = scaled(MochaRegressor(groups="school", **exact), verbose_feature_names_out=False).set_output(
        transform="pandas"
    )
    by_place = scaled(MochaRegressor(groups=-1, **exact))
    z = StandardScaler().fit_transform(X)
    want = MochaRegressor(**exact).fit(z, Y, groups=SCHOOL).predict(z, groups=SCHOOL)
    for pipeline in (by_name, by_place):
        np.testing.assert_allclose(clone(pipeline).fit(table, y).predict(table), want, atol=1e-5)
    assert by_name.fit(table, y)[-1].model_.names.features == tuple(FEATURES)


@pytest.mark.slow
def test_searches_find_the_strength():
    table, y = frame()
    pipeline = scaled(MochaRegressor(groups=-1))
    grid = {
        "mocharegressor__lam": [10.0, 0.01],
        "mocharegressor__regularizer": ["independent", mj.regularizers.Independent],
    }
    search = GridSearchCV(pipeline, grid, cv=FOLDS, error_score="raise").fit(table, y)
    assert search.best_params_["mocharegressor__lam"] == 0.01
    assert search.best_score_ > 0.95
    assert search.predict(table).shape == y.shape


@pytest.mark.extended
def test_folds_of_whole_groups_have_the_mean_and_a_warning():
    """`cv=3` cuts a table that is sorted by group into whole groups."""
    table, y = frame()
    order = np.argsort(table["school"].to_numpy(), kind="stable")
    search = GridSearchCV(MochaRegressor(groups="school", regularizer="independent"), {"lam": [1.0, 0.01]}, cv=3)
    with pytest.warns(
        UserWarning, match=r"not seen in fit, predicted with the mean of all groups; .* KFold\(shuffle=True\)"
    ):
        search.fit(table.iloc[order], y[order])
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


@pytest.mark.slow
def test_scorers_that_drop_groups_are_an_error(routing):
    asked = MochaRegressor(unseen="mean").set_fit_request(groups=True).set_predict_request(groups=True)
    how = dict(params={"groups": SCHOOL}, cv=FOLDS)
    with pytest.raises(ValueError, match="groups must name the group of every sample"):
        cross_validate(asked.set_score_request(groups=False), X, Y, error_score="raise", **how)
    with pytest.raises(ValueError, match="groups must name the group of every sample"):
        cross_validate(asked, X, Y, scoring="neg_mean_squared_error", error_score="raise", **how)
    with pytest.warns(UserWarning, match="Scoring failed"):
        scores = cross_validate(asked, X, Y, scoring="r2", **how)
    assert np.isnan(scores["test_score"]).all()


@pytest.mark.slow
def test_groups_are_routed(routing):
    asked = (
        MochaRegressor().set_fit_request(groups=True).set_predict_request(groups=True).set_score_request(groups=True)
    )
    found = cross_validate(asked, X, Y, params={"groups": SCHOOL}, cv=FOLDS, error_score="raise")
    by_column = cross_validate(MochaRegressor(groups="school"), *frame(), cv=FOLDS, error_score="raise")
    np.testing.assert_allclose(found["test_score"], by_column["test_score"], rtol=1e-9)
    assert found["test_score"].min() > 0.9
    pipeline = make_pipeline(StandardScaler(), asked).fit(X, Y, groups=SCHOOL)
    assert pipeline.score(X, Y, groups=SCHOOL) > 0.9
    assert np.mean((pipeline.predict(X, groups=SCHOOL) - Y) ** 2) < 0.1


@pytest.mark.slow
def test_without_routing_groups_go_by_the_step_s_name():
    pipeline = make_pipeline(StandardScaler(), MochaRegressor()).fit(X, Y, mocharegressor__groups=SCHOOL)
    assert np.mean((pipeline.predict(X, groups=SCHOOL) - Y) ** 2) < 0.1


@pytest.mark.parametrize("kind", ["numbers", pytest.param("grades", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_folds_compile_what_one_fit_compiles(kind):
    table, y = frame(count=400)
    estimator = MochaRegressor(groups="school")
    if kind == "grades":
        estimator, y = MochaClassifier(groups="school"), np.digitize(y, [-0.5, 0.8])
    parts = [train for train, _ in FOLDS.split(table)]
    longest = {table["school"].iloc[part].value_counts().max() for part in parts}
    assert len(longest) > 3  # each fold would have a shape of its own
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.clear_caches()
        estimator.fit(table.iloc[parts[0]], y[parts[0]])
        once = len(compiled)
        assert once > 5
        scores = cross_validate(estimator, table, y, cv=FOLDS, error_score="raise")["test_score"]
        assert len(compiled) == once
    finally:
        jax.monitoring.clear_event_listeners()
    assert scores.min() > 0.8
