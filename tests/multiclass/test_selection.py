"""One regularizer for all classes, chosen on the folds on which all models are compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

import mocha_jax as mj
from tests.multiclass.problems import R, hinge, logistic, packed

LAMS = [0.3, 0.02]
GRID = mj.grid(R.Independent, lam=LAMS)
edge = pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")


@edge
@pytest.mark.slow
def test_scores_are_those_of_scikit_learns_models(key):
    data = packed()
    found = mj.multiclass.cross_validate(data, hinge, GRID, key=key, folds=3, tol=1e-9, max_rounds=5000)
    assert found.metric == "error_rate"
    assert found.task_scores.shape == (1, 3, 2, 3)
    assert (found.residuals <= 1e-9).all()
    part, real = np.asarray(data.folds(jax.random.fold_in(key, 0), 3)), np.asarray(data.weight) > 0
    wrong = 0
    for fold in range(3):
        for i, lam in enumerate(LAMS):
            for t in range(3):
                x, y = np.asarray(data.x[t]), np.asarray(data.y[t])
                fit, held = real[t] & (part[t] != fold), real[t] & (part[t] == fold)
                svm = LinearSVC(
                    loss="hinge", fit_intercept=False, C=1 / (2 * lam * fit.sum()), tol=1e-8, max_iter=10**6
                )
                theirs = OneVsRestClassifier(svm).fit(x[fit], y[fit])
                want = (theirs.predict(x[held]) != y[held]).mean()
                wrong += abs(found.task_scores[0, fold, i, t] - want) > 1e-9
    assert wrong == 0
    assert found.best == int(np.argmin(found.mean))
    assert isinstance(found.solution, mj.OneVsRest)
    alone = mj.one_vs_rest(
        data, lambda d: hinge(d).replace(regularizer=R.Independent(LAMS[found.best])), tol=1e-9, max_rounds=5000
    )
    np.testing.assert_allclose(found.solution.weights, alone.weights, atol=1e-4)
    assert f"lam={LAMS[found.best]:g}" in found.solution.model.trained["regularizer"]


@pytest.mark.slow
@edge
def test_the_log_loss_is_that_of_the_models(key):
    data = packed()
    found = mj.multiclass.cross_validate(
        data, logistic, GRID, key=key, folds=2, metric="log_loss", tol=1e-8, refit=False
    )
    assert found.metric == "log_loss"
    assert found.solution is None
    part = data.folds(jax.random.fold_in(key, 0), 2)
    own = mj.one_vs_rest(
        data.keep(part != 1), lambda d: logistic(d).replace(regularizer=R.Independent(0.3)), classes=4, tol=1e-8
    )
    want = mj.multiclass.log_loss(own, data.keep(part == 1), per_task=True)
    np.testing.assert_allclose(found.task_scores[0, 1, 0], want, rtol=1e-3)


@pytest.mark.slow
@edge
def test_a_score_of_ones_own_may_be_maximised(key):
    data = packed()
    found = mj.multiclass.cross_validate(
        data, logistic, GRID, key=key, folds=2, metric="log_loss", tol=1e-8, refit=False
    )

    def certainty(weights, data, per_task):
        return -mj.multiclass.log_loss(weights, data, per_task=per_task)

    mine = mj.multiclass.cross_validate(
        data, logistic, GRID, key=key, folds=2, metric=certainty, maximise=True, tol=1e-8, refit=False, chunk=2
    )
    np.testing.assert_allclose(mine.task_scores, -found.task_scores, rtol=1e-5)
    assert mine.best == found.best


@pytest.mark.slow
def test_a_path_has_the_models_of_every_candidate():
    data = packed()
    path = mj.multiclass.lambda_path(data, hinge, GRID, tol=1e-8, max_rounds=5000)
    assert len(path) == 2
    for lam, there in zip(LAMS, path, strict=True):

        def make(d: Any, lam: float = lam) -> mj.Problem:
            return hinge(d).replace(regularizer=R.Independent(lam))

        own = mj.one_vs_rest(data, make, tol=1e-8, max_rounds=5000)
        np.testing.assert_allclose(there.weights, own.weights, atol=1e-4)
        assert there.error_rate(data) == own.error_rate(data)
        chosen: Any = there.regularizer
        assert float(chosen.lam) == pytest.approx(lam)


@pytest.mark.slow
def test_solves_that_did_not_converge_are_said(key):
    data, short = packed(), dict[str, Any](tol=1e-12, max_rounds=1)
    with pytest.warns(mj.NotConverged, match=r"lambda_path: candidates 0 \(.*, 1 \(.* did not reach tol=1e-12"):
        mj.multiclass.lambda_path(data, hinge, GRID, **short)
    with pytest.warns(mj.NotConverged) as caught:
        mj.multiclass.cross_validate(data, hinge, mj.grid(R.Independent, lam=[0.3]), key=key, folds=2, **short)
    fits, model = (str(warning.message) for warning in caught)
    assert "candidates 0 (" in fits
    assert model.startswith("cross_validate: classes 0 (")


@pytest.mark.slow
def test_rare_classes_stay_in_training_and_are_said(key):
    data = packed()
    y = np.array(data.y)
    y[0][y[0] == 3] = 2
    y[0, 0] = 3  # the only one of its task
    data = data.replace(y=jnp.asarray(y))
    few = r"in 1 of 3 tasks a class has .* \(task 0: 1 of label 3\), .*"
    options: Any = dict(tol=1e-6, max_rounds=1000)
    with pytest.warns(UserWarning, match=f"{few}; 1 of .* samples are alone in their class and stay in training"):
        found = mj.multiclass.cross_validate(
            data,
            logistic,
            mj.grid(R.Independent, lam=[0.02]),
            key=key,
            folds=2,
            metric="log_loss",
            refit=False,
            **options,
        )
    part = data.folds(jax.random.fold_in(key, 0), 2)
    fold = part[0, 0]
    training = data.keep((part != fold).at[0, 0].set(True))
    want = mj.multiclass.log_loss(
        mj.one_vs_rest(training, logistic, classes=4, **options), data.keep(part == fold), per_task=True
    )
    np.testing.assert_allclose(found.task_scores[0, fold, 0], want, rtol=1e-3)


@edge
@pytest.mark.slow
def test_what_has_no_score_is_said(key):
    data = packed()
    with pytest.raises(ValueError, match="models of this loss have no probabilities"):
        mj.multiclass.cross_validate(data, hinge, GRID, metric="log_loss")
    with pytest.raises(ValueError, match="metric must be one of 'error_rate', 'log_loss'"):
        mj.multiclass.cross_validate(data, hinge, GRID, metric="auc")
    with pytest.raises(ValueError, match=r"a score for each task, an array \[3\]"):
        mj.multiclass.cross_validate(data, hinge, GRID, metric=lambda w, d, per_task: jnp.zeros(2))
    with pytest.raises(ValueError, match="one leading axis"):
        mj.multiclass.lambda_path(data, hinge, R.Independent(1.0))
    with pytest.raises(ValueError, match="make must leave the samples as they are"):
        mj.multiclass.cross_validate(data, lambda d: hinge(d.standardized("task")), GRID)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fold'"):
        mj.multiclass.cross_validate(data, hinge, GRID, fold=3)
    with pytest.warns(UserWarning, match=r"cross_validate: candidates 0 \(.*, 1 \(.* did not reach tol=1e-12"):
        mj.multiclass.cross_validate(data, hinge, GRID, key=key, folds=2, tol=1e-12, max_rounds=1, refit=False)
