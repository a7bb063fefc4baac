"""VIRTUAL between nodes and a server is what `run` simulates, and losses of answers heal."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._neural.gaussian import DiagonalGaussian
from mocha_jax.federated._sides import sides_of
from mocha_jax.federated._virtual_sides import REMEMBERED
from tests.federated import world

MODEL = mj.networks.Lateral(world.D, 3, (5,))
CLASSES = mj.likelihoods.Categorical()
ONE = mj.Virtual(MODEL, optax.adam(0.02), samples=2, draws=3, local_epochs=2, batch_size=8, temperature=0.1)
ALL = ONE.replace(parallel=True)
CASES = {
    "one by one": ONE,
    "random order": ONE.replace(order="random"),
    "parallel": ALL,
    "the letter, damped": ALL.replace(damping=0.3, prior="each", factors="start", noise="flipout"),
    "all is shared": ONE.replace(model=mj.networks.MLP(world.D, 3, (5,)), factors="start"),
}
SYSTEMS = {"full": None, "partial": mj.systems.PartialEpochs(0.1, 0.9) & mj.systems.Dropout(0.3)}


def both_sides(algorithm, xs, ys, **options):
    server = world.server_of(algorithm, None, scaling="sum", **options)
    return server, world.nodes_of(xs, ys, CLASSES, algorithm, scaling="sum")


def together(records):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *records)


def state_of(there, mine):
    """The state of a simulation, of which a federation has a part everywhere."""
    return there.inner.state.replace(private=together([one.private for one in mine]))


def loss_of(algorithm, state, problem):
    return float(jnp.mean(algorithm.scores(state, problem).loss))


def turns(cycles, without=None):
    """One node after the other."""
    return [
        [-1 if task == turn else None for task in range(world.M)] for turn in range(world.M) if turn != without
    ] * cycles


def product_is_posterior(there):
    state = there.inner.state
    product = jax.tree.map(lambda a: jnp.sum(a, axis=0), state.factors)
    chex.assert_trees_all_close(product, state.posterior, rtol=1e-9, atol=1e-9)
    assert (np.asarray(state.posterior.precision) > 0).all()


# Of every case one system; the other one where there is time.
@pytest.mark.parametrize(
    ("case", "systems"),
    [
        pytest.param(case, systems, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, case in enumerate(CASES)
        for j, systems in enumerate(SYSTEMS)
    ],
)
@pytest.mark.slow
def test_it_is_the_simulation(case, systems, key):
    algorithm = CASES[case]
    rounds = 4 if algorithm.parallel else 12
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    state, history = mj.run(problem, algorithm, key, num_rounds=rounds, systems=SYSTEMS[systems])
    plan = list(world.works(problem, algorithm, key, SYSTEMS[systems], rounds))
    server, nodes = both_sides(algorithm, xs, ys)
    if SYSTEMS[systems] is None:
        there = server.init()
        for done, steps in enumerate(plan):
            there = there.replace(inner=there.inner.replace(state=there.inner.state.replace(round=np.int32(done))))
            assert server.asked(key, there) == tuple(task for task, some in enumerate(steps) if some is not None)
    there, mine, reports = world.deployed(server, nodes, key, rounds, plan)
    close = partial(chex.assert_trees_all_close, rtol=1e-9, atol=1e-9)
    close(state_of(there, mine), state)
    close(together([one.factor for one in mine if one.incarnation[0] >= 0]), jax.tree.map(
        lambda a: a[np.array([int(one.incarnation[0]) >= 0 for one in mine])], state.factors
    ))  # fmt: skip
    np.testing.assert_allclose([float(r.quality.loss) for r in reports], history.loss, rtol=1e-9)
    shared = algorithm.weights(state)
    for task, node in enumerate(nodes):
        close(node.weights(mine[task], server.down(there, task)), algorithm.parameters(state, problem, task))
    close(
        server.weights(there), mj.networks.SplitParameters(shared.shared, None) if case != "all is shared" else shared
    )


@pytest.mark.slow
def test_answers_of_a_third_of_the_rounds_lost_heal(key):
    xs, ys = world.labels()
    problem, rounds = world.prediction_of(xs, ys), 40
    rng = np.random.default_rng(0)
    lost = [set(np.flatnonzero(rng.random(world.M) < 0.3)) for _ in range(rounds)]
    losses = []
    for those in (None, lost):
        server, nodes = both_sides(ALL, xs, ys)
        there, mine, _ = world.deployed(server, nodes, key, rounds, lost=those)
        product_is_posterior(there)
        losses.append(loss_of(ALL, state_of(there, mine), problem))
        for task in range(world.M):  # what a node believes that the server holds is what it holds
            sent, held = mine[task].sent, int(there.held[task])
            (place,) = np.flatnonzero(np.asarray(sent.round[0]) == held)
            for kept, here in zip(*map(jax.tree.leaves, (sent.factor, there.inner.state.factors)), strict=True):
                np.testing.assert_array_equal(kept[0, place], here[task])
    start = loss_of(ALL, ALL.init(problem), problem)
    assert losses[0] < 0.7 * start
    assert losses[1] < losses[0] + 0.05 * start


@pytest.mark.parametrize("damping", [1.0, 0.4])
@pytest.mark.parametrize(("heard", "lost"), [(0, 0), (0, 3), (2, 0), (2, 8)])
@pytest.mark.slow
def test_a_refinement_does_not_depend_on_which_answers_arrived(heard, lost, damping, key):
    # What is left, s / s_i, are the factors of the others, whatever the server holds of this node.
    xs, ys = world.labels()
    server, nodes = both_sides(ONE.replace(damping=damping), xs, ys)
    others = [[None, *[-1] * (world.M - 1)]] * 2
    there, (mine, *_), _ = world.deployed(server, nodes, key, 0, others)
    for r in range(heard + lost + 1):
        before = there
        mine, up = nodes[0].step(key, mine, server.down(there, 0))
        assert int(up.arrays["refined"]) == 1
        there, _ = server.step(before, {0: up} if r < heard else {})
    arrived, _ = server.step(before, {0: up})
    assert (int(there.held[0]), int(arrived.held[0])) == (2 + heard if heard else 0, 3 + heard + lost)
    nothing = server.join(server.leave(there, 0), 0).replace(round=there.round)  # of it is held; draws are the round's
    states = arrived, there, nothing
    answers = [nodes[0].step(key, mine, server.down(state, 0))[1] for state in states]
    assert [up.held for up in answers] == [int(arrived.held[0]), -1, -1]
    factors = [
        DiagonalGaussian(up.arrays["factor.precision"], up.arrays["factor.shift"])
        / jax.tree.map(lambda a: a[0] * (1.0 - damping), state.inner.state.factors)
        for up, state in zip(answers, states, strict=True)
    ]
    for other, answer in zip(factors[1:], answers[1:], strict=True):
        chex.assert_trees_all_close(other, factors[0], rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(answer.arrays["loss"], answers[0].arrays["loss"], rtol=1e-9)
    assert np.abs(answers[1].arrays["factor.shift"] - up.arrays["factor.shift"]).max() > 1e-3


@pytest.mark.slow
def test_a_node_that_knows_no_factor_held_answers_once_without_work(key):
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    server, nodes = both_sides(ALL, xs, ys)
    there, mine, _ = world.deployed(server, nodes, key, 10)
    mine[2] = nodes[2].init()  # it restarts from nothing
    there, mine, (report,) = world.deployed(server, nodes, key, 1, begin=(there, mine))
    product_is_posterior(there)
    assert report.accepted == tuple(range(world.M))
    assert np.isinf(mine[2].loss[0])
    prior = 1.0 / world.M * np.ones_like(there.inner.state.first)
    np.testing.assert_allclose(there.inner.state.factors.precision[2], prior, rtol=1e-12)
    there, mine, _ = world.deployed(server, nodes, key, 29, begin=(there, mine))
    product_is_posterior(there)
    server, nodes = both_sides(ALL, xs, ys)
    whole = state_of(*world.deployed(server, nodes, key, 40)[:2])
    start = loss_of(ALL, ALL.init(problem), problem)
    assert loss_of(ALL, state_of(there, mine), problem) < loss_of(ALL, whole, problem) + 0.05 * start


@pytest.mark.slow
def test_a_factor_held_is_remembered_however_many_answers_are_lost(key):
    xs, ys = world.labels()
    server, nodes = both_sides(ALL, xs, ys)
    begin = world.deployed(server, nodes, key, 1)[:2]
    there, mine, ups = begin[0], begin[1][0], []
    for _ in range(2 * REMEMBERED):
        mine, up = nodes[0].step(key, mine, server.down(there, 0))
        ups.append(up)
        assert int(up.arrays["refined"]) == 1
        there, _ = server.step(there, {})
    assert int(there.held[0]) == 1
    # A late answer of which it does not know any more is held now: the node says where it stands, and goes on.
    there, report = server.step(there, {0: ups[1]})
    assert report.accepted == (0,)
    mine, up = nodes[0].step(key, mine, server.down(there, 0))
    assert int(up.arrays["refined"]) == 0 == int(up.arrays["diverged"])
    np.testing.assert_array_equal(up.arrays["factor.precision"], ups[-1].arrays["factor.precision"])
    there, _ = server.step(there, {0: up})
    product_is_posterior(there)
    assert int(nodes[0].step(key, mine, server.down(there, 0))[1].arrays["refined"]) == 1


@pytest.mark.slow
def test_a_server_that_begins_anew_is_told_the_factors_that_there_are(key):
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    server, nodes = both_sides(ONE, xs, ys)
    there, mine, _ = world.deployed(server, nodes, key, 0, turns(4))
    before = loss_of(ONE, state_of(there, mine), problem)
    again, mine, reports = world.deployed(server, nodes, key, 0, turns(1), begin=(server.init(incarnation=1), mine))
    assert all(len(r.accepted) == 1 for r in reports)
    product_is_posterior(again)
    start = loss_of(ONE, ONE.init(problem), problem)
    assert loss_of(ONE, state_of(again, mine), problem) < before + 0.05 * start


@pytest.mark.slow
def test_refinements_that_are_not_finite_are_left_out_and_counted(key):
    xs, ys = world.labels()
    xs[1] = 1e306 * xs[1]
    algorithm = ONE.replace(model=mj.networks.MLP(world.D, 3, (4,)), client_optimizer=optax.sgd(1e-3))
    problem, rounds = world.prediction_of(xs, ys), 8
    state, history = mj.run(problem, algorithm, key, num_rounds=rounds)
    server, nodes = both_sides(algorithm, xs, ys)
    there, mine, reports = world.deployed(
        server, nodes, key, rounds, list(world.works(problem, algorithm, key, None, rounds))
    )
    chex.assert_trees_all_close(state_of(there, mine), state, rtol=1e-9, atol=1e-9)
    assert [int(r.quality.diverged) for r in reports] == history.diverged.tolist() == [0, 1, 1, 1, 1, 1, 2, 2]
    assert all(bool(r.quality.finite) for r in reports)


@pytest.mark.slow
def test_who_leaves_takes_its_factor_out_and_who_joins_has_none(key):
    xs, ys = world.labels()
    server, nodes = both_sides(ONE, xs, ys)
    there, stayed, _ = world.deployed(server, nodes, key, 0, turns(2))
    before, less = there.inner.state, server.leave(there, 3)
    product_is_posterior(less)
    out = jax.tree.map(lambda a, f: a - f[3], before.posterior, before.factors)
    chex.assert_trees_all_close(less.inner.state.posterior, out, rtol=1e-9, atol=1e-9)
    assert int(server.down(less, 0).arrays["clients"]) == world.M - 1
    less, mine, reports = world.deployed(server, nodes, key, 0, turns(1, without=3), begin=(less, stayed))
    known = np.asarray(less.inner.state.losses)
    assert np.isinf(known).tolist() == [False, False, False, True, False]
    np.testing.assert_allclose(float(reports[-1].quality.loss), known[np.isfinite(known)].mean(), rtol=1e-12)
    # It has no factor before its first answer, and what it knew it still knows.
    more = server.join(less, 3)
    assert float(jnp.max(more.inner.state.factors.precision[3])) == 0.0
    more, mine, _ = world.deployed(server, nodes, key, 0, turns(1), begin=(more, mine))
    product_is_posterior(more)
    always = world.deployed(server, nodes, key, 0, turns(2), begin=(there, stayed))[0].inner.state
    near = more.inner.state.factors.precision[3] / always.factors.precision[3]
    assert 0.8 < float(jnp.min(near)) < float(jnp.max(near)) < 1.25


@pytest.mark.slow
def test_without_a_node_from_the_start_it_is_the_simulation_without_it(key):
    xs, ys = world.labels()
    problem = world.prediction_of(xs, ys)
    problem = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[3].set(0.0)))
    state, _ = mj.run(problem, ALL, key, num_rounds=4)
    server, nodes = both_sides(ALL, xs, ys)
    plan = list(world.works(problem, ALL, key, None, 4))
    start = server.init()
    begin = server.leave(start, 3).replace(round=start.round), [node.init() for node in nodes]  # nobody was asked yet
    there, mine, _ = world.deployed(server, nodes, key, 0, plan, begin=begin)
    chex.assert_trees_all_close(state_of(there, mine), state, rtol=1e-9, atol=1e-9)


@pytest.mark.extended
def test_private_parameters_stay_with_the_nodes(key):
    xs, ys = world.labels()
    server, nodes = both_sides(ALL, xs, ys)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    p, q = there.inner.state.first.size, mine[0].private.shift.shape[1]
    assert p != q
    down = server.down(there, 0)
    up = nodes[0].step(key, mine[0], down)[1]
    shapes = [np.shape(leaf) for leaf in (*jax.tree.leaves(there), *down.arrays.values(), *up.arrays.values())]
    assert not any(q in shape for shape in shapes), shapes
    assert down.nbytes <= 8 * 2 * p + 16 >= up.nbytes - 4
    assert server.weights(there).private is None


@pytest.mark.slow
def test_nodes_together_answer_as_each_by_itself(key):
    xs, ys = world.labels()
    server, nodes = both_sides(ALL, xs, ys)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    side = sides_of("Node", ALL).node(ALL, world.prediction_of(xs, ys).data, CLASSES)
    kept, alone = world.as_each_by_itself(key, server, nodes, there, mine, together(mine), side)
    chex.assert_trees_all_close(kept, together(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_what_does_not_fit_is_said(key):
    xs, ys = world.labels()
    part = ONE.replace(sent=0.5)
    with pytest.raises(ValueError, match="Server: nodes send the whole factor.*sent=1.0, got 0.5"):
        world.server_of(part, None, scaling="sum")
    with pytest.raises(ValueError, match="Node: nodes send the whole factor"):
        world.nodes_of(xs, ys, CLASSES, part, scaling="sum")
    with pytest.raises(ValueError, match="Server: the likelihoods of Virtual count every sample"):
        world.server_of(ONE, None)
    with pytest.raises(ValueError, match="Virtual: likelihoods count every sample"):
        world.nodes_of(xs, ys, CLASSES, ONE)
    with pytest.raises(ValueError, match="Server: Virtual has no regularizer"):
        world.server_of(ONE, mj.regularizers.Independent(1.0), scaling="sum")
    with pytest.raises(ValueError, match="Server: order names client 7, but there are 5"):
        world.server_of(ONE.replace(order=(0, 7)), None, scaling="sum")
    server, nodes = both_sides(ONE, xs, ys)
    start = server.init()
    # Whose turn it would be and has left is not asked.
    ordered = world.server_of(ONE.replace(order=(1, 0)), None, scaling="sum")
    assert ordered.asked(key, ordered.init()) == (1,)
    assert ordered.asked(key, ordered.leave(ordered.init(), 1)) == ()
    up = nodes[0].step(key, nodes[0].init(), server.down(start, 0))[1]
    negative = up.arrays["factor.precision"].copy()
    negative[1] = -3.0
    wrong = {
        "factor.precision": (negative, "a precision below 0"),
        "samples": (np.int32(0), "it has no sample"),
        "refined": (np.int32(2), "sent a number for refined that is neither 0 nor 1"),
    }
    for name, (value, why) in wrong.items():
        after, report = server.step(start, {0: dataclasses.replace(up, arrays={**up.arrays, name: value})})
        assert report.accepted == ()
        assert report.refused[0].startswith("Server: the node of task 0 ")
        assert why in report.refused[0]
        chex.assert_trees_all_equal(server.weights(after), server.weights(start))
