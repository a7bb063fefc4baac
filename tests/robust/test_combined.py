"""Algorithms whose server combines by a rule."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests.federated import world
from tests.personalized import problems

R, PM = mj.robust, mj.personalized
SGD = optax.sgd(0.2)
LOCAL: Any = {"local_epochs": 2, "batch_size": 3}
WORLD = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.3, 1.0)
MAKE = {
    "FedAvg": lambda: mj.FedAvg(problems.MODEL, SGD, optax.adam(1e-2, eps=1e-3), proximal=0.2, **LOCAL),
    "scaffold": lambda: PM.scaffold(problems.MODEL, SGD, **LOCAL),
    "fedrep": lambda: PM.fedrep(problems.MODEL, SGD, fraction=0.7, **LOCAL),
    "ditto": lambda: PM.ditto(problems.MODEL, SGD, strength=0.5, **LOCAL),
    "q_ffl": lambda: PM.q_ffl(problems.MODEL, SGD, fairness=1.0, **LOCAL),
    "fedem": lambda: PM.fedem(problems.MODEL, SGD, **LOCAL),
}


@pytest.mark.parametrize("scaling", ["sum", "task_mean"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.thin(1)
@pytest.mark.extended
def test_the_mean_changes_nothing(name, scaling, key):
    algorithm, problem = MAKE[name](), problems.make_problem(scaling)
    plain, ruled = (mj.run(problem, a, key, num_rounds=4, systems=WORLD)
                    for a in (algorithm, R.combined(algorithm, R.Mean())))  # fmt: skip
    for part in ("shared", "kept", "own"):
        both = (jax.tree.leaves(getattr(state, part)) for state, _ in (plain, ruled))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(plain[1].loss, ruled[1].loss, rtol=1e-12)
    np.testing.assert_array_equal(plain[1].bytes_up, ruled[1].bytes_up)


@pytest.mark.extended
def test_a_rule_sees_the_clients_changes(key):
    problem = problems.make_problem()
    algorithm = mj.FedAvg(problems.MODEL, SGD, batch_size=None)
    begin = algorithm.init(problem)
    alone = [mj.run(problem, algorithm, key, num_rounds=1, state=begin, systems=only(k))[0].shared for k in range(4)]
    found, _ = mj.run(problem, R.combined(algorithm, R.Median()), key, num_rounds=1)
    for name in ("body", "head"):
        changes = np.stack([np.asarray(w[name]) - np.asarray(begin.shared[name]) for w in alone])
        after = np.asarray(begin.shared[name]) + np.median(changes, axis=0)
        np.testing.assert_allclose(found.shared[name], after, rtol=1e-9, atol=1e-12)


def only(client):
    others = [k for k in range(4) if k != client]
    return mj.systems.NeverAnswers(tuple(others))


@pytest.mark.parametrize("rule", [R.Median(), R.TrimmedMean(0.25), R.GeometricMedian(), R.Krum(2), R.Bulyan(1)])
@pytest.mark.thin(1)
def test_an_attack_that_ruins_the_mean_does_not_ruin_a_rule(rule, key):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 4))
    xs = [rng.normal(size=(30, 4)) for _ in range(9)]
    problem = mj.Prediction(mj.pack_tasks(xs, [(x @ centers.T).argmax(1) for x in xs], dtype=np.float64))
    algorithm = mj.FedAvg(mj.networks.MLP(4, 3), optax.sgd(0.5))
    bad = (1, 4)

    def error(rule, attack):
        attacked = R.combined(algorithm, R.Attacked(rule, attack, bad))
        return float(mj.run(problem, attacked, key, num_rounds=25)[1].error[-1])

    attack = R.SignFlip(10.0)
    assert error(R.Mean(), attack) > 0.4
    assert error(rule, attack) < 0.15


@pytest.mark.extended
def test_nodes_and_a_server_do_the_same(key):
    xs, ys = world.labels()
    model, likelihood = mj.networks.MLP(world.D, 3), mj.likelihoods.Categorical()
    algorithm = R.combined(mj.FedAvg(model, SGD, **LOCAL), R.TrimmedMean(0.25))
    problem = world.prediction_of(xs, ys)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    server = world.server_of(algorithm, None, scaling="sum")
    nodes = world.nodes_of(xs, ys, likelihood, algorithm, scaling="sum")
    there, _, _ = world.deployed(server, nodes, key, 3, [[-1] * world.M] * 3)
    for a, b in zip(*map(jax.tree.leaves, (there.inner.state.shared, state.shared)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
def test_it_goes_with_privacy(key):
    problem = problems.make_problem()
    private = mj.FedAvg(problems.MODEL, SGD).replace(privacy=mj.privacy.ExampleLevel(0.5, 3))
    algorithm = R.combined(private, R.Median())
    state, history = mj.run(problem, algorithm, key, num_rounds=5)
    assert (np.asarray(state.spent.steps) == 3).all()
    assert np.isnan(history.loss[-1])


@pytest.mark.parametrize("name", ["fedu", "fedamp"])
def test_a_server_that_sums_up_nothing_has_no_rule(name):
    own = {"graph": np.ones((4, 4)) - np.eye(4)} if name == "fedu" else {}
    algorithm = R.combined(getattr(PM, name)(problems.MODEL, SGD, **own), R.Median())
    with pytest.raises(ValueError, match="sums up none"):
        mj.run(problems.make_problem(), algorithm, jax.random.key(0), num_rounds=1)


def test_two_algorithms_with_one_rule_share_a_program():
    first, second = (R.combined(mj.FedAvg(problems.MODEL, SGD), R.Krum(1)) for _ in range(2))
    assert first.method == second.method


@pytest.mark.extended
def test_the_median_stands_for_the_mean_of_mean_regularised_models(key):
    rng, m, n, d, pull = np.random.default_rng(0), 5, 12, 3, 0.7
    xs = rng.normal(size=(m, n, d))
    ys = np.einsum("mnd,md->mn", xs, rng.normal(size=(m, d))) + 0.1 * rng.normal(size=(m, n))
    data = mj.pack_tasks(list(xs), list(ys), dtype=np.float64, loss_scaling="task_mean")
    problem = mj.Prediction(data, mj.likelihoods.Gaussian())
    algorithm = PM.mr_mtl(mj.networks.MLP(d, 1), optax.sgd(0.3), strength=pull, batch_size=None, local_epochs=30)
    state, _ = mj.run(problem, R.combined(algorithm, R.Median()), key, num_rounds=80)
    weights: Any = algorithm.weights(state)
    found = weights[0]

    # Each model minimises its loss and pull / 2 |w - c|^2, where c is the median of the models.
    ones = np.concatenate([xs, np.ones((m, n, 1))], axis=2)
    gram, right = np.einsum("mni,mnj->mij", ones, ones) / n, np.einsum("mni,mn->mi", ones, ys) / n
    center = np.zeros(d + 1)
    for _ in range(300):
        models = np.linalg.solve(gram + pull * np.eye(d + 1), (right + pull * center)[:, :, None])[:, :, 0]
        center = np.median(models, axis=0)
    np.testing.assert_allclose(np.concatenate([found.w[:, :, 0], found.b], axis=1), models, atol=1e-6)
    assert np.abs(center - models.mean(axis=0)).max() > 0.05


def test_what_no_rule_protects_is_refused(key):
    few = mj.compression.compressed(MAKE["FedAvg"](), mj.compression.Quantized())
    with pytest.raises(ValueError, match="combined: the clients' vectors are compressed"):
        R.combined(few, R.Median())
    afl = PM.afl(problems.MODEL, SGD, **LOCAL)
    with pytest.raises(ValueError, match="combined: the algorithm's server believes numbers of each client"):
        mj.run(problems.make_problem(), R.combined(afl, R.Median()), key, num_rounds=1)
