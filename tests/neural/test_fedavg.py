"""FedAvg and its settings against loops written here, on any number of devices and in any order."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests.neural.problems import MODEL, make_problem, mean_loss, rows


def one_round(algorithm, problem, key, state=None):
    return mj.run(problem, algorithm, key, num_rounds=1, state=state)


@pytest.mark.extended
def test_a_full_batch_is_fedsgd(key):
    problem, eta = make_problem(), 0.3
    algorithm = mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    params = algorithm.init(problem).shared
    sizes = np.asarray(problem.data.sizes, float)
    for _ in range(3):
        gradients = [jax.grad(mean_loss)(params, *rows(problem.data, k)) for k in range(5)]
        average = jax.tree.map(
            lambda *g: sum(float(n) * a for n, a in zip(sizes, g, strict=True)) / float(sizes.sum()), *gradients
        )
        params = jax.tree.map(lambda p, g: p - eta * g, params, average)
    chex.assert_trees_all_close(state.shared, params, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.slow
def test_epochs_of_fedprox_are_a_loop(mu, key):
    problem, eta, epochs = make_problem(), 0.2, 3
    algorithm = mj.FedAvg(MODEL, optax.sgd(eta), local_epochs=epochs, batch_size=None, proximal=mu)
    state, _ = one_round(algorithm, problem, key)
    start, sizes = algorithm.init(problem).shared, np.asarray(problem.data.sizes, float)

    def loss(params, x, y):
        distance = sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (params, start)), strict=True))
        return mean_loss(params, x, y) + 0.5 * mu * distance

    def client(k):
        params = start
        for _ in range(epochs):
            params = jax.tree.map(lambda p, g: p - eta * g, params, jax.grad(loss)(params, *rows(problem.data, k)))
        return params

    ends = [client(k) for k in range(5)]
    expected = jax.tree.map(
        lambda *p: sum(float(n) * a for n, a in zip(sizes, p, strict=True)) / float(sizes.sum()), *ends
    )
    chex.assert_trees_all_close(state.shared, expected, rtol=1e-10, atol=1e-13)


def asking():
    """An optimizer that descends by as much as the objective is here and one unit further along every parameter."""

    def update(updates, state, params, *, value, value_fn, **_):
        ahead = value_fn(jax.tree.map(lambda p: p + 1.0, params))
        return jax.tree.map(lambda g: -1e-3 * (value + ahead) * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_an_optimizer_that_asks_for_the_objective_gets_it_with_the_proximal_term(key):
    problem, mu, epochs = make_problem(), 0.7, 3
    algorithm = mj.FedAvg(MODEL, asking(), local_epochs=epochs, batch_size=None, proximal=mu)
    state, history = one_round(algorithm, problem, key)
    start, sizes = algorithm.init(problem).shared, np.asarray(problem.data.sizes, float)
    losses: list[list[Any]] = []

    def objective(params, x, y):
        distance = sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (params, start)), strict=True))
        return mean_loss(params, x, y) + 0.5 * mu * distance

    def client(k):
        params, of = start, rows(problem.data, k)
        losses.append([])
        for _ in range(epochs):
            losses[k].append(mean_loss(params, *of))
            ahead = objective(jax.tree.map(lambda p: p + 1.0, params), *of)
            factor = -1e-3 * (objective(params, *of) + ahead)
            step = jax.tree.map(partial(jnp.multiply, factor), jax.grad(objective)(params, *of))
            params = jax.tree.map(jnp.add, params, step)
        return params

    ends = [client(k) for k in range(5)]
    expected = jax.tree.map(
        lambda *p: sum(float(n) * a for n, a in zip(sizes, p, strict=True)) / float(sizes.sum()), *ends
    )
    chex.assert_trees_all_close(state.shared, expected, rtol=1e-10, atol=1e-13)
    # What is reported is the loss of the samples.
    np.testing.assert_allclose(
        history.loss[-1], np.average(np.mean(np.array(losses), axis=1), weights=sizes), rtol=1e-10
    )


@pytest.mark.slow
def test_fedprox_with_zero_is_fedavg_bit_for_bit(key):
    problem = make_problem()
    fed = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=3, batch_size=4, fraction=0.6)
    plain, _ = mj.run(problem, fed, key, num_rounds=4)
    algorithm = fed.replace(proximal=np.zeros(()))
    assert algorithm.proximal is not None  # the term is there
    chex.assert_trees_all_equal(plain.shared, mj.run(problem, algorithm, key, num_rounds=4)[0].shared)


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_all_of_it(key):
    problem = make_problem()
    for size in (15, 1000):
        states = [
            mj.run(problem, mj.FedAvg(MODEL, optax.adam(0.1), batch_size=b, local_epochs=2), key, num_rounds=2)[0]
            for b in (None, size)
        ]
        chex.assert_trees_all_close(states[0].shared, states[1].shared, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_an_epoch_sees_every_sample_once(key):
    # With one feature for each sample and a linear model the gradients tell the samples apart.
    n, y = 7, np.arange(1, 8) / 7
    problem = mj.Prediction(mj.pack_tasks([np.eye(n), np.eye(n)[:3]], [y, y[:3]]), mj.likelihoods.Gaussian(1.0))
    model = mj.networks.Model(lambda key: jnp.zeros((n, 1)), lambda w, x: x @ w)
    for batch in (1, 2, 4, 5, 7):
        algorithm = mj.Local(model, optax.sgd(1.0), batch_size=batch)
        w = np.asarray(mj.run(problem, algorithm, key, num_rounds=1)[0].own[0][..., 0])
        size = y / w[0]  # of the batch that a sample was in
        last = n % batch or batch
        np.testing.assert_allclose(np.sort(size), np.sort([last] * last + [batch] * (n - last)), rtol=1e-9)


@pytest.mark.parametrize(("epochs", "rounds"), [(2, 1), (1, 2)])
@pytest.mark.thin(1)
def test_every_epoch_has_an_order_of_its_own(epochs, rounds):
    n, y = 7, np.arange(1, 8) / 7
    problem = mj.Prediction(mj.pack_tasks([np.eye(n)], [y]), mj.likelihoods.Gaussian(1.0))
    model = mj.networks.Model(lambda key: jnp.zeros((n, 1)), lambda w, x: x @ w)
    algorithm = mj.Local(model, optax.sgd(1.0), batch_size=4, local_epochs=epochs)
    w = np.asarray(mj.run(problem, algorithm, jax.random.key(0), num_rounds=rounds)[0].own[0][0, :, 0])
    # Twice in the batch of four, twice in that of three, or once in each.
    moved = np.array([1 / 4 + 3 / 4 / 4, 1 / 3 + 2 / 3 / 3, 1 / 4 + 3 / 4 / 3])
    which = np.abs(w[:, None] / y[:, None] - moved[None, :])
    assert which.min(1).max() < 1e-9
    assert (which.argmin(1) == 2).any()  # the same three are left over in one of 35 draws


@pytest.mark.slow
def test_order_of_clients_and_padding_change_nothing(key):
    problem, order = make_problem(), [3, 0, 4, 2, 1]
    data = problem.data
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=2, batch_size=None)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    xs, ys = zip(*(rows(data, k) for k in order), strict=True)
    turned, _ = mj.run(problem.replace(data=mj.pack_tasks(xs, ys)), algorithm, key, num_rounds=3)
    chex.assert_trees_all_close(state.shared, turned.shared, rtol=1e-9, atol=1e-12)
    algorithm = algorithm.replace(batch_size=4, fraction=0.5)
    states = [mj.run(problem.replace(data=d), algorithm, key, num_rounds=3)[0] for d in (data, data.pad(nodes=7))]
    chex.assert_trees_all_close(states[0].shared, states[1].shared, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "at_once", [2, pytest.param(5, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_clients_at_once_are_clients_in_turn(at_once, key):
    problem = make_problem()
    for make in (mj.FedAvg, mj.Local):
        states = [
            mj.run(problem, make(MODEL, optax.adam(0.05), batch_size=4, at_once=a), key, num_rounds=2)[0]
            for a in (1, at_once)
        ]
        chex.assert_trees_all_close(states[0].shared, states[1].shared, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("devices", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_any_number_of_devices_gives_the_same(devices, key):
    problem = make_problem()
    mesh = jax.make_mesh((devices,), ("nodes",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    spread = mj.shard(problem, mesh)
    for algorithm in (
        mj.FedAvg(MODEL, optax.sgd(0.2), batch_size=4, fraction=0.7),
        mj.Local(MODEL, optax.adam(0.1), batch_size=4),
    ):
        systems = mj.systems.Dropout(0.2)
        whole = mj.solve(problem, algorithm, key=key, tol=None, max_rounds=4, systems=systems)
        parted = mj.solve(spread, algorithm, key=key, tol=None, max_rounds=4, systems=systems)
        np.testing.assert_allclose(whole.history.error, parted.history.error, rtol=1e-9)
        np.testing.assert_allclose(whole.history.loss, parted.history.loss, rtol=1e-9)
        np.testing.assert_allclose(whole.history.simulated_time, parted.history.simulated_time, rtol=1e-12)
        ours, theirs = (jax.tree.leaves(s.weights) for s in (whole, parted))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, np.asarray(b)[: len(a)], rtol=1e-8, atol=1e-11)


@pytest.mark.slow
def test_who_does_not_answer_is_not_averaged(key):
    problem = make_problem()
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=2, batch_size=None)
    table = np.array([[1, 0, 1, 0, 1]])
    state, history = mj.run(problem, algorithm, key, num_rounds=3, systems=mj.systems.Trace(table))
    xs, ys = zip(*(rows(problem.data, k) for k in (0, 2, 4)), strict=True)
    alone, _ = mj.run(problem.replace(data=mj.pack_tasks(xs, ys)), algorithm, key, num_rounds=3)
    chex.assert_trees_all_close(state.shared, alone.shared, rtol=1e-9, atol=1e-12)
    numbers = algorithm.size(problem)
    assert history.active.tolist() == [3, 3, 3]
    np.testing.assert_allclose(history.bytes_up, 4.0 * numbers * 3 * np.arange(1, 4))
    silent = mj.run(problem, algorithm, key, num_rounds=2, systems=mj.systems.NeverAnswers(tuple(range(5))))
    chex.assert_trees_all_equal(silent[0].shared, algorithm.init(problem).shared)
    assert silent[1].quality.finite.all()


@pytest.mark.slow
def test_a_budget_cuts_local_steps(key):
    problem = make_problem()
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=4, batch_size=None)
    cut, history = mj.run(problem, algorithm, key, num_rounds=2, systems=mj.systems.PartialEpochs(0.25, 0.25))
    whole, _ = mj.run(problem, algorithm.replace(local_epochs=1), key, num_rounds=2)
    chex.assert_trees_all_close(cut.shared, whole.shared, rtol=1e-10, atol=1e-13)
    assert history.steps.tolist() == [5, 5]


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 1), (0.4, 2), (1.0, 5)])
@pytest.mark.slow
def test_a_fraction_of_the_clients_is_asked(fraction, count, key):
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), fraction=fraction)
    history = mj.run(make_problem(), algorithm, key, num_rounds=6)[1]
    assert (history.active == count).all()


@pytest.mark.slow
def test_server_optimizers_take_the_average_change_for_a_gradient(key):
    problem, eta, beta = make_problem(), 0.3, 0.9
    plain = mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None)
    algorithm = plain.replace(server_optimizer=optax.sgd(1.0, momentum=beta))
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    at, momentum = plain.init(problem), None
    for _ in range(3):
        after, _ = one_round(plain, problem, key, at)
        g = jax.tree.map(lambda a, b: a - b, at.shared, after.shared)
        momentum = g if momentum is None else jax.tree.map(lambda v, g: beta * v + g, momentum, g)
        at = at.replace(shared=jax.tree.map(lambda p, v: p - v, at.shared, momentum))
    chex.assert_trees_all_close(state.shared, at.shared, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_an_exploding_client_is_left_out_and_counted(key):
    problem = make_problem(m=3)
    x = np.asarray(problem.data.x).copy()
    x[1] *= 1e200
    broken = problem.replace(data=problem.data.replace(x=jnp.asarray(x)))
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.1), batch_size=4)
    solution = mj.solve(broken, algorithm, key=key, tol=None, max_rounds=5)
    assert solution.history.diverged.tolist() == [1, 2, 3, 4, 5]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(solution.weights))
    healthy = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[1].set(0.0)))
    alone = mj.solve(healthy, algorithm, key=key, tol=None, max_rounds=5)
    chex.assert_trees_all_close(solution.weights, alone.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_divergence_ends_with_a_status_and_the_last_finite_model(key):
    problem = make_problem()
    algorithm = mj.FedAvg(mj.networks.MLP(4, 3, (6, 6)), optax.sgd(1e200), batch_size=4, local_epochs=3)
    solution = mj.solve(problem, algorithm, key=key, tol=None, max_rounds=50)
    assert solution.status is mj.Status.NON_FINITE
    assert "loss became infinite or NaN" in solution.message
    assert len(solution.history.round) < 50
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(solution.weights))


@pytest.mark.slow
def test_one_sample_or_one_class_is_no_trouble(key):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)) for n in (1, 9, 5)]
    problem = mj.Prediction(mj.pack_tasks(xs, [np.array([2]), np.ones(9), rng.integers(0, 3, 5)]))
    for algorithm in (
        mj.FedAvg(MODEL, optax.sgd(0.2), batch_size=4),
        mj.Local(MODEL, optax.sgd(0.2), batch_size=4, local_epochs=30),
    ):
        solution = mj.solve(problem, algorithm, key=key, tol=None, max_rounds=5)
        assert np.isfinite(solution.history.loss).all()
        assert solution.history.loss[-1] < 0.7 * solution.history.loss[0]
    assert mj.solve(problem, algorithm, key=key, tol=0.1, max_rounds=50).status is mj.Status.CONVERGED


@pytest.mark.slow
def test_local_is_fedavg_of_one_client(key):
    problem = make_problem(m=1, test=False)
    settings: Any = dict(batch_size=4, local_epochs=2, seed=3)
    together, _ = mj.run(problem, mj.FedAvg(MODEL, optax.sgd(0.2), **settings), key, num_rounds=3)
    alone, _ = mj.run(problem, mj.Local(MODEL, optax.sgd(0.2), **settings), key, num_rounds=3)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[None], together.shared), alone.own[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_optimizer_of_local_goes_on(key):
    problem = make_problem(m=2, test=False)
    once, _ = mj.run(problem, mj.Local(MODEL, optax.adam(0.1), batch_size=None, local_epochs=4), key, num_rounds=1)
    twice, _ = mj.run(problem, mj.Local(MODEL, optax.adam(0.1), batch_size=None, local_epochs=2), key, num_rounds=2)
    chex.assert_trees_all_close(once.own[0], twice.own[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_rates_and_seeds_can_be_mapped_over(key):
    problem = make_problem()

    def last(rate, seed):
        algorithm = mj.FedAvg(MODEL, optax.sgd(1.0), rate=rate, seed=seed, batch_size=4)
        return mj.run(problem, algorithm, key, num_rounds=3)[1].loss[-1]

    rates, seeds = jnp.array([0.03, 0.3]), jnp.array([0, 1])
    together = jax.vmap(last)(rates, seeds)
    plain = mj.FedAvg(MODEL, optax.sgd(0.3), seed=1, batch_size=4)
    np.testing.assert_allclose(together[1], mj.run(problem, plain, key, num_rounds=3)[1].loss[-1], rtol=1e-9)
    assert together[0] != together[1]
