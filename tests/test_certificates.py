"""Certificates in floating point, judged by NumPy in more digits than the solves had."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from benchmarks import certificates as judge
from mocha_jax import _twofold
from mocha_jax._domains import POSITIVE
from tests import zoo

R, L = mj.regularizers, mj.losses


def exact_gap(problem, weights, beta):
    """P(W) - D(beta) of independent hinge tasks, in float64, of the float32 numbers as they are."""
    x, y, c, w, b = (np.asarray(a, float) for a in (problem.data.x, problem.data.y, problem.data.weight, weights, beta))
    lam = float(problem.regularizer.lam)
    primal = np.sum(c * np.maximum(1 - y * np.einsum("mnd,md->mn", x, w), 0)) + lam * np.sum(w**2)
    v = np.einsum("mn,mnd->md", c * b, x)
    return primal, primal - (np.sum(c * y * b) - np.sum(v**2) / (4 * lam))


@pytest.mark.parametrize("axis", ["features", "rows"])
def test_products_in_two_floats_are_as_exact_as_they_say(axis):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 37, 50)) * 10.0 ** rng.uniform(-3, 3, (4, 37, 50))).astype(np.float32)
    other = rng.normal(size=(4, 50 if axis == "features" else 37)).astype(np.float32)
    product, formula = {
        "features": (_twofold.times, "mnd,md->mn"), "rows": (_twofold.combine, "mnd,mn->md")
    }[axis]  # fmt: skip
    found, bound = (np.asarray(a, np.float64) for a in jax.jit(product)(x, other))
    true = np.einsum(formula, x.astype(np.longdouble), other.astype(np.longdouble))
    assert (np.abs(found - true) <= bound).all()
    plain = np.einsum(formula, x, other).astype(np.float64)
    assert (np.abs(plain - true) > bound).mean() > 0.5  # as the same in floats is not
    # Not more than a rounding of the result, but for results that nearly cancel.
    assert np.median(bound / np.abs(true)) < 2.0**-24


@pytest.mark.parametrize("loss", zoo.LOSSES)
def test_a_bound_on_a_term_holds_all_over_its_interval(loss):
    made, rng = zoo.LOSSES[loss], np.random.default_rng(1)
    count = 2000
    y = rng.choice([-1.0, 1.0], count) if made.binary else rng.normal(size=count)
    z = np.where(rng.random(count) < 0.3, y, 3 * rng.normal(size=count)).astype(np.float32)
    y, error = y.astype(np.float32), (10.0 ** rng.uniform(-9, -2, count)).astype(np.float32)
    beta = np.asarray(made.project(jnp.asarray(2 * rng.normal(size=count), jnp.float32), jnp.asarray(y)))
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), made)
    bound = np.asarray(single.fenchel_young_bound(*map(jnp.asarray, (z, error, beta, y))), float)
    double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), single)
    for share in (-1.0, -0.3, 0.0, 0.7, 1.0):
        at = z.astype(float) + share * error
        term = np.asarray(double.fenchel_young(*(jnp.asarray(a, jnp.float64) for a in (at, beta, y))))
        assert (term <= bound * (1 + 1e-12) + 1e-14).all()


@pytest.mark.parametrize("server", ["dual", "proximal"])
@pytest.mark.parametrize("lam", [1e-2, 1e-5, 1e-8])
def test_a_tiny_optimum_of_separable_data_is_not_certified_by_rounding(lam, server):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 12)).astype(np.float32), np.sign(rng.normal(size=5)).astype(np.float32)
    problem = mj.Problem(mj.pack_tasks([x], [y], dtype=np.float32), L.Hinge(), R.Independent(lam))
    found = mj.solve(problem, mj.Mocha(server=server), tol=1e-4, max_rounds=300)
    primal, gap = exact_gap(problem, found.weights, found.state.beta)
    assert gap <= found.gap
    assert abs(primal - found.primal) <= found.rounding
    # Margins in float32 are 1 to within 6e-8, which may be more than the whole optimum.
    if gap > 1e-4 * primal:
        assert found.status == mj.Status.PRECISION
        assert "float64" in found.message
    else:
        assert found.status in (mj.Status.CONVERGED, mj.Status.PRECISION)
    double = problem.replace(data=mj.pack_tasks([x.astype(float)], [y.astype(float)], dtype=np.float64))
    assert mj.solve(double, mj.Mocha(server=server), tol=1e-4, max_rounds=1000).status == mj.Status.CONVERGED


@pytest.mark.parametrize("name", judge.REGULARIZERS)
def test_a_bracket_bounds_the_distance_of_weights_from_those_implied(name):
    """Of W and V' that belong together exactly it is 0, and what is added is a few roundings of it."""
    rng = np.random.default_rng(2)
    m, d = 6, 4
    for lam, other in [(1e-3, 1.0), (1.0, 1e-3), (1e-6, 1e2)]:
        single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), judge.regularizer(name, m, lam, other))
        double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), single)
        v = jnp.asarray(rng.normal(size=(m, d)), jnp.float32)
        omega = single.initial_omega(m, d)
        w = single.coupling(m, omega).apply(v)
        error = 1e-6 * jnp.abs(v)
        bound = float(single.bracket(v, error, w, omega))
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), omega)
        for share in (-1.0, 0.0, 1.0):
            exact = v.astype(jnp.float64) + share * error.astype(jnp.float64)
            coupling = double.coupling(m, wide)
            implied = coupling.apply(exact)
            off = jnp.asarray(w, jnp.float64) - implied
            if name == "sparse":
                true = float(coupling.slack(exact, jnp.asarray(w, jnp.float64)))
            else:  # R is a squared norm
                true = float(0.5 * jnp.sum(off * coupling.gradient(off)))
            assert true <= bound
        assert bound <= 1e-4 * float(coupling.conjugate(exact))


BAD = {
    "independent": lambda bad: R.Independent(bad), "mean": lambda bad: R.MeanRegularized(0.1, bad),
    "mean, lam1": lambda bad: R.MeanRegularized(jnp.where(bad == 0, -1.0, bad), 0.1),
    "graph": lambda bad: R.Graph(jnp.eye(5), 0.1, bad), "clustered": lambda bad: R.Clustered(bad, 0.5, 2.0),
    "clustered, eta": lambda bad: R.Clustered(0.5, bad, 2.0), "probabilistic": lambda bad: R.Probabilistic(bad),
    "probabilistic, sigma2": lambda bad: R.Probabilistic(0.1, bad),
    "sparse": lambda bad: R.SparsePrecision(bad, 1.0, 0.1, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_hyperparameters_that_nobody_could_look_at_are_never_certified(name):
    problem = mj.Problem(zoo.data(dtype=np.float32), L.Hinge(), R.Independent(0.1))

    @jax.jit
    @jax.vmap
    def solved(lam):
        found = mj.solve(problem.replace(regularizer=BAD[name](lam)), tol=1e-2, max_rounds=3)
        history = mj.run(jax.random.key(0), mj.Mocha(), found.problem, num_rounds=2)[1]
        return found.code, found.certificate.gap, found.certificate.residual, history.gap

    code, gap, residual, recorded = solved(jnp.array([-1.0, 0.0, jnp.nan, 1e-39, 0.3], jnp.float32))
    wrong = slice(0, 3) if name == "mean, lam1" else slice(0, 4)  # a pull of 0 is none, which is fine
    assert (code[wrong] == mj.Status.NON_FINITE).all()
    for number in (gap, residual, recorded):
        assert not np.isfinite(np.asarray(number)[wrong]).any()
    assert np.isfinite(gap[4])
    assert code[4] != mj.Status.NON_FINITE


@pytest.mark.parametrize("make", [lambda a: L.SmoothedHinge(a), lambda a: L.Huber(a), lambda a: L.Quantile(a)])
def test_nor_are_those_of_a_loss(make):
    problem = mj.Problem(zoo.data(), L.Squared(), R.Independent(0.1))

    def gap(a):
        there = mj.Problem(problem.data.replace(y=jnp.sign(problem.data.y)), make(a), problem.regularizer)
        return mj.certificate(there, jnp.zeros_like(problem.data.y)).gap

    found = jax.vmap(gap)(jnp.array([-0.5, jnp.nan, 0.5]))
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2])


def test_a_domain_takes_numbers_below_the_smallest_normal_one_for_none():
    assert POSITIVE.contains(jnp.array([1e-38, 1e-37], jnp.float32)).tolist() == [False, True]


def test_rounding_is_counted_in_a_solution_and_not_in_a_history():
    problem = mj.Problem(zoo.data(dtype=np.float32), L.Hinge(), R.MeanRegularized(0.1, 0.01))
    found = mj.solve(problem, tol=1e-3)
    assert found.history.quality.rounding is None
    assert 0 < found.rounding < 1e-4 * found.primal
    assert found.history.relative_gap[-1] < found.relative_gap <= 1e-3
    np.testing.assert_allclose(found.dual, found.primal - found.gap - found.rounding, rtol=1e-6)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_of_the_sweep_holds(seed):
    """The benchmark's judge finds nothing wrong with these, and does find what is made wrong."""
    for group in judge.groups(np.random.default_rng(seed), 2, 8):
        found = judge.sweep(group, 60)
        assert [wrong for *_, wrong in judge.judge(group, found) if wrong] == []
        for solutions in found.values():
            solutions["gap"] = 0.01 * solutions["gap"]
            solutions["code"] = np.zeros_like(solutions["code"])
            solutions["weights"] = 1.01 * solutions["weights"]
        assert len([wrong for *_, wrong in judge.judge(group, found) if wrong]) > len(group.lam)


def test_the_objective_of_a_solution_has_the_derivative_of_the_objective():
    data = zoo.data(loss_scaling="task_mean")

    def primal(lam, of_solution):
        there = mj.Problem(data, L.Logistic(), R.Independent(lam))
        found = mj.solve(there, mj.Mocha(sigma_prime="per_task"), max_rounds=5, adjoint=mj.Unrolled())
        return found.certificate.primal if of_solution else mj.objective(there, found.weights)

    np.testing.assert_allclose(jax.grad(primal)(0.1, True), jax.grad(primal)(0.1, False), rtol=1e-10)
