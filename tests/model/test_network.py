"""Networks predict by name what their algorithms predict by number, and come back from their files."""

import os
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax.networks._base import outputs
from tests.files.rewriting import rewritten

NAMES = ("fir", "ash", "oak")
SIZES = (20, 9, 33)
N = mj.networks


def table(standardize=None, dtype=np.float32, numbers=False, intercept=False):
    """Samples of three tasks by name, raw and packed."""
    rng = np.random.default_rng(0)
    xs = {name: rng.normal(size=(k, 4)) * [1.0, 5.0, 1.0, 1.0] + 2.0 for name, k in zip(NAMES, SIZES, strict=True)}
    if numbers:
        ys = {name: x[:, 0] + 7.0 * t for t, (name, x) in enumerate(xs.items())}
    else:
        ys = {name: np.where(x[:, 0] > 2.0, "yes", np.where(x[:, 2] > 2.0, "no", "so")) for name, x in xs.items()}
    data = mj.pack_tasks(xs, ys, dtype=dtype, intercept=intercept)
    return xs, data if standardize is None else data.standardized(standardize, labels=numbers)


def solved(make, network, problem, rounds=3, **more):
    algorithm = make(network, optax.adam(0.01), **more)
    return algorithm, mj.solve(problem, algorithm, key=jax.random.key(0), tol=None, max_rounds=rounds)


def rows_of(xs):
    return np.concatenate(list(xs.values())), np.repeat(NAMES, SIZES)


ALGORITHMS: dict[str, Any] = {
    "fedavg": (mj.FedAvg, N.MLP(4, 3, (5,)), {}),
    "fedprox": (mj.FedAvg, N.MLP(4, 3, (5,)), {"proximal": 0.1}),
    "fedsgd": (mj.FedAvg, N.MLP(4, 3), {"batch_size": None}),
    "local": (mj.Local, N.MLP(4, 3, (5,)), {}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow
def test_predictions_are_those_of_the_algorithm_by_name(name):
    xs, data = table(standardize="within")
    problem = mj.Prediction(data)
    make, network, more = ALGORITHMS[name]
    algorithm, solution = solved(make, network, problem, **more)
    model = solution.model
    x, who = rows_of(xs)
    order = np.random.default_rng(1).permutation(len(x))
    found, labels = model.predict_proba(x[order], who[order]), model.predict(x[order], who[order])
    want = np.concatenate([
        algorithm.predict(solution.state, problem, t, data.x[t, :k]).mean for t, k in enumerate(SIZES)
    ])  # fmt: skip
    np.testing.assert_allclose(found, want[order], rtol=1e-4, atol=1e-6)
    assert labels.tolist() == [data.names.classes[k] for k in found.argmax(1)]
    assert model.tasks == NAMES
    assert model.trained["error"] == pytest.approx(float(solution.quality.error))


@pytest.mark.slow
def test_virtual_predicts_by_the_means_of_its_posterior():
    xs, data = table()
    problem = mj.Prediction(data)
    algorithm, solution = solved(mj.Virtual, N.Lateral(4, 3, (5,)), problem, samples=1)
    model = solution.model
    for t, name in enumerate(NAMES):
        params = algorithm.parameters(solution.state, problem, t)
        want = jax.nn.softmax(outputs(algorithm.model, params, data.x[t, : SIZES[t]], (SIZES[t],)), axis=-1)
        np.testing.assert_allclose(model.predict_proba(xs[name], name), want, rtol=1e-5)
    # What is shared is saved once.
    assert [np.ndim(a) for a in jax.tree.leaves(model.parameters.shared)] == [2, 1]
    assert all(len(a) == 3 for a in jax.tree.leaves(model.parameters.private))


@pytest.mark.slow
def test_numbers_are_in_the_units_of_the_table():
    xs, data = table("within", numbers=True, intercept=True, dtype=np.float64)
    problem = mj.Prediction(data, mj.likelihoods.Gaussian(0.5))
    algorithm, solution = solved(mj.FedAvg, N.MLP(5, 1, (4,)), problem)
    level = data.scaling.level
    for t, name in enumerate(NAMES):
        own = algorithm.predict(solution.state, problem, t, data.x[t, : SIZES[t]]).mean[:, 0]
        np.testing.assert_allclose(solution.model.predict(xs[name], name), own + level[t], rtol=1e-10)
    with pytest.raises(ValueError, match="a Gaussian likelihood are numbers, which have no probabilities"):
        solution.model.predict_proba(xs["fir"], "fir")
    # The network is one for all, the units are not.
    with pytest.raises(ValueError, match="task 'yew' is not among the 3"):
        solution.model.predict(xs["fir"], "yew")


@pytest.mark.slow
def test_a_new_task_gets_the_servers_network_or_the_mean_of_predictions():
    xs, data = table()
    problem = mj.Prediction(data)
    model = solved(mj.FedAvg, N.MLP(4, 3), problem)[1].model
    x = xs["fir"]
    asked: dict[str, Any]
    for asked in ({}, {"task": "larch"}, {"task": "larch", "unseen": "mean"}, {"task": "ash"}):
        np.testing.assert_array_equal(model.predict_proba(x, **asked), model.predict_proba(x, "fir"))
    personal = solved(mj.Local, N.MLP(4, 3), problem)[1].model
    with pytest.raises(ValueError, match="say whose samples they are"):
        personal.predict(x)
    with pytest.raises(ValueError, match="task 'larch' is not among the 3 that are known"):
        personal.predict(x, "larch")
    want = np.mean([personal.predict_proba(x, name) for name in NAMES], axis=0)
    both = personal.predict_proba(x[:3], ["oak", "larch", "larch"], unseen="mean")
    np.testing.assert_allclose(both[1:], want[1:3], rtol=1e-6)
    np.testing.assert_array_equal(both[:1], personal.predict_proba(x[:1], "oak"))


READ = """
import sys, json
import numpy as np
import mocha_jax as mj
model = mj.load_model(sys.argv[1])
asked = np.load(sys.argv[2])
np.save(sys.argv[3], model.predict_proba(asked["x"], asked["who"]))
print(repr(model))
"""


@pytest.mark.parametrize(
    ("make", "network", "more"),
    [(mj.Local, N.MLP(4, 3, (5,)), {}), pytest.param(mj.Virtual, N.Lateral(4, 3, (5,)), {"samples": 1}, id="virtual")],
)
@pytest.mark.slow
def test_a_new_process_predicts_the_same_to_the_bit(make, network, more, tmp_path):
    # In double precision, which a new process does not have unless the model brings it.
    xs, data = table("pooled", dtype=np.float64)
    model = solved(make, network, mj.Prediction(data), rounds=2, **more)[1].model
    x, who = rows_of(xs)
    model.save(tmp_path / "m.npz")
    np.savez(tmp_path / "asked.npz", x=x, who=who)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_X64"}
    paths = [str(tmp_path / name) for name in ("m.npz", "asked.npz", "found.npy")]
    done = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, env=environment,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(model)
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), model.predict_proba(x, who))
    again = mj.load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.predict(x, who), model.predict(x, who))
    assert (again.names, again.trained, again.scaling) == (model.names, dict(model.trained), model.scaling)


NETWORKS: dict[str, Any] = {
    "mlp": (N.MLP(6, 3, (4,), 0.5), None), "cnn": (N.CNN((4, 4, 1), 2, (2, 3), 4), None),
    "lateral cnn": (N.LateralCNN((4, 4, 1), 2, (2, 3), 4), None), "lateral": (N.Lateral(6, 2, (3,)), None),
    "lstm": (N.LSTM(5, 2, 3, 1), mj.likelihoods.NextSymbol()),
    "labels": (N.LSTM(5, 2, 3, 2, 1), mj.likelihoods.Sequence(mj.likelihoods.Gaussian(0.5))),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thin(2)
def test_every_network_of_the_library_comes_back_from_its_file(name, tmp_path):
    network, likelihood = NETWORKS[name]
    likelihood = likelihood or mj.likelihoods.Categorical()
    width = 16 if "cnn" in name else 6
    params = jax.tree.map(lambda a: np.asarray(a, np.float32), network.init(jax.random.key(3)))
    model = mj.NetworkModel(network, params, width, likelihood)
    model.save(tmp_path / "m.npz")
    again, x = mj.load_model(tmp_path / "m.npz"), np.random.default_rng(0).integers(0, 4, (7, width))
    assert repr(again.network) == repr(network)
    assert repr(again.likelihood) == repr(likelihood)
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    labels = x.shape if isinstance(likelihood, mj.likelihoods.Positions) else x.shape[:1]
    said = likelihood.predictive(outputs(network, params, jnp.asarray(x, jnp.float32), labels))
    want = said.argmax(-1) if likelihood.classes else said[..., 0]
    np.testing.assert_allclose(again.predict(x), want, rtol=1e-5)
    assert model.predict(x[:0]).shape == (0, *model.predict(x).shape[1:])


@pytest.mark.slow
def test_a_language_model_predicts_symbols_at_every_position():
    rows = [np.random.default_rng(t).integers(0, 5, (6, 8)) for t in range(2)]
    problem = mj.Prediction(
        mj.pack_tasks(rows, [np.full(6, 7.0)] * 2, dtype="float32"), mj.likelihoods.NextSymbol()
    )  # fmt: skip
    algorithm, solution = solved(mj.FedAvg, N.LSTM(5, 2, 4, 1), problem, rounds=1)
    x = rows[0][:, :7]
    want = algorithm.predict(solution.state, problem, 0, x).mean
    np.testing.assert_allclose(solution.model.predict_proba(x), want, rtol=1e-5)
    assert solution.model.predict(x).shape == (6, 7)


def linear(w, x):
    return x @ w["w"] + w["deep"]["b"]


def begin(key):
    return {"w": jax.random.normal(key, (4, 3)), "deep": {"b": jnp.zeros(3)}}


@pytest.mark.slow
def test_a_network_of_ones_own_is_handed_to_load_model(tmp_path):
    xs, data = table()
    network, path = N.Model(lambda key: begin(key), lambda w, x: linear(w, x)), tmp_path / "m.npz"
    solution = solved(mj.FedAvg, network, mj.Prediction(data))[1]
    model = solution.model
    assert model.trained["network"] == "Model"
    model.save(path)
    assert {"parameters/w", "parameters/deep/b"} < set(np.load(path).files)
    with pytest.raises(ValueError, match=r"has a network of your own, Model, and a file holds no functions; pass it, "
                                         r"load_model\(path, network=...\)"):  # fmt: skip
        mj.load_model(path)
    again = mj.load_model(path, network=N.Model(begin, linear))
    np.testing.assert_array_equal(again.predict_proba(xs["fir"]), model.predict_proba(xs["fir"]))
    with pytest.raises(ValueError, match="the file has no parameter '0/w', which MLP wants"):
        mj.load_model(path, network=N.MLP(4, 3))
    # Of a solution the samples and the state can be pickled, functions without a name not.
    alone = pickle.loads(pickle.dumps(solution))
    with pytest.raises(AttributeError, match="pickled without its network"):
        alone.model  # noqa: B018
    found = alone.problem.network_model(network, alone.weights, {})
    np.testing.assert_array_equal(found.predict_proba(xs["fir"]), model.predict_proba(xs["fir"]))


class Own(mj.likelihoods.Categorical):
    """A likelihood that a person wrote."""


def test_a_likelihood_of_ones_own_is_handed_to_load_model(tmp_path):
    params = N.MLP(2, 2).init(jax.random.key(0))
    mj.NetworkModel(N.MLP(2, 2), params, 2, Own()).save(tmp_path / "m.npz")
    with pytest.raises(ValueError, match="has a likelihood of your own, Own"):
        mj.load_model(tmp_path / "m.npz")
    assert isinstance(mj.load_model(tmp_path / "m.npz", likelihood=Own()).likelihood, Own)


@pytest.mark.slow
def test_nothing_of_the_samples_is_in_it(tmp_path):
    _, data = table("pooled")
    model = solved(mj.Local, N.MLP(4, 3), mj.Prediction(data))[1].model
    model.save(tmp_path / "m.npz")
    shapes = {name: array.shape for name, array in np.load(tmp_path / "m.npz").items() if name != "about.json"}
    assert shapes == {
        "parameters/0/w": (3, 4, 3), "parameters/0/b": (3, 3),
        "scaling/mean": (1, 4), "scaling/scale": (1, 4), "scaling/level": (1,),
    }  # fmt: skip


@pytest.mark.slow
def test_nodes_beyond_the_tasks_are_left_out():
    xs, data = table()
    problem = mj.Prediction(data.pad(nodes=5))
    model = solved(mj.Local, N.MLP(4, 3), problem)[1].model
    assert [len(a) for a in jax.tree.leaves(model.parameters)] == [3, 3]
    shared = mj.Prediction(mj.pack_tasks([xs["fir"], xs["ash"]], [np.zeros(20), np.ones(9)], task=[0, 0]))
    solution = solved(mj.Local, N.MLP(4, 3), shared, rounds=1)[1]
    with pytest.raises(ValueError, match="several clients share a task and have networks of their own"):
        solution.model  # noqa: B018


def changed(path, **about):
    """Write the file anew, with something else in its text or among its arrays; one without numbers is left out."""

    def change(said, arrays):
        for name, value in about.items():
            (arrays if isinstance(value, np.ndarray) else said)[name] = value
        for name in [name for name, array in arrays.items() if not array.size]:
            del arrays[name]

    path.write_bytes(rewritten(path.read_bytes(), change))


BROKEN: dict[str, Any] = {
    "unknown network": ({"network": {"class": "Transformer"}}, "this library has no networks.Transformer"),
    "unknown setting": ({"network": {"class": "MLP", "features": 4, "outputs": 3, "experts": 9}}, "experts"),
    "other widths": ({"network": {"class": "MLP", "features": 4, "outputs": 7}}, r"'0/w' must be \[4, 7\] numbers"),
    "no parameter": ({"parameters/0/b": np.zeros(0)}, "the file has no parameter '0/b', which MLP wants"),
    "another": ({"parameters/9/b": np.zeros(2)}, "the file has a parameter '9/b', which MLP has not"),
    "no scaling": ({"scaled": "pooled"}, "scaling"),
    "kind": ({"model": "forest"}, "this library knows no models of the kind 'forest'"),
    "no likelihood": ({"likelihood": {"class": "MLP"}}, "has no likelihoods.MLP"),
    "tasks": ({"tasks": ["a"]}, "all must be of the same tasks, but there are of parameters 3, names 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_a_sentence(name, tmp_path):
    path, (about, message) = tmp_path / "m.npz", BROKEN[name]
    params = jax.tree.map(lambda a: np.stack([a] * 3), N.MLP(4, 3).init(jax.random.key(0)))
    mj.NetworkModel(N.MLP(4, 3), params, 4, names=mj.Names(NAMES)).save(path)
    changed(path)
    mj.load_model(path)
    changed(path, **about)
    with pytest.raises(ValueError, match="lacks a part of a model, or it is damaged: .*" + message):
        mj.load_model(path)


def test_a_linear_model_takes_no_network(tmp_path):
    mj.LinearModel(np.eye(2), np.zeros(2)).save(tmp_path / "m.npz")
    with pytest.raises(ValueError, match="it is a linear model, which has no network"):
        mj.load_model(tmp_path / "m.npz", network=N.MLP(2, 2))


PARAMS = jax.tree.map(np.asarray, N.MLP(4, 3).init(jax.random.key(0)))
BAD = {
    "tree": (lambda: mj.NetworkModel(N.MLP(4, 3), [np.ones(2)], 4), "parameters must be a tree of arrays as network.init"),
    "width": (lambda: mj.NetworkModel(N.MLP(4, 3), PARAMS, 5), "MLP cannot predict samples of 5 features"),
    "classes": (lambda: mj.NetworkModel(N.MLP(4, 3), PARAMS, 4, names=mj.Names(classes=("a", "b"))),
                "names has 2 classes, and the network 3 outputs; give it one for each class"),
    "features": (lambda: mj.NetworkModel(N.MLP(4, 3), PARAMS, 4, names=mj.Names(features=("a",))),
                 "names has 1 features, and a sample 4"),
    "samples": (lambda: mj.NetworkModel(N.MLP(4, 3), PARAMS, 4).predict(np.ones((2, 3))),
                r"x must be samples \[k, 4\] of numbers"),
    "numbers": (lambda: mj.NetworkModel(N.MLP(4, 3), PARAMS, 4, mj.likelihoods.Gaussian()),
                "Gaussian needs a model with one output, not 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
