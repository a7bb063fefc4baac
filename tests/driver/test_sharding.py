"""Many devices: the same numbers on any number of them, and no more talk than a round needs."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mocha_jax as mj
from mocha_jax import regularizers
from mocha_jax._node.buckets import bucket_sizes
from mocha_jax.coupling import LowRank
from tests import zoo


def mesh_of(count):
    return jax.make_mesh((count,), ("nodes",), devices=jax.devices()[:count], axis_types=(AxisType.Auto,))


def make(regularizer, num_tasks=16, *, task=None, largest=12):
    rng = np.random.default_rng(7)
    sizes = rng.integers(3, 12, num_tasks)
    sizes[3] = largest
    xs = [rng.normal(size=(n, 5)) for n in sizes]
    data = mj.pack_tasks(xs, [np.sign(x[:, 0] + 0.3) for x in xs], loss_scaling="task_mean", task=task)
    return mj.Problem(data, mj.losses.Hinge(), regularizer)


class GivenLowRank(regularizers.Regularizer):
    """A coupling of low rank that is not learned."""

    factor: jax.Array

    def coupling(self, num_tasks, relation=None):
        return LowRank(jnp.asarray(0.5, self.factor.dtype), self.factor)

    def value(self, weights, relation=None):
        raise NotImplementedError

    def relationship(self, num_tasks, relation=None):
        raise NotImplementedError


def chain(num_tasks):
    return jnp.eye(num_tasks) + 0.3 * (jnp.eye(num_tasks, k=1) + jnp.eye(num_tasks, k=-1))


SHARED = np.arange(16) % 5
CASES = {
    "algorithm 1, dense": (mj.Mocha(sigma_prime="per_task"), make(regularizers.Graph(chain(16), 0.1, 0.1))),
    "algorithm 1, uneven": (mj.Mocha(sigma_prime="per_task"), make(regularizers.Graph(chain(13), 0.1, 0.1), 13)),
    "adaptive": (mj.Mocha(sigma_prime="adaptive"), make(regularizers.MeanRegularized(0.1, 0.1))),
    "proximal": (mj.Mocha(), make(regularizers.Probabilistic(0.1), 13)),
    "about the mean": (mj.Mocha(), make(regularizers.MeanCovariance(0.02, 0.1), 13)),
    "learned by alternation": (
        mj.Mocha(server="dual", omega_every=2, sigma_prime="per_task"),
        make(regularizers.Probabilistic(0.1)),
    ),
    "sizes that differ": (mj.Mocha(local_epochs=1.5), make(regularizers.MeanRegularized(0.1, 0.1), largest=900)),
    "several nodes a task": (mj.Mocha(), make(regularizers.MeanRegularized(0.1, 0.1), task=SHARED)),
    "cocoa": (mj.Cocoa(0.3), make(regularizers.MeanRegularized(0.1, 0.1), largest=900)),
    "mini-batch": (mj.MiniBatchSdca(batch=3), make(regularizers.MeanRegularized(0.1, 0.1), 13)),
}


# The rest differ from one of these in what other tests look at.
QUICK = ("algorithm 1, uneven", "adaptive", "proximal", "learned by alternation", "sizes that differ", "mini-batch")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
@pytest.mark.thin(1)
@pytest.mark.usefixtures("buckets_of_any_size")
def test_the_same_on_any_number_of_devices(case, key):
    algorithm, problem = CASES[case]
    assert (len(bucket_sizes(problem.data)) > 1) == (case in ("sizes that differ", "cocoa"))
    systems = mj.systems.Dropout(0.2)
    state, history = mj.run(problem, algorithm, key, num_rounds=5, systems=systems)
    weights = algorithm.weights(state)
    for count in (2, 4, 8) if case == "algorithm 1, dense" else (8,):
        there = mj.shard(problem, mesh_of(count))
        state, records = mj.run(there, algorithm, key, num_rounds=5, systems=systems)
        assert len(state.beta.sharding.device_set) == count
        np.testing.assert_allclose(algorithm.weights(state), weights, rtol=1e-7, atol=1e-10)
        for name in ("gap", "joint_gap", "simulated_time", "steps", "active"):
            np.testing.assert_allclose(getattr(records, name), getattr(history, name), rtol=1e-7, atol=1e-12)


def collectives(compiled):
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(?\S+\[.*) ({kinds})(?:-start)?\(", compiled)
    return sorted((kind, re.sub(r"\{[^}]*\}", "", shape)) for shape, kind in found)


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (regularizers.Independent(0.1), []),
        (regularizers.MeanRegularized(0.1, 0.1), [("all-reduce", "f64[5]")]),
        (regularizers.Graph(chain(16), 0.1, 0.1), [("all-gather", "f64[16,5]")]),
        (GivenLowRank(jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)))), [("all-reduce", "f64[3,5]")]),
    ],
    ids=["independent", "mean", "dense", "low rank"],
)
@pytest.mark.slow
def test_a_round_moves_the_dual_vectors_once(regularizer, expected, key):
    algorithm = mj.Mocha(sigma_prime="per_task")
    problem = algorithm.prepare(mj.shard(make(regularizer), mesh_of(8)))
    state = jax.jit(algorithm.init)(problem)
    work = mj.systems.Full().work(key, problem.data, algorithm.request(problem))
    compiled = jax.jit(algorithm.step).lower(key, state, problem, work).compile()
    assert collectives(compiled.as_text()) == expected


@pytest.mark.parametrize(
    "regularizer", [regularizers.Probabilistic(0.1), regularizers.Clustered(0.1, 0.1, 2)], ids=["(14)", "(12)"]
)
@pytest.mark.slow
def test_a_round_of_a_learned_relation_adds_up_one_gram_matrix(regularizer, key):
    algorithm = mj.Mocha()
    problem = algorithm.prepare(mj.shard(make(regularizer, 64), mesh_of(8)))
    state = jax.jit(algorithm.init)(problem)
    work = mj.systems.Full().work(key, problem.data, algorithm.request(problem))
    compiled = jax.jit(algorithm.step).lower(key, state, problem, work).compile()
    kinds, shapes = zip(*collectives(compiled.as_text()), strict=True)
    assert set(kinds) == {"all-reduce"}
    # Besides, two sums of squares, column by column, for the step size after.
    assert "f64[5,5]" in shapes
    numbers = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f64\[([\d,]+)\]", " ".join(shapes))]
    assert sorted(numbers) == [5, 5, 25]


@pytest.mark.slow
def test_a_round_with_recombination_gathers_once_what_the_nodes_send(key):
    compiled = round_of(mj.Mocha(sigma_prime="adaptive", memory=3), regularizers.Graph(chain(16), 0.1, 0.1), key)
    # Five numbers of a dual vector, slopes of four points, whether it answered; vectors anew in every eighth round.
    assert collectives(compiled) == [("all-gather", "f64[16,10]"), ("all-gather", "f64[16,5]")]


@pytest.mark.slow
def test_a_round_with_recombination_of_tasks_that_are_divided_sums_numbers_of_one(key):
    compiled = round_of(mj.Mocha(sigma_prime="adaptive", memory=3), regularizers.MeanRegularized(0.1, 0.1), key)
    kinds, shapes = zip(*collectives(compiled), strict=True)
    assert set(kinds) == {"all-reduce"}
    assert set(re.findall(r"\[.*?\]", " ".join(shapes))) == {"[]", "[5]"}


@pytest.mark.parametrize("sigma_prime", ["per_task", "adaptive"])
@pytest.mark.slow
def test_no_array_of_all_tasks_is_on_any_device_where_tasks_are_divided(sigma_prime, key):
    problem, algorithm = (
        mj.shard(make(regularizers.MeanRegularized(0.1, 0.1), 8 * 37), mesh_of(8)),
        mj.Mocha(sigma_prime=sigma_prime),
    )
    work = jax.jit(lambda key, problem: mj.run(problem, algorithm, key, num_rounds=2))
    compiled = str(work.lower(key, problem).compile().as_text())
    assert "[37,5]" in compiled
    assert not re.findall(r"\w+\[(?:\d+,)*296(?:,\d+)*\]", compiled)
    assert "all-gather" not in compiled


def round_of(algorithm, regularizer, key):
    """The compiled text of a round on eight devices."""
    problem = algorithm.prepare(mj.shard(make(regularizer), mesh_of(8)))
    state = jax.jit(algorithm.init)(problem)
    work = mj.systems.Full().work(key, problem.data, algorithm.request(problem))
    return jax.jit(algorithm.step).lower(key, state, problem, work).compile().as_text()


@pytest.mark.slow
def test_a_sharded_solve_stops_and_resumes(key, tmp_path):
    problem = make(regularizers.MeanRegularized(0.1, 0.1), 13)
    plain = mj.solve(problem, tol=1e-6, key=key)
    there = mj.shard(problem, mesh_of(4))
    file = tmp_path / "run.npz"
    mj.solve(there, tol=None, max_rounds=5, chunk=5, key=key, checkpoint=file)
    solution = mj.solve(there, tol=1e-6, key=key, checkpoint=file)
    assert solution.status == mj.Status.CONVERGED
    assert len(solution.state.beta.sharding.device_set) == 4
    np.testing.assert_allclose(solution.weights, plain.weights, rtol=1e-6, atol=1e-9)
    # What was added to fill up the devices shows nowhere.
    assert solution.weights.shape == plain.weights.shape
    assert solution.silent_nodes == ()


@pytest.mark.slow
def test_a_checkpoint_of_some_devices_is_good_for_others(key, tmp_path):
    problem = make(regularizers.MeanRegularized(0.1, 0.1))
    there, file = mj.shard(problem, mesh_of(4)), tmp_path / "run.npz"
    straight = mj.solve(problem, mj.Mocha(), tol=None, max_rounds=6, key=key)
    mj.solve(problem, mj.Mocha(), tol=None, max_rounds=3, key=key, checkpoint=file)
    solution = mj.solve(there, mj.Mocha(), tol=None, max_rounds=6, key=key, checkpoint=file)
    assert len(solution.state.beta.sharding.device_set) == 4
    np.testing.assert_allclose(solution.history.gap, straight.history.gap, rtol=1e-9)
    mj.solve(problem, mj.Mocha(), tol=None, max_rounds=6, key=key, checkpoint=file)


@pytest.mark.slow
def test_a_sharded_solution_can_be_pickled(key):
    problem, plain = make(regularizers.MeanRegularized(0.1, 0.1), 13), mj.Mocha(sigma_prime="per_task")
    there = mj.solve(mj.shard(problem, mesh_of(4)), plain, tol=1e-3, key=key)
    back = pickle.loads(pickle.dumps(there))
    np.testing.assert_array_equal(back.weights, there.weights)
    again = mj.solve(back.problem, plain, tol=1e-3, key=key)
    np.testing.assert_allclose(again.weights, there.weights, rtol=1e-6)


@pytest.mark.slow
def test_settings_of_each_node_need_not_know_of_the_devices(key):
    problem, each = make(regularizers.MeanRegularized(0.1, 0.1), 13), np.linspace(1.0, 2.0, 13)
    cost = mj.costs.Cost(flops_per_second=1e4 * each)
    systems = (
        mj.systems.Outages(0.2, groups=np.arange(13) % 3, length=2)
        & mj.systems.Trace(np.arange(26).reshape(2, 13) % 5)
        & mj.systems.DayNight(7.0, 0.7, phase=each - 1.0)
        & mj.systems.Deadline(0.06, cost)
        & mj.systems.Dropout(each / 10)
    )

    def record(problem):
        return mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=6, systems=systems, cost=cost)[1]

    there, here = record(mj.shard(problem, mesh_of(8))), record(problem)
    assert 0 < here.active.max() < 13
    for name in ("gap", "active", "steps", "simulated_time", "bytes_up", "utilisation"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-9)


def test_samples_put_in_order_here_are_the_same_on_another_device():
    data = zoo.data(m=4, d=400, low=110, high=110, loss_scaling="task_mean")
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.1))
    assert problem.data.x.committed  # put in order, on the device they came to
    other = jax.make_mesh((1,), ("nodes",), devices=jax.devices()[1:2], axis_types=(AxisType.Auto,))
    there = mj.shard(problem, other)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 400)))
    np.testing.assert_allclose(mj.objective(there, w), mj.objective(problem, w), rtol=1e-12)


@pytest.mark.slow
def test_an_axis_of_a_larger_mesh(key):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    problem = make(regularizers.MeanRegularized(0.1, 0.1))
    expected = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4)[1].gap
    for axes in ("data", ("data", "model"), None):
        there = mj.shard(problem, mesh, axes)
        np.testing.assert_allclose(
            mj.run(there, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4)[1].gap, expected, rtol=1e-9
        )


@pytest.mark.slow
def test_a_path_of_lambdas_over_devices(key):
    problem = make(regularizers.MeanRegularized(0.1, 0.1))

    def last_gap(problem, lam):
        there = problem.replace(regularizer=regularizers.MeanRegularized(lam, 0.1))
        return mj.run(there, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4)[1].gap[-1]

    lams = jnp.asarray([0.05, 0.5])
    expected = [last_gap(problem, lam) for lam in lams]
    there = mj.shard(problem, mesh_of(2))
    np.testing.assert_allclose(jax.vmap(lambda lam: last_gap(there, lam))(lams), expected, rtol=1e-9)


@pytest.mark.slow
def test_data_placed_by_hand_works_too(key):
    problem = make(regularizers.Graph(chain(16), 0.1, 0.1))
    by_node = NamedSharding(mesh_of(4), PartitionSpec("nodes"))
    there = problem.replace(data=jax.tree.map(lambda leaf: jax.device_put(leaf, by_node), problem.data))
    expected = mj.run(problem, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4)[1].gap
    np.testing.assert_allclose(
        mj.run(there, mj.Mocha(sigma_prime="per_task"), key, num_rounds=4)[1].gap, expected, rtol=1e-9
    )


@pytest.mark.slow
def test_data_that_is_spread_already_stays_where_it_is(key):
    problem, plain = make(regularizers.MeanRegularized(0.1, 0.1), 13), mj.Mocha(sigma_prime="per_task")
    data = mj.from_process_local(problem.data, mesh_of(4))
    there = mj.shard(problem.replace(data=data))
    assert there.data.x is data.x
    assert there.data.sharding.filled == (4, 4, 4, 1)
    expected = mj.run(problem, plain, key, num_rounds=4, systems=mj.systems.Dropout(0.2))[1].gap
    found = mj.run(there, plain, key, num_rounds=4, systems=mj.systems.Dropout(0.2))[1].gap
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert mj.shard(mj.shard(problem, mesh_of(2))).data.sharding.devices == 2
    assert mj.shard(mj.shard(problem, mesh_of(2)), mesh_of(8)).data.sharding.devices == 8


def test_settings_skip_places_without_a_node():
    sharding = mj.shard(make(regularizers.Independent(0.1)), mesh_of(4)).data.sharding
    sharding = dataclasses.replace(sharding, nodes=6, filled=(2, 0, 3, 1))
    assert sharding.numbers(12).tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 4, 5, 5, 5]


def program_of(algorithm, key, problem):
    return jax.jit(lambda key, problem: mj.run(problem, algorithm, key, num_rounds=3)[1].gap).trace(key, problem)


@pytest.mark.parametrize("count", [13, 16])
@pytest.mark.slow
def test_shapes_compile_to_the_program_that_arrays_do(key, count):
    problem, plain = make(regularizers.MeanRegularized(0.1, 0.1), count), mj.Mocha(sigma_prime="per_task")
    there, shapes = mj.shard(problem, mesh_of(4)), mj.shard(jax.eval_shape(lambda: problem), mesh_of(4))
    assert str(jax.tree.structure(there)) == str(jax.tree.structure(shapes))
    for array, shape in zip(jax.tree.leaves(there), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)
    one, other = (program_of(plain, key, p).lower() for p in (there, shapes))
    assert one.as_text() == other.as_text()  # what is compiled; in what comes of it a cache may have left its own names
    compiled = other.compile()
    expected = mj.run(problem, plain, key, num_rounds=3)[1].gap
    found = compiled(jax.device_put(key, NamedSharding(mesh_of(4), PartitionSpec())), there)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
def test_shapes_are_lowered_for_devices_that_are_not_here(key):
    pod = AbstractMesh((4096,), ("nodes",), axis_types=(AxisType.Auto,))
    m, n, d = 10**8, 64, 32  # 820 GB

    def of(x, y, task):
        data = mj.TaskData(x, y, y, task, num_tasks=m, loss_scaling="task_mean")
        return mj.Problem(data, mj.losses.Hinge(), regularizers.MeanRegularized(0.1, 0.1))

    shapes = ((m, n, d), np.float32), ((m, n), np.float32), ((m,), np.int32)
    problem = mj.shard(jax.eval_shape(of, *(jax.ShapeDtypeStruct(*one) for one in shapes)), pod)
    per_device = -(-m // 4096)
    assert problem.data.x.sharding.shard_shape(problem.data.x.shape) == (per_device, n, d)
    assert problem.data.num_nodes == 4096 * per_device
    assert problem.data.num_tasks == m
    assert problem.regularizer.lam1.sharding.is_fully_replicated
    traced = program_of(mj.Mocha(sigma_prime="per_task"), key, problem)
    assert f"{per_device}x{n}x{d}xf32" in traced.lower(lowering_platforms=("cpu",)).as_text()
    with pytest.raises(ValueError, match="not here.*eval_shape"):
        mj.shard(make(regularizers.MeanRegularized(0.1, 0.1)), pod)


@pytest.mark.slow
def test_mistakes_are_named():
    problem = make(regularizers.MeanRegularized(0.1, 0.1))
    with pytest.raises(ValueError, match="no \\['tasks'\\]"):
        mj.shard(problem, mesh_of(2), "tasks")
    explicit = jax.make_mesh((2,), ("nodes",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="axis_types"):
        mj.shard(problem, explicit)
    with pytest.raises(ValueError, match="mesh"):
        mj.shard(problem, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda p: mj.shard(p, mesh_of(2)).data.x)(problem)
