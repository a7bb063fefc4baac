"""Answers that are lost, late or doubled: the optimum all the same, as the certificate says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.federated._partial_certificate import best_bound
from tests.federated import world

R, L = mj.regularizers, mj.losses
BAD = mj.systems.Unreliable(lost=0.3, late=0.3, duplicated=0.05, most=5)
SAFE = mj.Mocha(server="dual", sigma_prime="per_task")
GIVEN, LEARNED = R.MeanRegularized(0.2, 0.05), R.Probabilistic(0.05)
SERVERS = {
    "algorithm 1": (mj.algorithm1(), GIVEN),
    "safe": (SAFE, GIVEN),
    "adaptive": (mj.Mocha(), GIVEN),
    "proximal": (mj.Mocha(), LEARNED),
    "proximal, every third": (mj.Mocha(omega_every=3), LEARNED),
    "cocoa": (mj.Cocoa(0.2), LEARNED),
}


def problem_of(regularizer, loss=None):
    xs, ys = world.tables()
    return world.problem_of(xs, ys, L.Hinge() if loss is None else loss, regularizer)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("algorithm 1", "cocoa", "proximal, every third") else ())
        for n in SERVERS
    ],
)
@pytest.mark.slow
def test_every_server_reaches_the_optimum(name, key):
    algorithm, regularizer = SERVERS[name]
    problem = problem_of(regularizer)
    best = mj.solve(problem, mj.Mocha(), tol=1e-10, max_rounds=5000)
    state, history = mj.run(problem, mj.federated.OverChannel(algorithm, BAD), key, num_rounds=400, record_every=100)
    assert history.relative_joint_gap[-1] < 1e-8
    np.testing.assert_allclose(history.joint_primal[-1], best.certificate.joint_primal, rtol=1e-8)
    assert state.late > 30
    assert state.refused > 300  # duplicates, and answers that newer ones had overtaken


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "adaptive" else pytest.mark.slow) for n in SERVERS])
@pytest.mark.slow
def test_without_accidents_it_is_the_plain_run(name, key):
    algorithm, regularizer = SERVERS[name]
    problem = problem_of(regularizer, L.Logistic())
    plain, _ = mj.run(problem, algorithm, key, num_rounds=10)
    state, _ = mj.run(problem, mj.federated.OverChannel(algorithm, mj.systems.Unreliable()), key, num_rounds=10)
    size = float(jnp.max(jnp.abs(plain.w)))
    np.testing.assert_allclose(state.server.rule.model, plain.w, atol=1e-10 * size)
    assert state.late == state.refused == 0


@pytest.mark.extended
def test_with_a_form_it_is_what_nodes_and_server_do(key):
    algorithm, regularizer = SERVERS["safe"]
    problem, form = problem_of(regularizer, L.Logistic()), mj.compression.Rotated(mj.compression.Quantized(1))
    both = mj.federated.OverChannel(algorithm, mj.systems.Unreliable(), sending=form)
    expected, history = mj.run(problem, both, key, num_rounds=6)
    server = world.server_of(algorithm, regularizer, receiving=form)
    xs, ys = world.tables()
    nodes = world.nodes_of(xs, ys, L.Logistic(), algorithm, sending=form)
    state, mine = server.init(), [node.init() for node in nodes]
    for _ in range(6):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(key, mine[task], server.down(state, task))
        state, report = server.step(state, ups)
        assert report.refused == {}
    np.testing.assert_allclose(server.weights(state), expected.server.rule.model, rtol=1e-9, atol=1e-12)
    # A number of 4 bytes is one.
    coded = sum(array.nbytes for name, array in ups[0].arrays.items() if name.startswith("code")) / 4
    assert float(both.request(problem).up) == coded
    plain = mj.federated.OverChannel(algorithm, mj.systems.Unreliable())
    assert float(plain.request(problem).up) == world.D
    assert history.relative_joint_gap[-1] < history.relative_joint_gap[0]


def test_a_form_needs_an_answer_of_one_vector():
    both = mj.federated.OverChannel(mj.Mocha(), mj.systems.Unreliable(), sending=mj.compression.Quantized())
    with pytest.raises(ValueError, match="OverChannel: sending is for answers with one vector v, and AdaptiveUp has"):
        both.init(problem_of(GIVEN))


@pytest.mark.parametrize("name", [pytest.param("safe", marks=pytest.mark.slow), "adaptive", "proximal"])
@pytest.mark.slow
def test_it_is_what_nodes_and_server_do(name, key):
    """The same accidents, with messages from hand to hand."""
    algorithm, regularizer = SERVERS[name]
    problem, rounds = problem_of(regularizer, L.Logistic()), 12
    both = mj.federated.OverChannel(algorithm, BAD)
    expected, _ = mj.run(problem, both, key, num_rounds=rounds)
    server = world.server_of(algorithm, regularizer)
    xs, ys = world.tables()
    nodes = world.nodes_of(xs, ys, L.Logistic(), algorithm)
    state, mine = server.init(), [node.init() for node in nodes]
    arrivals: dict[int, list[mj.federated.Up]] = {round: [] for round in range(1, 30)}
    taken = 0
    for round in range(1, rounds + 1):
        here = jax.random.fold_in(jax.random.fold_in(key, np.uint32(round - 1)), 1)
        request = algorithm.request(problem, round - 1)
        fate = BAD.fate(jax.random.fold_in(here, 7), problem.data, request)
        for task, node in enumerate(nodes):
            mine[task], up = node.step(key, mine[task], server.down(state, task))
            for after in {int(fate.arrives[task]), int(fate.again[task])} - {-1}:
                arrivals[round + after].append(up)
        newest: dict[int, mj.federated.Up] = {}
        for up in arrivals[round]:
            if up.task not in newest or up.round > newest[up.task].round:
                newest[up.task] = up
        # A server is handed one answer of a node at a time: one that is of no use must not hide one that is.
        if name == "adaptive":
            for up in arrivals[round]:
                if up.held == int(state.held[up.task]) and up.round > int(state.held[up.task]):
                    old = newest[up.task]
                    fits = old.held == int(state.held[up.task]) and old.round > int(state.held[up.task])
                    newest[up.task] = old if fits and old.round >= up.round else up
        state, report = server.step(state, newest)
        taken += len(report.accepted)
    np.testing.assert_allclose(server.weights(state), expected.server.rule.model, atol=1e-9)
    np.testing.assert_array_equal(state.held, expected.held)
    assert taken < rounds * world.M


def bound_now(problem, state):
    """The lower bound of the points that the adaptive server holds in this round, whatever it was before."""
    server = state.server
    everyone, nothing = jnp.bool_(True), jnp.float64(-jnp.inf)
    return float(best_bound(problem, None, server.terms[0], server.rule.own, everyone, nothing))


@pytest.mark.slow
def test_late_points_never_lower_the_dual(key):
    """They are weighed by slopes of the model there is now, not of the one that their nodes had."""
    problem = problem_of(R.MeanRegularized(1.0, 0.003), L.Logistic())
    both = mj.federated.OverChannel(mj.Mocha(), mj.systems.Unreliable(late=0.7, most=5))
    state, bounds = both.init(problem), []
    for _ in range(40):
        state, _ = mj.run(problem, both, key, num_rounds=1, state=state)
        bounds.append(bound_now(problem, state))
    assert state.late > 15
    assert np.diff(bounds[1:]).min() > -1e-12 * abs(bounds[-1])


@pytest.mark.slow
def test_the_vectors_of_mixtures_are_as_near_as_is_said(key):
    """What the server has mixed differs from the vector of the node's mixture by no more than its error's bound."""
    xs, ys = world.tables(dtype=np.float32)
    server = world.server_of(mj.Mocha(), GIVEN, dtype=np.float32)
    nodes = world.nodes_of(xs, ys, L.Logistic(), mj.Mocha())
    state, mine, _ = world.deployed(server, nodes, key, 30)
    for task, (node, x, one) in enumerate(zip(nodes, xs, mine, strict=True)):
        after = node.step(key, one, server.down(state, task))[0]
        v = np.asarray(after.duals[0, : len(x)], np.float64) @ np.asarray(x, np.float64) / len(x)
        off = np.linalg.norm(v - np.asarray(state.inner.rule.own[task], np.float64))
        assert 0 < off <= float(state.inner.terms[0].error[task])


@pytest.mark.slow
def test_lost_changes_would_end_beside_the_optimum(key):
    """The whole vector goes up, for sums of changes miss what was lost."""
    problem = problem_of(GIVEN)
    channel = mj.systems.Unreliable(lost=0.3)
    state, history = mj.run(problem, mj.federated.OverChannel(SAFE, channel), key, num_rounds=300, record_every=300)
    np.testing.assert_allclose(state.server.v, problem.data.dual_vectors(state.duals), atol=1e-6)
    assert history.relative_gap[-1] < 1e-10


@pytest.mark.slow
def test_a_channel_that_takes_nothing_leaves_the_server_where_it_was(key):
    problem = problem_of(GIVEN)
    state, _ = mj.run(problem, mj.federated.OverChannel(SAFE, mj.systems.Unreliable(lost=1.0)), key, num_rounds=5)
    np.testing.assert_array_equal(state.server.v, 0.0)
    assert jnp.any(state.duals != 0)


@pytest.mark.parametrize("name", [pytest.param("safe", marks=pytest.mark.slow), "adaptive", "proximal"])
@pytest.mark.slow
def test_a_server_that_waits_for_nobody(name, key):
    """Nodes that take up to six cycles; answers of as many models are mixed, and the optimum is the same."""
    algorithm, regularizer = SERVERS[name]
    problem = problem_of(regularizer)
    request = algorithm.request(problem)
    flops = float(jnp.max(request.steps.astype(float) * request.step_flops + request.fixed_flops))
    speeds = flops / np.array([0.5, 1.5, 2.5, 4.5, 5.5])
    channel = mj.systems.Clock(1.0, mj.costs.Cost(speeds, latency=0.0, download=1e12, upload=1e12), most=7)
    state, history = mj.run(
        problem, mj.federated.OverChannel(algorithm, channel), key, num_rounds=900, record_every=100
    )
    assert history.relative_joint_gap[-1] < 1e-8
    assert state.late > 300
    assert state.refused == 0


@pytest.mark.slow
def test_answers_to_old_models_may_be_refused(key):
    problem = problem_of(GIVEN)
    channel = mj.systems.Unreliable(late=0.5, most=5)
    fresh = mj.federated.OverChannel(SAFE, channel, max_staleness=0)
    state, history = mj.run(problem, fresh, key, num_rounds=200, record_every=200)
    assert state.late == 0
    assert state.refused > 300
    assert history.relative_gap[-1] < 1e-8


def test_a_clock_is_the_simulated_one():
    problem = problem_of(GIVEN)
    data, request = problem.data, SAFE.request(problem)
    cost = mj.costs.Cost(flops_per_second=np.geomspace(10.0, 1e4, world.M), latency=0.1)
    seconds = cost.seconds(request.steps.astype(float) * request.step_flops, request.down, request.up)
    fate = mj.systems.Clock(5.0, cost, most=50).fate(jax.random.key(0), data, request)
    np.testing.assert_array_equal(fate.arrives, np.clip(np.ceil(seconds / 5.0) - 1, 0, 50))


@pytest.mark.slow
def test_it_resumes_and_compiles_once(key):
    both, problem = mj.federated.OverChannel(mj.Mocha(), BAD), problem_of(LEARNED)
    whole, _ = mj.run(problem, both, key, num_rounds=12)
    half, _ = mj.run(problem, both, key, num_rounds=6)
    rest, _ = mj.run(problem, both, key, num_rounds=6, state=half)
    np.testing.assert_array_equal(whole.server.rule.model, rest.server.rule.model)


def test_several_nodes_of_a_task_are_refused(key):
    xs, ys = world.tables()
    data = mj.pack_tasks(xs, ys, task=[0, 0, 1, 2, 3])
    problem = mj.Problem(data, L.Hinge(), GIVEN)
    with pytest.raises(ValueError, match="one node for each task"):
        mj.run(problem, mj.federated.OverChannel(mj.Mocha(), BAD), key, num_rounds=1)
