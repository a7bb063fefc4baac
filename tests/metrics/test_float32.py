"""Every score in float32, JAX's default, beside scikit-learn's in float64, on tasks of one to very many samples."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import expit
from sklearn import metrics as theirs

import mocha_jax as mj

ours, several = mj.metrics, mj.multiclass
LEVELS = mj.losses.Ordinal([-1.0, 0.0, 1.0])


def signs(rng, n):
    """Predictions, a third of them ties, and labels that they say something of."""
    z = rng.normal(size=n)
    y = np.where(z + rng.normal(size=n) > 0, 1.0, -1.0)
    return np.where(rng.random(n) < 0.3, np.round(z) + 0.5, z), y


def far_from_zero(rng, n):
    y = 1e4 + rng.normal(size=n)
    return y + 0.5 * rng.normal(size=n), y


def grades(rng, n):
    """Gains from 0 to 4, of about thirty samples."""
    z = rng.normal(size=n)
    y = np.clip(np.round(z + rng.normal(size=n)), 0.0, 4.0)
    return np.where(rng.random(n) < 0.3, np.round(z), z), np.where(rng.random(n) < 30 / n, y, 0.0)


def levels(rng, n):
    """Levels from 0 to 3, all but about thirty of them 3."""
    z = 1.5 * rng.normal(size=n)
    y = np.clip(np.round(z + 0.7 * rng.normal(size=n) + 1.5), 0.0, 3.0)
    rare = rng.random(n) < 30 / n
    return np.where(rare, z, 2.0), np.where(rare, y, 3.0)


def counts(rng, n):
    """Counts from 0 to about 10^7 of rates that are mostly well known."""
    z = rng.uniform(-3.0, np.log(1e7), n)
    return z, rng.poisson(np.exp(z + 0.3 * rng.normal(size=n) * (rng.random(n) < 0.2))).astype(float)


def both_classes(score):
    return lambda y, z: score(y, z) if len(set(y)) == 2 else np.nan


def varied(score):
    return lambda y, z: score(y, z) if len(set(y)) > 1 else np.nan


def any_of(score):
    return lambda y, z: score(y, z) if y.max() > 0 else np.nan


def gain(y, z, k=None):
    return theirs.ndcg_score(y[None], z[None], k=k) if len(y) > 1 else 1.0


def agreement(y, z):
    decided = np.digitize(z, [-1.0, 0.0, 1.0])
    if len({*y, *decided}) == 1:
        return np.nan
    return theirs.cohen_kappa_score(y.astype(int), decided, weights="quadratic")


# Ours, of which samples, and theirs of labels and predictions.
SCORES: dict[str, tuple[Any, Any, Any]] = {
    "error_rate": (ours.error_rate, signs, lambda y, z: np.mean(z * y <= 0)),
    "balanced_error": (ours.balanced_error, signs, both_classes(lambda y, z: 1 - theirs.balanced_accuracy_score(y, np.sign(z)))),
    "f1": (ours.f1, signs, any_of(lambda y, z: theirs.f1_score(y, np.sign(z)))),
    "log_loss": (ours.log_loss, signs, lambda y, z: theirs.log_loss(y, expit(z), labels=[-1, 1])),
    "auc": (ours.auc, signs, both_classes(theirs.roc_auc_score)),
    "average_precision": (ours.average_precision, signs, any_of(theirs.average_precision_score)),
    "ndcg": (ours.ndcg, grades, any_of(gain)),
    "ndcg of 50": (partial(ours.ndcg, top=50), grades, any_of(lambda y, z: gain(y, z, 50))),
    "rmse": (ours.rmse, far_from_zero, theirs.root_mean_squared_error),
    "absolute_error": (ours.absolute_error, far_from_zero, theirs.mean_absolute_error),
    "mean_loss": (partial(ours.mean_loss, loss=mj.losses.Squared()), far_from_zero, lambda y, z: 0.5 * theirs.mean_squared_error(y, z)),
    "r2": (ours.r2, far_from_zero, varied(lambda y, z: theirs.r2_score(y, z))),
    "explained_variance": (ours.explained_variance, far_from_zero, varied(lambda y, z: theirs.explained_variance_score(y, z))),
    "quadratic_kappa": (partial(ours.quadratic_kappa, loss=LEVELS), levels, agreement),
    "poisson_deviance": (ours.poisson_deviance, counts, lambda y, z: theirs.mean_poisson_deviance(y, np.exp(z))),
}  # fmt: skip
SIZES = [(1, 2, 7, 60, 1000), pytest.param((30, 200_000), marks=pytest.mark.extended)]


@pytest.mark.parametrize("sizes", SIZES, ids=["small", "large"])
@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_scikit_learns(name, sizes):
    score, made, expected = SCORES[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        zs, ys = zip(*([a.astype(np.float32) for a in made(rng, n)] for n in sizes), strict=True)
        data = mj.pack_tasks([z[:, None] for z in zs], list(ys)).pad(rows=max(sizes) + 1)
        found = score(np.ones((1, 1), np.float32), data, per_task=True)
    assert found.dtype == np.float32
    want = [expected(y.astype(float), z.astype(float)) for y, z in zip(ys, zs, strict=True)]
    # What the rounding of a rate of ten million changes of its count's deviance is the most.
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=["small", "large"])
def test_scores_of_several_classes_are_scikit_learns(sizes):
    rng, names = np.random.default_rng(0), range(3)
    zs = [rng.normal(size=(n, 3)).astype(np.float32) for n in sizes]
    ys = [np.argmax(z + rng.normal(size=z.shape), axis=1) for z in zs]
    guesses = [z.argmax(axis=1) for z in zs]
    with jax.enable_x64(False):
        data = mj.pack_tasks(zs, [y.astype(np.float32) for y in ys]).pad(rows=max(sizes) + 1)
        w = np.eye(3, dtype=np.float32)[:, None]
        errors, losses = (score(w, data, per_task=True) for score in (several.error_rate, several.log_loss))
        table, scores = several.confusion(w, data, per_task=True), several.class_scores(w, data, per_task=True)
    for t, (z, y, guess) in enumerate(zip(zs, ys, guesses, strict=True)):
        p = expit(z.astype(float))
        p /= p.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(errors[t], np.mean(y != guess), rtol=2e-6)
        np.testing.assert_allclose(losses[t], theirs.log_loss(y, p, labels=names), rtol=2e-6)
        np.testing.assert_array_equal(table[t], theirs.confusion_matrix(y, guess, labels=names))
        want = theirs.precision_recall_fscore_support(y, guess, labels=names, zero_division=np.nan)
        for found, their in zip(jax.tree.leaves(scores), want, strict=True):
            np.testing.assert_allclose(found[t], their, rtol=2e-6)


@pytest.mark.slow
def test_more_samples_than_float32_counts():
    count = 2**24 + 5
    with jax.enable_x64(False):
        x = np.ones((1, count, 1), np.float32)
        data = mj.pack_tasks(x, [np.r_[-np.ones(3, np.float32), np.ones(count - 3, np.float32)]])
        w = np.ones((1, 1), np.float32)
        assert float(ours.error_rate(-w, data)) == pytest.approx((count - 3) / count, abs=1.2e-7)
        assert float(ours.balanced_error(w, data)) == 0.5
        assert float(ours.auc(w, data)) == 0.5
        classes = data.replace(y=np.maximum(data.y, 0.0))
        scores = several.class_scores(np.stack([-w, w]), classes)
    assert scores.samples.tolist() == [3, count - 3]
    np.testing.assert_allclose(scores.precision, [np.nan, (count - 3) / count], rtol=1e-6)
