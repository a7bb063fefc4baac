"""Simulated systems match their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.systems import (
    Controller,
    DayNight,
    Deadline,
    Dropout,
    Full,
    NeverAnswers,
    Outages,
    PartialEpochs,
    Sampled,
    Trace,
    UniformBudget,
    Work,
)
from tests import zoo

ROUNDS = 2000


def draws(system, data, request, key, rounds=ROUNDS):
    """The work of many rounds, with a leading axis."""
    return jax.vmap(lambda r: system.work(key, data, request.replace(round=r)))(jnp.arange(rounds, dtype=jnp.int32))


@pytest.fixture
def data():
    return zoo.data(low=10, high=60)


def asked(data, epochs=2.0):
    return mj.Mocha(epochs, sigma_prime="per_task").request(
        mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    )


@pytest.fixture
def full(data):
    return asked(data)


def half(full):
    return 0.5 * np.asarray(full.steps)


def test_full(data, full, key):
    assert full.steps.tolist() == (2 * data.sizes).tolist()
    work = Full().work(key, data, full)
    assert work.steps.tolist() == full.steps.tolist()
    assert work.active.all()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, np.linspace(0, 1, 5)])
def test_drop_rate(p, data, full, key):
    active = draws(Dropout(p), data, full, key).active
    rate = 1 - np.asarray(active).mean(0)
    np.testing.assert_allclose(rate, np.broadcast_to(p, 5), atol=4 * 0.5 / ROUNDS**0.5)
    assert (rate[np.broadcast_to(p, 5) == 0] == 0).all()
    assert (rate[np.broadcast_to(p, 5) == 1] == 1).all()
    between = np.flatnonzero((np.broadcast_to(p, 5) > 0) & (np.broadcast_to(p, 5) < 1))
    if len(between) > 1:  # nodes drop independently
        assert abs(np.corrcoef(active[:, between[0]], active[:, between[1]])[0, 1]) < 0.1


def test_partial_epochs(data, full, key):
    steps = np.asarray(draws(PartialEpochs(0.2, 0.8), data, full, key).steps)
    assert (steps >= np.floor(0.4 * half(full))).all()
    assert (steps <= np.ceil(1.6 * half(full))).all()
    np.testing.assert_allclose(steps.mean(0), half(full), rtol=0.05)
    least = np.asarray(PartialEpochs(0.0, 0.0).work(key, data, full).steps)
    assert least.tolist() == [1] * 5  # a node that answers does something


def test_uniform_budget_is_relative_to_the_smallest_node(data, full, key):
    smallest = int(data.sizes.min())
    steps = np.asarray(draws(UniformBudget(0.1, 1.0), data, full, key).steps)
    assert steps.min() >= 1
    assert steps.max() == smallest
    np.testing.assert_allclose(steps.mean(0), 0.55 * smallest, rtol=0.05)
    padded = data.pad(nodes=7)
    more = UniformBudget(0.1, 1.0).work(key, padded, asked(padded))
    np.testing.assert_array_equal(more.steps[:5], UniformBudget(0.1, 1.0).work(key, data, full).steps)
    assert (more.steps[5:] == 0).all()


def test_uniform_budget_of_a_nodes_own_samples(data, full, key):
    steps = np.asarray(draws(UniformBudget(0.2, 0.6, of="own"), data, full, key).steps)
    sizes = np.asarray(data.sizes)
    assert (steps >= np.floor(0.2 * sizes)).all()
    assert (steps <= np.ceil(0.6 * sizes)).all()
    np.testing.assert_allclose(steps.mean(0), 0.4 * sizes, rtol=0.05)


def test_drop_rate_per_round_and_task(data, full, key):
    p = np.zeros((3, 5))
    p[1], p[2, 2] = 1.0, 1.0
    active = np.asarray(draws(Dropout(p), data, full, key, rounds=6).active)
    np.testing.assert_array_equal(active, ~(p[[0, 1, 2, 2, 2, 2]] == 1))


def test_outages_hit_groups_and_last(data, full, key):
    groups, length, p = np.array([0, 0, 1, 1, 2]), 8, 0.3
    lost = ~np.asarray(draws(Outages(p, groups, length), data, full, key, rounds=20_000).active)
    np.testing.assert_array_equal(lost[:, 0], lost[:, 1])
    np.testing.assert_array_equal(lost[:, 2], lost[:, 3])
    np.testing.assert_allclose(lost.mean(0), p, atol=0.03)
    assert abs(np.corrcoef(lost[:, 0], lost[:, 2])[0, 1]) < 0.1
    for lag in (1, 3, 7, 8, 20):  # two rounds share a window with probability 1 - lag / length
        covariance = np.corrcoef(lost[:-lag, 0], lost[lag:, 0])[0, 1]
        np.testing.assert_allclose(covariance, max(1 - lag / length, 0), atol=0.06)
    alone = ~np.asarray(draws(Outages(p), data, full, key).active)
    np.testing.assert_allclose(alone.mean(0), p, atol=4 * 0.5 / ROUNDS**0.5)
    assert abs(np.corrcoef(alone.T) - np.eye(5)).max() < 0.1


def test_sampled_asks_a_fixed_number(data, full, key):
    padded = data.pad(nodes=7)
    active = np.asarray(draws(Sampled(0.4), padded, asked(padded), key).active)
    assert (active.sum(1) == 2).all()
    assert not active[:, 5:].any()
    np.testing.assert_allclose(active[:, :5].mean(0), 0.4, atol=0.04)
    assert draws(Sampled(1e-6), data, full, key).active.sum(1).tolist() == [1] * ROUNDS


def test_trace_is_played_back_in_a_circle(data, full, key):
    table = np.random.default_rng(0).random((7, 5)) < 0.5
    active = np.asarray(draws(Trace(table), data, full, key, rounds=20).active)
    np.testing.assert_array_equal(active, table[np.arange(20) % 7])


def test_day_and_night(data, full, key):
    active = np.asarray(draws(DayNight(24, 0.25, np.array([0, 0.25, 0.5, 0.75, 0.0])), data, full, key, 48).active)
    np.testing.assert_array_equal(active[:, 0], np.arange(48) % 24 < 6)
    np.testing.assert_array_equal(active[:, 1], (np.arange(48) + 6) % 24 < 6)
    spread = np.asarray(draws(DayNight(10.0, 0.5), data, full, key, 1000).active)
    np.testing.assert_allclose(spread.mean(0), 0.5)


@pytest.mark.slow
def test_steps_before_a_deadline_follow_from_the_rates(data, full, key):
    d, cost = data.num_features, mj.costs.Cost(np.array([1e3, 1e4, 1e2, 1e3, 1e9]), np.array([0, 0, 0, 9.0, 0]), 64, 32)
    work = Deadline(2.0, cost).work(key, data, full)
    left = 2.0 - np.array([0, 0, 0, 9.0, 0]) - 4 * d / 64 - 4 * d / 32
    want = np.floor(left * np.array([1e3, 1e4, 1e2, 1e3, 1e9]) / (6 * d))
    np.testing.assert_array_equal(work.steps, np.clip(want, 0, full.steps))
    busy = Deadline(2.0, cost).work(key, data, full.replace(fixed_flops=jnp.asarray(500.0)))
    want = np.floor((left * np.array([1e3, 1e4, 1e2, 1e3, 1e9]) - 500.0) / (6 * d))
    np.testing.assert_array_equal(busy.steps, np.clip(want, 0, full.steps))
    assert work.active.tolist() == [True, True, True, False, True]
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    _, history = mj.run(
        problem, mj.Mocha(2.0, sigma_prime="per_task"), key, num_rounds=3, systems=Deadline(2.0, cost), cost=cost
    )
    assert (np.diff(history.simulated_time, prepend=0) <= 2.0).all()  # a deadline is one
    assert history.active.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(Dropout(0.3) & PartialEpochs(0.1, 1.0) & UniformBudget(0.1, 1.0), marks=pytest.mark.slow),
        Outages(0.3, length=3) & Sampled(0.5),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_cut_run_draws_what_a_whole_one_does(system, data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    whole, _ = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=9, systems=system)
    part, _ = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4, systems=system)
    rest, _ = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=5, systems=system, state=part)
    np.testing.assert_allclose(rest.beta, whole.beta, rtol=1e-9, atol=1e-12)


def test_systems_combine(data, full, key):
    both = Dropout(0.5) & PartialEpochs(0.1, 0.5) & NeverAnswers((2,))
    work = draws(both, data, full, key)
    assert not work.active[:, 2].any()
    np.testing.assert_allclose(work.active[:, [0, 1, 3, 4]].mean(), 0.5, atol=0.03)
    assert (np.asarray(work.steps) <= np.ceil(half(full))).all()
    twice = draws(Dropout(0.5) & Dropout(0.5), data, full, key)  # each draws for itself
    np.testing.assert_allclose(twice.active.mean(), 0.25, atol=0.03)


@pytest.mark.slow
def test_dropped_nodes_do_nothing_and_the_others_do_what_they_are_given(data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    algorithm = mj.Mocha(sigma_prime="per_task")
    state = algorithm.init(problem)
    work = Work(jnp.array([3, 5, 0, 1000, 2], jnp.int32), jnp.array([True, False, True, True, True]))
    after, info = algorithm.step(key, state, problem, work)
    assert info.steps.tolist() == [3, 0, 0, int(data.sizes[3]), 2]
    changed = np.asarray(after.beta != state.beta).sum(1)
    assert (changed <= np.asarray(info.steps)).all()
    assert changed[1] == changed[2] == 0
    np.testing.assert_array_equal(after.w[1], state.w[1])  # independent tasks: nothing reaches it


@pytest.mark.slow
def test_a_node_that_never_answers_is_named(data):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.2, 0.1))
    with pytest.warns(UserWarning, match=r"1 node\(s\) never answered, so the gap of task\(s\) 3 is not closed"):
        solution = mj.solve(
            problem,
            mj.Mocha(local_epochs=4.0, sigma_prime="per_task"),
            tol=1e-6,
            max_rounds=400,
            systems=NeverAnswers((3,)),
        )
    assert solution.status == mj.Status.MAX_ROUNDS
    assert solution.silent_nodes == (3,)
    gaps = np.asarray(solution.task_gaps)
    assert gaps[3] > 1e-2
    assert np.delete(gaps, 3).max() < 1e-3 * gaps[3]


@pytest.mark.slow
def test_history_counts_time_and_steps(data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    _, each = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=7, systems=Dropout(0.4))
    _, some = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=7, systems=Dropout(0.4), record_every=3)
    assert each.round.tolist() == list(range(1, 8))
    assert some.round.tolist() == [3, 6, 7]
    np.testing.assert_allclose(some.simulated_time, each.simulated_time[np.array([2, 5, 6])])
    np.testing.assert_array_equal(some.steps, np.add.reduceat(each.steps, [0, 3, 6]))
    np.testing.assert_array_equal(some.gap, each.gap[np.array([2, 5, 6])])
    assert (np.diff(each.simulated_time) >= 0).all()


KEY = jax.random.key(0)


@pytest.mark.slow
def test_no_work_exceeds_a_full_round(data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    for algorithm in (mj.Mocha(0.5, sigma_prime="per_task"), mj.Mocha(1.5, sigma_prime="per_task")):
        work = Work(jnp.full(5, 10_000, jnp.int32), jnp.ones(5, bool))
        _, info = algorithm.step(key, algorithm.init(problem), problem, work)
        np.testing.assert_array_equal(info.steps, algorithm.full_work(problem))


@pytest.mark.slow
def test_a_long_clock_keeps_its_seconds(key):
    problem = mj.Problem(zoo.data(m=1, d=1, dtype=np.float32), mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    cost = mj.costs.Cost(1e12, latency=0.1, download=1e12, upload=1e12)
    _, h = mj.run(
        problem, mj.Mocha(0.1, sigma_prime="per_task"), key, num_rounds=100_000, record_every=100_000, cost=cost
    )
    np.testing.assert_allclose(h.simulated_time[-1], 1e4, rtol=1e-6)
    assert h.utilisation[-1] <= 1


BAD = {
    "mask": (lambda data, full: NeverAnswers((False, True)), "nodes are indices"),
    "half a node": (lambda data, full: NeverAnswers((1.7,)), "nodes are indices"),  # type: ignore[arg-type]
    "NaN trace": (lambda data, full: Trace(np.full((2, 5), np.nan)), "NaN or infinite"),
    "and a number": (lambda data, full: Dropout(0.3) & 0.5, "the right side must be a System"),  # type: ignore[operator]
    "half a step": (lambda data, full: Work(jnp.array([2.5]), jnp.ones(1, bool)), "steps must hold integers"),
    "one for all": (
        lambda data, full: Work(jnp.ones(1, jnp.int32), jnp.ones(1, bool)).budget(full.steps),
        "5 nodes, but there are steps for 1",
    ),
    "a class": (
        lambda data, full: mj.run(
            mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0)),
            mj.Mocha(sigma_prime="per_task"),
            KEY,
            num_rounds=1,
            systems=Full,  # type: ignore[arg-type]
        ),
        "systems must be a System",
    ),
    "p": (lambda data, full: Dropout(1.5), r"p must be in \[0, 1\]"),
    "p per task": (lambda data, full: Dropout(np.array([0.1, -0.2])), r"p must be in \[0, 1\]"),
    "p shape": (lambda data, full: Dropout(np.ones(3)).work(KEY, data, full), r"one per task \[5\]"),
    "range": (lambda data, full: PartialEpochs(0.9, 0.1), "low must not exceed high"),
    "above one": (lambda data, full: UniformBudget(0.1, 2.0), r"high must be in \[0, 1\]"),
    "budget of what": (lambda data, full: UniformBudget(0.1, 1.0, of="largest"), "of must be one of 'smallest', 'own'"),
    "negative node": (lambda data, full: NeverAnswers((-1,)), "counted from 0"),
    "no such node": (lambda data, full: NeverAnswers((9,)).work(KEY, data, full), "node 9 does not exist"),
    "groups": (lambda data, full: Outages(0.1, np.array([0, 1])).work(KEY, data, full), r"one per node \[5\]"),
    "group numbers": (lambda data, full: Outages(0.1, np.array([0, -1])), "groups must be an integer >= 0"),
    "length": (lambda data, full: Outages(0.1, length=0), "length must be an integer >= 1"),
    "fraction": (lambda data, full: Sampled(0.0), r"fraction must be in \(0, 1\]"),
    "table": (lambda data, full: Trace(np.ones(5)), r"table must be an array \[rounds, nodes\]"),
    "table nodes": (lambda data, full: Trace(np.ones((2, 3))).work(KEY, data, full), "table has 3 nodes, the data 5"),
    "phase": (lambda data, full: DayNight(24, 0.5, np.ones(2)).work(KEY, data, full), r"one per node \[5\]"),
    "period": (lambda data, full: DayNight(0), "period must be finite and > 0"),
    "controller": (lambda data, full: Controller(mj.costs.wifi(), 1.0), r"epoch_theta must be in \(0, 1\)"),
    "clocks of none": (lambda data, full: Controller(0.5), "cost must be a Cost"),  # type: ignore[arg-type]
    "deadline": (lambda data, full: Deadline(-1.0, mj.costs.wifi()), "seconds must be finite and > 0"),
    "deadline cost": (
        lambda data, full: Deadline(1.0, mj.costs.Cost),  # type: ignore[arg-type]
        "cost must be a Cost",
    ),
    "steps": (lambda data, full: Work(jnp.array([3, -1]), jnp.ones(2, bool)), "node 1 is given -1 steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_systems_are_refused(name, data, full):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(data, full)
