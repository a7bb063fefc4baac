"""Personalized methods between nodes and a server are what `run` simulates, whatever is lost on the way."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests.federated import world

P: Any = mj.personalized
MODEL = mj.networks.MLP(world.D, 3, (6,))
CLASSES = mj.likelihoods.Categorical()
SGD = optax.sgd(0.2)
LOCAL: Any = {"local_epochs": 2, "batch_size": 4}
GRAPH = np.abs(np.subtract.outer(np.arange(world.M), np.arange(world.M)))
CASES: dict[str, Any] = {
    "scaffold": P.scaffold(MODEL, SGD, server_optimizer=optax.sgd(0.8, momentum=0.5), **LOCAL),
    "ditto": P.ditto(MODEL, SGD, strength=0.7, personal_epochs=1, **LOCAL),
    "mr_mtl": P.mr_mtl(MODEL, SGD, strength=0.7, **LOCAL),
    "pfedme": P.pfedme(MODEL, SGD, strength=0.7, inner_steps=2, inner_rate=0.1, rate=0.5, **LOCAL),
    "fedper": P.fedper(MODEL, SGD, server_optimizer=optax.adam(1e-2, eps=1e-3), **LOCAL),
    "lg_fedavg": P.lg_fedavg(MODEL, SGD, **LOCAL),
    "fedbn": P.fedbn(MODEL, SGD, private=("0/b",), **LOCAL),
    "fedrep": P.fedrep(MODEL, SGD, body_epochs=1, **LOCAL),
    "feddyn": P.feddyn(MODEL, SGD, strength=0.4, **LOCAL),
    "fine_tuned": P.fine_tuned(MODEL, SGD, tuning_epochs=2, fraction=0.6, **LOCAL),
    "per_fedavg": P.per_fedavg(MODEL, SGD, inner_rate=0.1, second_order=True, **LOCAL),
    "apfl": P.apfl(MODEL, SGD, mixing=0.3, mixing_rate=0.4, **LOCAL),
    "ifca": P.ifca(MODEL, SGD, **LOCAL),
    "fedem": P.fedem(MODEL, SGD, components=2, **LOCAL),
    "fedu": P.fedu(MODEL, SGD, graph=GRAPH, strength=0.1, **LOCAL),
    "fedamp": P.fedamp(MODEL, SGD, strength=0.3, attention=0.2, sharpness=0.8, **LOCAL),
    "q_ffl": P.q_ffl(MODEL, SGD, fairness=1.5, lipschitz=4.0, **LOCAL),
    "afl": P.afl(MODEL, SGD, mixture_rate=0.2, **LOCAL),
}
# Their servers divide by the weight of all clients, of which one that sums losses has not heard yet.
ALIKE = ("scaffold", "feddyn")
SYSTEMS = mj.systems.PartialEpochs(0.1, 0.9) & mj.systems.Dropout(0.3)
ROUNDS = 5
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
SLOW, EXTENDED = pytest.mark.slow, pytest.mark.extended


def methods(**marks):
    """All methods: those that are not named are slow."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, SLOW)) for name in CASES])


def scaling_of(name):
    return "task_mean" if name in ALIKE else "sum"


def both_sides(name):
    xs, ys = world.labels()
    algorithm, scaling = CASES[name], scaling_of(name)
    server = world.server_of(algorithm, None, scaling=scaling)
    return server, world.nodes_of(xs, ys, CLASSES, algorithm, scaling=scaling)


def problem_of(name):
    xs, ys = world.labels()
    return world.prediction_of(xs, ys, scaling_of(name))


def kept_by(algorithm, mine):
    """What every node kept with its last answer, ``[m, ...]``; the first trees of one without an answer."""
    first = algorithm.first_own(jnp.arange(world.M, dtype=jnp.int32), np.float64)
    if all(state == () for state in mine):
        return first
    own = []
    for task, state in enumerate(mine):
        last = int(np.argmax(state.round[0]))
        begun = int(state.round[0, last]) > 0
        tree, place = (state.own, (0, last)) if begun else (first, task)
        own.append(jax.tree.map(lambda a, place=place: a[place], tree))
    return jax.tree.map(lambda *a: jnp.stack(a), *own)


@methods(scaffold=EXTENDED, fedamp=EXTENDED)
def test_it_is_the_simulation(name, key):
    algorithm, problem = CASES[name], problem_of(name)
    state, history = mj.run(problem, algorithm, key, num_rounds=ROUNDS, systems=SYSTEMS)
    plan = list(world.works(problem, algorithm, key, SYSTEMS, ROUNDS))
    assert all(None in steps for steps in plan[:2])
    server, nodes = both_sides(name)
    there, mine, reports = world.deployed(server, nodes, key, ROUNDS, plan)
    inner = there.inner.state
    chex.assert_trees_all_close((inner.shared, inner.rows, inner.kept), (state.shared, state.rows, state.kept),
                                **TOLERANCE)  # fmt: skip
    chex.assert_trees_all_close(kept_by(algorithm, mine), state.own, **TOLERANCE)
    np.testing.assert_allclose([float(r.quality.loss) for r in reports], history.loss, rtol=1e-9)
    # A node predicts as its client.
    task = next(k for k, steps in enumerate(plan[-1]) if steps is not None)
    ready = algorithm.resume(state, problem)
    if name not in ("fine_tuned", "per_fedavg", "afl"):  # they tune by draws of a node, and average at the server
        wanted = algorithm.parameters(ready, problem, task)
        predicts = nodes[task].weights(mine[task], server.down(there, task))
        chex.assert_trees_all_close(predicts, wanted, **TOLERANCE)


def lossy(plan, lost):
    """The plan in which nodes whose answers are lost do not take part."""
    return [[None if k in gone else s for k, s in enumerate(steps)] for steps, gone in zip(plan, lost, strict=True)]


def trees_of(there):
    inner = there.inner.state
    return inner.shared, inner.rows, inner.kept, inner.loss


@methods(scaffold=(), fedamp=EXTENDED)
def test_a_node_whose_answer_is_lost_has_not_taken_part(name, key):
    algorithm, plan = CASES[name], [[-1] * world.M] * ROUNDS
    lost = [{1}, {1, 2}, {0}, {2}, set()]  # twice in a row, and twice apart
    server, nodes = both_sides(name)
    there, mine, _ = world.deployed(server, nodes, key, ROUNDS, plan, lost)
    less, rest, _ = world.deployed(server, nodes, key, ROUNDS, lossy(plan, lost))
    chex.assert_trees_all_equal(trees_of(there), trees_of(less))
    chex.assert_trees_all_equal(kept_by(algorithm, mine), kept_by(algorithm, rest))
    if name == "scaffold":
        means = jax.tree.map(lambda a: a.mean(0), kept_by(algorithm, mine))
        chex.assert_trees_all_close(there.inner.state.shared.control, means, rtol=1e-9, atol=1e-12)


@methods(scaffold=(), fedamp=EXTENDED)
def test_a_node_that_begins_from_nothing_is_a_new_one(name, key):
    server, nodes = both_sides(name)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    down, fresh = server.down(there, 3), nodes[3].init()
    kept, up = nodes[3].step(key, fresh, down)
    after, report = server.step(there, {3: up})
    assert report.accepted == (3,)
    assert bool(report.quality.finite)
    # It does what one does that the server has never heard.
    new, answer = nodes[3].step(key, fresh, dataclasses.replace(down, held=0))
    chex.assert_trees_all_equal(dict(up.arrays), dict(answer.arrays))
    chex.assert_trees_all_equal(kept, new)
    if fresh != ():
        old, _ = nodes[3].step(key, mine[3], down)
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (old.own, kept.own)), strict=True))
        # The server knows the new one from there on.
        again, _ = nodes[3].step(key, kept, server.down(after, 3))
        assert int(again.round.max()) == int(after.round) + 1


@methods(scaffold=(), fedamp=EXTENDED)
def test_saved_states_go_on(name, key):
    server, nodes = both_sides(name)
    there, mine, _ = world.deployed(server, nodes, key, 2)
    read = mj.federated.from_bytes(mj.federated.to_bytes(there), server.init())
    kept = [mj.federated.from_bytes(mj.federated.to_bytes(m), node.init()) for m, node in zip(mine, nodes, strict=True)]
    wanted = world.deployed(server, nodes, key, 2, begin=(there, mine))
    ends = world.deployed(server, nodes, key, 2, begin=(read, kept))
    chex.assert_trees_all_equal(ends[:2], wanted[:2])
    # Of a server that begins anew at a saved state, its nodes' later answers count no more.
    after, report = server.step(server.restarted(there, 7), {
        k: node.step(key, ends[1][k], server.down(server.restarted(there, 7), k))[1] for k, node in enumerate(nodes)
    })  # fmt: skip
    assert report.accepted == tuple(range(world.M))
    assert int(after.incarnation) == 7
