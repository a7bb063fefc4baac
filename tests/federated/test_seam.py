"""A federation of nodes and a server is what `run` simulates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.federated import world

SAFE = mj.Mocha(server="dual", sigma_prime="per_task")
R, L = mj.regularizers, mj.losses
REGULARIZERS = {
    "local": R.Independent(np.linspace(0.02, 0.2, world.M)),
    "mean": R.MeanRegularized(0.2, 0.05),
    "graph": R.Graph(zoo.laplacian(world.M), 0.1, 0.05),
    "learned": R.Probabilistic(0.05),
    "clustered": R.Clustered(0.1, 0.5, 2.0),
    "sparse": R.SparsePrecision(0.1, 1.0, 0.1, 0.1),
    "trace": R.TraceNorm(0.1, 0.05),
    "about the mean": R.MeanCovariance(0.02, 0.05),
}
CASES = {
    **{f"safe {name}": (SAFE, name, L.Hinge()) for name in REGULARIZERS},
    "lemma 9": (mj.algorithm1(0.7, omega_every=3), "learned", L.Logistic()),
    "proximal": (mj.Mocha(server="proximal"), "learned", L.SmoothedHinge(0.5)),
    "proximal, about the mean": (mj.Mocha(server="proximal"), "about the mean", L.Logistic()),
    "proximal, given": (mj.Mocha(server="proximal"), "mean", L.Hinge()),
    "proximal, every third": (mj.Mocha(server="proximal", omega_every=3), "learned", L.Hinge()),
    "two epochs": (mj.Mocha(2.0, server="proximal"), "trace", L.Hinge()),
    "half steps": (SAFE.replace(gamma=0.5), "mean", L.Logistic()),
    "adaptive": (mj.Mocha(), "mean", L.Logistic()),
    "adaptive, graph": (mj.Mocha(1.5, memory=2), "graph", L.Logistic()),
    "adaptive, alternating": (mj.Mocha(omega_every=4), "sparse", L.Logistic()),
    "adaptive, learned": (mj.Mocha(server="dual"), "learned", L.Logistic()),
    "cocoa": (mj.Cocoa(0.3), "mean", L.Hinge()),
    "cocoa, learned": (mj.Cocoa(0.5, max_epochs=5), "learned", L.Hinge()),
}
SYSTEMS = {
    "full": None,
    "dropped": mj.systems.Dropout(0.4),
    "partial": mj.systems.PartialEpochs(0.1, 0.9) & mj.systems.Dropout(0.2),
}


# With every system, and with one; all others are slow tests.
WITH_ALL = ("adaptive", "proximal")
WITH_ONE = (
    "safe mean",
    "lemma 9",
    "proximal, every third",
    "adaptive, graph",
    "adaptive, alternating",
    "cocoa, learned",
)


@pytest.mark.parametrize(
    ("case", "systems"),
    [
        pytest.param(
            case,
            systems,
            marks=() if case in WITH_ALL or (systems == "partial" and case in WITH_ONE) else pytest.mark.slow,
        )  # fmt: skip
        for case in CASES
        for systems in SYSTEMS
    ],
)
@pytest.mark.thin(1)
def test_it_is_the_simulation(case, systems, key):
    algorithm, regularizer, loss = CASES[case]
    xs, ys = world.tables()
    problem, rounds = world.problem_of(xs, ys, loss, REGULARIZERS[regularizer]), 12
    state, _ = mj.run(problem, algorithm, key, num_rounds=rounds, systems=SYSTEMS[systems])
    plan = list(world.works(problem, algorithm, key, SYSTEMS[systems], rounds))
    server = world.server_of(algorithm, problem.regularizer)
    nodes = world.nodes_of(xs, ys, loss, algorithm)
    there, mine, _ = world.deployed(server, nodes, key, rounds, plan)
    size = float(jnp.max(jnp.abs(state.w)))
    np.testing.assert_allclose(server.weights(there), state.w, atol=1e-10 * size)
    for task, node in enumerate(nodes):
        there_too = node.weights(mine[task], server.down(there, task))
        np.testing.assert_array_equal(there_too, server.weights(there)[task])
    if "adaptive" in case:  # a node mixes its points when the next message comes
        mine = [
            node.step(key, m, server.down(there, t))[0].dual
            for t, (node, m) in enumerate(zip(nodes, mine, strict=True))
        ]
    duals = np.concatenate([m.beta for m in mine])
    np.testing.assert_allclose(duals, state.beta, atol=1e-10 * float(jnp.max(jnp.abs(state.beta))))


@pytest.mark.parametrize(
    "case", ["safe mean", "safe learned", "proximal", "safe clustered", "trace", "adaptive", "adaptive, learned"]
)
@pytest.mark.slow
def test_a_round_certifies_the_model_of_the_one_before(case, key):
    algorithm, regularizer, loss = CASES.get(case, (mj.Mocha(server="proximal"), "trace", L.Hinge()))
    xs, ys = world.tables()
    problem, rounds = world.problem_of(xs, ys, loss, REGULARIZERS[regularizer]), 10
    history = mj.run(problem, algorithm, key, num_rounds=rounds)[1]
    server = world.server_of(algorithm, problem.regularizer)
    _, _, reports = world.deployed(server, world.nodes_of(xs, ys, loss, algorithm), key, rounds + 1)
    for name in ("primal", "gap", "relative_gap", "joint_primal", "joint_gap", "relative_joint_gap"):
        found = [float(getattr(report.quality, name)) for report in reports[1:]]
        np.testing.assert_allclose(found, getattr(history, name), rtol=1e-6, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_in_float32_it_is_the_simulation_to_rounding(key):
    xs, ys = world.tables(dtype=np.float32)
    problem = world.problem_of(xs, ys, L.Hinge(), R.Probabilistic(0.05))
    state, _ = mj.run(problem, mj.Mocha(), key, num_rounds=20)
    server = world.server_of(mj.Mocha(), problem.regularizer, dtype=np.float32)
    there, _, _ = world.deployed(server, world.nodes_of(xs, ys, L.Hinge(), mj.Mocha()), key, 20)
    np.testing.assert_allclose(server.weights(there), state.w, atol=2e-6 * float(jnp.max(jnp.abs(state.w))))


@pytest.mark.slow
def test_a_server_holds_no_sample_and_no_dual_variable(key):
    xs, ys = world.tables()
    n = max(map(len, xs))
    before = {id(array) for array in jax.live_arrays()}
    for algorithm in (SAFE, mj.Mocha(server="proximal"), mj.Mocha(server="dual")):
        server = world.server_of(algorithm, R.Probabilistic(0.05))
        nodes = world.nodes_of(xs, ys, L.Hinge(), algorithm)
        state, mine, _ = world.deployed(server, nodes, key, 3)
        assert any(n in np.shape(leaf) for leaf in jax.tree.leaves(mine))
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves((state, server._side, server._sent))]
        assert not any(n in shape for shape in shapes), shapes
        del nodes, mine  # all that a process of the server alone would not have
        jax.clear_caches()
        shapes = [array.shape for array in jax.live_arrays() if id(array) not in before]
        assert not any(n in shape for shape in shapes), shapes


@pytest.mark.parametrize("case", ["safe mean", "proximal", "adaptive"])
@pytest.mark.slow
def test_a_bound_holds_while_a_node_is_silent(case, key):
    xs, ys = world.tables()
    algorithm, regularizer, _ = CASES[case]
    problem = world.problem_of(xs, ys, L.Hinge(), REGULARIZERS[regularizer])
    best = float(mj.solve(problem, algorithm, tol=1e-9, max_rounds=5000).certificate.joint_primal)
    server = world.server_of(algorithm, problem.regularizer)
    plan = [[-1] * world.M] * 5 + [[-1] * 4 + [None]] * 30
    _, _, reports = world.deployed(server, world.nodes_of(xs, ys, L.Hinge(), algorithm), key, 0, plan)
    bounds = [float(report.quality.joint_dual) for report in reports]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= best * (1 + 1e-9)
    assert bounds[-1] > bounds[5]
    for name in ("primal", "gap", "relative_gap", "joint_gap", "relative_joint_gap", "residual"):
        assert all(float(getattr(report.quality, name)) == np.inf for report in reports[5:]), name
