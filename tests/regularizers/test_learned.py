"""Regularizers that learn Omega, against their definitions; no solver of weights here."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import mocha_jax as mj
from mocha_jax.coupling import SIGMA_PRIME_RULES, LowRank, as_matrix
from tests import zoo

R = mj.regularizers
TRACE_LIMITED: dict[str, Any] = {
    "probabilistic": R.Probabilistic(0.3, 2.0),
    "probabilistic, no ridge": R.Probabilistic(0.3),
    "clustered": R.Clustered(0.3, 0.2, 2),
    "clustered, k not whole": R.Clustered(0.3, 0.2, 1.5),
    "clustered, k = 1": R.Clustered(0.3, 0.2, 1),
}
LEARNED: dict[str, Any] = {**TRACE_LIMITED, "sparse": R.SparsePrecision(0.3, 2.0, 0.1, 0.2)}
SHAPES = [(6, 3), (3, 6), (2, 1)]
each_trace_limited = pytest.mark.parametrize("name", TRACE_LIMITED)
each_shape = pytest.mark.parametrize("shape", SHAPES)


def weights(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def random_omega(regularizer, m, rng):
    """Any Omega that the model allows."""
    q = np.linalg.qr(rng.normal(size=(m, m)))[0]
    if isinstance(regularizer, R.Probabilistic):
        values = rng.dirichlet(np.ones(m))
    elif isinstance(regularizer, R.Clustered):
        values = np.full(m, min(float(regularizer.k), m) / m)
        for _ in range(20):  # move mass about inside [0, 1]
            i, j = rng.integers(m, size=2)
            step = min(values[i], 1 - values[j]) * rng.random() if i != j else 0.0
            values[i], values[j] = values[i] - step, values[j] + step
    else:
        values = rng.uniform(0.3, 3.0, m)
    return (q * values) @ q.T


def value_at(regularizer, w, omega):
    """R(W, Omega) as the paper writes it."""
    m, d = w.shape
    if isinstance(regularizer, R.Probabilistic):
        return regularizer.lam * (np.sum(w**2) / regularizer.sigma2 + np.trace(w.T @ np.linalg.solve(omega, w)))
    if isinstance(regularizer, R.Clustered):
        return regularizer.lam * np.trace(w.T @ np.linalg.solve(regularizer.eta * np.eye(m) + omega, w))
    quadratic = np.sum(w**2) / regularizer.sigma2 + np.trace(w.T @ omega @ w) - d * np.linalg.slogdet(omega)[1]
    return regularizer.lam * quadratic + regularizer.lam1 * np.abs(w).sum() + regularizer.lam2 * np.abs(omega).sum()


@pytest.mark.parametrize("name", LEARNED)
@each_shape
@pytest.mark.thin(4)
def test_the_update_is_feasible_and_no_omega_is_better(name, shape):
    regularizer, w, m = LEARNED[name], weights(shape), shape[0]
    record = regularizer.update_relation(regularizer.initial_relation(*shape), w)
    omega = np.asarray(regularizer.relationship(m, record))
    np.testing.assert_allclose(omega, omega.T, atol=1e-12)
    values = np.linalg.eigvalsh(omega)
    assert values.min() >= -1e-12
    if name in TRACE_LIMITED:
        total = 1.0 if name.startswith("prob") else min(float(regularizer.k), m)
        assert np.trace(omega) == pytest.approx(total, rel=1e-9)
        assert values.max() <= 1 + 1e-9
    best = float(regularizer.value(w))
    np.testing.assert_allclose(regularizer.value(w, record), best, rtol=1e-7)
    offset = regularizer.offset(record, shape[1])
    np.testing.assert_allclose(regularizer.penalty(w) + offset, best, rtol=1e-7)
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = random_omega(regularizer, m, rng)
        assert value_at(regularizer, np.asarray(w), other) >= best * (1 - 1e-9) - 1e-9
        mixed = 0.9 * omega + 0.1 * other  # near the optimum as well
        assert value_at(regularizer, np.asarray(w), mixed) >= best * (1 - 1e-9) - 1e-9


@each_trace_limited
@each_shape
@pytest.mark.thin(5)
def test_the_coupling_of_a_factored_omega_is_that_of_the_matrix(name, shape):
    regularizer, m = TRACE_LIMITED[name], shape[0]
    for smoothing in (0.0, 0.5):
        record = regularizer.update_relation(None, weights(shape), smoothing)
        assert record.factor.shape == (m, min(shape))
        coupling = regularizer.coupling(m, record)
        omega = np.asarray(as_matrix(record))
        if name.startswith("prob"):
            values, vectors = np.linalg.eigh(omega)
            shrunk = values / (1 + values / float(regularizer.sigma2)) / (2 * regularizer.lam)
            expected = (vectors * shrunk) @ vectors.T
        else:
            expected = (regularizer.eta * np.eye(m) + omega) / (2 * regularizer.lam)
        np.testing.assert_allclose(as_matrix(coupling), expected, atol=1e-6)
        np.testing.assert_allclose(as_matrix(coupling), expected, atol=1e-10)
        np.testing.assert_allclose(coupling.diagonal(), np.diag(expected), atol=1e-10)


def test_smoothing_gives_omega_full_rank_and_fits_what_it_says():
    w, eps = weights((6, 2)), 0.3
    omega = as_matrix(R.Probabilistic(1.0).update_relation(None, w, eps))
    values, vectors = np.linalg.eigh(np.asarray(w @ w.T) + eps * np.eye(6))
    expected = (vectors * np.sqrt(values)) @ vectors.T
    np.testing.assert_allclose(omega, expected / np.trace(expected), atol=1e-12)


@given(seed=st.integers(0, 10_000), shape=st.sampled_from(SHAPES), name=st.sampled_from(sorted(TRACE_LIMITED)))
@pytest.mark.slow
def test_value_conjugate_and_prox_belong_together(seed, shape, name):
    # W = prox(Y) means rho (Y - W) is a subgradient at W: Fenchel's inequality holds with equality there.
    regularizer, rng = TRACE_LIMITED[name], np.random.default_rng(seed)
    regularizer = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), regularizer)
    y, rho = jnp.asarray(rng.normal(size=shape) * rng.uniform(0.1, 10)), jnp.asarray(rng.uniform(0.1, 5))
    w, g, value, conjugate, elsewhere = both_sides(regularizer, y, rho, jnp.asarray(rng.normal(size=shape)))
    assert float(value + conjugate) == pytest.approx(float(np.sum(w * g)), rel=1e-8, abs=1e-9)
    assert elsewhere >= -1e-9


@jax.jit
def both_sides(regularizer, y, rho, other):
    w = regularizer.prox(y, rho)
    g = rho * (y - w)
    conjugate = regularizer.conjugate(g)
    return w, g, regularizer.value(w), conjugate, regularizer.value(other) + conjugate - jnp.sum(other * g)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), name=st.sampled_from(["clustered", "probabilistic"]))
@pytest.mark.slow
def test_the_joint_conjugate_is_the_largest_over_omega(seed, name):
    regularizer, rng = TRACE_LIMITED[name], np.random.default_rng(seed)
    v = jnp.asarray(rng.normal(size=(5, 3)))
    joint = float(regularizer.conjugate(v))
    for record in (regularizer.update_relation(None, jnp.asarray(rng.normal(size=(5, 3)))), None):
        assert regularizer.coupling(5, record).conjugate(v) <= joint * (1 + 1e-9)


@pytest.mark.extended
def test_limits_of_the_hyperparameters():
    w, v = weights((5, 3)), weights((5, 3), seed=1)
    # k = m leaves one Omega, the identity; a large eta drowns it.
    every = R.Clustered(0.4, 0.5, 5)
    np.testing.assert_allclose(as_matrix(every.update_relation(None, w)), np.eye(5), atol=1e-10)
    np.testing.assert_allclose(every.value(w), R.Independent(0.4 / 1.5).value(w), rtol=1e-10)
    np.testing.assert_allclose(R.Clustered(0.4 * 1e9, 1e9, 2).value(w), R.Independent(0.4).value(w), rtol=1e-6)
    # A tiny sigma^2 leaves the ridge, a huge one nothing of it.
    np.testing.assert_allclose(
        R.Probabilistic(1e-9, 1e-9).coupling(5).apply(v), R.Independent(1.0).coupling(5).apply(v), rtol=1e-6
    )
    np.testing.assert_allclose(R.Probabilistic(0.4, 1e12).conjugate(v), R.Probabilistic(0.4).conjugate(v), rtol=1e-6)
    # A large lam2 makes Omega diagonal.
    omega = np.asarray(R.SparsePrecision(1.0, 1.0, 0.0, 100.0).update_relation(None, w))
    np.testing.assert_array_equal(omega, np.diag(np.diag(omega)))


@jax.jit
def everything(regularizer, w):
    m, d = w.shape
    record = regularizer.update_relation(regularizer.initial_relation(m, d), w)
    coupling = regularizer.coupling(m, record)
    results = [record, coupling, coupling.apply(w), regularizer.value(w), regularizer.covariance(m, record)]
    if regularizer.jointly_convex:
        results += [regularizer.conjugate(w), regularizer.prox(w, jnp.asarray(0.7, w.dtype))]
    return results + [coupling.sigma_prime(rule) for rule in SIGMA_PRIME_RULES]


@pytest.mark.parametrize("name", ["probabilistic, no ridge", "clustered", "sparse"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (4, 1), (3, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.slow
def test_ugly_weights(name, shape, dtype):
    regularizer = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), LEARNED[name])
    if isinstance(regularizer, R.Clustered) and regularizer.k > shape[0]:
        regularizer = regularizer.replace(k=jnp.asarray(shape[0], dtype))
    ugly = {
        "zero": np.zeros(shape),
        "equal": np.ones(shape),
        "one direction": np.outer(np.arange(shape[0]), np.ones(shape[1])),
        "tiny": 1e-12 * np.asarray(weights(shape)),
        "huge": 1e6 * np.asarray(weights(shape)),
    }
    for kind, w in ugly.items():
        leaves = jax.tree.leaves(everything(regularizer, jnp.asarray(w, dtype)))
        assert all(np.isfinite(leaf).all() for leaf in leaves), kind
        assert {leaf.dtype for leaf in leaves} == {np.dtype(dtype)}


def test_a_precision_that_is_nearly_singular_stays_positive_definite():
    """Of one feature of the size of a million the best one has a least eigenvalue of 1e-13; one rounding is 6e-8."""
    regularizer = jax.tree.map(lambda leaf: jnp.asarray(leaf, np.float32), LEARNED["sparse"])
    w = jnp.asarray(1e6 * np.asarray(weights((4, 1))), np.float32)
    omega = jax.jit(regularizer.update_relation)(regularizer.initial_relation(4, 1), w)
    assert np.linalg.eigvalsh(np.asarray(omega, float))[0] > 0.0
    assert np.isfinite(regularizer.covariance(4, omega)).all()
    assert np.isfinite(regularizer.offset(omega, 1))


@pytest.mark.parametrize("name", ["probabilistic", "clustered"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.slow
def test_derivatives_of_the_update_are_finite_and_right(name, shape):
    v, direction, step = weights(shape, seed=4), weights(shape, seed=5), 1e-6

    @jax.jit
    def answer(w, regularizer):
        coupling = regularizer.coupling(shape[0], regularizer.update_relation(None, w, 0.2))
        return jnp.sum(jnp.sin(coupling.apply(v))) + jnp.sum(jnp.cos(regularizer.prox(w, jnp.array(1.0))))

    regularizer = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), TRACE_LIMITED[name])
    gradient = jax.jit(jax.grad(answer, (0, 1)))
    rank_one = np.outer(np.arange(1.0, shape[0] + 1), np.ones(shape[1]))
    for w in (np.zeros(shape), np.eye(*shape), rank_one):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(jnp.asarray(w), regularizer)))
    w = weights(shape, seed=3)
    difference = (answer(w + step * direction, regularizer) - answer(w - step * direction, regularizer)) / (2 * step)
    along = float(jnp.sum(gradient(w, regularizer)[0] * direction))
    assert along == pytest.approx(float(difference), rel=1e-5, abs=1e-7)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), m=st.sampled_from([2, 5, 9]), r=st.sampled_from([1, 3]))
@pytest.mark.slow
def test_low_rank_couplings_against_dense(seed, m, r):
    rng = np.random.default_rng(seed)
    coupling = LowRank(jnp.asarray(rng.uniform(0.0, 0.5)), jnp.asarray(rng.normal(size=(m, r))))
    matrix = np.asarray(as_matrix(coupling))
    dense = mj.coupling.Dense(jnp.asarray(matrix))
    v, rho = jnp.asarray(rng.normal(size=(m, 2))), jnp.asarray(rng.uniform(0.1, 3))
    for method in ("apply", "conjugate"):
        np.testing.assert_allclose(getattr(coupling, method)(v), getattr(dense, method)(v), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(coupling.prox(v, rho), dense.prox(v, rho), rtol=1e-7, atol=1e-9)
    nodes = jnp.asarray(rng.integers(1, 3, m), float)
    np.testing.assert_allclose(coupling.row_sums(nodes), dense.row_sums(nodes), rtol=1e-9)
    assert coupling.spectral_bound(nodes) >= dense.spectral_bound(nodes) * (1 - 1e-9)
    assert coupling.spectral_bound(nodes) <= 2 * dense.spectral_bound(nodes) + 1e-9


def test_row_sums_of_many_tasks_are_bounded_not_built(monkeypatch):
    coupling = LowRank(jnp.array(0.3), weights((50, 4)))
    exact = coupling.row_sums(jnp.ones(50))
    np.testing.assert_allclose(exact, np.abs(np.asarray(as_matrix(coupling))).sum(1), rtol=1e-10)
    monkeypatch.setattr("mocha_jax.coupling._low_rank._EXACT_ROWS", 10)
    assert (coupling.row_sums(jnp.ones(50)) >= exact).all()


def test_correlation_and_covariance():
    w = weights((4, 3))
    regularizer = R.Clustered(0.3, 0.2, 2)
    record = regularizer.update_relation(None, w)
    np.testing.assert_allclose(
        regularizer.covariance(4, record), np.asarray(as_matrix(record)) + 0.2 * np.eye(4), atol=1e-12
    )
    sparse = R.SparsePrecision(1.0, 1.0, 0.0, 0.5)
    precision = sparse.update_relation(None, w)
    np.testing.assert_allclose(sparse.covariance(4, precision) @ precision, np.eye(4), atol=1e-9)
    correlation = mj.coupling.correlation(jnp.array([[4.0, -2.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(correlation, [[1, -1, 0], [-1, 1, 0], [0, 0, 1]])


BAD: dict[str, Any] = {
    "lam": (lambda: R.Probabilistic(0.0), "Probabilistic: lam"),
    "sigma2": (lambda: R.Probabilistic(1.0, 0.0), "sigma2 must be > 0"),
    "nan": (lambda: R.Probabilistic(1.0, float("nan")), "sigma2 must be > 0"),
    "eta": (lambda: R.Clustered(1.0, 0.0, 2), "Clustered: eta"),
    "k": (lambda: R.Clustered(1.0, 0.1, 0), "Clustered: k"),
    "lam2": (lambda: R.SparsePrecision(1.0, 1.0, 0.1, 0.0), "SparsePrecision: lam2"),
    "lam1": (lambda: R.SparsePrecision(1.0, 1.0, -0.1, 1.0), "SparsePrecision: lam1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_hyperparameters_are_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_the_step_size_of_the_proximal_server_has_a_floor(key):
    # Down a path of lambdas rho follows the swings of W ever further down; here it meets its floor.
    data, algorithm, state, least = (
        zoo.data(seed=1, m=6, d=4, low=5, high=10, loss_scaling="task_mean"),
        mj.Mocha(),
        None,
        [],
    )
    for lam in (1.0, 1e-2, 1e-4):
        problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(lam))
        state = algorithm.warm_start(state, problem) if state is not None else None
        for _ in range(3):
            state, _ = mj.run(problem, algorithm, key, num_rounds=20, state=state, record_every=20)
            least.append(float(state.server.rho * state.server.curvature))
    assert min(least) == pytest.approx(0.5, rel=1e-9)
