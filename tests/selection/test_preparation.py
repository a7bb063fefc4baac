"""Features are standardised by what the training samples of a fold say, and nothing else."""

import jax
import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.model_selection import PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import mocha_jax as mj

LAMS = [0.3, 0.01]

pytestmark = pytest.mark.filterwarnings("ignore:cross_validate. the best candidate:UserWarning")


def federation(sizes=(24, 36)):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) * [1.0, 100.0, 0.01] + [0.0, 50.0, 7.0 * t] for t, n in enumerate(sizes)]
    ys = [x @ [1.0, 0.01, 50.0] + 10.0 * t + rng.normal(size=len(x)) for t, x in enumerate(xs)]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True)
    return mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0)), xs, ys


@pytest.mark.slow
def test_scores_are_scikit_learns_pipeline_per_task(key):
    problem, xs, ys = federation()
    found = mj.cross_validate(
        problem, mj.grid(mj.regularizers.Independent, lam=LAMS), key=key, folds=3, standardize="task", tol=1e-8,
        max_rounds=2000,
    )  # fmt: skip
    part = np.asarray(problem.data.folds(jax.random.fold_in(key, 0), 3))
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for fold, (fit, held) in enumerate(PredefinedSplit(part[t, : len(x)]).split()):
            for c, lam in enumerate(LAMS):
                model = make_pipeline(StandardScaler(), Ridge(alpha=2.0 * lam * len(fit))).fit(x[fit], y[fit])
                expected = np.sqrt(np.mean((model.predict(x[held]) - y[held]) ** 2))
                np.testing.assert_allclose(found.task_scores[0, fold, c, t], expected, rtol=1e-4)
    assert found.solution is not None
    scaling = found.solution.problem.data.scaling
    assert scaling is not None
    assert scaling.by == "task"
    assert mj.metrics.rmse(found.solution, problem.data) < 1.2


LABELS = {  # what to score of a residual loss, by what its labels are
    "classes": (lambda z: np.where(z > 1.0, 1.0, -1.0), ("error_rate", "balanced_error", "f1", "auc", "average_precision")),
    "grades": (lambda z: np.clip(np.round(z + 1.5), 0, 4), ("ndcg", "rmse", "r2", "explained_variance", "absolute_error")),
    "counts": (lambda z: np.round(np.exp(z)), ("poisson_deviance", "rmse")),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "how"), [("classes", "within"), ("grades", "task"), ("counts", "pooled")])
@pytest.mark.thin(1)
@pytest.mark.extended
def test_scores_are_of_the_labels_as_they_are(labels, how, key):
    """Every score within cross-validation is that of the model outside of it, whatever was standardised."""
    rng, (make, names) = np.random.default_rng(0), LABELS[labels]
    xs = [rng.normal(size=(40, 3)) + t for t in range(2)]
    data = mj.pack_tasks(xs, [make(x[:, 0] - t + 0.5 * rng.normal(size=40)) for t, x in enumerate(xs)], intercept=True)
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.3))

    def score(weights, data, per_task=False):  # one program for all
        found = [getattr(mj.metrics, name)(weights, data, per_task=per_task) for name in names]
        return sum((k + 1.0) * each for k, each in enumerate(found))

    found = mj.cross_validate(
        problem, mj.grid(mj.regularizers.Independent, lam=[0.3]), key=key, folds=2, metric=score, maximise=False,
        standardize=how, tol=1e-12, keep_rare=False, refit=False,
    )  # fmt: skip
    part = data.folds(jax.random.fold_in(key, 0), 2)
    for fold in range(2):
        train = data.keep(part != fold).standardized(how, labels=True)
        solution = mj.solve(problem.replace(data=train), tol=1e-12)
        np.testing.assert_allclose(
            found.task_scores[0, fold, 0], score(solution, data.keep(part == fold), per_task=True), rtol=1e-5
        )


@pytest.mark.slow
def test_a_function_of_ones_own_does_the_same_as_the_name(key):
    problem, *_ = federation()
    candidates = mj.grid(mj.regularizers.Independent, lam=LAMS)

    def whiten(training):
        real = (training.weight > 0)[..., None].astype(training.x.dtype)
        count = real.sum()
        mean = (training.x * real).sum((0, 1), keepdims=True) / count
        scale = (((training.x - mean) ** 2 * real).sum((0, 1), keepdims=True) / count) ** 0.5
        mean, scale = mean.at[..., -1].set(0.0), scale.at[..., -1].set(1.0)
        level = (training.y * real[..., 0]).sum() / count
        return lambda data: data.replace(x=(data.x - mean) / scale, y=data.y - level)

    named, own = (
        mj.cross_validate(problem, candidates, key=key, folds=3, standardize=how, tol=1e-6, refit=False)
        for how in ("pooled", whiten)
    )
    np.testing.assert_allclose(own.task_scores, named.task_scores, rtol=1e-4)


@pytest.mark.slow
def test_paths_and_tuning_standardise_too(key):
    problem, *_ = federation()
    train = problem.data
    candidates = mj.grid(mj.regularizers.Independent, lam=LAMS)
    path = mj.lambda_path(problem, candidates, standardize="within", tol=1e-6)
    standard = problem.replace(data=train.standardized("within", labels=True))
    again = mj.lambda_path(standard, candidates, tol=1e-6)
    np.testing.assert_array_equal(path.weights, again.weights)
    tuned = mj.tune(problem, standardize="within", folds=3, steps=2, key=key, tol=1e-10)
    assert tuned.problem.data.scaling == standard.data.scaling
    regularizer = jax.tree.map(lambda leaf: np.asarray(leaf)[None], problem.regularizer)
    found = mj.cross_validate(
        problem, regularizer, key=key, folds=3, standardize="within", metric="mean_loss", keep_rare=False, tol=1e-10,
    )  # fmt: skip
    np.testing.assert_allclose(tuned.history.losses[0], found.scores[0, :, 0], rtol=1e-8)


def test_mistakes_are_named():
    problem, *_ = federation()
    candidates = mj.grid(mj.regularizers.Independent, lam=LAMS)
    with pytest.raises(ValueError, match="cross_validate: standardize must be"):
        mj.cross_validate(problem, candidates, standardize="each")
    with pytest.raises(ValueError, match="standardize: what it returns must be a function"):
        mj.cross_validate(problem, candidates, standardize=lambda training: training)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="what is returned for data must be a TaskData"):
        mj.cross_validate(problem, candidates, standardize=lambda training: lambda data: data.x)  # type: ignore[arg-type,return-value]
