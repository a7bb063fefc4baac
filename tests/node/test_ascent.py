"""The local solver against a plain NumPy loop, and what must not change its result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._node.buckets import bucket_sizes, time_major
from mocha_jax._node.local_solver import ascend, visiting_order, visiting_orders
from tests import zoo


def numpy_ascend(data, loss, beta, w, q, steps, orders):
    """Algorithm 1's local solver as a loop over nodes, passes and rows."""
    x, y, c = (np.asarray(a) for a in (data.x, data.y, data.weight))
    beta, u = np.array(beta), np.zeros_like(w)
    done = np.zeros(len(x), int)
    for k in range(len(x)):
        for order in orders:
            for i in order:
                if c[k, i] > 0 and done[k] < steps[k]:
                    g = x[k, i] @ (w[k] + q[k] * u[k])
                    kappa = q[k] * c[k, i] * x[k, i] @ x[k, i]
                    new = float(loss.dual_step(*map(jnp.asarray, (beta[k, i], g, y[k, i], kappa))))
                    u[k] += c[k, i] * (new - beta[k, i]) * x[k, i]
                    beta[k, i] = new
                    done[k] += 1
    return beta, u, done


@pytest.mark.parametrize("loss", ["hinge", "logistic", "squared"])
@pytest.mark.slow
def test_step_by_step(loss, key):
    data = zoo.data(m=3, low=3, high=6, regression=loss == "squared", loss_scaling="task_mean")
    rng = np.random.default_rng(0)
    w, q, steps = rng.normal(size=(3, 4)), np.array([1.0, 2.0, 0.5]), np.array([0, 4, 9])
    start = zoo.LOSSES[loss].project(jnp.asarray(0.3 * rng.normal(size=data.y.shape)), data.y)
    start = start * (data.weight > 0).astype(float)
    orders = [np.asarray(visiting_order(jax.random.fold_in(key, p), data.x.shape[1])) for p in range(2)]
    rows = time_major(data)
    ours = ascend(
        visiting_orders(key, rows, 2), zoo.LOSSES[loss], rows, start,
        jnp.asarray(w), jnp.asarray(q), jnp.asarray(steps, jnp.int32),
    )  # fmt: skip
    beta, u, done = numpy_ascend(data, zoo.LOSSES[loss], start, w, q, steps, orders)
    np.testing.assert_allclose(ours[0], beta, atol=1e-12)
    np.testing.assert_allclose(ours[1], u, atol=1e-12)
    np.testing.assert_array_equal(ours[2], done)
    np.testing.assert_array_equal(done, np.minimum(steps, 2 * np.asarray(data.sizes)))


@pytest.mark.slow
def test_blocks_of_nodes_change_nothing(key, monkeypatch):
    data = zoo.data(m=7)
    rng = np.random.default_rng(0)
    w, q, steps = (
        jnp.asarray(rng.normal(size=(7, 4))),
        jnp.asarray(rng.uniform(1, 2, 7)),
        jnp.arange(7, dtype=jnp.int32),
    )
    start = jnp.zeros_like(data.y)
    results = []
    for numbers in (10_000, 8, 1):  # one block; four of two nodes, of which one is in two; one node each
        monkeypatch.setattr("mocha_jax._node.row_products._BLOCK_NUMBERS", numbers)
        monkeypatch.setattr("mocha_jax._node.local_solver._BLOCK_NUMBERS", numbers)
        jax.clear_caches()
        laid = time_major(data)
        found = ascend(visiting_orders(key, laid, 2), mj.losses.Hinge(), laid, start, w, q, steps)
        results.append((*found, laid.node_predictions(w), laid.weighted_sums(laid.y)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(results[0][3], np.einsum("mnd,md->mn", data.x, w), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(results[0][4], np.einsum("mnd,mn->md", data.x, data.y), rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.usefixtures("buckets_of_any_size")
def test_buckets_of_sizes_change_nothing(key, monkeypatch):
    monkeypatch.setattr(
        "mocha_jax._node.buckets._STEP_NUMBERS", 0
    )  # a step of so little data costs as much as its padding
    rng = np.random.default_rng(3)
    sizes = np.r_[400, rng.integers(2, 30, 20), 90, 0, 150]
    xs = [rng.normal(size=(max(n, 1), 4)) for n in sizes]
    data = mj.pack_tasks(xs, [rng.choice([-1.0, 1.0], len(x)) for x in xs])
    scale = np.where(sizes[:, None] > 0, rng.uniform(0.5, 2, data.y.shape), 0.0)
    data = data.replace(weight=data.weight * scale)
    bucketing = bucket_sizes(data)
    assert len(bucketing) > 2
    assert sum(count for count, _ in bucketing) == 23  # the empty node is in none
    assert sum(count * rows for count, rows in bucketing) < 1.5 * sizes.sum()
    m = len(sizes)
    beta = mj.losses.Hinge().project(jnp.asarray(rng.normal(size=data.y.shape)), data.y)
    w, q = jnp.asarray(rng.normal(size=(m, 4))), jnp.asarray(rng.uniform(1, 2, m))
    steps = jnp.asarray(rng.integers(0, 500, m), jnp.int32)
    plain, dealt = time_major(data), time_major(data, bucketing)
    for laid in (plain, dealt):
        assert laid.node_predictions(w).shape == data.y.shape
    for a, b in zip(
        ascend(visiting_orders(key, plain, 2), mj.losses.Hinge(), plain, beta, w, q, steps),
        ascend(visiting_orders(key, dealt, 2), mj.losses.Hinge(), dealt, beta, w, q, steps),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    real = np.asarray(data.weight > 0).astype(float)
    np.testing.assert_allclose(dealt.node_predictions(w) * real, plain.node_predictions(w) * real, rtol=1e-12)
    factors = data.weight * beta
    np.testing.assert_allclose(dealt.weighted_sums(factors), plain.weighted_sums(factors), rtol=1e-12, atol=1e-12)

    def scaled(given, by_node, beta, y):
        return given * by_node[0][..., None] * beta + y

    there = [laid.map_rows(scaled, 2.0, (q,), beta, data.y) * real for laid in (plain, dealt)]
    np.testing.assert_allclose(there[1], there[0], rtol=1e-12)

    def terms(given, z, y, beta):
        return given * z**2 + y, z * beta

    sums = dealt.sum_over_rows(terms, 3.0, w, beta), data.sum_over_rows(terms, 3.0, w, beta)
    for a, b in zip(*sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_samples_of_half_precision_are_another_problem_solved_exactly(key):
    rng = np.random.default_rng(1)
    xs = [rng.normal(size=(n, 6)) for n in (12, 30, 7)]
    ys = [np.sign(x[:, 0] + 0.1) for x in xs]
    half = mj.pack_tasks(xs, ys, dtype="bfloat16")
    assert half.x.dtype == jnp.bfloat16
    assert half.y.dtype == half.weight.dtype == half.dtype == jnp.float64
    rounded = half.replace(x=half.x.astype(jnp.float64))
    assert float(jnp.abs(rounded.x - mj.pack_tasks(xs, ys).x).max()) > 1e-4
    for algorithm in (mj.Mocha(), mj.MiniBatchSdca(batch=4), mj.Cocoa(0.2)):
        found = [
            mj.run(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1)), algorithm, key,
                   num_rounds=20)[1].gap
            for data in (half, rounded)
        ]  # fmt: skip
        np.testing.assert_allclose(found[0], found[1], rtol=1e-9)
    part, rest = half.split(key, 0.5)
    assert part.x.dtype == rest.pad(nodes=5).x.dtype == half.append(part).x.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="16 bits"):
        mj.pack_tasks(xs, ys, dtype="float8_e4m3fn")


def test_sizes_that_are_alike_or_unknown_make_one_bucket():
    xs = [np.ones((n, 3)) for n in (20, 24, 22)]
    data = mj.pack_tasks(xs, [np.ones(len(x)) for x in xs])
    assert bucket_sizes(data) == ()
    sizes = [400, *[4] * 59]
    few = mj.pack_tasks([np.ones((n, 20)) for n in sizes], [np.ones(n) for n in sizes])
    assert bucket_sizes(few) == ()  # two would save less than half a million numbers
    assert jax.jit(lambda d: jnp.zeros(len(bucket_sizes(d))))(data).shape == (0,)


def test_visiting_order_is_a_permutation_and_padding_keeps_it(key):
    short, long = np.asarray(visiting_order(key, 20)), np.asarray(visiting_order(key, 33))
    assert sorted(short) == list(range(20))
    np.testing.assert_array_equal(long[long < 20], short)
    first = [int(visiting_order(jax.random.fold_in(key, i), 4)[0]) for i in range(400)]
    assert np.abs(np.bincount(first) / 400 - 0.25).max() < 0.07  # any row may come first


@pytest.mark.parametrize("loss", zoo.LOSSES)
@pytest.mark.thin(2)
def test_every_epoch_improves_the_subproblem(loss, key):
    # The subproblem (4) of each node, evaluated independently of the solver.
    loss = zoo.LOSSES[loss]
    data = zoo.data(regression=not loss.binary)
    q = jnp.full(5, 2.0)
    w = jnp.asarray(np.random.default_rng(3).normal(size=(5, 4)))

    def subproblem(beta, u):
        conjugates = jnp.where(data.weight > 0, data.weight * loss.conjugate(beta, data.y), 0.0)
        return conjugates.sum(1) + jnp.sum(w * u, 1) + 0.5 * q * jnp.sum(u * u, 1)

    beta, values = loss.project(jnp.zeros_like(data.y), data.y), []
    base = np.einsum("mn,mnd->md", data.weight * beta, data.x)
    values.append(subproblem(beta, jnp.zeros_like(w)))
    for epochs in (1, 2, 4, 8):
        rows = time_major(data)
        new, u, _ = ascend(visiting_orders(key, rows, epochs), loss, rows, beta, w, q, jnp.full(5, 10_000))
        np.testing.assert_allclose(np.einsum("mn,mnd->md", data.weight * new, data.x) - base, u, atol=1e-12)
        values.append(subproblem(new, u))
    assert (np.diff(np.asarray(values), axis=0) <= 1e-12).all()


@pytest.mark.parametrize(
    "padding",
    [
        {"nodes": 7, "rows": 31},
        pytest.param({"rows": 29}, marks=pytest.mark.extended),
        pytest.param({"nodes": 8}, marks=pytest.mark.extended),
    ],
    ids=["both", "rows", "nodes"],
)
def test_padding_rows_and_nodes_are_inert_bit_for_bit(key, padding):
    data = zoo.data(loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Graph(zoo.laplacian(5), 0.2, 0.05))
    systems = mj.systems.Dropout(0.3) & mj.systems.PartialEpochs(0.2, 1.0)
    mocha = mj.Mocha(local_epochs=1.5, sigma_prime="per_task")
    state, history = mj.run(problem, mocha, key, num_rounds=20, systems=systems)
    padded = problem.replace(data=data.pad(**padding))
    other, record = mj.run(padded, mocha, key, num_rounds=20, systems=systems)
    np.testing.assert_array_equal(state.beta, other.beta[:5, : data.x.shape[1]])
    np.testing.assert_array_equal(state.w, other.w)
    np.testing.assert_array_equal(history.steps, record.steps)
    np.testing.assert_allclose(history.gap, record.gap, rtol=1e-6)  # a longer sum
    assert (other.beta[5:] == 0).all()


@pytest.mark.slow
def test_task_order_does_not_matter(key):
    xs, ys = zoo.ragged(m=6)
    order = np.random.default_rng(0).permutation(6)
    omega = zoo.laplacian(6)
    make = lambda data, omega: mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Graph(omega, 0.2, 0.05))  # noqa: E731
    a = mj.run(make(mj.pack_tasks(xs, ys), omega), mj.Mocha(sigma_prime="per_task"), key, num_rounds=30)
    permuted = mj.pack_tasks([xs[t] for t in order], [ys[t] for t in order])
    b = mj.run(make(permuted, omega[np.ix_(order, order)]), mj.Mocha(sigma_prime="per_task"), key, num_rounds=30)
    np.testing.assert_allclose(a[0].w[order], b[0].w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(a[1].gap, b[1].gap, rtol=1e-6)


@pytest.mark.slow
def test_ugly_tasks():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in (1, 2, 12, 5, 4)]
    xs[3][:] = 0.0  # nothing but zero rows
    xs[4][:, 0] = 7.0  # a constant feature
    ys = [np.ones(1), -np.ones(2), np.sign(rng.normal(size=12)), np.ones(5), np.array([1.0, -1, 1, -1])]
    for loss in zoo.LOSSES.values():
        problem = mj.Problem(mj.pack_tasks(xs, ys), loss, mj.regularizers.MeanRegularized(0.2, 0.1))
        state, history = mj.run(
            problem,
            mj.Mocha(local_epochs=5.0, sigma_prime="per_task"),
            jax.random.key(0),
            num_rounds=4000,
            record_every=4000,
        )
        assert history.relative_gap[-1] <= 1e-6, loss
        assert np.isfinite(state.w).all()


@pytest.mark.parametrize(("m", "d"), [(1, 1), (1, 3), (2, 1)])
@pytest.mark.slow
def test_smallest_problems(m, d):
    problem = mj.Problem(zoo.data(m=m, d=d), mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.2, 0.1))
    assert mj.solve(problem, tol=1e-6, max_rounds=5000).status == mj.Status.CONVERGED
