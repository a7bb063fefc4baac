"""Federated averaging between nodes and a server is what `run` simulates."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax.federated._sides import sides_of
from tests.federated import world

MODEL = mj.networks.MLP(world.D, 3, (6,))
CLASSES = mj.likelihoods.Categorical()
FEDAVG = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=2, batch_size=4)
CASES = {
    "fedsgd": mj.FedAvg(MODEL, optax.sgd(0.3), batch_size=None),
    "fedavg": FEDAVG,
    "fedprox": FEDAVG.replace(proximal=0.5, rate=0.7),
    "fedadam": FEDAVG.replace(server_optimizer=optax.adam(1e-2, eps=1e-3)),
    "sampled": FEDAVG.replace(fraction=0.5),
}
SYSTEMS = {"full": None, "partial": mj.systems.PartialEpochs(0.1, 0.9) & mj.systems.Dropout(0.3)}


def both_sides(algorithm, xs, ys, scaling="sum"):
    server = world.server_of(algorithm, None, scaling=scaling)
    return server, world.nodes_of(xs, ys, CLASSES, algorithm, scaling=scaling)


def loss_of(algorithm, state, problem):
    return float(jnp.mean(algorithm.scores(state, problem).loss))


@pytest.mark.extended
@pytest.mark.parametrize("systems", SYSTEMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thin(1)
def test_it_is_the_simulation(case, systems, key):
    algorithm, rounds = CASES[case], 6
    scaling = "task_mean" if case == "fedadam" else "sum"
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys, scaling)
    state, history = mj.run(problem, algorithm, key, num_rounds=rounds, systems=SYSTEMS[systems])
    plan = list(world.works(problem, algorithm, key, SYSTEMS[systems], rounds))
    assert {None in steps for steps in plan} >= ({True} if case == "sampled" or systems == "partial" else {False})
    server, nodes = both_sides(algorithm, xs, ys, scaling)
    there, _, reports = world.deployed(server, nodes, key, rounds, plan)
    chex.assert_trees_all_close(server.weights(there), algorithm.weights(state), rtol=1e-9, atol=1e-11)
    chex.assert_trees_all_close(there.inner.state.kept, state.kept, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose([float(r.quality.loss) for r in reports], history.loss, rtol=1e-9)
    np.testing.assert_array_equal(there.counts[there.held > 0], problem.data.sizes[there.held > 0])


@pytest.mark.extended
def test_what_nodes_optimizers_draw_is_what_the_simulation_draws(key):
    algorithm = mj.FedAvg(MODEL, optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.2)), batch_size=4)
    xs, ys = world.labels()
    state, _ = mj.run(world.prediction_of(xs, ys), algorithm, key, num_rounds=2)
    server, nodes = both_sides(algorithm, xs, ys)
    there, _, _ = world.deployed(server, nodes, key, 2)
    chex.assert_trees_all_close(server.weights(there), state.shared, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_the_nodes_asked_are_those_of_the_simulation(key):
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    for case, algorithm in CASES.items():
        server, nodes = both_sides(algorithm, xs, ys, "task_mean" if case == "fedadam" else "sum")
        state, mine = server.init(), [node.init() for node in nodes]
        for steps in world.works(problem, algorithm, key, None, 4):
            asked = tuple(task for task, some in enumerate(steps) if some is not None)
            assert server.asked(key, state) == asked
            assert (len(asked) < world.M) == (case == "sampled")
            ups = {task: nodes[task].step(key, mine[task], server.down(state, task))[1] for task in asked}
            state = server.step(state, ups)[0]
    # Who has left is not asked; half of the others are.
    server, _ = both_sides(CASES["sampled"], xs, ys)
    state = server.leave(server.init(), 2)
    asked = server.asked(key, state)
    assert len(asked) == 2
    assert 2 not in asked


def test_a_node_has_the_network(key):
    xs, ys = world.labels()
    server, (node, *_) = both_sides(FEDAVG, xs, ys)
    down = server.down(server.init(), 0)
    chex.assert_trees_all_equal(node.weights(node.init(), down), server.weights(server.init()))
    with pytest.raises(mj.federated.Refused, match="the server"):
        node.weights(node.init(), dataclasses.replace(down, arrays={}))


@pytest.mark.slow
def test_updates_that_are_not_finite_are_left_out_and_counted(key):
    xs, ys = world.labels()
    xs[1] = 1e306 * xs[1]
    algorithm, rounds = FEDAVG.replace(client_optimizer=optax.sgd(1e-3)), 3
    problem = world.prediction_of(xs, ys)
    state, history = mj.run(problem, algorithm, key, num_rounds=rounds)
    server, nodes = both_sides(algorithm, xs, ys)
    there, _, reports = world.deployed(server, nodes, key, rounds)
    chex.assert_trees_all_close(server.weights(there), state.shared, rtol=1e-9, atol=1e-11)
    assert [int(r.quality.diverged) for r in reports] == history.diverged.tolist() == [1, 2, 3]
    assert all(r.accepted == tuple(range(world.M)) and bool(r.quality.finite) for r in reports)
    # Where all of them are so, nothing changes, and the report says that it makes no sense to go on.
    server, nodes = both_sides(algorithm, [1e306 * x for x in world.labels()[0]], ys)
    there, _, (report,) = world.deployed(server, nodes, key, 1)
    chex.assert_trees_all_equal(server.weights(there), server.weights(server.init()))
    assert not bool(report.quality.finite)
    assert np.isinf(float(report.quality.loss))


@pytest.mark.slow
def test_a_third_of_the_answers_lost_changes_the_result_little(key):
    xs, ys = world.labels()
    problem, rounds = world.prediction_of(xs, ys), 40
    rng = np.random.default_rng(0)
    lost = [set(np.flatnonzero(rng.random(world.M) < 0.3)) for _ in range(rounds)]
    losses = []
    for those in (None, lost):
        server, nodes = both_sides(FEDAVG, xs, ys)
        there, _, reports = world.deployed(server, nodes, key, rounds, lost=those)
        losses.append(loss_of(FEDAVG, there.inner.state, problem))
    start = loss_of(FEDAVG, FEDAVG.init(problem), problem)
    assert losses[0] < 0.6 * start
    assert losses[1] < losses[0] + 0.05 * start
    assert sum(len(r.accepted) for r in reports) == rounds * world.M - sum(map(len, lost))


def test_a_node_keeps_nothing_and_draws_by_its_number(key):
    xs, ys = world.labels()
    server, nodes = both_sides(FEDAVG, xs, ys)
    mine, up = nodes[2].step(key, nodes[2].init(), server.down(server.init(), 2))
    assert jax.tree.leaves(mine) == []
    assert set(up.arrays) >= {"total.0.w", "weight", "samples"}
    again = nodes[2].step(key, nodes[2].init(), server.down(server.init(), 2))[1]
    chex.assert_trees_all_equal(dict(up.arrays), dict(again.arrays))
    other = nodes[2].step(key, (), dataclasses.replace(server.down(server.init(), 2), task=3))[1]
    assert (other.arrays["total.0.w"] != up.arrays["total.0.w"]).any()
    none = nodes[2].step(key, (), server.down(server.init(), 2, steps=0))[1]
    assert float(none.arrays["weight"]) == 0.0 == np.abs(none.arrays["total.0.w"]).max()


def test_a_late_answer_is_a_change_of_what_there_is_now(key):
    xs, ys = world.labels()
    server, nodes = both_sides(FEDAVG, xs, ys)
    start = server.init()
    late = nodes[0].step(key, (), server.down(start, 0))[1]
    there, _ = server.step(start, {1: nodes[1].step(key, (), server.down(start, 1))[1]})
    after, report = server.step(there, {0: late})
    assert report.accepted == (0,)
    moved = np.asarray(there.inner.state.shared[0].w) - late.arrays["total.0.w"] / late.arrays["weight"]
    np.testing.assert_allclose(after.inner.state.shared[0].w, moved, rtol=1e-12)
    assert server.step(after, {0: late})[1].refused


def test_messages_have_the_parameters_once_whatever_the_number_of_nodes(key):
    xs, ys = world.labels()
    server, _ = both_sides(FEDAVG, xs, ys)
    down = server.down(server.init(), 0)
    size = sum(leaf.size for leaf in jax.tree.leaves(server.weights(server.init())))
    assert down.nbytes == 8 * size + 4
    assert max(a.size for a in jax.tree.leaves(server._sent[1])) < size


def test_nodes_that_leave_and_join_change_no_parameter(key):
    xs, ys = world.labels()
    server, nodes = both_sides(FEDAVG, xs, ys)
    there, _, _ = world.deployed(server, nodes, key, 2)
    less = server.leave(there, 3)
    chex.assert_trees_all_equal(server.weights(less), server.weights(there))
    assert less.inner.counts.tolist()[3] == 0 < server.join(less, 3).inner.counts.tolist()[3]


@pytest.mark.slow
def test_nodes_together_answer_as_each_by_itself(key):
    xs, ys = world.labels()
    server, nodes = both_sides(FEDAVG, xs, ys)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    side = sides_of("Node", FEDAVG).node(FEDAVG, world.prediction_of(xs, ys).data, CLASSES)
    kept, _ = world.as_each_by_itself(key, server, nodes, there, mine, (), side)
    chex.assert_trees_all_close(kept, (), rtol=1e-9, atol=1e-9)


def test_what_does_not_fit_is_said(key):
    xs, ys = world.labels()
    server, nodes = both_sides(FEDAVG, xs, ys)
    start = server.init()
    up = nodes[0].step(key, (), server.down(start, 0))[1]
    wrong = {
        "weight": (np.float64(1e9), "weigh less than nothing, or more"),
        "samples": (np.int32(0), "it has no sample"),
        "diverged": (np.int32(7), "sent a number for diverged that is neither 0 nor 1"),
    }
    for name, (value, why) in wrong.items():
        after, report = server.step(start, {0: dataclasses.replace(up, arrays={**up.arrays, name: value})})
        assert report.accepted == ()
        assert report.refused[0].startswith("Server: the node of task 0 ")
        assert why in report.refused[0]
        chex.assert_trees_all_equal(server.weights(after), server.weights(start))
    with pytest.raises(ValueError, match="Server: FedAvg has no regularizer"):
        world.server_of(FEDAVG, mj.regularizers.Independent(1.0))
    with pytest.raises(ValueError, match="Node: loss must be"):
        world.nodes_of(xs, ys, mj.losses.Hinge(), FEDAVG)
    with pytest.raises(ValueError, match="outputs for 3 classes"):
        mj.federated.Node(xs[0], ys[0] + 5, CLASSES, FEDAVG)
    twice = mj.networks.Model(lambda key: {"a": {"b": jnp.zeros(3)}, "a.b": jnp.zeros(3)}, lambda p, x: x)
    with pytest.raises(ValueError, match="parameters have a.b twice"):
        world.server_of(mj.FedAvg(twice, optax.sgd(0.1)), None)
