"""The prior (13) with its log-determinant: the closed update, descent, what a floor is for, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.coupling import as_matrix
from tests import zoo

LAM, SIGMA2, FLOOR = 0.3, 2.0, 0.05
PRIOR = mj.regularizers.MatrixNormal(LAM, SIGMA2, FLOOR)
SHAPES = [(6, 3), (3, 6), (2, 1), (4, 4)]


def weights(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def value_at(w, omega):
    """R(W, Omega) as the paper writes it."""
    quadratic = np.sum(w**2) / SIGMA2 + np.trace(w.T @ np.linalg.solve(omega, w))
    return LAM * (quadratic + w.shape[1] * np.linalg.slogdet(omega)[1])


def raised(matrix, floor=FLOOR):
    """Eigenvalues raised to the floor."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, floor)) @ vectors.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_the_update_is_the_sample_covariance_raised_to_the_floor_and_none_is_better(shape):
    m, d = shape
    w, rng = weights(shape), np.random.default_rng(1)
    relation = PRIOR.update_relation(None, jnp.asarray(w))
    omega = np.asarray(PRIOR.relationship(m, relation))
    np.testing.assert_allclose(omega, raised(w @ w.T / d), rtol=1e-9, atol=1e-12)
    least = value_at(w, omega)
    np.testing.assert_allclose(PRIOR.value(jnp.asarray(w)), least, rtol=1e-10)
    for scale in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            a = rng.normal(size=(m, m))
            assert value_at(w, raised(omega + scale * (a + a.T))) >= least - 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thin(1)
def test_value_coupling_and_their_parts_are_the_papers(shape):
    m, d = shape
    w = weights(shape, 3)
    relation = PRIOR.update_relation(None, jnp.asarray(weights(shape, 4)))
    omega = np.asarray(PRIOR.relationship(m, relation))
    np.testing.assert_allclose(PRIOR.value(jnp.asarray(w), relation), value_at(w, omega), rtol=1e-9)
    np.testing.assert_allclose(PRIOR.offset(relation, d), LAM * d * np.linalg.slogdet(omega)[1], rtol=1e-9, atol=1e-12)
    inverse = 2 * LAM * (np.eye(m) / SIGMA2 + np.linalg.inv(omega))
    np.testing.assert_allclose(np.asarray(as_matrix(PRIOR.coupling(m, relation))) @ inverse, np.eye(m), atol=1e-8)
    steep, flat = PRIOR.curvatures(m, relation)
    np.testing.assert_allclose([1 / steep, flat], np.linalg.eigvalsh(np.linalg.inv(inverse))[[0, -1]], rtol=1e-7)


def test_without_a_floor_it_has_no_lower_bound():
    w = jnp.zeros((3, 4))
    values = [float(mj.regularizers.MatrixNormal(LAM, SIGMA2, 10.0**-k).value(w)) for k in range(1, 9)]
    np.testing.assert_allclose(np.diff(values), -LAM * 4 * 3 * np.log(10.0), rtol=1e-6)  # as far down as one likes
    for seed in range(5):  # and with one, never below that of W = 0
        assert float(PRIOR.value(jnp.asarray(weights((3, 4), seed)))) >= LAM * 4 * 3 * np.log(FLOOR)


def make(lam=0.02, loss="squared", dtype=np.float64):
    data = zoo.data(loss_scaling="task_mean", regression=not zoo.LOSSES[loss].binary, dtype=dtype)
    return mj.Problem(data, zoo.LOSSES[loss], mj.regularizers.MatrixNormal(lam, 5.0, 0.02))


def derivative(p, w, floor):
    """Of the objective of `make` with squared losses, with the best Omega for these weights, in NumPy."""
    x, y, c = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight))
    of_data = np.einsum("ti,tid->td", c * (np.einsum("tid,td->ti", x, w) - y), x)
    return of_data + 2 * 0.02 * (w / 5.0 + np.linalg.solve(raised(w @ w.T / 4, floor), w))


@pytest.mark.slow
def test_alternation_descends_to_a_stationary_point(key):
    p = make()
    algorithm, state, seen = mj.Mocha(4.0, sigma_prime="per_task", omega_every=30), None, []
    for _ in range(12):  # W solved nearly, Omega replaced
        state, _ = mj.run(p, algorithm, key, num_rounds=30, state=state)
        seen.append(float(mj.objective(p, state.w, algorithm.relation(state, p))))
    assert (np.diff(seen) <= 1e-9).all()
    found = mj.solve(p, mj.Mocha(4.0), tol=1e-9, max_rounds=4000)
    assert found.status == mj.Status.CONVERGED
    assert found.joint_gap is None
    w = np.asarray(found.weights)
    np.testing.assert_allclose(found.omega, raised(w @ w.T / 4, 0.02), atol=1e-4)
    np.testing.assert_allclose(derivative(p, w, 0.02), 0.0, atol=1e-4)


@pytest.mark.slow
def test_the_certificate_is_for_the_omega_at_hand(key):
    p = make(loss="hinge", dtype=np.float32)
    found = mj.solve(p, tol=1e-3, max_rounds=2000)
    graph = mj.regularizers.Graph(np.linalg.inv(np.asarray(found.omega, float)), 0.02, 0.02 / 5.0)
    best = mj.solve(p.replace(regularizer=graph), tol=1e-5, max_rounds=3000)
    there = float(mj.objective(p.replace(regularizer=graph), found.weights))
    assert there - best.dual >= 0.0
    assert there - best.primal <= found.gap + 1e-6
    assert np.isinf(float(found.certificate.joint_gap))


@pytest.mark.slow
def test_where_it_ends_depends_on_where_it_begins():
    p = make().replace(regularizer=mj.regularizers.MatrixNormal(0.02, 5.0, 1e-3))
    trapped, free = (
        mj.solve(p, mj.Mocha(4.0, initial_omega=scale * np.eye(5)), tol=1e-4, max_rounds=3000) for scale in (1e-3, 1.0)
    )
    assert trapped.status == free.status == mj.Status.CONVERGED
    np.testing.assert_allclose(trapped.omega, 1e-3 * np.eye(5), atol=1e-9)  # every direction is at the floor and stays
    assert np.linalg.eigvalsh(np.asarray(free.omega))[-1] > 0.01


@pytest.mark.slow
def test_derivatives_of_the_optimum_are_central_differences():
    problem, target = make(), np.random.default_rng(7).normal(size=(5, 4))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def score(numbers):
        p = problem.replace(regularizer=mj.regularizers.MatrixNormal(*numbers))
        # With the derivative come the weights of the optimum itself: alternation gets there slowly.
        weights = mj.solve(p, mj.Mocha(4.0), tol=1e-7, max_rounds=1500).weights
        return jnp.sum(weights * target), weights

    at = np.array([0.02, 5.0, 0.02])
    (_, w), slope = score(tuple(at))
    np.testing.assert_allclose(derivative(problem, np.asarray(w), 0.02), 0.0, atol=1e-9)
    for i in range(3):
        step = 1e-4 * at[i] * np.eye(3)[i]
        high, low = (float(score(tuple(at + sign * step))[0][0]) for sign in (1.0, -1.0))
        np.testing.assert_allclose(slope[i], (high - low) / (2e-4 * at[i]), rtol=1e-4)


@pytest.mark.slow
def test_a_state_goes_on_with_a_higher_floor_and_new_tasks(key):
    p = make()
    algorithm = mj.Mocha(2.0)
    state, _ = mj.run(p, algorithm, key, num_rounds=20)
    higher = p.replace(regularizer=mj.regularizers.MatrixNormal(0.02, 5.0, 0.5))
    resumed = algorithm.resume(state, higher)
    omega = np.asarray(higher.relationship(5, algorithm.relation(resumed, higher)))
    assert np.linalg.eigvalsh(omega)[0] >= 0.5 - 1e-9
    more = p.replace(data=p.data.append(zoo.data(loss_scaling="task_mean", regression=True, m=2, seed=3)))
    grown, _ = mj.run(more, algorithm, key, num_rounds=12, state=algorithm.add_tasks(state, more))
    assert np.isfinite(np.asarray(grown.w)).all()
    assert grown.w.shape == (7, 4)


BAD = {
    "lam": (lambda: mj.regularizers.MatrixNormal(0.0, 1.0, 1.0), "MatrixNormal: lam"),
    "floor": (lambda: mj.regularizers.MatrixNormal(1.0, 1.0, 0.0), "MatrixNormal: floor"),
    "below the floor": (
        lambda: mj.Mocha(initial_omega=0.01 * np.eye(5)).init(make()),
        "initial_omega must have no eigenvalue below the floor 0.02",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    with pytest.raises(ValueError, match=BAD[name][1]):
        BAD[name][0]()


@pytest.mark.slow
def test_hyperparameters_that_nobody_could_look_at_are_never_certified():
    p = make(loss="hinge")

    def gap(floor):
        there = p.replace(regularizer=mj.regularizers.MatrixNormal(0.02, 5.0, floor))
        return mj.solve(there, tol=None, max_rounds=3).gap

    assert np.isnan(jax.jit(gap)(-1.0))
    assert np.isfinite(jax.jit(gap)(0.1))
