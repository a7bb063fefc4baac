"""A penalised mean with a learned covariance of the deviations, against its definition and a convex solver."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.coupling import AboutMean, Dense, LowRank, as_matrix
from tests import oracles, zoo

R = mj.regularizers
LAM0, LAM, SIGMA2 = 0.05, 0.3, 2.0
REGULARIZER = R.MeanCovariance(LAM0, LAM, SIGMA2)
SHAPES = [(6, 3), (3, 5), (2, 1)]


def weights(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) + 1.0)


def centring(m):
    return np.eye(m) - 1.0 / m


def oracle(lam0, lam, sigma2):
    deviations = oracles.squared_nuclear_norm(lam, sigma2)
    return lambda w: lam0 / w.shape[0] * cp.sum_squares(cp.sum(w, axis=0)) + deviations(centring(w.shape[0]) @ w)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thin(2)
def test_the_update_is_feasible_and_no_omega_is_better(shape):
    w, m, rng = weights(shape), shape[0], np.random.default_rng(1)
    u, mean = centring(m) @ np.asarray(w), np.asarray(w).mean(0)
    record = REGULARIZER.update_relation(None, w)
    omega = np.asarray(REGULARIZER.relationship(m, record))
    np.testing.assert_allclose(omega @ np.ones(m), 0.0, atol=1e-12)
    assert np.linalg.eigvalsh(omega).min() >= -1e-12
    assert np.trace(omega) == pytest.approx(1.0, rel=1e-9)

    def value_at(omega):
        own = np.sum(u**2) / SIGMA2 + np.trace(u.T @ np.linalg.pinv(omega, rcond=1e-12) @ u)
        return LAM0 * m * np.sum(mean**2) + LAM * own

    best = float(REGULARIZER.value(w))
    np.testing.assert_allclose(REGULARIZER.value(w, record), best, rtol=1e-9)
    for _ in range(20):
        other = centring(m) @ zoo.random_spd(m, int(rng.integers(1000))) @ centring(m)
        assert value_at(0.9 * omega + 0.1 * other / np.trace(other)) >= best * (1 - 1e-9)
    # The coupling is the inverse of the quadratic form, on the mean and where Omega lets deviations go.
    values, vectors = np.linalg.eigh(omega)
    inside = (vectors * (values / (1 + values / SIGMA2) / (2 * LAM))) @ vectors.T
    coupling = REGULARIZER.coupling(m, record)
    np.testing.assert_allclose(as_matrix(coupling), inside + 1.0 / (2 * LAM0 * m), atol=1e-10)
    np.testing.assert_allclose(coupling.diagonal(), np.diag(as_matrix(coupling)), atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thin(1)
def test_value_conjugate_and_prox_belong_together(shape):
    """W = prox(Y) means that rho (Y - W) is a subgradient at W: Fenchel's inequality holds with equality there."""
    regularizer, rho = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), REGULARIZER), jnp.asarray(0.7)
    y, other = weights(shape, 1), weights(shape, 2)
    w = regularizer.prox(y, rho)
    g = rho * (y - w)
    conjugate = regularizer.conjugate(g)
    assert float(regularizer.value(w) + conjugate) == pytest.approx(float(jnp.sum(w * g)), rel=1e-9)
    assert regularizer.value(other) + conjugate >= jnp.sum(other * g)
    nearby = regularizer.prox_nearby(y, rho, regularizer.prox_start(y, jnp.ones(())))
    np.testing.assert_allclose(nearby.weights, w, atol=1e-12)
    assert float(jnp.sum(nearby.squares)) == pytest.approx(float(jnp.sum(w**2)), rel=1e-9)
    assert float(jnp.sum(nearby.squares_of)) == pytest.approx(float(jnp.sum(y**2)), rel=1e-9)


def test_it_holds_both_models():
    w, v = weights((5, 3)), weights((5, 3), 1)
    near = R.MeanRegularized(0.2, 0.05)
    ridge = R.MeanCovariance(0.05, 0.25 * 1e-9, 1e-9)
    np.testing.assert_allclose(ridge.value(w), near.value(w), rtol=1e-6)
    np.testing.assert_allclose(ridge.conjugate(v), near.conjugate(v), rtol=1e-6)
    np.testing.assert_allclose(ridge.coupling(5).apply(v), near.coupling(5).apply(v), rtol=1e-6)
    without_mean = jnp.asarray(centring(5) @ np.asarray(w))
    np.testing.assert_allclose(
        REGULARIZER.value(without_mean), R.Probabilistic(LAM, SIGMA2).value(without_mean), rtol=1e-9
    )


@pytest.mark.parametrize("rule", mj.coupling.SIGMA_PRIME_RULES)
def test_the_coupling_is_that_of_the_matrix(rule):
    rng = np.random.default_rng(0)
    nodes = np.array([1.0, 2.0, 1.0, 3.0, 1.0])
    for common, base in ((3.0, 0.2), (0.01, 0.4), (0.5, 0.0)):
        factor = centring(5) @ rng.normal(size=(5, 2))
        coupling = AboutMean(jnp.asarray(common), LowRank(jnp.asarray(base), jnp.asarray(factor)))
        matrix = common / 5 + base * centring(5) + factor @ factor.T
        dense, v, rho = Dense(jnp.asarray(matrix)), jnp.asarray(rng.normal(size=(5, 3))), jnp.asarray(0.8)
        for method, arguments in (("apply", (v,)), ("conjugate", (v,)), ("diagonal", ()), ("prox", (v, rho))):
            found, expected = (getattr(each, method)(*arguments) for each in (coupling, dense))
            np.testing.assert_allclose(found, expected, atol=1e-10)
        w = dense.apply(v)
        np.testing.assert_allclose(coupling.gradient(w), np.linalg.pinv(matrix) @ w, atol=1e-8)
        np.testing.assert_allclose(coupling.project_to_range(w), w, atol=1e-10)
        np.testing.assert_allclose(coupling.energy(w), dense.conjugate(v), rtol=1e-9)
        owner = np.repeat(np.arange(5), nodes.astype(int))
        sigma = np.asarray(coupling.sigma_prime(rule, 1.0, jnp.asarray(nodes)))
        safe = np.diag((sigma * np.diag(matrix))[owner]) - matrix[np.ix_(owner, owner)]
        assert np.linalg.eigvalsh(safe).min() >= -1e-9
        if rule != "spectral":
            np.testing.assert_allclose(
                sigma, np.maximum(dense.sigma_prime(rule, 1.0, jnp.asarray(nodes)), 1.0), rtol=1e-6
            )


@pytest.mark.parametrize(
    ("loss", "server"), [("hinge", "proximal"), ("squared", "proximal"), ("logistic", "dual")], ids=str
)
@pytest.mark.thin(1)
@pytest.mark.extended
def test_the_joint_optimum_is_the_convex_solvers(loss, server):
    data = zoo.data(regression=not zoo.LOSSES[loss].binary, loss_scaling="task_mean")
    problem = mj.Problem(data, zoo.LOSSES[loss], R.MeanCovariance(0.01, 0.02, 5.0))
    tol = 1e-7 if server == "proximal" else 1e-3  # alternation comes no closer
    solution = mj.solve(problem, mj.Mocha(server=server), tol=tol, max_rounds=20_000, record_every=20, chunk=500)
    assert solution.status == mj.Status.CONVERGED
    best, _ = oracles.optimum(data, loss, oracle(0.01, 0.02, 5.0), tol=1e-9)
    primal = float(solution.certificate.joint_primal)
    assert -1e-9 <= (primal - best) / best <= tol * (1 + 1e-3) + 1e-9
    assert solution.certificate.joint_dual <= best * (1 + 1e-8)
    np.testing.assert_allclose(mj.objective(problem, solution.weights), primal, rtol=1e-9)
    joint = float(mj.objective(problem, solution.weights, solution.relation))
    assert joint == pytest.approx(primal, rel=1e-6 if server == "proximal" else 1e-2)


@pytest.mark.extended
def test_a_large_mean_hides_nothing():
    """Deviations of a millionth of the mean in float32: bounds hold for the numbers as they are."""
    rng = np.random.default_rng(0)
    w = (1e3 + 1e-3 * rng.normal(size=(5, 3))).astype(np.float32)
    v = (2 * 1e-4 * w + 1e-3 * rng.normal(size=(5, 3))).astype(np.float32)
    regularizer = jax.tree.map(jnp.float32, R.MeanCovariance(1e-4, 0.3, 2.0))
    exact = R.MeanCovariance(*(float(a) for a in jax.tree.leaves(regularizer)))
    true = float(exact.value(jnp.asarray(w, float))), float(exact.conjugate(jnp.asarray(v, float)))
    assert abs(float(regularizer.value(jnp.asarray(w))) - true[0]) <= regularizer.value_error(jnp.asarray(w))
    gap = sum(true) - np.sum(v.astype(float) * w.astype(float))
    bound = float(regularizer.bracket(jnp.asarray(v), jnp.zeros_like(v), jnp.asarray(w)))
    assert gap <= bound <= 1.1 * gap + 1e-3


@pytest.mark.extended
def test_the_default_tolerance_is_within_reach_of_float32():
    """Of a hundred small problems none ends early because its proof loses more digits than were left for it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 5, 3, 3)).astype(np.float32)
    y = np.sign(rng.normal(size=(100, 5, 3))).astype(np.float32)
    strengths = (3 * 10.0 ** rng.uniform(-3, -1, (2, 100))).astype(np.float32)

    @jax.jit
    @jax.vmap
    def solve(x, y, lam0, lam):
        data = mj.TaskData(x, y, jnp.ones_like(y), jnp.arange(5), num_tasks=5)
        problem = mj.Problem(data, mj.losses.SmoothedHinge(0.07), R.MeanCovariance(lam0, lam))
        solution = mj.solve(problem, max_rounds=400)
        return solution.code, solution.certificate.residual - solution.history.residual

    codes, lost = solve(x, y, *strengths)
    assert (np.asarray(codes) == mj.Status.CONVERGED).all()
    assert np.median(lost) < 60 * np.finfo(np.float32).eps


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="MeanCovariance: lam0 must be finite and > 0"):
        R.MeanCovariance(0.0, 1.0)
    with pytest.raises(ValueError, match="MeanCovariance: lam0 must be a single number"):
        mj.Problem(zoo.data(), mj.losses.Hinge(), R.MeanCovariance(np.ones(5), 1.0))
