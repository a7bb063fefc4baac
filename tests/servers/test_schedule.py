"""H_i, the rounds before each update of Omega, and Omega_0, which a run begins with: Algorithm 1's inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.servers._base import every_round, is_due
from tests import zoo

R = mj.regularizers
SCHEDULE = (2, 1, 3)


def make(regularizer, **kwargs):
    return mj.Problem(zoo.data(loss_scaling="task_mean", **kwargs), mj.losses.Hinge(), regularizer)


def updates(schedule, rounds):
    """The rounds after which Omega is updated, as Algorithm 1 counts: H_0 rounds, an update, H_1 rounds, ..."""
    found, done, i = [], schedule[0], 0
    while done <= rounds:
        found.append(done)
        i += 1
        done += schedule[min(i, len(schedule) - 1)]
    return found


@pytest.mark.parametrize("schedule", [(1,), (4,), (1, 2), (3, 1), (5, 2, 7), (2, 2, 2), (10, 1, 1, 4)])
def test_updates_come_when_algorithm_1_says(schedule):
    seen = [h for h in range(1, 60) if is_due(schedule, jnp.asarray(h))]
    assert seen == updates(schedule, 59)
    assert every_round(schedule) == (updates(schedule, 9) == list(range(1, 10)))


def test_a_number_is_a_schedule_of_one():
    for every in (1, 3, 10):
        rounds = jnp.arange(1, 40, dtype=jnp.int32)
        np.testing.assert_array_equal(
            jax.vmap(lambda h, e=every: is_due(e, h))(rounds), jax.vmap(lambda h, e=every: is_due((e,), h))(rounds)
        )


ALGORITHMS = {
    "algorithm 1": mj.algorithm1(omega_every=SCHEDULE),
    "adaptive": mj.Mocha(server="dual", omega_every=SCHEDULE),
    "cocoa": mj.Cocoa(0.5, server="dual", omega_every=SCHEDULE),
    "sdca": mj.MiniBatchSdca(4, omega_every=SCHEDULE),
    "sgd": mj.MiniBatchSgd(4, step_size=0.01, omega_every=SCHEDULE, smoothing=0.1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow
def test_omega_changes_in_those_rounds_and_no_others(name, key):
    p, algorithm = make(R.Clustered(0.1, 0.5, 2)), ALGORITHMS[name]

    @jax.jit
    def step(state):
        work = mj.systems.Full().work(key, p.data, algorithm.request(p, state.round))
        return algorithm.step(jax.random.fold_in(key, state.round), state, p, work)[0]

    def omega(state):
        return np.asarray(p.relationship(5, algorithm.relation(state, p)))

    state, changed = algorithm.init(p), []
    for h in range(1, 14):
        after = step(state)
        if np.abs(omega(after) - omega(state)).max() > 1e-9:
            changed.append(h)
        state = after
    assert changed == updates(SCHEDULE, 13) == [2, 3, 6, 9, 12]


@pytest.mark.slow
def test_the_proximal_server_keeps_to_a_schedule(key):
    p = make(R.Probabilistic(0.1))
    for schedule in (SCHEDULE, (1, 1)):
        for rounds in (3, 7):
            state, _ = mj.run(p, mj.Mocha(omega_every=schedule), key, num_rounds=rounds)
            assert int(state.server.steps) == len(updates(schedule, rounds))


@pytest.mark.slow
def test_a_schedule_goes_on_where_a_run_was_cut(key, tmp_path):
    p, algorithm = make(R.Clustered(0.1, 0.5, 2)), mj.algorithm1(omega_every=SCHEDULE)
    whole, _ = mj.run(p, algorithm, key, num_rounds=8)
    half, _ = mj.run(p, algorithm, key, num_rounds=4)
    end, _ = mj.run(p, algorithm, key, num_rounds=4, state=half)
    np.testing.assert_allclose(algorithm.weights(end), algorithm.weights(whole), rtol=1e-9, atol=1e-12)


# Omega_0


def given(name, m=5, seed=1):
    """A matrix that is an Omega of the model, of full rank and of no structure."""
    a = zoo.random_spd(m, seed) + 0.2 * np.eye(m)
    if name in ("sparse", "matrix normal"):
        return a
    a = a / np.trace(a)
    return a if name == "probabilistic" else 2.0 * (0.5 * a + 0.5 * np.eye(m) / m)


MODELS = {
    "probabilistic": R.Probabilistic(0.2, 2.0),
    "clustered": R.Clustered(0.2, 0.3, 2),
    "sparse": R.SparsePrecision(0.2, 2.0, 0.0, 0.3),
    "matrix normal": R.MatrixNormal(0.2, 2.0, 0.02),
}


def precision_of(name, omega):
    """A of R = tr(W' A W) for this Omega, as (12), (14) and (15) have it."""
    eye = np.eye(len(omega))
    return {
        "probabilistic": lambda: 0.2 * (eye / 2.0 + np.linalg.inv(omega)),
        "matrix normal": lambda: 0.2 * (eye / 2.0 + np.linalg.inv(omega)),
        "clustered": lambda: 0.2 * np.linalg.inv(0.3 * eye + omega),
        "sparse": lambda: 0.2 * (eye / 2.0 + omega),
    }[name]()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("d", [4, 7])  # fewer features than tasks, and more
@pytest.mark.slow
def test_rounds_are_those_of_the_graph_model_with_that_omega(name, d, key):
    p, omega = make(MODELS[name], d=d), given(name)
    algorithm = mj.algorithm1(0.5, sigma_prime="per_task", omega_every=100, initial_omega=omega)
    state, history = mj.run(p, algorithm, key, num_rounds=5)
    np.testing.assert_allclose(p.relationship(5, algorithm.relation(state, p)), omega, rtol=1e-8, atol=1e-10)
    graph = p.replace(regularizer=R.Graph(precision_of(name, omega), 1.0, 1e-12))
    same, seen = mj.run(graph, mj.algorithm1(0.5, sigma_prime="per_task"), key, num_rounds=5)
    np.testing.assert_allclose(state.w, same.w, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(history.gap, seen.gap, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "sparse" else n for n in MODELS])
@pytest.mark.slow
def test_with_no_omega_0_it_is_the_regularizers_own(name, key):
    p = make(MODELS[name])
    own = np.asarray(p.relationship(5, p.regularizer.initial_relation(5, 4)))
    run = [
        mj.run(p, mj.algorithm1(omega_every=(2, 3), initial_omega=omega), key, num_rounds=6)[1].primal
        for omega in (None, own)
    ]
    np.testing.assert_allclose(run[0], run[1], rtol=1e-6)


# The records of all models are of two kinds, a matrix and a factor.
RESUMED = [(name, server) for name in MODELS for server in ("algorithm 1", "adaptive")]
QUICK = ("probabilistic", "algorithm 1"), ("sparse", "algorithm 1")


@pytest.mark.parametrize(
    ("name", "server"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in RESUMED]
)
@pytest.mark.slow
def test_a_run_that_began_with_omega_0_goes_on_and_is_certified(name, server, key, tmp_path):
    p, omega = make(MODELS[name]), given(name)
    how: dict[str, Any] = dict(sigma_prime="per_task") if server == "algorithm 1" else {}
    algorithm = mj.Mocha(server="dual", omega_every=(3, 2), initial_omega=omega, **how)
    path = tmp_path / "run.npz"
    many: dict = dict(key=key, tol=None, chunk=2, checkpoint=path)
    mj.solve(p, algorithm, max_rounds=4, **many)
    resumed = mj.solve(p, algorithm, max_rounds=8, **many)
    whole = mj.solve(p, algorithm, max_rounds=8, **(many | {"checkpoint": None}))
    np.testing.assert_array_equal(resumed.weights, whole.weights)
    again = mj.certificate(p, whole.state.beta, whole.relation)
    np.testing.assert_allclose(again.gap, whole.gap, rtol=1e-6)
    half, _ = mj.run(p, algorithm, key, num_rounds=5)  # after the first update
    end, _ = mj.run(p, algorithm, key, num_rounds=3, state=half)
    np.testing.assert_allclose(algorithm.weights(end), whole.weights, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_a_good_omega_0_saves_rounds_and_a_grid_over_it_is_one_call(key):
    p = make(R.Clustered(0.02, 0.1, 2))
    best = mj.solve(p, tol=1e-6, max_rounds=3000)
    start = [np.eye(5) * 0.4, np.asarray(best.omega)]

    def after(omega):
        algorithm = mj.algorithm1(2.0, sigma_prime="per_task", omega_every=100, initial_omega=omega)
        return mj.run(p, algorithm, key, num_rounds=60)[1].joint_primal[-1]

    ends = jax.vmap(after)(jnp.asarray(start))
    np.testing.assert_allclose(ends, [after(omega) for omega in start], rtol=1e-9)
    assert ends[1] - best.primal < 0.1 * (ends[0] - best.primal)


@pytest.mark.slow
def test_new_tasks_join_a_run_that_began_with_omega_0(key):
    p = make(R.Probabilistic(0.2))
    algorithm = mj.algorithm1(initial_omega=given("probabilistic"))
    state, _ = mj.run(p, algorithm, key, num_rounds=12)
    more = p.replace(data=p.data.append(zoo.data(loss_scaling="task_mean", m=1, seed=3)))
    after = algorithm.replace(initial_omega=None)
    grown, _ = mj.run(more, after, key, num_rounds=3, state=after.add_tasks(state, more))
    assert np.isfinite(np.asarray(grown.w)).all()
    assert grown.w.shape == (6, 4)


@pytest.mark.slow
def test_the_optimum_has_derivatives_from_any_omega_0():
    p = make(R.Clustered(0.05, 0.3, 2))

    def value(lam, omega):
        there = p.replace(regularizer=R.Clustered(lam, 0.3, 2))
        algorithm = mj.Mocha(3.0, server="dual", sigma_prime="per_task", initial_omega=omega)
        return mj.solve(there, algorithm, tol=1e-6, max_rounds=600).primal

    slope_from = jax.jit(jax.grad(value))
    slope, other = (slope_from(0.05, omega) for omega in (0.4 * np.eye(5), given("clustered")))
    np.testing.assert_allclose(slope, other, rtol=1e-3)


BAD = {
    "a given relationship": (R.MeanRegularized(0.1, 0.1), np.eye(5), "must be left out: the relationship of Mean"),
    "of other tasks": (R.Probabilistic(0.1), np.eye(4) / 4, r"initial_omega must be an array \[5, 5\]"),
    "trace": (R.Probabilistic(0.1), np.eye(5), "initial_omega must have trace 1, as Probabilistic asks, got 5"),
    "trace k": (R.Clustered(0.1, 0.1, 2), np.eye(5), "must have trace 2"),
    "above 1": (R.Clustered(0.1, 0.1, 2), np.diag([1.5, 0.5, 0, 0, 0]), "no eigenvalue above 1"),
    "singular precision": (R.SparsePrecision(0.1, 1.0, 0.0, 1.0), np.diag([1.0, 1, 1, 1, 0]), "positive definite"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_omega_0_that_is_none_is_refused(name, key):
    regularizer, omega, message = BAD[name]
    p, algorithm = make(regularizer), mj.algorithm1(initial_omega=omega)
    with pytest.raises(ValueError, match=message):
        mj.run(p, algorithm, key, num_rounds=1)
    with pytest.raises(ValueError, match=message):
        algorithm.init(p)


def test_what_cannot_hold_an_omega_or_is_no_schedule_is_refused(key):
    with pytest.raises(ValueError, match="the ProximalServer does not"):
        mj.run(make(R.Probabilistic(0.1)), mj.Mocha(initial_omega=np.eye(5) / 5), key, num_rounds=1)
    with pytest.raises(ValueError, match="initial_omega must be positive semi-definite"):
        mj.algorithm1(initial_omega=np.diag([1.0, -1.0]))
    for bad, message in [(0, ">= 1"), ((), ">= 1"), ((3, 0), ">= 1"), ((2.5,), ">= 1"), ((2**30, 2**30), "the sum of")]:
        with pytest.raises(ValueError, match=rf"omega_every.*{message}|{message}.*omega_every"):
            mj.algorithm1(omega_every=bad)  # type: ignore[arg-type]
    assert mj.algorithm1(omega_every=[2, 3]).omega_every == (2, 3)  # type: ignore[arg-type]
