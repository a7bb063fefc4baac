"""Couplings against dense matrices, and what each sigma' rule promises."""

from typing import Any, cast

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import mocha_jax as mj
from mocha_jax.coupling import SIGMA_PRIME_RULES, Dense, Diagonal, Exchangeable, LowRank, as_matrix
from tests import zoo


@pytest.mark.parametrize("name", zoo.regularizers(5))
@pytest.mark.thin(2)
def test_coupling_is_the_inverse_hessian_of_the_regularizer(name):
    m, d = 5, 3
    regularizer = zoo.regularizers(m)[name]
    coupling = regularizer.coupling(m)
    matrix = np.asarray(as_matrix(coupling))
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    # R(W) = 1/2 tr(W' A W), so A e_t can be read off R by polarisation.
    basis = np.eye(m)[:, :, None]
    value = lambda w: float(regularizer.value(jnp.asarray(w)))  # noqa: E731
    a = np.array([[value(p + q) - value(p) - value(q) for q in basis] for p in basis])
    np.testing.assert_allclose(matrix @ a, np.eye(m), atol=1e-10)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(m, d)))
    np.testing.assert_allclose(coupling.apply(v), matrix @ v, rtol=1e-12)
    np.testing.assert_allclose(coupling.diagonal(), np.diag(matrix), rtol=1e-12)
    np.testing.assert_allclose(coupling.conjugate(v), 0.5 * np.sum(v * (matrix @ v)), rtol=1e-12)
    # Fenchel's equality at W = coupling.apply(V).
    w = coupling.apply(v)
    np.testing.assert_allclose(regularizer.value(w) + coupling.conjugate(v), jnp.sum(v * w), rtol=1e-10)
    # The relationship matrix says what the regularizer's own Omega says.
    omega = np.asarray(regularizer.relationship(m))
    np.testing.assert_allclose(omega, omega.T)


def couplings(m, seed):
    rng = np.random.default_rng(seed)
    a, b = np.sort(rng.uniform(0.1, 3.0, size=2))
    spd = zoo.random_spd(m, seed)
    return [
        Diagonal(jnp.asarray(rng.uniform(0.1, 3.0, size=m))),
        Exchangeable(jnp.asarray(a), jnp.asarray(b), m),
        Dense(jnp.asarray(spd)),
        Dense(jnp.asarray(np.linalg.inv(spd + np.eye(m)))),
    ]


@pytest.mark.parametrize("rule", SIGMA_PRIME_RULES)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 6), gamma=st.floats(0.1, 1.0))
@pytest.mark.thin(1)
def test_sigma_prime_is_safe_over_nodes(rule, seed, m, gamma):
    rng = np.random.default_rng(seed)
    nodes = rng.integers(1, 4, size=m)
    owner = np.repeat(np.arange(m), nodes)
    for coupling in couplings(m, seed):
        sigma = np.asarray(coupling.sigma_prime(rule, gamma, jnp.asarray(nodes, float)))
        matrix = np.asarray(as_matrix(coupling))
        safe = np.diag((sigma * np.diag(matrix))[owner]) - gamma * matrix[np.ix_(owner, owner)]
        assert np.linalg.eigvalsh(safe).min() >= -1e-9


@given(seed=st.integers(0, 10_000), m=st.integers(1, 6))
@pytest.mark.slow
def test_rules_are_ordered(seed, m):
    for coupling in couplings(m, seed):
        lemma9, per_task, spectral = (coupling.sigma_prime(rule) for rule in SIGMA_PRIME_RULES)
        assert (per_task <= lemma9 + 1e-12).all()
        assert (spectral <= lemma9 + 1e-9).all()
        matrix = np.asarray(as_matrix(coupling))
        np.testing.assert_allclose(per_task, np.abs(matrix).sum(1) / np.diag(matrix), rtol=1e-10)
        scale = 1 / np.sqrt(np.diag(matrix))
        np.testing.assert_allclose(
            spectral[0], max(np.linalg.eigvalsh(scale[:, None] * matrix * scale)[-1], 1), rtol=1e-9
        )


@given(seed=st.integers(0, 10_000), m=st.integers(2, 6))
@pytest.mark.slow
def test_gradients_undo_the_coupling_and_restriction_keeps_its_range(seed, m):
    rng = np.random.default_rng(seed)
    factor = jnp.asarray(rng.normal(size=(m, m - 1)))
    low_rank = [LowRank(jnp.asarray(b), factor) for b in (0.0, 0.7)]
    for coupling in couplings(m, seed) + low_rank:
        matrix, w = np.asarray(as_matrix(coupling)), rng.normal(size=(m, 3))
        inside = matrix @ np.linalg.lstsq(matrix, w, rcond=1e-9)[0]
        np.testing.assert_allclose(coupling.project_to_range(jnp.asarray(w)), inside, rtol=1e-6, atol=1e-8)
        # A subgradient of R at W: A W with A the pseudo-inverse.
        want = np.linalg.lstsq(matrix, inside, rcond=1e-9)[0]
        np.testing.assert_allclose(coupling.gradient(jnp.asarray(inside)), want, rtol=1e-5, atol=1e-6 * abs(want).max())


def test_a_task_without_curvature_is_harmless():
    sigma = Dense(jnp.diag(jnp.array([1.0, 0.0]))).sigma_prime("per_task")
    assert sigma.tolist() == [1.0, 1.0]


BAD: dict[str, Any] = {
    "lam": (lambda: mj.regularizers.Independent(0.0), "Independent: lam must be finite and > 0, got 0"),
    "lam2": (lambda: mj.regularizers.MeanRegularized(0.1, -1.0), "MeanRegularized: lam2"),
    "lam1": (lambda: mj.regularizers.MeanRegularized(-0.1, 1.0), "MeanRegularized: lam1"),
    "none": (lambda: mj.regularizers.Independent(cast(Any, None)), "must be a number"),
    "nothing in float32": (lambda: mj.Problem(zoo.data(dtype=np.float32), mj.losses.Hinge(), mj.regularizers.Independent(1e-46)), "Independent: lam must be from 1.2e-38 to 1.1e.37, as numbers of float32"),
    "nan": (lambda: mj.regularizers.Independent(float("nan")), "lam must be finite"),
    "square": (lambda: mj.regularizers.Graph(np.ones((2, 3)), 1.0, 1.0), r"square matrix \[m, m\]"),
    "symmetric": (lambda: mj.regularizers.Graph(np.array([[1.0, 0.5], [0.0, 1.0]]), 1.0, 1.0), "must be symmetric"),
    "indefinite": (lambda: mj.regularizers.Graph(np.array([[0.0, 1.0], [1.0, 0.0]]), 1.0, 1.0), "positive semi-definite"),
    "omega nan": (lambda: mj.regularizers.Graph(np.array([[np.nan]]), 1.0, 1.0), "NaN or infinite"),
    "rule": (lambda: Dense(jnp.eye(2)).sigma_prime("lemma"), "'lemma9', 'per_task', 'spectral'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_hyperparameters_are_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_hyperparameters_must_fit_the_data():
    data = zoo.data(m=3)
    for vector in (mj.regularizers.Graph(np.eye(3), np.ones(3), 1.0), mj.regularizers.MeanRegularized(np.ones(2), 1.0)):
        with pytest.raises(ValueError, match="lam1 must be a single number"):
            mj.Problem(data, mj.losses.Hinge(), vector)
    with pytest.raises(ValueError, match=r"loss must be a Loss such as Hinge\(\)"):
        mj.Problem(data, mj.losses.Hinge, mj.regularizers.Independent(1.0))  # type: ignore[arg-type]
    from_list = mj.regularizers.Independent(cast(Any, [0.1, 0.2, 0.3]))
    assert mj.Problem(data, mj.losses.Hinge(), from_list).regularizer.coupling(3).diagonal().shape == (3,)
    for regularizer in (mj.regularizers.Graph(np.eye(4), 1.0, 1.0), mj.regularizers.Independent(np.ones(4))):
        with pytest.raises(ValueError, match=r"\[3|3\]"):
            mj.Problem(data, mj.losses.Hinge(), regularizer)


def test_a_laplacian_in_float32_is_accepted():
    omega = jnp.asarray(zoo.laplacian(40), jnp.float32) / 3
    mj.regularizers.Graph(omega, 1.0, 1.0)
