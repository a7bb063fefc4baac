"""Summaries over tasks against NumPy and SciPy, and intervals by how often they hold."""

import numpy as np
import pytest
import scipy.stats

import mocha_jax as mj

over_tasks = mj.metrics.over_tasks


def test_its_numbers_are_numpys():
    rng = np.random.default_rng(0)
    scores, sizes = rng.normal(size=40), rng.integers(1, 50, 40)
    scores[3] = np.nan
    kept, weights = np.delete(scores, 3), np.delete(sizes, 3)
    found = over_tasks(scores, sizes)
    assert found.count == 39
    assert found.mean == pytest.approx(kept.mean())
    assert found.weighted_mean == pytest.approx(np.average(kept, weights=weights))
    assert found.std == pytest.approx(scipy.stats.tstd(kept))
    np.testing.assert_allclose(found.quantiles, np.quantile(kept, [0.1, 0.25, 0.5, 0.75, 0.9]))
    assert found.worst_tenth == pytest.approx(np.sort(kept)[-4:].mean())
    assert found.best_tenth == pytest.approx(np.sort(kept)[:4].mean())
    more = over_tasks(scores, maximise=True)
    assert more.worst_tenth == pytest.approx(np.sort(kept)[:4].mean())
    assert (found.better, found.difference, found.difference_interval) == (None, None, None)


def test_differences_are_paired():
    rng = np.random.default_rng(1)
    hard = 10 * rng.normal(size=50)  # tasks differ far more than methods do
    ours, local = hard + rng.normal(size=50), hard + 1.0 + rng.normal(size=50)
    found = over_tasks(ours, baseline=local)
    assert found.difference == pytest.approx(np.mean(ours - local))
    assert found.difference is not None
    assert found.difference_interval is not None
    low, high = found.difference_interval
    assert low < found.difference < high < 0
    want = scipy.stats.t.interval(0.95, 49, np.mean(ours - local), scipy.stats.sem(ours - local))
    np.testing.assert_allclose((low, high), want, atol=0.12)
    assert found.better == pytest.approx(np.mean(ours < local))
    assert found.interval[1] - found.interval[0] > 3 * (high - low)
    assert over_tasks(-ours, baseline=-local, maximise=True).better == found.better
    assert over_tasks([1.0, 2.0], baseline=[1.0, 3.0]).better == 0.75


def test_intervals_hold_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    held = []
    for _ in range(200):
        tasks, seeds = rng.normal(size=30), rng.normal(size=(8, 1))
        low, high = over_tasks(tasks + 0.5 * seeds + rng.normal(size=(8, 30)), seed=1).interval
        held.append(low <= 0.0 <= high)
    assert 0.88 <= np.mean(held) <= 1.0


def test_seeds_count_once_each():
    scores = np.array([[1.0, 2.0, np.nan], [3.0, 4.0, np.nan]])
    found = over_tasks(scores)
    assert (found.count, found.mean) == (2, 2.5)
    assert found.interval[0] >= 1.0
    assert found.interval[1] <= 4.0


def test_it_reads_well():
    text = str(over_tasks([0.1, 0.2, 0.3, 0.2], baseline=[0.2, 0.3, 0.3, 0.5]))
    assert text.startswith("mean 0.2 [")
    assert "; better in 88 % of 4 tasks, by -0.125 [" in text


BAD = {
    "nothing": (lambda: over_tasks([np.nan, np.nan]), "scores has no number in it"),
    "three axes": (lambda: over_tasks(np.ones((2, 2, 2))), r"scores must be \[num_tasks\] or \[seeds, num_tasks\]"),
    "sizes": (lambda: over_tasks([1.0, 2.0], [1]), r"sizes must be \[2\] numbers >= 0"),
    "negative sizes": (lambda: over_tasks([1.0, 2.0], [1, -1]), r"sizes must be \[2\] numbers >= 0"),
    "another baseline": (lambda: over_tasks([1.0, 2.0], baseline=[1.0]), r"baseline must be shaped like scores"),
    "a gap in it": (lambda: over_tasks([1.0, 2.0], baseline=[1.0, np.nan]), "a score for every task"),
    "level": (lambda: over_tasks([1.0, 2.0], level=1.0), "level must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
