"""Simulated systems match their definitions; costs follow equation (30)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.systems import Dropout, Full, NeverAnswers, PartialEpochs, UniformBudget, Work
from tests import zoo

ROUNDS = 2000


def draws(system, data, full, key):
    return jax.vmap(lambda r: system.work(jax.random.fold_in(key, r), data, full))(jnp.arange(ROUNDS))


@pytest.fixture
def data():
    return zoo.data(low=10, high=60)


@pytest.fixture
def full(data):
    return mj.Mocha(local_epochs=2.0).full_work(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0)))


def half(full):
    return 0.5 * np.asarray(full)


def test_full(data, full, key):
    assert full.tolist() == (2 * data.sizes).tolist()
    work = Full().work(key, data, full)
    assert work.steps.tolist() == full.tolist()
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


def test_uniform_budget_is_relative_to_the_smallest_node(data, full, key):
    smallest = int(data.sizes.min())
    steps = np.asarray(draws(UniformBudget(0.1, 1.0), data, full, key).steps)
    assert steps.min() >= 1
    assert steps.max() == smallest
    np.testing.assert_allclose(steps.mean(0), 0.55 * smallest, rtol=0.05)
    padded = data.pad(nodes=7)
    more = UniformBudget(0.1, 1.0).work(key, padded, jnp.pad(full, (0, 2)))
    np.testing.assert_array_equal(more.steps[:5], UniformBudget(0.1, 1.0).work(key, data, full).steps)
    assert (more.steps[5:] == 0).all()


def test_systems_combine(data, full, key):
    both = Dropout(0.5) & PartialEpochs(0.1, 0.5) & NeverAnswers((2,))
    work = draws(both, data, full, key)
    assert not work.active[:, 2].any()
    np.testing.assert_allclose(work.active[:, [0, 1, 3, 4]].mean(), 0.5, atol=0.03)
    assert (np.asarray(work.steps) <= np.ceil(half(full))).all()


def test_dropped_nodes_do_nothing_and_the_others_do_what_they_are_given(data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    algorithm = mj.Mocha()
    state = algorithm.init(problem)
    work = Work(jnp.array([3, 5, 0, 1000, 2], jnp.int32), jnp.array([True, False, True, True, True]))
    after, info = algorithm.step(key, state, problem, work)
    assert info.steps.tolist() == [3, 0, 0, int(data.sizes[3]), 2]
    changed = np.asarray(after.beta != state.beta).sum(1)
    assert (changed <= np.asarray(info.steps)).all()
    assert changed[1] == changed[2] == 0
    np.testing.assert_array_equal(after.w[1], state.w[1])  # independent tasks: nothing reaches it


def test_a_node_that_never_answers_is_named(data):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.2, 0.1))
    with pytest.warns(UserWarning, match=r"1 node\(s\) never answered, so the gap of task\(s\) 3 is not closed"):
        solution = mj.solve(problem, mj.Mocha(local_epochs=4.0), tol=1e-6, max_rounds=400, systems=NeverAnswers((3,)))
    assert solution.status == mj.Status.MAX_ROUNDS
    assert solution.silent_nodes == (3,)
    gaps = np.asarray(solution.task_gaps)
    assert gaps[3] > 1e-2
    assert np.delete(gaps, 3).max() < 1e-3 * gaps[3]


def test_cost_follows_equation_30(data):
    cost = mj.costs.Cost(flops_per_second=np.arange(1.0, 6.0), latency=0.5, bytes_per_second=64.0)
    work = Work(jnp.array([10, 20, 0, 5, 7], jnp.int32), jnp.array([True, True, True, True, False]))
    want = np.array([10, 20, 0, 5, 7]) * 6 * 4 / np.arange(1.0, 6.0) + 0.5 + 2 * 4 * 8 / 64
    want[4] = 0.0
    np.testing.assert_allclose(cost.node_seconds(data, work), want)
    np.testing.assert_allclose(cost.round_seconds(data, work), want.max())


def test_history_counts_time_and_steps(data, key):
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.1))
    _, each = mj.run(key, mj.Mocha(), problem, num_rounds=7, systems=Dropout(0.4))
    _, some = mj.run(key, mj.Mocha(), problem, num_rounds=7, systems=Dropout(0.4), record_every=3)
    assert each.round.tolist() == list(range(1, 8))
    assert some.round.tolist() == [3, 6, 7]
    np.testing.assert_allclose(some.simulated_time, each.simulated_time[np.array([2, 5, 6])])
    np.testing.assert_array_equal(some.steps, np.add.reduceat(each.steps, [0, 3, 6]))
    np.testing.assert_array_equal(some.gap, each.gap[np.array([2, 5, 6])])
    assert (np.diff(each.simulated_time) >= 0).all()


BAD = {
    "p": (lambda data, full: Dropout(1.5), r"p must be in \[0, 1\]"),
    "p per task": (lambda data, full: Dropout(np.array([0.1, -0.2])), r"p must be in \[0, 1\]"),
    "p shape": (lambda data, full: Dropout(np.ones(3)).work(jax.random.key(0), data, full), r"one per task \[5\]"),
    "range": (lambda data, full: PartialEpochs(0.9, 0.1), "low must not exceed high"),
    "above one": (lambda data, full: UniformBudget(0.1, 2.0), r"high must be in \[0, 1\]"),
    "negative node": (lambda data, full: NeverAnswers((-1,)), "counted from 0"),
    "no such node": (lambda data, full: NeverAnswers((9,)).work(jax.random.key(0), data, full), "node 9 does not exist"),
    "steps": (lambda data, full: Work(jnp.array([3, -1]), jnp.ones(2, bool)), "node 1 is given -1 steps"),
    "cost": (lambda data, full: mj.costs.Cost(flops_per_second=0.0), "flops_per_second must be finite and > 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_systems_are_refused(name, data, full):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(data, full)
