"""Losses that differ between tasks: against a convex solver, one loss, and differences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax._node import local_solver
from mocha_jax._node.buckets import bucket_sizes
from tests import oracles, zoo
from tests.driver.test_sharding import mesh_of

R = mj.regularizers
MIXED = "hinge", "squared", "quantile", "logistic", "huber"  # one per task
M, D = len(MIXED), 4


def fair(z, y):
    return jnp.abs(z - y) - jnp.log1p(jnp.abs(z - y))


def mixed_data(task=None, dtype=np.float64):
    """Tasks whose labels are signs or numbers, as their losses want them."""
    xs, zs = zoo.ragged(seed=3, m=M, d=D, regression=True, dtype=dtype)
    ys = [np.sign(z + 0.05) if zoo.LOSSES[name].binary else z for name, z in zip(MIXED, zs, strict=True)]
    if task is not None:  # two nodes a task
        xs, ys = ([half for a in parts for half in np.array_split(a, 2)] for parts in (xs, ys))
    return mj.pack_tasks(xs, ys, task=task, dtype=dtype, loss_scaling="task_mean")


def mixed_loss():
    return mj.losses.PerTask([zoo.LOSSES[name] for name in MIXED])


CASES: dict[str, Any] = {
    "near the mean": (R.MeanRegularized(0.2, 0.05), oracles.mean_regularized(0.2, 0.05), mj.Mocha(), {}),
    "algorithm 1": (R.MeanRegularized(0.2, 0.05), oracles.mean_regularized(0.2, 0.05), mj.algorithm1(), {}),
    "cocoa": (R.Independent(0.05), oracles.independent(0.05), mj.Cocoa(0.1), {}),
    "learned": (R.Probabilistic(0.05, 2.0), oracles.squared_nuclear_norm(0.05, 2.0), mj.Mocha(), {}),
    "two nodes a task": (
        R.MeanRegularized(0.2, 0.05),
        oracles.mean_regularized(0.2, 0.05),
        mj.Mocha(),
        {"task": np.repeat(np.arange(M), 2)},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_the_optimum_is_a_convex_solvers(case):
    regularizer, penalty, algorithm, how = CASES[case]
    problem = mj.Problem(mixed_data(**how), mixed_loss(), regularizer)
    solution = mj.solve(problem, algorithm, tol=1e-9, max_rounds=20_000)
    best, weights = oracles.optimum(problem.data, MIXED, penalty)
    assert solution.status == mj.Status.CONVERGED
    assert solution.certificate.joint_dual <= best + 1e-9 * abs(best)
    np.testing.assert_allclose(solution.certificate.joint_primal, best, rtol=1e-7)
    np.testing.assert_allclose(solution.weights, weights, atol=2e-4)


@pytest.mark.slow
def test_the_certificate_holds_on_the_way(key):
    problem = mj.Problem(mixed_data(), mixed_loss(), R.MeanRegularized(0.2, 0.05))
    best, _ = oracles.optimum(problem.data, MIXED, oracles.mean_regularized(0.2, 0.05))
    state, history = mj.run(problem, mj.Mocha(), key, num_rounds=30, systems=mj.systems.Dropout(0.3))
    assert (history.primal - best >= -1e-9).all()
    assert (history.gap >= history.primal - best - 1e-9).all()
    assert (history.dual <= best + 1e-9).all()
    beyond = state.beta.at[0, 0].set(3.0)  # outside of the hinge's interval, inside of what others allow
    assert mj.certificate(problem, beyond).gap == jnp.inf


@pytest.mark.parametrize("algorithm", [mj.Mocha(), mj.MiniBatchSdca(batch=3, beta=5.0), mj.MiniBatchSgd(batch=3)])
@pytest.mark.slow
def test_equal_losses_are_one_loss(algorithm, key):
    data, regularizer = zoo.data(m=M), R.MeanRegularized(0.2, 0.05)
    one = mj.run(mj.Problem(data, mj.losses.SmoothedHinge(0.5), regularizer), algorithm, key, num_rounds=5)[1]
    for loss in (
        mj.losses.PerTask([mj.losses.SmoothedHinge(0.5)] * M),
        mj.losses.PerTask(mj.losses.SmoothedHinge(np.full(M, 0.5))),
        mj.losses.PerTask([mj.losses.Hinge(), mj.losses.SmoothedHinge(0.5)], which=np.ones(M, int)),
    ):
        own = mj.run(mj.Problem(data, loss, regularizer), algorithm, key, num_rounds=5)[1]
        np.testing.assert_allclose(own.primal, one.primal, rtol=1e-13)
        np.testing.assert_allclose(own.dual, one.dual, rtol=1e-13)


@pytest.mark.slow
def test_the_kernel_takes_them(key):
    problem = mj.Problem(mixed_data(dtype=np.float32), mixed_loss(), R.MeanRegularized(0.2, 0.05))
    assert problem.loss.in_kernel
    assert not mj.losses.PerTask([mj.losses.Hinge(), mj.losses.from_scalar(fair)]).in_kernel
    kernel, loops = (
        mj.run(problem, mj.Mocha(backend=backend), key, num_rounds=3)[1].primal for backend in ("pallas", "xla")
    )
    np.testing.assert_allclose(kernel, loops, rtol=2e-6)


@pytest.mark.slow
def test_buckets_of_nodes_take_their_losses_along(key):
    rng = np.random.default_rng(0)
    sizes = [600, *[8] * 63]
    xs = [rng.normal(size=(n, 30)) / 5 for n in sizes]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], dtype=np.float64, loss_scaling="task_mean")
    kinds = [mj.losses.SmoothedHinge(g) for g in np.linspace(0.2, 2.0, 32)] + [mj.losses.Squared()] * 32
    problem = mj.Problem(data, mj.losses.PerTask(kinds[::-1]), R.MeanRegularized(0.2, 0.05))
    algorithm, bucketing = mj.Mocha(sigma_prime="per_task"), bucket_sizes(data)
    assert len(bucketing) > 1

    def after_three_rounds(sizes):
        there, state = algorithm.prepare(problem, sizes), algorithm.init(problem)
        step = jax.jit(algorithm.step)
        for i in range(3):
            work = mj.systems.PartialEpochs(0.5, 1.0).work(key, data, algorithm.request(problem, i))
            state, _ = step(jax.random.fold_in(key, i), state, there, work)
        return state.beta, jax.jit(algorithm.certify)(state, there).gap

    for bucketed, whole in zip(after_three_rounds(bucketing), after_three_rounds(()), strict=True):
        np.testing.assert_allclose(bucketed, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_blocks_of_nodes_take_their_losses_along(key, monkeypatch):
    problem = mj.Problem(mixed_data(), mixed_loss(), R.MeanRegularized(0.2, 0.05))
    algorithm = mj.Mocha(sigma_prime="per_task")
    whole = mj.run(problem, algorithm, key, num_rounds=3)[1].primal
    monkeypatch.setattr(local_solver, "_BLOCK_NUMBERS", 2 * D)  # two nodes at a time; of five, one twice
    jax.clear_caches()
    np.testing.assert_allclose(mj.run(problem, algorithm, key, num_rounds=3)[1].primal, whole, rtol=1e-12)


def test_conjugates_are_infinite_where_the_own_loss_says_so():
    loss, y = mixed_loss(), jnp.ones((M, 1))
    beta = jnp.full((M, 1), 1.5)  # feasible for the squared loss alone
    assert (loss.conjugate(beta, y) == jnp.inf)[:, 0].tolist() == [True, False, True, True, True]
    assert (loss.project(beta, y) == beta)[:, 0].tolist() == [False, True, False, False, False]


@pytest.mark.slow
def test_on_many_devices_it_is_the_same(key):
    data = mixed_data()
    problem = mj.Problem(data, mixed_loss(), R.MeanRegularized(0.2, 0.05))
    here = mj.run(problem, mj.Mocha(), key, num_rounds=5)[1]
    there = mj.run(mj.shard(problem, mesh_of(4)), mj.Mocha(), key, num_rounds=5)[1]  # with three inert nodes
    np.testing.assert_allclose(there.primal, here.primal, rtol=1e-12)
    np.testing.assert_allclose(there.dual, here.dual, rtol=1e-12)


@pytest.mark.slow
def test_derivatives_of_hyperparameters_of_tasks():
    data = mixed_data()
    target = np.random.default_rng(7).normal(size=(M, D))

    def outer(tau, delta):
        huber, quantile = mj.losses.Huber(delta), mj.losses.Quantile(tau)
        loss = mj.losses.PerTask([quantile, huber, mj.losses.Squared()], which=[0, 1, 0, 2, 1])
        problem = mj.Problem(data, loss, R.MeanRegularized(0.2, 0.05))
        solution = mj.solve(problem, mj.Mocha(sigma_prime="per_task"), tol=1e-11, max_rounds=20_000)
        return jnp.sum(solution.weights * target)

    tau, delta = jnp.linspace(0.3, 0.7, M), jnp.linspace(0.3, 0.4, M)
    found = jax.grad(outer, (0, 1))(tau, delta)
    for at, gradient in enumerate(found):
        for task in range(M):
            step = 1e-4 * np.eye(M)[task]
            ends = [outer(*(a + sign * step if i == at else a for i, a in enumerate((tau, delta)))) for sign in (1, -1)]
            np.testing.assert_allclose(gradient[task], (ends[0] - ends[1]) / 2e-4, rtol=1e-4, atol=1e-6)
    assert (found[0][jnp.asarray([1, 3, 4])] == 0).all()  # of tasks with other losses


def test_the_loss_of_one_task():
    loss = mj.losses.PerTask([mj.losses.Huber(0.1), mj.losses.Hinge(), mj.losses.Huber(0.3)], which=[2, 1, 0, 2])
    assert [type(loss.of_task(t)).__name__ for t in range(4)] == ["Huber", "Hinge", "Huber", "Huber"]
    assert [float(jax.tree.leaves(loss.of_task(t))[0]) for t in (0, 2, 3)] == [0.3, 0.1, 0.3]
    assert loss.num_tasks == 4
    assert loss.lipschitz == 1.0
    assert loss.smoothness is None
    assert mj.losses.PerTask(mj.losses.SmoothedHinge(np.array([0.5, 0.25]))).smoothness == 4.0


def test_metrics_know_whose_loss_it_is():
    data, loss = mixed_data(), mixed_loss()
    weights = jnp.ones((M, D))
    own = mj.metrics.mean_loss(weights, data, loss, per_task=True)
    for t, name in enumerate(MIXED):
        expected = zoo.LOSSES[name].value(data.x[t] @ weights[t], data.y[t])[data.weight[t] > 0].mean()
        np.testing.assert_allclose(own[t], expected, rtol=1e-12)
    assert loss.scored_by == "mean_loss"
    assert mj.losses.PerTask([mj.losses.Hinge(), mj.losses.Logistic()]).scored_by == "error_rate"


BAD = {
    "labels": (
        lambda: mj.Problem(zoo.data(m=M, regression=True), mixed_loss(), R.Independent(0.1)),
        "task 0: has label .*, but Hinge needs labels -1 and \\+1",
    ),
    "count": (lambda: mj.Problem(zoo.data(m=3), mixed_loss(), R.Independent(0.1)), "losses for 5 tasks, and data of 3"),
    "empty": (lambda: mj.losses.PerTask([]), "losses is empty"),
    "which": (lambda: mj.losses.PerTask([mj.losses.Hinge()], which=[0, 1]), "place in losses, from 0 to 0"),
    "nested": (lambda: mj.losses.PerTask([mixed_loss()]), "is a PerTask itself"),
    "lengths": (
        lambda: mj.losses.PerTask([mj.losses.Quantile(np.full(3, 0.5))], which=[0, 0]),
        "there are 2 tasks, and hyperparameters of 3",
    ),
    "array without it": (
        lambda: mj.Problem(zoo.data(m=3), mj.losses.SmoothedHinge(np.full(3, 0.5)), R.Independent(0.1)),
        r"losses.PerTask\(SmoothedHinge\(...\)\)",
    ),
    "domain": (lambda: mj.losses.PerTask(mj.losses.Quantile(np.array([0.5, 1.5]))), "tau must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
