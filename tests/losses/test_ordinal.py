"""Ordinal regression: the loss against brute force and a convex solver, thresholds given and learned."""

from typing import Any

import cvxpy as cp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sklearn import metrics as sklearn_metrics

import mocha_jax as mj
from tests import oracles, zoo

R = mj.regularizers
THRESHOLDS = {
    "two levels": [0.3],
    "far apart": [-3.0, 0.5, 4.0],
    "crossing": [-0.7, -0.2, 0.1, 0.9],  # kinks of both kinds between one another
    "equal": [0.0, 0.0, 2.0],  # and kinks that coincide
}
each_loss = pytest.mark.parametrize("name", THRESHOLDS)
numbers = st.floats(-5, 5, allow_nan=False, width=32)
shares = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))
M, D, K = 4, 3, 4


def drawn(name, raw, share):
    """A loss, a label, and duals a share of the way along their interval."""
    loss = mj.losses.Ordinal(THRESHOLDS[name])
    y = raw % loss.levels
    return loss, jnp.asarray(float(y)), jnp.asarray(y - (loss.levels - 1) * share)


def value(name, z, y):
    """The loss as its formula says."""
    return sum(np.maximum(0, 1 - (1 if y >= k else -1) * (z - t)) for k, t in enumerate(THRESHOLDS[name], 1))


@each_loss
@given(raw=st.integers(0, 20), share=shares, z=numbers)
@pytest.mark.thin(1)
def test_conjugate_and_gap_are_their_definitions(name, raw, share, z):
    loss, y, beta = drawn(name, raw, share)
    np.testing.assert_allclose(loss.value(jnp.asarray(z), y), value(name, z, float(y)), atol=1e-12)
    kinks = np.asarray(THRESHOLDS[name])
    at = jnp.concatenate([jnp.linspace(-50.0, 50.0, 2001), kinks + 1, kinks - 1])
    brute = jnp.max(-beta * at - loss.value(at, jnp.full_like(at, y)))
    np.testing.assert_allclose(loss.conjugate(beta, y), brute, atol=1e-12)
    gap = loss.fenchel_young(jnp.asarray(z), beta, y)
    assert gap >= 0
    np.testing.assert_allclose(gap, value(name, z, float(y)) + brute + z * beta, atol=1e-12)
    assert loss.conjugate(y + 1e-6, y) == jnp.inf
    assert loss.conjugate(y - loss.levels + 1 - 1e-6, y) == jnp.inf


@each_loss
@given(raw=st.integers(0, 20), share=shares, g=numbers, kappa=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)))
@pytest.mark.thin(1)
def test_dual_step_is_the_exact_minimiser(name, raw, share, g, kappa):
    loss, y, beta = drawn(name, raw, share)
    new = loss.dual_step(beta, jnp.asarray(g), y, jnp.asarray(kappa))
    assert loss.project(new, y) == new
    low, high = (float(end) for end in loss.dual_bounds(y))
    grid = jnp.linspace(low, high, 4001)
    near = loss.project(new + jnp.linspace(-1e-3, 1e-3, 201), y)
    others = jnp.concatenate([new[None], grid, near])
    found = loss.conjugate(others, jnp.full_like(others, y)) + (others - beta) * g + 0.5 * kappa * (others - beta) ** 2
    assert found[0] <= jnp.min(found) + 1e-10 * (1 + kappa)


@each_loss
@given(raw=st.integers(0, 20), share=st.tuples(shares, shares), z=numbers)
@pytest.mark.thin(1)
def test_change_and_bounds_of_the_gap(name, raw, share, z):
    loss, y, before = drawn(name, raw, share[0])
    _, _, beta = drawn(name, raw, share[1])
    z = jnp.asarray(z)
    difference = loss.fenchel_young(z, beta, y) - loss.fenchel_young(z, before, y)
    np.testing.assert_allclose(loss.fenchel_young_change(z, before, beta, y), difference, atol=1e-12)
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), loss)
    z32, y32, beta32 = (jnp.asarray(a, jnp.float32) for a in (z, y, beta))
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), narrow)  # the same thresholds
    true = wide.fenchel_young(*(jnp.asarray(a, jnp.float64) for a in (z32, narrow.project(beta32, y32), y32)))
    assert float(narrow.fenchel_young_bound(z32, jnp.float32(0.0), narrow.project(beta32, y32), y32)) >= true
    exact = wide.conjugate(jnp.asarray(narrow.project(beta32, y32), jnp.float64), jnp.asarray(y32, jnp.float64))
    assert float(narrow.conjugate_bound(narrow.project(beta32, y32), y32)) >= exact


def test_bounds_count_what_rounding_hides_of_duals_near_the_end():
    # The difference y - beta rounds to the end of its interval, where all kinks are passed and the gap seems to be 0.
    loss = mj.losses.Ordinal([jnp.float32(t) for t in (-3.0, -1.0, 0.5, 4.0)])
    y, beta = jnp.float32(2.0), jnp.nextafter(jnp.float32(-2.0), jnp.float32(0.0))
    assert y - beta == 4.0
    for z in (30.0, 1000.0):
        assert loss.fenchel_young(jnp.float32(z), beta, y) == 0.0
        true = (float(beta) + 2.0) * (z - 5.0)  # of the last kink's share, what is left: that at 4 + 1
        bound = loss.fenchel_young_bound(jnp.float32(z), jnp.float32(0.0), beta, y)
        assert true <= float(bound) <= 100 * true


def test_the_conjugates_bound_counts_thresholds_that_cancel():
    narrow = mj.losses.Ordinal([jnp.float32(t) for t in (-721.703, -589.35956, -175.71733, 602.04895, 2046.1072)])
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), narrow)
    y = jnp.full(4001, 4.0, jnp.float32)
    beta = jnp.linspace(-0.01, 0.01, 4001, dtype=jnp.float32)  # where the other parts of the bound are small
    exact = wide.conjugate(jnp.asarray(beta, jnp.float64), jnp.asarray(y, jnp.float64))
    assert (jnp.asarray(narrow.conjugate_bound(beta, y), jnp.float64) >= exact).all()


def ordered(seed=0, shift=0.0):
    """Tasks whose labels 0 to 3 come of a number that their features say something about."""
    xs, zs = zoo.ragged(seed=seed, m=M, d=D, regression=True)
    shifts = shift * np.arange(M)
    ys = [np.digitize(2 * z + s, [-0.5, 0.2, 0.8]).astype(float) for z, s in zip(zs, shifts, strict=True)]
    return mj.pack_tasks(xs, ys, dtype=np.float64, loss_scaling="task_mean")


GIVEN: dict[str, Any] = {
    "shared": (mj.losses.Ordinal([-0.5, 0.2, 0.8]), [np.array([-0.5, 0.2, 0.8])] * M),
    "per task": (
        mj.losses.PerTask([mj.losses.Ordinal(np.array([-0.5, 0.2, 0.8]) + 0.3 * t) for t in range(M)]),
        [np.array([-0.5, 0.2, 0.8]) + 0.3 * t for t in range(M)],
    ),
}


@pytest.mark.parametrize(("case", "learned"), [("shared", False), ("per task", True)])
@pytest.mark.slow
def test_with_given_thresholds_the_optimum_is_a_convex_solvers(case, learned):
    loss, thresholds = GIVEN[case]
    regularizer = R.Probabilistic(0.05, 2.0) if learned else R.MeanRegularized(0.2, 0.05)
    penalty = oracles.squared_nuclear_norm(0.05, 2.0) if learned else oracles.mean_regularized(0.2, 0.05)
    solution = mj.solve(mj.Problem(ordered(), loss, regularizer), tol=1e-8, max_rounds=20_000)
    best, _ = oracles.optimum(ordered(), [oracles.all_thresholds(t) for t in thresholds], penalty)
    assert solution.status == mj.Status.CONVERGED
    assert solution.certificate.joint_dual <= best * (1 + 1e-9)
    np.testing.assert_allclose(solution.certificate.joint_primal, best, rtol=1e-7)


@pytest.mark.slow
def test_learned_thresholds_are_those_of_a_convex_solver():
    data, size = ordered(shift=0.4), 3.0
    asked = mj.multiclass.by_threshold(data, K, size=size)
    solution = mj.solve(mj.Problem(asked, mj.losses.Hinge(), R.MeanRegularized(0.2, 0.05)), tol=1e-8, max_rounds=20_000)
    # The same with weights and thresholds as unknowns of their own.
    x, y, c = (np.asarray(a) for a in (data.x, data.y, data.weight))
    w, theta = cp.Variable((M, D)), cp.Variable((M, K - 1))
    penalty = oracles.mean_regularized(0.2, 0.05)
    terms = [penalty(w) + penalty(theta / size)]
    for t in range(M):
        real = c[t] > 0
        terms.append(c[t][real] @ oracles.all_thresholds(theta[t])(x[t][real] @ w[t], y[t][real]))
    best = cp.Problem(cp.Minimize(cp.sum(terms))).solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11)
    np.testing.assert_allclose(solution.certificate.primal, best, rtol=1e-6)
    weights, loss = mj.multiclass.thresholds_of(solution.weights, K, size=size)
    given_them = mj.objective(mj.Problem(data, loss, R.Independent(1e-9)), weights)
    of_regularizer = solution.certificate.primal - mj.regularizers.MeanRegularized(0.2, 0.05).value(solution.weights)
    np.testing.assert_allclose(given_them, of_regularizer, rtol=1e-6)  # the two losses are one


@pytest.mark.slow
def test_derivatives_of_thresholds():
    target = np.random.default_rng(7).normal(size=(M, D))

    def outer(thresholds):
        problem = mj.Problem(ordered(), mj.losses.Ordinal(thresholds), R.MeanRegularized(0.2, 0.05))
        return jnp.sum(mj.solve(problem, tol=1e-11, max_rounds=20_000).weights * target)

    at = jnp.asarray([-0.52, 0.21, 0.83])
    found = jax.grad(outer)(at)
    for k in range(3):
        step = 1e-5 * np.eye(3)[k]
        np.testing.assert_allclose(found[k], (outer(at + step) - outer(at - step)) / 2e-5, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_the_kernel_takes_it(key):
    problem = mj.Problem(ordered(), mj.losses.Ordinal([-0.5, 0.2, 0.8]), R.MeanRegularized(0.2, 0.05))
    data = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, problem.data)
    problem = problem.replace(data=data)
    kernel, loops = (mj.run(problem, mj.Mocha(backend=b), key, num_rounds=3)[1].primal for b in ("pallas", "xla"))
    np.testing.assert_allclose(kernel, loops, rtol=2e-6)


@pytest.mark.slow
def test_metrics_of_ordered_labels():
    data, loss = ordered(), mj.losses.Ordinal([-0.5, 0.2, 0.8])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(M, D)))
    absolute = mj.metrics.absolute_error(weights, data, loss, per_task=True)
    kappa = mj.metrics.quadratic_kappa(weights, data, loss, per_task=True)
    for t in range(M):
        real = data.weight[t] > 0
        decided = np.digitize(data.x[t][real] @ weights[t], [-0.5, 0.2, 0.8])
        y = np.asarray(data.y[t][real]).astype(int)
        np.testing.assert_allclose(absolute[t], np.abs(decided - y).mean(), rtol=1e-12)
        np.testing.assert_allclose(kappa[t], sklearn_metrics.cohen_kappa_score(y, decided, weights="quadratic"))
    chosen = mj.cross_validate(
        mj.Problem(data, loss, R.Independent(0.1)), mj.grid(R.Independent, lam=[0.05]), folds=2, refit=False
    )
    assert chosen.metric == "absolute_error"
    same = mj.pack_tasks([np.ones((3, 1))], [np.zeros(3)])
    assert jnp.isnan(mj.metrics.quadratic_kappa(-2 * jnp.ones((1, 1)), same, loss, per_task=True)[0])


BAD = {
    "falling": (lambda: mj.losses.Ordinal([1.0, 0.0]), "thresholds must rise"),
    "none": (lambda: mj.losses.Ordinal([]), "thresholds is empty"),
    "infinite": (lambda: mj.losses.Ordinal([0.0, np.inf]), "must be finite"),
    "labels": (
        lambda: mj.Problem(ordered(), mj.losses.Ordinal([0.0]), R.Independent(0.1)),
        "has label .*, but Ordinal needs labels 0, 1, ..., 1",
    ),
    "labels asked": (lambda: mj.multiclass.by_threshold(ordered(), 3), "labels must be 0, 1, ..., 2"),
    "columns": (lambda: mj.multiclass.thresholds_of(jnp.ones((2, 2)), 4), "more than 3 columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
