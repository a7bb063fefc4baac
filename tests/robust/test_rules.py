"""Rules against loops in NumPy written from the papers, and against Flower's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj

R = mj.robust
M, P = 13, 5


def some(seed=0, m=M, missing=3):
    """Vectors of clients, of which some did not answer and hold what must not be read."""
    rng = np.random.default_rng(seed)
    vectors, weights = rng.normal(size=(m, P)) * rng.uniform(0.5, 3.0, (m, 1)), rng.integers(1, 9, m).astype(float)
    away = rng.permutation(m)[:missing]
    vectors[away], weights[away] = np.nan, 0.0
    return vectors, weights


def oracle_trimmed(vectors, cut):
    columns = [np.sort(column)[cut : len(column) - cut] for column in vectors.T]
    return np.array([column.mean() for column in columns])


def oracle_scores(vectors, hostile):
    scores = []
    for i, v in enumerate(vectors):
        distances = sorted(np.sum((v - u) ** 2) for j, u in enumerate(vectors) if j != i)
        scores.append(sum(distances[: max(1, len(vectors) - hostile - 2)]))
    return np.array(scores)


def oracle_bulyan(vectors, hostile):
    left: list[np.ndarray] = list(vectors)
    chosen: list[np.ndarray] = []
    theta = len(vectors) - 2 * hostile
    while len(chosen) < theta:
        chosen.append(left.pop(int(np.argmin(oracle_scores(np.array(left), hostile)))))
    kept = np.array(chosen)
    median = np.median(kept, axis=0)
    near = np.argsort(np.abs(kept - median), axis=0, kind="stable")[: max(theta - 2 * hostile, 1)]
    return np.take_along_axis(kept, near, axis=0).mean(axis=0)


def oracle_geometric(vectors):
    from scipy.optimize import minimize

    return minimize(lambda z: np.linalg.norm(vectors - z, axis=1).sum(), vectors.mean(axis=0), method="BFGS",
                    options={"gtol": 1e-9}).x  # fmt: skip


CASES = {
    "mean": (R.Mean(), lambda v, w: w @ v / w.sum()),
    "median": (R.Median(), lambda v, w: np.median(v, axis=0)),
    "trimmed": (R.TrimmedMean(0.2), lambda v, w: oracle_trimmed(v, int(0.2 * len(v)))),
    "not trimmed": (R.TrimmedMean(0.0), lambda v, w: v.mean(axis=0)),
    "krum": (R.Krum(2), lambda v, w: v[np.argmin(oracle_scores(v, 2))]),
    "multi-krum": (R.Krum(2, 4), lambda v, w: v[np.argsort(oracle_scores(v, 2))[:4]].mean(axis=0)),
    "bulyan": (R.Bulyan(1), lambda v, w: oracle_bulyan(v, 1)),
    "bulyan of 2": (R.Bulyan(2), lambda v, w: oracle_bulyan(v, 2)),
}


@pytest.mark.parametrize("missing", [0, 2, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(12)
def test_a_rule_is_its_paper(name, missing):
    rule, oracle = CASES[name]
    vectors, weights = some(missing=missing)
    there = weights > 0
    np.testing.assert_allclose(rule.combine(jnp.asarray(vectors), jnp.asarray(weights)),
                               oracle(vectors[there], weights[there]), rtol=1e-10)  # fmt: skip


def test_the_geometric_median_is_the_point_of_least_distance():
    vectors, weights = some()
    found = R.GeometricMedian(200).combine(jnp.asarray(vectors), jnp.asarray(weights))
    np.testing.assert_allclose(found, oracle_geometric(vectors[weights > 0]), atol=1e-6)


def test_vectors_that_are_far_away_do_not_move_the_geometric_median():
    vectors = np.random.default_rng(0).normal(size=(10, 4))
    vectors[:4] = 1e6
    found = R.GeometricMedian().combine(jnp.asarray(vectors), jnp.ones(10))
    assert np.linalg.norm(found - oracle_geometric(vectors)) < 1.0
    assert np.linalg.norm(found - vectors[4:].mean(axis=0)) < 4.0


def test_the_geometric_median_may_be_one_of_the_vectors():
    vectors = jnp.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.1], [0.0, 1.0], [0.0, -1.0]])
    found = R.GeometricMedian(500).combine(vectors, jnp.ones(5))
    np.testing.assert_allclose(found, 0.0, atol=1e-3)


@pytest.mark.parametrize("name", ["median", "trimmed", "krum", "multi-krum", "bulyan"])
@pytest.mark.extended
def test_a_rule_is_flowers(name):
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    vectors, weights = some(missing=0)
    results = [([v], 1) for v in vectors]
    theirs = {
        "median": lambda: aggregate.aggregate_median(results),
        "trimmed": lambda: aggregate.aggregate_trimmed_avg(results, 0.2),
        "krum": lambda: aggregate.aggregate_krum(results, 2, 0),
        "multi-krum": lambda: aggregate.aggregate_krum(results, 2, 4),
        "bulyan": lambda: aggregate.aggregate_bulyan(results, 1, aggregate.aggregate_krum, to_keep=0),
    }[name]()[0]
    found = CASES[name][0].combine(jnp.asarray(vectors), jnp.ones(M))
    np.testing.assert_allclose(found, theirs, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(3)
def test_without_an_answer_there_is_nothing(name):
    found = CASES[name][0].combine(jnp.ones((4, 2)), jnp.zeros(4))
    assert np.isfinite(np.asarray(found)).all() or name.startswith("bulyan")


@pytest.mark.parametrize("name", [name for name in CASES if "mean" not in name and "not" not in name])
@pytest.mark.thin(3)
def test_a_hostile_vector_moves_it_by_no_more_than_honest_ones_are_apart(name):
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(M, P))
    honest = vectors[1:]
    for far in (1e3, 1e30):
        vectors[0] = far
        found = np.asarray(CASES[name][0].combine(jnp.asarray(vectors), jnp.ones(M)))
        assert (found >= honest.min(axis=0) - 1e-9).all()
        assert (found <= honest.max(axis=0) + 1e-9).all()


def test_attacks_are_their_formulas():
    vectors, _ = some(missing=0)
    honest = np.arange(M) > 2
    mean, spread = vectors[3:].mean(axis=0), vectors[3:].std(axis=0)
    forged = {
        R.SignFlip(2.0): -2.0 * vectors, R.ALittleIsEnough(1.5): np.tile(mean - 1.5 * spread, (M, 1)),
        R.InnerProduct(0.3): np.tile(-0.3 * mean, (M, 1)),
    }  # fmt: skip
    for attack, wanted in forged.items():
        np.testing.assert_allclose(attack.forged(jnp.asarray(vectors), jnp.asarray(honest)), wanted, rtol=1e-10)
        rule = R.Attacked(R.Mean(), attack, (0, 1, 2))
        sent = np.where(honest[:, None], vectors, wanted)
        np.testing.assert_allclose(rule.combine(jnp.asarray(vectors), jnp.ones(M)), sent.mean(axis=0), rtol=1e-10)
    noise = np.asarray(R.RandomVectors(3.0).forged(jnp.asarray(vectors), jnp.asarray(honest)))
    assert noise.std() == pytest.approx(3.0 * np.sqrt((vectors[3:] ** 2).mean()), rel=0.3)


def test_rules_are_equal_by_their_numbers():
    assert R.Krum(2, 4) == R.Krum(2, 4) != R.Krum(1, 4)
    assert hash(R.TrimmedMean(0.1)) == hash(R.TrimmedMean(0.1))
    jax.jit(lambda v, w, rule: rule.combine(v, w), static_argnums=2)(jnp.ones((3, 2)), jnp.ones(3), R.Median())
