"""Estimators do what the functions do and what scikit-learn's own do, and predict for the group they are asked for."""

import pickle
import subprocess
import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

import mocha_jax as mj
from mocha_jax.sklearn import MochaClassifier, MochaRegressor
from mocha_jax.sklearn._base import room_for
from tests.sklearn.tables import FEATURES, NAMES, frame, rows

R = mj.regularizers
X, Y, SCHOOL = rows()
LABEL = np.where(Y > 0.3, "pass", "fail")
GRADE = np.digitize(Y, [-0.5, 0.8])
EXACT: dict[str, Any] = dict(tol=1e-12, max_iter=20_000)


def with_tens(x):
    """Samples as a classifier has them: standardised by all, with a constant feature whose weight costs little."""
    return np.c_[(x - X.mean(0)) / X.std(0), np.full(len(x), 10.0)]


def test_a_regressor_is_a_solve():
    data = mj.pack_tasks(X, Y, SCHOOL, loss_scaling="task_mean", rows=96).standardized("within", labels=True)
    want = mj.solve(mj.Problem(data, mj.losses.Squared(), R.MeanCovariance(0.002, 0.01, 1.0)), tol=1e-6)
    found = MochaRegressor(lam=0.02, tol=1e-6).fit(X, Y, groups=SCHOOL)
    np.testing.assert_allclose(found.coef_, want.model.weights, rtol=1e-12)
    np.testing.assert_allclose(found.intercept_, want.model.intercept, rtol=1e-12)
    np.testing.assert_allclose(found.task_covariance_, want.covariance, rtol=1e-12)
    np.testing.assert_allclose(found.dual_gap_, float(want.quality.residual), rtol=1e-6)
    assert found.n_iter_ == want.rounds
    assert found.groups_.tolist() == NAMES.tolist()
    np.testing.assert_allclose(found.predict(X, groups=SCHOOL), want.model.predict(X, SCHOOL), rtol=1e-12)


@pytest.mark.slow
def test_several_classes_are_one_against_the_rest():
    data = mj.pack_tasks(X, GRADE, SCHOOL, loss_scaling="task_mean", intercept=10.0, rows=96).standardized()
    want = mj.one_vs_rest(data, lambda d: mj.Problem(d, mj.losses.Logistic(), R.MeanRegularized(0.1, 0.01)), tol=1e-4,
                          record_every=1)  # fmt: skip
    names = np.array(["low", "middle", "top"])
    found = MochaClassifier(regularizer="mean", lam=0.01).fit(X, names[GRADE], groups=SCHOOL)
    np.testing.assert_allclose(found.coef_, want.model.weights, rtol=1e-8)
    assert found.n_iter_ == want.rounds.max()
    np.testing.assert_allclose(found.dual_gap_, want.certificate.residual.max(), rtol=1e-6)
    z = found.decision_function(X, groups=SCHOOL)
    assert found.predict(X, groups=SCHOOL).tolist() == names[z.argmax(axis=1)].tolist()
    odds = 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(found.predict_proba(X, groups=SCHOOL), odds / odds.sum(axis=1, keepdims=True), rtol=1e-9)
    assert found.score(X, names[GRADE], groups=SCHOOL) > 0.8


def test_compiled_programs_are_kept_for_the_next_process(monkeypatch):
    called = []
    monkeypatch.setattr("mocha_jax.sklearn._base.keep_programs", lambda: called.append(1))
    for estimator in (MochaRegressor(lam=1.0), MochaClassifier(lam=1.0)):
        estimator.fit(np.eye(4), [0, 1, 0, 1], groups=[0, 0, 1, 1])
    assert len(called) == 2


@pytest.mark.parametrize("scaling", [pytest.param("task_mean", marks=pytest.mark.slow), "sum"])
@pytest.mark.slow
def test_local_and_pooled_are_ridge(scaling):
    # (1/2n) |Xw - y|^2 + lam |w|^2 is Ridge's |Xw - y|^2 + alpha |w|^2 with alpha = 2 n lam; of a sum, alpha = 2 lam.
    lam = 0.05 if scaling == "task_mean" else 2.0
    how: dict[str, Any] = dict(loss_scaling=scaling, lam=lam, standardize="centred", **EXACT)
    local = MochaRegressor(regularizer="independent", **how).fit(X, Y, groups=SCHOOL)
    parts = [(local, t, name == SCHOOL) for t, name in enumerate(NAMES)]
    everyone = np.ones(len(X), bool)
    parts.append((MochaRegressor(groups=None, regularizer="independent", **how).fit(X, Y), 0, everyone))
    parts.append((MochaRegressor(regularizer="pooled", **how).fit(X, Y, groups=SCHOOL), 0, everyone))
    for found, t, part in parts:
        alpha = 2 * lam * (part.sum() if scaling == "task_mean" else 1)
        want = Ridge(alpha=alpha).fit(X[part], Y[part])
        np.testing.assert_allclose(found.coef_[t], want.coef_, atol=1e-5)
        np.testing.assert_allclose(found.intercept_[t], want.intercept_, atol=1e-5)


@pytest.mark.parametrize(
    "loss", ["logistic", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hinge", "squared_hinge"))]
)
@pytest.mark.slow
def test_local_and_pooled_are_scikit_learn_s_classifiers(loss):
    lam = 0.05
    local, pooled = (
        MochaClassifier(regularizer=name, loss=loss, lam=lam, **EXACT).fit(X, LABEL, groups=SCHOOL)
        for name in ("independent", "pooled")
    )
    for found, part in [
        *((local, name == SCHOOL) for name in NAMES),
        (pooled, np.ones(len(X), bool)),
    ]:
        C = 1 / (2 * lam * part.sum())
        if loss == "logistic":
            want = LogisticRegression(C=C, fit_intercept=False, tol=1e-12, max_iter=10_000)
        else:
            want = LinearSVC(loss=loss, C=C, fit_intercept=False, tol=1e-9, max_iter=5_000_000, random_state=0)
        z = want.fit(with_tens(X[part]), LABEL[part]).decision_function(with_tens(X[part]))
        np.testing.assert_allclose(found.decision_function(X[part], groups=SCHOOL[part]), z, atol=1e-4)
        assert found.predict(X[part], groups=SCHOOL[part]).tolist() == np.where(z > 0, "pass", "fail").tolist()


@pytest.mark.slow
def test_whoever_is_asked_for_is_predicted():
    found = MochaRegressor(regularizer="independent", lam=0.001).fit(X, Y, groups=SCHOOL)
    who = np.array(["oak", "ash", "oak", "elm"])
    place = [2, 0, 2, 1]
    want = np.einsum("kd,kd->k", X[:4], found.coef_[place]) + found.intercept_[place]
    np.testing.assert_allclose(found.predict(X[:4], groups=who), want)
    np.testing.assert_allclose(found.predict(X[:4], groups=list(who)), want)
    with pytest.raises(ValueError, match="'yew' is not among the 3 that are known"):
        found.predict(X[:2], groups=["yew", "oak"])
    mean = found.set_params(unseen="mean").predict(X[:2], groups=["yew", "oak"])
    np.testing.assert_allclose(mean[0], X[0] @ found.coef_.mean(axis=0) + found.intercept_.mean())
    for groups in (["oak"], "oak", [["oak", "ash"]], {"oak", "ash"}):
        with pytest.raises(ValueError, match="groups must name the group of each of the 2 samples"):
            found.predict(X[:2], groups=groups)  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_prediction_without_groups_where_several_have_models():
    alone: dict[str, Any] = dict(regularizer="independent", lam=0.1)
    classes = MochaClassifier(**alone).fit(X, LABEL, groups=SCHOOL)
    grades = MochaClassifier(**alone).fit(X, GRADE, groups=SCHOOL)
    numbers = MochaRegressor(**alone, unseen="mean").fit(X, Y, groups=SCHOOL)
    for ask in (
        numbers.predict, classes.predict, classes.decision_function, classes.predict_proba, grades.predict,
        lambda x: numbers.score(x, Y), lambda x: classes.score(x, LABEL),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="groups must name the group of every sample, for 3 groups have models"):
            ask(X)
    # With one group, or none, it is clear whose samples they are.
    one = MochaRegressor(**alone).fit(X, Y, groups=np.full(len(X), "oak"))
    none = MochaRegressor(groups=None, **alone).fit(X, Y)
    assert none.groups_ is None
    np.testing.assert_allclose(one.predict(X), none.predict(X), rtol=1e-9)
    with pytest.raises(ValueError, match="groups must be None, as they were in fit"):
        none.predict(X, groups=SCHOOL)


def test_the_group_is_a_column_by_name_or_place():
    table, y = frame()
    want = MochaRegressor(lam=0.01).fit(X, Y, groups=SCHOOL)
    for groups, given in (
        ("school", table),
        (1, table),
        (-3, table),
        (1, table.to_numpy()),
        (1, table.values.tolist()),
    ):
        found = MochaRegressor(groups=groups, lam=0.01).fit(given, y)
        np.testing.assert_allclose(found.coef_, want.coef_, rtol=1e-12)
        np.testing.assert_allclose(found.predict(given), want.predict(X, groups=SCHOOL), rtol=1e-12)
        assert found.n_features_in_ == 4
        if given is table:
            assert found.model_.names.features == tuple(FEATURES)
            assert found.feature_names_in_.tolist() == table.columns.tolist()
            np.testing.assert_allclose(found.model_.predict(table, table["school"]), found.predict(table))
    numbered = np.c_[X, np.searchsorted(NAMES, SCHOOL)]
    found = MochaRegressor(groups=-1, lam=0.01).fit(numbered, y)
    assert found.groups_.tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(found.predict(numbered), want.predict(X, groups=SCHOOL), rtol=1e-12)


def test_a_column_that_is_not_there_is_named():
    table, y = frame()
    for estimator, given, sentence in (
        (MochaRegressor(groups="city"), table, "column 'city' is not among the 4 that are known"),
        (MochaRegressor(groups="school"), X, "names a column, 'school', but X is no data frame"),
        (MochaRegressor(groups=4), table, "its place, an integer from -4 to 3, got 4"),
        (MochaRegressor().set_params(groups=1.5), table, "its place, an integer from -4 to 3, got 1.5"),
    ):
        with pytest.raises(ValueError, match=sentence):
            estimator.fit(given, y)
    with pytest.raises(ValueError, match="groups must be left out where a column of X, 'school', holds them"):
        MochaRegressor(groups="school").fit(table, y, groups=SCHOOL)


@pytest.mark.slow
def test_labels_are_any_classes_and_the_model_knows_them():
    for classes in (np.array([False, True]), np.array([3, 7]), np.array(["no", "yes"], object)):
        label = classes[(Y > 0.3).astype(int)]
        found = MochaClassifier(regularizer="independent", lam=0.01).fit(X, label, groups=SCHOOL)
        assert found.classes_.tolist() == classes.tolist()
        assert found.predict(X, groups=SCHOOL).dtype == found.classes_.dtype
        assert found.model_.predict(X, SCHOOL).tolist() == found.predict(X, groups=SCHOOL).tolist()
        z = found.decision_function(X, groups=SCHOOL)
        np.testing.assert_allclose(found.predict_proba(X, groups=SCHOOL)[:, 1], 1 / (1 + np.exp(-z)), rtol=1e-9)
        assert found.score(X, label, groups=SCHOOL) > 0.9


@pytest.mark.slow
def test_probabilities_are_of_the_logistic_loss_alone():
    assert hasattr(MochaClassifier(), "predict_proba")
    assert hasattr(MochaClassifier(loss=mj.losses.Logistic()), "predict_proba")
    assert not hasattr(MochaClassifier(loss="hinge"), "predict_proba")
    assert not hasattr(MochaClassifier(loss="nonsense"), "predict_proba")
    found = MochaClassifier(regularizer="independent", lam=0.01).fit(X, GRADE, groups=SCHOOL)
    sure = found.predict_proba(1e4 * X, groups=SCHOOL)  # odds beyond what an exponential holds
    np.testing.assert_allclose(sure.sum(axis=1), 1.0)


MADE = {
    "independent": R.Independent(0.02), "mean": R.MeanRegularized(0.2, 0.02), "probabilistic": R.Probabilistic(0.02, 10.0),
    "mean_covariance": R.MeanCovariance(0.002, 0.01, 1.0), "clustered": R.Clustered(0.02, 0.5, 3), "trace": R.TraceNorm(0.02, 0.002), "joint_sparse": R.JointSparse(0.02, 0.002),
    "matrix_normal": R.MatrixNormal(0.02, 10.0, 0.1), "sparse_precision": R.SparsePrecision(0.02, 10.0, 0.0, 0.02),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in ("mean", "probabilistic") else pytest.param(name, marks=pytest.mark.slow) for name in MADE]
)
@pytest.mark.slow
def test_regularizers_by_name_object_and_function_are_the_same(name):
    by_name = MochaRegressor(regularizer=name, lam=0.02).fit(X, Y, groups=SCHOOL)
    jax.tree.map(np.testing.assert_allclose, by_name.regularizer_, MADE[name])
    assert type(by_name.regularizer_) is type(MADE[name])
    by_object = MochaRegressor(regularizer=MADE[name]).fit(X, Y, groups=SCHOOL)
    np.testing.assert_allclose(by_name.coef_, by_object.coef_, rtol=1e-10)
    assert hasattr(by_name, "task_covariance_") == bool(MADE[name].learned)


@pytest.mark.slow
def test_strength_of_objects_and_functions():
    def ridge(lam):
        return R.Probabilistic(lam, 5.0)

    def fitted(**how):
        return MochaRegressor(groups=None, **how).fit(X, Y).regularizer_

    assert fitted(regularizer=ridge, lam=0.5).sigma2 == 5.0
    assert fitted(regularizer=R.Independent, lam=0.5).lam == 0.5
    assert fitted(regularizer=R.Independent(0.3)).lam == 0.3
    assert fitted(regularizer=R.Independent(0.3), lam=0.5).lam == 0.5
    for wrong, sentence in (
        (
            dict(regularizer=R.MeanRegularized(1.0, 1.0), lam=0.5),
            "lam must be None where regularizer is a MeanRegularized",
        ),
        (
            dict(regularizer=R.Graph),
            r"regularizer must be a function make\(lam=...\), .* unexpected keyword argument 'lam'",
        ),
        (
            dict(regularizer=lambda lam: lam),
            "regularizer must make an object of mocha_jax.regularizers, but it made 0.01",
        ),
        (dict(regularizer="ridge"), "regularizer must be one of 'independent', 'pooled', 'mean'"),
        (dict(lam="best"), "lam must be a number, several to choose from, or \"cv\", got 'best'"),
        (dict(lam=-1.0), "lam must be finite and > 0"),
        (dict(loss="hinge"), "loss must be one of 'squared'"),
        (dict(loss=mj.losses.Hinge()), "object of mocha_jax.losses for labels of numbers, got Hinge()"),
    ):
        with pytest.raises(ValueError, match=sentence):
            MochaRegressor(groups=None, **wrong).fit(X, Y)


@pytest.mark.slow
def test_strength_by_cross_validation_is_that_of_the_functions():
    lams, y = [10.0, 1.0, 0.1, 0.01, 0.001], Y + np.random.default_rng(1).normal(size=len(Y))
    data = mj.pack_tasks(X, y, SCHOOL, loss_scaling="task_mean", rows=96)
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(1.0))
    grid = mj.grid(R.Independent, lam=lams)
    want = mj.cross_validate(problem, grid, refit=False, max_rounds=1000, standardize="within")
    found = MochaRegressor(regularizer="independent", lam=lams[::-1]).fit(X, y, groups=SCHOOL)
    np.testing.assert_allclose(found.cross_validation_.mean, want.mean, rtol=1e-9)
    assert found.regularizer_.lam == want.candidates.lam[want.best] == 0.01  # type: ignore[attr-defined]
    assert X[0].tobytes() not in pickle.dumps(found)
    assert not hasattr(found.set_params(lam=0.1).fit(X, Y, groups=SCHOOL), "cross_validation_")


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
@pytest.mark.parametrize("regularizer", ["independent", pytest.param("pooled", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_strength_for_several_classes_is_that_of_the_functions(regularizer):
    lams, grade = [1.0, 0.1, 0.01, 0.001], np.digitize(Y + np.random.default_rng(1).normal(size=len(Y)), [-0.5, 0.8])
    data = mj.pack_tasks(X, grade, SCHOOL, loss_scaling="task_mean", intercept=10.0, rows=96)
    asked: dict[str, Any] = dict(refit=False, max_rounds=1000, scored_as=data, standardize="pooled")
    want = mj.multiclass.cross_validate(
        data.pooled() if regularizer == "pooled" else data,
        lambda d: mj.Problem(d, mj.losses.Logistic(), R.Independent(1.0)),
        mj.grid(R.Independent, lam=lams),
        **asked,
    )
    found = MochaClassifier(regularizer=regularizer, lam=lams[::-1]).fit(X, grade, groups=SCHOOL)
    np.testing.assert_allclose(found.cross_validation_.mean, want.mean, rtol=1e-9)
    assert found.regularizer_.lam == want.candidates.lam[want.best]  # type: ignore[attr-defined]
    assert found.coef_.shape == (3, 1 if regularizer == "pooled" else 3, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate")
@pytest.mark.parametrize("name", [*MADE, "pooled"])
def test_strengths_that_are_tried_by_default(name):
    found = MochaRegressor(regularizer=name, lam="cv", max_iter=3000).fit(X, Y, groups=SCHOOL)
    assert found.score(X, Y, groups=SCHOOL) > (0.1 if name == "pooled" else 0.95)


@pytest.mark.slow
def test_nobody_s_samples_are_kept(tmp_path):
    kept = []
    for count in (120, 1000):
        x, y, school = rows(count)
        found = MochaClassifier(regularizer="independent", lam=0.01).fit(x, y > 0.3, groups=school)
        kept.append(pickle.dumps(found))
        np.testing.assert_array_equal(pickle.loads(kept[-1]).predict(x, groups=school), found.predict(x, groups=school))
        assert x[0].tobytes() not in kept[-1]
    assert abs(len(kept[0]) - len(kept[1])) < 100
    found.model_.save(tmp_path / "model.npz")
    assert mj.load_model(tmp_path / "model.npz").predict(x, school).tolist() == found.predict(x, groups=school).tolist()


@pytest.mark.slow
def test_who_stops_early_says_so():
    with pytest.warns(ConvergenceWarning, match="MochaRegressor: stopped at max_rounds after 1 rounds") as caught:
        MochaRegressor(max_iter=1, lam=0.01).fit(X, Y, groups=SCHOOL)
    assert len(caught) == 1
    late = r"MochaClassifier: classes 0 \(.*\), 1 \(.*\), 2 \(.*\) did not reach tol=0.0001 in max_rounds=1 rounds"
    with pytest.warns(ConvergenceWarning, match=late) as caught:
        MochaClassifier(max_iter=1, lam=0.01).fit(X, GRADE, groups=SCHOOL)
    assert len(caught) == 1


def test_rows_are_padded_to_few_sizes():
    sizes = [room_for(n) for n in range(1, 2000)]
    assert all(n <= size <= max(1.5 * n, n + 1) for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 3, *(k << i for i in range(1, 10) for k in (2, 3)), 2048]


@pytest.mark.extended
def test_no_level_has_to_be_paid_for():
    """Labels far from 0 whose levels differ: by default better than a constant and than a ridge of every group."""
    rng, m, d = np.random.default_rng(0), 12, 6
    group = np.repeat(np.arange(m), 60)
    x = rng.normal(size=(len(group), d)) * [1, 10, 0.1, 1, 1, 100] + 2.0 * rng.normal(size=(m, d))[group]
    slope = rng.normal(size=d) / [1, 10, 0.1, 1, 1, 100] * (1.0 + 0.3 * rng.normal(size=(m, d)))
    y = 29.0 + 11.0 * rng.normal(size=m)[group] + np.sum(slope[group] * x, axis=1) + 2.0 * rng.normal(size=len(group))
    train = rng.random(len(group)) < 0.2
    parts = [(train & (group == t), ~train & (group == t)) for t in range(m)]

    def error(predict):
        return np.mean([np.sqrt(np.mean((predict(t, a, b) - y[b]) ** 2)) for t, (a, b) in enumerate(parts)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the edges of the grid
        found = MochaRegressor().fit(x[train], y[train], groups=group[train])
    ours = error(lambda t, a, b: found.predict(x[b], groups=group[b]))
    ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 4, 13)))
    assert ours < error(lambda t, a, b: ridge.fit(x[a], y[a]).predict(x[b]))
    assert ours < 0.9 * error(lambda t, a, b: y[a].mean())


@pytest.mark.parametrize("regularizer", ["mean_covariance", "probabilistic", "independent"])
@pytest.mark.thin(1)
@pytest.mark.extended
def test_one_row_is_not_worse_than_none(regularizer):
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(8), 20)
    x = rng.normal(size=(len(group), 3))
    y = x @ [1.0, -2.0, 0.5] + rng.normal(size=8)[group] + 0.1 * rng.normal(size=len(group))
    new, at = rng.normal(size=(50, 3)), np.full(50, 8)
    truth = new @ [1.0, -2.0, 0.5] + 1.5
    how: dict[str, Any] = dict(regularizer=regularizer, lam=0.01)
    without = MochaRegressor(**how, unseen="mean").fit(x, y, groups=group)
    with_one = MochaRegressor(**how).fit(np.r_[x, new[:1]], np.r_[y, truth[:1]], groups=np.r_[group, at[:1]])
    one, none = (np.sqrt(np.mean((f.predict(new, groups=at) - truth) ** 2)) for f in (with_one, without))
    assert one < 0.5 * none


def test_groups_are_asked_for():
    with pytest.raises(
        ValueError, match=r"groups must be given: fit\(X, y, groups=...\), .*MochaRegressor\(groups=None\)"
    ):
        MochaRegressor().fit(X, Y)
    with pytest.raises(ValueError, match="standardize must be None where intercept is False"):
        MochaRegressor(intercept=False, standardize="within").fit(X, Y, groups=SCHOOL)


def test_random_state_is_a_seed():
    def weights(random_state):
        return MochaRegressor(random_state=random_state, tol=1e-2, lam=0.001).fit(X, Y, groups=SCHOOL).coef_

    np.testing.assert_array_equal(weights(3), weights(3))
    assert (weights(3) != weights(4)).any()
    np.testing.assert_array_equal(weights(np.random.RandomState(1)), weights(np.random.RandomState(1)))
    with pytest.raises(ValueError, match="random_state must be an integer, a RandomState or None, got 'a'"):
        weights("a")


WITHOUT = """
import sys
import mocha_jax as mj
assert "sklearn" not in sys.modules, "scikit-learn is imported"
assert "sklearn" in dir(mj)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

sys.meta_path.insert(0, Absent())
try:
    mj.sklearn
except ImportError as error:
    assert str(error) == "mocha_jax.sklearn: needs scikit-learn 1.6 or newer (pip install 'mocha_jax[sklearn]').", error
else:
    raise AssertionError("imported without scikit-learn")
"""


def test_scikit_learn_is_needed_by_estimators_alone():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
