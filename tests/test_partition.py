"""Partitions deal every sample once, as skewed as they say."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from scipy import stats

from mocha_jax import partition


def check_parts(parts, count):
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))


@hypothesis.given(seed=st.integers(0, 99), count=st.integers(20, 200), clients=st.integers(1, 10))
@hypothesis.settings(max_examples=20)
def test_partitions_deal_every_sample_once(seed, count, clients):
    key, labels = jax.random.key(seed), np.random.default_rng(seed).integers(0, 4, count)
    for parts in (
        partition.iid(key, count, clients),
        partition.shards(key, labels, clients, 2),
        partition.dirichlet(key, labels, clients, 0.1, least=2),
        partition.quantity(key, count, clients, 1.5, least=2),
    ):
        assert len(parts) == clients
        check_parts(parts, count)
    assert min(map(len, partition.dirichlet(key, labels, clients, 0.01, least=2))) >= 2
    assert min(map(len, partition.quantity(key, count, clients, 3.0, least=2))) >= 2
    sizes = [len(p) for p in partition.iid(key, count, clients)]
    assert max(sizes) - min(sizes) <= 1
    check_parts(partition.by_group(labels), count)


def test_partitions_are_as_skewed_as_they_say(key):
    labels = np.repeat(np.arange(10), 600)
    classes = [len(set(labels[p].tolist())) for p in partition.shards(key, labels, 100)]
    assert max(classes) <= 3
    assert np.mean(classes) < 2.1
    even, uneven = (
        np.mean([np.bincount(labels[p], minlength=10).max() / max(len(p), 1) for p in partition.dirichlet(key, labels, 20, a)])
        for a in (100.0, 0.05)
    )  # fmt: skip
    assert even < 0.2 < 0.5 < uneven
    sizes = np.array([len(p) for p in partition.quantity(key, 100_000, 200, 1.0)])
    logs = np.log(sizes)
    assert abs(logs.std() - 1.0) < 0.15
    assert stats.kstest((logs - logs.mean()) / logs.std(), "norm").pvalue > 0.01
    groups = np.array([3, 1, 3, 3, 1])
    assert [p.tolist() for p in partition.by_group(groups)] == [[1, 4], [0, 2, 3]]


def test_what_cannot_be_dealt_is_refused(key):
    hidden = np.ma.masked_array([0, 1, 0, 1], [False, True, False, False])
    for deal, message in (
        (lambda: partition.quantity(key, 2**63, 3), "quantity: count must be an integer >= 1 and below"),
        (lambda: partition.shards(key, hidden, 2), "shards: 1 labels are masked"),
        (lambda: partition.by_group(hidden), "by_group: 1 labels are masked"),
        (lambda: partition.permuted(key, [hidden[None]]), "permuted: xs holds masked values"),
    ):
        with pytest.raises(ValueError, match=message):
            deal()


def test_permuted_features_differ_by_client_and_not_by_sample(key):
    x = np.random.default_rng(0).normal(size=(5, 30))
    first, second = partition.permuted(key, [x, x])
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, 1), np.sort(x, 1))
    order = np.argsort(np.argsort(x[0]))
    np.testing.assert_array_equal(np.argsort(np.argsort(first[0])).shape, order.shape)
    place = [int(np.flatnonzero(x[0] == v)[0]) for v in first[0]]
    np.testing.assert_array_equal(first, x[:, place])


def test_a_huge_concentration_is_even(key):
    sizes = [len(rows) for rows in partition.dirichlet(key, np.arange(60) % 3, 4, alpha=1e308)]
    assert sizes == [15, 15, 15, 15]


def test_partitions_say_what_is_wrong(key):
    with pytest.raises(ValueError, match="3 samples cannot be dealt into 4"):
        partition.iid(key, 3, 4)
    with pytest.raises(ValueError, match="cannot be dealt into 10 parts of 2"):
        partition.shards(key, np.arange(12), 10)
    with pytest.raises(ValueError, match="alpha must be"):
        partition.dirichlet(key, np.arange(12), 2, 0.0)
    with pytest.raises(ValueError, match="2 labels are NaN"):
        partition.dirichlet(key, np.array([0.0, np.nan, 1.0, np.nan]), 2)
    with pytest.raises(ValueError, match="flatten pictures"):
        partition.permuted(key, [np.zeros((3, 2, 2))])
    with pytest.raises(ValueError, match="key must be one JAX random key"):
        partition.iid(0, 3, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one label for every sample"):
        partition.by_group(np.zeros((2, 2)))
