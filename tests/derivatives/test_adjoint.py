"""Derivatives of a solve: implicit and unrolled against central differences, closed forms and one another."""

import logging
import re
import warnings
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._numerics.linear_systems import minres
from tests import zoo

R = mj.regularizers
M, D = 4, 3

# Every loss and every regularizer with all its parameters; a few pairs of them stand for all.
CASES = {
    "ridge": ("squared", R.Independent(np.array([0.1, 0.2, 0.05, 0.4]))),
    "logistic near the mean": ("logistic", R.MeanRegularized(0.2, 0.05)),
    "svm on a graph": ("hinge", R.Graph(zoo.laplacian(M), 0.1, 0.05)),
    "smoothed svm in clusters": ("smoothed_hinge", R.Clustered(0.05, 0.3, 1.5)),
    "svm, learned": ("hinge", R.Probabilistic(0.02, 3.0)),
    "huber, learned": ("huber", R.Probabilistic(0.02)),
    "tube, clusters": ("epsilon_insensitive", R.Clustered(0.02, 0.3, 1.5)),
    "quantile near the mean": ("quantile", R.MeanRegularized(0.2, 0.05)),
    "a scalar loss": ("fair", R.MeanRegularized(0.2, 0.05)),
    "median": ("absolute", R.Independent(0.05)),
    "squared hinge, learned": ("squared_hinge", R.Probabilistic(0.1, 2.0)),
    "smoothed svm, learned": ("smoothed_hinge", R.Probabilistic(0.05, 2.0)),
    "ridge, sparse precision": ("squared", R.SparsePrecision(0.05, 2.0, 0.02, 0.05)),
    "ridge, low rank": ("squared", R.TraceNorm(0.05, 0.02)),
    "svm, joint sparse": ("hinge", R.JointSparse(0.1, 0.02)),
    "svm about the mean": ("hinge", R.MeanCovariance(0.03, 0.02, 3.0)),
    "logistic, a factor a feature": ("logistic", R.PerFeature(R.MeanRegularized(0.2, 0.05), np.array([0.5, 1.0, 4.0]))),
    "svm, sparse precision": ("hinge", R.SparsePrecision(0.05, 2.0, 0.0, 0.05)),
}
# Each loss and regularizer is in one that is not slow, but for those that take the way of another.
SLOW = {
    "smoothed svm in clusters",
    "ridge",
    "huber, learned",
    "tube, clusters",
    "median",
    "squared hinge, learned",
    "svm, sparse precision",
    "logistic near the mean",
    "logistic, a factor a feature",
    "smoothed svm, learned",
    "svm, learned",
    "svm about the mean",
    "a scalar loss",
}
TARGET = np.random.default_rng(7).normal(size=(M, D))


def fair(z, y):
    return jnp.abs(z - y) - jnp.log1p(jnp.abs(z - y))


LOSSES = zoo.LOSSES | {"fair": mj.losses.from_scalar(fair, smoothness=1.0, lipschitz=1.0)}


def make(loss, regularizer):
    classes = loss in zoo.CLASSIFICATION_LOSSES
    data = zoo.data(seed=3, m=M, d=D, low=6, high=14, loss_scaling="task_mean", regression=not classes)
    return mj.Problem(data, LOSSES[loss], regularizer)


def score(weights):
    return jnp.sum((weights - TARGET) ** 2) + 0.3 * jnp.sum(weights**3)


def solved(problem, adjoint=None, rounds=120, algorithm=None):
    if algorithm is None:
        every = None if problem.regularizer.jointly_convex else 2
        algorithm = mj.Mocha(3.0, sigma_prime="per_task", omega_every=every)
    return mj.solve(problem, algorithm, tol=0.0, max_rounds=rounds, record_every=rounds, adjoint=adjoint)


def direction_of(problem, seed=0):
    """Relative changes of all parameters, weights of samples, samples and (where real) labels; a plain pytree."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        where, a = jax.tree_util.keystr(path), np.asarray(leaf)
        if not np.isfinite(a).all() or a.dtype.kind != "f" or (problem.loss.binary and where == ".data.y"):
            return np.zeros_like(a)
        u = a * rng.normal(size=a.shape)
        return u + u.T if where == ".regularizer.omega" else u  # it must stay symmetric

    return jax.tree_util.tree_map_with_path(one, problem)


def moved(problem, direction, step):
    return jax.tree.map(lambda a, u: a + step * u if np.asarray(a).dtype.kind == "f" else a, problem, direction)


def along(gradient, direction):
    """The directional derivative."""
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    return sum(float(np.sum(np.asarray(g) * u)) for g, u in pairs if g.dtype != jax.dtypes.float0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
@pytest.mark.thin(1)
def test_implicit_gradients_of_everything_equal_central_differences(name):
    problem = make(*CASES[name])
    found = mj.hypergradient(score, solved(problem))
    assert found.residual < 1e-8
    direction, want = direction_of(problem), difference(name)
    assert abs(want) > 1e-2  # there is something to find
    assert along(found.gradient, direction) == pytest.approx(want, rel=1e-5)


@cache
def difference(name, step=1e-4):
    """The central difference along `direction_of` the case's problem."""
    problem = make(*CASES[name])
    high, low = (float(score(solved(moved(problem, direction_of(problem), s)).weights)) for s in (step, -step))
    return (high - low) / (2 * step)


@pytest.mark.parametrize(
    ("name", "server", "expected"),
    [
        # What is known after 3, 10 and 100 rounds, and at the default gap; a dot where rounding decides.
        pytest.param("svm, learned", "proximal", "nyyy", marks=pytest.mark.slow),
        ("svm, learned", "dual", "nnnn"),  # it stalls at a joint gap of 0.05
        pytest.param("huber, learned", "dual", "yyyy", marks=pytest.mark.slow),  # at 0.2, and Newton steps lead on
        pytest.param("tube, clusters", "proximal", "nnyy", marks=pytest.mark.slow),
        pytest.param("median", None, "..yy", marks=pytest.mark.slow),
        pytest.param("svm, sparse precision", None, "nnyy", marks=pytest.mark.slow),
        ("logistic near the mean", None, "yyyy"),
    ],
)
@pytest.mark.slow
def test_a_gradient_after_too_few_rounds_is_right_or_no_number(name, server, expected):
    problem = make(*CASES[name])
    direction, want = direction_of(problem), difference(name)
    algorithm = mj.Mocha(server=server)
    known = ""
    for tol, rounds in ((None, 3), (None, 10), (None, 100), (1e-4, 1000)):
        solution = mj.solve(problem, algorithm, tol=tol, max_rounds=rounds)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = mj.hypergradient(score, solution)
        got = along(found.gradient, direction)
        known += "n" if np.isnan(got) else "y"
        if np.isnan(got):
            assert found.distance > mj.Implicit().worst
            assert "the solution is not near the optimum" in str(said[0].message)
        else:
            assert not said
            assert got == pytest.approx(want, rel=1e-5)
            assert abs(along(found.error, direction)) < 1e-4 * abs(got)
    assert re.fullmatch(expected, known)


@pytest.mark.slow
def test_what_comes_with_a_derivative_is_the_optimum_or_the_derivative_is_no_number():
    problem, exact = make(*CASES["svm, learned"]), solved(make(*CASES["svm, learned"]))

    @partial(jax.jit, static_argnums=1)
    def slope(lam, algorithm, rounds=10):
        def at(lam):
            there = problem.replace(regularizer=R.Probabilistic(lam, 3.0))
            solution = mj.solve(there, algorithm, tol=None, max_rounds=rounds)
            return score(solution.weights), (solution.weights, solution.primal, solution.certificate.joint_dual)

        return jax.value_and_grad(at, has_aux=True)(lam)

    (value, (weights, primal, dual)), got = slope(0.02, mj.Mocha())
    assert got == pytest.approx(float(mj.hypergradient(score, exact).gradient.regularizer.lam), rel=1e-6)
    assert np.linalg.norm(mj.solve(problem, tol=None, max_rounds=10).weights - exact.weights) > 1e-3
    np.testing.assert_allclose(weights, exact.weights, rtol=1e-6)
    assert value == pytest.approx(float(score(exact.weights)), rel=1e-8)
    assert primal == pytest.approx(exact.primal, rel=1e-8)
    assert dual <= exact.primal
    (value, _), got = slope(0.02, mj.Mocha(server="dual"))
    assert np.isnan(got)
    assert value == pytest.approx(
        float(score(mj.solve(problem, mj.Mocha(server="dual"), tol=None, max_rounds=10).weights)), rel=1e-6
    )


@pytest.mark.slow
def test_implicit_gradients_of_ridge_equal_those_of_its_closed_form():
    problem = make("squared", R.Independent(np.array([0.1, 0.2, 0.05, 0.4])))
    data = problem.data

    def closed(lam, x, y, weight):
        def one(lam, x, y, c):
            return jnp.linalg.solve((x.T * c[None]) @ x + 2 * lam * jnp.eye(D), (x.T * c[None]) @ y)

        return score(jax.vmap(one)(lam, x, y, weight))

    want = jax.grad(closed, argnums=(0, 1, 2, 3))(problem.regularizer.lam, data.x, data.y, data.weight)
    got = mj.hypergradient(score, solved(problem, algorithm=mj.Mocha(10.0))).gradient
    real = data.weight > 0
    ours = got.regularizer.lam, got.data.x, got.data.y, jnp.where(real, got.data.weight, 0.0)
    for a, b in zip(ours, (*want[:3], jnp.where(real, want[3], 0.0)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)
    assert not np.any(np.where(real, 0.0, got.data.weight))  # padding takes no part


def unrolled(problem, algorithm, rounds, checkpoint=True):
    """Through the rounds: the gradient with respect to regularizer, loss and samples."""

    def value(regularizer, loss, x):
        there = mj.Problem(problem.data.replace(x=x), loss, regularizer)
        return score(solved(there, mj.Unrolled(checkpoint), rounds, algorithm).weights)

    return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(problem.regularizer, problem.loss, problem.data.x)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ridge", marks=pytest.mark.slow),
        "svm on a graph",
        pytest.param("smoothed svm, learned", marks=pytest.mark.slow),
        pytest.param("svm, learned", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_unrolled_gradients_equal_implicit_ones(name):
    problem = make(*CASES[name])
    got = unrolled(problem, mj.Mocha(3.0, sigma_prime="per_task"), 120)
    want = mj.hypergradient(score, solved(problem)).gradient
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves((want.regularizer, want.loss, want.data.x)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7 * float(jnp.abs(theirs).max()))


@pytest.mark.slow
def test_rounds_with_an_adaptive_sigma_have_the_derivative_of_safe_ones():
    # Logistic: weights that weigh nothing and sigma' below the safe one would make derivatives diverge.
    problem = make("logistic", R.MeanRegularized(0.2, 0.05))
    got = unrolled(problem, mj.Mocha(3.0), 120, checkpoint=False)
    want = mj.hypergradient(score, solved(problem)).gradient
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves((want.regularizer, want.loss, want.data.x)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * float(jnp.abs(theirs).max()))


@pytest.mark.slow
def test_a_solve_inside_a_transformation_is_the_same_solve():
    problem, lams = make("hinge", R.MeanRegularized(0.2, 0.05)), jnp.array([0.01, 0.1, 1.0])

    def at(lam, adjoint=None):
        there = problem.replace(regularizer=R.MeanRegularized(0.2, lam))
        return mj.solve(there, tol=1e-6, max_rounds=500, record_every=2, adjoint=adjoint)

    many = jax.jit(jax.vmap(at))(lams)
    for i, lam in enumerate(lams):
        one = at(lam)
        assert (int(many.code[i]), int(many.rounds[i])) == (one.status, one.rounds)
        np.testing.assert_allclose(many.weights[i], one.weights, rtol=1e-4, atol=1e-7)
        assert many.certificate.relative_gap[i] <= 1e-6
    # Forward and backward, one by one and mapped, through the implicit rule.
    whole = jax.jit(jax.jacfwd(lambda lam: jax.vmap(at)(lam).weights))(lams)

    def scored(lam):
        weights = at(lam).weights
        return score(weights), weights

    # At the weights of the same program: those of another one are rounded otherwise, within the tolerance.
    each, weights = jax.jit(jax.vmap(jax.grad(scored, has_aux=True)))(lams)
    for i in range(3):
        assert not jnp.any(jnp.delete(whole[i], i, axis=-1))
        pulled = jnp.sum(jax.grad(score)(weights[i]) * whole[i, ..., i])
        assert float(each[i]) == pytest.approx(float(pulled), rel=1e-6)


def test_a_solve_that_is_differentiated_runs_from_the_host_with_the_same_programs(tmp_path, caplog):
    problem = make("hinge", R.MeanRegularized(0.2, 0.05))
    rounds: list[list[int]] = []

    def solve(lam: Any, **options: Any) -> mj.Solution:
        return mj.solve(problem.replace(regularizer=R.MeanRegularized(lam, 0.05)), tol=1e-6, chunk=5, **options)

    def length(lam: jax.Array) -> jax.Array:
        solution = solve(lam, checkpoint=tmp_path / "run.npz", callback=lambda round, history: rounds.append([round]))
        rounds.append(solution.history.round.tolist())
        return (solution.weights**2).sum()

    alone = solve(0.2)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        slope = jax.grad(length)(0.2)
    compiled = [found[1] for r in caplog.records if (found := re.match(r"Compiling (?:jit\()?(\w+)", r.getMessage()))]
    assert "_refine" in compiled  # the others would have been heard
    assert not {"_allocate", "_run_chunk", "_settled", "_proven"} & set(compiled)
    every = alone.history.round.tolist()
    assert rounds == [[last] for last in dict.fromkeys([*every[4::5], every[-1]])] + [every]
    assert float(slope) == pytest.approx(
        float(mj.hypergradient(lambda w: (w**2).sum(), alone).gradient.regularizer.lam1)
    )
    del rounds[:]
    assert float(jax.grad(length)(0.2)) == float(slope)
    assert rounds == [every]  # it was read from the checkpoint
    with pytest.raises(ValueError, match="need a host"):
        jax.grad(lambda lam: solve(lam, max_rounds=2, adjoint=mj.Unrolled(), callback=print).weights.sum())(0.2)


@pytest.mark.slow
def test_everything_a_solution_reports_of_the_optimum_has_derivatives():
    problem = make("logistic", R.Probabilistic(0.02, 3.0))

    def report(lam):
        s = mj.solve(problem.replace(regularizer=R.Probabilistic(lam, 3.0)), mj.Mocha(3.0), tol=1e-13, max_rounds=300,
                     record_every=20)  # fmt: skip
        return s.primal, s.omega[0, 1], s.weights[1, 2]

    step = 1e-4
    tangents = jax.jvp(jax.jit(report), (0.02,), (1.0,))[1]
    for got, high, low in zip(tangents, report(0.02 + step), report(0.02 - step), strict=True):
        assert float(got) == pytest.approx(float((high - low) / (2 * step)), rel=1e-3)


@pytest.mark.slow
def test_the_error_of_a_gradient_counts_rounding():
    """A derivative a thousandth of the sizes behind it: in float32 the sixth digit of those is its third."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 20, 4))
    data = mj.pack_tasks(list(x), list(np.sign(x[:, :, 0])), dtype=np.float32)
    problem = mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Independent(np.float32(1.0)))
    solution = mj.solve(problem, tol=1e-5)
    normal = jnp.asarray(rng.normal(size=solution.weights.shape), jnp.float32)
    normal = normal - jnp.sum(normal * solution.weights) / jnp.sum(solution.weights**2) * solution.weights
    found = mj.hypergradient(lambda w: jnp.sum(normal * w), solution)  # which hardly changes as the weights shrink
    sizes = float(jnp.linalg.norm(normal) * jnp.linalg.norm(solution.weights))
    assert 1e-6 * sizes < float(found.error.regularizer.lam) < 1e-5 * sizes


@pytest.mark.slow
def test_a_failed_linear_system_is_reported_and_never_a_number():
    # Quantiles: tau moves the ends of the intervals too, and with them the duals that are not free.
    problem = make("quantile", R.MeanRegularized(0.2, 0.05))
    solution, hasty = solved(problem), mj.Implicit(max_steps=2, worst=1e-3)
    with pytest.warns(UserWarning, match="allow more max_steps"):
        unsolved = mj.hypergradient(score, solution, adjoint=hasty)
    assert unsolved.residual > 1e-3
    assert np.isnan(unsolved.gradient.regularizer.lam2)

    def value(parameters, adjoint):
        loss, regularizer = mj.losses.Quantile(parameters[0]), R.MeanRegularized(0.2, parameters[1])
        return score(solved(problem.replace(loss=loss, regularizer=regularizer), adjoint).weights)

    at, slope = (0.3, 0.05), jax.jit(jax.grad(value), static_argnums=1)
    assert jnp.isnan(jnp.stack(slope(at, hasty))).all()
    good = mj.hypergradient(score, solution)
    want = good.gradient.loss.tau, good.gradient.regularizer.lam2
    np.testing.assert_allclose(slope(at, mj.Implicit()), want, rtol=1e-6)
    assert 0 < int(good.free) < int(problem.data.sizes.sum())


@pytest.mark.slow
def test_what_has_no_dual_variables_or_no_host_is_refused():
    problem = make("hinge", R.MeanRegularized(0.2, 0.05))
    sgd = mj.solve(problem, mj.MiniBatchSgd(batch=2), max_rounds=2)
    with pytest.raises(ValueError, match="no dual variables"):
        mj.hypergradient(score, sgd)
    with pytest.raises(ValueError, match="need a host"):
        jax.jit(lambda p: mj.solve(p, progress=True).weights)(problem)
    with pytest.raises(ValueError, match="must return a single number"):
        mj.hypergradient(lambda w: w.sum(0), mj.solve(problem, tol=1e-3))
    with pytest.raises(ValueError, match="no dual variables"):
        jax.grad(lambda p: mj.solve(p, mj.MiniBatchSgd(batch=2), max_rounds=2).weights.sum(), allow_int=True)(problem)
    for bad in (dict(tol=0.0), dict(max_steps=0), dict(worst=-1.0)):
        with pytest.raises(ValueError, match="Implicit"):
            mj.Implicit(**bad)


@pytest.mark.slow
def test_memory_of_an_unrolled_gradient_grows_like_the_root_of_the_rounds():
    problem = make("squared", R.MeanRegularized(0.2, 0.05))

    def temporary(rounds, checkpoint):
        def value(lam):
            there = problem.replace(regularizer=R.MeanRegularized(0.2, lam))
            adjoint, algorithm = mj.Unrolled(checkpoint), mj.Mocha(sigma_prime="per_task")
            return score(solved(there, adjoint, rounds, algorithm).weights)

        analysis: Any = jax.jit(jax.grad(value)).lower(0.05).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    few, many = temporary(64, True), temporary(4096, True)
    assert many < 10 * few  # 64 times the rounds
    assert temporary(256, False) > 2 * many


def test_minres_solves_indefinite_and_singular_systems():
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    values = np.r_[np.linspace(-3, -0.1, 15), np.zeros(5), np.linspace(0.1, 10, 20)]
    a = jnp.asarray((q * values) @ q.T)
    b, scale = a @ rng.normal(size=40), jnp.asarray(0.5 + rng.random(40))
    parts = {"p": b[:13], "q": b[13:]}

    def apply(x):
        y = a @ jnp.concatenate([x["p"], x["q"]])
        return {"p": y[:13], "q": y[13:]}

    def precondition(r):
        return {"p": r["p"] / scale[:13], "q": r["q"] / scale[13:]}

    found = minres(apply, parts, precondition, tol=1e-10, max_steps=200)
    x = np.concatenate([found.x["p"], found.x["q"]])
    np.testing.assert_allclose(a @ x, b, atol=1e-8)
    assert found.residual < 1e-9
    assert found.steps < 100
    nothing = minres(apply, jax.tree.map(jnp.zeros_like, parts), precondition, tol=1e-10, max_steps=200)
    assert (nothing.steps, float(nothing.residual)) == (0, 0.0)


@pytest.mark.slow
def test_second_derivatives_are_refused_and_not_wrong():
    data = zoo.data(regression=True)

    def length(lam, adjoint=None):
        problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(lam))
        return (mj.solve(problem, tol=1e-10, max_rounds=300, adjoint=adjoint).weights ** 2).sum()

    for second in (jax.grad(jax.grad(length)), jax.jacfwd(jax.jacfwd(length)), jax.hessian(length)):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            second(1.0)


@pytest.mark.slow
def test_what_is_no_number_never_becomes_a_zero():
    problem = mj.Problem(zoo.data(regression=True), mj.losses.Squared(), mj.regularizers.MeanRegularized(0.5, 0.2))
    solution = mj.solve(problem, tol=1e-8)

    def fn(w):
        return (w**2).sum() + jnp.linalg.norm(w[0] - w[:1].mean(0))  # whose gradient is 0 / 0

    with pytest.warns(UserWarning, match="that of fn is not finite"):
        found = mj.hypergradient(fn, solution)
    assert np.isnan(found.residual)
    assert np.isnan(found.gradient.data.weight[0]).any()
    small = mj.hypergradient(lambda w: 1e-200 * (w**2).sum(), solution)
    plain = mj.hypergradient(lambda w: (w**2).sum(), solution)
    np.testing.assert_allclose(1e200 * small.gradient.regularizer.lam1, plain.gradient.regularizer.lam1, rtol=1e-6)


@pytest.mark.slow
def test_rounds_need_be_no_whole_number_of_records():
    """Within a transformation the rounds after the last whole record are a second stretch, where the first left some."""
    rng = np.random.default_rng(3)
    xs = [rng.normal(size=(n, D)) for n in (7, 9, 5)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs])

    def solved(lam, tol=None):
        problem = mj.Problem(data, mj.losses.SmoothedHinge(), R.Independent(lam))
        return mj.solve(problem, tol=tol, max_rounds=11, record_every=4)

    for tol, rounds in ((None, 11), (0.9, 4)):
        within, outside = jax.jit(partial(solved, tol=tol))(0.1), solved(0.1, tol)
        assert int(within.rounds) == int(outside.rounds) == rounds
        np.testing.assert_allclose(within.weights, outside.weights, rtol=1e-9, atol=1e-12)


MANY = {
    "weights of samples, factorised": ("logistic", "mean", "weights"),
    "weights of samples, by MINRES": ("hinge", "mean", "weights"),
    "lambdas of tasks": ("squared", "independent", "lam"),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.slow
def test_hypergradients_of_500_numbers_equal_central_differences(name):
    # Each number by itself, from 1,000 solves that are one compiled call.
    loss, penalty, of = MANY[name]
    m = 500 if of == "lam" else 10
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=(50 if of == "weights" else 6, 4)) for _ in range(m)]
    ys = [x @ rng.normal(size=4) + rng.normal(size=len(x)) for x in xs]
    ys = ys if loss == "squared" else [np.where(y > 0, 1.0, -1.0) for y in ys]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    # Strong, so that fewer margins than features are at a kink, and the hinge loss leaves the weights free to move.
    regularizer = R.MeanRegularized(1.0, 0.5) if penalty == "mean" else R.Independent(np.full(m, 0.05))
    problem = mj.Problem(data, LOSSES[loss], regularizer)
    target = jnp.asarray(rng.normal(size=(m, 4)))

    def score(weights):
        return jnp.sum((weights - target) ** 2)

    def at(factors):
        if of == "lam":
            return problem.replace(regularizer=R.Independent(0.05 * factors))
        return problem.replace(data=data.replace(weight=data.weight * factors.reshape(m, 50)))

    def value(factors):
        return score(mj.solve(at(factors), tol=1e-13, max_rounds=200).weights)

    step, ones = 1e-4, jnp.ones(500)
    values = jax.jit(lambda moved: jax.lax.map(value, moved, batch_size=50))
    high, low = (values(ones[None] + sign * step * jnp.eye(500)) for sign in (1, -1))
    solution = mj.solve(at(ones), tol=1e-13, max_rounds=200)
    found = mj.hypergradient(score, solution)
    _, pull = jax.vjp(at, ones)
    want = np.asarray((high - low) / (2 * step))
    # Of an interior point the weights are only as near the optimum as the root of the gap, which the step magnifies.
    lost = 2e-5 if loss == "hinge" else 1e-6
    np.testing.assert_allclose(pull(found.gradient)[0], want, rtol=1e-5, atol=lost * np.abs(want).max())
    assert np.count_nonzero(np.abs(want) > 100 * lost * np.abs(want).max()) > 250
