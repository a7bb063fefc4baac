"""The graphical lasso and the shared lasso, against scikit-learn and a convex solver."""

import warnings

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.covariance import graphical_lasso as reference
from sklearn.linear_model import Lasso as ReferenceLasso

import mocha_jax as mj
from mocha_jax._numerics.lasso import lasso
from mocha_jax.regularizers._sparse_precision import Lasso
from tests import zoo


def samples(m=8, n=20, seed=0):
    rng = np.random.default_rng(seed)
    precision = np.eye(m) + 0.4 * (np.eye(m, k=1) + np.eye(m, k=-1))
    x = rng.normal(size=(n, m)) @ np.linalg.cholesky(np.linalg.inv(precision)).T
    return np.cov(x, rowvar=False, bias=True)


@pytest.mark.parametrize(("m", "n", "alpha"), [(8, 20, 0.1), (8, 20, 0.01), (20, 10, 0.3)])
def test_against_scikit_learn(m, n, alpha):
    s = samples(m, n)
    found = jax.jit(mj.graphical_lasso)(s, alpha * (1 - np.eye(m)))
    _, precision = reference(s, alpha, tol=1e-10, enet_tol=1e-10, max_iter=5000)
    np.testing.assert_allclose(found.precision, precision, atol=1e-6)
    np.testing.assert_allclose(found.precision @ found.covariance, np.eye(m), atol=1e-9)
    assert found.residual <= 1e-10
    assert (np.asarray(found.precision) == 0).sum() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        assert np.linalg.eigvalsh(found.precision).min() > 0


def test_variables_of_whatever_scale_are_solved():
    off = 1 - np.eye(5)
    for seed in range(25):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(30, 5)) @ rng.normal(size=(5, 5)) * 10 ** rng.uniform(-1, 1, 5)
        s = np.cov(x, rowvar=False)
        alpha = 0.01 * np.abs(s * off).max()
        with warnings.catch_warnings():  # scikit-learn's, whose dual gap is rounded to a negative number
            warnings.simplefilter("ignore")
            _, precision = reference(s, alpha, tol=1e-10, enet_tol=1e-10, max_iter=200)
        size = np.sqrt(np.outer(np.diag(s), np.diag(s)))
        for dtype, tol in (("float64", 1e-6), ("float32", 5e-3)):
            found = mj.graphical_lasso(s.astype(dtype), (alpha * off).astype(dtype))
            assert found.solved
            np.testing.assert_allclose(np.asarray(found.precision) * size, precision * size, rtol=tol, atol=tol)


@pytest.mark.extended
def test_tasks_of_whatever_scale_have_the_best_precision():
    rng = np.random.default_rng(0)
    xs, common = [rng.normal(size=(20, 10)) for _ in range(5)], rng.normal(size=10)
    ys = [
        scale * (x @ (common + 0.5 * rng.normal(size=10)) + 0.3 * rng.normal(size=20))
        for scale, x in zip(np.geomspace(0.03, 30.0, 5), xs, strict=True)
    ]
    data = mj.pack_tasks(xs, ys, dtype="float32")
    regularizer = mj.regularizers.SparsePrecision(0.1, 10.0, 0.1, 1e-3)
    solution = mj.solve(mj.Problem(data, mj.losses.Squared(), regularizer), tol=1e-4, max_rounds=1500)
    assert solution.status == mj.Status.CONVERGED
    best = regularizer.value(solution.weights, regularizer.update_relation(solution.omega, solution.weights))
    assert regularizer.value(solution.weights, solution.omega) <= best + 1e-5 * abs(best)


def test_a_penalty_on_the_diagonal_too_against_a_convex_solver():
    s, alpha = samples(5, 4), 0.15
    theta = cp.Variable((5, 5), PSD=True)
    objective = -cp.log_det(theta) + cp.trace(s @ theta) + alpha * cp.sum(cp.abs(theta))
    cp.Problem(cp.Minimize(objective)).solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    np.testing.assert_allclose(mj.graphical_lasso(s, alpha).precision, np.asarray(theta.value), atol=1e-4)


@pytest.mark.slow
def test_it_maps_and_masks():
    s = samples(6, 12)
    alphas = jnp.array([0.05, 0.2, 0.6])
    together = jax.vmap(lambda a: mj.graphical_lasso(s, a).precision)(alphas)
    for a, precision in zip(alphas, together, strict=True):
        np.testing.assert_allclose(precision, mj.graphical_lasso(s, a).precision, atol=1e-9)
    # Two variables that do not exist, in the middle.
    mask = np.array([True, True, False, True, True, False, True, True])
    padded = np.full((8, 8), 7.0)
    padded[np.ix_(mask, mask)] = s
    found = np.asarray(mj.graphical_lasso(padded, 0.1, mask=jnp.asarray(mask)).precision)
    np.testing.assert_allclose(found[np.ix_(mask, mask)], mj.graphical_lasso(s, 0.1).precision, atol=1e-9)
    np.testing.assert_allclose(found[~mask], np.eye(8)[~mask], atol=1e-12)


@pytest.mark.slow
def test_limits_of_the_penalty():
    s = samples(6, 12)
    large = np.asarray(mj.graphical_lasso(s, 10.0).precision)
    np.testing.assert_allclose(large, np.diag(1 / (np.diag(s) + 10.0)), rtol=1e-9)
    np.testing.assert_allclose(mj.graphical_lasso(s, 0.0).precision, np.linalg.inv(s), rtol=1e-6)
    nothing = mj.graphical_lasso(np.zeros((3, 3)), 0.5)  # no information at all
    np.testing.assert_allclose(nothing.precision, 2.0 * np.eye(3), rtol=1e-9)
    warm = mj.graphical_lasso(s, 0.1, start=mj.graphical_lasso(s, 0.1).precision)
    assert warm.iterations == 0
    with pytest.raises(ValueError, match="penalty"):
        mj.graphical_lasso(s, -1.0)


def test_float32_stops_where_rounding_does():
    found = mj.graphical_lasso(jnp.asarray(samples(20, 15), jnp.float32), 0.1)
    assert found.precision.dtype == jnp.float32
    assert found.iterations < 1000
    assert found.residual < 1e-4


def test_lasso_columns_against_scikit_learn():
    rng = np.random.default_rng(0)
    m, d, lam1 = 6, 4, 0.3
    a = zoo.random_spd(m) + 0.1 * np.eye(m)
    v = rng.normal(size=(m, d))
    w = np.asarray(lasso(jnp.asarray(a), jnp.asarray(v), jnp.array(lam1), jnp.zeros((m, d))))
    root = np.linalg.cholesky(a)
    for j in range(d):
        # 1/2 w'Aw - v'w is a least-squares problem in the Cholesky factor; scikit-learn divides by m.
        target = np.linalg.solve(root, v[:, j])
        model = ReferenceLasso(alpha=lam1 / m, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(root.T, target)
        np.testing.assert_allclose(w[:, j], model.coef_, atol=1e-7)
    assert 0 < (w == 0).sum() < w.size


def make_lasso(m=6, lam1=0.3, dtype=np.float64):
    a = (zoo.random_spd(m) + 0.1 * np.eye(m)).astype(dtype)
    return Lasso(mj.coupling.Dense(jnp.asarray(np.linalg.inv(a))), jnp.asarray(a), jnp.asarray(lam1, dtype))


def test_the_penalised_coupling_keeps_fenchels_inequality():
    coupling, rng = make_lasso(), np.random.default_rng(1)
    v = jnp.asarray(rng.normal(size=(6, 4)))
    w = coupling.apply(v)
    np.testing.assert_allclose(coupling.value(v, w) + coupling.conjugate(v), jnp.sum(v * w), rtol=1e-9)
    assert coupling.slack(v, w) < 1e-12
    elsewhere = w + 0.01 * jnp.asarray(rng.normal(size=w.shape))
    true = coupling.value(v, elsewhere) + coupling.conjugate(v) - jnp.sum(v * elsewhere)
    assert coupling.slack(v, elsewhere) >= true > 0
    pulled = coupling.prox(v, jnp.array(2.0))
    best = coupling.value(v, pulled) + jnp.sum((pulled - v) ** 2)
    for _ in range(20):
        other = pulled + 1e-3 * jnp.asarray(rng.normal(size=w.shape))
        assert coupling.value(v, other) + jnp.sum((other - v) ** 2) > best


def test_without_penalty_the_weights_are_linear_in_v():
    coupling = make_lasso(lam1=0.0)
    v = jnp.asarray(np.random.default_rng(2).normal(size=(6, 4)))
    np.testing.assert_array_equal(coupling.apply(v), coupling.inverse.matrix @ v)


@pytest.mark.slow
def test_an_unsolved_problem_says_so():
    s = samples(20, 15)
    with pytest.warns(UserWarning, match="not solved: after 3 iterations the residual is .* allow more max_iterations"):
        short = mj.graphical_lasso(s, 0.1, max_iterations=3)
    assert not short.solved
    assert short.iterations == 3
    assert mj.graphical_lasso(s, 0.1).solved
    # Inside of compiled code only the record says so.
    assert not jax.jit(lambda s: mj.graphical_lasso(s, 0.1, max_iterations=3))(s).solved


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(tol=float("nan")), "tol must be finite and >= 0"),
        (dict(tol=-1.0), "tol must be finite and >= 0"),
        (dict(max_iterations=-1), "max_iterations must be an integer >= 1"),
        (dict(max_iterations=True), "max_iterations must be an integer >= 1"),
    ],
)
def test_what_would_return_the_start_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        mj.graphical_lasso(np.eye(3), 0.1, **setting)


@pytest.mark.slow
def test_what_is_no_covariance_is_refused():
    for bad, message in (([[1, 0.5], [0.1, 1]], "must be symmetric"), (np.ones((3, 2)), "square"), ([[np.nan]], "NaN")):
        with pytest.raises(ValueError, match=message):
            mj.graphical_lasso(np.asarray(bad), 0.1)
    np.testing.assert_allclose(mj.graphical_lasso(np.eye(2, dtype=int), 0.1).precision, np.eye(2) / 1.1)


def test_an_ill_conditioned_precision_is_found_in_few_steps():
    # Fewer samples than variables and a small penalty: proximal gradient steps alone need more than 10,000.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 1)) + 0.3 * rng.normal(size=(12, 20))
    s = x @ x.T / 20
    found = mj.graphical_lasso(s, 0.01 * (1 - np.eye(12)))
    assert found.solved
    assert found.iterations < 1000
    _, precision = reference(s, 0.01, tol=1e-10, enet_tol=1e-10, max_iter=5000)
    np.testing.assert_allclose(found.precision, precision, rtol=1e-5, atol=1e-5)
    assert 0 < (np.asarray(found.precision) == 0).mean() < 1


def test_an_ill_conditioned_lasso_reaches_its_optimum():
    # Coordinate descent alone would need about as many sweeps as the condition number.
    rng = np.random.default_rng(0)
    m, d, lam1 = 12, 5, 0.1
    basis, _ = np.linalg.qr(rng.normal(size=(m, m)))
    a = (basis * np.geomspace(1e-6, 1.0, m)) @ basis.T
    v = rng.normal(size=(m, d))
    w = np.asarray(jax.jit(lasso)(a, v, jnp.asarray(lam1), np.linalg.solve(a, v)))
    r = v - a @ w
    # The optimality conditions: the gradient is lam1 times the sign where w differs from 0, no longer elsewhere.
    np.testing.assert_allclose(r[w != 0], lam1 * np.sign(w[w != 0]), atol=1e-8)
    assert np.abs(r[w == 0]).max() <= lam1 + 1e-8
    assert 0 < (w == 0).sum() < w.size


def test_a_float32_lasso_ends_where_rounding_does():
    # Of two weights of thousands that nearly cancel, a residual of a rounding of v cannot be had.
    a = jnp.asarray([[0.50005, 0.49995], [0.49995, 0.50005]], jnp.float32)
    v, zero = jnp.asarray([[0.5, 1.0], [-0.5, 1.0]], jnp.float32), jnp.zeros((), jnp.float32)
    best = lasso(a, v, zero, jnp.zeros_like(v))
    np.testing.assert_allclose(best, [[5000.0, 1.0], [-5000.0, 1.0]], rtol=2e-3)
    np.testing.assert_array_equal(lasso(a, v, zero, best), best)  # optimal already


def test_columns_of_very_different_sizes_are_all_solved():
    rng, sizes = np.random.default_rng(0), np.array([1e-8, 1.0, 1e6])
    a = (zoo.random_spd(6) + np.eye(6)).astype("float32")
    v = (rng.normal(size=(6, 3)) * sizes).astype("float32")
    best = np.linalg.solve(a.astype(float), v.astype(float))
    start = jnp.asarray(best, jnp.float32).at[:, 0].set(0.0)  # the others are solved already
    w = np.asarray(lasso(jnp.asarray(a), jnp.asarray(v), jnp.zeros((), jnp.float32), start))
    np.testing.assert_allclose(w / sizes, best / sizes, rtol=1e-4, atol=1e-5)


def test_a_penalty_counts_by_its_symmetric_part():
    s, p = np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([[0.0, 0.2], [0.0, 0.0]])
    found = mj.graphical_lasso(s, p)
    assert found.solved
    np.testing.assert_allclose(found.precision, mj.graphical_lasso(s, 0.5 * (p + p.T)).precision, rtol=1e-9)


def test_what_rounding_ends_is_not_said_to_need_more_iterations():
    with pytest.warns(UserWarning, match="rounding allows no smaller one"):
        assert mj.graphical_lasso(samples(8, 20), 0.1, tol=0.0).iterations < 10_000
    with pytest.raises(ValueError, match="start must be positive definite"):
        mj.graphical_lasso(np.eye(2), 0.1, start=np.ones((2, 2)))
