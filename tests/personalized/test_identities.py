"""Settings with which a personalized method is federated averaging, or training alone, batch for batch."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax.systems._base import Work
from tests.personalized.problems import CLASSES, D, K, make_problem

P: Any = mj.personalized
MODEL = mj.networks.MLP(D, CLASSES)
SGD = optax.sgd(0.3, momentum=0.5)
OPTIONS: Any = {"local_epochs": 2, "server_optimizer": optax.sgd(0.8, momentum=0.5), "rate": 0.9}
PLAIN: Any = {"local_epochs": 2, "rate": 0.9}  # where the server has no optimizer
BATCHES = {"batches": 3, "full": None}
ROUNDS = ([0, 1, 3], [1, 2, 3], [0, 2, 3])  # the clients that answer


def simulated(algorithm, problem, state=None):
    """The state after rounds in which these clients answer, one of them with half of its work in the first."""
    step = jax.jit(lambda key, state, budget: algorithm.step(key, state, problem, Work(budget, budget > 0))[0])
    full, state = np.asarray(algorithm.full_work(problem)), algorithm.init(problem) if state is None else state
    for r, chosen in enumerate(ROUNDS):
        budget = np.where(np.isin(np.arange(len(full)), chosen), full, 0)
        if r == 0:
            budget[1:2] //= 2
        state = step(jax.random.key(r), state, jnp.asarray(budget, jnp.int32))
    return state


def fedavg(batch, model=MODEL, **options):
    return mj.FedAvg(model, SGD, batch_size=batch, **(options or OPTIONS))


def same(ours, wanted):
    chex.assert_trees_all_close(ours, wanted, rtol=1e-10, atol=1e-12)


def same_rounds(ours, wanted):
    same((ours.shared, ours.kept, ours.loss), (wanted.shared, wanted.kept, wanted.loss))


def with_batches(default=""):
    """Mini-batches and all samples at once; the one named is in the default tests."""
    cases = [
        pytest.param(size, marks=() if name == default else pytest.mark.slow, id=name) for name, size in BATCHES.items()
    ]
    return pytest.mark.parametrize("batch", cases)


ROUNDS_OF_FEDAVG: dict[str, Any] = {
    "declared": lambda **o: P.Composed(MODEL, SGD, method=P.Method(P.first_model, P.send_change, P.averaged), **o),
    "fine_tuned": lambda **o: P.fine_tuned(MODEL, SGD, tuning_epochs=1, **o),
    "per_fedavg": lambda **o: P.per_fedavg(MODEL, SGD, inner_rate=0.0, **o),
    "per_fedavg, second order": lambda **o: P.per_fedavg(MODEL, SGD, inner_rate=0.0, second_order=True, **o),
    "ditto": lambda **o: P.ditto(MODEL, SGD, strength=0.7, **o),  # its two phases are cut alike
}


@with_batches()
@pytest.mark.parametrize("name", ROUNDS_OF_FEDAVG)
@pytest.mark.slow
def test_rounds_are_those_of_fedavg(name, batch):
    problem = make_problem("sum")
    ours = simulated(ROUNDS_OF_FEDAVG[name](batch_size=batch, **OPTIONS), problem)
    same_rounds(ours, simulated(fedavg(batch), problem))


@with_batches("batches")
@pytest.mark.extended
def test_ditto_with_a_pull_without_bounds_keeps_the_model_of_fedavg(batch):
    problem, pull = make_problem("sum"), 1e8
    algorithm = P.ditto(
        MODEL,
        SGD,
        strength=pull,
        personal_optimizer=optax.sgd(1.0 / (OPTIONS["rate"] * pull)),
        batch_size=batch,
        **OPTIONS,
    )
    ours = mj.run(problem, algorithm, jax.random.key(0), num_rounds=3)[0].own
    # The model of FedAvg that the clients received in the third round.
    received = mj.run(problem, fedavg(batch), jax.random.key(0), num_rounds=2)[0].shared
    for k in range(K):
        mine = jax.tree.map(lambda a, k=k: a[k], ours)
        chex.assert_trees_all_close(mine, received, rtol=1e-6, atol=1e-7)


@with_batches("full")
@pytest.mark.extended
def test_apfl_without_its_own_model_predicts_as_fedavg(batch):
    problem = make_problem("sum")
    algorithm, wanted = P.apfl(MODEL, SGD, mixing=0.0, batch_size=batch, **OPTIONS), simulated(fedavg(batch), problem)
    ours = simulated(algorithm, problem)
    same((ours.shared, ours.kept), (wanted.shared, wanted.kept))
    for k in range(K):
        same(algorithm.parameters(ours, problem, k), wanted.shared)


@with_batches()
@pytest.mark.parametrize("name", ["ifca", "fedem"])
def test_one_component_is_fedavg(name, batch):
    problem = make_problem("sum")
    size = {"ifca": "clusters", "fedem": "components"}[name]
    ours = getattr(P, name)(MODEL, SGD, batch_size=batch, **{size: 1}, **OPTIONS)
    state, plain = ours.init(problem), fedavg(batch)
    begin = plain.init(problem).replace(shared=jax.tree.map(lambda a: a[0], state.shared))
    after, wanted = simulated(ours, problem, state), simulated(plain, problem, begin)
    same(jax.tree.map(lambda a: a[0], after.shared), wanted.shared)
    same(after.loss, wanted.loss)
    shares = ours.parameters(ours.resume(after, problem), problem, 2).shares
    np.testing.assert_allclose(shares, [1.0], rtol=1e-12)


@with_batches()
def test_q_ffl_without_fairness_is_fedavg_whatever_its_constant(batch):
    problem = make_problem("sum")
    wanted = simulated(fedavg(batch, **PLAIN), problem)
    for lipschitz in (0.5, 20.0):
        ours = P.q_ffl(MODEL, SGD, fairness=0.0, lipschitz=lipschitz, batch_size=batch, **PLAIN)
        after = simulated(ours, problem)
        same((after.shared, after.loss), (wanted.shared, wanted.loss))


@with_batches()
def test_scaffold_of_one_client_is_fedavg(batch):
    problem = make_problem("sum").merged()
    ours = simulated(P.scaffold(MODEL, SGD, batch_size=batch, **OPTIONS), problem)
    wanted = simulated(fedavg(batch), problem)
    same((ours.shared.model, ours.kept, ours.loss), (wanted.shared, wanted.kept, wanted.loss))
    assert float(jnp.max(jnp.abs(ours.shared.control[0].w))) > 0.01


@with_batches()
def test_afl_of_one_client_is_fedavg_and_predicts_by_the_average_of_rounds(batch):
    problem = make_problem("sum").merged()
    algorithm, plain = P.afl(MODEL, SGD, batch_size=batch, **PLAIN), fedavg(batch, **PLAIN)
    step = [jax.jit(lambda key, s, a=a: a.step(key, s, problem, Work(a.full_work(problem), jnp.ones(1, bool)))[0])
            for a in (algorithm, plain)]  # fmt: skip
    ours, wanted, models = algorithm.init(problem), plain.init(problem), []
    same(algorithm.weights(ours), wanted.shared)
    for r in range(3):
        ours, wanted = (f(jax.random.key(r), s) for f, s in zip(step, (ours, wanted), strict=True))
        models.append(wanted.shared)
        same(ours.shared, wanted.shared)
    same(algorithm.weights(ours), jax.tree.map(lambda *a: sum(a) / 3.0, *models))


def with_an_idle_part():
    """A network whose private part takes no part in predictions: all that counts is shared."""

    def initialise(key):
        return {"idle": jnp.ones(2), "w": MODEL.init(key)}

    return mj.networks.Model(initialise, lambda params, x: MODEL.apply(params["w"], x))


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedbn", "fedrep"])
@pytest.mark.slow
def test_methods_in_two_parts_with_an_idle_private_part_are_fedavg(name):
    problem, model = make_problem("sum"), with_an_idle_part()
    options = OPTIONS | {"body_epochs": 2} if name == "fedrep" else OPTIONS
    algorithm = getattr(P, name)(model, SGD, private=("idle",), batch_size=None, **options)
    ours, wanted = simulated(algorithm, problem), simulated(fedavg(None, model), problem)
    same(ours.shared["w"], wanted.shared["w"])
    assert ours.shared["idle"] is None
    same(ours.own["idle"], jnp.ones((K, 2)))


ALONE: dict[str, Any] = {
    "ditto": lambda opt, **o: P.ditto(MODEL, opt, strength=0.0, **o),
    "mr_mtl": lambda opt, **o: P.mr_mtl(MODEL, opt, strength=0.0, **o),
    "fedamp": lambda opt, **o: P.fedamp(MODEL, opt, strength=0.0, **o),
    "fedu": lambda opt, **o: P.fedu(MODEL, opt, graph=np.ones((K, K)), strength=0.0, **o),
    "fedu, no neighbours": lambda opt, **o: P.fedu(MODEL, opt, graph=np.eye(K), **o),
}


@with_batches()
@pytest.mark.parametrize("name", ALONE)
def test_clients_that_nothing_pulls_train_alone(name, batch):
    if name == "ditto" and batch is not None:
        pytest.skip("its second phase has batches of its own")
    problem, optimizer = make_problem("sum"), optax.sgd(0.3)
    algorithm = ALONE[name](optimizer, batch_size=batch, **PLAIN)
    local = mj.Local(MODEL, optimizer, batch_size=batch, **PLAIN)
    begin = local.init(problem)
    models = jax.tree.map(lambda a: jnp.broadcast_to(a, (K, *a.shape)), local.begin(np.float64))
    wanted = simulated(local, problem, begin.replace(own=(models, *begin.own[1:]))).own[0]
    ours = simulated(algorithm, problem)
    same(algorithm.weights(ours), wanted)
    assert float(jnp.std(wanted[0].w, axis=0).min()) > 0.01
