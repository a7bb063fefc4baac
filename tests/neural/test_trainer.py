"""What every trainer of networks does: charge its work, name what does not fit."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._neural.clients import with_own_draws
from mocha_jax._neural.trainer import flops
from mocha_jax.networks._base import convolution
from mocha_jax.systems._base import Work
from tests import zoo
from tests.neural.problems import MODEL, make_problem


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
    layer = convolution(jax.random.key(0), 5, 2, 3)
    picture = jnp.ones((1, 8, 8, 2), layer.w.dtype)
    counted = flops(
        lambda h: jax.lax.conv_general_dilated(h, layer.w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        picture,
    )
    assert counted == 2 * 64 * 3 * 25 * 2
    assert flops(lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, length=7)[0], jnp.ones((3, 3))) == 7 * 54


def test_operations_of_every_position_are_counted():
    v, e, h, t = 6, 3, 24, 7
    model = mj.networks.LSTM(v, embedding=e, hidden=h)
    data = mj.pack_tasks([np.zeros((4, t + 1)), np.zeros((10, t + 1))], [np.full(4, t), np.full(10, 2)])
    problem = mj.Prediction(data, mj.likelihoods.NextSymbol())
    algorithm = mj.FedAvg(model, optax.sgd(0.1), batch_size=5)
    steps, sizes = np.asarray(algorithm.full_work(problem)), np.asarray(data.sizes)
    each = np.asarray(algorithm.step_flops(problem)) * steps / sizes  # of a sample
    products = 2 * t * (v * e + (e + h + h + h) * 4 * h + h * v)
    others = 2 * t * 40 * h + t * 6 * v  # gates and states of two layers, embedding and outputs
    assert ((3 * products <= each) & (each <= 3 * (products + others))).all()
    assert products > 3 * others


def test_what_does_not_fit_is_said(key):
    problem = make_problem()
    convex = mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    fed = mj.FedAvg(MODEL, optax.sgd(0.1))
    with pytest.raises(ValueError, match="FedAvg solves a Prediction, got a Problem"):
        mj.run(convex, fed, key, num_rounds=1)  # type: ignore[misc]  # as the types say too
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


@pytest.mark.slow
def test_training_alone_costs_no_message(key):
    algorithm, problem = mj.Local(MODEL, optax.sgd(0.1)), make_problem(test=False)
    history = mj.run(problem, algorithm, key, num_rounds=2)[1]
    work = algorithm.request(problem)
    seconds = float((np.asarray(work.steps) * np.asarray(work.step_flops)).max()) / 1e9
    np.testing.assert_allclose(history.simulated_time, seconds * np.arange(1, 3), rtol=1e-9)


@pytest.mark.slow
def test_updates_left_out_are_told_of(key):
    problem = make_problem()
    x = np.asarray(problem.data.x).copy()
    x[1] = np.finfo(x.dtype).max  # finite, but no product with it is
    broken = problem.replace(data=problem.data.replace(x=jnp.asarray(x)))
    solution = mj.solve(broken, mj.FedAvg(MODEL, optax.sgd(0.1)), key=key, tol=None, max_rounds=3)
    assert "3 update(s) of clients were not finite" in solution.message
    assert "not finite" not in mj.solve(problem, mj.FedAvg(MODEL, optax.sgd(0.1)), tol=None, max_rounds=1).message


@pytest.mark.slow
def test_optimizers_that_ask_for_the_loss(key):
    problem = make_problem()
    for optimizer in (optax.polyak_sgd(0.5), optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=2))):
        _, history = mj.run(problem, mj.Local(MODEL, optimizer, batch_size=None), key, num_rounds=5)
        assert history.loss[-1] < history.loss[0]


SIZES = (3, 5, 9, 4, 6, 7)


def noise_of(make, *keys):
    """What normal noise of sd 1 adds to the parameters in two rounds of one step, ``[runs, rounds, networks, p]``."""
    data = mj.pack_tasks([np.ones((n, 2)) for n in SIZES], [np.zeros(n) for n in SIZES])
    model = mj.networks.Model(lambda key: jnp.zeros((2, 400)), lambda params, x: x @ params)
    noise = optax.chain(optax.set_to_zero(), optax.masked(optax.add_noise(1.0, 0.0, key=7), True))
    algorithm, problem = make(model, noise, batch_size=None), mj.Prediction(data)
    step = jax.jit(lambda key, state: algorithm.step(key, state, problem, Work(data.sizes, data.sizes > 0))[0])
    runs = []
    for key in keys:
        states = [algorithm.init(problem)]
        for r in range(2):
            states.append(step(jax.random.fold_in(key, r), states[-1]))
        runs.append([np.reshape(algorithm.weights(state), (-1, 800)) for state in states])
    return np.diff(runs, axis=1)


def unrelated(rows):
    return np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5 / np.sqrt(rows.shape[1])


def test_noise_of_clients_averages_out_and_is_new_in_every_round(key):
    noise, again, other = noise_of(mj.FedAvg, key, key, jax.random.fold_in(key, 5))[:, :, 0]
    share = np.array(SIZES) / sum(SIZES)
    # Of independent draws the weighted mean has this deviation, of one and the same 1.
    np.testing.assert_allclose(noise.std(axis=1), np.sqrt(np.sum(share**2)), rtol=4 / np.sqrt(2 * noise.shape[1]))
    assert unrelated(np.concatenate([noise, other]))
    np.testing.assert_array_equal(again, noise)


def test_clients_that_train_alone_draw_noise_of_their_own(key):
    noise = noise_of(mj.Local, key).reshape(12, -1)
    np.testing.assert_allclose(noise.std(axis=1), 1.0, rtol=4 / np.sqrt(2 * noise.shape[1]))
    assert unrelated(noise)


def test_random_keys_of_every_form_are_a_client_s_own(key):
    raw = jax.random.PRNGKey(7)
    states = {
        "number": optax.contrib.differentially_private_aggregate(1.0, 1.0, 3).init({}),
        "typed": {"inner": [jax.random.key(7)], "trace": jnp.ones(2)},
        "raw": optax.contrib.hutchinson_estimator_diag_hessian(raw).init({}),
        "several": {"rng": jax.random.split(raw, 3), "keys": jax.random.split(jax.random.key(1), (2, 2))},
        "no keys": {"count": raw, "key": jnp.ones((2, 2)), "rng": 3},
    }
    one, again, other = (with_own_draws(states, k) for k in (key, key, jax.random.fold_in(key, 1)))

    def numbers(leaf):
        return np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key) else leaf
        )

    for name in states:
        for before, *after in zip(
            *(map(numbers, jax.tree.leaves(s[name])) for s in (states, one, again, other)), strict=True
        ):
            same = [np.array_equal(before, a) for a in after]
            expected = name == "no keys" or (name == "typed" and before.dtype != np.uint32)
            assert same == [expected] * 3
            np.testing.assert_array_equal(after[0], after[1])
            assert np.array_equal(after[0], after[2]) == expected


def test_a_step_costs_what_its_samples_do():
    xs = [np.ones((n, 4)) for n in (4, 400)]
    problem = mj.Prediction(mj.pack_tasks(xs, [np.zeros(len(x), int) for x in xs]))
    price = np.asarray(mj.FedAvg(MODEL, optax.sgd(0.1), batch_size=None).step_flops(problem))
    np.testing.assert_allclose(price[1] / price[0], 100.0)


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
    with pytest.raises(ValueError, match="Prediction is for FedAvg, Local, Virtual and the"):
        mj.solve(problem)


LISTED = mj.networks.Model(
    lambda key: [0.1 * jax.random.normal(key, (4, 3)), jnp.zeros(3)], lambda params, x: x @ params[0] + params[1]
)


@pytest.mark.parametrize("make", [mj.FedAvg, mj.Local, pytest.param(mj.Virtual, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_parameters_may_be_a_list(make):
    found = mj.solve(make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=2)
    again = mj.solve(make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=1)
    more = mj.solve(
        make_problem(), make(LISTED, optax.sgd(0.1), batch_size=4), tol=None, max_rounds=1, state=again.state
    )
    chex.assert_trees_all_close(more.weights, found.weights)
