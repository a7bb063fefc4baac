"""Functions of singular values, their derivatives where vectors have none, and the filling of eigenvalues."""

import cvxpy as cp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from jax.test_util import check_grads

from mocha_jax.spectral import left_spectral_map, matrix_sqrt, singular_values, spectral_map, water_fill

RNG = np.random.default_rng(0)
CLARABEL = dict(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
MATRICES = {
    "tall": RNG.normal(size=(5, 3)),
    "wide": RNG.normal(size=(3, 5)),
    "zero": np.zeros((3, 3)),
    "zero, tall": np.zeros((4, 2)),
    "identity": np.eye(4),
    "rank one": np.outer(np.arange(1.0, 5.0), [1.0, -2.0, 0.5]),
    "repeated": np.linalg.qr(RNG.normal(size=(5, 5)))[0][:, :3] * 2.0,
}
each_matrix = pytest.mark.parametrize("name", MATRICES)


def smooth_odd(s, t):
    # Depends on each value and on all of them; odd in s, so smooth through 0.
    return s / jnp.sqrt(s**2 + t) * (1.0 + jnp.sum(jnp.sqrt(s**2 + t)))


@each_matrix
@pytest.mark.thin(1)
def test_spectral_map_is_differentiable_where_vectors_are_not(name):
    w = jnp.asarray(MATRICES[name])
    check_grads(
        lambda w, t: spectral_map(smooth_odd, w, t), (w, jnp.array(0.3)), order=1, modes=("fwd", "rev"), rtol=1e-5, atol=1e-5
    )  # fmt: skip


def test_spectral_map_applies_its_function_to_singular_values():
    w = MATRICES["tall"]
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    np.testing.assert_allclose(spectral_map(smooth_odd, w, 0.3), (u * np.asarray(smooth_odd(s, 0.3))) @ vt, rtol=1e-12)


@each_matrix
@pytest.mark.thin(1)
def test_symmetric_functions_of_singular_values_have_derivatives(name):
    w = jnp.asarray(MATRICES[name])
    check_grads(lambda w: jnp.sum(jnp.sqrt(singular_values(w) ** 2 + 0.1)), (w,), order=1, rtol=1e-5, atol=1e-5)


SYMMETRIC = {
    "zero": np.zeros((3, 3)),
    "identity": np.eye(4),
    "rank one": np.outer([1.0, 2.0, -1.0], [1.0, 2.0, -1.0]),
    "fewer features than tasks": (lambda w: w @ w.T)(RNG.normal(size=(5, 2))),
    "definite": (lambda w: w @ w.T)(RNG.normal(size=(4, 6))),
}


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.thin(1)
def test_matrix_sqrt_has_finite_derivatives_everywhere(name):
    a = jnp.asarray(SYMMETRIC[name])
    root = matrix_sqrt(a)
    np.testing.assert_allclose(root @ root, a, atol=1e-12)
    if name == "definite":  # SciPy's method needs a regular matrix
        np.testing.assert_allclose(root, scipy.linalg.sqrtm(a), rtol=1e-9)
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert jnp.isfinite(jacobian(matrix_sqrt)(a)).all()
    if np.linalg.matrix_rank(a) == len(a):
        check_grads(lambda a: matrix_sqrt(0.5 * (a + a.T)), (a,), order=1, modes=("fwd", "rev"), rtol=1e-6)


def test_matrix_sqrt_of_a_gram_matrix_has_the_derivative_of_the_function_of_the_factor():
    # |W| is smooth where W has full rank, although W W' of a tall W is singular.
    w, dw = jnp.asarray(RNG.normal(size=(5, 2))), jnp.asarray(RNG.normal(size=(5, 2)))
    root = lambda w: matrix_sqrt(w @ w.T)  # noqa: E731
    step = 1e-6
    difference = (root(w + step * dw) - root(w - step * dw)) / (2 * step)
    np.testing.assert_allclose(jax.jvp(root, (w,), (dw,))[1], difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, w in MATRICES.items() if w.shape[0] <= w.shape[1]])
@pytest.mark.thin(1)
def test_left_spectral_map_is_a_function_of_the_gram_matrix(name):
    w = jnp.asarray(MATRICES[name])
    even = lambda s, t: s**2 / (s**2 + t)  # noqa: E731
    apply = lambda w, t: left_spectral_map(even, w, t)  # noqa: E731
    gram = w @ w.T
    np.testing.assert_allclose(apply(w, 0.3), gram @ jnp.linalg.inv(gram + 0.3 * jnp.eye(len(w))), atol=1e-12)
    check_grads(apply, (w, jnp.array(0.3)), order=1, modes=("fwd", "rev"), rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 10_000), r=st.sampled_from([1, 2, 5]), floor=st.floats(0.0, 2.0), share=st.floats(0.05, 1.0))
def test_water_fill_is_optimal(seed, r, floor, share):
    rng = np.random.default_rng(seed)
    s = np.sort(rng.choice([0.0, 1e-9, 0.3, 1.0, 5.0], r) * rng.uniform(0.5, 2.0, r))[::-1]
    total, floor = share * r, floor + 1e-3
    omega = np.asarray(jax.jit(water_fill)(jnp.asarray(s), jnp.asarray(floor), jnp.asarray(total)))
    assert ((omega >= 0) & (omega <= 1)).all()
    if (s > 0).sum() >= total:
        assert omega.sum() == pytest.approx(total, rel=1e-9)
    else:
        np.testing.assert_allclose(omega, s > 0)
    # No exchange between two coordinates lowers sum s^2 / (floor + omega): derivatives agree where they may move.
    slope = -(s**2) / (floor + omega) ** 2
    can_grow, can_shrink = omega < 1 - 1e-9, (omega > 1e-9) & (s > 0)
    if can_grow.any() and can_shrink.any():
        assert slope[can_grow].min() >= slope[can_shrink].max() - 1e-7 * (s**2).max() / floor**2


def test_water_fill_against_a_convex_solver():
    s, floor, total = np.array([4.0, 2.5, 1.0, 0.4, 0.0]), 0.2, 2.3
    omega = cp.Variable(5)
    terms = [s[i] ** 2 * cp.inv_pos(floor + omega[i]) for i in range(5)]
    cp.Problem(cp.Minimize(cp.sum(terms)), [omega >= 0, omega <= 1, cp.sum(omega) == total]).solve(**CLARABEL)
    np.testing.assert_allclose(
        water_fill(jnp.asarray(s), jnp.array(floor), jnp.array(total)), np.asarray(omega.value), atol=1e-5
    )


@pytest.mark.parametrize(
    ("s", "total"), [([4.0, 2.0, 1.0, 0.3], 2.0), ([1.0, 1.0, 1.0, 1.0], 2.0), ([1.0, 0.0, 0.0, 0.0], 0.5)]
)
@pytest.mark.slow
def test_water_fill_is_differentiable_between_its_kinks(s, total):
    arguments = jnp.asarray(s), jnp.array(0.1), jnp.array(total)
    gradient = jax.jacrev(water_fill, (0, 1, 2))(*arguments)
    assert all(jnp.isfinite(g).all() for g in gradient)
    if min(s) > 0:
        check_grads(water_fill, arguments, order=1, modes=("fwd", "rev"), rtol=1e-6)


@pytest.mark.slow
def test_nothing_to_fill():
    zero = jnp.zeros(3)
    assert water_fill(zero, jnp.array(0.1), jnp.array(2.0)).tolist() == [0.0, 0.0, 0.0]
    for derivative in (jax.jacfwd, jax.jacrev):
        assert jnp.isfinite(derivative(water_fill)(zero, jnp.array(0.1), jnp.array(2.0))).all()
