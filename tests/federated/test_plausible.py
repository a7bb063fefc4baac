"""Honest answers are never doubted, and those that cannot be are."""

import dataclasses

import jax
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.federated import hostile, world

DUAL = mj.Mocha(server="dual", sigma_prime="per_task")
WAYS = {
    "given": (DUAL, mj.regularizers.MeanRegularized(0.2, 0.05)),
    "learned": (mj.Mocha(server="proximal"), mj.regularizers.Probabilistic(0.05)),
}


def tables(loss, dtype=np.float64):
    return world.tables(regression=loss in zoo.REGRESSION_LOSSES, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(1)
def test_an_honest_node_is_never_doubted(loss, way, dtype, key):
    xs, ys = tables(loss, dtype)
    algorithm, regularizer = WAYS[way]
    server = world.server_of(algorithm, regularizer, dtype=dtype)
    rng = np.random.default_rng(0)
    rounds = 60 if dtype == np.float32 else 150
    # Some nodes are asked for less, or do not answer, so that what they began with is not what the server holds.
    plan = [[[-1, -1, -1, 3, 0, None][rng.integers(6)] for _ in range(world.M)] for _ in range(rounds // 2)]
    plan += [[-1] * world.M] * (rounds - rounds // 2)
    # It asserts that none is refused.
    _, _, reports = world.deployed(server, world.nodes_of(xs, ys, zoo.LOSSES[loss], algorithm), key, 0, plan)
    assert float(reports[-1].quality.residual) < 1e-2


@pytest.mark.parametrize("loss", ["hinge", "logistic", "squared"])
@pytest.mark.thin(1)
@pytest.mark.extended
def test_nor_is_one_that_remembers_points(loss, key):
    xs, ys = tables(loss, np.float32)
    server = world.server_of(mj.Mocha(), WAYS["given"][1], dtype=np.float32)
    rng = np.random.default_rng(0)
    plan = [[[-1, -1, 3, 0, None][rng.integers(5)] for _ in range(world.M)] for _ in range(40)]
    plan += [[-1] * world.M] * 20
    nodes = world.nodes_of(xs, ys, zoo.LOSSES[loss], mj.Mocha())
    state, mine, reports = world.deployed(server, nodes, key, 0, plan)
    assert float(reports[-1].quality.residual) < 1e-3
    # What the server has mixed is where the nodes stand.
    _, up = nodes[0].step(key, mine[0], server.down(state, 0, steps=0))
    np.testing.assert_allclose(up.arrays["vector"], state.inner.rule.own[0], rtol=1e-4)
    # What is found of another's data does not fit the losses of this one, nor the slope towards it.
    _, up = nodes[0].step(key, mine[0], server.down(state, 0))
    for factor in (-10.0, 2.0):
        wrong = dict(up.arrays, vector=up.arrays["vector"] * np.float32(factor))
        _, report = server.step(state, {0: dataclasses.replace(up, arrays=wrong)})
        assert 0 in report.refused
    steeper = dict(up.arrays, slope=up.arrays["slope"] - np.float32(0.01))
    _, report = server.step(state, {0: dataclasses.replace(up, arrays=steeper)})
    assert "a slope that is not that" in report.refused[0]


@pytest.mark.parametrize("loss", ["hinge", "logistic", "squared", "absolute", "huber"])
@pytest.mark.thin(1)
def test_nor_is_one_whose_samples_are_large_or_small(loss, key):
    xs, ys = tables(loss, np.float32)
    shift = np.float32(1e3 if loss in zoo.REGRESSION_LOSSES else 0)
    xs = [x * np.float32(10.0 ** (3 - 2 * t)) for t, x in enumerate(xs)]
    server = world.server_of(*WAYS["given"], dtype=np.float32)
    nodes = world.nodes_of(xs, [y + shift for y in ys], zoo.LOSSES[loss], DUAL)
    world.deployed(server, nodes, key, 60)


@pytest.fixture(scope="module", params=WAYS)
def answers(request):
    """A server before some of its rounds, and what its nodes answer."""
    algorithm, regularizer = WAYS[request.param]
    xs, ys = world.tables()
    server, nodes = world.server_of(algorithm, regularizer), world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)
    state, mine, found = server.init(), [node.init() for node in nodes], []
    for _ in range(12):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(jax.random.key(0), mine[task], server.down(state, task))
        found.append((state, ups))
        state, _ = server.step(state, ups)
    return server, found, request.param


def shares(answers, changed):
    """The share of the changed answers that are refused, and what is said of them."""
    server, found, _ = answers
    said, rng = [], np.random.default_rng(1)
    for state, ups in found:
        ups = {task: changed(rng, up) for task, up in ups.items()}
        after, report = server.step(state, ups)
        said += report.refused.values()
        rest = {task: up for task, up in ups.items() if task not in report.refused}
        assert jax.tree.all(jax.tree.map(np.array_equal, *map(but_for_the_bound, (after, server.step(state, rest)[0]))))
    return len(said) / sum(len(ups) for _, ups in found), said


def but_for_the_bound(state):
    """The state without what a refused answer changes, where it denies the one that is held."""
    return state.replace(denied=None, inner=state.inner.replace(bound=None))


def with_v(change):
    return lambda rng, up: hostile.with_array(up, "v", change(rng, up.arrays["v"]))


def of_that_length(rng, v):
    other = rng.normal(size=v.shape)
    return other * np.linalg.norm(v) / np.linalg.norm(other)


# What is done to the vector, and the least share that is found out: of the first of 12 rounds, whose model is 0, little is.
SPOILT = {
    "random": (of_that_length, 0.9),
    "twice as long": (lambda rng, v: 2 * v, 0.9),
    "half as long": (lambda rng, v: 0.5 * v, 0.8),
    "turned round": (lambda rng, v: -v, 0.9),
    "none": (lambda rng, v: 0 * v, 0.9),
    "very long": (lambda rng, v: 1e9 * v, 1.0),
    "endless": (lambda rng, v: 1e160 * v, 1.0),
    "somewhat noisy": (lambda rng, v: v + 0.3 * of_that_length(rng, v), 0.7),
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.thin(8)
def test_a_vector_that_cannot_be_is_refused(how, answers):
    change, least = SPOILT[how]
    assert shares(answers, with_v(change))[0] >= least


def to(name, change):
    return lambda rng, up: hostile.with_array(up, name, np.asarray(change(up.arrays[name]), up.arrays[name].dtype))


NUMBERS = {
    "says that its work was not from 0": to("share", lambda a: 1.01),
    "says that its work was": to("share", lambda a: -1e-9),
    "says that it has no sample": to("samples", lambda a: 0),
    "says that it has no": to("samples", lambda a: -(2**31)),
    "sent a bound below 0": to("terms.error", lambda a: -a),
    "sent a vector longer than the bound": to("terms.error", lambda a: 0.01 * a),
    "sent a vector longer than": to("samples", lambda a: 2**30),
    "sent a sum of conjugates": to("terms.size", lambda a: 0.9 * a),
    "sent a sum of": to("terms.size", lambda a: -a),
    "sent terms of a gap whose sum is below 0": lambda rng, up: hostile.changed(
        to("gap", lambda a: -1e-3)(rng, up), held=-1
    ),
    "sent terms of a gap that are not those": to("gap", lambda a: 0.5 * a + 1e-3),
    "sent losses, conjugates and a vector": lambda rng, up: hostile.changed(
        to("value", lambda a: 0 * a)(rng, up), held=-1
    ),
    "sent a vector that is worse": to("terms.conjugate", lambda a: 0.5 * a),
}


@pytest.mark.parametrize("why", NUMBERS)
@pytest.mark.thin(17)
def test_a_number_that_cannot_be_is_refused(why, answers):
    _, said = shares(answers, NUMBERS[why])
    found = [text for text in said if text.split(" ", 6)[6].startswith(why)]
    assert len(found) > 30, set(said)
    assert all(text.isprintable() and text.endswith(".") and text.count(".") == 1 for text in found)


def test_a_longest_vector_is_agreed_on(answers, key):
    _, found, way = answers
    state, ups = found[5]
    norms = {task: float(np.linalg.norm(up.arrays["v"])) for task, up in ups.items()}
    limited = world.server_of(*WAYS[way], max_norm=sorted(norms.values())[2] * (1 + 1e-9))
    report = limited.step(state, ups)[1]
    longest = sorted(norms, key=lambda task: norms[task])[3:]
    assert sorted(report.refused) == sorted(longest)
    assert all("sent an answer whose norm is more than" in why for why in report.refused.values())
    for bad in (0, -1.0, "long", [1.0, 2.0], np.nan):
        with pytest.raises(ValueError, match="Server: max_norm must be"):
            world.server_of(DUAL, WAYS["given"][1], max_norm=bad)


def test_a_node_that_lies_consistently_is_believed(key):
    """It works on samples that are none of its own: nobody else could tell."""
    xs, ys = world.tables()
    nodes = world.nodes_of([xs[0], *(5 * x for x in xs[1:])], [ys[0], *(-y for y in ys[1:])], mj.losses.Hinge(), DUAL)
    world.deployed(world.server_of(*WAYS["given"]), nodes, key, 20)


LYING = {
    "given": (*WAYS["given"], (0.0, 0.5, -1.0)),
    "points": (mj.Mocha(), WAYS["given"][1], (0.0, 0.5, 2.0, -1.0)),
    "learned": (*WAYS["learned"], (0.5, -1.0)),
}


@pytest.mark.parametrize(
    "way",
    ["points", pytest.param("given", marks=pytest.mark.slow), pytest.param("learned", marks=pytest.mark.slow)],
)
@pytest.mark.extended
def test_no_bound_rests_on_a_lie_that_is_noticed(way, key):
    algorithm, regularizer, lies = LYING[way]
    xs, ys = world.tables()
    server, nodes = world.server_of(algorithm, regularizer), world.nodes_of(xs, ys, mj.losses.Hinge(), algorithm)
    solved = mj.solve(world.problem_of(xs, ys, mj.losses.Hinge(), regularizer), tol=1e-6, max_rounds=3000)
    name, optimum = "vector" if way == "points" else "v", float(solved.certificate.joint_primal)
    for lie in lies:
        state, mine, refused = server.init(), [node.init() for node in nodes], 0
        for round in range(12):
            ups = {}
            for task, node in enumerate(nodes):
                mine[task], ups[task] = node.step(key, mine[task], server.down(state, task))
            if round < 8:
                ups[1] = hostile.with_array(ups[1], name, lie * ups[1].arrays[name])
            state, report = server.step(state, ups)
            assert set(report.refused) <= {1}
            refused += 1 in report.refused
            assert float(report.quality.bound) <= optimum * (1 + 1e-9)
        assert refused >= 4


def test_who_is_doubted_once_is_believed_again(answers, key):
    server, found, _ = answers
    state, ups = found[4]
    before = float(server.step(state, ups)[1].quality.bound)
    assert np.isfinite(before)
    doubted, report = server.step(state, {**ups, 1: to("gap", lambda a: a + 0.1)(None, ups[1])})
    assert "terms of a gap that are not those" in report.refused[1]
    assert doubted.denied.tolist() == [False, True, False, False, False]
    assert float(report.quality.bound) == -np.inf
    # Nothing is known while it is silent; with its next answer all is.
    silent, report = server.step(doubted, {})
    assert silent.denied[1]
    assert float(report.quality.bound) == -np.inf
    again, report = server.step(doubted, {1: ups[1]})
    assert report.accepted == (1,)
    assert not again.denied.any()
    assert float(server.step(again, {})[1].quality.bound) > 0.5 * before
    assert not server.join(server.leave(doubted, 1), 1).denied.any()


def test_a_node_whose_samples_cancel_answers_zero_and_is_believed(key):
    """So a vector of zeros is no reason to refuse an answer, as long as the model is 0."""
    xs, ys = world.tables()
    xs[1], ys[1] = 1e-2 * np.concatenate([xs[1], -xs[1]]), np.ones(2 * len(xs[1]))  # short: all duals end at 1
    server = world.server_of(*WAYS["given"])
    nodes = world.nodes_of(xs, ys, mj.losses.Hinge(), DUAL, rows=2 * max(map(len, xs)))
    _, up = nodes[1].step(key, nodes[1].init(), server.down(server.init(), 1))
    assert np.abs(up.arrays["v"]).max() < 1e-17
    np.testing.assert_allclose(up.arrays["terms.conjugate"], -1.0)
    assert up.arrays["terms.error"] > 0
    world.deployed(server, nodes, key, 3)  # asserts that nobody is refused


def test_who_leaves_takes_the_round_along(answers):
    """The model is another one then, so that answers to the messages of before are answers to another round."""
    server, found, _ = answers
    state, ups = found[5]
    for left in (server.leave(state, 2), server.join(server.leave(state, 2), 2)):
        after, report = server.step(left, {task: up for task, up in ups.items() if task != 2})
        assert report.refused == {}
        assert report.accepted == (0, 1, 3, 4)
        assert np.isinf(report.quality.primal)
        assert int(after.held[0]) == int(state.round) + 1
