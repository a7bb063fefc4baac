"""One class against the rest, beside scikit-learn."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

import mocha_jax as mj
from mocha_jax.multiclass._one_vs_rest import trained
from tests.multiclass.problems import CLASSES, NAMES, hinge, logistic, named, packed, ragged


def test_local_models_are_scikit_learns():
    (xs, ys), lam = ragged(), 0.02
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    found = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Hinge(), mj.regularizers.Independent(lam)), tol=1e-9, max_rounds=5000
    )
    assert (found.certificate.relative_gap <= 1e-9).all()
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        svm = LinearSVC(loss="hinge", fit_intercept=False, C=1 / (2 * lam * len(y)), tol=1e-9, max_iter=1_000_000)
        theirs = OneVsRestClassifier(svm).fit(x, y)
        w = np.stack([e.coef_[0] for e in theirs.estimators_])
        np.testing.assert_allclose(found.weights[:, t], w, atol=2e-4)
        np.testing.assert_array_equal(found.predict(data)[t, : len(y)], theirs.predict(x))
        np.testing.assert_allclose(found.error_rate(data, per_task=True)[t], (theirs.predict(x) != y).mean())


@pytest.mark.slow
def test_a_class_that_a_task_has_not_seen_is_no_trouble():
    xs, ys = ragged()
    ys[1] = np.minimum(ys[1], 1)
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=True)
    found = mj.one_vs_rest(
        data, lambda d: mj.Problem(d, mj.losses.Logistic(), mj.regularizers.Probabilistic(1e-2)), classes=5
    )
    assert found.weights.shape == (5, 3, 6)
    assert bool(jnp.isfinite(found.weights).all())
    assert int(found.predict(data).max()) <= 3


@pytest.mark.slow
def test_a_model_that_is_not_a_number_has_no_error_rate():
    xs, ys = ragged()
    data = mj.pack_tasks(xs, ys)
    found = mj.one_vs_rest(data, lambda d: mj.Problem(d, mj.losses.Hinge(), mj.regularizers.Independent(1.0)), tol=1.0)
    spoilt = found.replace(weights=found.weights.at[2, 1].set(jnp.nan))
    assert np.isnan(spoilt.error_rate(data, per_task=True)).tolist() == [False, True, False]
    np.testing.assert_array_equal(
        spoilt.error_rate(data, per_task=True)[::2], found.error_rate(data, per_task=True)[::2]
    )


def test_what_is_no_class_is_said():
    xs, ys = ragged()
    data = mj.pack_tasks(xs, [np.where(y > 0, 1, -1) for y in ys])

    def make(data):
        return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))

    with pytest.raises(ValueError, match="labels must be 0, 1"):
        mj.one_vs_rest(data, make)
    with pytest.raises(ValueError, match="classes must be an integer >= 4"):
        mj.one_vs_rest(mj.pack_tasks(xs, ys), make, classes=2)


def programs():
    """How many were compiled for the models."""
    compiled: list[Any] = list(trained._by_most.values())
    return sum(program._cache_size() for program in compiled)


@pytest.mark.slow
def test_a_model_is_trained_by_what_make_says_now():
    # A function that is asked inside of compiled programs is not asked again.
    lam, data = 1.0, packed()

    def make(data):
        return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(lam))

    strong = mj.one_vs_rest(data, make)
    compiled, lam = programs(), 1e-3
    weak = mj.one_vs_rest(data, make)
    assert jnp.linalg.norm(weak.weights) > 2 * jnp.linalg.norm(strong.weights)
    assert programs() == compiled  # and nothing is compiled anew


def test_samples_are_there_once_whatever_make_does_to_them():
    from mocha_jax.multiclass._each_class import each_class

    data = packed()
    each, _ = each_class("t", data, lambda d: hinge(d.replace(x=2 * d.x)), 4)
    assert [a.shape for a in each.own if a is not None] == [(4, *data.y.shape)]
    with pytest.raises(ValueError, match="of one kind for all classes"):
        each_class("t", data, lambda d: hinge(d) if d.y[0, 0] > 0 else logistic(d), 4)
    with pytest.raises(ValueError, match="must have the rows of the data"):
        each_class("t", data, lambda d: hinge(d.pad(rows=60)), 4)


@pytest.mark.slow
def test_weights_may_depend_on_the_class():
    # Twice the weight of positive samples is twice the loss of theirs.
    data = packed()

    def make(d):
        return hinge(d.replace(weight=d.weight * jnp.where(d.y > 0, 2.0, 1.0)))

    found = mj.one_vs_rest(data, make, tol=1e-8, max_rounds=3000)
    alone = mj.solve(make(data.replace(y=jnp.where(data.y == 2, 1.0, -1.0))), tol=1e-8, max_rounds=3000)
    np.testing.assert_allclose(found.weights[2], alone.weights, atol=1e-5)


@pytest.mark.slow
def test_tasks_and_features_are_found_by_name():
    data, table, labels, groups = named()
    found = mj.one_vs_rest(data, logistic)
    assert found.names == data.names
    other = np.isin(groups, ["oak", "fir"])
    turned = table[other][list("ecadb")]
    part = mj.pack_tasks(turned, labels[other], groups[other], like=data)
    assert part.names.tasks == data.names.tasks
    # Packed by itself: columns in another order; then fewer tasks in another order.
    turned = mj.pack_tasks(table[list("ecadb")], labels, groups, intercept=True)
    for known in (found, found.model):
        np.testing.assert_allclose(
            mj.multiclass.log_loss(known, turned), mj.multiclass.log_loss(found.weights, data), rtol=1e-9
        )
    subset = mj.pack_tasks(
        {n: np.asarray(table[groups == n]) for n in ("oak", "fir")},
        {n: np.searchsorted(CLASSES, labels[groups == n]) for n in ("oak", "fir")}, intercept=True,
    )  # fmt: skip
    errors = found.error_rate(data, per_task=True)
    where = [data.names.tasks.index(name) for name in ("oak", "fir")]
    np.testing.assert_allclose(found.error_rate(subset, per_task=True), errors[np.array(where)])
    values = found.decision_function(subset)
    np.testing.assert_allclose(values[0, :3], found.decision_function(data)[where[0], :3], rtol=1e-12)
    np.testing.assert_allclose(found.error_rate(part, per_task=True)[np.array(where)], errors[np.array(where)])
    with pytest.raises(ValueError, match="it has an intercept, and the data was packed without one"):
        found.predict(mj.pack_tasks(table, labels, groups))
    without = mj.one_vs_rest(packed(), hinge)
    np.testing.assert_array_equal(without.predict(packed(intercept=True)), without.predict(packed()))
    scaled = mj.one_vs_rest(data.standardized("task"), hinge)  # and in the units of the table again
    np.testing.assert_array_equal(scaled.predict(data), scaled.predict(data.standardized("task")))
    np.testing.assert_allclose(
        scaled.decision_function(data), scaled.decision_function(data.standardized("task")), rtol=1e-6, atol=1e-6
    )
    strange = data.exchange(names=data.names.replace(classes=("high", "low", "mid", "x")))
    with pytest.raises(ValueError, match="the data's classes are not those of the model"):
        found.error_rate(strange)


@pytest.mark.slow
def test_names_are_no_part_of_programs():
    data, table, labels, groups = named()
    mj.one_vs_rest(data, logistic).predict(data)
    before = programs()
    renamed = mj.pack_tasks(table, labels, [name[::-1] for name in groups], loss_scaling="task_mean", intercept=True)
    assert renamed.x.shape == data.x.shape
    found = mj.one_vs_rest(renamed, logistic)
    assert programs() == before
    assert found.model.tasks == tuple(sorted(name[::-1] for name in NAMES))


@pytest.mark.slow
def test_a_global_model_predicts_for_every_task():
    data = packed()
    found = mj.one_vs_rest(data, lambda d: hinge(d.pooled()))
    assert found.weights.shape == (4, 1, 5)
    assert found.predict(data).shape == data.y.shape
    assert found.model.predict(data.x[0]).tolist() == found.predict(data)[0].tolist()


@pytest.mark.slow
def test_classes_that_did_not_converge_are_said_by_name():
    data, *_ = named()

    low = jnp.where(data.y == 1, 1.0, -1.0)

    def make(d):  # without samples that count, the model of one class is there at once
        return hinge(d.replace(weight=0.0 * d.weight) if (d.y == low).all() else d)

    with pytest.warns(mj.NotConverged) as caught:
        mj.one_vs_rest(data, make, tol=1e-9, max_rounds=3)
    (warning,) = caught
    assert re.match(
        r"one_vs_rest: classes high \(.*\), mid \(.*\), none \(.*\) did not reach tol=1e-09 in max_rounds=3 rounds, by the "
        r"residual in brackets, and are as far as they got; raise max_rounds.",
        str(warning.message),
    )


def test_labels_of_several_classes_lead_to_it():
    with pytest.raises(ValueError, match=r"labels -1 and \+1; for classes 0, 1, ..., 3 use one_vs_rest\(data, make\)"):
        hinge(packed())
    with pytest.raises(ValueError, match="map yours, e.g. with np.where"):
        hinge(packed().replace(y=(packed().y > 0).astype(float)))
