"""Two rounds of each method, with clients that drop out, against the oracle written from its paper."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax.systems._base import Work
from tests.personalized import oracles
from tests.personalized.problems import MODEL, K, Oracle, make_problem, predict

P: Any = mj.personalized
ROUNDS = ([0, 1, 3], [1, 2, 3])  # the clients that answer
LR, STEPS = 0.3, 3
SGD = optax.sgd(LR)
LOCAL: Any = {"local_epochs": STEPS, "batch_size": None}


def simulated(algorithm, scaling, rounds):
    """The state after rounds in which only these clients answer."""
    problem = make_problem(scaling)
    step = jax.jit(lambda key, state, budget: algorithm.step(key, state, problem, Work(budget, budget > 0))[0])
    full, state = np.asarray(algorithm.full_work(problem)), algorithm.init(problem)
    for r, chosen in enumerate(rounds):
        budget = np.where(np.isin(np.arange(K), chosen), full, 0)
        state = step(jax.random.key(r), state, jnp.asarray(budget, jnp.int32))
    return algorithm.resume(state, problem), problem


def checked(algorithm, state, round_of, model_of, scaling="task_mean", rounds=ROUNDS):
    """Assert that every client predicts by the oracle's model."""
    after, problem = simulated(algorithm, scaling, rounds)
    for chosen in rounds:
        state = round_of(state, chosen)
    for k in range(K):
        model = jax.tree.map(np.asarray, algorithm.parameters(after, problem, k))
        chex.assert_trees_all_close(plain(model), model_of(state, k), rtol=1e-9, atol=1e-11)
    return after, state


def plain(model):
    """A network's parameters as a dict, whichever parts they are in."""
    if isinstance(model, mj.networks.SplitParameters):
        return {
            name: model.shared[name] if model.private[name] is None else model.private[name] for name in model.shared
        }
    return model


def first(node=0, model=MODEL):
    """The first parameters of a draw."""
    return jax.tree.map(np.asarray, mj.FedAvg(model, SGD).begin(np.float64, node))


F = Oracle()


@pytest.mark.extended
def test_fine_tuning():
    algorithm = P.fine_tuned(MODEL, SGD, tuning_epochs=2, **LOCAL)
    checked(
        algorithm, oracles.start_of_fedavg(first()),
        lambda s, chosen: oracles.round_of_fedavg(s, chosen, F.grad, weights=F.weights, steps=STEPS, lr=LR),
        lambda s, k: oracles.model_of_fedavg(s, k, F.grad, steps=2, lr=LR), "sum",
    )  # fmt: skip


def test_ditto():
    algorithm = P.ditto(MODEL, SGD, strength=0.7, personal_optimizer=optax.sgd(0.2), personal_epochs=2, **LOCAL)
    checked(
        algorithm, oracles.start_of_ditto(first(), K),
        lambda s, chosen: oracles.round_of_ditto(s, chosen, F.grad, steps=STEPS, lr=LR, lam=0.7, own_steps=2, own_lr=0.2,
                                                 share=F.weights),
        oracles.model_of_ditto, "sum",
    )  # fmt: skip


@pytest.mark.extended
def test_mr_mtl():
    algorithm = P.mr_mtl(MODEL, SGD, strength=0.7, **LOCAL)
    checked(
        algorithm, oracles.start_of_mrmtl(first(), K),
        lambda s, chosen: oracles.round_of_mrmtl(s, chosen, F.grad, steps=STEPS, lr=LR, lam=0.7, share=F.weights),
        oracles.model_of_mrmtl, "sum",
    )  # fmt: skip


@pytest.mark.extended
def test_pfedme():
    algorithm = P.pfedme(MODEL, SGD, strength=0.7, inner_steps=4, inner_rate=0.2, server_optimizer=optax.sgd(1.5),
                         rate=0.5, **LOCAL)  # fmt: skip
    checked(
        algorithm, oracles.start_of_pfedme(first(), K),
        lambda s, chosen: oracles.round_of_pfedme(s, chosen, F.grad, steps=STEPS, lr=0.5 * LR, lam=0.7, inner_steps=4,
                                                  inner_lr=0.2, beta=1.5, share=F.weights),
        oracles.model_of_pfedme, "sum",
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedbn"])
@pytest.mark.thin(1)
def test_parts_that_stay_at_the_client(name):
    shared = "head" if name == "lg_fedavg" else "body"
    paths = ("head",) if name == "fedbn" else None
    algorithm = getattr(P, name)(MODEL, SGD, private=paths, **LOCAL)
    round_of = getattr(oracles, f"round_of_{name}")
    options = {"steps": STEPS, "lr": LR, **({"share": F.weights} if name == "fedbn" else {"weights": F.weights})}
    after, _ = checked(algorithm, oracles.start_of_partial(first(), K, {shared}), lambda s, chosen: round_of(s, chosen, F.grad, **options),
                       oracles.model_of_partial, "sum")  # fmt: skip
    weights, private = algorithm.weights(after), "body" if shared == "head" else "head"
    # The shared part once, the others with a row for each client.
    assert weights.shared[shared].ndim == 2
    assert len(weights.private[private]) == K


@pytest.mark.extended
def test_a_device_that_lg_fedavg_has_not_seen_gets_the_mean_of_all_models():
    algorithm = P.lg_fedavg(MODEL, SGD, **LOCAL)
    model = mj.solve(make_problem("sum"), algorithm, tol=None, max_rounds=1).model
    state = oracles.round_of_lg_fedavg(
        oracles.start_of_partial(first(), K, {"head"}), range(K), F.grad, steps=STEPS, lr=LR, weights=F.weights
    )
    x = np.concatenate(F.xs)
    each = [jax.nn.softmax(predict(w, x)) for w in oracles.new_client_of_lg_fedavg(state)]
    found = model.predict_proba(x, [K] * len(x), unseen="mean")
    np.testing.assert_allclose(found, np.mean(each, axis=0), rtol=1e-9)


@pytest.mark.extended
def test_fedrep():
    algorithm = P.fedrep(MODEL, SGD, body_epochs=2, **LOCAL)
    checked(
        algorithm, oracles.start_of_partial(first(), K, {"body"}),
        lambda s, chosen: oracles.round_of_fedrep(s, chosen, F.grad, head_steps=STEPS, lr=LR, body_steps=2,
                                                  share=F.weights),
        oracles.model_of_partial, "sum",
    )  # fmt: skip


def test_scaffold():
    algorithm = P.scaffold(MODEL, SGD, server_optimizer=optax.sgd(0.8), **LOCAL)
    after, state = checked(
        algorithm, oracles.start_of_scaffold(first(), K),
        lambda s, chosen: oracles.round_of_scaffold(s, chosen, F.grad, steps=STEPS, lr=LR, server_lr=0.8),
        lambda s, k: oracles.model_of_scaffold(s),
    )  # fmt: skip
    means = jax.tree.map(lambda a: a.mean(0), after.own)
    chex.assert_trees_all_close(after.shared.control, means, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
def test_feddyn():
    algorithm = P.feddyn(MODEL, SGD, strength=0.4, **LOCAL)
    checked(
        algorithm, oracles.start_of_feddyn(first(), K),
        lambda s, chosen: oracles.round_of_feddyn(s, chosen, F.grad, steps=STEPS, lr=LR, alpha=0.4),
        lambda s, k: oracles.model_of_feddyn(s),
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("order", ["first", "hessian_free"])
@pytest.mark.thin(2)
def test_per_fedavg(order):
    algorithm = P.per_fedavg(MODEL, SGD, inner_rate=0.2, second_order=order != "first", tuning_steps=2, **LOCAL)
    options = {"steps": STEPS, "alpha": 0.2, "beta": LR, "share": F.weights, "order": order}
    # The finite difference of the paper is the exact product but for the square of its step.
    start = oracles.start_of_perfedavg(first())
    after, problem = simulated(algorithm, "sum", ROUNDS)
    for chosen in ROUNDS:
        start = oracles.round_of_perfedavg(start, chosen, F.grad, delta=1e-4, **options)
    for k in range(K):
        wanted = oracles.model_of_perfedavg(start, k, F.grad, alpha=0.2, steps=2)
        chex.assert_trees_all_close(algorithm.parameters(after, problem, k), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.extended
@pytest.mark.parametrize("rate", [0.4, 0.0])
@pytest.mark.thin(1)
def test_apfl(rate):
    algorithm = P.apfl(MODEL, SGD, mixing=0.3, mixing_rate=rate, **LOCAL)

    def round_of(state, chosen):
        shares = state["alpha"].copy()
        for k in chosen:
            own, model = state["own"][k], state["model"]
            slope = oracles.inner(oracles.minus(own, model), F.grad(k, oracles.model_of_apfl(state, k)))
            shares[k] = np.clip(shares[k] - rate * slope, 0.0, 1.0)
        moved = state | {"alpha": shares}
        return oracles.round_of_apfl(moved, chosen, F.grad, steps=STEPS, lr=LR, share=F.weights)

    after, state = checked(algorithm, oracles.start_of_apfl(first(), K, 0.3), round_of, oracles.model_of_apfl, "sum")
    assert (np.abs(np.asarray(after.own.share) - 0.3) > 1e-3).any() == (rate > 0)
    np.testing.assert_allclose(after.own.share, state["alpha"], rtol=1e-9)


@pytest.mark.extended
def test_ifca():
    algorithm = P.ifca(MODEL, SGD, clusters=2, **LOCAL)
    components = algorithm.begin(np.float64).components
    firsts = [jax.tree.map(lambda a, j=j: np.asarray(a[j]), components) for j in range(2)]
    after, problem = simulated(algorithm, "sum", ROUNDS)
    state = oracles.start_of_ifca(firsts)
    clusters = set()
    for chosen in ROUNDS:
        clusters |= {oracles.cluster_of_ifca(state, k, F.loss) for k in chosen}
        state = oracles.round_of_ifca(state, chosen, F.grad, F.loss, lr=LR, steps=STEPS, share=F.weights)
    assert clusters == {0, 1}
    for k in range(K):
        params = algorithm.parameters(after, problem, k)
        mark = int(jnp.argmax(params.shares))
        chosen = jax.tree.map(lambda a, j=mark: np.asarray(a[j]), params.components)
        chex.assert_trees_all_close(chosen, oracles.model_of_ifca(state, k, F.loss), rtol=1e-9, atol=1e-11)


def test_fedem():
    algorithm = P.fedem(MODEL, SGD, components=2, **LOCAL)
    components = algorithm.begin(np.float64).components
    state = oracles.start_of_fedem([jax.tree.map(lambda a, j=j: np.asarray(a[j]), components) for j in range(2)], K)
    after, problem = simulated(algorithm, "sum", ROUNDS)
    for chosen in ROUNDS:
        state = oracles.round_of_fedem(state, chosen, F.sample_losses, F.weighted_grad, weights=F.weights, steps=STEPS,
                                       lr=LR)  # fmt: skip
    for k in range(K):
        params = algorithm.parameters(after, problem, k)
        shares, models = oracles.model_of_fedem(state, k)
        np.testing.assert_allclose(params.shares, shares, rtol=1e-9)
        for j, model in enumerate(models):
            mine = jax.tree.map(lambda a, j=j: a[j], params.components)
            chex.assert_trees_all_close(mine, model, rtol=1e-9, atol=1e-11)


@pytest.mark.extended
def test_fedu():
    graph = np.abs(np.random.default_rng(0).normal(size=(K, K)))
    graph = graph + graph.T
    algorithm = P.fedu(MODEL, SGD, graph=graph, strength=0.2, server_rate=0.5, **LOCAL)
    checked(
        algorithm, oracles.start_of_fedu(first(), K),
        lambda s, chosen: oracles.round_of_fedu(s, chosen, F.grad, graph, steps=STEPS, lr=LR, eta=0.2, server_lr=0.5),
        oracles.model_of_fedu,
    )  # fmt: skip


@pytest.mark.extended
def test_fedamp():
    algorithm = P.fedamp(MODEL, SGD, strength=0.3, attention=0.2, sharpness=0.8, **LOCAL)
    checked(
        algorithm, oracles.start_of_fedamp([first()] * K),
        lambda s, chosen: oracles.round_of_fedamp(s, chosen, F.grad, steps=STEPS, lr=LR, lam=0.3, sigma=0.8, alpha=0.2),
        oracles.model_of_fedamp, rounds=(list(range(K)),) * 3,
    )  # fmt: skip


@pytest.mark.extended
def test_q_ffl():
    algorithm = P.q_ffl(MODEL, SGD, fairness=1.5, lipschitz=4.0, **LOCAL)
    checked(
        algorithm, oracles.start_of_qffl(first()),
        lambda s, chosen: oracles.round_of_qfedavg(s, chosen, F.grad, F.loss, q=1.5, lipschitz=4.0, steps=STEPS, lr=LR),
        lambda s, k: oracles.model_of_qffl(s),
    )  # fmt: skip


@pytest.mark.extended
def test_afl():
    algorithm = P.afl(MODEL, SGD, mixture_rate=0.2, batch_size=None)
    after, state = checked(
        algorithm, oracles.start_of_afl(first(), K),
        lambda s, chosen: oracles.round_of_afl(s, chosen, F.grad, F.loss, lr=LR, mixture_lr=0.2),
        lambda s, k: oracles.model_of_afl(s), rounds=(list(range(K)),) * 3,
    )  # fmt: skip
    np.testing.assert_allclose(after.rows, state["mixture"], rtol=1e-9)


@pytest.mark.parametrize("make", [P.fine_tuned, P.per_fedavg])
@pytest.mark.thin(1)
@pytest.mark.extended
def test_a_state_of_a_run_is_judged_by_tuned_models(make, key):
    """Scores and predictions tune anew; weights, which cannot without samples, are NaN until `resume`."""
    problem, algorithm = make_problem(), make(MODEL, SGD, batch_size=4)
    state, history = mj.run(problem, algorithm, key, num_rounds=2)
    resumed = algorithm.resume(state, problem)
    with pytest.warns(UserWarning, match=f"{algorithm.name}: the weights are NaN"):
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(algorithm.weights(state)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(algorithm.weights(resumed)))
    scores = [algorithm.scores(s, problem) for s in (state, resumed)]
    assert np.isfinite(scores[0].loss).all()
    np.testing.assert_allclose(scores[0].loss, scores[1].loss, rtol=1e-12)
    np.testing.assert_allclose(scores[0].error.mean(), history.error[-1])
    both = [algorithm.predict(s, problem, 1, problem.data.x[1]).mean for s in (state, resumed)]
    np.testing.assert_array_equal(*both)
    after, _ = mj.run(problem, algorithm, key, num_rounds=1, state=resumed)
    with pytest.warns(UserWarning, match="the weights are NaN"):
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(algorithm.weights(after)))


@pytest.mark.parametrize("name", ["feddyn", "fedu", "fedamp", "q_ffl", "afl"])
def test_a_server_whose_step_is_its_own_takes_no_optimizer(name):
    own = {"graph": np.ones((K, K))} if name == "fedu" else {}
    with pytest.raises(ValueError, match=f"{name}: .* leave server_optimizer out"):
        getattr(P, name)(MODEL, SGD, server_optimizer=optax.sgd(0.5), **own)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("ditto", {"batch_size": 3, "local_epochs": 2}), ("scaffold", {"client_optimizer": optax.sgd(0.1)}),
     ("pfedme", {"client_optimizer": optax.sgd(0.1)})],
)  # fmt: skip
@pytest.mark.extended
def test_replaced_settings_are_those_of_all_phases(name, changes, key):
    optimizer = changes.get("client_optimizer", SGD)
    replaced = getattr(P, name)(MODEL, SGD).replace(**changes)
    options = {k: v for k, v in changes.items() if k != "client_optimizer"}
    made, problem = getattr(P, name)(MODEL, optimizer, **options), make_problem()
    np.testing.assert_array_equal(replaced.full_work(problem), made.full_work(problem))
    states = [mj.run(problem, algorithm, key, num_rounds=1)[0] for algorithm in (replaced, made)]
    chex.assert_trees_all_equal(states[0].own, states[1].own)


@pytest.mark.extended
def test_rows_of_padding_are_never_predicted(key):
    """Batches drawn and losses of samples see real rows alone: a model may divide by a sample's norm."""
    model = mj.networks.Model(
        lambda key: 0.1 * jnp.ones((3, 3)), lambda w, x: x @ w / jnp.linalg.norm(x, axis=1)[:, None]
    )
    problem = make_problem()
    assert (np.asarray(problem.data.weight) == 0).any()
    for algorithm in (P.per_fedavg(model, SGD, batch_size=None), P.apfl(model, SGD, mixing_rate=0.1, batch_size=None)):
        state, _ = mj.run(problem, algorithm, key, num_rounds=1)
        assert state.diverged == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.shared))


NEW: dict[str, Any] = {
    "ditto": (
        P.ditto(MODEL, SGD, strength=0.7, **LOCAL), 1, oracles.start_of_ditto(first(), K),
        lambda s, chosen: oracles.round_of_ditto(s, chosen, F.grad, steps=STEPS, lr=LR, lam=0.7, own_steps=STEPS,
                                                 own_lr=LR, share=F.weights),
        lambda s, k: oracles.new_client_of_ditto(s, k, F.grad, steps=STEPS, lr=LR, lam=0.7),
    ),
    "fedrep": (
        P.fedrep(MODEL, SGD, **LOCAL), 1, oracles.start_of_partial(first(), K, {"body"}),
        lambda s, chosen: oracles.round_of_fedrep(s, chosen, F.grad, head_steps=STEPS, lr=LR, share=F.weights),
        lambda s, k: oracles.new_client_of_fedrep(s, k, F.grad, {"head": first()["head"]}, head_steps=STEPS, lr=LR),
    ),
    "per_fedavg": (
        P.per_fedavg(MODEL, SGD, inner_rate=0.2, **LOCAL), 0, oracles.start_of_perfedavg(first()),
        lambda s, chosen: oracles.round_of_perfedavg(s, chosen, F.grad, steps=STEPS, alpha=0.2, beta=LR,
                                                     share=F.weights),
        lambda s, k: oracles.new_client_of_perfedavg(s, k, F.grad, alpha=0.2),
    ),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", NEW)
def test_new_clients(name):
    algorithm, rounds, state, round_of, wanted = NEW[name]
    after, problem = simulated(algorithm, "sum", ROUNDS)
    for chosen in ROUNDS:
        state = round_of(state, chosen)
    joined = algorithm.join(after, problem, jax.random.key(9), rounds=rounds)
    for k in range(K):
        model = jax.tree.map(np.asarray, algorithm.parameters(joined, problem, k))
        chex.assert_trees_all_close(plain(model), wanted(state, k), rtol=1e-9, atol=1e-11)


@pytest.mark.extended
def test_new_clients_of_fedem():
    algorithm = P.fedem(MODEL, SGD, components=2, **LOCAL)
    after, problem = simulated(algorithm, "sum", ROUNDS)
    joined = algorithm.join(after, problem, jax.random.key(9), rounds=3)
    for k in range(K):
        params = algorithm.parameters(joined, problem, k)
        models = [jax.tree.map(lambda a, j=j: np.asarray(a[j]), params.components) for j in range(2)]
        shares, _ = oracles.new_client_of_fedem({"models": models}, k, F.sample_losses, rounds=3)
        np.testing.assert_allclose(params.shares, shares, rtol=1e-9)
        chex.assert_trees_all_close(params.components, algorithm.parameters(after, problem, k).components)
