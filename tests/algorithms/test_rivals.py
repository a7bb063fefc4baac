"""CoCoA, mini-batch SDCA and mini-batch SGD do what their definitions say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._node.local_accuracy import solve_to
from tests import zoo

REGULARIZERS = {
    "independent": mj.regularizers.Independent(np.linspace(0.1, 0.3, 5)),
    "mean": mj.regularizers.MeanRegularized(0.2, 0.1),
    "graph": mj.regularizers.Graph(zoo.laplacian(5), 0.2, 0.1),
    "clustered": mj.regularizers.Clustered(0.2, 0.1, 2),
    "probabilistic": mj.regularizers.Probabilistic(0.2, 2.0),
    "sparse": mj.regularizers.SparsePrecision(0.1, 1.0, 0.05, 0.2),
}
each_regularizer = pytest.mark.parametrize("name", REGULARIZERS)


def problem(regularizer="mean", loss="hinge", **kwargs):
    data = zoo.data(regression=not zoo.LOSSES[loss].binary, **kwargs)
    return mj.Problem(data, zoo.LOSSES[loss], REGULARIZERS[regularizer])


def everything(algorithm, p, key):
    return mj.systems.Full().work(key, p.data, algorithm.request(p))


def step(algorithm):
    p, key = problem(), jax.random.key(0)
    return algorithm.step(key, algorithm.init(p), p, everything(algorithm, p, key))


# CoCoA


@pytest.mark.parametrize(("loss", "theta"), [("hinge", 0.5), ("logistic", 0.9), ("squared", 1e-3)])
@pytest.mark.slow
def test_cocoa_keeps_theta_on_every_node_in_every_round(theta, loss, key):
    _, history = mj.run(
        problem(loss=loss), mj.Cocoa(theta, max_epochs=10_000), key, num_rounds=6, watch=mj.Watch(theta=1e-9)
    )
    measured = np.asarray(history.nodes.theta)
    assert not history.capped.any()
    assert np.nanmax(measured) <= theta
    assert (np.nan_to_num(measured, nan=0.0) >= 0).all()


@pytest.mark.slow
def test_cocoa_says_when_it_is_capped(key):
    p = problem(low=10, high=30)
    algorithm = mj.Cocoa(1e-6, max_epochs=2)
    _, info = algorithm.step(key, algorithm.init(p), p, everything(algorithm, p, key))
    assert info.capped.all()
    np.testing.assert_array_equal(info.steps, 2 * p.data.sizes)
    _, history = mj.run(p, algorithm, key, num_rounds=4, record_every=2)
    assert history.capped.tolist() == [10, 10]
    # One node at its cap does not make the others run to theirs.
    _, uneven = mj.run(p, mj.Cocoa(0.05, max_epochs=1000), key, num_rounds=5, watch=mj.Watch())
    assert len(set((np.asarray(uneven.nodes.steps) / np.asarray(p.data.sizes))[0].tolist())) > 1


@pytest.mark.slow
def test_cocoa_obeys_its_budget(key):
    p = problem(low=10, high=30)
    algorithm = mj.Cocoa(1e-6)
    work = mj.systems.Work(jnp.array([3, 0, 25, 7, 9], jnp.int32), jnp.array([True, True, True, True, False]))
    _, info = algorithm.step(key, algorithm.init(p), p, work)
    assert info.steps.tolist() == [3, 0, 25, 7, 0]
    assert info.capped.tolist() == [True, False, True, True, False]
    assert info.flops.tolist()[1] == info.flops.tolist()[4] == 0.0


@pytest.mark.slow
def test_cocoa_with_theta_0_solves_its_subproblems(key):
    p = problem(loss="squared")
    algorithm = mj.Cocoa(0.0, max_epochs=3000)
    _, history = mj.run(p, algorithm, key, num_rounds=2, watch=mj.Watch(theta=1e-12))
    assert np.nanmax(history.nodes.theta) <= 1e-8


@pytest.mark.slow
def test_subproblems_are_solved_to_what_a_linear_solver_finds(key):
    # With squared loss: u of the optimum of (4) in closed form, node by node.
    p = problem(loss="squared", loss_scaling="task_mean")
    algorithm = mj.Mocha(sigma_prime="per_task")
    state, _ = mj.run(p, algorithm, key, num_rounds=1)
    sub = algorithm.subproblems(state, p)
    found = solve_to(key, sub, jnp.asarray(1e-14), jnp.full(5, 10**8, jnp.int32), passes=5000)
    x, y, c = (np.asarray(a) for a in (p.data.x, p.data.y, p.data.weight))
    for k in range(5):
        real = c[k] > 0
        xk, yk, ck, bk = x[k][real], y[k][real], c[k][real], np.asarray(sub.beta)[k][real]
        gram = float(sub.q[k]) * xk @ (xk.T * ck)
        # l*(-b) = b^2/2 - b y, so b - y + x.(w + q u) = 0 for every sample.
        beta = np.linalg.solve(np.eye(len(yk)) + gram, yk - xk @ np.asarray(sub.w)[k] + gram @ bk)
        np.testing.assert_allclose(np.asarray(found.beta)[k][real], beta, atol=1e-7)
        np.testing.assert_allclose(found.u[k], xk.T @ (ck * (beta - bk)), atol=1e-7)


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
@pytest.mark.slow
def test_the_room_of_a_subproblem_is_its_gap_and_what_was_gained(loss, key):
    p = problem(loss=loss, loss_scaling="task_mean")
    algorithm = mj.Mocha(sigma_prime="per_task")
    sub = algorithm.subproblems(mj.run(p, algorithm, key, num_rounds=1)[0], p)
    found = solve_to(key, sub, jnp.asarray(0.3), jnp.full(5, 10**8, jnp.int32), passes=50)
    gained = np.asarray(sub.value(sub.beta) - sub.value(found.beta))
    np.testing.assert_allclose(found.possible - found.gap, gained, rtol=1e-8, atol=1e-12)


# Mini-batch SDCA


@pytest.mark.parametrize(("name", "loss"), [("graph", "hinge"), ("probabilistic", "squared"), ("sparse", "hinge")])
@pytest.mark.slow
def test_averaged_sdca_never_loses(name, loss, key):
    # beta = 1 averages single coordinate steps, each of which is exact: the dual cannot fall.
    p = problem(name, loss)
    systems = mj.systems.PartialEpochs(0.3, 1.0) & mj.systems.Dropout(0.2)
    _, history = mj.run(p, mj.MiniBatchSdca(batch=3, beta=1.0, omega_every=100), key, num_rounds=60, systems=systems)
    assert (np.diff(history.dual) >= -1e-12 * abs(history.dual[-1])).all()
    assert history.dual[-1] > history.dual[0]


@pytest.mark.slow
def test_a_batch_of_one_on_one_node_is_an_exact_coordinate_step(key):
    data = zoo.data(m=1, regression=True)
    p = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.1))
    algorithm = mj.MiniBatchSdca(batch=1, beta=1.0)
    state = algorithm.init(p)
    after, info = algorithm.step(key, state, p, everything(algorithm, p, key))
    row = np.flatnonzero(np.asarray(after.beta)[0])
    assert info.steps.tolist() == [1]
    assert len(row) == 1
    x, y = np.asarray(data.x)[0, row[0]], float(data.y[0, row[0]])
    # min b^2/2 - b y + |b x|^2 / (4 lam)
    np.testing.assert_allclose(np.asarray(after.beta)[0, row[0]], y / (1 + x @ x / 0.2))
    np.testing.assert_allclose(after.w[0], after.beta[0, row[0]] * x / 0.2)


@pytest.mark.slow
def test_sdca_scales_by_beta_over_the_whole_batch(key):
    p = problem()
    steps = [mj.MiniBatchSdca(batch=3, beta=b) for b in (1.0, 5.0, 15.0, 99.0)]
    start = steps[0].init(p)
    first, fifth, all_, beyond = (a.step(key, start, p, everything(a, p, key))[0].beta - start.beta for a in steps)
    np.testing.assert_allclose(fifth, 5 * first)
    np.testing.assert_allclose(all_, 15 * first)
    np.testing.assert_array_equal(beyond, all_)


@pytest.mark.slow
def test_batches_are_uniform_and_without_replacement(key):
    p = problem(low=4, high=9)
    algorithm = mj.MiniBatchSdca(batch=3, beta=1.0)
    start = algorithm.init(p)
    work = everything(algorithm, p, key)

    def touched(key):
        return algorithm.step(key, start, p, work)[0].beta != start.beta

    drawn = np.asarray(jax.vmap(touched)(jax.random.split(key, 3000)))
    assert (drawn.sum(2) == 3).all()
    rate = drawn.mean(0)
    for k, n in enumerate(np.asarray(p.data.sizes)):
        np.testing.assert_allclose(rate[k, :n], 3 / n, atol=0.05)
        assert (rate[k, n:] == 0).all()


@pytest.mark.slow
def test_a_batch_larger_than_the_data_takes_all_of_it(key):
    p = problem()
    algorithms: list[mj.Algorithm] = [mj.MiniBatchSdca(batch=1000, beta=1.0), mj.MiniBatchSgd(batch=1000)]
    for algorithm in algorithms:
        _, info = algorithm.step(key, algorithm.init(p), p, everything(algorithm, p, key))
        np.testing.assert_array_equal(info.steps, p.data.sizes)


# Mini-batch SGD


@each_regularizer
@pytest.mark.parametrize("loss", ["logistic"])
@pytest.mark.thin(1)
def test_a_full_batch_step_follows_a_subgradient_of_the_objective(name, loss, key):
    # A subgradient g of a convex P: P(W') >= P(W) + <g, W' - W> for all W'; it is the gradient where there is one.
    p = problem(name, loss, intercept=True, loss_scaling="task_mean")
    algorithm = mj.MiniBatchSgd(batch=10**6, step_size=0.5, power=0.0)
    rng = np.random.default_rng(0)
    state = algorithm.init(p).replace(w=jnp.asarray(rng.normal(size=(5, 5))))
    after, _ = algorithm.step(key, state, p, everything(algorithm, p, key))
    g = np.asarray(state.w - after.w) / 0.5
    here = float(mj.objective(p, state.w, state.relation))
    for size in (1e-3, 0.1, 1.0, 10.0):
        w = state.w + size * jnp.asarray(rng.normal(size=(5, 5)))
        assert float(mj.objective(p, w, state.relation)) >= here + np.sum(g * np.asarray(w - state.w)) - 1e-10
    if loss != "hinge" and name != "sparse":
        want = jax.grad(lambda w: mj.objective(p, w, state.relation))(state.w)
        np.testing.assert_allclose(g, want, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_batches_estimate_the_subgradient_without_bias(key):
    p = problem("graph", "squared", loss_scaling="task_mean")
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(5, 4)))

    def gradient(batch, key):
        algorithm = mj.MiniBatchSgd(batch=batch, step_size=1.0, power=0.0)
        state = algorithm.init(p).replace(w=w)
        return w - algorithm.step(key, state, p, everything(algorithm, p, key))[0].w

    estimates = np.asarray(jax.vmap(lambda k: gradient(2, k))(jax.random.split(key, 4000)))
    error = estimates.std(0) / 4000**0.5
    assert (abs(estimates.mean(0) - np.asarray(gradient(10**6, key))) <= 5 * error + 1e-12).all()


def test_the_step_size_follows_its_schedule(key):
    p = problem("independent", "squared")
    algorithm = mj.MiniBatchSgd(batch=10**6, step_size=0.01, power=0.7, horizon=5.0)
    state = algorithm.init(p)
    for h in range(3):
        gradient = jax.grad(lambda w: mj.objective(p, w))(state.w)
        after, _ = algorithm.step(key, state, p, everything(algorithm, p, key))
        np.testing.assert_allclose(state.w - after.w, 0.01 * (1 + h / 5.0) ** -0.7 * gradient, rtol=1e-9, atol=1e-12)
        state = after


def test_tasks_of_absent_nodes_stay_and_present_nodes_stand_for_their_task(key):
    xs, ys = zoo.ragged(m=4, regression=True)
    data = mj.pack_tasks([*xs, xs[0]], [*ys, ys[0]], task=[0, 1, 2, 3, 0])  # two equal nodes on task 0
    p = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.1))
    algorithm = mj.MiniBatchSgd(batch=10**6, step_size=0.01, power=0.0)
    state = algorithm.init(p).replace(w=jnp.ones((4, 4)))
    work = everything(algorithm, p, key)
    whole, _ = algorithm.step(key, state, p, work)
    part, _ = algorithm.step(key, state, p, work.replace(active=jnp.array([True, True, False, True, False])))
    np.testing.assert_allclose(part.w[0], whole.w[0])
    np.testing.assert_array_equal(part.w[2], state.w[2])


@pytest.mark.parametrize("sigma2", [2.0, np.inf])
@pytest.mark.slow
def test_sgd_descends_with_a_learned_omega(sigma2, key):
    p = problem("probabilistic", "logistic", loss_scaling="task_mean")
    p = p.replace(regularizer=mj.regularizers.Probabilistic(0.05, sigma2))
    algorithm = mj.MiniBatchSgd(batch=10**6, step_size=0.02, power=0.0, omega_every=20, smoothing=1e-3)
    state, history = mj.run(p, algorithm, key, num_rounds=2000, record_every=20)
    assert (history.joint_gap >= 0).all()
    best = mj.solve(p, tol=1e-6, max_rounds=20_000, chunk=1000, record_every=10)
    assert (history.joint_primal >= best.primal * (1 - 1e-9)).all()
    assert history.joint_primal[-1] <= 1.1 * best.primal  # smoothed alternation ends nearby
    np.testing.assert_allclose(jnp.trace(p.regularizer.relationship(5, state.relation)), 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["mean", "probabilistic", "sparse"])
@pytest.mark.slow
def test_every_rival_solves_every_model(name, key):
    # Learned and given Omega alike; what SGD and SDCA end at agrees with MOCHA's alternation.
    p = problem(name, "squared", loss_scaling="task_mean")
    eps = 0.05  # (14) alternates towards where it began without; with it there is one optimum
    mocha = mj.Mocha(local_epochs=3.0, server="dual", omega_every=10, smoothing=eps, sigma_prime="per_task")
    want = mj.run(p, mocha, key, num_rounds=400, record_every=400)[1]
    for algorithm in (
        mj.Cocoa(0.1, server="dual", omega_every=10, smoothing=eps),
        mj.MiniBatchSdca(batch=10, beta=8.0, omega_every=50, smoothing=eps),
        mj.MiniBatchSgd(batch=10**6, step_size=0.05, power=0.0, omega_every=50, smoothing=eps),
    ):
        got = mj.run(p, algorithm, key, num_rounds=1500, record_every=1500)[1]
        np.testing.assert_allclose(got.primal, want.primal, rtol=2e-3)
        assert (got.gap >= 0).all()


@pytest.mark.slow
def test_cocoa_with_no_cap_to_speak_of(key):
    p = problem()
    for cap in (3 * 10**7, 10**8, 10**12):
        assert (mj.Cocoa(0.1, max_epochs=cap).full_work(p) > 10**8).all()
    # A gap that is only rounding ends a node's work: theta of 0 would never be certified.
    narrow = problem(dtype=np.float32)
    _, h = mj.run(narrow, mj.Cocoa(0.0, max_epochs=10**6), key, num_rounds=3)
    assert not h.capped.any()


@pytest.mark.slow
def test_cocoa_keeps_a_deadline_gaps_included(key):
    p = problem(low=10, high=60)
    cost = mj.costs.Cost(np.array([1e3, 3e3, 1e4, 1e5, 1e6]), latency=0.1, download=1e9, upload=1e9)
    for seconds in (0.3, 1.0, 3.0):
        systems = mj.systems.Deadline(seconds, cost)
        h = mj.run(p, mj.Cocoa(1e-3), key, num_rounds=4, systems=systems, cost=cost, watch=mj.Watch())[1]
        assert np.max(h.nodes.seconds) <= seconds * (1 + 1e-9)
        assert h.active[-1] >= 1


@pytest.mark.slow
def test_grids_of_what_a_function_makes(key):
    networks = mj.grid(mj.costs.relative, ratio=[10.0, 100.0, 1000.0])
    assert np.shape(networks.download) == (3,)
    times = jax.vmap(
        lambda c: mj.run(problem(), mj.Mocha(sigma_prime="per_task"), key, num_rounds=2, cost=c)[1].simulated_time[-1]
    )(networks)
    alone = [
        mj.run(problem(), mj.Mocha(sigma_prime="per_task"), key, num_rounds=2, cost=mj.costs.relative(r))[
            1
        ].simulated_time[-1]
        for r in (10.0, 100.0, 1000.0)
    ]
    np.testing.assert_allclose(times, alone)
    deadlines = mj.grid(lambda rate: mj.systems.Deadline(0.3, mj.costs.lte(rate)), rate=np.geomspace(1e2, 1e6, 5))
    assert np.shape(deadlines.cost.flops_per_second) == (5,)
    with pytest.raises(ValueError, match="name at least one setting"):
        mj.grid(mj.Mocha)
    with pytest.raises(ValueError, match="static fields, which cannot be mapped over"):
        mj.grid(mj.Mocha, local_epochs=[1.0, 2.0])


def test_room_for_a_batch_follows_the_batch():
    p = problem(low=10, high=30)
    assert mj.MiniBatchSdca(batch=2).replace(batch=8).full_work(p).tolist() == [8] * 5
    assert jax.jit(lambda b: mj.MiniBatchSgd(b, limit=3).full_work(p))(50).tolist() == [3] * 5


@pytest.mark.slow
def test_settings_of_different_kinds_map(key):
    p = problem()
    grid = mj.grid(mj.MiniBatchSgd, batch=[1, 4], step_size=[0.01, 0.1, 1.0])
    together = jax.vmap(lambda a: mj.run(p, a, key, num_rounds=10)[1].primal)(grid)
    alone = [
        mj.run(p, mj.MiniBatchSgd(b, s, limit=4), key, num_rounds=10)[1].primal
        for b in (1, 4)
        for s in (0.01, 0.1, 1.0)
    ]
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    networks = mj.grid(mj.costs.Cost, latency=[0.1, 1.0])
    times = jax.vmap(
        lambda c: mj.run(p, mj.Mocha(sigma_prime="per_task"), key, num_rounds=2, cost=c)[1].simulated_time
    )(networks)
    assert (times[1] > times[0]).all()


BAD = {
    "theta": (lambda: mj.Cocoa(1.0), r"Cocoa: theta must be in \[0, 1\)"),
    "cap": (lambda: mj.Cocoa(0.5, max_epochs=0), "max_epochs must be an integer >= 1"),
    "server": (lambda: mj.Cocoa(0.5, server="best"), "Cocoa: server must be one of"),
    "batch": (lambda: mj.MiniBatchSdca(batch=0), "batch must be an integer >= 1"),
    "share": (lambda: mj.MiniBatchSgd(batch=0.5), "batch must be an integer >= 1"),  # type: ignore[arg-type]
    "beta": (lambda: mj.MiniBatchSdca(batch=4, beta=0.5), "beta must be finite and >= 1"),
    "limit": (lambda: mj.MiniBatchSgd(batch=4, limit=2), "batch 4 exceeds limit 2"),
    "step": (lambda: mj.MiniBatchSgd(batch=4, step_size=0.0), "step_size must be finite and > 0"),
    "one a feature": (lambda: step(mj.MiniBatchSgd(4, np.ones(4))), "step_size must be a single number"),
    "one a slot": (lambda: step(mj.MiniBatchSdca(4, np.arange(1.0, 5))), "beta must be a single number"),
    "one a node": (lambda: step(mj.Cocoa(np.linspace(0.1, 0.5, 5))), "theta must be a single number"),
    "gamma a node": (lambda: step(mj.Mocha(gamma=np.ones(5))), "gamma must be a single number"),
    "state": (
        lambda: mj.solve(problem(), state=mj.MiniBatchSgd(4).init(problem())), "state is a SgdState, not one of a dual"
    ),
    "map": (lambda: mj.MiniBatchSgd(batch=np.array([1, 2])).request(problem()), "map over it with jax.vmap"),
    "theta of SGD": (
        lambda: mj.run(problem(), mj.MiniBatchSgd(4), jax.random.key(0), num_rounds=1, watch=mj.Watch(theta=1e-3)),
        "MiniBatchSgd has no local subproblem",
    ),
    "theta between": (
        lambda: mj.solve(problem(), record_every=2, watch=mj.Watch(theta=1e-3)), "record_every must be 1, got 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
