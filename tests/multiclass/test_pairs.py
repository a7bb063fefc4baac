"""One problem for all pairs of classes beside a convex solver."""

import warnings

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import oracles
from tests.multiclass.problems import CLASSES, L, R, named, packed, ragged

K, M, D = 4, 3, 5
CASES = {
    "hinge": (L.Hinge(), lambda p: cp.pos(1 - p), R.Independent(0.02), oracles.independent(0.02)),
    "logistic": (L.Logistic(), lambda p: cp.logistic(-p), R.Independent(0.02), oracles.independent(0.02)),
    "learned": (
        L.Hinge(),
        lambda p: cp.pos(1 - p),
        R.Probabilistic(0.01, 2.0),
        oracles.squared_nuclear_norm(0.01, 2.0),
    ),
}


def by_hand(data, phi, penalty):
    """The optimum of the formula, with weights of every class as unknowns of their own."""
    x, y, c = (np.asarray(a) for a in (data.x, data.y, data.weight))
    w = [cp.Variable((M, D)) for _ in range(K)]
    terms = [penalty(cp.hstack(w))]
    for t in range(M):
        for k in range(K):
            for other in set(range(K)) - {k}:
                own = (c[t] > 0) & (y[t] == k)
                if own.any():
                    terms.append(c[t][own] @ phi(x[t][own] @ (w[k][t] - w[other][t])))
    problem = cp.Problem(cp.Minimize(cp.sum(terms)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10, max_iter=500)
    return problem.value, np.stack([np.asarray(each.value) for each in w])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_the_optimum_is_a_convex_solvers(case):
    loss, phi, regularizer, penalty = CASES[case]
    data = packed()
    pairs = mj.multiclass.by_pair(data, K)
    assert pairs.x.shape == (M, (K - 1) * data.x.shape[1], K * D)
    solution = mj.solve(mj.Problem(pairs, loss, regularizer), tol=1e-8, max_rounds=20_000)
    best, weights = by_hand(data, phi, penalty)
    assert solution.status == mj.Status.CONVERGED
    np.testing.assert_allclose(solution.certificate.joint_primal, best, rtol=1e-6)
    assert solution.certificate.joint_dual <= best * (1 + 1e-8)
    assert solution.certificate.joint_primal - solution.certificate.joint_dual <= 1e-7 * best
    found = mj.multiclass.weights_of_classes(solution.weights, K)
    np.testing.assert_allclose(found, weights, atol=2e-3)
    # The classes' weights have the mean 0: a part that all share is in no difference, and costs.
    np.testing.assert_allclose(jnp.sum(found, axis=0), 0.0, atol=1e-10)


def test_the_losses_are_those_of_differences():
    data, weights = packed(), jnp.asarray(np.random.default_rng(0).normal(size=(M, K * D)))
    pairs = mj.multiclass.by_pair(data, K)
    w = np.asarray(mj.multiclass.weights_of_classes(weights, K))
    total = 0.0
    for t in range(M):
        for x, y, c in zip(
            np.asarray(data.x[t]), np.asarray(data.y[t]).astype(int), np.asarray(data.weight[t]), strict=True
        ):
            z = w[:, t] @ x
            total += c * sum(max(0.0, 1 - (z[y] - z[k])) for k in range(K) if k != y)
    tiny = mj.Problem(pairs, L.Hinge(), R.Independent(1e-12))
    np.testing.assert_allclose(mj.objective(tiny, weights), total, rtol=1e-8)


@pytest.mark.slow
def test_its_model_predicts_by_name(tmp_path):
    data, table, labels, groups = named()
    pairs = mj.multiclass.by_pair(data, K)
    solution = mj.solve(mj.Problem(pairs, L.Hinge(), R.Probabilistic(0.01)), tol=1e-2)
    model = mj.multiclass.pair_model(solution, data)
    assert model.method == "by_pair"
    assert set(model.predict(table, groups)) <= set(CLASSES)
    error = np.mean([(model.predict(table[groups == n], n) != labels[groups == n]).mean() for n in data.names.tasks])
    weights = mj.multiclass.weights_of_classes(solution.weights, K)
    np.testing.assert_allclose(error, mj.multiclass.error_rate(weights, data))
    np.testing.assert_allclose(error, mj.multiclass.error_rate(model, data))
    model.save(tmp_path / "model.npz")
    again = mj.load_model(tmp_path / "model.npz")
    assert isinstance(again, mj.MulticlassModel)
    assert again.method == "by_pair"
    assert again.trained["message"] == solution.message
    with pytest.raises(ValueError, match="have no probabilities"):
        again.predict_proba(table, groups)
    with pytest.raises(ValueError, match="what by_pair was given for this solution"):
        mj.multiclass.pair_model(solution, packed())


BAD = {
    "labels": (lambda: mj.multiclass.by_pair(packed(), 3), "by_pair: labels must be 0, 1, ..., 2"),
    "classes": (lambda: mj.multiclass.by_pair(packed(), 1), "classes must be an integer >= 2"),
    "columns": (lambda: mj.multiclass.weights_of_classes(jnp.ones((2, 7)), 4), "a multiple of classes=4 columns, got 7"),
    "halves": (lambda: mj.multiclass.by_pair(mj.pack_tasks(ragged()[0], [y / 2 for y in ragged()[1]]), 4), "labels must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
