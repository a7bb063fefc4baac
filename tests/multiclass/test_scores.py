"""Scores of several classes beside scikit-learn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit
from sklearn import metrics

import mocha_jax as mj
from tests.multiclass.problems import hinge, logistic, packed

WEIGHTS = np.random.default_rng(5).normal(size=(4, 3, 5))


def by_task(data, weights=WEIGHTS):
    """Labels, predicted classes and decision values of every task, by hand."""
    for t in range(data.num_tasks):
        real = (np.asarray(data.weight) > 0) & (np.asarray(data.task) == t)[:, None]
        x, y = np.asarray(data.x)[real], np.asarray(data.y)[real].astype(int)
        z = x @ weights[:, t].T
        yield y, z.argmax(1), z


def spread():
    """Tasks over more nodes than there are tasks."""
    data = packed()
    return data.append(data).replace(task=jnp.array([0, 1, 2, 1, 0, 2]))


DATA = {"a node a task": packed, "several nodes a task": spread}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.slow
def test_scores_are_scikit_learns(name):
    data, labels = DATA[name](), range(4)
    confusion = mj.multiclass.confusion(WEIGHTS, data, per_task=True)
    scores = mj.multiclass.class_scores(WEIGHTS, data, per_task=True)
    errors = mj.multiclass.error_rate(WEIGHTS, data, per_task=True)
    losses = mj.multiclass.log_loss(WEIGHTS, data, per_task=True)
    every = []
    for t, (y, guess, z) in enumerate(by_task(data)):
        every.append((y, guess))
        np.testing.assert_array_equal(confusion[t], metrics.confusion_matrix(y, guess, labels=labels))
        theirs = metrics.precision_recall_fscore_support(y, guess, labels=labels, zero_division=np.nan)
        for ours, their in zip(jax.tree.leaves(scores), theirs, strict=True):
            np.testing.assert_allclose(ours[t], their, rtol=1e-12)
        np.testing.assert_allclose(errors[t], (y != guess).mean())
        p = expit(z) / expit(z).sum(1, keepdims=True)
        np.testing.assert_allclose(losses[t], metrics.log_loss(y, p, labels=labels), rtol=1e-10)
    y, guess = (np.concatenate(a) for a in zip(*every, strict=True))
    np.testing.assert_array_equal(
        mj.multiclass.confusion(WEIGHTS, data), metrics.confusion_matrix(y, guess, labels=labels)
    )
    theirs = metrics.precision_recall_fscore_support(y, guess, labels=labels, zero_division=np.nan)
    together = mj.multiclass.class_scores(WEIGHTS, data)
    for ours, their in zip(jax.tree.leaves(together), theirs, strict=True):
        np.testing.assert_allclose(ours, their, rtol=1e-12)
    np.testing.assert_allclose(mj.multiclass.error_rate(WEIGHTS, data), np.mean(errors))
    assert str(together).splitlines()[0].split() == ["class", "precision", "recall", "f1", "samples"]
    assert len(str(together).splitlines()) == 5


@pytest.mark.slow
def test_a_model_has_the_scores_of_its_weights():
    data = packed()
    found = mj.one_vs_rest(data, logistic)
    w = found.weights
    np.testing.assert_array_equal(found.confusion(data, per_task=True), mj.multiclass.confusion(w, data, per_task=True))
    np.testing.assert_array_equal(found.scores(data).f1, mj.multiclass.class_scores(w, data).f1)
    np.testing.assert_array_equal(found.error_rate(data), mj.multiclass.error_rate(w, data))
    values = found.decision_function(data)
    for t, (_, guess, z) in enumerate(by_task(data, np.asarray(w))):
        np.testing.assert_allclose(values[t, : len(z)], z, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(found.predict(data)[t, : len(z)], guess)
        p = expit(z) / expit(z).sum(1, keepdims=True)
        np.testing.assert_allclose(found.predict_proba(data)[t, : len(z)], p, rtol=1e-9)


def test_a_model_that_is_not_a_number_has_no_scores():
    data = packed()
    spoilt = WEIGHTS.copy()
    spoilt[2, 1] = np.nan
    assert np.isnan(mj.multiclass.class_scores(spoilt, data, per_task=True).f1).all(1).tolist() == [False, True, False]
    assert np.isnan(mj.multiclass.log_loss(spoilt, data, per_task=True)).tolist() == [False, True, False]
    assert mj.multiclass.confusion(spoilt, data, per_task=True).sum((1, 2)).tolist() == [
        *data.sizes.tolist()[:1], 0, *data.sizes.tolist()[2:],
    ]  # fmt: skip


@pytest.mark.slow
def test_what_has_no_score_is_said():
    data = packed()
    found = mj.one_vs_rest(data, hinge)
    for ask in (found.predict_proba, lambda d: mj.multiclass.log_loss(found, d)):
        with pytest.raises(ValueError, match="models of this loss have no probabilities; use one_vs_rest with"):
            ask(data)
    for score in (mj.multiclass.confusion, mj.multiclass.log_loss):
        with pytest.raises(ValueError, match="data must have labels from 0 to 2, the classes that weights are of"):
            score(WEIGHTS[:3], data)
    # Of a class that no model knows: wrong, and without any probability.
    wrong = [(guess != y).mean() for y, guess, _ in by_task(data, WEIGHTS[:3])]
    np.testing.assert_allclose(mj.multiclass.error_rate(WEIGHTS[:3], data, per_task=True), wrong)
    assert jax.jit(lambda d: mj.multiclass.log_loss(WEIGHTS[:3], d))(data) == np.inf
    with pytest.raises(ValueError, match="weights must be of 3 tasks or of 1, got 2"):
        mj.multiclass.error_rate(WEIGHTS[:, :2], data)


@pytest.mark.parametrize("label", [-1.0, -3.0, 0.5])
def test_labels_that_are_no_classes_are_refused_by_task(label):
    m = mj.multiclass
    x, w = np.eye(3), np.eye(3)[:, None]
    data = mj.pack_tasks({"oak": x, "elm": x}, {"oak": np.arange(3.0), "elm": np.array([0.0, label, 2.0])})
    for score in (m.error_rate, m.log_loss, m.confusion, m.class_scores):
        with pytest.raises(ValueError, match=f"data must have labels .*, but task 'elm' has label {label:g}"):
            score(w, data)
        score(w, data.keep(data.y != label))
    # Inside of compiled code, where nobody can look, the sample is of no class.
    assert jax.jit(lambda d: m.error_rate(w, d, per_task=True))(data).tolist() == pytest.approx([0.0, 1 / 3])
    assert jax.jit(lambda d: m.log_loss(w, d))(data) == np.inf
    assert jax.jit(lambda d: m.confusion(w, d, per_task=True))(data)[1].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
