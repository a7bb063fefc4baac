"""The optimum against tools not written here: scikit-learn, closed forms, a generic convex solver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

import mocha_jax as mj
from tests import oracles, zoo

TIGHT = dict(tol=1e-8, max_rounds=200_000, record_every=20, chunk=5_000)
MODELS = {
    "mean": (lambda m: mj.regularizers.MeanRegularized(0.2, 0.05), lambda m: oracles.mean_regularized(0.2, 0.05)),
    "graph": (
        lambda m: mj.regularizers.Graph(zoo.laplacian(m), 0.2, 0.05),
        lambda m: oracles.graph(zoo.laplacian(m), 0.2, 0.05),
    ),
}


def solved(problem, algorithm=None, **options):
    solution = mj.solve(
        problem, algorithm or mj.Mocha(local_epochs=4.0, sigma_prime="per_task"), **{**TIGHT, **options}
    )
    assert solution.status == mj.Status.CONVERGED, solution
    assert (solution.history.gap >= 0).all()
    assert (solution.task_gaps >= 0).all()
    return solution


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(2)
def test_every_loss_and_model_against_a_convex_solver(loss, model):
    data = zoo.data(regression=not zoo.LOSSES[loss].binary, loss_scaling="task_mean", intercept=True)
    regularizer, oracle = (make(data.num_tasks) for make in MODELS[model])
    solution = solved(mj.Problem(data, zoo.LOSSES[loss], regularizer))
    best, weights = oracles.optimum(data, loss, oracle)
    assert abs(solution.primal - best) <= 1e-6 * best
    assert solution.dual <= best * (1 + 1e-7)
    np.testing.assert_allclose(solution.weights, weights, atol=2e-3)
    # The objective computed from weights alone, and the certificate from duals alone, agree with it.
    np.testing.assert_allclose(mj.objective(solution.problem, solution.weights), solution.primal, rtol=1e-9)
    fresh = mj.certificate(solution.problem, solution.state.beta)
    np.testing.assert_allclose([fresh.primal, fresh.dual], [solution.primal, solution.dual], rtol=1e-9)


@pytest.mark.parametrize("scaling", ["sum", "task_mean"])
@pytest.mark.slow
def test_local_and_global_support_vector_machines(scaling):
    data = zoo.data(loss_scaling=scaling, m=4, low=20, high=40)
    lam = 0.3 if scaling == "sum" else 0.02
    for part in (data, data.pooled()):
        solution = solved(mj.Problem(part, mj.losses.Hinge(), mj.regularizers.Independent(lam)))
        for t in range(part.num_tasks):
            rows = np.asarray((part.weight > 0) & (part.task == t)[:, None])
            svc = LinearSVC(loss="hinge", fit_intercept=False, C=1 / (2 * lam), tol=1e-9, max_iter=5_000_000)
            svc.fit(part.x[rows], part.y[rows], sample_weight=part.weight[rows])
            z = part.x[rows] @ svc.coef_[0]
            best = np.sum(part.weight[rows] * np.maximum(1 - part.y[rows] * z, 0)) + lam * np.sum(svc.coef_**2)
            ours = part.x[rows] @ solution.weights[t]
            mine = np.sum(part.weight[rows] * np.maximum(1 - part.y[rows] * ours, 0)) + lam * np.sum(
                solution.weights[t] ** 2
            )
            assert abs(mine - best) <= 1e-6 * best
            np.testing.assert_allclose(solution.weights[t], svc.coef_[0], atol=2e-3)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.slow
def test_ridge_in_closed_form(pooled):
    data = zoo.data(regression=True, loss_scaling="task_mean", intercept=True)
    data = data.pooled() if pooled else data
    lam = 0.05
    solution = solved(mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(lam)), tol=1e-13)
    for t in range(data.num_tasks):
        rows = np.asarray((data.weight > 0) & (data.task == t)[:, None])
        x, y, c = (np.asarray(a)[rows] for a in (data.x, data.y, data.weight))
        w = np.linalg.solve((x.T * c) @ x + 2 * lam * np.eye(x.shape[1]), x.T @ (c * y))
        np.testing.assert_allclose(solution.weights[t], w, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_coupled_ridge_in_closed_form():
    # With squared loss the whole multi-task problem is one linear system.
    data = zoo.data(regression=True, m=4, d=3)
    graph = mj.regularizers.Graph(zoo.laplacian(4), 0.3, 0.1)
    solution = solved(mj.Problem(data, mj.losses.Squared(), graph), tol=1e-13)
    x, y, c = (np.asarray(a) for a in (data.x, data.y, data.weight))
    a = np.kron(2 * (0.3 * zoo.laplacian(4) + 0.1 * np.eye(4)), np.eye(3))
    for t in range(4):
        a[3 * t : 3 * t + 3, 3 * t : 3 * t + 3] += (x[t].T * c[t]) @ x[t]
    w = np.linalg.solve(a, np.einsum("tnd,tn,tn->td", x, c, y).ravel()).reshape(4, 3)
    np.testing.assert_allclose(solution.weights, w, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_logistic_regression():
    data, lam = zoo.data(low=20, high=40), 0.4
    solution = solved(mj.Problem(data, mj.losses.Logistic(), mj.regularizers.Independent(lam)), tol=1e-12)
    for t in range(data.num_tasks):
        real = np.asarray(data.weight[t] > 0)
        model = LogisticRegression(C=1 / (2 * lam), fit_intercept=False, tol=1e-12, solver="newton-cholesky")
        model.fit(data.x[t][real], data.y[t][real])
        np.testing.assert_allclose(solution.weights[t], model.coef_[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["hinge", "squared"])
@pytest.mark.slow
def test_tasks_shared_by_nodes_are_the_tasks_of_their_union(loss):
    xs, ys = zoo.ragged(m=6, regression=loss == "squared")
    owner = [0, 0, 1, 2, 2, 2]
    shared = mj.pack_tasks(xs, ys, task=owner, loss_scaling="task_mean")
    merged = mj.pack_tasks(
        [np.concatenate([x for x, o in zip(xs, owner, strict=True) if o == t]) for t in range(3)],
        [np.concatenate([y for y, o in zip(ys, owner, strict=True) if o == t]) for t in range(3)],
        loss_scaling="task_mean",
    )
    regularizer = mj.regularizers.MeanRegularized(0.2, 0.05)
    a, b = (solved(mj.Problem(d, zoo.LOSSES[loss], regularizer), tol=1e-9) for d in (shared, merged))
    np.testing.assert_allclose(a.primal, b.primal, rtol=1e-7)
    np.testing.assert_allclose(a.weights, b.weights, atol=1e-3)


@pytest.mark.parametrize("rule", ["lemma9", "per_task", "spectral"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.slow
def test_every_rule_and_aggregation_reaches_the_optimum(rule, gamma):
    data = mj.pack_tasks(*zoo.ragged(m=6), task=[0, 1, 2, 2, 1, 3])
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Graph(zoo.random_spd(4), 0.2, 0.1))
    reference = solved(problem)
    solution = solved(problem, mj.Mocha(sigma_prime=rule, gamma=gamma))
    np.testing.assert_allclose(solution.primal, reference.primal, rtol=2e-8)
    dual = solution.history.dual
    assert (np.diff(dual) >= -1e-12 * abs(dual[-1])).all()  # safe scaling: the dual never decreases


@pytest.mark.slow
def test_relationships_agree_where_they_coincide():
    data, m = zoo.data(), 5
    same = {
        "mean as graph": (
            mj.regularizers.MeanRegularized(0.3, 0.1),
            mj.regularizers.Graph(np.eye(m) - 1 / m, 0.3, 0.1),
        ),
        "no pull": (mj.regularizers.MeanRegularized(0.0, 0.1), mj.regularizers.Independent(0.1)),
        "no graph": (mj.regularizers.Graph(zoo.laplacian(m), 0.0, 0.1), mj.regularizers.Independent(np.full(m, 0.1))),
    }
    for a, b in same.values():
        a, b = (solved(mj.Problem(data, mj.losses.Hinge(), r), tol=1e-9) for r in (a, b))
        np.testing.assert_allclose(a.primal, b.primal, rtol=1e-8)
    strong = solved(mj.Problem(data, mj.losses.Squared(), mj.regularizers.MeanRegularized(1e3, 0.1)), tol=1e-6)
    assert np.ptp(strong.weights, axis=0).max() < 1e-2  # one mean for all


@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.slow
def test_float32_reaches_a_relative_gap_of_1e_5(loss):
    data = zoo.data(regression=not zoo.LOSSES[loss].binary, dtype=np.float32, loss_scaling="task_mean", intercept=True)
    for regularizer in (mj.regularizers.MeanRegularized(0.2, 0.05), mj.regularizers.Graph(zoo.laplacian(5), 0.2, 0.05)):
        solution = solved(mj.Problem(data, zoo.LOSSES[loss], regularizer), tol=1e-5)
        assert solution.weights.dtype == jnp.float32
        # What float32 certified holds in float64 too.
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, solution.problem)
        beta = wide.loss.project(solution.state.beta.astype(jnp.float64), wide.data.y)
        assert mj.certificate(wide, beta).relative_gap <= 2e-5


LANDMINE = {
    "identity": (lambda m, lam: mj.regularizers.Independent(lam), lambda m, lam: oracles.independent(lam)),
    "mean": (
        lambda m, lam: mj.regularizers.MeanRegularized(lam, lam),
        lambda m, lam: oracles.mean_regularized(lam, lam),
    ),
    "dense": (
        lambda m, lam: mj.regularizers.Graph(zoo.random_spd(m), lam, 0.3 * lam),
        lambda m, lam: oracles.graph(zoo.random_spd(m), lam, 0.3 * lam),
    ),
}


@pytest.mark.parametrize("lam", [1e-3, 1e-1, 1.0])
@pytest.mark.parametrize("model", LANDMINE)
@pytest.mark.slow
def test_landmine(model, lam, real_data):
    raw = real_data("landmine")
    data = mj.pack_tasks(raw["X"], raw["y"], raw["task"], loss_scaling="task_mean", intercept=True)
    regularizer, oracle = (make(data.num_tasks, lam) for make in LANDMINE[model])
    problem = mj.Problem(data, mj.losses.Hinge(), regularizer)
    solution = solved(
        problem, mj.Mocha(sigma_prime="per_task"), tol=8e-6, max_rounds=400_000, record_every=100, chunk=20_000
    )
    best, _ = oracles.optimum(data, "hinge", oracle)
    assert abs(solution.primal - best) <= 1e-5 * best
    assert solution.dual <= best * (1 + 1e-8)
