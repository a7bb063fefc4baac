"""Whatever is handed in as a message, it is refused in a sentence and changes nothing."""

import re

import jax
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.federated import hostile

M, D = 50, 3
SIDES = {
    "dual": (mj.Mocha(server="dual", sigma_prime="per_task"), mj.regularizers.MeanRegularized(0.2, 0.05), np.float64),
    "proximal": (mj.Mocha(server="proximal"), mj.regularizers.Probabilistic(0.05), np.float32),
    "adaptive": (mj.Mocha(), mj.regularizers.MeanRegularized(0.2, 0.05), np.float64),
}


def same(a, b):
    """Tell whether all leaves are equal to the last bit."""
    old, new = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (a, b))
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(old, new, strict=True))


@pytest.fixture(scope="module", params=SIDES)
def federation(request):
    """A server after two rounds, of which some nodes missed the second; answers that it would take, and old ones."""
    algorithm, regularizer, dtype = SIDES[request.param]
    xs, ys = zoo.ragged(seed=5, m=M, d=D, dtype=dtype)
    nodes = [mj.federated.Node(x, y, mj.losses.Hinge(), algorithm, rows=16, dtype=dtype, federation="mocha")
             for x, y in zip(xs, ys, strict=True)]  # fmt: skip
    server = mj.federated.Server(algorithm, regularizer, M, D, dtype=dtype)
    key, state, mine = jax.random.key(0), server.init(incarnation=4), [node.init() for node in nodes]
    rounds = []
    for round in range(3):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(key, mine[task], server.down(state, task))
        rounds.append(ups)
        if round < 2:
            state, report = server.step(state, {t: up for t, up in ups.items() if round == 0 or t % 2})
            assert not report.refused, report.refused
    good = {t: [rounds[2][t], *([] if t % 2 else [rounds[1][t]])] for t in range(M)}
    held = {t: [rounds[0][t], *([rounds[1][t]] if t % 2 else [])] for t in range(M)}
    return server, state, nodes, mine, good, held


def of_elsewhere(rng, up, state, held):
    """Return the answer as one of another place or time, or an old one."""
    far = int(rng.choice([4, 5, 100, 2**31 - 1]))
    options = (
        lambda: hostile.changed(up, task=(up.task + int(rng.integers(1, M))) % M),
        lambda: hostile.changed(up, task=int(rng.choice([-1, M, 2**31 - 1, -(2**31) + 1]))),
        lambda: hostile.changed(up, incarnation=int(rng.choice([0, 3, 5, -1, 2**31 - 1]))),
        lambda: hostile.changed(up, round=far),
        lambda: hostile.changed(up, round=int(rng.choice([0, -1, -(2**31) + 1, int(state.held[up.task])]))),
        lambda: hostile.changed(up, held=up.round + int(rng.choice([0, 1, 100]))),
        lambda: hostile.changed(up, version=int(rng.choice([0, 2, -1, 2**31 - 1]))),
        lambda: held[rng.integers(len(held))],
    )
    return options[rng.integers(len(options))]()


def is_sentence(text, start):
    shape = rf"{start} .*[^.]\."
    return re.fullmatch(shape, text) and text.isprintable() and len(text) < 300 and not re.search(r"[^.]\. ", text)


@pytest.mark.slow
def test_all_that_are_good_are_taken(federation):
    server, state, _, _, good, _ = federation
    for which in (0, -1):
        after, report = server.step(state, {task: ups[which] for task, ups in good.items()})
        assert (report.refused, report.accepted) == ({}, tuple(range(M)))
        assert not same(after.inner, state.inner)


@pytest.mark.slow
def test_ten_thousand_broken_answers_change_nothing(federation):
    server, state, _, _, good, held = federation
    rng, said = np.random.default_rng(20170531), set()
    untouched, _ = server.step(state, {})
    assert not same(untouched, state)  # it has done a round
    for _ in range(10_000 // M):
        ups = {}
        for task in range(M):
            up = good[task][rng.integers(len(good[task]))]
            which = rng.integers(len(hostile.MAKERS) + 1)
            maker = hostile.MAKERS[which] if which < len(hostile.MAKERS) else None
            ups[task] = maker(rng, up) if maker else of_elsewhere(rng, up, state, held[task])
        after, report = server.step(state, ups)
        assert report.accepted == (), [ups[task] for task in report.accepted]
        assert set(report.refused) == set(ups)
        assert same(after, untouched)
        for task, why in report.refused.items():
            assert is_sentence(why, f"Server: the node of task {task}"), why
            said.add(re.sub(r"\d+", "#", why))
    assert len(said) > 150, len(said)


@pytest.mark.slow
def test_an_answer_by_no_name_is_refused(federation):
    server, state, _, _, good, _ = federation
    names = (-1, M, 2**31, hostile.HUGE, 1.5, "0", None, (), np.int64(-3), float("nan"), hostile.Text("1"), b"0", "a\nb",
             hostile.Odd(), True if M < 1 else "True")  # fmt: skip
    after, report = server.step(state, {name: good[0][0] for name in names})
    assert same(after, server.step(state, {})[0])
    assert (report.accepted, len(report.refused)) == ((), len(names))
    for why in report.refused.values():
        assert is_sentence(why, "Server: the node of task"), why
        assert " is not in this federation, whose tasks are 0 to 49" in why
    # A name counts, not its type: True is 1 to a dict, and yet no task.
    assert server.step(state, {True: good[1][0]})[1].accepted == ()
    assert server.step(state, {np.int16(1): good[1][0]})[1].accepted == (1,)


@pytest.mark.slow
def test_one_bad_answer_does_not_spoil_the_others(federation):
    server, state, _, _, good, _ = federation
    ups = {task: ups[0] for task, ups in good.items()}
    name = "v" if "v" in ups[3].arrays else "vector"
    bad = hostile.with_array(ups[3], name, np.full(D, np.nan, ups[3].arrays[name].dtype))
    some, report = server.step(state, {**ups, 3: bad})
    assert list(report.refused) == [3]
    assert same(some, server.step(state, {task: up for task, up in ups.items() if task != 3})[0])


@pytest.mark.thin(1)
@pytest.mark.extended
def test_broken_messages_to_a_node_change_nothing(federation):
    server, state, nodes, mine, _, _ = federation
    rng, said, key = np.random.default_rng(7), set(), jax.random.key(0)
    state, _ = server.step(state, {})
    kept = [[np.array(leaf) for leaf in jax.tree.leaves(m)] for m in mine]
    for trial in range(3_000):
        task = trial % M
        down = server.down(state, task)
        which = rng.integers(len(hostile.MAKERS) + 1)
        bad = hostile.MAKERS[which](rng, down) if which < len(hostile.MAKERS) else of_another_server(rng, down)
        with pytest.raises(mj.federated.Refused) as refusal:
            nodes[task].step(key, mine[task], bad)
        assert is_sentence(str(refusal.value), "Node: the server"), refusal.value
        said.add(re.sub(r"\d+", "#", str(refusal.value)))
    assert same(kept, mine)
    assert len(said) > 100, len(said)
    for task in (0, 1):
        nodes[task].step(key, mine[task], server.down(state, task))


def of_another_server(rng, down):
    curvature = np.asarray(-1e-3, down.arrays["curvature"].dtype)
    large = np.full(D, np.finfo(curvature.dtype).max, curvature.dtype)
    options = (
        lambda: hostile.changed(down, task=-1 - int(rng.integers(3))),
        lambda: hostile.changed(down, incarnation=-1 - int(rng.integers(3))),
        lambda: hostile.changed(down, round=int(rng.choice([0, -1, 1, 2, 3]))),
        lambda: hostile.changed(down, held=int(rng.choice([-1, down.round, down.round + 1]))),
        lambda: hostile.changed(down, version=2),
        lambda: hostile.with_array(down, "curvature", curvature),
        lambda: hostile.with_array(down, "steps", np.int32(-2)),
        lambda: hostile.with_array(hostile.with_array(down, "start", large), "model", large),
    )
    return options[rng.integers(len(options))]()


@pytest.mark.thin(1)
def test_of_two_messages_of_a_round_a_node_answers_one(federation):
    server, state, nodes, mine, _, _ = federation
    down = server.down(state, 1)
    with pytest.raises(
        mj.federated.Refused, match="round 3 is answered already; a server that goes on from an earlier"
    ):
        nodes[1].step(jax.random.key(0), mine[1], down)
    # Of another incarnation it may be, and then nothing is known of what the server holds.
    _, up = nodes[1].step(jax.random.key(0), mine[1], hostile.changed(down, incarnation=5))
    assert up.incarnation == 5
    assert up.held == -1 or up.arrays["anew"] == 1
