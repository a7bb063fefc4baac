"""Solves that learn how the tasks relate: joint optima, certificates, alternation, planted truths."""

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import oracles, zoo
from tests.servers.problems import MODELS, R, joint_primal, make

SYSTEMS = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.2, 1.0)
QUICK = ("probabilistic", "hinge"), ("probabilistic", "logistic"), ("sharp clusters", "logistic")


@pytest.mark.parametrize(  # fewer tasks than features, and more
    ("model", "loss", "m"),
    [
        pytest.param(model, *case, marks=() if (model, case[0]) in QUICK else pytest.mark.slow)
        for model in ("probabilistic", "no ridge", "sharp clusters")
        for case in (("hinge", 7), ("logistic", 3), ("quantile", 7))
    ],
)
@pytest.mark.thin(1)
def test_the_joint_optimum_against_a_convex_solver(model, loss, m):
    problem = make(model, loss, m=m)
    solution = mj.solve(problem, tol=1e-6, max_rounds=20_000, record_every=20, chunk=1000)
    assert solution.status == mj.Status.CONVERGED
    best, _ = oracles.optimum(problem.data, loss, MODELS[model][1](), tol=1e-9)
    primal = float(solution.certificate.joint_primal)
    assert abs(primal - best) <= 3e-6 * best
    assert solution.certificate.joint_dual <= best * (1 + 1e-7)
    np.testing.assert_allclose(mj.objective(problem, solution.weights), primal, rtol=1e-9)
    np.testing.assert_allclose(mj.objective(problem, solution.weights, solution.relation), primal, rtol=1e-6)
    assert (solution.history.joint_gap >= 0).all()
    assert (solution.history.gap >= 0).all()


@pytest.mark.extended
def test_the_relation_is_replaced_when_it_is_due(key):
    problem = make("probabilistic")
    algorithm = mj.Mocha(server="dual", omega_every=3, sigma_prime="per_task")
    state, seen = algorithm.init(problem), []
    for _ in range(4):
        state, _ = mj.run(problem, algorithm, key, num_rounds=1, state=state)
        seen.append(problem.relationship(5, algorithm.relation(state, problem)))
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-10)
    np.testing.assert_allclose(seen[2], seen[3], rtol=1e-10)
    moved = np.linalg.norm(seen[2] - seen[1]) / np.linalg.norm(seen[1])
    assert moved > 0.1
    assert np.trace(seen[2]) == pytest.approx(1.0)


@pytest.mark.extended
def test_the_centre_of_a_task_moves_as_far_as_its_node_worked(key):
    problem, algorithm = make("probabilistic"), mj.Mocha(server="proximal")
    before, _ = mj.run(problem, algorithm, key, num_rounds=3)
    away = mj.systems.Dropout(np.array([0.0, 1.0, 0.0, 0.0, 0.0]))
    after, _ = mj.run(problem, algorithm, key, num_rounds=1, state=before, systems=away)
    moved = np.linalg.norm(after.server.center - before.server.center, axis=1)
    assert moved[1] == 0
    assert (np.delete(moved, 1) > 1e-3).all()


@pytest.mark.parametrize("omega_every", [2, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_rounds_between_updates_only_slow_it_down(omega_every, key):
    problem = make("no ridge")
    often = mj.solve(problem, tol=1e-4, max_rounds=5000, key=key)
    seldom = mj.solve(
        problem, mj.Mocha(omega_every=omega_every, sigma_prime="per_task"), tol=1e-4, max_rounds=5000, key=key
    )
    np.testing.assert_allclose(float(seldom.certificate.joint_primal), float(often.certificate.joint_primal), rtol=2e-4)


@pytest.mark.parametrize("model", ["no ridge", pytest.param("sharp clusters", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_stragglers_and_drops_change_the_path_not_the_end(model, key):
    problem = make(model)
    still = mj.solve(problem, tol=1e-5, max_rounds=20_000, record_every=20)
    for systems in (SYSTEMS, mj.systems.Dropout(0.8)):
        moved = mj.solve(problem, key=key, tol=1e-5, max_rounds=20_000, record_every=20, systems=systems)
        assert moved.status == mj.Status.CONVERGED
        np.testing.assert_allclose(
            float(moved.certificate.joint_primal), float(still.certificate.joint_primal), rtol=2e-5
        )


@cache
def optimum_of(model):
    return joint_primal(mj.solve(make(model), tol=1e-7, max_rounds=50_000, record_every=50, chunk=5000))


@pytest.mark.parametrize(
    "algorithm", [mj.Mocha(sigma_prime="per_task"), mj.Mocha(server="dual", smoothing=0.1, sigma_prime="per_task")]
)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [pytest.param("no ridge", marks=pytest.mark.slow), "clustered"])
@pytest.mark.slow
def test_gaps_are_never_negative_and_bound_the_distance(algorithm, dtype, model, key):
    optimum = optimum_of(model)
    _, h = mj.run(make(model, dtype=dtype), algorithm, key, num_rounds=120, systems=SYSTEMS)
    slack = 1e-6 if dtype is np.float32 else 2e-7
    assert (h.gap >= 0).all()
    assert (h.joint_gap >= 0).all()
    assert (h.joint_primal >= optimum * (1 - slack)).all()
    assert (h.joint_dual <= optimum * (1 + slack)).all()
    assert (np.diff(h.joint_dual) >= 0).all()
    assert h.relative_joint_gap[-1] < 0.5 * h.relative_joint_gap[0]


@pytest.mark.parametrize("model", ["probabilistic", "clustered"])
@pytest.mark.slow
def test_plain_alternation_never_raises_the_joint_objective(model):
    # Omega_every so large that every W-step is solved; then each outer step can only go down.
    problem = make(model, loss="logistic")
    algorithm = mj.Mocha(server="dual", omega_every=400, sigma_prime="per_task")
    _, h = mj.run(problem, algorithm, jax.random.key(0), num_rounds=400 * 12, record_every=400)
    before = np.asarray(h.gap_before)  # how well each W-step was solved
    assert (before <= 1e-4).all()
    joint = np.asarray(h.joint_primal)
    # The record after an update has the W of the old duals under the new Omega, one more W-step away from its value.
    assert (np.diff(joint)[1:] <= np.asarray(h.gap)[1:-1] + before[2:]).all()
    assert joint[-1] < joint[0]


@pytest.mark.slow
def test_the_gap_is_certified_before_and_after_an_update(key):
    problem = make("clustered")
    algorithm = mj.Mocha(server="dual", sigma_prime="per_task", omega_every=5)
    _, h = mj.run(problem, algorithm, key, num_rounds=25)
    assert np.isinf(h.gap_before[:4]).all()
    for r in (5, 10, 15):
        assert h.gap_before[r - 1] == h.gap_before[r]  # one update, remembered until the next
        state, _ = mj.run(problem, algorithm.replace(omega_every=1000), key, num_rounds=5)
        if r == 5:  # the same rounds without the update
            np.testing.assert_allclose(h.gap_before[4], algorithm.certify(state, problem).gap, rtol=1e-8)
            assert h.gap[4] != h.gap_before[4]
    # W is re-derived, and sigma' recomputed.
    state, _ = mj.run(problem, algorithm, key, num_rounds=5)
    coupling = problem.regularizer.coupling(problem.data.num_tasks, state.server.relation)
    np.testing.assert_allclose(state.w, coupling.apply(state.v), rtol=1e-10)
    np.testing.assert_allclose(state.server.sigma, coupling.sigma_prime("per_task"), rtol=1e-10)


@pytest.mark.slow
def test_the_first_update_before_any_work_is_harmless(key):
    for model in [*(MODELS[name][0] for name in MODELS), R.SparsePrecision(0.1, 1.0, 0.1, 0.2)]:
        problem = make(model)
        for server in ("proximal", "dual") if model.jointly_convex else ("dual",):
            algorithm = mj.Mocha(server=server, omega_every=1, sigma_prime="per_task")
            nobody = mj.systems.NeverAnswers(tuple(range(5)))
            state, h = mj.run(problem, algorithm, key, num_rounds=3, systems=nobody)
            finite = jax.tree.leaves((state.w, h.primal, h.gap, algorithm.relation(state, problem)))
            assert all(jnp.isfinite(leaf).all() for leaf in finite)
            np.testing.assert_array_equal(state.w, 0.0)


@pytest.mark.slow
def test_a_task_that_never_answers_gets_what_the_others_imply(key):
    truth = mj.datasets.federation(key, 8, 5, covariance=mj.datasets.clusters(8, 2), smallest=40, largest=60)
    problem = mj.Problem(truth.data, mj.losses.Hinge(), R.Probabilistic(0.05))
    silent = mj.systems.NeverAnswers((3,))
    with pytest.warns(UserWarning, match=r"task\(s\) 3"):
        solution = mj.solve(problem, key=key, tol=1e-5, max_rounds=400, record_every=50, systems=silent)
    assert np.isfinite(solution.weights).all()
    assert np.isfinite(solution.omega).all()
    assert solution.silent_nodes == (3,)


@pytest.mark.parametrize("model", ["learned", "given"])
@pytest.mark.slow
def test_a_task_without_samples_waits_for_nobody(model):
    regularizers = {"learned": mj.regularizers.Probabilistic(0.05), "given": mj.regularizers.MeanRegularized(0.2, 0.05)}
    data = zoo.data(m=5, d=4)
    problem = mj.Problem(data, mj.losses.Hinge(), regularizers[model])
    start = mj.solve(problem, mj.Mocha(server="proximal"), tol=1e-6)
    fewer = problem.replace(data=data.replace(weight=data.weight.at[1].set(0.0)))
    for state in (None, start.state):  # from no weights, and from those that the task had
        solution = mj.solve(fewer, mj.Mocha(server="proximal"), tol=1e-8, max_rounds=2000, state=state)
        assert solution.status == mj.Status.CONVERGED


@pytest.mark.slow
def test_joint_tolerance_and_what_a_solution_says():
    problem = make("no ridge", m=7)
    rough: Any = mj.solve(problem, joint_tol=5e-2)
    fine: Any = mj.solve(problem, joint_tol=1e-4, max_rounds=5000)
    assert rough.relative_joint_gap <= 5e-2
    assert fine.relative_joint_gap <= 1e-4
    assert rough.rounds < fine.rounds
    assert repr(fine).startswith("Solution(converged: relative joint gap")
    assert fine.gap <= fine.joint_gap * (1 + 1e-9)
    np.testing.assert_allclose(np.trace(fine.omega), 1.0, rtol=1e-9)
    np.testing.assert_allclose(np.diag(fine.correlation), 1.0)
    np.testing.assert_allclose(fine.covariance, fine.omega)
    sparse = mj.solve(make(R.SparsePrecision(0.1, 1.0, 0.0, 0.2)), tol=1e-3, max_rounds=3000)
    assert sparse.joint_gap is None
    assert "residual" in repr(sparse)
    with pytest.raises(ValueError, match="no joint gap"):
        mj.solve(sparse.problem, joint_tol=1e-3)
    with pytest.raises(ValueError, match='server="dual"'):
        mj.solve(sparse.problem, mj.Mocha(server="proximal"))
    with pytest.raises(ValueError, match="k = 6 clusters"):
        make(R.Clustered(0.1, 0.1, 6))
    with pytest.raises(ValueError, match="server must be one of"):
        mj.Mocha(server="central")


@pytest.mark.parametrize("lam1", [0.0, 0.02])
@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.slow
def test_sparse_precision_ends_where_neither_block_can_be_improved(lam1, loss):
    regularizer = R.SparsePrecision(0.05, 5.0, lam1, 0.2)
    problem = make(regularizer, loss, m=6)
    solution = mj.solve(
        problem,
        mj.Mocha(omega_every=50, sigma_prime="per_task"),
        tol=1e-13,
        max_rounds=40_000,
        record_every=50,
        chunk=1000,
    )
    assert solution.status == mj.Status.CONVERGED
    w, omega = np.asarray(solution.weights), np.asarray(solution.omega)
    # Omega: the subgradient of the graphical lasso that is nearest to 0.
    d, alpha = w.shape[1], 0.2 / (0.05 * w.shape[1])
    g = w @ w.T / d - np.linalg.inv(omega)
    residual = np.where(omega == 0, np.maximum(np.abs(g) - alpha, 0), np.abs(g + alpha * np.sign(omega)))
    assert residual.max() <= 1e-5
    # W: the same for loss + quadratic + l1, by JAX's own derivative of the smooth part.
    smooth = lambda w: mj.objective(problem, w, solution.relation) - lam1 * jnp.sum(jnp.abs(w))  # noqa: E731
    g = np.asarray(jax.grad(smooth)(solution.weights))
    residual = np.where(w == 0, np.maximum(np.abs(g) - lam1, 0), np.abs(g + lam1 * np.sign(w)))
    assert residual.max() <= 1e-5
    if lam1:
        assert (w == 0).any()
    # Descent of every outer step, and objective = certificate.
    np.testing.assert_allclose(mj.objective(problem, solution.weights, solution.relation), solution.primal, rtol=1e-9)
    primal = solution.history.primal
    assert (np.diff(primal)[1:] <= 1e-6).all()


@pytest.mark.slow
def test_planted_clusters_and_rivals_are_found(key):
    plotting = pytest.importorskip("mocha_jax.plotting")
    shuffled = np.random.default_rng(0).permutation(12)
    covariance = mj.datasets.clusters(12, 3, within=0.95, across=-0.4)
    truth = mj.datasets.federation(key, 12, 20, covariance=covariance, smallest=60, largest=120)
    for regularizer in (R.Probabilistic(0.003), R.Clustered(0.006, 0.05, 3)):
        problem = mj.Problem(truth.data, mj.losses.Hinge(), regularizer)
        found = np.asarray(mj.solve(problem, tol=1e-3, max_rounds=2000).correlation)
        same = np.arange(12)[:, None] // 4 == np.arange(12)[None, :] // 4
        own, others = found[same & ~np.eye(12, dtype=bool)], found[~same]
        assert own.min() > others.max()
        assert own.mean() > others.mean() + 0.5
        assert others.mean() < -0.05  # rivals are seen as rivals
        order = plotting.cluster_order(found[np.ix_(shuffled, shuffled)])
        assert (np.diff(shuffled[order] // 4) != 0).sum() == 2  # every cluster in one piece


@pytest.mark.slow
def test_the_picture_of_a_relationship(tmp_path):
    plotting = pytest.importorskip("mocha_jax.plotting")
    for model in (MODELS["no ridge"], MODELS["clustered"], R.MeanRegularized(0.1, 0.1)):
        solution = mj.solve(make(model[0] if isinstance(model, tuple) else model), max_rounds=5)
        plotting.relationship(solution, title="tasks").savefig(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 5_000
    assert plotting.cluster_order(np.ones((1, 1))).tolist() == [0]


@pytest.mark.slow
def test_a_planted_sparse_graph_is_found(key):
    rng = np.random.default_rng(0)
    m, d = 10, 400  # many features: many draws of the tasks' weights
    precision = np.eye(m)
    for t in range(m - 1):
        precision[t, t + 1] = precision[t + 1, t] = -0.3
    w = np.linalg.cholesky(np.linalg.inv(precision)) @ rng.normal(size=(m, d))
    omega = np.asarray(R.SparsePrecision(1.0, 1.0, 0.0, 0.2 * d).update_relation(None, jnp.asarray(w)))
    off = ~np.eye(m, dtype=bool)
    truth, guess = (precision != 0) & off, (np.abs(omega) > 1e-8) & off
    assert (truth & guess).sum() / guess.sum() >= 0.9
    assert (truth & guess).sum() / truth.sum() >= 0.9


@pytest.mark.slow
def test_gradients_flow_through_a_solve_that_learns_omega(key):
    def final(log_lam):
        problem = make("probabilistic", "logistic", m=6).replace(regularizer=R.Probabilistic(jnp.exp(log_lam), 5.0))
        state, _ = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4, record_every=4)
        return jnp.sum(state.w**2)

    at, step = jnp.log(0.05), 1e-5
    difference = (final(at + step) - final(at - step)) / (2 * step)
    assert float(jax.grad(final)(at)) == pytest.approx(float(difference), rel=1e-5)
    # A round in which nothing moves has a derivative too.
    problem, nobody = make("probabilistic", "squared"), mj.systems.NeverAnswers(tuple(range(5)))

    def loss(lam):
        there = problem.replace(regularizer=R.Probabilistic(lam, 1.0))
        return mj.run(there, mj.Mocha(sigma_prime="per_task"), key, num_rounds=2, systems=nobody)[1].joint_primal[-1]

    assert jnp.isfinite(jax.grad(loss)(0.1))


def landmine(load):
    f = load("landmine")
    return mj.pack_tasks(f["X"], f["y"], f["task"], loss_scaling="task_mean", intercept=True)


@pytest.mark.parametrize("lam", [1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("model", ["sigma2 = 10", "sigma2 = inf", "clustered"])
@pytest.mark.slow
def test_landmine_reaches_the_joint_optimum_in_few_rounds(lam, model, real_data):
    data = landmine(real_data)
    regularizer, oracle = {
        "sigma2 = 10": (R.Probabilistic(lam, 10.0), oracles.squared_nuclear_norm(lam, 10.0)),
        "sigma2 = inf": (R.Probabilistic(lam), oracles.squared_nuclear_norm(lam, np.inf)),
        "clustered": (R.Clustered(lam, 0.1, 3), oracles.clustered(lam, 0.1, 3)),
    }[model]
    solution = mj.solve(mj.Problem(data, mj.losses.Hinge(), regularizer), tol=1e-3, max_rounds=600)
    assert solution.status == mj.Status.CONVERGED
    best, _ = oracles.optimum(data, "hinge", oracle, tol=1e-7)
    assert abs(float(solution.certificate.joint_primal) - best) <= 1e-3 * best
    assert (solution.history.joint_gap >= 0).all()
    rounds = [int((solution.history.relative_joint_gap > tol).sum()) for tol in (5e-3, 1e-3)]
    assert all(a <= b for a, b in pairwise(rounds))
    assert rounds[0] < 150
