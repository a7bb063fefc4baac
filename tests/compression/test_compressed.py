"""Algorithms whose clients send their changes in few bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests.federated import world
from tests.personalized import problems

C, PM = mj.compression, mj.personalized
SGD = optax.sgd(0.2)
LOCAL: Any = {"local_epochs": 2, "batch_size": 3}
WORLD = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.3, 1.0)
FEW = C.Rotated(C.Quantized(1))
MAKE = {
    "FedAvg": lambda: mj.FedAvg(problems.MODEL, SGD, optax.adam(1e-2, eps=1e-3), proximal=0.2, **LOCAL),
    "scaffold": lambda: PM.scaffold(problems.MODEL, SGD, **LOCAL),
    "fedrep": lambda: PM.fedrep(problems.MODEL, SGD, fraction=0.7, **LOCAL),
    "fine_tuned": lambda: PM.fine_tuned(problems.MODEL, SGD, **LOCAL),
    "ifca": lambda: PM.ifca(problems.MODEL, SGD, **LOCAL),
    "q_ffl": lambda: PM.q_ffl(problems.MODEL, SGD, fairness=1.0, **LOCAL),
    "lg_fedavg": lambda: PM.lg_fedavg(problems.MODEL, SGD, **LOCAL),
}


class Whole(C.Sending):
    """Vectors as they are; what is no code says something, too."""

    def encode(self, round, v, held):
        return {"v": v, "sent": jnp.ones((len(v), 1), bool)}, v

    def decode(self, code, held):
        return jnp.where(code["sent"], code["v"], 7.0)


TIERS = {"FedAvg": [], "ifca": [pytest.mark.extended]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, [pytest.mark.slow])) for name in MAKE])
def test_a_form_that_loses_nothing_changes_nothing(name, key):
    algorithm, problem = MAKE[name](), problems.make_problem("sum")
    form = C.compressed(algorithm, Whole())
    plain, coded = (mj.run(problem, a, key, num_rounds=4, systems=WORLD) for a in (algorithm, form))
    for part in ("shared", "kept"):
        both = (jax.tree.leaves(getattr(state, part)) for state, _ in (plain, coded))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(jax.tree.leaves(plain[0].own), jax.tree.leaves(coded[0].own.own), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(coded[0].own.left_out, 0.0)
    np.testing.assert_allclose(plain[1].loss, coded[1].loss, rtol=1e-12)
    more = form.message(problem)[1] / algorithm.message(problem)[1]
    np.testing.assert_allclose(coded[1].bytes_up, more * plain[1].bytes_up, rtol=1e-12)
    weights = [a.weights(a.resume(s, problem)) for a, s in ((algorithm, plain[0]), (form, coded[0]))]
    for a, b in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def vector(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def largest(x, k):
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0.0)


def test_what_a_message_leaves_out_is_in_a_later_one(key):
    problem = problems.make_problem()
    algorithm = mj.FedAvg(problems.MODEL, SGD, batch_size=None)
    few = C.compressed(algorithm, C.TopK(0.2))
    state, memory = few.init(problem), 0.0
    for _ in range(3):
        alone = algorithm.init(problem).replace(shared=state.shared, round=state.round)
        changes = np.stack([
            vector(state.shared) - vector(mj.run(problem, algorithm, key, num_rounds=1, state=alone, systems=only(k))[0].shared)
            for k in range(4)
        ])  # fmt: skip
        wanted = changes + memory
        sent = np.stack([largest(row, int(np.ceil(0.2 * len(row)))) for row in wanted])
        before = vector(state.shared)
        state, _ = mj.run(problem, few, key, num_rounds=1, state=state)
        np.testing.assert_allclose(vector(state.shared), before - sent.mean(axis=0), rtol=1e-9, atol=1e-12)
        memory = wanted - sent
        np.testing.assert_allclose(state.own.left_out, memory, rtol=1e-9, atol=1e-12)
        assert (np.abs(memory).max(axis=1) > 0).all()


def only(client):
    return mj.systems.Dropout(1.0 - jnp.eye(4)[client])


def test_an_answer_that_does_not_arrive_leaves_the_memory(key):
    problem = problems.make_problem()
    few = C.compressed(mj.FedAvg(problems.MODEL, SGD), FEW)
    state, _ = mj.run(problem, few, key, num_rounds=2, systems=only(2))
    assert [bool(np.any(row)) for row in np.asarray(state.own.left_out)] == [False, False, True, False]


def test_every_client_draws_for_itself_in_every_round(key):
    problem = problems.make_problem()
    few = C.compressed(mj.FedAvg(problems.MODEL, SGD), C.RandomK(0.2))
    state, drawn = few.init(problem), []
    for _ in range(2):
        state, _ = mj.run(problem, few, key, num_rounds=1, state=state)
        drawn.append(np.asarray(state.own.left_out) == 0.0)
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8


def test_a_message_costs_what_its_bytes_do(key):
    problem = problems.make_problem()
    algorithm = mj.FedAvg(problems.MODEL, SGD)
    down, up = algorithm.message(problem)
    p = int(up)
    n = 2 ** int(np.ceil(np.log2(p)))
    assert C.compressed(algorithm, FEW).message(problem) == (down, n / 8 / 4 + 2)
    assert C.compressed(algorithm, C.Quantized()).message(problem) == (down, 8 * -(-p // 8) / 4 + 1)
    clusters = PM.ifca(problems.MODEL, SGD)
    assert C.compressed(clusters, FEW).message(problem)[1] < 0.3 * clusters.message(problem)[1]


@pytest.mark.parametrize("form", [FEW, C.TopK(0.1)])
@pytest.mark.extended
def test_one_bit_learns_what_whole_numbers_do(form, key):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 6))
    xs = [rng.normal(size=(60, 6)) for _ in range(10)]
    train, test = mj.pack_tasks(xs, [(x @ centers.T).argmax(1) for x in xs]).split(key, 0.5)
    problem = mj.Prediction(train, test=test)
    algorithm = mj.FedAvg(mj.networks.MLP(6, 3, (20,)), optax.sgd(0.3))
    plain, few = (mj.run(problem, a, key, num_rounds=40)[1].loss for a in (algorithm, C.compressed(algorithm, form)))
    assert few[-1] < 1.1 * plain[-1]
    assert few[-1] < 0.2 * few[0]


@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.extended), *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("FedAvg", "ifca", "fine_tuned")
)])  # fmt: skip
def test_nodes_and_a_server_do_the_same(name, key):
    xs, ys = world.labels()
    model = mj.networks.MLP(world.D, 3, (6,))
    algorithm = C.compressed(MAKE[name]().replace(model=model), FEW)
    problem = world.prediction_of(xs, ys, "task_mean")
    state, history = mj.run(problem, algorithm, key, num_rounds=4)
    server = world.server_of(algorithm, None, scaling="task_mean")
    nodes = world.nodes_of(xs, ys, mj.likelihoods.Categorical(), algorithm, scaling="task_mean")
    mine, held = [node.init() for node in nodes], server.init()
    for _ in range(4):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], up = node.step(key, mine[task], server.down(held, task))
            ups[task] = mj.federated.from_bytes(mj.federated.to_bytes(up), mj.federated.Up)
        held, report = server.step(held, ups)
        assert report.refused == {}
    for a, b in zip(jax.tree.leaves(held.inner.state.shared), jax.tree.leaves(state.shared), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    numbers = [a.dtype.name for name, a in ups[0].arrays.items() if name.startswith("row") and a.size > 4]
    assert numbers == ["uint8"]


@pytest.mark.extended
def test_a_limit_on_norms_is_on_what_a_code_says(key):
    xs, ys = world.labels()
    # One large step: the change is much longer than everything else in an answer.
    averaging = mj.FedAvg(mj.networks.MLP(world.D, 3, (6,)), optax.sgd(50.0), batch_size=None)
    algorithm = C.compressed(averaging, FEW)
    nodes = world.nodes_of(xs, ys, mj.likelihoods.Categorical(), algorithm, scaling="task_mean")

    def answers(limit):
        server = world.server_of(algorithm, None, scaling="task_mean", max_norm=limit)
        state = server.init()
        ups = {task: node.step(key, node.init(), server.down(state, task))[1] for task, node in enumerate(nodes)}
        return server.step(state, ups)[1].refused, ups

    _, ups = answers(None)
    sent = [np.concatenate([a.ravel() for a in up.arrays.values() if a.dtype.kind == "f"]) for up in ups.values()]
    limit = 1.1 * max(map(np.linalg.norm, sent))
    refused, _ = answers(limit)
    assert set(refused) == set(ups)
    assert "sent an answer whose norm is more than" in refused[0]
    assert answers(100.0 * limit)[0] == {}


@pytest.mark.extended
def test_it_goes_with_privacy(key):
    problem = problems.make_problem()
    algorithm = mj.FedAvg(problems.MODEL, SGD, privacy=mj.privacy.ExampleLevel(1.0, 3))
    state, history = mj.run(problem, C.compressed(algorithm, FEW), key, num_rounds=4)
    np.testing.assert_array_equal(state.spent.steps, 3)


@pytest.mark.parametrize("name", ["fedu", "fedamp"])
def test_a_server_that_sums_up_nothing_is_refused(name):
    graph = {"graph": np.ones((4, 4)) - np.eye(4)} if name == "fedu" else {}
    algorithm = C.compressed(getattr(PM, name)(problems.MODEL, SGD, **graph), FEW)
    with pytest.raises(ValueError, match="compressed: the algorithm's server sums up no vectors like its own"):
        algorithm.init(problems.make_problem())


def test_forms_have_no_arrays():
    class Scaled(Whole):
        factor: float

    with pytest.raises(ValueError, match="compressed: Scaled has arrays or numbers that are not static"):
        C.compressed(mj.FedAvg(problems.MODEL, SGD), Scaled(2.0))


def test_two_algorithms_with_one_form_share_a_program():
    algorithm = mj.FedAvg(problems.MODEL, SGD)
    one, same, other = (C.compressed(algorithm, form) for form in (C.TopK(0.1), C.TopK(0.1), C.TopK(0.2)))
    first, second, third = (jax.tree.flatten(a)[1] for a in (one, same, other))
    assert [first == second, first == third] == [True, False]  # type: ignore[operator]
    assert hash(one.method) == hash(same.method)
