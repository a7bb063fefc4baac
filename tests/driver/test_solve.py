"""The drivers: stopping and watching."""

import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo


@pytest.fixture
def problem():
    return mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.02))


SYSTEMS = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.2, 1.0)


def same(a, b):
    chex.assert_trees_all_equal(a.state, b.state)
    chex.assert_trees_all_equal(a.history, b.history)
    assert (a.status, a.rounds, a.message) == (b.status, b.rounds, b.message)


@pytest.mark.slow
def test_solve_and_run_are_the_same_rounds(problem, key):
    solution = mj.solve(problem, key=key, tol=None, max_rounds=70, chunk=32, systems=SYSTEMS)
    state, history = mj.run(problem, mj.Mocha(), key, num_rounds=70, systems=SYSTEMS)
    chex.assert_trees_all_close(solution.state, state, rtol=1e-12, atol=1e-15)
    chex.assert_trees_all_close(solution.history, history, rtol=1e-9, atol=1e-12)
    assert solution.status == mj.Status.MAX_ROUNDS


@pytest.mark.slow
def test_a_run_continued_from_a_state_is_one_long_run(problem, key):
    plain = mj.Mocha(sigma_prime="per_task")  # the adaptive server would make much of a last bit
    straight, history = mj.run(problem, plain, key, num_rounds=90, systems=SYSTEMS)
    half, first = mj.run(problem, plain, key, num_rounds=50, systems=SYSTEMS)
    end, second = mj.run(problem, plain, key, num_rounds=40, systems=SYSTEMS, state=half)
    chex.assert_trees_all_close(straight, end, rtol=1e-11, atol=1e-14)  # two compiled programs
    for name in ("round", "gap", "primal", "steps"):
        np.testing.assert_allclose(getattr(history, name), [*getattr(first, name), *getattr(second, name)], rtol=1e-8)
    more = mj.solve(problem, plain, key=key, tol=None, max_rounds=40, systems=SYSTEMS, state=half)
    assert more.rounds == 40
    np.testing.assert_allclose(more.weights, straight.w, rtol=1e-9)


@pytest.mark.slow
def test_a_state_of_another_problem_is_a_warm_start_not_a_wrong_certificate(problem):
    strong = mj.solve(problem.replace(regularizer=mj.regularizers.MeanRegularized(1.0, 1.0)), tol=1e-5)
    cold = mj.solve(problem, tol=1e-6, max_rounds=5000)
    warm = mj.solve(problem, tol=1e-6, max_rounds=5000, state=strong.state)
    np.testing.assert_allclose(warm.primal, cold.primal, rtol=2e-6)
    np.testing.assert_allclose(mj.objective(problem, warm.weights), warm.primal, rtol=1e-9)
    again = mj.solve(problem, tol=1e-6, max_rounds=5000, state=cold.state)
    assert again.rounds <= 2
    scaled, _ = mj.run(problem, mj.Mocha(gamma=0.1, sigma_prime="per_task"), jax.random.key(0), num_rounds=2)
    assert (
        mj.run(problem, mj.Mocha(sigma_prime="per_task"), jax.random.key(0), num_rounds=1, state=scaled)[0].server.sigma
        >= 1
    ).all()
    other = mj.Problem(zoo.data(m=3), mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    with pytest.raises(ValueError, match="belongs to other data"):
        mj.solve(other, state=cold.state)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.slow
def test_it_stops_at_the_first_record_within_tolerance(problem, key, chunk):
    solution = mj.solve(problem, key=key, tol=1e-3, chunk=chunk, systems=SYSTEMS)
    assert solution.status == mj.Status.CONVERGED
    assert solution.relative_gap <= 1e-3
    assert (solution.history.relative_gap[:-1] > 1e-3).all()
    assert solution.rounds == len(solution.history.gap) == solution.history.round[-1]
    same(solution, mj.solve(problem, key=key, tol=1e-3, chunk=25, systems=SYSTEMS))


@pytest.mark.slow
def test_max_rounds_is_a_bound_also_between_records(problem):
    for chunk in (1, 6, 100):
        solution = mj.solve(problem, tol=1e-12, max_rounds=11, record_every=4, chunk=chunk)
        assert solution.rounds == 11
        assert solution.history.round.tolist() == [4, 8, 11]
    nothing = mj.solve(problem, max_rounds=0)
    assert (nothing.rounds, nothing.status, len(nothing.history.gap)) == (0, mj.Status.MAX_ROUNDS, 0)
    np.testing.assert_allclose(nothing.relative_gap, 1.0, rtol=1e-12)


@pytest.mark.slow
def test_callback_sees_the_history_and_can_stop(problem):
    seen = []

    def watch(round, history):
        seen.append((round, len(history.gap)))
        return round >= 30

    solution = mj.solve(problem, tol=None, chunk=10, callback=watch)
    assert seen == [(10, 10), (20, 20), (30, 30)]
    assert solution.status == mj.Status.STOPPED
    assert "callback" in solution.message


@pytest.mark.extended
def test_a_gap_that_is_not_finite_ends_the_solve(problem):
    start = mj.Mocha().init(problem)
    broken = start.replace(beta=start.beta.at[1, 0].set(jnp.nan))
    solution = mj.solve(problem, max_rounds=50, state=broken)
    assert solution.status == mj.Status.NON_FINITE
    assert solution.rounds == 1
    numpy_numbers: dict[str, Any] = dict(max_rounds=np.int64(50), tol=np.float32(1e-3))
    assert mj.solve(problem, state=broken, **numpy_numbers).rounds == 1


@pytest.mark.extended
@pytest.mark.parametrize("loss", [mj.losses.Logistic(), mj.losses.Hinge()], ids=["logistic", "hinge"])
@pytest.mark.thin(1)
def test_what_rounding_leaves_ends_the_solve(loss):
    """And no record is worse than rounding: an older bound does not replace the gap of this round."""
    problem = mj.Problem(zoo.data(dtype=np.float32), loss, mj.regularizers.Probabilistic(0.01, 10.0))
    with pytest.warns(mj.NotConverged, match="tol=1e-09 was not reached: .* rounding in float32 may hide the rest"):
        solution = mj.solve(problem, tol=1e-9, max_rounds=1000, record_every=5)
    assert solution.status == mj.Status.PRECISION
    residual, rounds = solution.history.residual, solution.history.round
    assert residual.min() < 2e-6
    assert residual[residual.argmin() :].max() < 2.0 * residual.min()
    assert solution.rounds <= 2 * rounds[residual < residual.min() / 0.75][0] + 30
    # Without a tolerance nothing ends it.
    assert mj.solve(problem, tol=None, max_rounds=200, record_every=5).rounds == 200


@pytest.mark.parametrize("without_tqdm", [False, True])
@pytest.mark.slow
def test_progress_is_shown(problem, capsys, monkeypatch, without_tqdm):
    if without_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    mj.solve(problem, tol=1e-3, chunk=5, progress=True)
    assert "relative gap" in capsys.readouterr().err


@pytest.mark.slow
def test_a_certificate_is_of_the_duals_alone(key):
    """And not of the V that is carried along, which rounding may have led astray."""
    for regularizer in (mj.regularizers.MeanRegularized(0.1, 0.02), mj.regularizers.Probabilistic(0.1)):
        problem = mj.Problem(zoo.data(), mj.losses.Hinge(), regularizer)
        state, _ = mj.run(problem, mj.Mocha(), key, num_rounds=5)
        astray = mj.Mocha().certify(state.replace(v=1.1 * state.v), problem)
        chex.assert_trees_all_close(astray, mj.Mocha().certify(state, problem), rtol=1e-9)


@pytest.mark.slow
def test_features_in_other_units_are_no_reason_for_an_untrue_status():
    xs, ys = zoo.ragged()
    data = mj.pack_tasks([x * [1, 100, 1, 1] for x in xs], ys, dtype="float32")
    solution = mj.solve(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1)), max_rounds=400)
    np.testing.assert_allclose(solution.history.relative_gap[-1], solution.relative_gap, rtol=1e-2)


@pytest.mark.slow
def test_many_solutions_have_no_one_status(problem):
    def there(lam):
        return mj.solve(problem.replace(regularizer=mj.regularizers.Probabilistic(lam)), tol=1e-2)

    many = jax.vmap(there)(np.array([0.1, 0.2]))
    for name in ("status", "message", "silent_nodes", "omega", "correlation"):
        with pytest.raises(ValueError, match="these are 2 solutions"):
            getattr(many, name)
    one = jax.tree.map(lambda a: a[1], many)
    assert one.status == mj.Status.CONVERGED
    assert one.omega.shape == (5, 5)


def test_solution_reads_well(problem):
    solution = mj.solve(problem, mj.Mocha(), tol=1e-3)
    assert repr(solution).startswith("Solution(converged: relative gap")
    assert solution.primal >= solution.dual
    np.testing.assert_allclose(solution.primal - solution.dual, solution.gap, rtol=1e-9)
    np.testing.assert_allclose(np.sum(solution.task_gaps), solution.gap, rtol=1e-9)
    np.testing.assert_allclose(solution.omega, np.eye(5) - 0.2)
    assert solution.joint_gap == solution.gap
    assert "weights" in repr(problem.replace(data=problem.data)) or "TaskData" in repr(problem)


BAD: dict[str, dict[str, Any]] = {
    "max_rounds": dict(max_rounds=-1),
    "chunk": dict(chunk=0),
    "record_every": dict(record_every=1.5),
    "algorithm": dict(algorithm=mj.Mocha),
    "tol": dict(tol=-1e-3),
    "key": dict(key=0),
    "joint_tol": dict(joint_tol=-1e-3),
    "callback": dict(callback=5),
    "progress": dict(progress="no"),
    "adjoint": dict(adjoint=5),
    "state": dict(state=5),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(problem, name, monkeypatch):
    monkeypatch.setattr("mocha_jax._driver.host.allocate", None)  # nothing is computed
    with pytest.raises(ValueError, match=f"solve.*: {name} must be"):
        mj.solve(problem, **BAD[name])
    if name == "record_every":
        with pytest.raises(ValueError, match="run: num_rounds must be"):
            mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=0)


@pytest.mark.parametrize("state", ["abc", np.zeros(3), np.zeros(())], ids=["text", "an array", "a number"])
def test_what_is_no_state_is_refused_by_name(problem, state):
    wrong: tuple[Any, ...] = state, mj.solve(problem, max_rounds=1)
    for solution_or_state in wrong:
        with pytest.raises(ValueError, match="solve: state must be what an algorithm carries"):
            mj.solve(problem, state=solution_or_state)
        with pytest.raises(ValueError, match="run: state must be what an algorithm carries"):
            mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=1, state=solution_or_state)


def test_rounds_end_where_an_int32_does(problem, key):
    state = mj.solve(problem, max_rounds=1).state.replace(round=jnp.asarray(2**31 - 3, jnp.int32))
    assert mj.solve(problem, state=state, tol=None, max_rounds=2).history.round.tolist() == [2**31 - 2, 2**31 - 1]
    with pytest.raises(ValueError, match="solve: max_rounds must be at most 2"):
        mj.solve(problem, state=state)
    with pytest.raises(ValueError, match="run: num_rounds must be at most 2"):
        mj.run(problem, mj.Mocha(), key, num_rounds=3, state=state)


def test_a_long_chunk_needs_no_more_room_than_there_are_rounds(problem):
    same(mj.solve(problem, max_rounds=3, chunk=2**31 - 1), mj.solve(problem, max_rounds=3))


@pytest.mark.parametrize("algorithm", [mj.Mocha(sigma_prime="per_task"), mj.Mocha()], ids=["per_task", "adaptive"])
@pytest.mark.thin(1)
def test_a_second_problem_of_the_same_shape_compiles_nothing(algorithm, key):
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def solve(seed, lam):
        rng = np.random.default_rng(seed)
        xs = [rng.normal(size=(n, 3)) for n in rng.permutation([20, 14, 17, 9])]
        data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
        problem = mj.Problem(data, mj.losses.SmoothedHinge(lam), mj.regularizers.MeanRegularized(lam, 0.1))
        return mj.solve(problem, algorithm, key=jax.random.key(seed), tol=10 * lam**4, systems=mj.systems.Dropout(lam))

    solve(0, 0.2)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        solve(1, 0.3)
        assert not compiled
        jax.jit(lambda a: 3.0 * a)(1.0)
        assert compiled  # it would have been heard
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.slow
def test_a_history_is_columns(problem):
    history = mj.solve(problem, max_rounds=6, record_every=2, tol=None, watch=mj.Watch()).history
    columns = history.to_dict()
    assert columns["round"].tolist() == [2, 4, 6]
    np.testing.assert_array_equal(columns["relative_gap"], history.relative_gap)
    np.testing.assert_array_equal(columns["simulated_time"], history.simulated_time)
    assert {np.shape(column) for column in columns.values()} == {(3,)}
    assert not {"nodes", "quality", "task_gaps", "rounding"} & set(columns)
    pandas = pytest.importorskip("pandas")
    frame = history.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(columns)
    assert len(frame) == 3
