"""The drivers: stopping, watching, saving, and coming back from the dead."""

import os
import signal
import subprocess
import sys
import time
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


def test_solve_and_run_are_the_same_rounds(problem, key):
    solution = mj.solve(problem, key=key, tol=None, max_rounds=70, chunk=32, systems=SYSTEMS)
    state, history = mj.run(key, mj.Mocha(), problem, num_rounds=70, systems=SYSTEMS)
    chex.assert_trees_all_close(solution.state, state, rtol=1e-12, atol=1e-15)
    chex.assert_trees_all_close(solution.history, history, rtol=1e-9, atol=1e-12)
    assert solution.status == mj.Status.MAX_ROUNDS


def test_a_run_continued_from_a_state_is_one_long_run(problem, key):
    plain = mj.Mocha(sigma_prime="per_task")  # the adaptive server would make much of a last bit
    straight, history = mj.run(key, plain, problem, num_rounds=90, systems=SYSTEMS)
    half, first = mj.run(key, plain, problem, num_rounds=50, systems=SYSTEMS)
    end, second = mj.run(key, plain, problem, num_rounds=40, systems=SYSTEMS, state=half)
    chex.assert_trees_all_close(straight, end, rtol=1e-11, atol=1e-14)  # two compiled programs
    for name in ("round", "gap", "primal", "steps"):
        np.testing.assert_allclose(getattr(history, name), [*getattr(first, name), *getattr(second, name)], rtol=1e-8)
    more = mj.solve(problem, plain, key=key, tol=None, max_rounds=40, systems=SYSTEMS, state=half)
    assert more.rounds == 40
    np.testing.assert_allclose(more.weights, straight.w, rtol=1e-9)


def test_a_state_of_another_problem_is_a_warm_start_not_a_wrong_certificate(problem):
    strong = mj.solve(problem.replace(regularizer=mj.regularizers.MeanRegularized(1.0, 1.0)), tol=1e-5)
    cold = mj.solve(problem, tol=1e-6, max_rounds=5000)
    warm = mj.solve(problem, tol=1e-6, max_rounds=5000, state=strong.state)
    np.testing.assert_allclose(warm.primal, cold.primal, rtol=2e-6)
    np.testing.assert_allclose(mj.objective(problem, warm.weights), warm.primal, rtol=1e-9)
    again = mj.solve(problem, tol=1e-6, max_rounds=5000, state=cold.state)
    assert again.rounds <= 2
    scaled, _ = mj.run(jax.random.key(0), mj.Mocha(gamma=0.1, sigma_prime="per_task"), problem, num_rounds=2)
    assert (
        mj.run(jax.random.key(0), mj.Mocha(sigma_prime="per_task"), problem, num_rounds=1, state=scaled)[0].server.sigma
        >= 1
    ).all()
    other = mj.Problem(zoo.data(m=3), mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    with pytest.raises(ValueError, match="belongs to other data"):
        mj.solve(other, state=cold.state)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_it_stops_at_the_first_record_within_tolerance(problem, key, chunk):
    solution = mj.solve(problem, key=key, tol=1e-3, chunk=chunk, systems=SYSTEMS)
    assert solution.status == mj.Status.CONVERGED
    assert solution.relative_gap <= 1e-3
    assert (solution.history.relative_gap[:-1] > 1e-3).all()
    assert solution.rounds == len(solution.history.gap) == solution.history.round[-1]
    same(solution, mj.solve(problem, key=key, tol=1e-3, chunk=25, systems=SYSTEMS))


def test_max_rounds_is_a_bound_also_between_records(problem):
    for chunk in (1, 6, 100):
        solution = mj.solve(problem, tol=1e-12, max_rounds=11, record_every=4, chunk=chunk)
        assert solution.rounds == 11
        assert solution.history.round.tolist() == [4, 8, 11]
    nothing = mj.solve(problem, max_rounds=0)
    assert (nothing.rounds, nothing.status, len(nothing.history.gap)) == (0, mj.Status.MAX_ROUNDS, 0)
    assert nothing.relative_gap == 1.0


def test_callback_sees_the_history_and_can_stop(problem):
    seen = []

    def watch(round, history):
        seen.append((round, len(history.gap)))
        return round >= 30

    solution = mj.solve(problem, tol=None, chunk=10, callback=watch)
    assert seen == [(10, 10), (20, 20), (30, 30)]
    assert solution.status == mj.Status.STOPPED
    assert "callback" in solution.message


def test_a_gap_that_is_not_finite_ends_the_solve(problem):
    broken = problem.replace(data=problem.data.replace(x=problem.data.x.at[1, 0, 0].set(jnp.nan)))
    solution = mj.solve(broken, max_rounds=50)
    assert solution.status == mj.Status.NON_FINITE
    assert solution.rounds == 1
    numpy_numbers: dict[str, Any] = dict(max_rounds=np.int64(50), tol=np.float32(1e-3))
    assert mj.solve(broken, **numpy_numbers).rounds == 1


@pytest.mark.parametrize("without_tqdm", [False, True])
def test_progress_is_shown(problem, capsys, monkeypatch, without_tqdm):
    if without_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    mj.solve(problem, tol=1e-3, chunk=5, progress=True)
    assert "relative gap" in capsys.readouterr().err


def test_a_certificate_is_of_the_duals_alone(key):
    """And not of the V that is carried along, which rounding may have led astray."""
    for regularizer in (mj.regularizers.MeanRegularized(0.1, 0.02), mj.regularizers.Probabilistic(0.1)):
        problem = mj.Problem(zoo.data(), mj.losses.Hinge(), regularizer)
        state, _ = mj.run(key, mj.Mocha(), problem, num_rounds=5)
        astray = mj.Mocha().certify(state.replace(v=1.1 * state.v), problem)
        chex.assert_trees_all_close(astray, mj.Mocha().certify(state, problem), rtol=1e-9)


def test_features_in_other_units_are_no_reason_for_an_untrue_status():
    xs, ys = zoo.ragged()
    data = mj.pack_tasks([x * [1, 100, 1, 1] for x in xs], ys, dtype="float32")
    solution = mj.solve(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1)), max_rounds=400)
    np.testing.assert_allclose(solution.history.relative_gap[-1], solution.relative_gap, rtol=1e-2)


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
    solution = mj.solve(problem, tol=1e-3)
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
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(problem, name):
    with pytest.raises(ValueError, match=f"solve.*: {name} must be"):
        mj.solve(problem, **BAD[name])
    if name == "record_every":
        with pytest.raises(ValueError, match="run: num_rounds must be"):
            mj.run(jax.random.key(0), mj.Mocha(), problem, num_rounds=0)


# Checkpoints.


def options(path, **more):
    return dict(key=jax.random.key(5), tol=None, max_rounds=60, chunk=8, systems=SYSTEMS, checkpoint=path) | more


def test_resume_is_the_straight_run_bit_for_bit(problem, tmp_path):
    straight = mj.solve(problem, **options(None))
    path = tmp_path / "sub" / "run.npz"
    mj.solve(problem, **options(path, max_rounds=24))
    resumed = mj.solve(problem, **options(path))
    same(straight, resumed)
    same(straight, mj.solve(problem, **options(path)))  # finished: nothing left to do
    assert sorted(p.name for p in path.parent.iterdir()) == ["run.npz"]


def test_data_in_half_precision_is_resumed(problem, tmp_path):
    half = problem.replace(data=problem.data.replace(x=problem.data.x.astype(jnp.bfloat16)))
    straight, path = mj.solve(half, **options(None)), tmp_path / "run.npz"
    mj.solve(half, **options(path, max_rounds=24))
    same(straight, mj.solve(half, **options(path)))


def test_resume_after_the_callback_raised(problem, tmp_path):
    def fail(round, history):
        if round >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mj.solve(problem, **options(tmp_path / "run.npz", callback=fail))
    same(mj.solve(problem, **options(None)), mj.solve(problem, **options(tmp_path / "run.npz")))


@pytest.mark.parametrize("change", ["lam", "data", "loss", "key", "systems", "algorithm", "record_every"])
def test_a_checkpoint_of_another_run_is_refused(problem, tmp_path, change):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=8))
    before = path.read_bytes()
    other, more = problem, dict[str, Any]()
    match change:
        case "lam":
            other = problem.replace(regularizer=mj.regularizers.MeanRegularized(0.1, 0.021))
        case "data":
            other = problem.replace(data=problem.data.replace(x=problem.data.x.at[0, 0, 0].add(1e-9)))
        case "loss":
            other = problem.replace(loss=mj.losses.SmoothedHinge(1.0))
        case "key":
            more = dict(key=jax.random.key(6))
        case "systems":
            more = dict(systems=mj.systems.Dropout(0.3))
        case "algorithm":
            more = dict(algorithm=mj.Mocha(gamma=0.9))
        case "record_every":
            more = dict(record_every=2)
    with pytest.raises(mj.CheckpointError, match="belongs to another run"):
        mj.solve(other, **options(path, **more))
    assert path.read_bytes() == before


@pytest.mark.slow
def test_scalar_losses_are_told_apart_by_what_they_compute(problem, tmp_path):
    make = lambda a: mj.losses.from_scalar(lambda z, y: a * jax.nn.softplus(-y * z), binary=True)  # noqa: E731
    path = tmp_path / "run.npz"
    mj.solve(problem.replace(loss=make(1.0)), **options(path, max_rounds=2))
    mj.solve(problem.replace(loss=make(1.0)), **options(path, max_rounds=3))
    with pytest.raises(mj.CheckpointError, match="belongs to another run"):
        mj.solve(problem.replace(loss=make(5.0)), **options(path, max_rounds=3))


def test_torn_and_foreign_files_are_refused(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=16))
    whole = path.read_bytes()
    npz = tmp_path / "other.npz"
    np.savez(npz, a=np.ones(3))
    contents = [whole[: len(whole) // 2], whole[:-7], b"", b"not a checkpoint", npz.read_bytes()]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(mj.CheckpointError, match=r"run\.npz is") as error:
            mj.solve(problem, **options(path))
        assert "\n" not in str(error.value)
        assert path.read_bytes() == content


def test_no_flipped_bit_goes_unnoticed(problem, tmp_path):
    path = tmp_path / "run.npz"
    solution = mj.solve(problem, **options(path, max_rounds=16))
    whole = path.read_bytes()
    refused = 0
    for at in np.random.default_rng(0).integers(0, len(whole), size=60):
        torn = bytearray(whole)
        torn[at] ^= 0x10
        path.write_bytes(bytes(torn))
        try:
            same(solution, mj.solve(problem, **options(path, max_rounds=16)))  # it hit an unused byte
        except mj.CheckpointError:
            refused += 1
    assert refused > 40


def test_a_left_over_partial_file_is_harmless(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(path, max_rounds=24))
    (tmp_path / ".run.npz.partial").write_bytes(b"torn")
    same(mj.solve(problem, **options(None)), mj.solve(problem, **options(path)))


CHILD = """
import sys, jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import mocha_jax as mj
rng = np.random.default_rng(0)
xs = [rng.normal(size=(n, 30)) for n in (40, 200, 90, 150)]
data = mj.pack_tasks(xs, [np.sign(x[:, 0] + rng.normal(size=len(x))) for x in xs], loss_scaling="task_mean")
problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(1e-3, 1e-3))
solution = mj.solve(
    problem, mj.Mocha(), key=jax.random.key(1), tol=None, max_rounds=600, chunk=5,
    systems=mj.systems.Dropout(0.2), checkpoint=sys.argv[1] if sys.argv[1] else None,
)
np.savez(sys.argv[2], beta=solution.state.beta, w=solution.weights, gap=solution.history.gap)
"""


def test_killed_at_any_moment_and_resumed(tmp_path):
    def child(checkpoint, out):
        code = [sys.executable, "-c", CHILD, str(checkpoint), str(out)]
        return subprocess.Popen(code, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    straight, resumed, path = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "run.npz"
    assert child("", straight).wait(timeout=240) == 0
    rng = np.random.default_rng(7)
    kills = 0
    for _ in range(4):
        process = child(path, resumed)
        until = time.monotonic() + 120
        seen = path.stat().st_mtime_ns if path.exists() else None
        while process.poll() is None and time.monotonic() < until:  # wait for it to save something new
            if path.exists() and path.stat().st_mtime_ns != seen:
                break
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.05)))  # then strike anywhere: computing, writing, renaming
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills > 0
    assert child(path, resumed).wait(timeout=240) == 0
    with np.load(straight) as a, np.load(resumed) as b:
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("algorithm", [mj.Mocha(sigma_prime="per_task"), mj.Mocha()], ids=["per_task", "adaptive"])
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
