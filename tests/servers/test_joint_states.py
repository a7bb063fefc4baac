"""Warm starts, paths and new tasks where Omega is learned."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.servers.problems import R, joint_primal, make

SYSTEMS = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.2, 1.0)


@pytest.mark.slow
def test_a_path_of_lambdas_is_quicker_from_the_previous_solution():
    state, cold_rounds, warm_rounds = None, 0, 0
    options: dict[str, Any] = dict(tol=1e-4, max_rounds=5000)
    for lam in np.geomspace(0.3, 0.02, 12):
        problem = make(R.Probabilistic(lam, 5.0))
        cold = mj.solve(problem, **options)
        warm = mj.solve(problem, state=state, **options)
        cold_rounds, warm_rounds, state = cold_rounds + int(cold.rounds), warm_rounds + int(warm.rounds), warm.state
        np.testing.assert_allclose(joint_primal(warm), joint_primal(cold), rtol=2e-4)
    assert warm_rounds < cold_rounds


@pytest.mark.slow
def test_a_warm_start_far_away_is_not_slower_than_a_cold_one():
    far = mj.solve(make(R.Probabilistic(10.0)), tol=None, max_rounds=1500, record_every=50)
    options: dict[str, Any] = dict(tol=1e-5, max_rounds=6000, record_every=10)
    near = make(R.Probabilistic(1e-3))
    cold, warm = mj.solve(near, **options), mj.solve(near, state=far.state, **options)
    assert warm.status == mj.Status.CONVERGED
    assert warm.rounds <= 2 * cold.rounds


@pytest.mark.slow
def test_a_warm_start_with_another_lam2_learns_omega_again():
    options: dict[str, Any] = dict(tol=1e-7, max_rounds=3000)
    first = mj.solve(make(R.SparsePrecision(0.1, 1.0, 0.0, 0.1), "squared"), **options)
    other = make(R.SparsePrecision(0.1, 1.0, 0.0, 0.001), "squared")
    cold, warm = mj.solve(other, **options), mj.solve(other, state=first.state, **options)
    np.testing.assert_allclose(warm.primal, cold.primal, rtol=1e-4)


@pytest.mark.slow
def test_a_state_of_another_kind_of_regularizer_or_precision_is_a_warm_start(key):
    dual = mj.Mocha(server="dual", omega_every=5, sigma_prime="per_task")
    kinds = [R.Clustered(0.05, 0.1, 3.0), R.Probabilistic(0.05), R.MeanRegularized(0.1, 0.1)]
    kinds.insert(2, R.SparsePrecision(0.1, 1.0, 0.1, 0.2))
    states = [mj.run(make(kind), dual, key, num_rounds=12)[0] for kind in kinds]
    for i, j in ((0, 1), (2, 1), (3, 2)):
        after, h = mj.run(make(kinds[j], dtype=np.float32), dual, key, num_rounds=3, state=states[i])
        assert (h.gap >= 0).all()
        if j == 1:
            assert np.trace(mj.coupling.as_matrix(after.server.relation)) == pytest.approx(1.0, rel=1e-5)
    state, _ = mj.run(make(kinds[0]), mj.Mocha(sigma_prime="per_task"), key, num_rounds=12)
    _, h = mj.run(make(kinds[1], dtype=np.float32), mj.Mocha(sigma_prime="per_task"), key, num_rounds=3, state=state)
    assert h.joint_gap.dtype == np.float32


@pytest.mark.parametrize(
    ("regularizer", "server", "m"),
    [
        (R.Probabilistic(0.02), "proximal", 3),
        pytest.param(R.Clustered(0.05, 0.1, 2), "dual", 6, marks=pytest.mark.slow),
        pytest.param(R.SparsePrecision(0.1, 1.0, 0.0, 0.2), "dual", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_new_task_joins(regularizer, server, m):
    data = zoo.data(m=m, loss_scaling="task_mean")
    new = zoo.data(m=1, seed=9, high=20, low=20, loss_scaling="task_mean")
    algorithm = mj.Mocha(server=server, sigma_prime="per_task")
    options: dict[str, Any] = dict(tol=1e-3, max_rounds=400)
    first = mj.solve(mj.Problem(data, mj.losses.Hinge(), regularizer), algorithm, **options)
    larger = mj.Problem(data.append(new), mj.losses.Hinge(), regularizer)
    state = algorithm.add_tasks(first.state, larger)
    np.testing.assert_array_equal(state.beta[:m, : first.state.beta.shape[1]], first.state.beta)
    joined = mj.solve(larger, algorithm, state=state, **options)
    assert joined.omega.shape == (m + 1, m + 1)
    assert np.isfinite(joined.weights).all()
    fresh = mj.solve(larger, algorithm, **options)
    if server == "proximal":
        assert joined.status == mj.Status.CONVERGED
    objective = [float(mj.objective(larger, solution.weights)) for solution in (joined, fresh)]
    # Alternation ends wherever it stalls; the new task must not be worse off for having joined late.
    assert objective[0] <= objective[1] * (1.003 if server == "proximal" else 1.05) + (server == "dual") * 0.01
    with pytest.raises(ValueError, match="New tasks go after the old ones"):
        algorithm.add_tasks(joined.state, first.problem)


@pytest.mark.slow
def test_a_state_of_another_server_is_not_extended():
    data = zoo.data(m=3)
    larger = data.append(zoo.data(m=1, seed=9))
    alternating, sgd = mj.Mocha(server="dual"), mj.MiniBatchSgd(batch=2)
    given, learned = R.MeanRegularized(0.1, 0.1), R.Probabilistic(0.1)

    def start(algorithm, regularizer):
        return algorithm.init(mj.Problem(data, mj.losses.Hinge(), regularizer))

    proximal, dual = start(mj.Mocha(), learned), start(mj.Mocha(), given)
    for algorithm, state, regularizer, message in [
        (mj.Mocha(), proximal, given, "holds a ProximalState, which is none of a"),
        (alternating, proximal, learned, "holds a ProximalState, which is none of a"),
        (mj.Mocha(), dual, learned, "which is none of a ProximalServer"),
        (mj.MiniBatchSdca(batch=2), proximal, given, "holds a ProximalState, which is none of a"),
        (mj.Mocha(), start(sgd, given), given, "is a SgdState, not one of a dual method"),
    ]:
        problem = mj.Problem(larger, mj.losses.Hinge(), regularizer)
        with pytest.raises(ValueError, match=message):
            algorithm.add_tasks(state, problem)


@pytest.mark.slow
def test_a_state_of_the_other_server_is_refused():
    problem = make()
    state = mj.solve(problem, max_rounds=3).state
    with pytest.raises(ValueError, match="ProximalState"):
        mj.solve(problem, mj.Mocha(server="dual", sigma_prime="per_task"), state=state)


@pytest.mark.slow
def test_another_k_still_gets_a_feasible_omega(key):
    problem, algorithm = make(R.Clustered(0.05, 0.1, 4)), mj.Mocha(server="dual", omega_every=5, sigma_prime="per_task")
    state, _ = mj.run(problem, algorithm, key, num_rounds=20)
    for k in (1, 2.5, 5):
        there = make(R.Clustered(0.05, 0.1, k))
        omega = mj.coupling.as_matrix(algorithm.resume(state, there).server.relation)
        assert np.trace(omega) == pytest.approx(k, rel=1e-9)
        assert np.linalg.eigvalsh(omega).min() >= -1e-12
        assert np.linalg.eigvalsh(omega).max() <= 1 + 1e-9


@pytest.mark.slow
def test_one_program_for_a_path(key):
    lams = jnp.array([0.01, 0.05, 0.3])

    def final(lam):
        problem = make("no ridge").replace(regularizer=R.Probabilistic(lam))
        return mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=30, systems=SYSTEMS)[1].joint_gap

    together = jax.vmap(final)(lams)
    for lam, gaps in zip(lams, together, strict=True):
        np.testing.assert_allclose(gaps, final(lam), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [mj.Mocha(sigma_prime="per_task"), mj.Mocha(server="dual", omega_every=7, smoothing=0.01, sigma_prime="per_task")],
)
@pytest.mark.slow
def test_resume_and_continue_while_learning(algorithm, tmp_path, key):
    problem = make("no ridge")
    options: dict[str, Any] = dict(key=key, tol=None, chunk=8, systems=SYSTEMS)
    straight = mj.solve(problem, algorithm, max_rounds=40, checkpoint=tmp_path / "a.npz", **options)
    mj.solve(problem, algorithm, max_rounds=24, checkpoint=tmp_path / "b.npz", **options)
    resumed = mj.solve(problem, algorithm, max_rounds=40, checkpoint=tmp_path / "b.npz", **options)
    chex.assert_trees_all_equal(straight.state, resumed.state)
    chex.assert_trees_all_equal(straight.history, resumed.history)
    half = mj.solve(problem, algorithm, max_rounds=24, **options)
    continued = mj.solve(problem, algorithm, max_rounds=16, state=half.state, **options)
    np.testing.assert_allclose(continued.weights, straight.weights, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("omega", ["abc", 5.0, np.eye(5), object()])
@pytest.mark.slow
def test_an_omega_is_what_the_regularizer_keeps(omega):
    data = zoo.data()
    given = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Graph(zoo.laplacian(5), 0.1, 0.1))
    learned = given.replace(regularizer=mj.regularizers.Clustered(0.1, 0.1, 2.0))
    for problem, message in ((given, "relation must be left out: the relationship of Graph is given"),
                             (learned, "relation must be Omega as Clustered keeps it, for 5 tasks and 4 features")):  # fmt: skip
        with pytest.raises(ValueError, match=f"certificate: {message}"):
            mj.certificate(problem, 0 * data.y, omega)
        with pytest.raises(ValueError, match=f"objective: {message}"):
            mj.objective(problem, jnp.zeros((5, 4)), omega)
    kept = learned.regularizer.known_relation("test", None, 5, 4)
    assert mj.certificate(learned, 0 * data.y, kept).gap == mj.certificate(learned, 0 * data.y).gap
