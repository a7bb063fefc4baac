"""FedAvg and its settings against loops written here, on any number of devices and in any order."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._driver.fingerprint import fingerprint
from mocha_jax._neural.flops import flops
from tests import zoo

MODEL = mj.networks.MLP(4, 3, (6,))


def make_problem(m=5, seed=0, low=6, high=15, test=True):
    """Three classes from real-valued labels."""
    xs, ys = zoo.ragged(seed=seed, m=m, low=low, high=high, regression=True)
    cuts = np.quantile(np.concatenate(ys), [1 / 3, 2 / 3])
    labels = [np.digitize(y, cuts) for y in ys]
    held = mj.pack_tasks([x[::2] for x in xs], [y[::2] for y in labels]) if test else None
    return mj.Prediction(mj.pack_tasks(xs, labels), test=held)


def rows(data, k):
    real = np.asarray(data.weight[k]) > 0
    return np.asarray(data.x[k])[real], np.asarray(data.y[k])[real]


def mean_loss(params, x, y):
    logs = jax.nn.log_softmax(mlp(params, x))
    return -jnp.mean(logs[jnp.arange(len(y)), y.astype(int)])


def mlp(params, x):
    with jax.numpy_rank_promotion("allow"):
        (w1, b1), (w2, b2) = params
        return jnp.maximum(x @ w1 + b1, 0) @ w2 + b2


def one_round(algorithm, problem, key, state=None):
    return mj.run(problem, algorithm, key, num_rounds=1, state=state)


def test_a_full_batch_is_fedsgd(key):
    problem, eta = make_problem(), 0.3
    algorithm = mj.FedAvg(MODEL, optax.sgd(eta), batch_size=None)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    params = algorithm.init(problem).params
    sizes = np.asarray(problem.data.sizes, float)
    for _ in range(3):
        gradients = [jax.grad(mean_loss)(params, *rows(problem.data, k)) for k in range(5)]
        average = jax.tree.map(
            lambda *g: sum(float(n) * a for n, a in zip(sizes, g, strict=True)) / float(sizes.sum()), *gradients
        )
        params = jax.tree.map(lambda p, g: p - eta * g, params, average)
    chex.assert_trees_all_close(state.params, params, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_epochs_of_fedprox_are_a_loop(mu, key):
    problem, eta, epochs = make_problem(), 0.2, 3
    algorithm = mj.FedAvg(MODEL, optax.sgd(eta), local_epochs=epochs, batch_size=None, proximal=mu)
    state, _ = one_round(algorithm, problem, key)
    start, sizes = algorithm.init(problem).params, np.asarray(problem.data.sizes, float)

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
    chex.assert_trees_all_close(state.params, expected, rtol=1e-10, atol=1e-13)


def test_fedprox_with_zero_is_fedavg_bit_for_bit(key):
    problem = make_problem()
    fed = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=3, batch_size=4, fraction=0.6)
    plain, _ = mj.run(problem, fed, key, num_rounds=4)
    algorithm = fed.replace(proximal=np.zeros(()))
    assert algorithm.proximal is not None  # the term is there
    chex.assert_trees_all_equal(plain.params, mj.run(problem, algorithm, key, num_rounds=4)[0].params)


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_all_of_it(key):
    problem = make_problem()
    for size in (15, 1000):
        states = [
            mj.run(problem, mj.FedAvg(MODEL, optax.adam(0.1), batch_size=b, local_epochs=2), key, num_rounds=2)[0]
            for b in (None, size)
        ]
        chex.assert_trees_all_close(states[0].params, states[1].params, rtol=1e-9, atol=1e-12)


def test_an_epoch_sees_every_sample_once(key):
    # With one feature for each sample and a linear model the gradients tell the samples apart.
    n, y = 7, np.arange(1, 8) / 7
    problem = mj.Prediction(mj.pack_tasks([np.eye(n), np.eye(n)[:3]], [y, y[:3]]), mj.likelihoods.Gaussian(1.0))
    model = mj.networks.Model(lambda key: jnp.zeros((n, 1)), lambda w, x: x @ w)
    for batch in (1, 2, 4, 5, 7):
        algorithm = mj.Local(model, optax.sgd(1.0), batch_size=batch)
        w = np.asarray(mj.run(problem, algorithm, key, num_rounds=1)[0].params[..., 0])
        size = y / w[0]  # of the batch that a sample was in
        last = n % batch or batch
        np.testing.assert_allclose(np.sort(size), np.sort([last] * last + [batch] * (n - last)), rtol=1e-9)


@pytest.mark.parametrize(("epochs", "rounds"), [(2, 1), (1, 2)])
def test_every_epoch_has_an_order_of_its_own(epochs, rounds):
    n, y = 7, np.arange(1, 8) / 7
    problem = mj.Prediction(mj.pack_tasks([np.eye(n)], [y]), mj.likelihoods.Gaussian(1.0))
    model = mj.networks.Model(lambda key: jnp.zeros((n, 1)), lambda w, x: x @ w)
    algorithm = mj.Local(model, optax.sgd(1.0), batch_size=4, local_epochs=epochs)
    w = np.asarray(mj.run(problem, algorithm, jax.random.key(0), num_rounds=rounds)[0].params[0, :, 0])
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
    chex.assert_trees_all_close(state.params, turned.params, rtol=1e-9, atol=1e-12)
    algorithm = algorithm.replace(batch_size=4, fraction=0.5)
    states = [mj.run(problem.replace(data=d), algorithm, key, num_rounds=3)[0] for d in (data, data.pad(nodes=7))]
    chex.assert_trees_all_close(states[0].params, states[1].params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "at_once", [2, pytest.param(5, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_clients_at_once_are_clients_in_turn(at_once, key):
    problem = make_problem()
    for make in (mj.FedAvg, mj.Local):
        states = [
            mj.run(problem, make(MODEL, optax.adam(0.05), batch_size=4, at_once=a), key, num_rounds=2)[0]
            for a in (1, at_once)
        ]
        chex.assert_trees_all_close(states[0].params, states[1].params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("devices", [3, pytest.param(8, marks=pytest.mark.slow)])
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


def test_who_does_not_answer_is_not_averaged(key):
    problem = make_problem()
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=2, batch_size=None)
    table = np.array([[1, 0, 1, 0, 1]])
    state, history = mj.run(problem, algorithm, key, num_rounds=3, systems=mj.systems.Trace(table))
    xs, ys = zip(*(rows(problem.data, k) for k in (0, 2, 4)), strict=True)
    alone, _ = mj.run(problem.replace(data=mj.pack_tasks(xs, ys)), algorithm, key, num_rounds=3)
    chex.assert_trees_all_close(state.params, alone.params, rtol=1e-9, atol=1e-12)
    numbers = algorithm.size(problem)
    assert history.active.tolist() == [3, 3, 3]
    np.testing.assert_allclose(history.bytes_up, 4.0 * numbers * 3 * np.arange(1, 4))
    silent = mj.run(problem, algorithm, key, num_rounds=2, systems=mj.systems.NeverAnswers(tuple(range(5))))
    chex.assert_trees_all_equal(silent[0].params, algorithm.init(problem).params)
    assert silent[1].quality.finite.all()


def test_a_budget_cuts_local_steps(key):
    problem = make_problem()
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.2), local_epochs=4, batch_size=None)
    cut, history = mj.run(problem, algorithm, key, num_rounds=2, systems=mj.systems.PartialEpochs(0.25, 0.25))
    whole, _ = mj.run(problem, algorithm.replace(local_epochs=1), key, num_rounds=2)
    chex.assert_trees_all_close(cut.params, whole.params, rtol=1e-10, atol=1e-13)
    assert history.steps.tolist() == [5, 5]


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 1), (0.4, 2), (1.0, 5)])
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
        g = jax.tree.map(lambda a, b: a - b, at.params, after.params)
        momentum = g if momentum is None else jax.tree.map(lambda v, g: beta * v + g, momentum, g)
        at = at.replace(params=jax.tree.map(lambda p, v: p - v, at.params, momentum))
    chex.assert_trees_all_close(state.params, at.params, rtol=1e-9, atol=1e-12)


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


def test_local_is_fedavg_of_one_client(key):
    problem = make_problem(m=1, test=False)
    settings = dict(batch_size=4, local_epochs=2, seed=3)
    together, _ = mj.run(problem, mj.FedAvg(MODEL, optax.sgd(0.2), **settings), key, num_rounds=3)
    alone, _ = mj.run(problem, mj.Local(MODEL, optax.sgd(0.2), **settings), key, num_rounds=3)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[None], together.params), alone.params, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_optimizer_of_local_goes_on(key):
    problem = make_problem(m=2, test=False)
    once, _ = mj.run(problem, mj.Local(MODEL, optax.adam(0.1), batch_size=None, local_epochs=4), key, num_rounds=1)
    twice, _ = mj.run(problem, mj.Local(MODEL, optax.adam(0.1), batch_size=None, local_epochs=2), key, num_rounds=2)
    chex.assert_trees_all_close(once.params, twice.params, rtol=1e-9, atol=1e-12)


def test_the_global_model_is_judged_task_by_task(key):
    problem = make_problem()
    algorithm = mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    merged = problem.merged()
    assert merged.data.num_nodes == 1
    assert merged.data.sizes.tolist() == [int(problem.data.sizes.sum())]
    state, history = mj.run(merged, algorithm, key, num_rounds=3)
    errors = []
    for k in range(5):
        x, y = rows(problem.test, k)
        errors.append((np.asarray(mlp(jax.tree.map(lambda a: a[0], state.params), x)).argmax(1) != y).mean())
    np.testing.assert_allclose(history.error[-1], np.mean(errors))
    np.testing.assert_allclose(algorithm.scores(state, merged).error, errors)


def test_many_samples_are_judged_in_parts(key):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1300, 4)), rng.integers(0, 3, 1300)
    problem = mj.Prediction(make_problem().data, test=mj.pack_tasks([x], [y]))
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.1))
    scores = algorithm.scores(algorithm.init(problem), problem)
    z = np.asarray(mlp(algorithm.init(problem).params, x))
    np.testing.assert_allclose(scores.error, [(z.argmax(1) != y).mean()], rtol=1e-12)
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    np.testing.assert_allclose(scores.loss, [-logs[np.arange(1300), y].mean()], rtol=1e-10)


def test_a_resumed_solve_ends_where_a_whole_one_does(key, tmp_path):
    problem, path = make_problem(), tmp_path / "run.npz"

    def solve(rounds, rate=0.05, **more):
        algorithm = mj.FedAvg(MODEL, optax.adam(rate), optax.sgd(1.0, momentum=0.9), fraction=0.6, batch_size=4)
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=rounds, chunk=2, **more)

    whole = solve(6)
    solve(4, checkpoint=path)
    resumed = solve(6, checkpoint=path)
    chex.assert_trees_all_equal(whole.weights, resumed.weights)
    chex.assert_trees_all_equal(whole.history, resumed.history)
    with pytest.raises(mj.CheckpointError, match="another run"):
        solve(6, rate=0.06, checkpoint=path)


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


def test_operations_are_counted():
    problem, model = make_problem(), mj.networks.MLP(4, 3, (6,))
    algorithm = mj.FedAvg(model, optax.sgd(0.1), batch_size=5)
    products = 2 * (4 * 6 + 6 * 3)
    sizes = np.asarray(problem.data.sizes)
    each = np.asarray(algorithm.step_flops(problem)) * np.asarray(algorithm.full_work(problem)) / sizes  # of a sample
    assert len(set(sizes % 5)) > 1
    assert ((3 * products <= each) & (each <= 3 * (products + 40))).all()
    np.testing.assert_allclose(each, each[0])
    # A convolution of 5 x 5 on 8 x 8 pictures of 2 channels to 3, padded.
    layer = mj.networks.convolution(jax.random.key(0), 5, 2, 3)
    picture = jnp.ones((1, 8, 8, 2), layer.w.dtype)
    counted = flops(
        lambda h: jax.lax.conv_general_dilated(h, layer.w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        picture,
    )
    assert counted == 2 * 64 * 3 * 25 * 2
    assert flops(lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, length=7)[0], jnp.ones((3, 3))) == 7 * 54


def test_what_does_not_fit_is_said(key):
    problem = make_problem()
    convex = mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    fed = mj.FedAvg(MODEL, optax.sgd(0.1))
    with pytest.raises(ValueError, match="FedAvg solves a Prediction, got a Problem"):
        mj.run(convex, fed, key, num_rounds=1)
    with pytest.raises(ValueError, match="Mocha solves a Problem, got a Prediction"):
        mj.solve(problem, mj.Mocha())
    with pytest.raises(ValueError, match="must be of optax"):
        mj.FedAvg(MODEL, 0.1)
    with pytest.raises(ValueError, match="model must be a Network"):
        mj.FedAvg(lambda x: x, optax.sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        mj.FedAvg(MODEL, optax.sgd(0.1), batch_size=0)
    with pytest.raises(ValueError, match="belongs to another algorithm"):
        mj.run(problem, fed, key, num_rounds=1, state=mj.FedAvg(mj.networks.MLP(4, 3), optax.sgd(0.1)).init(problem))
    with pytest.raises(ValueError, match="test samples have 3 features"):
        mj.Prediction(problem.data, test=zoo.data(d=3))


def fresh(problem):
    """Untrained clients beyond those with data."""
    return problem.data.pad(nodes=7)


@pytest.mark.parametrize("where", ["merged and padded", pytest.param("merged and sharded", marks=pytest.mark.slow)])
def test_the_global_model_judges_every_task_wherever_it_lies(where, key):
    problem = make_problem()
    algorithm, merged = mj.Local(MODEL, optax.adam(0.05), batch_size=8), problem.merged()
    other = {
        "merged and padded": merged.replace(data=fresh(merged)), "merged and sharded": mj.shard(merged),
    }[where]  # fmt: skip
    ours, theirs = (mj.solve(p, algorithm, key=key, tol=None, max_rounds=4).history.error for p in (merged, other))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_a_test_set_of_one_task_is_judged_by_all_clients(key):
    problem = make_problem(m=4, test=False)
    x, y = rows(problem.data, 2)
    held = mj.pack_tasks([x], [y])
    algorithm = mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    one = problem.replace(test=held)
    each = [
        (np.asarray(mlp(jax.tree.map(lambda a, k=k: a[k], state.params), x)).argmax(1) != y).mean() for k in range(4)
    ]
    np.testing.assert_allclose(algorithm.scores(state, one).error, [np.mean(each)])
    fed = mj.FedAvg(MODEL, optax.sgd(0.1))
    assert fed.scores(fed.init(one), one).error.shape == (1,)


def test_held_out_samples_of_other_tasks_are_refused(key):
    problem = make_problem(m=4)
    algorithm = mj.Local(MODEL, optax.adam(0.05))
    assert problem.test is not None
    fewer = problem.replace(test=problem.test.replace(task=jnp.array([0, 0, 1, 1])))
    with pytest.raises(ValueError, match="test has 2 tasks, and 4 clients work on 4"):
        mj.run(fewer, algorithm, key, num_rounds=1)
    shared = problem.replace(data=problem.data.replace(task=jnp.array([0, 0, 1, 1])))
    with pytest.raises(ValueError, match="several clients share a task"):
        mj.run(shared, algorithm, key, num_rounds=1)
    assert mj.run(shared.replace(test=None), algorithm, key, num_rounds=1)[1].error.shape == (1,)


def test_labels_and_outputs_have_to_fit(key):
    xs, ys = zoo.ragged(m=3)
    with pytest.raises(ValueError, match="needs labels 0, 1, ..., but there is a -1"):
        mj.Prediction(mj.pack_tasks(xs, ys))
    data = mj.pack_tasks(xs, [np.full(len(y), 3) for y in ys])
    with pytest.raises(ValueError, match="a label 3, but the model has outputs for 3 classes"):
        mj.run(mj.Prediction(data), mj.FedAvg(MODEL, optax.sgd(0.1)), key, num_rounds=1)
    flat = mj.networks.Model(lambda key: jnp.zeros(4), lambda w, x: x @ w)
    with pytest.raises(ValueError, match=r"must be \[2, c\], got \(2,\)"):
        mj.run(mj.Prediction(data), mj.FedAvg(flat, optax.sgd(0.1)), key, num_rounds=1)
    with pytest.raises(ValueError, match="one output, not 3"):
        mj.run(mj.Prediction(data, mj.likelihoods.Gaussian()), mj.Local(MODEL, optax.sgd(0.1)), key, num_rounds=1)


def test_training_alone_costs_no_message(key):
    algorithm, problem = mj.Local(MODEL, optax.sgd(0.1)), make_problem(test=False)
    history = mj.run(problem, algorithm, key, num_rounds=2)[1]
    work = algorithm.request(problem)
    seconds = float((np.asarray(work.steps) * np.asarray(work.step_flops)).max()) / 1e9
    np.testing.assert_allclose(history.simulated_time, seconds * np.arange(1, 3), rtol=1e-9)


OPTIMIZERS = [
    lambda: optax.sgd(0.1),
    lambda: optax.sgd(0.2),
    lambda: optax.sgd(0.1, momentum=0.9),
    lambda: optax.sgd(optax.exponential_decay(0.1, 10, 0.9)),
    lambda: optax.sgd(optax.exponential_decay(0.1, 10, 0.8)),
    lambda: optax.adam(1e-3),
    lambda: optax.adam(1e-3, b1=0.8),
    lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
]


class Net:
    """A module of another library."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, w, x):
        return self.slope * (x @ w)

    def apply(self, w, x):
        return self(w, x)


def scaled(scale):
    def predict(w, x, *, by=scale):
        return by * (x @ w)

    return predict


RECORD = SimpleNamespace(scale=1.0)


def test_a_checkpoint_knows_the_records_that_functions_read(monkeypatch):
    one = fingerprint(lambda x: RECORD.scale * x)
    assert one == fingerprint(lambda x: RECORD.scale * x)
    monkeypatch.setattr(RECORD, "scale", 2.0)
    assert one != fingerprint(lambda x: RECORD.scale * x)


def test_a_checkpoint_knows_what_functions_do():
    made = [[fingerprint(make()) for make in OPTIMIZERS] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) == len(OPTIMIZERS)
    assert fingerprint(Net(1.0).apply) == fingerprint(Net(1.0).apply) != fingerprint(Net(2.0).apply)
    assert fingerprint(scaled(1.0)) == fingerprint(scaled(1.0)) != fingerprint(scaled(2.0))
    code = "from mocha_jax._driver.fingerprint import fingerprint; from tests import test_fedavg as t\n"
    code += "print([fingerprint(make()) for make in t.OPTIMIZERS], fingerprint(lambda x: x in {'a', 'b', 'c'}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1


def test_every_task_is_judged_by_the_network_of_its_own_client(key):
    problem, algorithm = make_problem(m=4), mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    assert problem.test is not None
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    scores = algorithm.scores(state, problem)
    for k in range(4):
        x, y = rows(problem.test, k)
        own = jax.tree.map(lambda a, k=k: a[k], state.params)
        np.testing.assert_allclose(scores.error[k], (np.asarray(mlp(own, x)).argmax(1) != y).mean())
        np.testing.assert_allclose(scores.loss[k], mean_loss(own, x, y), rtol=1e-10)


def test_models_never_see_rows_of_padding(key):
    """One that divides by the norm of a sample, on clients of different sizes and short batches."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)) for n in (4, 9, 7)]
    problem = mj.Prediction(mj.pack_tasks(xs, [(x[:, 0] > 0).astype(int) for x in xs]))
    normed = mj.networks.Model(
        lambda key: 0.1 * jax.random.normal(key, (4, 2)),
        lambda w, x: (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w,
    )
    for batch_size in (None, 4):
        for kind in (mj.FedAvg, mj.Local):
            algorithm = kind(normed, optax.sgd(0.5), batch_size=batch_size)
            _, history = mj.run(problem, algorithm, key, num_rounds=4)
            assert history.diverged.tolist() == [0, 0, 0, 0]
            assert history.loss[-1] < history.loss[0]


def test_a_problem_without_samples_is_refused():
    one = mj.pack_tasks([np.ones((1, 4))] * 3, [[0], [1], [0]])
    train, test = one.split(jax.random.key(0), 0.75)
    assert int(test.sizes.sum()) == 0
    with pytest.raises(ValueError, match="test has no samples"):
        mj.Prediction(train, test=test)
    with pytest.raises(ValueError, match="data has no samples"):
        mj.Prediction(test)
    scores = mj.FedAvg(MODEL, optax.sgd(0.1)).scores
    problem = mj.Prediction(one)
    state = mj.FedAvg(MODEL, optax.sgd(0.1)).init(problem)

    def error(weight):  # where nobody can look
        found = scores(state, problem.replace(data=one.replace(weight=weight)))
        return found.mean(found.error)

    assert np.isnan(jax.jit(error)(jnp.zeros_like(one.weight)))


def test_updates_left_out_are_told_of(key):
    problem = make_problem()
    x = np.asarray(problem.data.x).copy()
    x[1] = np.finfo(x.dtype).max  # finite, but no product with it is
    broken = problem.replace(data=problem.data.replace(x=jnp.asarray(x)))
    solution = mj.solve(broken, mj.FedAvg(MODEL, optax.sgd(0.1)), key=key, tol=None, max_rounds=3)
    assert "3 update(s) of clients were not finite" in solution.message
    assert "not finite" not in mj.solve(problem, mj.FedAvg(MODEL, optax.sgd(0.1)), tol=None, max_rounds=1).message


def test_outputs_that_are_not_numbers_are_wrong():
    outputs = jnp.full((3, 2), jnp.nan).at[1].set(jnp.array([0.0, 1.0]))
    assert mj.likelihoods.Categorical().error(outputs, jnp.array([0.0, 1.0, 1.0])).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    ],
    ids=["bfloat16", "keys"],
)
def test_any_state_of_an_optimizer_is_saved(optimizer, key, tmp_path):
    problem, path = make_problem(), tmp_path / "run.npz"
    algorithm = mj.Local(MODEL, optimizer(), batch_size=4)

    def solve(rounds, **more):
        return mj.solve(problem, algorithm, key=key, tol=None, max_rounds=rounds, **more)

    whole = solve(4)
    solve(2, checkpoint=path)
    chex.assert_trees_all_equal(whole.weights, solve(4, checkpoint=path).weights)


def test_optimizers_that_ask_for_the_loss(key):
    problem = make_problem()
    for optimizer in (optax.polyak_sgd(0.5), optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=2))):
        _, history = mj.run(problem, mj.Local(MODEL, optimizer, batch_size=None), key, num_rounds=5)
        assert history.loss[-1] < history.loss[0]


def test_a_step_costs_what_its_samples_do():
    xs = [np.ones((n, 4)) for n in (4, 400)]
    problem = mj.Prediction(mj.pack_tasks(xs, [np.zeros(len(x), int) for x in xs]))
    price = np.asarray(mj.FedAvg(MODEL, optax.sgd(0.1), batch_size=None).step_flops(problem))
    np.testing.assert_allclose(price[1] / price[0], 100.0)


def test_a_client_predicts(key):
    problem = make_problem()
    x = problem.data.x[1]
    shared, own = mj.FedAvg(MODEL, optax.sgd(0.3)), mj.Local(MODEL, optax.sgd(0.3))
    for algorithm in (shared, own):
        state, _ = mj.run(problem, algorithm, key, num_rounds=3)
        found = algorithm.predict(state, problem, 1, x)
        with jax.numpy_rank_promotion("allow"):
            logits = MODEL.apply(algorithm.parameters(state, problem, 1), x)
        np.testing.assert_allclose(found.mean, jax.nn.softmax(logits), rtol=1e-12)
        assert (np.asarray(found.std) == 0).all()
        np.testing.assert_allclose(found.mutual_information, 0.0, atol=1e-12)
        with pytest.raises(ValueError, match=r"x must be an array \[b, 4\], got shape \(4,\)"):
            algorithm.predict(state, problem, 1, x[0])
        with pytest.raises(ValueError, match="there is no client"):
            algorithm.predict(state, problem, problem.data.num_nodes, x)


def test_models_that_do_not_fit_are_named(key):
    problem = make_problem()
    networks: Any = mj.networks
    local: Any = mj.Local
    with pytest.raises(ValueError, match="Local: the model MLP cannot predict samples of 4 features"):
        mj.run(problem, mj.Local(mj.networks.MLP(5, 3), optax.sgd(0.1)), key, num_rounds=1)
    two = networks.Model(lambda key: jnp.zeros((4, 3)), lambda w, x: (x @ w, 0))
    with pytest.raises(ValueError, match=r"must be \[2, c\], got a tuple"):
        mj.run(problem, mj.Local(two, optax.sgd(0.1)), key, num_rounds=1)
    turned = networks.Model(lambda key: jnp.zeros((3, 4)), lambda w, x: x @ w.T)
    with pytest.raises(ValueError, match="noise='local', which wants h @ w"):
        mj.run(problem, mj.Virtual(turned, optax.sgd(0.1), noise="local"), key, num_rounds=1)
    with pytest.raises(ValueError, match="hidden must be a tuple such as"):
        networks.MLP(4, 3, 16)
    with pytest.raises(ValueError, match="hidden must be an integer >= 1, got 16.7"):
        networks.MLP(4, 3, (16.7,))
    with pytest.raises(ValueError, match="two convolutions"):
        networks.CNN(channels=(8, 8, 8))
    with pytest.raises(ValueError, match="initialise must be a function"):
        networks.Model(jnp.zeros(3), lambda w, x: x)
    with pytest.raises(ValueError, match="seed must be an integer from 0"):
        local(MODEL, optax.sgd(0.1), seed=1.5)
    with pytest.raises(ValueError, match="rate must be a single number"):
        local(MODEL, optax.sgd(0.1), rate=[0.1, 0.2])
    with pytest.raises(ValueError, match="Prediction is for FedAvg, Local and Virtual"):
        mj.solve(problem)


LISTED = mj.networks.Model(
    lambda key: [0.1 * jax.random.normal(key, (4, 3)), jnp.zeros(3)], lambda params, x: x @ params[0] + params[1]
)


@pytest.mark.parametrize("make", [mj.FedAvg, mj.Local, mj.Virtual])
def test_parameters_may_be_a_list(make):
    found = mj.solve(make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=2)
    again = mj.solve(make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=1)
    more = mj.solve(
        make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=1, state=again.state
    )
    chex.assert_trees_all_close(more.weights, found.weights)
