"""The private gradient: clipped as by hand, batches by chance, noise of the size that is accounted for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._neural.clients import Batch
from mocha_jax._neural.private_gradients import ByChance, OfClient, headroom, private_losses
from mocha_jax._neural.trainer import mean_loss
from tests.personalized import problems

SGD = optax.sgd(1.0)  # the change of the parameters is minus the gradient
M = 4
LINEAR = mj.networks.MLP(3, 1)


def level(noise=0.0, steps=100, clip=1.0):
    return mj.privacy.ExampleLevel(noise, steps, clip)


def numbers(n=6, m=M, seed=0):
    """A regression, so that gradients are known in closed form."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n + k, 3)) for k in range(m)]
    return xs, [rng.normal(size=n + k) * (1 + 3 * k) for k in range(m)]


def problem_of(xs, ys, scaling="task_mean"):
    return mj.Prediction(mj.pack_tasks(xs, ys, dtype=np.float64, loss_scaling=scaling), mj.likelihoods.Gaussian())


def after_one_step(xs, ys, key, *, batch=None, scaling="task_mean", **settings):
    """The gradients of all clients at their first parameters, ``[m, 4]``."""
    problem = problem_of(xs, ys, scaling)
    algorithm = mj.Local(LINEAR, SGD, batch_size=batch, privacy=level(**settings))
    begin = flat(algorithm.weights(algorithm.init(problem)))

    def change(key):
        return begin - flat(algorithm.weights(mj.run(problem, algorithm, key, num_rounds=1)[0]))

    return np.asarray((jax.jit(jax.vmap(change)) if key.ndim else change)(key)), np.asarray(begin)


def flat(weights):
    """The linear models of all clients, ``[m, 4]``."""
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in (weights[0].w, weights[0].b)], axis=1)


def clipped_by_hand(x, y, w, clip):
    """The sum of the clipped gradients of half the squared errors."""
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    each = (rows @ w - y)[:, None] * rows
    length = np.linalg.norm(each, axis=1, keepdims=True)
    return (each * np.minimum(1.0, clip / length)).sum(axis=0)


@pytest.mark.parametrize("scaling", ["task_mean", pytest.param("sum", marks=pytest.mark.extended)])
def test_gradients_of_samples_are_clipped(scaling, key):
    xs, ys = numbers()
    found, w = after_one_step(xs, ys, key, clip=1.5, scaling=scaling)
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        np.testing.assert_allclose(found[k], clipped_by_hand(x, y, w[k], 1.5) / len(y), rtol=1e-10)


ALGORITHMS = {
    "FedAvg": mj.FedAvg(problems.MODEL, optax.adam(0.1), batch_size=None, local_epochs=3, proximal=0.3),
    "ditto": mj.personalized.ditto(problems.MODEL, SGD, batch_size=None),
}


@pytest.mark.parametrize("name", [pytest.param("FedAvg", marks=pytest.mark.slow), "ditto"])
@pytest.mark.extended
def test_without_noise_or_clipping_it_is_plain_training(name, key):
    problem, algorithm = problems.make_problem(), ALGORITHMS[name]
    plain, private = (mj.run(problem, a, key, num_rounds=3)[0]
                      for a in (algorithm, algorithm.replace(privacy=level(clip=1e6))))  # fmt: skip
    for part in ("own", "shared"):
        both = (jax.tree.leaves(getattr(state, part)) for state in (plain, private))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert np.isfinite(plain.loss)
    assert np.isnan(private.loss)


@pytest.mark.extended
def test_a_sample_with_an_infinite_gradient_counts_for_nothing(key):
    xs, ys = numbers(m=2)
    good, _ = after_one_step([xs[0][1:], xs[1]], [ys[0][1:], ys[1]], key)
    ys[0][0], xs[0][0] = 1e308, 100.0  # their product is infinite
    bad, _ = after_one_step(xs, ys, key, clip=1.0)
    np.testing.assert_allclose(bad[0] * len(ys[0]), good[0] * (len(ys[0]) - 1), rtol=1e-10)


def test_noise_has_its_size_and_is_of_a_client_and_a_step_alone(key):
    xs, ys = numbers(n=5)
    clip, noise = 0.5, 2.0
    plain, _ = after_one_step(xs, ys, key, clip=clip)
    draws = after_one_step(xs, ys, jax.random.split(key, 300), clip=clip, noise=noise)[0] - plain
    sizes = np.array([len(y) for y in ys])
    scaled = draws * sizes[None, :, None] / (clip * noise)
    assert abs(scaled.mean()) < 4 / np.sqrt(scaled.size)
    assert abs(scaled.var() - 1) < 4 * np.sqrt(2 / scaled.size)
    together = np.corrcoef(scaled.reshape(len(draws), -1).T)
    assert np.abs(together - np.eye(len(together))).max() < 4.5 / np.sqrt(len(draws))


@pytest.mark.extended
def test_every_client_may_have_its_own_noise(key):
    xs, ys = numbers(n=5)
    plain, _ = after_one_step(xs, ys, key)
    some, _ = after_one_step(xs, ys, key, noise=np.array([0.0, 1.0, 0.0, 2.0]))
    assert (np.abs(some - plain).max(axis=1) > 1e-9).tolist() == [False, True, False, True]


@pytest.mark.extended
def test_noise_differs_between_rounds(key):
    xs, ys = [np.zeros((4, 3))] * 2, [np.zeros(4)] * 2
    problem = problem_of(xs, ys)
    algorithm = mj.FedAvg(LINEAR, optax.sgd(1e-6), batch_size=None, local_epochs=2, privacy=level(noise=1.0))
    models = [algorithm.init(problem)]
    for _ in range(2):
        models.append(mj.run(problem, algorithm, key, num_rounds=1, state=models[-1])[0])
    first, second = (
        jax.tree.map(lambda a, b: np.asarray(a - b), a.shared, b.shared)[0].w for a, b in zip(models, models[1:], strict=False)
    )  # fmt: skip
    assert np.abs(first - second).max() > 0.1 * np.abs(first).max()


def test_every_sample_is_drawn_by_itself_with_the_same_chance(key):
    n, rows, size, draws = 23, 30, 5, 20_000
    real = jnp.arange(rows) < n
    schedule = ByChance(1, size)

    def drawn(key):
        places, taken = schedule.batches(key, real)(jnp.int32(2))
        return jnp.zeros(rows).at[places].add(taken.astype(float))

    found = np.asarray(jax.vmap(drawn)(jax.random.split(key, draws)))
    share = size / n
    assert set(np.unique(found)) == {0.0, 1.0}
    assert found[:, n:].max() == 0
    spread = np.sqrt(share * (1 - share) / draws)
    np.testing.assert_allclose(found[:, :n].mean(axis=0), share, atol=4.5 * spread)
    assert abs(found.sum(axis=1).var() - n * share * (1 - share)) < 0.15
    together = np.cov(found[:, :n].T) - np.diag(found[:, :n].var(axis=0))
    assert np.abs(together).max() < 5 * share * (1 - share) / np.sqrt(draws)


def test_batches_of_clients_with_few_samples_are_whole(key):
    real = jnp.arange(9) < 4
    places, taken = ByChance(1, 6).batches(key, real)(jnp.int32(0))
    assert sorted(np.asarray(places)[np.asarray(taken)].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(("samples", "size"), [(100, 10), (1000, 32), (10_000, 500), (300, 1)])
def test_a_batch_has_room_for_the_samples_drawn(samples, size):
    stats = pytest.importorskip("scipy.stats")
    from mocha_jax.privacy._budget import _overflow

    exact = stats.binom.sf(headroom(size), samples, size / samples)
    assert exact <= _overflow(samples, size) < 1e-13


@pytest.mark.parametrize("name", ["apfl", "pfedme", "per_fedavg", "fedem", "q_ffl", "afl"])
def test_methods_that_read_more_than_gradients_are_refused(name, key):
    problem = problems.make_problem()
    algorithm = getattr(mj.personalized, name)(problems.MODEL, SGD)
    with pytest.raises(ValueError, match=r"one gradient of a batch each|privacy covers gradients"):
        mj.run(problem, algorithm.replace(privacy=level()), key, num_rounds=1)


def compared(x, y, key, how, weight=None):
    """Noisy mean losses of a batch by three linear models, and those of every sample less their mean, ``[3, n]``."""
    models = LINEAR.init(key)[0]._replace(w=jnp.linspace(-1.0, 2.0, 9).reshape(3, 3, 1), b=jnp.zeros((3, 1)))
    weight = jnp.ones(len(y)) if weight is None else weight
    likelihood = mj.likelihoods.Gaussian()
    found = private_losses(mean_loss, LINEAR, likelihood, (models,), Batch(x, y, weight), key, how)
    each = 0.5 * (np.einsum("nd,kde->kn", x, models.w) - y) ** 2
    return found, each - each.mean(axis=0)


def settings(clip, noise=0.0, expected=5.0):
    return OfClient(*map(jnp.asarray, (clip, noise, expected, 1.0)))


def test_losses_of_models_are_clipped_and_noisy(key):
    xs, ys = numbers(n=7, m=1)
    found, each = compared(xs[0], ys[0], key, settings(1.5))
    factor = np.minimum(1.0, 1.5 / np.linalg.norm(each, axis=0))
    assert factor.min() < 0.5 < 1.0 == factor.max()
    np.testing.assert_allclose(found, (each * factor).sum(axis=1) / 5.0, rtol=1e-10)
    without = np.arange(7) != 3
    fewer, _ = compared(xs[0], ys[0], key, settings(1.5), weight=jnp.asarray(without, float))
    assert 0 < np.linalg.norm(found - fewer) <= 1.5 / 5.0 * (1 + 1e-12)
    draws = jax.vmap(lambda k: compared(xs[0], ys[0], k, settings(1.5, noise=2.0))[0])(jax.random.split(key, 2000))
    scaled = (np.asarray(draws) - np.asarray(found)) * 5.0 / (1.5 * 2.0)
    assert abs(scaled.mean()) < 4 / np.sqrt(scaled.size)
    assert abs(scaled.var() - 1) < 4 * np.sqrt(2 / scaled.size)
    assert np.abs(np.corrcoef(scaled.T) - np.eye(3)).max() < 4.5 / np.sqrt(len(scaled))


@pytest.mark.extended
def test_a_choice_of_a_model_is_a_step(key):
    problem = problems.make_problem()
    ifca = mj.personalized.ifca(problems.MODEL, SGD, clusters=2, batch_size=None, local_epochs=3)
    private = ifca.replace(privacy=level(clip=1e6))
    plain = mj.run(problem, ifca.replace(local_epochs=2), key, num_rounds=3)[0]
    state = mj.run(problem, private, key, num_rounds=3)[0]
    chex.assert_trees_all_close(state.shared, plain.shared, rtol=1e-9, atol=1e-12)
    assert np.asarray(state.spent.steps).tolist() == np.where(problem.data.sizes > 0, 9, 0).tolist()
    for one in (state, plain):
        chosen = ifca.resume(one.exchange(spent=()), problem).ready
        np.testing.assert_array_equal(private.resume(state, problem).ready, chosen)
    assert len(np.unique(chosen, axis=0)) == 2
    drowned = private.replace(privacy=level(noise=1e9))
    firsts = [np.asarray(drowned.replace(seed=seed).resume(state, problem).ready)[:, 0] for seed in range(8)]
    assert 6 <= np.sum(firsts) <= 26  # of 32 coins


@pytest.mark.parametrize(
    "name", ["fedper", "fedrep", "lg_fedavg", "scaffold", "feddyn", "mr_mtl", "fine_tuned", "fedamp"]
)
@pytest.mark.thin(1)
@pytest.mark.extended
def test_one_sample_moves_an_answer_by_no_more_than_the_clip(name, key):
    # Without noise and with one step: what goes up is a function of the private gradient, 1-Lipschitz but for rates.
    problem = problems.make_problem()
    data = problem.data
    algorithm = getattr(mj.personalized, name)(problems.MODEL, optax.sgd(1.0), batch_size=None, privacy=level(clip=0.3))

    def after(x):
        state, _ = mj.run(mj.Prediction(data.replace(x=x)), algorithm, key, num_rounds=1)
        return state.shared, state.rows, state.own

    before, changed = after(data.x), after(data.x.at[1, 0].multiply(100.0))
    moved = [
        np.abs(np.asarray(a) - np.asarray(b)).max()
        for a, b in zip(*map(jax.tree.leaves, (before, changed)), strict=True)
    ]
    assert 1e-6 < max(moved) <= 2 * 0.3 / float(data.sizes[1]) * 4


@pytest.mark.parametrize("make", [mj.Local, mj.FedAvg])
def test_samples_that_do_not_count_the_same_are_refused(make, key):
    xs, ys = numbers()
    problem = problem_of(xs, ys)
    uneven = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[2, 1].multiply(100.0)))
    algorithm = make(LINEAR, SGD, privacy=level(noise=1.0))
    with pytest.raises(ValueError, match=f"{make.__name__}: samples of client 2 have different weights"):
        mj.run(uneven, algorithm, key, num_rounds=1)
    mj.run(uneven, algorithm.replace(privacy=None), key, num_rounds=1)
