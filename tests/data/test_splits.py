"""Folds and splits deal every sample once."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mocha_jax as mj
from tests import zoo
from tests.selection.problems import regression

R = mj.regularizers


@given(
    sizes=st.lists(st.integers(1, 17), min_size=3, max_size=3).filter(lambda sizes: max(sizes) >= 5),
    count=st.integers(2, 5),
    seed=st.integers(0, 9),
)
@pytest.mark.slow
def test_folds_deal_every_sample_once_and_evenly(sizes, count, seed):
    rng = np.random.default_rng(seed)
    data = mj.pack_tasks([rng.normal(size=(n, 2)) for n in sizes], [np.sign(rng.normal(size=n)) for n in sizes])
    data = data.pad(rows=17)
    part = np.asarray(data.folds(jax.random.key(seed), count))
    real = np.asarray(data.weight) > 0
    assert (part[~real] == -1).all()
    assert ((part[real] >= 0) & (part[real] < count)).all()
    for t in range(3):
        held = np.bincount(part[t, real[t]], minlength=count)
        assert held.max() - held.min() <= 1
        for label in (-1.0, 1.0):  # each class as evenly as whole samples allow
            of_class = np.bincount(part[t, real[t] & (np.asarray(data.y[t]) == label)], minlength=count)
            assert of_class.max() - of_class.min() <= 1
    more = data.pad(rows=20)
    np.testing.assert_array_equal(more.folds(jax.random.key(seed), count)[:, : real.shape[1]], part)


def test_groups_stay_together_and_are_dealt_evenly(key):
    data = zoo.data(m=3, low=20, high=20)
    groups = np.arange(20)[None] // 4 + np.zeros((3, 1), int)
    part = np.asarray(data.folds(key, 5, groups))
    for t in range(3):
        assert sorted(part[t, ::4].tolist()) == [0, 1, 2, 3, 4]
        assert (part[t].reshape(5, 4) == part[t, ::4][:, None]).all()
    assert (part != np.asarray(data.folds(jax.random.key(1), 5, groups))).any()
    with pytest.raises(ValueError, match=r"groups must be integers \[m, n\]"):
        data.folds(key, 5, np.zeros(3, int))
    with pytest.raises(ValueError, match="count"):
        data.folds(key, 1)


def test_there_are_no_more_folds_than_the_largest_task_has_samples(key):
    xs = [np.ones((n, 1)) for n in (2, 1, 3)]
    data = mj.pack_tasks(xs, [np.ones(len(x)) for x in xs], task=[0, 1, 1]).pad(rows=9)
    assert set(np.asarray(data.folds(key, 4)).ravel().tolist()) == {-1, 0, 1, 2, 3}
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(1.0))
    message = "there must be at most 4 folds, as many as the largest task has samples, got 1000000"
    with pytest.raises(ValueError, match=message):
        data.folds(key, 10**6)
    with pytest.raises(ValueError, match=message):
        mj.cross_validate(problem, mj.grid(R.Independent, lam=[1.0]), folds=10**6, metric="rmse")


@pytest.mark.slow
def test_kept_rows_are_the_problem_of_those_rows(key):
    # The weights follow task means; other weights stay in proportion; padding changes nothing.
    for scaling in ("sum", "task_mean"):
        data = zoo.data(m=3, d=2, low=8, high=12, loss_scaling=scaling)
        part = data.folds(key, 4)
        kept = data.keep(part != 1)
        rows = [np.asarray(part[t] != 1) & (np.asarray(data.weight[t]) > 0) for t in range(3)]
        packed = mj.pack_tasks([data.x[t][r] for t, r in enumerate(rows)], [data.y[t][r] for t, r in enumerate(rows)],
                               loss_scaling=scaling)  # fmt: skip
        problems = (mj.Problem(d, mj.losses.Hinge(), R.MeanRegularized(0.1, 0.1)) for d in (kept, packed))
        a, b = (mj.solve(p, mj.Mocha(sigma_prime="per_task"), tol=1e-9) for p in problems)
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-4)
        assert a.primal == pytest.approx(b.primal, rel=1e-8)
    double = data.replace(weight=data.weight * 2.0).keep(part != 1)
    np.testing.assert_allclose(double.weight, 2.0 * kept.weight)


def test_numbers_are_split_regardless_of_their_values(key):
    # Scores of which a node has most once: by value, the rare ones would all go to the larger part.
    rng = np.random.default_rng(0)
    ys = [np.round(20 + 12 * rng.normal(size=60)) for _ in range(30)]
    data = mj.pack_tasks([np.ones((60, 1))] * 30, ys)
    spread = {}
    for stratify in (None, True):
        parts = data.split(key, 0.75, stratify=stratify)
        spread[stratify] = [np.std(np.asarray(p.y)[np.asarray(p.weight) > 0]) for p in parts]
    assert abs(spread[None][1] / spread[None][0] - 1) < 0.06
    assert spread[True][1] < 0.9 * spread[True][0]
    few = mj.pack_tasks([np.ones((40, 1))], [np.repeat(np.arange(20.0), 2)])
    train, _ = few.split(key, 0.5)
    assert sorted(np.asarray(train.y[0]).tolist()) == list(range(20))


def test_unstratified_splits_ignore_labels(key):
    data = mj.pack_tasks([np.ones((40, 1))], [np.repeat([-1.0, 1.0], 20)])
    counts = {int((data.split(jax.random.key(s), 0.5, stratify=False)[0].y > 0).sum()) for s in range(8)}
    assert len(counts) > 1
    assert data.split(key, 0.5, stratify=False)[0].sizes.tolist() == [20]


def test_folds_of_real_labels_are_random(key):
    data = regression()
    parts = [np.asarray(data.folds(jax.random.fold_in(key, i), 5)) for i in range(30)]
    real = np.asarray(data.weight) > 0
    # Two samples are together in a fold as often as chance has it, whether their labels are close or not.
    together = np.mean([p[:, :, None] == p[:, None, :] for p in parts], axis=0)
    for k in range(3):
        order = np.argsort(np.asarray(data.y[k])[real[k]])
        t = together[k][real[k]][:, real[k]][order][:, order]
        n = len(t)
        chance = (n / 5 - 1) / (n - 1)
        np.testing.assert_allclose(np.diag(t, 1).mean(), chance, atol=0.06)
        np.testing.assert_allclose(np.diag(t, 5).mean(), chance, atol=0.06)
    for p in parts:
        counts = [np.bincount(p[k][real[k]], minlength=5) for k in range(3)]
        assert all(c.max() - c.min() <= 1 for c in counts)


def test_folds_of_a_class_are_random(key):
    y = np.where(np.arange(60) < 20, 1.0, -1.0)
    data = mj.pack_tasks([np.ones((60, 1))], [y])
    parts = np.stack([np.asarray(data.folds(jax.random.fold_in(key, i), 5))[0] for i in range(60)])
    for label, count in ((1.0, 20), (-1.0, 40)):
        of_class = parts[:, y == label]
        dealt = np.stack([np.bincount(part, minlength=5) for part in of_class])
        assert (dealt == count // 5).all()
        neighbours = (of_class[:, 1:] == of_class[:, :-1]).mean()
        assert neighbours == pytest.approx((count / 5 - 1) / (count - 1), abs=0.04)
