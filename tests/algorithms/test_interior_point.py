"""The interior point method, against a convex solver, scikit-learn and coordinate ascent."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.svm import LinearSVC

import mocha_jax as mj
from tests import oracles, zoo

M, D = 5, 4
KINKED = {name: loss for name, loss in zoo.LOSSES.items() if loss.piecewise_linear}
REGULARIZERS = {
    "independent": (mj.regularizers.Independent(0.1), oracles.independent(0.1)),
    "mean": (mj.regularizers.MeanRegularized(0.2, 0.05), oracles.mean_regularized(0.2, 0.05)),
    "graph": (mj.regularizers.Graph(zoo.laplacian(M), 0.2, 0.05), oracles.graph(zoo.laplacian(M), 0.2, 0.05)),
}


def problem(loss, regularizer="mean", **kwargs):
    data = zoo.data(m=M, d=D, regression=not loss.binary, loss_scaling="task_mean", **kwargs)
    return mj.Problem(data, loss, REGULARIZERS[regularizer][0])


def test_the_losses_that_say_so_are_sums_of_their_pieces():
    assert set(KINKED) == {"hinge", "absolute", "quantile", "epsilon_insensitive"}
    z, signs = jnp.linspace(-4.0, 4.0, 81)[:, None], jnp.array([[1.0, -1.0]])
    ordinal = mj.losses.Ordinal([-1.2, 0.3, 0.4])
    for loss, y in (*((loss, signs) for loss in KINKED.values()), (ordinal, signs + 1.0), (ordinal, signs + 2.0)):
        pieces = loss.pieces(y)
        total = sum(jnp.maximum(-piece.low * (z - piece.kink), -piece.high * (z - piece.kink)) for piece in pieces)
        np.testing.assert_allclose(loss.value(z, y), total, atol=1e-12)
        low, high = (sum(ends) for ends in zip(*((piece.low, piece.high) for piece in pieces), strict=True))
        np.testing.assert_allclose(low, np.broadcast_to(loss.dual_bounds(y)[0], y.shape), atol=1e-12)
        np.testing.assert_allclose(high, np.broadcast_to(loss.dual_bounds(y)[1], y.shape), atol=1e-12)


@pytest.mark.parametrize("levels", [3, 10])
def test_losses_of_several_pieces_divide_the_products_among_them(levels):
    """The mean product is that of all pieces: an aim as many times too large as there are pieces leads nowhere."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(M, 50, D))
    z = np.einsum("mnd,d->mn", x, rng.normal(size=D)) + 0.3 * rng.normal(size=(M, 50))
    thresholds = np.quantile(z, np.arange(1, levels) / levels)
    data = mj.pack_tasks(list(x), list(np.digitize(z, thresholds).astype(float)), loss_scaling="task_mean")
    p = mj.Problem(data, mj.losses.Ordinal(list(thresholds)), mj.regularizers.MeanRegularized(1e-3, 1e-3))
    assert type(mj.default_algorithm(p)) is mj.InteriorPoint
    solution = mj.solve(p, tol=1e-7, max_rounds=25)
    assert solution.status == mj.Status.CONVERGED
    best, weights = oracles.optimum(data, oracles.all_thresholds(thresholds), oracles.mean_regularized(1e-3, 1e-3))
    assert abs(solution.primal - best) <= 2e-7 * best
    assert solution.dual <= best * (1 + 1e-9)
    np.testing.assert_allclose(solution.weights, weights, atol=1e-2)


def test_every_task_may_have_a_loss_with_kinks_of_its_own():
    quantiles = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    data = zoo.data(m=M, d=D, regression=True, loss_scaling="task_mean")
    p = mj.Problem(data, mj.losses.PerTask(mj.losses.Quantile(quantiles)), REGULARIZERS["mean"][0])
    assert type(mj.default_algorithm(p)) is mj.InteriorPoint
    solution = mj.solve(p, tol=1e-9, max_rounds=40)
    assert solution.status == mj.Status.CONVERGED
    # The slopes of the loss of quantile q are -q and 1 - q.
    own = [lambda z, y, q=q: cp.maximum(q * (y - z), (q - 1.0) * (y - z)) for q in quantiles]
    best, weights = oracles.optimum(data, own, REGULARIZERS["mean"][1])
    assert abs(solution.primal - best) <= 1e-8 * best
    np.testing.assert_allclose(solution.weights, weights, atol=1e-3)
    # Of different losses each may have other pieces.
    mixed = mj.losses.PerTask([mj.losses.Absolute(), mj.losses.EpsilonInsensitive(0.1)], which=[0, 0, 0, 1, 1])
    assert type(mj.default_algorithm(mj.Problem(data, mixed, REGULARIZERS["mean"][0]))) is mj.Mocha


@pytest.mark.parametrize("epsilon", [0.0, pytest.param(0.1, marks=pytest.mark.extended), 1.0])
def test_support_vector_regression_takes_no_more_rounds_than_other_losses(epsilon):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 60, 12))
    y = np.einsum("mnd,md->mn", x, rng.normal(size=(20, 12))) + rng.normal(size=(20, 60))
    data = mj.pack_tasks(list(x), list(y), loss_scaling="task_mean", dtype=np.float32)
    for lam in (1.0, 1e-2):
        loss = mj.losses.EpsilonInsensitive(epsilon)
        p = mj.Problem(data, loss, mj.regularizers.MeanRegularized(lam, 0.1 * lam))
        solution = mj.solve(p, max_rounds=25)  # where coordinate ascent takes hundreds
        assert solution.status == mj.Status.CONVERGED, (lam, solution)
        assert type(mj.default_algorithm(p)) is mj.InteriorPoint


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("name", KINKED)
@pytest.mark.thin(2)
def test_it_ends_at_the_optimum_of_a_convex_solver(name, regularizer):
    p = problem(KINKED[name], regularizer)
    solution = mj.solve(p, mj.InteriorPoint(), tol=1e-9, max_rounds=40)
    assert solution.status == mj.Status.CONVERGED
    best, weights = oracles.optimum(p.data, name, REGULARIZERS[regularizer][1])
    assert abs(solution.primal - best) <= 1e-8 * best
    assert solution.dual <= best * (1 + 1e-9)
    np.testing.assert_allclose(solution.weights, weights, atol=1e-3)
    fresh = mj.certificate(p, solution.state.beta, weights=solution.weights)
    np.testing.assert_allclose(fresh.primal, solution.primal, rtol=1e-9)
    np.testing.assert_allclose(fresh.gap, solution.gap, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("name", KINKED)
@pytest.mark.parametrize("regularizer", ["independent", "mean"])
@pytest.mark.thin(2)
def test_fewer_samples_than_features_end_there_too(name, regularizer):
    xs, ys = zoo.ragged(m=M, d=11, low=3, high=8, regression=not KINKED[name].binary)
    p = mj.Problem(mj.pack_tasks(xs, ys, loss_scaling="task_mean"), KINKED[name], REGULARIZERS[regularizer][0])
    solution = mj.solve(p, mj.InteriorPoint(), tol=1e-9, max_rounds=40)
    assert solution.status == mj.Status.CONVERGED
    best, weights = oracles.optimum(p.data, name, REGULARIZERS[regularizer][1])
    assert abs(solution.primal - best) <= 1e-8 * best
    np.testing.assert_allclose(solution.weights, weights, atol=1e-3)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.extended)])
def test_a_weak_regularizer_costs_no_more_rounds(dtype):
    """Where coordinate ascent has not begun after a thousand."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 60, 12)).astype(dtype)
    y = np.sign(np.einsum("mnd,md->mn", x, rng.normal(size=(20, 12))) + 2.0 * rng.normal(size=(20, 60)))
    data = mj.pack_tasks(list(x), list(y.astype(dtype)), loss_scaling="task_mean", dtype=dtype)
    for lam in (1e-2, 1e-4, 1e-6):
        p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(lam, 0.1 * lam))
        solution = mj.solve(p, mj.InteriorPoint(), tol=1e-4, max_rounds=40)
        assert solution.status == mj.Status.CONVERGED, (lam, solution)
        assert (solution.history.gap >= 0).all()


@pytest.mark.extended
def test_local_support_vector_machines_are_those_of_scikit_learn():
    data = zoo.data(loss_scaling="sum", m=4, low=20, high=40)
    lam = 0.3
    solution = mj.solve(
        mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(lam)), mj.InteriorPoint(), tol=1e-10
    )
    for t in range(data.num_tasks):
        rows = np.asarray(data.weight[t] > 0)
        svc = LinearSVC(loss="hinge", fit_intercept=False, C=1 / (2 * lam), tol=1e-10, max_iter=10_000_000)
        svc.fit(data.x[t, rows], data.y[t, rows])
        np.testing.assert_allclose(solution.weights[t], svc.coef_[0], atol=1e-4)


@pytest.mark.extended
def test_a_round_without_everybodys_answer_is_repeated():
    p, systems = problem(mj.losses.Hinge()), mj.systems.Dropout(0.3)
    plain = mj.solve(p, mj.InteriorPoint(), tol=1e-8)
    slow = mj.solve(p, mj.InteriorPoint(), tol=1e-8, systems=systems, max_rounds=500)
    assert slow.status == mj.Status.CONVERGED
    assert slow.rounds > plain.rounds
    np.testing.assert_allclose(slow.weights, plain.weights, atol=1e-10)


@pytest.mark.extended
def test_the_state_of_another_problem_is_no_hindrance():
    p = problem(mj.losses.Hinge())
    state = mj.solve(p, mj.InteriorPoint(), tol=1e-10).state
    other = p.replace(regularizer=mj.regularizers.MeanRegularized(0.002, 0.0005))
    straight, after = (mj.solve(other, mj.InteriorPoint(), tol=1e-8, state=s, max_rounds=60) for s in (None, state))
    assert after.status == mj.Status.CONVERGED
    assert after.rounds <= straight.rounds
    with pytest.raises(ValueError, match="InteriorPoint: the state has duals"):
        mj.InteriorPoint().resume(state, problem(mj.losses.Hinge(), low=20, high=30))


@pytest.mark.extended
def test_nodes_that_share_a_task_are_one():
    p = problem(mj.losses.Hinge())
    x, y, c = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight))
    halves = [slice(None, None, 2), slice(1, None, 2)]
    width = max(x[:, half].shape[1] for half in halves)

    def dealt(a):
        parts = [a[t][half] for t in range(M) for half in halves]
        return np.stack([np.pad(part, [(0, width - len(part))] + [(0, 0)] * (part.ndim - 1)) for part in parts])

    task = jnp.repeat(jnp.arange(M, dtype=jnp.int32), 2)
    halved = [jnp.asarray(dealt(a)) for a in (x, y, c)]
    data = mj.TaskData(halved[0], halved[1], halved[2], task, num_tasks=M, loss_scaling="task_mean")
    both = [mj.solve(one, mj.InteriorPoint(), tol=1e-9) for one in (p, p.replace(data=data))]
    np.testing.assert_allclose(both[0].weights, both[1].weights, atol=1e-6)


@pytest.mark.extended
def test_a_derivative_through_it_is_that_of_coordinate_ascent():
    p = problem(mj.losses.Hinge())

    def length(lam, algorithm):
        there = p.replace(regularizer=mj.regularizers.MeanRegularized(lam, 0.05))
        return (mj.solve(there, algorithm, tol=1e-8, max_rounds=500).weights ** 2).sum()

    ours, others = (jax.grad(length)(0.2, algorithm) for algorithm in (mj.InteriorPoint(), mj.Mocha()))
    np.testing.assert_allclose(ours, others, rtol=1e-6)


def test_what_it_is_not_for_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"Logistic is not divided into pieces .* use Newton\(\)"):
        mj.solve(problem(mj.losses.Logistic()), mj.InteriorPoint())
    learned = problem(mj.losses.Hinge()).replace(regularizer=mj.regularizers.Probabilistic(0.1))
    with pytest.raises(ValueError, match="Probabilistic learns the relationship"):
        mj.solve(learned, mj.InteriorPoint())


def test_what_is_sent_is_charged():
    p = problem(mj.losses.Hinge())
    _, history = mj.run(p, mj.InteriorPoint(), jax.random.key(0), num_rounds=2)
    assert history.bytes_up[-1] == 2 * M * (D * (D + 5) // 2 + 4) * 4.0
    assert history.bytes_down[-1] == 2 * M * (2 * D + 3) * 4.0


@pytest.mark.parametrize(
    ("shape", "lam", "gap"),
    [((10, 16, 32), 1e-5, 1e-4), pytest.param((4, 60, 33), 1e-3, 1e-5, marks=pytest.mark.extended)],
)
@pytest.mark.extended
def test_float32_ends_at_its_rounding(shape, lam, gap):
    """As near to the optimum as the duals' own rounding lets it, and with the round that gains no more."""
    rng = np.random.default_rng(0)
    m, n, d = shape
    x = rng.normal(size=shape).astype(np.float32)
    y = np.sign(np.einsum("mnd,md->mn", x, rng.normal(size=(m, d))) + rng.normal(size=(m, n)))
    data = mj.pack_tasks(list(x), list(y.astype(np.float32)), loss_scaling="task_mean", dtype=np.float32)
    p = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(lam, lam / 10))
    with pytest.warns(mj.NotConverged, match="float32"):
        solution = mj.solve(p, mj.InteriorPoint(), tol=1e-9, max_rounds=200, record_every=1)
    assert solution.status == mj.Status.PRECISION
    assert solution.rounds < 30
    assert float(solution.history.relative_gap[-1]) < gap
