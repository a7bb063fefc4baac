"""Low rank and joint sparsity, known a priori: against a generic convex solver and the definitions."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.coupling import FeatureDiagonal, as_matrix
from tests import oracles, zoo

R = mj.regularizers


def trace_norm(lam, lam2):
    return lambda w: lam * cp.normNuc(w) + lam2 * cp.sum_squares(w)


def joint_sparse(lam, lam2):
    return lambda w: lam * cp.sum(cp.norm(w, axis=0)) + lam2 * cp.sum_squares(w)


KINDS = {"trace norm": (R.TraceNorm, trace_norm), "joint sparse": (R.JointSparse, joint_sparse)}
METHODS = [mj.Mocha(), pytest.param(mj.Mocha(server="dual", smoothing=1e-4), marks=pytest.mark.slow)]
each_kind = pytest.mark.parametrize("kind", KINDS)


def problem_of(kind, lam=0.1, lam2=0.01, regression=False, **kwargs):
    data = zoo.data(seed=3, m=6, d=8, low=8, high=14, loss_scaling="task_mean", regression=regression, **kwargs)
    loss = mj.losses.Squared() if regression else mj.losses.Hinge()
    return mj.Problem(data, loss, KINDS[kind][0](jnp.asarray(lam), jnp.asarray(lam2)))


@each_kind
@pytest.mark.parametrize(("lam", "lam2", "regression"), [(0.1, 0.01, False), (0.3, 1e-3, False), (0.02, 0.002, True)])
@pytest.mark.thin(2)
def test_the_optimum_is_the_convex_solvers(kind, lam, lam2, regression):
    problem = problem_of(kind, lam, lam2, regression)
    loss = "squared" if regression else "hinge"
    value, weights = oracles.optimum(problem.data, loss, KINDS[kind][1](lam, lam2))
    found = mj.solve(problem, tol=1e-8, max_rounds=2000)
    assert found.status == mj.Status.CONVERGED
    proven = found.certificate
    assert float(proven.joint_primal) == pytest.approx(value, abs=1e-7)
    assert 0 <= float(proven.joint_gap) < 1e-6
    assert float(proven.joint_dual) <= value + 1e-8  # what the convex solver lacks
    np.testing.assert_allclose(found.weights, weights, atol=2e-3)
    # The numbers for the Omega at hand: primal is the same objective, its bound below that.
    assert float(proven.primal) == pytest.approx(float(proven.joint_primal), abs=1e-7)
    assert float(proven.dual) <= float(proven.primal)


@each_kind
@pytest.mark.slow
def test_every_round_bounds_the_optimum(kind):
    problem = problem_of(kind)
    value, _ = oracles.optimum(problem.data, "hinge", KINDS[kind][1](0.1, 0.01))
    _, history = mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=15)
    bounds = history
    assert (bounds.joint_gap >= 0).all()
    assert (bounds.gap >= 0).all()
    assert (bounds.joint_dual <= value + 1e-8).all()
    assert (bounds.joint_primal >= value - 1e-8).all()


@each_kind
@pytest.mark.parametrize("method", [mj.Mocha(server="dual", smoothing=1e-4), mj.algorithm1()])
@pytest.mark.slow
def test_alternation_comes_near_the_joint_optimum(kind, method):
    problem = problem_of(kind, lam=0.05, lam2=0.05)
    value, _ = oracles.optimum(problem.data, "hinge", KINDS[kind][1](0.05, 0.05))
    state, history = mj.run(problem, method, jax.random.key(0), num_rounds=400, record_every=100)
    assert float(history.joint_primal[-1]) == pytest.approx(value, rel=5e-3)
    assert (history.joint_dual <= value + 1e-8).all()


@pytest.mark.slow
def test_structure_that_is_there_is_found():
    rng = np.random.default_rng(0)
    m, d = 12, 10
    low_rank = rng.normal(size=(m, 2)) @ rng.normal(size=(2, d))
    few = np.where(np.arange(d) < 3, rng.normal(size=(m, d)), 0.0)
    for kind, truth, lam in (("trace norm", low_rank, 0.5), ("joint sparse", few, 0.3)):
        xs = [rng.normal(size=(25, d)) for _ in range(m)]
        ys = [x @ w + 0.1 * rng.normal(size=len(x)) for x, w in zip(xs, truth, strict=True)]
        data = mj.pack_tasks(xs, ys, loss_scaling="task_mean", dtype=np.float64)
        found = mj.solve(mj.Problem(data, mj.losses.Squared(), KINDS[kind][0](lam, 1e-3)), tol=1e-6)
        if kind == "trace norm":
            assert np.linalg.matrix_rank(found.weights, tol=1e-6) == 2
            assert np.linalg.matrix_rank(found.omega, tol=1e-6) == 2
        else:
            assert (np.abs(found.weights).max(axis=0) > 0).tolist() == (np.arange(d) < 3).tolist()
            np.testing.assert_allclose(np.asarray(found.relation), np.linalg.norm(found.weights, axis=0), rtol=1e-6)


@each_kind
@pytest.mark.slow
def test_above_the_largest_gradient_nothing_is_left(kind):
    data = problem_of(kind, regression=True).data
    v = data.dual_vectors(data.y)  # minus the gradient of the losses at W = 0
    norm = np.linalg.norm(v, 2) if kind == "trace norm" else np.linalg.norm(v, axis=0).max()
    for factor, nothing in ((1.001, True), (0.95, False)):
        problem = mj.Problem(data, mj.losses.Squared(), KINDS[kind][0](factor * norm, 0.01))
        found = mj.solve(problem, tol=1e-6)
        assert (not np.any(found.weights)) == nothing


@each_kind
@pytest.mark.slow
def test_float32_bounds_hold_where_the_optimum_is_tiny(kind):
    xs, ys = zoo.ragged(seed=3, m=6, d=8, regression=True)
    for scale in (1.0, 1e-4):
        ys32 = [np.float32(scale * y) for y in ys]
        data = mj.pack_tasks([np.float32(x) for x in xs], ys32, loss_scaling="task_mean")
        lam = np.float32(0.02 * scale)
        found = mj.solve(mj.Problem(data, mj.losses.Squared(), KINDS[kind][0](lam, np.float32(0.01))), tol=1e-3)
        exact = mj.pack_tasks(
            [np.float64(np.float32(x)) for x in xs], [np.float64(y) for y in ys32], loss_scaling="task_mean",
            dtype=np.float64,
        )  # fmt: skip
        problem = mj.Problem(exact, mj.losses.Squared(), KINDS[kind][0](float(lam), float(np.float32(0.01))))
        optimum = mj.solve(problem, tol=1e-10, max_rounds=5000).certificate
        truth = mj.objective(problem, jnp.asarray(found.weights, float))
        proven = found.certificate
        assert proven.rounding is not None
        assert float(proven.joint_dual) <= float(optimum.joint_primal)
        assert float(proven.joint_primal) + float(proven.rounding) >= float(truth)
        assert float(truth - optimum.joint_dual) <= float(proven.joint_gap) + float(proven.rounding)
        assert float(proven.relative_joint_gap) < 2e-3


@each_kind
def test_what_an_error_of_v_adds_to_the_conjugate_is_bounded(kind):
    regularizer, rng = KINDS[kind][0](0.7, 0.2), np.random.default_rng(0)
    for size in (1e-3, 0.1, 1.0):
        v, error = jnp.asarray(rng.normal(size=(5, 3))), jnp.asarray(size * rng.normal(size=(5, 3)))
        here, there = regularizer.conjugate(v), regularizer.conjugate(v + error)
        bound = regularizer.conjugate_bound(jnp.linalg.norm(error), 5, 3)
        assert there <= here + 2.0 * jnp.sqrt(here * bound) + bound


def test_columns_too_small_to_be_squared_count():
    tiny = jnp.full((4, 3), 1e-30, jnp.float32)
    regularizer = R.JointSparse(jnp.float32(1.0), jnp.float32(1.0))
    assert float(regularizer.value(tiny)) == pytest.approx(3 * 2e-30, rel=1e-5, abs=0)
    assert np.isfinite(jax.grad(regularizer.value)(jnp.zeros((4, 3), jnp.float32))).all()


def test_the_coupling_by_features_is_the_operator_that_it_says():
    rng = np.random.default_rng(0)
    scale, m = np.array([0.5, 2.0, 0.0]), 4
    coupling = FeatureDiagonal(jnp.asarray(scale), m)
    v, w, rho = jnp.asarray(rng.normal(size=(m, 3))), jnp.asarray(rng.normal(size=(m, 3))), 0.7
    np.testing.assert_allclose(coupling.apply(v), np.asarray(v) * scale)
    shrunk = rho * scale / (1 + rho * scale)
    np.testing.assert_allclose(coupling.prox(v, jnp.asarray(rho)), np.asarray(v) * shrunk, rtol=1e-12)
    assert np.isinf(coupling.energy(w))
    inside = coupling.project_to_range(w)
    assert float(coupling.energy(inside)) == pytest.approx(0.5 * np.sum(np.asarray(w)[:, :2] ** 2 / scale[:2]))
    np.testing.assert_allclose(coupling.apply(coupling.gradient(inside)), inside, rtol=1e-12)
    # Safe: R* along any change is at most that of every task alone, with its own number.
    assert float(coupling.conjugate(v)) <= 0.5 * float(jnp.sum(jnp.sum(v**2, axis=1) * coupling.diagonal()))
    for rule in mj.coupling.SIGMA_PRIME_RULES:
        np.testing.assert_array_equal(coupling.sigma_prime(rule), np.ones(m))
    np.testing.assert_array_equal(as_matrix(FeatureDiagonal(jnp.ones(1), m)), np.eye(m))


@each_kind
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_new_task_joins(kind, method):
    xs, ys = zoo.ragged(seed=3, m=6, d=8)
    old, new = (
        mj.pack_tasks(xs[part], ys[part], loss_scaling="task_mean", dtype=np.float64)
        for part in (slice(4), slice(4, None))
    )
    problem = mj.Problem(old, mj.losses.Hinge(), KINDS[kind][0](0.1, 0.01))
    state, _ = mj.run(problem, method, jax.random.key(0), num_rounds=20, record_every=20)
    larger = problem.replace(data=old.append(new))
    start = method.add_tasks(state, larger)
    _, history = mj.run(larger, method, jax.random.key(0), num_rounds=60, state=start, record_every=60)
    assert float(history.relative_joint_gap[-1]) < 0.05


def test_an_omega_of_tasks_is_refused_where_features_are_learned():
    problem = problem_of("joint sparse")
    with pytest.raises(ValueError, match="learns scales of features"):
        mj.algorithm1(initial_omega=jnp.eye(6)).init(problem)
