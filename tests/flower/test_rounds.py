"""The rounds of a ServerApp are those that `run` simulates, whatever happens to messages."""

import itertools
import re
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from flwr.app import Error

import mocha_jax as mj
from mocha_jax.flower import serve
from mocha_jax.flower._node_store import NodeStore
from mocha_jax.flower._server_app import write_result
from tests.flower import world

KEY = jax.random.key(world.SEED)
QUICK: dict[str, Any] = {"poll_seconds": 0.0, "round_seconds": 5.0, "seed": world.SEED}


@pytest.fixture
def said(caplog):
    """Return lines of the log."""
    return lambda: [record.getMessage() for record in caplog.records]


def loop(folder, **how):
    return world.LoopGrid({100 + t: world.answering(k) for t, k in enumerate(world.keepers(folder))}, **how)


@pytest.fixture(scope="module")
def best():
    return mj.solve(world.problem(), tol=1e-5, max_rounds=5000)


def at_the_optimum(served, best, tol=1e-3):
    """Assert what a gap says: the objective at these weights and their own relation is so near to the best one."""
    quality = served.report.quality
    assert served.converged
    primal = float(quality.joint_primal)
    assert float(quality.relative_joint_gap) <= tol
    assert primal - float(quality.joint_gap) <= float(best.certificate.joint_primal) * (1 + 1e-5)
    assert primal <= float(best.certificate.joint_primal) * (1 + 1.01 * tol)


def test_it_is_the_simulation(tmp_path):
    rounds = 12
    state, history = mj.run(world.problem(), mj.Mocha(), KEY, num_rounds=rounds)
    served = serve(loop(tmp_path), world.make_server(), max_rounds=rounds, tol=0.0, **QUICK)
    assert served.rounds == rounds
    for task in range(world.M):  # the last message had the model that was judged
        with np.load(tmp_path / f"{task}" / "weights.npz") as file:
            np.testing.assert_array_equal(file["weights"], served.weights[task])
    size = float(np.abs(state.w).max())
    np.testing.assert_allclose(served.weights, state.w, atol=1e-5 * size)
    found = float(served.report.quality.relative_joint_gap)
    np.testing.assert_allclose(found, history.relative_joint_gap[-1], rtol=0.02, atol=1e-6)


@pytest.mark.slow
def test_it_ends_with_a_certificate(tmp_path, best, said):
    served = serve(loop(tmp_path), world.make_server(), **QUICK)
    at_the_optimum(served, best)
    rounds = [line for line in said() if line.startswith("round ")]
    assert len(rounds) == served.report.round
    assert all("accepted 4 of 4, refused 0" in line and "bytes down" in line for line in rounds)


NETWORK = mj.networks.MLP(world.D, 2, (5,))
LATERAL = mj.networks.Lateral(world.D, 2, (5,))
LABELS = mj.likelihoods.Categorical()
NETWORKS = {
    "fedavg": mj.FedAvg(NETWORK, optax.sgd(0.2), local_epochs=2, batch_size=4),
    "sampled": mj.FedAvg(NETWORK, optax.sgd(0.2), batch_size=4, fraction=0.5),
    "virtual": mj.Virtual(LATERAL, optax.adam(0.02), samples=2, draws=3, local_epochs=2, batch_size=8, temperature=0.1),
}


KEEPING = {
    "ditto": mj.personalized.ditto(NETWORK, optax.sgd(0.2), strength=0.3, local_epochs=2, batch_size=4),
    "scaffold": mj.personalized.scaffold(NETWORK, optax.sgd(0.2), local_epochs=2, batch_size=4),
}


def over_flower(algorithm, folder, rounds, **how):
    """The result of rounds over Flower, and the state and history of those that `run` simulates."""
    xs, ys = world.tables()
    ys = [(y > 0).astype(y.dtype) for y in ys]
    keepers = []
    for task, (x, y) in enumerate(zip(xs, ys, strict=True)):
        (folder / f"{task}").mkdir()
        node = mj.federated.Node(x, y, LABELS, algorithm, rows=max(map(len, xs)), dtype=np.float32)
        keepers.append(NodeStore(str(folder / f"{task}"), node, task))
    grid = world.LoopGrid({100 + t: world.answering(keeper) for t, keeper in enumerate(keepers)})
    server = mj.federated.Server(algorithm, None, world.M, world.D, dtype=np.float32)
    served = serve(grid, server, max_rounds=rounds, **how, **QUICK)
    problem = mj.Prediction(mj.pack_tasks(xs, ys, dtype=np.float32))
    return served, *mj.run(problem, algorithm, KEY, num_rounds=rounds)


@pytest.mark.parametrize("case", KEEPING)
@pytest.mark.extended
@pytest.mark.thin(1)
def test_what_clients_keep_lasts_over_flower(case, tmp_path):
    served, state, _ = over_flower(KEEPING[case], tmp_path, 6)
    model = state.shared if case == "ditto" else KEEPING[case].weights(state)
    chex.assert_trees_all_close(served.weights, model, rtol=1e-4, atol=1e-5)
    if case == "ditto":  # every node has its own model
        for task in range(world.M):
            with np.load(tmp_path / f"{task}" / "weights.npz") as file:
                kept = [file[name] for name in file.files]
            own = [leaf[task] for leaf in jax.tree.leaves(state.own)]
            chex.assert_trees_all_close(kept, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.slow
def test_networks_go_over_flower_too(case, tmp_path, said):
    algorithm, rounds = NETWORKS[case], 6
    # Nobody who is not asked is called silent, and no more answers are waited for than can come.
    served, state, history = over_flower(algorithm, tmp_path, rounds, leave_after=2, min_answers=3)
    weights = algorithm.weights(state)
    weights = mj.networks.SplitParameters(weights.shared, None) if case == "virtual" else weights
    chex.assert_trees_all_close(served.weights, weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(float(served.report.quality.loss), history.loss[-1], rtol=1e-5)
    lines = [line for line in said() if line.startswith("round ")]
    asked = {"fedavg": world.M, "sampled": world.M // 2, "virtual": 1}[case]
    assert len(lines) == rounds
    assert all(re.fullmatch(rf"round \d: loss \S+, accepted {asked} of 4, refused 0, .*", line) for line in lines)
    with np.load(tmp_path / "0" / "weights.npz") as file:
        shapes = [file[name].shape for name in file.files]
    whole = algorithm.model.init(KEY) if case == "virtual" else served.weights
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(whole)]
    for make_model in (None, lambda parameters: mj.NetworkModel(NETWORK, parameters, world.D)):
        path = str(tmp_path / "model.npz")
        write_result(path, served, make_model)
        if make_model is None or case == "virtual":  # of which there is no whole network here
            with np.load(path) as file:
                written = [file[name] for name in file.files]
            chex.assert_trees_all_equal(written, jax.tree.leaves(served.weights))
        else:
            model = mj.load_model(path)
            assert model.trained["rounds"] == rounds
            assert model.predict(world.tables()[0][0][:2]).shape == (2,)
    assert ("server_app: make_model failed" in "".join(said())) == (case == "virtual")


@pytest.mark.extended
def test_privacy_of_clients_asks_by_chance_and_nobody_else(tmp_path, said):
    rounds = 8
    plain = mj.FedAvg(NETWORK, optax.sgd(0.1), batch_size=8, fraction=0.3)
    algorithm = mj.privacy.private_clients(plain, mj.privacy.ClientLevel(noise=1.0, rounds=6))
    xs, ys = world.tables()
    grid = world.LoopGrid({})
    for task, (x, y) in enumerate(zip(xs, ys, strict=True)):
        (tmp_path / f"{task}").mkdir()
        node = mj.federated.Node(
            x, (y > 0).astype(y.dtype), LABELS, algorithm, rows=max(map(len, xs)), dtype=np.float32
        )
        grid.nodes[100 + task] = world.answering(NodeStore(str(tmp_path / f"{task}"), node, task))
    server = mj.federated.Server(algorithm, None, world.M, world.D, dtype=np.float32)
    served = serve(grid, server, max_rounds=rounds, min_answers=4, **QUICK)
    accepted = [line.split("accepted ")[1][0] for line in said() if line.startswith("round ")]
    assert len(accepted) == rounds
    assert len(set(accepted)) > 1  # by chance, 4 were wanted
    assert accepted[-2:] == ["0", "0"]
    assert int(served.state.inner.state.kept.used) == 6
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(served.weights)])).all()
    with pytest.raises(ValueError, match="asynchronous is not for privacy of clients"):
        serve(grid, server, asynchronous=True)


@pytest.mark.extended
def test_private_nodes_remember_what_they_spent_whatever_the_server_forgets(tmp_path, said):
    plain = mj.FedAvg(NETWORK, optax.sgd(0.1), batch_size=8)
    xs, ys = world.tables()
    ys = [(y > 0).astype(y.dtype) for y in ys]
    private = mj.privacy.with_budget(
        plain, mj.Prediction(mj.pack_tasks(xs, ys, dtype=np.float32)), epsilon=3.0, delta=1e-2, rounds=2
    )
    level, server = private.privacy, mj.federated.Server(private, None, world.M, world.D, dtype=np.float32)
    assert level is not None

    def grid():  # with nodes that have been started anew
        nodes = {}
        for task, (x, y) in enumerate(zip(xs, ys, strict=True)):
            (tmp_path / f"{task}").mkdir(exist_ok=True)
            own = private.replace(privacy=level.client(task))
            node = mj.federated.Node(x, y, LABELS, own, rows=max(map(len, xs)), dtype=np.float32)
            nodes[100 + task] = world.answering(NodeStore(str(tmp_path / f"{task}"), node, task))
        return world.LoopGrid(nodes)

    def model(served):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(served.weights)])

    two = serve(grid(), server, max_rounds=2, **QUICK)
    begin = server.weights(server.init())
    assert np.abs(model(two) - np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(begin)])).max() > 1e-3
    again = serve(grid(), server, max_rounds=2, **QUICK)  # without a checkpoint: it is as at the beginning
    chex.assert_trees_all_close(again.weights, begin)
    assert all("loss unknown" in line for line in said() if line.startswith("round "))


@pytest.mark.extended
def test_private_sums_go_over_flower_and_no_further_than_their_budget(tmp_path, said, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)  # a server may start anew within one tick of its clock
    xs, ys = world.tables()
    private = mj.privacy.with_budget(
        mj.privacy.PrivateSdca(), world.problem(), epsilon=3.0, delta=1e-2, rounds=2, clip=0.5
    )
    level, server = private.privacy, mj.federated.Server(private, world.REGULARIZER, world.M, world.D, **world.OPTIONS)
    assert level is not None

    def grid():  # with nodes that have been started anew
        nodes = {}
        for task, (x, y) in enumerate(zip(xs, ys, strict=True)):
            (tmp_path / f"{task}").mkdir(exist_ok=True)
            own = private.replace(privacy=level.client(task))
            node = mj.federated.Node(x, y, world.LOSS, own, rows=max(map(len, xs)), **world.OPTIONS)
            nodes[100 + task] = world.answering(NodeStore(str(tmp_path / f"{task}"), node, task))
        return world.LoopGrid(nodes)

    two = serve(grid(), server, max_rounds=2, **QUICK)
    assert np.abs(two.weights).max() > 1e-3
    # A server that has forgotten everything hears what was published, and no more.
    again = serve(grid(), server, max_rounds=3, **QUICK)
    np.testing.assert_allclose(again.weights, two.weights, rtol=1e-5)
    assert all("gap unknown" in line for line in said() if line.startswith("round "))
    write_result(str(tmp_path / "model.npz"), again, None)
    np.testing.assert_array_equal(mj.load_model(str(tmp_path / "model.npz")).weights, again.weights)


@pytest.mark.slow
def test_whoever_is_there_is_asked_where_nobody_selected_answers(tmp_path):
    algorithm = NETWORKS["virtual"]
    xs, ys = world.tables()
    node = mj.federated.Node(xs[1], (ys[1] > 0).astype(np.float32), LABELS, algorithm, dtype=np.float32)
    keeper = NodeStore(str(tmp_path), node, 1)
    server = mj.federated.Server(algorithm, None, 2, world.D, dtype=np.float32)
    how = QUICK | {"round_seconds": 0.1, "start_seconds": 0.0}
    grid, path = world.LoopGrid({101: world.answering(keeper)}), str(tmp_path / "server.npz")
    served = serve(grid, server, max_rounds=1, checkpoint=path, **how)
    assert served.report.accepted == (1,)  # in the turn of task 0
    # Nor does a run that goes on think that the server is another one.
    again = serve(grid, server, max_rounds=3, checkpoint=path, asynchronous=True, **how)
    assert again.state.incarnation == served.state.incarnation
    assert again.report.accepted == (1,)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow
def test_late_answers_are_taken_in_later_rounds(tmp_path, best, asynchronous):
    late = {101: 0.25, 103: 0.1}
    grid = loop(tmp_path, late=lambda node, k: late.get(node, 0.0) if k in (3, 4, 5, 8) else 0.0)
    how = QUICK | {"round_seconds": 0.06, "message_seconds": 5.0, "poll_seconds": 0.005}
    served = serve(grid, world.make_server(), asynchronous=asynchronous, **how)
    at_the_optimum(served, best)
    if not asynchronous:
        assert grid.count[101] < grid.count[100]  # it was asked nothing while its answers were under way


@pytest.mark.slow
def test_lost_answers_are_made_up_for(tmp_path, best):
    grid = loop(tmp_path)
    answer, count = grid.nodes[102], itertools.count()

    def lossy(message):  # the work is done, but nobody hears of it
        found = answer(message)
        return None if next(count) in (4, 5, 9) else found

    grid.nodes[102] = lossy
    how = QUICK | {"round_seconds": 0.1, "message_seconds": 0.05}
    # Flower says so when a message's time is over.
    pull = grid.pull_messages

    def pull_messages(names):
        names = list(names)
        for name in names:
            if name not in grid.answers and grid.sent[name].metadata.message_type == "train":
                grid.answers[name] = 0.0, world.Message(Error(3, "Message Unavailable"), reply_to=grid.sent[name])
        return pull(names)

    grid.pull_messages = pull_messages
    at_the_optimum(serve(grid, world.make_server(), **how), best)


def test_a_node_that_never_answers_is_left_out_and_the_others_are_certified(tmp_path, said):
    grid = loop(tmp_path)
    answer = grid.nodes[103]
    grid.nodes[103] = lambda message: answer(message) if message.metadata.message_type == "query" else None
    how = QUICK | {"round_seconds": 0.05, "message_seconds": 10.0}
    served = serve(grid, world.make_server(), leave_after=3, max_rounds=400, **how)
    assert served.converged
    assert np.isfinite(float(served.report.quality.relative_joint_gap))
    assert any("task 3 was asked in 3 rounds and did not answer; it is left out" in line for line in said())
    assert 3 not in served.report.accepted


@pytest.mark.slow
def test_without_leaving_it_the_bound_still_holds(tmp_path, best):
    grid = loop(tmp_path)
    answer, count = grid.nodes[103], itertools.count()
    grid.nodes[103] = lambda message: answer(message) if next(count) < 4 else None
    how = QUICK | {"round_seconds": 0.05, "message_seconds": 10.0}
    served = serve(grid, world.make_server(), max_rounds=25, **how)
    assert not served.converged
    assert not np.isfinite(float(served.report.quality.residual))
    assert float(served.report.quality.joint_dual) <= float(best.certificate.joint_primal) * (1 + 1e-5)


@pytest.mark.extended
def test_a_node_that_left_comes_back(tmp_path, best, said):
    grid = loop(tmp_path)
    answer, count = grid.nodes[103], itertools.count()
    grid.nodes[103] = lambda message: None if 2 <= next(count) < 4 else answer(message)
    how = QUICK | {"round_seconds": 0.05, "message_seconds": 10.0}
    done: list[bool] = []

    def returned(message):  # under another number, as a SuperNode without a key does
        return answer(message)

    ids = grid.get_node_ids

    def get_node_ids():
        if any("left out" in line for line in said()) and not done:
            done.append(True)
            del grid.nodes[103]
            grid.nodes[203] = returned
        return ids()

    grid.get_node_ids = get_node_ids
    served = serve(grid, world.make_server(), leave_after=3, **how)
    at_the_optimum(served, best)
    assert done
    assert any("task 3 answers again" in line for line in said())


def test_what_is_not_known_is_called_so(tmp_path, said):
    grid = loop(tmp_path)
    answer = grid.nodes[103]
    grid.nodes[103] = lambda message: answer(message) if message.metadata.message_type == "query" else None
    serve(grid, world.make_server(), max_rounds=2, **QUICK | {"round_seconds": 0.05})
    assert any(line.startswith("round 2: gap unknown, bound unknown, accepted 3 of 4") for line in said())


@pytest.mark.extended
def test_refused_answers_are_said_and_do_no_harm(tmp_path, best, said):
    grid = loop(tmp_path)
    answer, count = grid.nodes[101], itertools.count()

    def hostile(message):
        header, arrays = answer(message)
        if next(count) in (3, 4):
            arrays = {**arrays, "v": np.full(world.D, np.nan, np.float32)}
        return header, arrays

    first, messages = grid.nodes[100], itertools.count()

    def empty(message):
        found = first(message)
        return ({"what": "up"}, {}) if next(messages) == 2 else found

    grid.nodes[101], grid.nodes[100] = hostile, empty
    at_the_optimum(serve(grid, world.make_server(), **QUICK), best)
    refused = [line for line in said() if line.startswith("refused")]
    assert len(refused) == 3
    assert any("the node of task 1 sent v with NaN" in line for line in refused)


@pytest.mark.extended
def test_failures_and_strangers_are_said(tmp_path, best, said):
    grid = loop(tmp_path)
    answer, count = grid.nodes[100], itertools.count()

    def failing(message):
        if next(count) == 2:
            return {"what": "failed", "kind": "ValueError"}, {}
        return answer(message)

    grid.nodes[100] = failing
    grid.nodes[7] = lambda message: ({"what": "task", "task": 9}, {})
    grid.nodes[8] = lambda message: Error(2, "no such thing")
    at_the_optimum(serve(grid, world.make_server(), **QUICK), best)
    assert any("the node of task 0: it failed with a ValueError" in line for line in said())
    assert any("node 7: it has task 9, and tasks are 0 to 3" in line for line in said())
    assert any("node 8: no answer, says Flower (error 2" in line for line in said())


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    path, rounds = str(tmp_path / "server.npz"), 12
    for last in (5, rounds):
        served = serve(loop(tmp_path), world.make_server(), max_rounds=last, tol=0.0, checkpoint=path, **QUICK)
    state, _ = mj.run(world.problem(), mj.Mocha(), KEY, num_rounds=rounds)
    np.testing.assert_allclose(served.weights, state.w, atol=1e-5 * float(np.abs(state.w).max()))


def test_a_round_that_the_checkpoint_missed_is_answered_alike(tmp_path):
    """The server was killed after the nodes' work and before its own: the same messages get the same answers."""
    path, rounds = str(tmp_path / "server.npz"), 12
    early = serve(loop(tmp_path), world.make_server(), max_rounds=5, tol=0.0, **QUICK)
    late = serve(
        loop(tmp_path), world.make_server(), max_rounds=6, tol=0.0, checkpoint=_written(path, early), **QUICK
    )  # fmt: skip
    assert late.rounds == 6
    assert int(late.state.round) == 7  # which judged it
    served = serve(
        loop(tmp_path), world.make_server(), max_rounds=rounds, tol=0.0, checkpoint=_written(path, early), **QUICK
    )  # fmt: skip
    state, _ = mj.run(world.problem(), mj.Mocha(), KEY, num_rounds=rounds)
    np.testing.assert_allclose(served.weights, state.w, atol=1e-5 * float(np.abs(state.w).max()))


def _written(path, served):
    mj.federated.save(path, served.state)
    return path


@pytest.mark.slow
def test_an_older_checkpoint_that_was_put_back_is_another_life(tmp_path):
    path = str(tmp_path / "server.npz")
    early = serve(loop(tmp_path), world.make_server(), max_rounds=3, tol=0.0, **QUICK)
    serve(loop(tmp_path), world.make_server(), max_rounds=8, tol=0.0, checkpoint=_written(path, early), **QUICK)

    def careful(answer):
        def answered(message):
            try:
                return answer(message)
            except mj.federated.Refused:
                return {"what": "failed", "kind": "Refused"}, {}  # as a worker says it

        return answered

    grid = world.LoopGrid({100 + t: careful(world.answering(k)) for t, k in enumerate(world.keepers(tmp_path))})
    options = {**QUICK, "round_seconds": 1.0, "checkpoint": _written(path, early)}
    served = serve(grid, world.make_server(), max_rounds=300, tol=1e-3, **options)
    assert served.converged
    assert int(served.state.incarnation) != int(early.state.incarnation)


def test_silence_after_a_round_that_was_answered_is_no_other_life(tmp_path):
    path = str(tmp_path / "server.npz")
    first = serve(loop(tmp_path), world.make_server(), max_rounds=2, tol=0.0, checkpoint=path, **QUICK)
    how = QUICK | {"round_seconds": 0.1, "message_seconds": 5.0, "poll_seconds": 0.01}
    grid = loop(tmp_path, late=lambda node, k: 0.5 if k == 2 else 0.0)
    again = serve(grid, world.make_server(), max_rounds=5, tol=0.0, checkpoint=path, **how)
    assert again.state.incarnation == first.state.incarnation


def test_another_server_s_checkpoint_is_refused(tmp_path):
    path = str(tmp_path / "server.npz")
    other = mj.federated.Server(mj.Mocha(), world.REGULARIZER, world.M, world.D + 1, **world.OPTIONS)
    mj.federated.save(path, other.init())
    with pytest.raises(ValueError, match="is no checkpoint of this server"):
        serve(world.LoopGrid({}), world.make_server(), checkpoint=path)


def test_a_checkpoint_of_the_last_round_is_said(tmp_path):
    path = str(tmp_path / "server.npz")
    serve(loop(tmp_path), world.make_server(), max_rounds=2, tol=0.0, checkpoint=path, **QUICK)
    with pytest.raises(
        ValueError, match=r"the run of .*server.npz has ended, after 3 rounds; raise max_rounds, now 2, to go on"
    ):
        serve(loop(tmp_path), world.make_server(), max_rounds=2, checkpoint=path, **QUICK)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_rounds": 0}, "max_rounds"), ({"tol": "small"}, "tol"), ({"round_seconds": 0.0}, "round_seconds"),
        ({"min_answers": 5}, "min_answers=5"), ({"asynchronous": 1}, "asynchronous"), ({"checkpoint": 3}, "checkpoint"),
    ],
)  # fmt: skip
def test_options_are_checked(options, why):
    with pytest.raises(ValueError, match=f"serve: {why}"):
        serve(world.LoopGrid({}), world.make_server(), **options)
