"""Cross-validation: the same folds for all, and scores that mean what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import Ridge

import mocha_jax as mj
from tests import zoo
from tests.selection.problems import LAMS, regression

R = mj.regularizers


@pytest.mark.extended
def test_cross_validation_of_ridge_equals_scikit_learn(key):
    data = zoo.data(m=3, d=3, low=20, high=25, regression=True)
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(1.0))
    found = mj.cross_validate(problem, mj.grid(R.Independent, lam=LAMS), key=key, folds=4, trials=2,
                              tol=1e-12, max_rounds=2000, chunk=3)  # fmt: skip
    assert found.metric == "rmse"
    assert found.task_scores.shape == (2, 4, 4, 3)
    for trial in range(2):
        part = np.asarray(data.folds(jax.random.fold_in(key, trial), 4))
        for fold in range(4):
            for i, lam in enumerate(LAMS):
                for t in range(3):
                    real = np.asarray(data.weight[t]) > 0
                    x, y = np.asarray(data.x[t]), np.asarray(data.y[t])
                    fit, held = real & (part[t] != fold), real & (part[t] == fold)
                    ridge = Ridge(alpha=2.0 * lam, fit_intercept=False).fit(x[fit], y[fit])
                    want = np.sqrt(np.mean((ridge.predict(x[held]) - y[held]) ** 2))
                    assert found.task_scores[trial, fold, i, t] == pytest.approx(want, rel=1e-5)
    assert found.best == int(np.argmin(found.mean))
    chosen: Any = found.regularizer
    assert chosen.lam == LAMS[found.best]
    assert found.solution is not None
    assert found.solution.relative_gap <= 1e-12
    again = mj.cross_validate(problem, mj.grid(R.Independent, lam=LAMS), key=key, folds=4, trials=2, metric="rmse",
                              tol=1e-12, max_rounds=2000, chunk=1, refit=False)  # fmt: skip
    # A gap of 1e-12 leaves the weights, by strong convexity, about its root apart.
    np.testing.assert_allclose(again.task_scores, found.task_scores, rtol=1e-5)
    assert again.solution is None
    assert "CrossValidation(best=" in repr(again)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate", "ignore:.*did not reach")
def test_models_are_compared_on_the_same_folds_and_tasks(key):
    data = zoo.data(m=4, d=3, low=12, high=20, loss_scaling="task_mean")
    shape = (1, 3, 2, 4)
    local = mj.Problem(data, mj.losses.Hinge(), R.Independent(1.0))
    pooled = mj.Problem(data.pooled(), mj.losses.Hinge(), R.Independent(1.0))
    grid, options = mj.grid(R.Independent, lam=[1.0, 0.1]), dict(key=key, folds=3, refit=False, max_rounds=50)
    assert mj.cross_validate(local, grid, **options).task_scores.shape == shape
    assert mj.cross_validate(pooled, grid, scored_as=data, **options).task_scores.shape == shape
    # AUC is maximised, and a function of one's own may be as well.
    by_name = mj.cross_validate(local, grid, metric="auc", **options)
    assert by_name.best == int(np.nanargmax(by_name.mean))
    mine = mj.cross_validate(local, grid, metric=mj.metrics.auc, maximise=True, **options)
    np.testing.assert_array_equal(mine.task_scores, by_name.task_scores)
    assert by_name.standard_error.shape == (2,)


def test_a_search_names_what_is_wrong():
    problem = mj.Problem(zoo.data(), mj.losses.Hinge(), R.Independent(1.0))
    with pytest.raises(ValueError, match="one leading axis"):
        mj.lambda_path(problem, R.Independent(1.0))
    with pytest.raises(ValueError, match=r"lambda_path: candidate 1: lam must be from 2.2e-308 to"):
        mj.lambda_path(problem, mj.grid(R.Independent, lam=[1.0, 5e-324]))
    with pytest.raises(ValueError, match="metric"):
        mj.cross_validate(problem, mj.grid(R.Independent, lam=[1.0]), metric="accuracy")
    with pytest.raises(ValueError, match="scored_as must have the rows"):
        mj.cross_validate(problem, mj.grid(R.Independent, lam=[1.0]), scored_as=zoo.data(m=2))


@pytest.mark.slow
def test_candidates_are_ranked_on_what_all_of_them_have(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))

    def picky(weights, data, per_task):
        """Defined for weak candidates only in the first two tasks."""
        scores = mj.metrics.rmse(weights, data, per_task=True)
        weak = jnp.abs(weights).max() > 1.0
        return jnp.where(weak & (jnp.arange(3) == 2), jnp.nan, scores)

    grid = mj.grid(mj.regularizers.Independent, lam=[1e4, 1.0])
    with pytest.warns(UserWarning, match=r"candidates \[1\] lack scores"):
        found = mj.cross_validate(problem, grid, key=key, metric=picky, refit=False)
    assert found.best == 0


@pytest.mark.slow
def test_what_cannot_be_scored_is_said_before_anything_is_fitted(key):
    data = regression()
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    with pytest.raises(ValueError, match=r"an array \[3\]; got"):
        mj.cross_validate(problem, grid, metric=lambda w, data, per_task: mj.metrics.rmse(w, data))
    ones = problem.replace(data=data.replace(y=jnp.ones_like(data.y)), loss=mj.losses.Hinge())
    with pytest.raises(ValueError, match="no candidate has a score"):
        mj.cross_validate(ones, grid, metric="auc", max_rounds=2)
    with pytest.raises(ValueError, match="this one has 2"):
        mj.cross_validate(
            problem.replace(data=data.replace(task=jnp.array([0, 0, 1]))), grid, metric="rmse", scored_as=data
        )
    with pytest.raises(ValueError, match="k "):
        mj.lambda_path(problem, mj.grid(lambda k: mj.regularizers.Clustered(1.0, 0.1, k), k=[1.0, 7.0]))


@pytest.mark.filterwarnings("ignore:cross_validate")
@pytest.mark.slow
def test_the_area_under_a_curve_is_maximised_by_any_name(key):
    data = zoo.data(m=4, low=20, high=30)
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1e-3])
    best = [mj.cross_validate(problem, grid, key=key, metric=m, refit=False).best for m in ("auc", mj.metrics.auc)]
    assert best[0] == best[1]


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
@pytest.mark.slow
def test_a_fold_without_samples_leaves_a_standard_error(key):
    problem, pairs = (
        mj.Problem(regression((6,)), mj.losses.Squared(), mj.regularizers.Independent(1.0)),
        np.arange(6)[None] // 2,
    )
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    found = mj.cross_validate(problem, grid, key=key, groups=pairs, metric="rmse", refit=False)
    flat = found.scores[0]
    assert np.isnan(flat).any(1).sum() == 2
    np.testing.assert_allclose(found.standard_error, np.nanstd(flat, 0, ddof=1) / np.sqrt(3))


@pytest.mark.slow
def test_any_regularizer_can_be_a_candidate():
    omega = zoo.laplacian(3)
    graphs = mj.grid(lambda lam1: mj.regularizers.Graph(omega, lam1, 0.1), lam1=[1.0, 0.1])
    assert np.shape(graphs.omega) == (2, 3, 3)
    means = mj.grid(lambda lam1: mj.regularizers.MeanRegularized(lam1, 0.1 * lam1), lam1=[1.0, 0.1, 0.01])
    assert [np.shape(leaf) for leaf in jax.tree.leaves(means)] == [(3,), (3,)]
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    assert mj.lambda_path(problem, graphs, tol=1e-3).weights.shape == (2, 3, 3)


@pytest.mark.slow
def test_scores_are_what_the_loss_is_scored_by(key):
    data, none = regression(), mj.grid(R.Independent, lam=[1e6])
    y, real = np.asarray(data.y), np.asarray(data.weight) > 0
    names = {
        "hinge": "error_rate",
        "logistic": "error_rate",
        "squared": "rmse",
        "quantile": "mean_loss",
        "huber": "mean_loss",
    }
    assert {name: zoo.LOSSES[name].scored_by for name in names} == names
    problem = mj.Problem(data, mj.losses.Quantile(0.3), R.Independent(1.0))
    found = mj.cross_validate(problem, none, key=key, folds=3, refit=False)
    part = np.asarray(data.folds(jax.random.fold_in(key, 0), 3))
    for fold in range(3):
        for t in range(3):
            held = y[t][real[t] & (part[t] == fold)]
            want = np.mean(np.maximum(0.3 * held, -0.7 * held))  # all weights are as good as 0
            assert found.task_scores[0, fold, 0, t] == pytest.approx(want, rel=1e-4)
    assert found.metric == "mean_loss"
    by_name = mj.cross_validate(problem, none, key=key, folds=3, refit=False, metric=mj.metrics.mean_loss)
    np.testing.assert_array_equal(by_name.task_scores, found.task_scores)


@pytest.mark.slow
def test_samples_that_lie_on_one_device_are_fitted_on_all(key):
    # Of this size they are put in order, and so tied to the device they came to.
    data = zoo.data(m=4, d=400, low=110, high=110, loss_scaling="task_mean", regression=True)
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(0.1))
    assert problem.data.x.committed
    candidates = mj.grid(R.Independent, lam=[0.1])
    found = mj.cross_validate(problem, candidates, key=key, folds=3, tol=1e-8, refit=False)
    part = data.folds(jax.random.fold_in(key, 0), 3)
    there = mj.solve(problem.replace(data=data.keep(part != 1)), tol=1e-8)
    want = mj.metrics.rmse(there.weights, data.keep(part == 1), per_task=True)
    np.testing.assert_allclose(found.task_scores[0, 1, 0], want, rtol=1e-3)
