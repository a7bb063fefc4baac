"""Several classes with features standardised within folds, and a global model on the tasks of others."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import PredefinedSplit
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import mocha_jax as mj
from tests.multiclass.problems import L, R, logistic, packed, ragged

LAMS, FOLDS = [0.3, 0.01], 3
GRID = mj.grid(R.Independent, lam=LAMS)
EXACT: dict[str, Any] = dict(folds=FOLDS, metric="log_loss", tol=1e-9, max_rounds=3000)

pytestmark = pytest.mark.filterwarnings("ignore:cross_validate. the best candidate:UserWarning")


@functools.cache
def uneven():
    """Samples whose features differ in size, level and task."""
    xs, ys = ragged(noise=0.5)
    xs = [x * [1.0, 100.0, 0.01, 5.0, 1.0] + [0.0, 50.0, 7.0 * t, 0.0, 1.0] for t, x in enumerate(xs)]
    return xs, ys, mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True)


def pipeline(lam, count, *before):
    """The same model in scikit-learn's words; the constant is a feature after scaling."""
    model = LogisticRegression(C=1 / (2 * lam * count), fit_intercept=False, tol=1e-10, max_iter=10_000)
    ones = FunctionTransformer(lambda x: np.c_[x, np.ones(len(x))])
    return OneVsRestClassifier(make_pipeline(*before, ones, model))


@pytest.mark.slow
def test_scores_are_scikit_learns_pipeline_per_group_and_fold(key):
    xs, ys, data = uneven()
    found = mj.multiclass.cross_validate(data, logistic, GRID, key=key, standardize="task", **EXACT)
    part = np.asarray(data.folds(jax.random.fold_in(key, 0), FOLDS))
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for fold, (fit, held) in enumerate(PredefinedSplit(part[t, : len(x)]).split()):
            for c, lam in enumerate(LAMS):
                model = pipeline(lam, len(fit), StandardScaler()).fit(x[fit], y[fit])
                want = log_loss(y[held], model.predict_proba(x[held]), labels=range(4))
                np.testing.assert_allclose(found.task_scores[0, fold, c, t], want, rtol=2e-4)
    # And of all data: a model in the units that the samples had.
    assert found.solution is not None
    assert found.solution.scaling == data.standardized("task").scaling
    model = pipeline(LAMS[found.best], len(ys[1]), StandardScaler()).fit(xs[1], ys[1])
    np.testing.assert_allclose(
        found.solution.predict_proba(data)[1, : len(ys[1])], model.predict_proba(xs[1]), atol=1e-4
    )


@pytest.mark.parametrize("by", ["make", pytest.param("data", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_global_model_is_scored_on_the_tasks_of_others(key, by):
    xs, ys, data = uneven()
    how: dict[str, Any] = dict(key=key, **EXACT, refit=False)
    if by == "make":  # pools what is standardised
        found = mj.multiclass.cross_validate(data, lambda d: logistic(d.pooled()), GRID, standardize="pooled", **how)
    else:
        found = mj.multiclass.cross_validate(
            data.pooled(), logistic, GRID, standardize="task", scored_as=data, **how
        )  # of one task
    part = np.asarray(data.folds(jax.random.fold_in(key, 0), FOLDS))
    parts = [part[t, : len(x)] for t, x in enumerate(xs)]
    for fold in range(FOLDS):
        x, y = (np.concatenate([a[p != fold] for a, p in zip(each, parts, strict=True)]) for each in (xs, ys))
        model = pipeline(LAMS[1], len(y), StandardScaler()).fit(x, y)
        for t, own in enumerate(parts):
            want = log_loss(ys[t][own == fold], model.predict_proba(xs[t][own == fold]), labels=range(4))
            np.testing.assert_allclose(found.task_scores[0, fold, 1, t], want, rtol=5e-4)


@pytest.mark.slow
def test_paths_standardise_too():
    _, _, data = uneven()
    path = mj.multiclass.lambda_path(data, logistic, GRID, standardize="within", tol=1e-6)
    again = mj.multiclass.lambda_path(data.standardized("within"), logistic, GRID, tol=1e-6)
    for one, other in zip(path, again, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_allclose(one.error_rate(data), other.error_rate(data.standardized("within")))
    assert path[0].scaling == data.standardized("within").scaling


@pytest.mark.slow
def test_labels_are_never_centred_and_a_function_does_as_the_name(key):
    data = packed()

    def squared(data):
        return mj.Problem(data, L.Squared(), R.Independent(1.0))

    def own(training):
        real = (training.weight > 0)[..., None].astype(training.x.dtype)
        mean = (training.x * real).sum((0, 1), keepdims=True) / real.sum()
        scale = (((training.x - mean) ** 2 * real).sum((0, 1), keepdims=True) / real.sum()) ** 0.5
        return lambda data: data.replace(x=(data.x - mean) / scale)

    named, mine = (
        mj.multiclass.cross_validate(data, squared, GRID, key=key, folds=2, standardize=how, tol=1e-8, max_rounds=2000)
        for how in ("pooled", own)
    )
    np.testing.assert_allclose(mine.task_scores, named.task_scores, rtol=1e-9)
    assert named.solution is not None
    assert mine.solution is not None
    np.testing.assert_allclose(mine.solution.weights, named.solution.weights, atol=1e-6)
