"""Certificates in floating point, judged by NumPy in more digits than the solves had."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from benchmarks import certificates as judge
from mocha_jax._core.domains import POSITIVE
from mocha_jax._numerics import twofold
from tests import zoo

R, L = mj.regularizers, mj.losses


def exact_gap(problem, weights, beta):
    """P(W) - D(beta) of independent hinge tasks, in float64, of the float32 numbers as they are."""
    x, y, c, w, b = (np.asarray(a, float) for a in (problem.data.x, problem.data.y, problem.data.weight, weights, beta))
    lam = float(problem.regularizer.lam)
    primal = np.sum(c * np.maximum(1 - y * np.einsum("mnd,md->mn", x, w), 0)) + lam * np.sum(w**2)
    v = np.einsum("mn,mnd->md", c * b, x)
    return primal, primal - (np.sum(c * y * b) - np.sum(v**2) / (4 * lam))


@pytest.mark.parametrize("regularizer", [R.Independent(1e-20), R.Graph(np.ones((1, 1)), 1e-21, 1e-22)])
def test_an_objective_that_overflows_has_no_gap(regularizer):
    """A finite gap over an infinite objective is not 0."""
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("f")
    y = x[:, 0] + 1
    data = mj.pack_tasks([x], [y], dtype=np.float32)
    found = mj.certificate(mj.Problem(data, L.Absolute(), regularizer), jnp.asarray(0.5 * np.sign(y)[None]))
    assert np.isinf(found.primal)
    assert np.isfinite(found.gap)
    assert np.isinf(found.relative_gap)
    assert np.isinf(found.residual)
    assert not found.finite


def far_off(found, bound, pairs):
    """How many sums of products of floats are further from the truth, in rational numbers, than they say."""
    true = [
        sum((Fraction(float(p)) * Fraction(float(q)) for p, q in zip(*ab, strict=True)), Fraction()) for ab in pairs
    ]
    errors = [abs(Fraction(float(f)) - t) for f, t in zip(np.ravel(found), true, strict=True)]
    return sum(e > Fraction(float(b)) for e, b in zip(errors, np.ravel(bound), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 3, 100])
@pytest.mark.thin(2)
def test_products_in_two_floats_hold_to_the_last_digit(dtype, d):
    rng = np.random.default_rng(d)
    x, w = rng.normal(size=(8, 12, d)).astype(dtype), rng.normal(size=(8, d)).astype(dtype)
    x[0, :2], w[0] = 1.5 + 4 * np.finfo(dtype).eps ** 0.5, 1.5 + 4 * np.finfo(dtype).eps ** 0.5
    found, bound = jax.jit(twofold.times_with_error)(x, w)
    assert far_off(found, bound, [(x[k, i], w[k]) for k in range(8) for i in range(12)]) == 0
    for rests in (np.zeros_like(w), (w * np.finfo(dtype).eps * rng.uniform(-0.5, 0.5, w.shape)).astype(dtype)):
        found, bound = jax.jit(twofold.combine_with_error)(x.transpose(0, 2, 1), w, rests)
        pairs = [(np.tile(x[k, i], 2), np.concatenate([w[k], rests[k]])) for k in range(8) for i in range(12)]
        assert far_off(found, bound, pairs) == 0
    found, rest = jax.jit(twofold.product)(x[..., 0], x[..., 0])
    exact = [Fraction(float(f)) + Fraction(float(r)) for f, r in zip(np.ravel(found), np.ravel(rest), strict=True)]
    for value, a in zip(exact, np.ravel(x[..., 0]), strict=True):
        assert abs(value - Fraction(float(a)) ** 2) <= Fraction(float(np.finfo(dtype).eps)) ** 2 * value


@pytest.mark.parametrize("scales", [(1e-35, 400.0), (1e-37, 1.7e30), (1e-30, 1e-30), (1e-20, 1e-18)])
def test_products_of_tiny_numbers_say_what_may_have_vanished(scales):
    rng = np.random.default_rng(0)
    x, w = ((rng.normal(size=(1, 9, 4)) * s).astype(np.float32) for s in scales)
    found, bound = jax.jit(jax.vmap(twofold.times_with_error, (1, 1)))(x[:, :, None], w)
    assert far_off(found, bound, [(x[0, i], w[0, i]) for i in range(9)]) == 0


def test_the_nodes_of_a_task_are_added_up_as_exactly_as_is_said():
    rng = np.random.default_rng(0)
    a = (rng.normal(size=(20_000, 2)) + 1.0).astype(np.float32)
    task = jnp.asarray(rng.integers(0, 3, 20_000))
    found, bound = jax.jit(lambda a: twofold.added(a, lambda p: jax.ops.segment_sum(p, task, 3), lambda p: p[task]))(a)
    found, bound = np.asarray(found, float), np.asarray(bound, float)
    true = np.stack([a[np.asarray(task) == t].astype(float).sum(0) for t in range(3)])
    assert (np.abs(found - true) <= bound).all()
    assert (bound <= 1e-5 * np.abs(true)).all()
    plain = np.asarray(jax.ops.segment_sum(jnp.asarray(a), task, 3), float)
    assert (np.abs(plain - true) > bound).any()  # as a sum one by one is not


@pytest.mark.slow
def test_products_in_two_floats_hold_as_users_compile_them():
    """The tests above once more, in a process where XLA may optimise, fuse and contract as it does."""
    left_out = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {k: v for k, v in os.environ.items() if k not in left_out} | {"MOCHA_JAX_TESTS_OPTIMIZED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", __file__,
         "-k", "last_digit or tiny_numbers or nodes_of_a_task"],
        capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "..........." in done.stdout  # all eleven


@pytest.mark.parametrize("axis", ["features", "rows"])
def test_products_in_two_floats_are_as_exact_as_they_say(axis):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 37, 50)) * 10.0 ** rng.uniform(-3, 3, (4, 37, 50))).astype(np.float32)
    other = rng.normal(size=(4, 50 if axis == "features" else 37)).astype(np.float32)
    products: dict[str, tuple[Any, str]] = {
        "features": (twofold.times_with_error, "mnd,md->mn"),
        "rows": (lambda x, factors: twofold.combine_with_error(x, factors, jnp.zeros_like(factors)), "mnd,mn->md"),
    }
    product, formula = products[axis]
    found, bound = (np.asarray(a, np.float64) for a in jax.jit(product)(x, other))
    true = np.einsum(formula, x.astype(np.longdouble), other.astype(np.longdouble))
    assert (np.abs(found - true) <= bound).all()
    plain = np.einsum(formula, x, other).astype(np.float64)
    assert (np.abs(plain - true) > bound).mean() > 0.5  # as the same in floats is not
    # Not more than a rounding of the result, but for results that nearly cancel.
    assert np.median(bound / np.abs(true)) < 2.0**-24


def test_products_in_doubles_are_mapped_where_wider_types_are_off():
    rng = np.random.default_rng(0)
    x, w, c = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 4, 5), (2, 3, 5), (2, 3, 4)))
    with jax.enable_x64(False):
        each = [
            (jax.jit(jax.vmap(twofold.times_with_error))(x, w), "kmnd,kmd->kmn", w),
            (jax.jit(jax.vmap(twofold.combine_with_error))(x, c, np.zeros_like(c)), "kmnd,kmn->kmd", c),
        ]
    for (found, bound), formula, factors in each:
        assert found.dtype == bound.dtype == np.float32
        true = np.einsum(formula, x.astype(float), factors.astype(float))
        assert (np.abs(np.asarray(found, float) - true) <= np.asarray(bound, float)).all()


@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(4)
def test_a_bound_on_a_term_holds_all_over_its_interval(loss):
    made, rng = zoo.LOSSES[loss], np.random.default_rng(1)
    count = 2000
    y = np.asarray(rng.choice([-1.0, 1.0], count) if made.binary else rng.normal(size=count), np.float32)
    z = np.where(rng.random(count) < 0.3, y, 3 * rng.normal(size=count)).astype(np.float32)
    error = (10.0 ** rng.uniform(-9, -2, count)).astype(np.float32)
    beta = np.asarray(made.project(jnp.asarray(2 * rng.normal(size=count), jnp.float32), jnp.asarray(y)))
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), made)
    bound = np.asarray(single.fenchel_young_bound(*map(jnp.asarray, (z, error, beta, y))), float)
    double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), single)
    for share in (-1.0, -0.3, 0.0, 0.7, 1.0):
        at = z.astype(float) + share * error
        term = np.asarray(double.fenchel_young(*(jnp.asarray(a, jnp.float64) for a in (at, beta, y))))
        assert (term <= bound * (1 + 1e-12) + 1e-14).all()


@pytest.mark.parametrize(
    ("lam", "server"),
    [(1e-2, "proximal"), (1e-5, "dual"), (1e-5, "proximal"), (1e-8, "dual"), (1e-8, "proximal"), pytest.param(1e-2, "dual", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.slow
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
@pytest.mark.thin(1)
def test_a_bracket_bounds_the_distance_of_weights_from_those_implied(name):
    """Of W and V' that belong together exactly it is 0, and what is added is a few roundings of it."""
    rng = np.random.default_rng(2)
    m, d = 6, 4
    for lam, other in [(1e-3, 1.0), (1.0, 1e-3), (1e-6, 1e2)]:
        single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), judge.regularizer(name, m, lam, other))
        double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), single)
        v = jnp.asarray(rng.normal(size=(m, d)), jnp.float32)
        omega = single.known_relation("test", None, m, d)
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


@pytest.mark.parametrize(
    "name", [n if n in ("mean", "clustered") else pytest.param(n, marks=pytest.mark.slow) for n in BAD]
)
@pytest.mark.slow
def test_hyperparameters_that_nobody_could_look_at_are_never_certified(name):
    problem = mj.Problem(zoo.data(dtype=np.float32), L.Hinge(), R.Independent(0.1))

    @jax.jit
    @jax.vmap
    def solved(lam):
        found = mj.solve(problem.replace(regularizer=BAD[name](lam)), tol=1e-2, max_rounds=3)
        history = mj.run(found.problem, mj.Mocha(), jax.random.key(0), num_rounds=2)[1]
        return found.code, found.certificate.gap, found.certificate.residual, history.gap

    code, gap, residual, recorded = solved(jnp.array([-1.0, 0.0, jnp.nan, 1e-39, 0.3], jnp.float32))
    wrong = slice(0, 3) if name == "mean, lam1" else slice(0, 4)  # a pull of 0 is none, which is fine
    assert (code[wrong] == mj.Status.NON_FINITE).all()
    for number in (gap, residual, recorded):
        assert not np.isfinite(np.asarray(number)[wrong]).any()
    assert np.isfinite(gap[4])
    assert code[4] != mj.Status.NON_FINITE


@pytest.mark.parametrize("make", [lambda a: L.SmoothedHinge(a), lambda a: L.Huber(a), lambda a: L.Quantile(a)])
@pytest.mark.slow
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


@pytest.mark.parametrize("lam", [1e-9, 2e-9, 5e-9])
@pytest.mark.slow
def test_a_lower_bound_with_duals_near_0_holds(lam):
    # (1 - a) log(1 - a) with a rounded difference would be off by more than the whole conjugate.
    data = mj.pack_tasks([np.ones((1, 1), np.float32)], [np.ones(1)], dtype=np.float32)
    found = mj.solve(mj.Problem(data, L.Logistic(), R.Probabilistic(lam)))
    w = np.linspace(0, 40, 400_001)
    optimum = np.min(np.log1p(np.exp(-w)) + float(np.float32(lam)) * w**2)
    assert float(found.certificate.joint_dual) <= optimum * (1 + 1e-9)
    at = float(found.weights[0, 0])
    assert (
        np.log1p(np.exp(-at)) + float(np.float32(lam)) * at**2 - optimum
        <= float(found.certificate.joint_gap) + 1e-9 * optimum
    )


def test_a_conjugate_that_is_searched_for_is_bounded_from_above():
    # The search ends on a grid of 2^-23, which labels of 1e-6 see.
    loss, rng = L.from_scalar(lambda z, y: jnp.abs(z - y), lipschitz=1.0), np.random.default_rng(0)
    z, y = (1e-6 * rng.normal(size=(2, 500))).astype(np.float32)
    beta = rng.uniform(-0.99, 0.99, 500).astype(np.float32)
    bound = np.asarray(loss.fenchel_young_bound(*map(jnp.asarray, (z, 0 * z, beta, y))), float)
    off = z.astype(float) - y
    assert (np.abs(off) + beta.astype(float) * off <= bound * (1 + 1e-12)).all()
    conjugate = np.asarray(loss.conjugate_bound(jnp.asarray(beta), jnp.asarray(y)), float)
    assert (-beta.astype(float) * y <= conjugate).all()


@pytest.mark.slow
def test_a_lower_bound_with_a_loss_of_ones_own_holds():
    data = mj.pack_tasks([np.eye(2, dtype=np.float32)], [np.full(2, 1.3e-6)], dtype=np.float32)
    loss = L.from_scalar(lambda z, y: jnp.abs(z - y), lipschitz=1.0)
    found = mj.solve(mj.Problem(data, loss, R.Probabilistic(10.0)), max_rounds=50)
    best = float(np.sum(np.full(2, np.float32(1.3e-6), float)))  # of weights 0, and no others are better
    assert float(found.certificate.joint_dual) <= best


@pytest.mark.parametrize("unit", [1e-17, 1e-18, 1e-19, 1e-20])
@pytest.mark.parametrize("server", ["dual", "proximal"])
@pytest.mark.slow
def test_squares_too_small_for_floats_are_not_taken_for_0(unit, server):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5)).astype(np.float32)
    y = (unit * rng.normal(size=40)).astype(np.float32)
    problem = mj.Problem(mj.pack_tasks([x], [y], dtype=np.float32), L.Squared(), R.Independent(0.1))
    found = mj.solve(problem, mj.Mocha(server=server), max_rounds=200)
    x, y, w, lam = x.astype(float), y.astype(float), np.asarray(found.weights[0], float), float(np.float32(0.1))

    def objective(w):
        return 0.5 * np.sum((x @ w - y) ** 2) + lam * np.sum(w**2)

    best = objective(np.linalg.solve(x.T @ x + 2 * lam * np.eye(5), x.T @ y))
    assert found.status != mj.Status.CONVERGED
    assert objective(w) - best <= found.gap
    assert abs(objective(w) - found.primal) <= found.rounding


@pytest.mark.parametrize("what", ["labels", "weights", "too many clusters"])
@pytest.mark.slow
def test_samples_that_nobody_could_look_at_are_never_certified(what):
    data = zoo.data(dtype=np.float32)
    regularizer = R.Clustered(0.1, 0.5, 2.0)

    @jax.jit
    def gap(data, k):
        problem = mj.Problem(data, L.Hinge(), regularizer.replace(k=k))
        found = mj.solve(problem, max_rounds=2)
        return found.certificate.gap, found.code

    k = 50.0 if what == "too many clusters" else 2.0
    leaf = {"labels": dict(y=2.0 * data.y), "weights": dict(weight=-data.weight)}.get(what, {})
    wrong = jax.tree.unflatten(jax.tree.structure(data), jax.tree.leaves(data))
    for name, value in leaf.items():
        object.__setattr__(wrong, name, value)
    found, code = gap(wrong, k)
    assert np.isnan(found)
    assert code == mj.Status.NON_FINITE
    assert np.isfinite(gap(data, 2.0)[0])


@pytest.mark.parametrize("eta", [None, 1e-9])
@pytest.mark.thin(1)
def test_the_noise_of_small_singular_values_is_in_the_rounding(eta):
    # One model for a hundred tasks: all singular values but one are 0, and come out as noise of one sign.
    rng = np.random.default_rng(0)
    w = jnp.asarray(np.tile(rng.normal(size=100), (100, 1)), jnp.float32)
    regularizer = R.Probabilistic(1.0) if eta is None else R.Clustered(1.0, eta, 2.0)
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), regularizer)
    double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), single)
    largest = jnp.linalg.norm(w[0].astype(jnp.float64)) * 10.0
    true = double.spectral_value(jnp.zeros(100).at[0].set(largest))
    off = abs(float(single.value(w)) - float(true))
    assert off <= float(single.value_error(w)) <= 50 * off


@pytest.mark.slow
def test_rounding_is_counted_in_a_solution_and_not_in_a_history():
    problem = mj.Problem(zoo.data(dtype=np.float32), L.Hinge(), R.MeanRegularized(0.1, 0.01))
    found = mj.solve(problem, tol=1e-3)
    assert isinstance(found.history.quality, mj.Certificate)
    assert found.history.quality.rounding is None
    assert 0 < found.rounding < 1e-4 * found.primal
    assert found.history.relative_gap[-1] < found.relative_gap <= 1e-3
    np.testing.assert_allclose(found.dual, found.primal - found.gap - found.rounding, rtol=1e-6)


@pytest.mark.parametrize(
    ("seed", "names"),
    [
        (0, ("proximal",)),
        pytest.param(0, ("adaptive", "safe", "interior point"), marks=pytest.mark.extended),
        pytest.param(1, tuple(judge.ALGORITHMS), marks=pytest.mark.slow),
    ],
)
def test_a_sample_of_the_sweep_holds(seed, names):
    """The benchmark's judge finds nothing wrong with these, and does find what is made wrong."""
    for group in judge.groups(np.random.default_rng(seed), 1, 8):
        found = judge.sweep(group, 60, algorithms={name: judge.ALGORITHMS[name] for name in names})
        assert [wrong for *_, wrong in judge.judge(group, found) if wrong] == []
        for solutions in found.values():
            solutions["gap"] = 0.01 * solutions["gap"]
            solutions["code"] = np.zeros_like(solutions["code"])
            solutions["weights"] = 1.01 * solutions["weights"]
        assert len([wrong for *_, wrong in judge.judge(group, found) if wrong]) > len(group.lam)


@pytest.mark.slow
def test_the_objective_of_a_solution_has_the_derivative_of_the_objective():
    data = zoo.data(loss_scaling="task_mean")

    def primal(lam, of_solution):
        there = mj.Problem(data, L.Logistic(), R.Independent(lam))
        found = mj.solve(there, mj.Mocha(sigma_prime="per_task"), max_rounds=5, adjoint=mj.Unrolled())
        return found.certificate.primal if of_solution else mj.objective(there, found.weights)

    np.testing.assert_allclose(jax.grad(primal)(0.1, True), jax.grad(primal)(0.1, False), rtol=1e-10)
