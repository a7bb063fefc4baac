"""Metrics against scikit-learn, task by task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as theirs

import mocha_jax as mj
from mocha_jax._selection import preparation
from tests import zoo

ours = mj.metrics


def halves(ys):
    """Labels that are numbers, grades 0 to 3, and counts, made of those that are signs."""
    rng = np.random.default_rng(3)
    return {
        "signs": ys,
        "numbers": [rng.normal(size=y.shape) + 20.0 for y in ys],
        "grades": [rng.integers(0, 4, y.shape).astype(float) for y in ys],
    }


# Ours, of which labels, and theirs of labels and predictions.
SCORES = {
    "error_rate": (ours.error_rate, "signs", lambda y, z: np.mean(z * y <= 0)),
    "balanced_error": (ours.balanced_error, "signs", lambda y, z: 1 - theirs.balanced_accuracy_score(y, np.sign(z))),
    "f1": (ours.f1, "signs", lambda y, z: theirs.f1_score(y, np.sign(z), pos_label=1)),
    "log_loss": (ours.log_loss, "signs", lambda y, z: theirs.log_loss(y, 1 / (1 + np.exp(-z)))),
    "auc": (ours.auc, "signs", theirs.roc_auc_score),
    "average_precision": (ours.average_precision, "signs", theirs.average_precision_score),
    "ndcg": (ours.ndcg, "grades", lambda y, z: theirs.ndcg_score(y[None], z[None])),
    "ndcg of three": (lambda *a, **k: ours.ndcg(*a, top=3, **k), "grades", lambda y, z: theirs.ndcg_score(y[None], z[None], k=3)),
    "rmse": (ours.rmse, "numbers", lambda y, z: np.sqrt(theirs.mean_squared_error(y, z))),
    "absolute_error": (ours.absolute_error, "numbers", theirs.mean_absolute_error),
    "r2": (ours.r2, "numbers", theirs.r2_score),
    "explained_variance": (ours.explained_variance, "numbers", theirs.explained_variance_score),
    "poisson_deviance": (ours.poisson_deviance, "grades", lambda y, z: theirs.mean_poisson_deviance(y, np.exp(z))),
}  # fmt: skip


@pytest.mark.parametrize("owner", [None, [0, 1, 1, 2, 0]], ids=["a node a task", "shared"])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.thin(13)
def test_against_scikit_learn(name, owner):
    score, kind, expected = SCORES[name]
    xs, ys = zoo.ragged(low=10, high=30)
    ys = halves(ys)[kind]
    data = mj.pack_tasks(xs, ys, task=owner).pad(nodes=7, rows=33)
    owner = np.arange(5) if owner is None else np.asarray(owner)
    w = np.random.default_rng(0).normal(size=(owner.max() + 1, 4))
    w[0] = np.round(w[0])
    xs = [np.round(x) if t == 0 else x for t, x in zip(owner, xs, strict=True)]  # predictions that are ties
    data = mj.pack_tasks(xs, ys, task=None if (owner == np.arange(5)).all() else owner).pad(nodes=7, rows=33)
    want = []
    for t in range(owner.max() + 1):
        x, y = (np.concatenate([a[k] for k in np.flatnonzero(owner == t)]) for a in (xs, ys))
        z = x @ w[t]
        if t == 0 and kind == "signs" and name not in ("auc", "average_precision", "log_loss"):
            z = np.where(z == 0, -y, z)  # exactly 0 is wrong
        want.append(expected(y, z))
    np.testing.assert_allclose(score(jnp.asarray(w), data, per_task=True), want, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(score)(jnp.asarray(w), data), np.mean(want), rtol=1e-10)


def test_ties_one_class_and_global_weights():
    data = mj.pack_tasks([np.ones((4, 1)), np.arange(3.0)[:, None]], [np.array([1.0, -1, 1, -1]), np.ones(3)])
    one = jnp.ones((1, 1))
    scores = ours.auc(one, data, per_task=True)
    assert scores[0] == 0.5
    assert np.isnan(scores[1])
    assert ours.auc(one, data) == 0.5
    assert ours.error_rate(one, data, per_task=True).tolist() == [0.5, 1 / 3]
    assert ours.balanced_error(one, data) == 0.5
    assert np.isnan(ours.balanced_error(one, data, per_task=True)).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"weights must be an array \[2, 1\]"):
        ours.error_rate(jnp.ones((3, 1)), data)


@pytest.mark.slow
def test_a_task_that_says_nothing_of_a_score_has_none():
    xs = [np.array([[1.0], [2.0], [3.0]])] * 3
    data = mj.pack_tasks(xs, [np.full(3, -1.0), np.array([-1.0, 1.0, 1.0]), np.full(3, 1.0)], dtype="float32")
    w = np.full((3, 1), 0.7, np.float32)
    for score, missing in (
        (ours.f1, [True, False, False]), (ours.average_precision, [True, False, False]), (ours.ndcg, [True, False, False]),
        (ours.balanced_error, [True, False, True]), (ours.r2, [True, False, True]), (ours.explained_variance, [True, False, True]),
    ):  # fmt: skip
        scores = np.asarray(score(w, data, per_task=True))
        assert np.isnan(scores).tolist() == missing, score
        np.testing.assert_allclose(score(w, data), np.nanmean(scores), rtol=1e-6)
    constant = mj.pack_tasks([np.ones((11, 1))] * 3, [np.full(11, 20.1)] * 3, dtype="float32")  # whose mean is rounded
    assert np.isnan(ours.r2(w, constant, per_task=True)).all()
    empty = data.keep(jnp.asarray(np.arange(3)[:, None] != 1) & jnp.ones((3, 3), bool))
    for score, _, _ in SCORES.values():
        if score is not ours.poisson_deviance:
            assert np.isnan(score(w, empty, per_task=True)[1]), score


@pytest.mark.parametrize("owner", [None, [0, 1, 1, 2, 0]])
@pytest.mark.slow
def test_predictions_that_are_not_numbers_are_never_good(owner):
    xs, ys = zoo.ragged(low=10, high=30)
    data = mj.pack_tasks(xs, ys, task=owner).pad(nodes=7, rows=33)
    positive = data.replace(y=jnp.maximum(data.y, 0.0))
    w = jnp.ones((data.num_tasks, 4)).at[1].set(jnp.nan)
    for score, _, _ in SCORES.values():
        seen = positive if score is ours.poisson_deviance else data
        assert np.isnan(score(w, seen, per_task=True)).tolist() == [t == 1 for t in range(data.num_tasks)]
        assert np.isnan(score(w, seen))


def test_labels_that_a_score_would_say_nonsense_of_are_refused_by_task():
    x, y, names = np.eye(4), np.array([1.0, -1.0, 0.0, 1.0]), ["oak", "oak", "elm", "elm"]
    data, w = mj.pack_tasks(x, y, names), jnp.ones((2, 4))
    for score in (ours.error_rate, ours.balanced_error, ours.f1, ours.log_loss):
        with pytest.raises(
            ValueError, match=rf"{score.__name__}: data must have labels -1 and \+1 .*, but task 'elm' has label 0"
        ):
            score(w, data)
        assert jax.jit(score)(w, data).shape == ()
        assert score(w, data.keep(data.y != 0)).shape == ()
    assert np.isfinite(ours.ndcg(w, data))
    for score, needs in ((ours.poisson_deviance, "labels from 0 up"), (ours.ndcg, r"labels from 0 up, or -1 and \+1")):
        with pytest.raises(ValueError, match=f"{score.__name__}: data must have {needs}, but task 'oak' has label -3"):
            score(w, data.replace(y=3.0 * data.y))


@pytest.mark.slow
def test_scores_know_what_a_model_predicts():
    xs, ys = zoo.ragged()
    data = mj.pack_tasks(xs, ys)
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    hinge = mj.solve(problem, max_rounds=3, tol=None)
    with pytest.raises(ValueError, match="log_loss: weights must be those of a model that has probabilities"):
        ours.log_loss(hinge, data)
    with pytest.raises(ValueError, match="absolute_error: loss must be given"):
        ours.absolute_error(hinge, data)
    logistic = mj.solve(problem.replace(loss=mj.losses.Logistic()), max_rounds=3, tol=None)
    np.testing.assert_allclose(
        ours.log_loss(logistic, data), ours.mean_loss(logistic, data, mj.losses.Logistic()), rtol=1e-12
    )


@pytest.mark.slow
def test_cross_validation_knows_which_way_each_is_better():
    x = np.random.default_rng(0).normal(size=(30, 2))
    data = mj.pack_tasks([x], [np.sign(x[:, 0])])
    right, wrong = np.array([[1.0, 0.0]]), np.array([[-1.0, 0.5]])
    for name, score in preparation.METRICS.items():
        more = score in preparation.MORE_IS_BETTER
        seen = data.replace(y=jnp.maximum(data.y, 0.0)) if name == "poisson_deviance" else data
        of_the_loss = (mj.losses.SmoothedHinge(),) if score in preparation.OF_THE_LOSS else ()
        good, bad = (float(score(w, seen, *of_the_loss)) for w in (right, wrong))
        assert (good > bad) == more, name
        assert good != bad, name


@pytest.mark.slow
def test_cross_validation_chooses_by_name():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(30, 3)) for _ in range(3)]
    data = mj.pack_tasks(xs, [x[:, 0] for x in xs], loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
    lams = mj.grid(mj.regularizers.Independent, lam=[30.0, 0.03, 0.01])
    with pytest.warns(UserWarning, match="lam=0.01 is the smallest tried"):
        found = mj.cross_validate(problem, lams, folds=3, metric="r2", refit=False)
    assert (found.metric, found.best) == ("r2", 2)
