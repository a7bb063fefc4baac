"""VIRTUAL against closed forms: Gaussians, exact posteriors, plain variational inference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, stats

import mocha_jax as mj
from mocha_jax._neural.gaussian import DiagonalGaussian, divergence, draw

LINEAR = mj.networks.Model(lambda key: jnp.zeros((4, 1)), lambda w, x: x @ w)
NOISE, PRIOR = 0.5, 2.0


def orthogonal(seed, n):
    """Samples whose features are orthogonal: the exact posterior then has no correlations."""
    rng = np.random.default_rng(seed)
    x = np.linalg.qr(rng.normal(size=(n, 4)))[0] * rng.uniform(1.0, 3.0, 4)
    return x, x @ np.array([1.0, -0.5, 0.0, 2.0]) + NOISE * rng.normal(size=n)


def regression(*sizes, samples=orthogonal):
    xs, ys = zip(*(samples(seed, n) for seed, n in enumerate(sizes)), strict=True)
    return mj.Prediction(mj.pack_tasks(xs, ys), mj.likelihoods.Gaussian(NOISE)), xs, ys


def settled(epochs):
    """Adam with a rate that falls to nothing, so that Monte-Carlo noise averages out."""
    return optax.adam(optax.cosine_decay_schedule(0.05, epochs))


def classification(m=3):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(12 + 3 * k, 5)) for k in range(m)]
    ys = [np.digitize(x[:, 0] + 0.3 * k * x[:, 1], [-0.5, 0.5]) for k, x in enumerate(xs)]
    return mj.Prediction(mj.pack_tasks(xs, ys))


NETWORK = mj.networks.Lateral(5, 3, (4,))


def make_virtual(**settings):
    return mj.Virtual(NETWORK, optax.adam(0.02), **{"samples": 2, "draws": 3, "local_epochs": 2, **settings})


def product_is_posterior(state):
    for factors, posterior in zip(*map(jax.tree.leaves, (state.factors, state.posterior)), strict=True):
        np.testing.assert_allclose(np.sum(factors, axis=0), posterior, rtol=1e-6, atol=1e-6 * np.abs(posterior).max())


def test_the_divergence_is_the_integral():
    rng = np.random.default_rng(0)
    mq, mp, tq, tp = rng.normal(size=3), rng.normal(size=3), rng.uniform(0.3, 4, 3), rng.uniform(0.3, 4, 3)
    q, p = DiagonalGaussian.of(jnp.asarray(mq), jnp.asarray(tq)), DiagonalGaussian.of(jnp.asarray(mp), jnp.asarray(tp))
    expected = 0.0
    for i in range(3):
        one, two = stats.norm(mq[i], tq[i] ** -0.5), stats.norm(mp[i], tp[i] ** -0.5)
        expected += integrate.quad(lambda z, a=one, b=two: a.pdf(z) * (a.logpdf(z) - b.logpdf(z)), -15, 15)[0]
    np.testing.assert_allclose(divergence(q, p), expected, rtol=1e-7)
    np.testing.assert_allclose(divergence(q, q), 0.0, atol=1e-15)


def test_products_of_gaussians_are_those_of_densities():
    z = np.linspace(-2, 3, 7)
    a, b = DiagonalGaussian.of(jnp.array([0.3]), jnp.array([2.0])), DiagonalGaussian.around_zero(0.5, jnp.zeros(1))
    both = a * b
    ratio = stats.norm(0.3, 2**-0.5).pdf(z) * stats.norm(0, 0.5).pdf(z)
    ratio /= stats.norm(both.mean[0], both.scale[0]).pdf(z)
    np.testing.assert_allclose(ratio, ratio[0])
    chex.assert_trees_all_close(both / b, a, rtol=1e-12)
    chex.assert_trees_all_close(a**0.3 * a**0.7, a, rtol=1e-12)


@pytest.mark.parametrize("noise", ["flipout", "local"])
@pytest.mark.thin(1)
def test_noise_of_rows_has_the_right_moments_and_is_uncorrelated(noise, key):
    mean, scale = np.arange(6.0) / 6, np.full(6, 0.4)
    matrix = mean.reshape(2, 3)
    x = np.array([[1.0, -2.0], [0.5, 0.3]])
    keys = jax.random.split(key, 20_000)

    def once(k, noise):
        return jnp.asarray(x) @ draw(k, jnp.asarray(mean), jnp.asarray(scale), lambda v: v.reshape(2, 3), noise)

    def together(outs):
        """How the rows of one draw vary together."""
        rows = outs - outs.mean(0)
        return np.abs((rows[:, 0] * rows[:, 1]).mean(0) / np.sqrt(outs.var(0).prod(0)))

    outs, plain = (np.asarray(jax.vmap(lambda k, f=kind: once(k, f))(keys)) for kind in (noise, "shared"))
    for o in (outs, plain):
        np.testing.assert_allclose(o.mean(0), x @ matrix, atol=0.03)
        np.testing.assert_allclose(o.var(0), np.repeat(x**2 @ scale[:2, None] ** 2, 3, 1), rtol=0.05)
    assert together(outs).max() < 0.03
    assert together(plain).min() > 0.05


@pytest.mark.extended
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel": True, "damping": 0.3, "sent": 0.4},
        pytest.param({"parallel": True, "damping": 0.5}, marks=pytest.mark.slow),
        pytest.param({"noise": "local", "sent": 0.5}, marks=pytest.mark.slow),
        pytest.param({"prior": "each"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.thin(1)
def test_factors_multiply_to_the_posterior_after_every_refinement(settings, key):
    problem, algorithm = classification(), make_virtual(**settings)
    state = algorithm.init(problem)
    product_is_posterior(state)
    for _ in range(5):
        before = state
        state, _ = mj.run(problem, algorithm, key, num_rounds=1, state=state, systems=mj.systems.Dropout(0.3))
        product_is_posterior(state)
        for leaf in (state.posterior.precision, state.private.precision, state.factors.precision):
            assert (np.asarray(leaf) > 0).all()
    assert any((np.asarray(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (before, state)), strict=True))


@pytest.mark.slow
def test_the_posterior_of_a_linear_model_is_exact(key):
    problem, xs, ys = regression(8, 12, 6)
    epochs = 1500
    algorithm = mj.Virtual(
        LINEAR, settled(epochs), batch_size=None, local_epochs=epochs, samples=400, prior_scale=PRIOR
    )
    state, _ = mj.run(problem, algorithm, key, num_rounds=6)
    precision = PRIOR**-2 + sum((x**2).sum(0) for x in xs) / NOISE**2
    mean = sum(x.T @ y for x, y in zip(xs, ys, strict=True)) / NOISE**2 / precision
    np.testing.assert_allclose(state.posterior.mean, mean, rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(state.posterior.precision, precision, rtol=2e-2)
    for k, x in enumerate(xs):  # so is every factor: the likelihood of the client's samples and its share of the prior
        own = PRIOR**-2 / 3 + (x**2).sum(0) / NOISE**2
        np.testing.assert_allclose(state.factors.precision[k], own, rtol=5e-2)


@pytest.mark.slow
def test_the_letter_of_the_paper_counts_the_prior_for_every_client(key):
    problem, xs, _ = regression(8, 12)
    epochs = 1000
    algorithm = mj.Virtual(
        LINEAR, settled(epochs), batch_size=None, local_epochs=epochs, samples=200, prior_scale=0.3, prior="each"
    )
    state, _ = mj.run(problem, algorithm, key, num_rounds=4)
    precision = 2 * 0.3**-2 + sum((x**2).sum(0) for x in xs) / NOISE**2
    np.testing.assert_allclose(state.posterior.precision, precision, rtol=3e-2)


@pytest.mark.slow
def test_a_cold_posterior_counts_every_sample_more_often(key):
    problem, (x, _), (y, _) = regression(8, 1)
    problem = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[1].set(0.0)))
    epochs = 1000
    algorithm = mj.Virtual(
        LINEAR, settled(epochs), batch_size=None, local_epochs=epochs, samples=200, prior_scale=PRIOR, temperature=0.2
    )
    state, _ = mj.run(problem, algorithm, key, num_rounds=2)
    precision = PRIOR**-2 + (x**2).sum(0) / NOISE**2 / 0.2
    np.testing.assert_allclose(state.posterior.precision, precision, rtol=3e-2)
    np.testing.assert_allclose(state.posterior.mean, x.T @ y / NOISE**2 / 0.2 / precision, rtol=5e-3, atol=5e-3)


def test_clients_begin_with_the_same_private_parameters():
    problem, algorithm = classification(), make_virtual()
    means = np.asarray(algorithm.init(problem).private.mean)
    assert (means == means[0]).all()
    assert np.unique(means[0]).size > 10


@pytest.mark.slow
def test_one_client_is_plain_variational_inference(key):
    # With correlated features the best mean-field Gaussian has the exact mean and the precisions on the exact diagonal.
    def correlated(seed, n):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 4)) @ (np.eye(4) + 0.4)
        return x, x @ np.array([1.0, -0.5, 0.0, 2.0]) + NOISE * rng.normal(size=n)

    problem, (x,), (y,) = regression(12, samples=correlated)
    epochs = 2000
    algorithm = mj.Virtual(
        LINEAR, settled(epochs), batch_size=None, local_epochs=epochs, samples=400, prior_scale=PRIOR
    )
    state, history = mj.run(problem, algorithm, key, num_rounds=2)
    exact = np.eye(4) / PRIOR**2 + x.T @ x / NOISE**2
    np.testing.assert_allclose(state.posterior.precision, np.diag(exact), rtol=2e-2)
    mean = np.linalg.solve(exact, x.T @ y / NOISE**2)
    np.testing.assert_allclose(state.posterior.mean, mean, atol=1e-2)
    # What is minimised, over all samples, is what it should be: expected loss and divergence from the prior.
    q = stats.norm(state.posterior.mean, state.posterior.scale)
    squares = ((y - x @ q.mean()) ** 2).sum() + (x**2 @ q.var()).sum()
    expected = squares / 2 / NOISE**2 + len(y) * (np.log(NOISE) + 0.5 * np.log(2 * np.pi))
    ratio = q.var() / PRIOR**2
    expected += 0.5 * (ratio - 1 - np.log(ratio) + q.mean() ** 2 / PRIOR**2).sum()
    np.testing.assert_allclose(history.loss[-1] * len(y), expected, rtol=2e-2)


@pytest.mark.slow
def test_clients_are_refined_in_order(key):
    problem, algorithm = classification(), make_virtual(order=(2, 0))
    table = [(2,), (0, 2), (0, 2)]
    state = algorithm.init(problem)
    for visited in table:
        state, history = mj.run(problem, algorithm, key, num_rounds=1, state=state)
        assert tuple(np.flatnonzero(np.isfinite(state.losses))) == visited
        assert int(history.active[0]) == 1
    _, history = mj.run(problem, make_virtual(), key, num_rounds=4)
    sizes = np.asarray(problem.data.sizes)
    assert history.steps.tolist() == (2 * -(-sizes // 10))[[0, 1, 2, 0]].tolist()
    assert mj.run(problem, make_virtual(parallel=True), key, num_rounds=1)[1].active.tolist() == [3]


@pytest.mark.slow
def test_first_factors_multiply_to_the_first_scale(key):
    problem, algorithm = classification(), make_virtual(parallel=True, damping=1.0, first_scale=0.1, rate=0.0)
    state, _ = mj.run(problem, algorithm, key, num_rounds=1)  # a rate of 0: what training begins with
    np.testing.assert_allclose(state.posterior.scale, 0.1, rtol=1e-9)
    np.testing.assert_allclose(state.private.scale, 0.1, rtol=1e-9)


@pytest.mark.slow
def test_damping_goes_a_part_of_the_way(key):
    problem = classification()
    start = make_virtual().init(problem)
    whole, _ = mj.run(problem, make_virtual(parallel=True, damping=1.0), key, num_rounds=1)
    part, _ = mj.run(problem, make_virtual(parallel=True, damping=0.3), key, num_rounds=1)
    mixed = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, start.factors, whole.factors)
    chex.assert_trees_all_close(part.factors, mixed, rtol=1e-9, atol=1e-9)
    chex.assert_trees_all_close(part.private, whole.private, rtol=1e-9, atol=1e-9)
    default, _ = mj.run(problem, make_virtual(parallel=True), key, num_rounds=1)
    mixed = jax.tree.map(lambda a, b: (2.0 * a + b) / 3.0, start.factors, whole.factors)
    chex.assert_trees_all_close(default.factors, mixed, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_sparse_answer_changes_that_share(key):
    problem = classification()
    algorithm = make_virtual(sent=0.25)
    start = algorithm.init(problem)
    state, _ = mj.run(problem, algorithm, key, num_rounds=1)
    changed = np.asarray(state.posterior.precision != start.posterior.precision)
    assert abs(changed.mean() - 0.25) < 0.05
    assert algorithm.message(problem) == (2.0 * len(start.first), 0.75 * len(start.first))


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), {"parallel": True, "damping": 0.5}])
@pytest.mark.slow
def test_any_number_of_devices_gives_the_same(settings, key):
    problem, algorithm = classification(), make_virtual(**settings)
    whole, parted = (mj.solve(p, algorithm, key=key, tol=None, max_rounds=4) for p in (problem, mj.shard(problem)))
    np.testing.assert_allclose(whole.history.loss, parted.history.loss, rtol=1e-8)
    np.testing.assert_allclose(whole.history.error, parted.history.error, rtol=1e-8)
    chex.assert_trees_all_close(whole.state.posterior, parted.state.posterior, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_predictions_say_how_sure_they_are(key):
    problem, algorithm = classification(), make_virtual(draws=20, local_epochs=40)
    state, _ = mj.run(problem, algorithm, key, num_rounds=6)
    near, far = problem.data.x[1], 50.0 * problem.data.x[1]
    for x in (near, far):
        p = algorithm.predict(state, problem, 1, x)
        np.testing.assert_allclose(p.mean.sum(-1), 1.0, rtol=1e-6)
        assert (
            (p.mutual_information >= 0) & (p.mutual_information <= p.entropy + 1e-9) & (p.entropy <= np.log(3) + 1e-9)
        ).all()
    y, real = problem.data.y[1], problem.data.weight[1] > 0
    right = np.asarray(algorithm.predict(state, problem, 1, near).mean).argmax(-1) == np.asarray(y)
    np.testing.assert_allclose(1 - algorithm.scores(state, problem).error[1], right[np.asarray(real)].mean())
    linear, _, _ = regression(8)
    model = mj.Virtual(LINEAR, optax.adam(0.1), local_epochs=50, draws=2000, batch_size=None, prior_scale=PRIOR)
    state, _ = mj.run(linear, model, key, num_rounds=1)
    p = model.predict(state, linear, 0, linear.data.x[0])
    variance = np.asarray(linear.data.x[0]) ** 2 @ np.asarray(state.posterior.precision) ** -1
    np.testing.assert_allclose(p.std.ravel() ** 2, variance, rtol=0.15)
    assert np.isnan(p.entropy).all()


@pytest.mark.slow
def test_a_resumed_solve_ends_where_a_whole_one_does(key, tmp_path):
    problem, path = classification(), tmp_path / "run.npz"

    def solve(rounds, **more):
        return mj.solve(problem, make_virtual(), key=key, tol=None, max_rounds=rounds, chunk=2, **more)

    whole = solve(6)
    solve(4, checkpoint=path)
    chex.assert_trees_all_equal(whole.state, solve(6, checkpoint=path).state)


@pytest.mark.slow
def test_an_exploding_refinement_is_left_out(key):
    algorithm = make_virtual(parallel=True).replace(client_optimizer=optax.sgd(1e300))
    solution = mj.solve(classification(), algorithm, key=key, tol=None, max_rounds=3)
    assert solution.status is mj.Status.NON_FINITE
    assert solution.history.diverged.tolist() == [3]
    chex.assert_trees_all_equal(solution.state.factors, algorithm.init(classification()).factors)


def test_what_does_not_fit_is_said(key):
    with pytest.raises(ValueError, match="order names client 7"):
        mj.run(classification(), make_virtual(order=(0, 7)), key, num_rounds=1)
    with pytest.raises(ValueError, match="leave order out"):
        make_virtual(order=(0, 1), parallel=True)
    with pytest.raises(ValueError, match="damping must be in"):
        make_virtual(damping=0.0)
    with pytest.raises(ValueError, match="temperature must be"):
        make_virtual(temperature=-1.0)
    with pytest.raises(ValueError, match="prior must be one of"):
        make_virtual(prior="twice")
    with pytest.raises(ValueError, match="order must be one of"):
        make_virtual(order="any")
    with pytest.raises(ValueError, match="factors must be one of"):
        make_virtual(factors="none")


@pytest.mark.slow
def test_one_bad_refinement_does_not_end_the_rest(key):
    problem = classification()
    x = np.asarray(problem.data.x).copy()
    x[1] *= 1e306
    broken = problem.replace(data=problem.data.replace(x=jnp.asarray(x)))
    algorithm = make_virtual().replace(model=mj.networks.MLP(5, 3, (4,)), client_optimizer=optax.sgd(1e-3))
    solution = mj.solve(broken, algorithm, key=key, tol=None, max_rounds=6)
    assert solution.status is mj.Status.MAX_ROUNDS
    assert solution.history.diverged.tolist() == [0, 1, 1, 1, 2, 2]


def test_the_divergence_is_right_for_very_different_scales():
    for ratio in (1e-12, 1e-8, 1e-4, 0.9, 1.1, 1e4, 1e8):
        q, p = (DiagonalGaussian.of(jnp.zeros(1, jnp.float32), jnp.full(1, t, jnp.float32)) for t in (1.0, ratio))
        value, slope = jax.value_and_grad(lambda t, p=p: divergence(DiagonalGaussian.of(jnp.zeros(1, t.dtype), t), p))(
            q.precision
        )
        np.testing.assert_allclose(value, 0.5 * (ratio - 1 - np.log(ratio)), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(slope, [0.5 * (1 - ratio)], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_client_that_joins_later_is_whole(key):
    problem = classification()
    without = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[2].set(0.0)))
    algorithm = make_virtual(sent=0.25)
    state, _ = mj.run(without, algorithm, key, num_rounds=2)
    assert (state.factors.precision[2] == 0).all()
    state, _ = mj.run(problem, algorithm, key, num_rounds=3, state=state)
    state, _ = mj.run(problem, algorithm.replace(sent=1.0), key, num_rounds=3, state=state)
    assert (state.factors.precision > 0).all()


def test_weights_of_task_means_are_refused(key):
    data = classification().data
    with pytest.raises(ValueError, match="loss_scaling='sum'"):
        mj.run(mj.Prediction(data.replace(loss_scaling="task_mean")), make_virtual(), key, num_rounds=1)
    with pytest.raises(ValueError, match="there is no client 3"):
        make_virtual().predict(make_virtual().init(classification()), classification(), 3, data.x[0])


@pytest.mark.slow
def test_clients_come_in_a_new_random_order_in_every_cycle(key):
    problem, algorithm = classification(5), make_virtual(order="random")

    def turns(problem, algorithm, rounds=30):
        steps = [np.asarray(algorithm.request(problem, r).steps) for r in range(rounds)]
        assert all((s > 0).sum() == 1 for s in steps)
        return [int(s.argmax()) for s in steps]

    orders = np.reshape(turns(problem, algorithm), (6, 5))
    assert (np.sort(orders) == np.arange(5)).all()
    assert len({tuple(order) for order in orders}) > 3
    assert turns(problem, algorithm.replace(seed=1)) != orders.ravel().tolist()
    # Who has no data has no turn, and others keep their order.
    without = problem.replace(data=problem.data.replace(weight=problem.data.weight.at[2].set(0.0)))
    assert turns(without, algorithm, 4) == [k for k in orders[0] if k != 2]
    state, history = mj.run(problem, algorithm, key, num_rounds=5)
    assert history.active.tolist() == [1] * 5
    assert np.isfinite(state.losses).all()


@pytest.mark.slow
def test_some_clients_at_once_leave_the_factors_of_the_others(key):
    problem = classification(5)
    algorithm = make_virtual(parallel=True, damping=0.5)
    start = algorithm.init(problem)
    state, history = mj.run(problem, algorithm, key, num_rounds=1, systems=mj.systems.Sampled(0.4))
    moved = (np.asarray(state.factors.precision) != np.asarray(start.factors.precision)).any(axis=1)
    assert history.active.tolist() == [2] == [moved.sum()]
    product_is_posterior(state)


@pytest.mark.slow
def test_the_letter_begins_at_the_product_of_its_factors(key):
    problem = classification()
    letter = mj.Virtual.paper(NETWORK, optax.adam(0.02), 2, samples=2, first_scale=0.1)
    start = letter.init(problem)
    product_is_posterior(start)
    np.testing.assert_allclose(start.posterior.mean, start.first, rtol=1e-12)
    np.testing.assert_allclose(start.posterior.scale, 0.1, rtol=1e-12)
    still, _ = mj.run(problem, letter.replace(rate=0.0), key, num_rounds=1)  # training begins there
    chex.assert_trees_all_close(still.factors, start.factors, rtol=1e-9, atol=1e-9)
    state, _ = mj.run(problem, letter, key, num_rounds=3)
    product_is_posterior(state)


@pytest.mark.slow
def test_pruning_leaves_out_what_is_least_sure(key):
    problem, algorithm = classification(), make_virtual()
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    sizes = jax.tree.map(lambda a: jax.random.uniform(key, a.shape, minval=0.1, maxval=9.0), state.private.precision)
    state = state.replace(private=DiagonalGaussian(sizes, state.private.shift))  # of unequal scales
    chex.assert_trees_all_close(state.pruned(0.0), state)
    sparse = jax.jit(lambda share: state.pruned(share))(0.6)
    for before, after in ((state.posterior, sparse.posterior), (state.private, sparse.private)):
        mean, scale = np.asarray(before.mean), np.asarray(before.scale)
        gone = np.asarray(after.mean) == 0
        np.testing.assert_allclose(gone.mean(axis=-1), 0.6, atol=0.5 / gone.shape[-1])
        ratio = np.abs(mean) / scale
        for g, r in zip(np.atleast_2d(gone), np.atleast_2d(ratio), strict=True):
            assert r[g].max() < r[~g].min()
        np.testing.assert_allclose(np.asarray(after.mean)[~gone], mean[~gone], rtol=1e-12)
        assert (np.asarray(after.scale)[gone] == 0).all()
    # What is left out is out of every draw: the outputs are those of means and draws of the rest.
    x = problem.data.x[1]
    nothing = algorithm.predict(state.pruned(1.0 - 1e-9), problem, 1, x)
    np.testing.assert_allclose(nothing.mean, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(nothing.std, 0.0, atol=1e-7)
    params = algorithm.parameters(sparse, problem, 1)
    zeros = sum((np.asarray(leaf) == 0).sum() for leaf in jax.tree.leaves(params))
    assert abs(zeros / sum(leaf.size for leaf in jax.tree.leaves(params)) - 0.6) < 0.01
    with pytest.raises(ValueError, match="share must be in"):
        state.pruned(1.0)


@pytest.mark.slow
def test_a_state_before_any_answer_is_pruned_too():
    problem, algorithm = classification(), make_virtual()
    start = algorithm.init(problem)
    sparse = start.pruned(0.5)
    kept = np.abs(start.first) > np.quantile(np.abs(start.first), 0.5)
    np.testing.assert_array_equal(sparse.mean, np.where(kept, start.first, 0.0))
