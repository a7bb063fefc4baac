"""Personalized methods are algorithms like others: mapped over, spread, padded, resumed, pickled, and made models."""

import pickle
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._files.fingerprint import fingerprint
from tests.personalized.problems import CLASSES, D, K, make_problem

P: Any = mj.personalized
MODEL = mj.networks.MLP(D, CLASSES)
SGD = optax.sgd(0.3)
OPTIONS: Any = {"local_epochs": 2, "batch_size": 3}
GRAPH = 1.0 - np.eye(K)
METHODS: dict[str, Any] = {
    "ditto": P.ditto(MODEL, SGD, **OPTIONS),
    "fedamp": P.fedamp(MODEL, SGD, **OPTIONS),
    "afl": P.afl(MODEL, SGD, **OPTIONS),
    "fedu": P.fedu(MODEL, SGD, graph=GRAPH, **OPTIONS),
    "mr_mtl": P.mr_mtl(MODEL, SGD, **OPTIONS),
    "pfedme": P.pfedme(MODEL, SGD, strength=1.0, inner_steps=2, **OPTIONS),
    "fedper": P.fedper(MODEL, SGD, private=("0/b",), **OPTIONS),
    "lg_fedavg": P.lg_fedavg(MODEL, SGD, private=("0/w",), **OPTIONS),
    "fedbn": P.fedbn(MODEL, SGD, private=("0/b",), **OPTIONS),
    "fedrep": P.fedrep(MODEL, SGD, private=("0/b",), **OPTIONS),
    "scaffold": P.scaffold(MODEL, SGD, **OPTIONS),
    "feddyn": P.feddyn(MODEL, SGD, **OPTIONS),
    "fine_tuned": P.fine_tuned(MODEL, SGD, **OPTIONS),
    "per_fedavg": P.per_fedavg(MODEL, SGD, second_order=True, **OPTIONS),
    "apfl": P.apfl(MODEL, SGD, mixing_rate=0.1, **OPTIONS),
    "ifca": P.ifca(MODEL, SGD, **OPTIONS),
    "fedem": P.fedem(MODEL, SGD, components=2, **OPTIONS),
    "q_ffl": P.q_ffl(MODEL, SGD, **OPTIONS),
}
each_method = pytest.mark.parametrize("name", METHODS)
SYSTEMS = mj.systems.Dropout(0.3)


def models(algorithm, state, problem):
    """What predicts for each client."""
    state = algorithm.resume(state, problem)
    return [algorithm.parameters(state, problem, k) for k in range(K)]


@pytest.mark.parametrize(
    ("name", "number", "values"), [("ditto", "strength", [0.0, 0.5, 2.0]), ("apfl", "mixing", [0.0, 0.4, 1.0])]
)
@pytest.mark.slow
def test_vmap_over_numbers_is_a_loop(name, number, values, key):
    algorithm, problem = METHODS[name], make_problem("sum")

    def end(value):
        there = algorithm.replace(numbers={**algorithm.numbers, number: value})
        state, history = mj.run(problem, there, key, num_rounds=3, systems=SYSTEMS)
        return there.weights(state), history.loss

    together = jax.vmap(end)(jnp.asarray(values))
    for i, value in enumerate(values):
        chex.assert_trees_all_close(
            jax.tree.map(lambda a, i=i: a[i], together), end(jnp.asarray(value)), rtol=1e-9, atol=1e-12
        )
    ends = jax.tree.leaves(together[0])[0]
    assert float(jnp.abs(ends[0] - ends[-1]).max()) > 1e-3


@each_method
@pytest.mark.thin(1)
@pytest.mark.extended
def test_nodes_without_data_and_devices_change_nothing(name, key):
    algorithm, problem = METHODS[name], make_problem("sum")
    padded = problem.replace(data=problem.data.pad(nodes=K + 2))
    mesh = jax.make_mesh((2,), ("nodes",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    state, _ = mj.run(problem, algorithm, key, num_rounds=3, systems=SYSTEMS)
    wanted = models(algorithm, state, problem)
    for other in (padded, mj.shard(problem, mesh)):
        state, _ = mj.run(other, algorithm, key, num_rounds=3, systems=SYSTEMS)
        chex.assert_trees_all_close(models(algorithm, state, other), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ditto", "fine_tuned"])
@pytest.mark.slow
def test_a_solve_goes_on_from_its_checkpoint(name, key, tmp_path):
    problem, path = make_problem("sum"), tmp_path / "run.npz"

    def solve(rounds, **more):
        return mj.solve(problem, METHODS[name], key=key, tol=None, max_rounds=rounds, chunk=2, systems=SYSTEMS, **more)

    def fail(done, history):
        if done >= 4:
            raise KeyboardInterrupt

    whole = solve(6)
    with pytest.raises(KeyboardInterrupt):
        solve(6, checkpoint=path, callback=fail)
    resumed = solve(6, checkpoint=path)
    chex.assert_trees_all_equal(
        (whole.state, whole.weights, whole.history), (resumed.state, resumed.weights, resumed.history)
    )
    with pytest.raises(mj.CheckpointError, match="another run: its algorithm differs"):
        mj.solve(problem, METHODS["mr_mtl"], key=key, tol=None, max_rounds=6, chunk=2, systems=SYSTEMS, checkpoint=path)


@each_method
def test_algorithms_come_back_from_a_pickle(name):
    algorithm = METHODS[name]
    again = pickle.loads(pickle.dumps(algorithm))
    assert fingerprint(again) == fingerprint(algorithm)
    assert again.declared().method == algorithm.declared().method
    assert list(again.all_phases) == list(algorithm.all_phases)
    for a, b in zip(*map(jax.tree.leaves, (again, algorithm)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["ditto", "fedper", "ifca", "fedem", "fine_tuned", "apfl", "q_ffl"])
@pytest.mark.slow
def test_models_predict_by_name_and_come_back_from_their_files(name, tmp_path):
    problem, algorithm = make_problem("sum"), METHODS[name]
    solution = mj.solve(problem, algorithm, tol=None, max_rounds=3)
    model = solution.model
    model.save(tmp_path / "model.npz")
    read = mj.load_model(tmp_path / "model.npz")
    for k in range(K):
        x = problem.data.x[k, :4]
        wanted = algorithm.predict(solution.state, problem, k, x).mean
        for each in (model, read):
            np.testing.assert_allclose(each.predict_proba(np.asarray(x), k), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_by_its_name(name):
    algorithm = METHODS[name]
    assert repr(algorithm).startswith(f"{name}(model=")
    with pytest.raises(ValueError, match=rf"^{name}: local_epochs must be"):
        algorithm.replace(local_epochs=0)
    regression = mj.Problem(make_problem().data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
    with pytest.raises(ValueError, match=rf"^{name} solves a Prediction, got a Problem"):
        mj.solve(regression, algorithm)
    form, rule = mj.compression.TopK(0.1), mj.robust.Median()
    if name not in ("fedu", "fedamp"):
        assert repr(mj.compression.compressed(algorithm, form)).startswith(f"compressed {name}(")
    assert repr(mj.robust.combined(algorithm, rule)).startswith(f"{name} combined by Median(")


def test_settings_of_a_method_are_printed():
    assert ", strength=0.25, " in repr(P.ditto(MODEL, SGD, strength=0.25))
    with pytest.raises(ValueError, match="Composed: method must be"):
        P.Composed(MODEL, SGD, method="ditto")


@pytest.mark.parametrize("size", [K - 1, K + 1])
def test_a_graph_of_other_clients_is_refused(size, key):
    algorithm = P.fedu(MODEL, SGD, graph=np.ones((size, size)))
    with pytest.raises(ValueError, match=rf"fedu: graph must be \[m, m\], of (all|the) {K} clients; it is of {size}\."):
        mj.run(make_problem(), algorithm, key, num_rounds=1)


def test_bad_graphs_are_refused():
    with pytest.raises(ValueError, match="fedu: graph must be symmetric"):
        P.fedu(MODEL, SGD, graph=np.triu(np.ones((K, K))))
    with pytest.raises(ValueError, match="fedu: graph must be"):
        P.fedu(MODEL, SGD, graph=-GRAPH)


@pytest.mark.slow
def test_clients_without_a_rate_stay_where_they_are(key):
    algorithm, problem = P.per_fedavg(MODEL, SGD, rate=0.0, **OPTIONS), make_problem()
    state = algorithm.init(problem)
    chex.assert_trees_all_equal(models(algorithm, state, problem)[0], algorithm.begin(np.float64))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA drops barriers before it decides what to copy")
def test_the_turn_of_a_client_copies_no_others_parameters():
    """They would be as many copies of all clients' parameters as there are clients."""
    rng = np.random.default_rng(0)
    data = mj.pack_tasks([rng.normal(size=(6, 13)) for _ in range(17)], [rng.integers(0, 3, 6) for _ in range(17)])
    algorithm = mj.personalized.scaffold(mj.networks.MLP(13, 3, (7,)), optax.sgd(0.1), batch_size=3)
    run = jax.jit(lambda key: mj.run(mj.Prediction(data), algorithm, key, num_rounds=3, record_every=3)[0])
    text = str(run.lower(jax.random.key(0)).compile().as_text())
    inside = [part for part in re.split(r"\n(?=%?\w)", text) if not part.startswith("ENTRY")]
    assert len(inside) > 10
    assert not [part[:60] for part in inside if re.search(r"= f64\[17,13,7\]\S* copy\(", part)]
