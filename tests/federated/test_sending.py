"""Vectors that travel in few bytes, clipped or with noise: the run converges, and its certificate stays true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.federated import hostile

F = mj.federated
M, D = 6, 64
DUAL = mj.Mocha(server="dual", sigma_prime="per_task")
WAYS = {
    "given": (DUAL, mj.regularizers.MeanRegularized(0.02, 0.005)),
    "learned": (mj.Mocha(server="proximal"), mj.regularizers.Probabilistic(0.05)),
}
LOSS = mj.losses.SmoothedHinge(0.5)


@functools.cache
def tables():
    return zoo.ragged(seed=11, m=M, d=D, low=20, high=30, dtype=np.float32)


@functools.cache
def optimum(way):
    """The least objective, in float64 to 1e-9."""
    xs, ys = tables()
    data = mj.pack_tasks([x.astype(np.float64) for x in xs], ys, dtype=np.float64, loss_scaling="task_mean")
    solution = mj.solve(mj.Problem(data, LOSS, WAYS[way][1]), tol=1e-9, max_rounds=20_000)
    certificate = solution.certificate
    assert float(certificate.relative_joint_gap) <= 1e-9
    return float(certificate.joint_primal)


def federation(way, sending, receiving=None):
    algorithm, regularizer = WAYS[way]
    xs, ys = tables()
    nodes = [
        F.Node(x, y, LOSS, algorithm, rows=30, dtype=np.float32, loss_scaling="task_mean", sending=sending)
        for x, y in zip(xs, ys, strict=True)
    ]
    server = F.Server(
        algorithm, regularizer, M, D, dtype=np.float32, loss_scaling="task_mean",
        receiving=sending if receiving is None else receiving,
    )  # fmt: skip
    return server, nodes


def run(way, sending, rounds, lost=0.0, until=0.0, stop=None):
    """Yield every round's report, and its answers."""
    server, nodes = federation(way, sending)
    state, mine, rng = server.init(), [node.init() for node in nodes], np.random.default_rng(5)
    for round in range(rounds):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(jax.random.key(1), mine[task], server.down(state, task))
        sent = {task: up for task, up in ups.items() if rng.random() >= lost}
        state, report = server.step(state, sent)
        assert report.refused == {}
        if stop is not None:
            stop(round, server, state, nodes, mine, sent)
        yield report, ups
        if float(report.quality.relative_joint_gap) <= until:
            return


# Forms, and of how many rounds of plain vectors they need at most how many.
FEW_BYTES = {
    "8 bits": (mj.compression.Quantized(), 1.5),
    "3 bits": (mj.compression.Quantized(3), 3.0),
    "1 bit rotated": (mj.compression.Rotated(mj.compression.Quantized(1)), 4.0),
    "4 bits by chance": (mj.compression.Stochastic(4), 3.0),
    "largest tenth": (mj.compression.TopK(0.1), 12.0),
    "random quarter": (mj.compression.RandomK(0.25), 12.0),
}


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FEW_BYTES)
@pytest.mark.slow
def test_few_bytes_reach_the_optimum_and_bound_it(form, way, lost):
    sending, factor = FEW_BYTES[form]
    best, reports = optimum(way), [report for report, _ in run(way, sending, 600, lost, until=1e-4)]
    for report in reports:
        assert float(report.quality.joint_dual) <= best
        assert float(report.quality.joint_primal) >= best * (1 - 1e-5)  # its rounding in float32 is not counted
    assert float(reports[-1].quality.relative_joint_gap) <= 1e-4
    if not lost:
        whole = [report for report, _ in run(way, None, 400, until=1e-4)]
        assert len(reports) <= factor * len(whole) + 2


@pytest.mark.extended
def test_one_bit_is_certified():
    """A short one of these."""
    best, bits = optimum("given"), FEW_BYTES["1 bit rotated"][0]
    reports = [report for report, _ in run("given", bits, 100, 0.1, until=3e-3)]
    assert all(float(report.quality.joint_dual) <= best for report in reports)
    assert all(float(report.quality.joint_primal) >= best * (1 - 1e-5) for report in reports)
    assert float(reports[-1].quality.relative_joint_gap) <= 3e-3


class Halved(mj.compression.Sending):
    """Half of every vector: a form that loses much."""

    def encode(self, round, v, held):
        return v / 2, v / 2

    def decode(self, code, held):
        return code


class Forgetful(Halved):
    pass


class Clipped(mj.compression.Sending):
    """Vectors no longer than was agreed on."""

    longest: float

    def encode(self, round, v, held):
        norm = jnp.sqrt(jnp.sum(v**2, axis=1, keepdims=True))
        clipped = v * jnp.minimum(1.0, self.longest / jnp.maximum(norm, 1e-30))
        return {"v": clipped}, clipped

    def decode(self, code, held):
        return code["v"]


class Noisy(mj.compression.Sending):
    """Vectors with noise of the node's own."""

    key: jax.Array
    size: float

    def encode(self, round, v, held):
        keys = jax.vmap(lambda r: jax.random.fold_in(self.key, r))(round)
        noise = jax.vmap(lambda k: jax.random.normal(k, v.shape[1:], v.dtype))(keys)
        return v + self.size * noise, v + self.size * noise

    def decode(self, code, held):
        return code


FORMS = {
    "halved": (Halved(), 1.0),
    "clipped a little": (Clipped(1.0), 1e-3),
    "clipped": (Clipped(0.05), 1.0),
    "noisy": (Noisy(jax.random.key(8), 1e-3), 0.5),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_whatever_a_form_loses_the_bound_holds(form):
    sending, near = FORMS[form]
    best, reports = optimum("given"), [report for report, _ in run("given", sending, 60)]
    # Where nothing is lost it is as floats give it, as in a history.
    assert all(float(report.quality.joint_dual) <= best * (1 + 1e-6) for report in reports)
    assert float(reports[-1].quality.joint_primal) - best <= near * best


@pytest.mark.slow
def test_a_bound_without_the_error_would_be_none(monkeypatch):
    """So that the test above can fail."""

    def with_decoded(self, mine, header, up, v):
        after, told = original(self, mine, header, up, v)
        return after, told.replace(terms=up.terms)

    original = dual_nodes().with_decoded
    monkeypatch.setattr(dual_nodes(), "with_decoded", with_decoded)
    bounds = [float(report.quality.joint_dual) for report, _ in run("given", Forgetful(), 30)]
    assert max(bounds) > optimum("given") * (1 + 1e-3)


def dual_nodes():
    _, nodes = federation("given", None)
    return type(nodes[0]._side)


@pytest.mark.slow
def test_server_and_node_have_the_same_vector_to_the_last_bit():
    def compare(round, server, state, nodes, mine, sent):
        for task in sent:
            slot = int(np.argmax(np.asarray(mine[task].sent.round[0]) == round + 1))
            assert np.asarray(state.inner.v[task]).tobytes() == np.asarray(mine[task].sent.v[0, slot]).tobytes()
            # What it has is not what it is: that is in the bound on its error.
            lost = np.linalg.norm(np.asarray(mine[task].v[0] - mine[task].sent.v[0, slot], np.float64))
            assert lost <= float(state.inner.terms.error[task]) <= 2 * lost + 1e-5
        counted.append(len(sent))

    for lost in (0.0, 0.4):
        counted: list[int] = []
        for report, ups in run("learned", mj.compression.Quantized(), 25, lost, stop=compare):
            assert all(up.kind == "Coded" for up in ups.values()), report
        assert sum(counted) > 25 * M * (1 - lost) * 0.8


@pytest.mark.slow
def test_they_are_about_a_quarter_of_the_bytes():
    algorithm, regularizer = WAYS["given"]
    server = F.Server(algorithm, regularizer, M, 1000, dtype=np.float32, receiving=mj.compression.Quantized())
    table = F.message_numbers(server)
    assert table["Coded"] == {"float32": 7, "int32": 2, "uint8": 1000}
    assert table["DualUp"] == {"float32": 1006, "int32": 1}
    for (_, coded), (_, whole) in zip(run("given", mj.compression.Quantized(), 2), run("given", None, 2), strict=True):
        assert {up.nbytes for up in coded.values()} == {D + 7 * 4 + 2 * 4}
        assert {up.nbytes for up in whole.values()} == {4 * (D + 6) + 4}


def started(rounds=3):
    """A federation in 8 bits after some rounds, and answers to the next."""
    server, nodes = federation("given", mj.compression.Quantized())
    state, mine = server.init(incarnation=7), [node.init() for node in nodes]
    for round in range(rounds):
        ups = {}
        for task, node in enumerate(nodes):
            mine[task], ups[task] = node.step(jax.random.key(1), mine[task], server.down(state, task))
        if round < rounds - 1:
            state, _ = server.step(state, ups)
    return server, state, nodes, mine, ups


@pytest.mark.extended
def test_a_difference_from_what_is_not_held_is_refused():
    server, state, nodes, mine, ups = started()
    assert server.step(state, ups)[1].refused == {}
    untouched, _ = server.step(state, {})
    for base in (0, 1, 3, -1, -7):
        others = {task: hostile.with_array(up, "base", np.asarray(base, np.int32)) for task, up in ups.items()}
        after, report = server.step(state, others)
        assert set(report.refused) == set(ups)
        assert "a difference from its answer to round" in report.refused[0]
        assert report.refused[0].endswith("the one that is held is that to round 2.")
        assert jax.tree.all(jax.tree.map(np.array_equal, after, untouched))
    # Late, and an answer to another round has come in between.
    down = server.down(state, 0)
    later, _ = server.step(state, {})
    kept, up = nodes[0].step(jax.random.key(1), mine[0], server.down(later, 0))
    newer, report = server.step(later, {0: up})
    assert report.accepted == (0,)
    assert "answers round 3, and its answer to round 4 is here already" in server.step(newer, {0: ups[0]})[1].refused[0]
    assert down.held == 2


@pytest.mark.extended
def test_broken_codes_change_nothing():
    server, state, _, _, ups = started()
    untouched, _ = server.step(state, {})
    rng = np.random.default_rng(2)
    for trial in range(60):
        if trial < 4:
            scale = np.float32([3e38, 1e30, -3e38, 1e12][trial])
            bad = {task: hostile.with_array(up, "code.scale", scale) for task, up in ups.items()}
        else:
            bad = {task: hostile.MAKERS[rng.integers(len(hostile.MAKERS))](rng, up) for task, up in ups.items()}
        after, report = server.step(state, bad)
        assert set(report.refused) == set(ups), report.accepted
        assert all(why.startswith("Server: the node of task ") and why.isprintable() for why in report.refused.values())
        assert jax.tree.all(jax.tree.map(np.array_equal, after, untouched))


def test_who_does_not_know_what_is_held_sends_its_vector_as_it_is():
    server, state, nodes, mine, _ = started()
    other = state.replace(incarnation=jnp.asarray(8, jnp.int32))
    kept, up = nodes[0].step(jax.random.key(1), mine[0], server.down(other, 0))
    assert (up.kind, up.arrays["v"].tobytes()) == ("DualUp", np.asarray(mine[0].v[0]).tobytes())
    other, report = server.step(other, {0: up})
    assert report.accepted == (0,)
    # From then on it does.
    _, up = nodes[0].step(jax.random.key(1), kept, server.down(other, 0))
    assert (up.kind, int(up.arrays["base"])) == ("Coded", 3)
    assert server.step(other, {0: up})[1].accepted == (0,)


def test_a_server_that_was_not_told_says_so():
    _, _, _, _, ups = started(1)
    server, _ = federation("given", None)
    report = server.step(server.init(incarnation=7), ups)[1]
    assert report.refused[0] == "Server: the node of task 0 sent a record 'Coded', where one of DualUp is wanted."
    for bad in (3, "int8", mj.compression.Quantized):
        with pytest.raises(ValueError, match="Server: receiving must be a Sending such as"):
            federation("given", None, bad)
        with pytest.raises(ValueError, match="Node: sending must be a Sending such as"):
            federation("given", bad, mj.compression.Quantized())
    with pytest.raises(ValueError, match="Cut: encode must return vectors as it is given"):
        federation("given", None, Cut())


class Cut(Halved):
    def encode(self, round, v, held):
        return v, v[:, :3]
