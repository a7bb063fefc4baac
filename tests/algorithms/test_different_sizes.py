"""Nodes of very different sizes: second-order methods deal their rows over short nodes, other work is in buckets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import mocha_jax as mj
from mocha_jax._node.buckets import bucket_sizes, time_major
from mocha_jax._node.dealt import Dealt, add_parts, deal, dealt_sizes
from tests import zoo

L, R = mj.losses, mj.regularizers
NEAR, ALONE = R.MeanRegularized(0.1, 0.02), R.Independent(0.05)
LOSSES = {
    "logistic": (mj.Newton(), L.Logistic(), NEAR),
    "squared, features that are scaled": (mj.Newton(), L.Squared(), R.PerFeature(NEAR, np.arange(1.0, 5.0))),
    "hinge": (mj.InteriorPoint(), L.Hinge(), NEAR),
    "two kinks, alone": (mj.InteriorPoint(), L.EpsilonInsensitive(0.3), ALONE),
    "quantiles of their own": (mj.InteriorPoint(), L.PerTask(L.Quantile(np.linspace(0.2, 0.8, 10))), NEAR),
}


@pytest.fixture
def dealing(monkeypatch):
    """Turn dealing on and off, whatever it saves."""

    def switch(on: bool) -> None:
        monkeypatch.setattr("mocha_jax._node.dealt._LEAST_NUMBERS", 0 if on else 2**60)

    return switch


def skewed(loss=L.Logistic(), regularizer=NEAR):  # noqa: B008
    """Ten tasks, one of them on two nodes and one without samples; a sample in their midst does not count."""
    rng = np.random.default_rng(0)
    sizes = [70, *rng.integers(2, 12, 9), 45]
    xs = [rng.normal(size=(n, 4)) for n in sizes]
    ys = [np.sign(x[:, 0] + 0.3) + (0.0 if loss.binary else rng.normal(size=len(x))) for x in xs]
    data = mj.pack_tasks(xs, ys, task=[*range(10), 0], loss_scaling="task_mean")
    data = data.replace(weight=data.weight.at[9].set(0.0).at[0, 3].set(0.0))
    return mj.Problem(data, loss, regularizer)


def same(dealt, plain):
    assert dealt.rounds == plain.rounds
    assert [a.shape for a in jax.tree.leaves(dealt.state)] == [a.shape for a in jax.tree.leaves(plain.state)]
    np.testing.assert_allclose(dealt.weights, plain.weights, rtol=1e-7, atol=1e-9)
    weighted = dealt.problem.data.weighted
    np.testing.assert_allclose(weighted(dealt.state.beta), weighted(plain.state.beta), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(dealt.history.primal, plain.history.primal, rtol=1e-9)
    np.testing.assert_array_equal(dealt.history.simulated_time, plain.history.simulated_time)
    np.testing.assert_allclose(dealt.dual, plain.dual, rtol=1e-8)


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.thin(2)
def test_dealt_samples_change_no_round_and_no_certificate(case, dealing):
    algorithm, loss, regularizer = LOSSES[case]
    problem = skewed(loss, regularizer)
    solutions = []
    for on in (True, False):
        dealing(on)
        assert bool(algorithm.bucketing(problem.data)) == on
        solutions.append(mj.solve(problem, algorithm, tol=1e-9, max_rounds=30, record_every=1))
    same(*solutions)
    checked = mj.certificate(problem, solutions[0].state.beta, weights=solutions[0].weights)
    np.testing.assert_allclose(checked.primal, solutions[0].primal, rtol=1e-12)


@pytest.mark.parametrize(
    "system", [mj.systems.Dropout(0.4), mj.systems.PartialEpochs(0.2, 1.0)], ids=["silent", "slow"]
)
def test_nodes_that_are_dealt_fail_as_one(system, dealing):
    solutions = []
    for on in (True, False):
        dealing(on)
        solutions.append(mj.solve(skewed(), mj.Newton(), systems=system, tol=1e-8, record_every=1))
    same(*solutions)
    np.testing.assert_array_equal(solutions[0].state.models.answered, solutions[1].state.models.answered)
    np.testing.assert_allclose(solutions[0].state.models.value, solutions[1].state.models.value, atol=1e-9)


class OnlyWithoutSamples(mj.systems.System):
    """Only the node without samples answers in the second and third round."""

    def work(self, key, data, request):
        alone = (request.round == 1) | (request.round == 2)
        return mj.systems.Work(request.steps, ~alone | (jnp.arange(data.num_nodes) == 9))


@pytest.mark.parametrize("case", ["logistic", "hinge"])
def test_only_a_node_without_samples_answers(case, dealing):
    algorithm, loss, regularizer = LOSSES[case]
    solutions = []
    for on in (True, False):
        dealing(on)
        problem, systems = skewed(loss, regularizer), OnlyWithoutSamples()
        solution = mj.solve(problem, algorithm, systems=systems, tol=1e-8, record_every=1)
        assert solution.status == mj.Status.CONVERGED
        solutions.append(solution)
        first, silent = (
            mj.run(problem, algorithm, jax.random.key(0), num_rounds=r, systems=systems)[0] for r in (1, 3)
        )
        np.testing.assert_array_equal(first.w, silent.w)
    same(*solutions)


def test_samples_in_half_the_memory_are_dealt(dealing):
    problem = skewed()
    problem = problem.replace(data=problem.data.replace(x=problem.data.x.astype(jnp.bfloat16)))
    solutions = []
    for on in (True, False):
        dealing(on)
        assert bool(dealt_sizes(problem.data)) == on
        solutions.append(mj.solve(problem, mj.Newton(), tol=1e-6, record_every=1))
    assert solutions[0].status == mj.Status.CONVERGED
    np.testing.assert_allclose(solutions[0].weights, solutions[1].weights, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(solutions[0].primal, solutions[1].primal, rtol=1e-5)


@pytest.mark.parametrize("case", ["logistic", "hinge"])
def test_dealt_states_go_on_anywhere(case, dealing, key, tmp_path):
    algorithm, loss, regularizer = LOSSES[case]
    problem = skewed(loss, regularizer)
    dealing(True)
    options: dict[str, Any] = {"tol": 1e-9, "record_every": 1, "chunk": 2}
    straight = mj.solve(problem, algorithm, **options)
    begun = mj.solve(problem, algorithm, **options | {"max_rounds": 3})
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    mj.solve(problem, algorithm, checkpoint=tmp_path / "run.npz", **options | {"max_rounds": 3})
    np.testing.assert_allclose(state.beta, begun.state.beta, rtol=1e-9, atol=1e-12)
    gone_on = [
        mj.solve(problem, algorithm, state=begun.state, **options),
        mj.solve(problem, algorithm, state=state, **options),
        mj.solve(problem, algorithm, checkpoint=tmp_path / "run.npz", **options),
    ]
    dealing(False)
    gone_on.append(mj.solve(problem, algorithm, state=begun.state, **options))
    for solution in gone_on:
        rounds = int(solution.state.round)
        assert abs(rounds - int(straight.rounds)) <= 1  # Newton asks again where a solve begins
        np.testing.assert_allclose(solution.weights, straight.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("adjoint", [mj.Implicit(), mj.Unrolled()], ids=["implicit", "unrolled"])
def test_derivatives_through_dealt_samples(adjoint, dealing):
    problem = skewed()

    def length(lam):
        solution = mj.solve(
            problem.replace(regularizer=R.MeanRegularized(lam, 0.02)), mj.Newton(), max_rounds=6, adjoint=adjoint
        )
        return (solution.weights**2).sum()

    dealing(False)
    plain = jax.grad(length)(0.1)
    dealing(True)
    np.testing.assert_allclose(jax.grad(length)(0.1), plain, rtol=1e-6)


def test_dealt_samples_under_transformations(dealing):
    problem = skewed()

    def weights(lam):
        return mj.solve(problem.replace(regularizer=R.MeanRegularized(lam, 0.02)), mj.Newton(), max_rounds=6).weights

    dealing(False)
    plain = jnp.stack([weights(0.1), weights(0.3)])
    dealing(True)
    np.testing.assert_allclose(jax.vmap(weights)(jnp.array([0.1, 0.3])), plain, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(jax.jit(weights)(0.3), plain[1], rtol=1e-7, atol=1e-9)


def test_rows_come_back_to_their_places(dealing):
    dealing(True)
    data = skewed().data
    layout = deal(data, dealt_sizes(data)).layout
    assert isinstance(layout, Dealt)
    rows = jnp.where(data.weight > 0, jnp.arange(data.y.size, dtype=data.dtype).reshape(data.y.shape), -1.0)
    np.testing.assert_array_equal(layout.gather(layout.deal(rows), -1.0), rows)
    np.testing.assert_array_equal(add_parts(layout, jnp.sum(layout.data.weight > 0, axis=1)), data.sizes)
    dealt, plain = ((d.weight[:, :, None] * d.x).sum((0, 1)) for d in (layout.data, data))
    np.testing.assert_allclose(dealt, plain, rtol=1e-9)
    w = jnp.ones((10, 4))
    np.testing.assert_array_equal(
        data.weighted(layout.gather(layout.data.predictions(w))), data.weighted(data.predictions(w))
    )


def test_samples_are_dealt_where_that_saves_much():
    problem = skewed()
    assert dealt_sizes(problem.data) == ()  # in all it is too little
    xs = [np.ones((n, 40), "f") for n in (4000, 20, 30, 60, 100)]
    ((count, rows),) = dealt_sizes(mj.pack_tasks(xs, [np.ones(len(x)) for x in xs]))
    assert rows == 128
    assert count == 32 + 4
    assert dealt_sizes(mj.pack_tasks([np.ones((4000, 40), "f")] * 4, [np.ones(4000)] * 4)) == ()  # alike
    wide = [np.ones((n, 700), "f") for n in (690, *[20] * 20)]
    data = mj.pack_tasks(wide, [np.ones(len(x)) for x in wide])
    assert dealt_sizes(data) == ()  # one system for each node, of the size of its samples
    assert dealt_sizes(data.replace(task=np.zeros(21, np.int32), num_tasks=1)) != ()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
@pytest.mark.parametrize("case", ["squared, features that are scaled", "hinge"])
def test_a_checkpoint_of_dealt_samples_is_good_for_several_devices(case, dealing, tmp_path):
    algorithm, loss, regularizer = LOSSES[case]
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)) for n in (70, 3, 4, 2, 90, 5, 3, 4)]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean")
    problem = mj.Problem(data, loss, regularizer)
    dealing(True)
    assert dealt_sizes(data)
    straight = mj.solve(problem, algorithm, tol=None, max_rounds=6, record_every=1)
    file = tmp_path / "run.npz"
    mj.solve(problem, algorithm, tol=None, max_rounds=3, record_every=1, checkpoint=file)
    mesh = jax.make_mesh((2,), ("nodes",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    there = mj.shard(problem, mesh)
    assert dealt_sizes(there.data) == ()
    solution = mj.solve(there, algorithm, tol=None, max_rounds=6, record_every=1, checkpoint=file)
    assert len(solution.history.gap) == 6
    np.testing.assert_allclose(solution.history.primal, straight.history.primal, rtol=1e-9)
    np.testing.assert_allclose(solution.weights, straight.weights, rtol=1e-6, atol=1e-9)


def test_work_on_the_samples_of_a_bucket_sees_its_own_rows(monkeypatch):
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    data = mj.pack_tasks(*zoo.ragged(seed=1, m=8, d=3, low=2, high=30))
    dealt, given, seen = time_major(data, bucket_sizes(data)), jnp.arange(8.0), []

    def work(x, by_node, by_row):
        seen.append(x.shape[:2])
        return (
            by_node[:, None] * jnp.sum(by_row[:, :, None] * x, axis=1),
            by_row * x[:, :, 0],
            x @ jnp.swapaxes(x, 1, 2),
        )

    for a, b in zip(
        dealt.map_samples(work, (given,), data.weight), data.map_samples(work, (given,), data.weight), strict=True
    ):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12)
    rows = {shape[1] for shape in seen}
    assert len(rows) > 1


def test_scaled_samples_are_scaled_in_every_layout(monkeypatch):
    monkeypatch.setattr("mocha_jax._node.buckets._BUCKET_NUMBERS", 0)
    monkeypatch.setattr("mocha_jax._node.buckets._STEP_NUMBERS", 0)
    data, scale = mj.pack_tasks(*zoo.ragged(seed=1, m=8, d=3, low=2, high=30)), jnp.array([1.0, 2.0, 0.5])
    w = jnp.ones((8, 3))
    for laid_out in (data, time_major(data), time_major(data, bucket_sizes(data))):
        scaled = laid_out.with_features_scaled(scale)
        np.testing.assert_allclose(
            scaled.weighted(scaled.predictions(w)), data.weighted(data.predictions(w * scale[None, :])), rtol=1e-12
        )
        np.testing.assert_allclose(
            scaled.longest, jnp.sqrt(jnp.max(jnp.sum((data.x * scale[None, None, :]) ** 2, 2), 1)), rtol=1e-6
        )
