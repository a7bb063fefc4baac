"""The private gradient: clipped as by hand, batches by chance, noise of the size that is accounted for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from mocha_jax._neural.private_gradients import ByChance, headroom
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


@pytest.mark.parametrize("name", ["apfl", "pfedme", "per_fedavg", "ifca", "fedem", "q_ffl", "afl"])
def test_methods_that_read_more_than_gradients_are_refused(name, key):
    problem = problems.make_problem()
    algorithm = getattr(mj.personalized, name)(problems.MODEL, SGD)
    with pytest.raises(ValueError, match=r"one gradient of a batch each|privacy covers gradients"):
        mj.run(problem, algorithm.replace(privacy=level()), key, num_rounds=1)


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
