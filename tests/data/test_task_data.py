"""The container: packing, splitting, pooling, sharing, and what bad input is told."""

import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import mocha_jax as mj
from mocha_jax._data import pack
from tests.zoo import ragged


def test_packing_keeps_every_sample_in_order():
    xs, ys = ragged()
    data = mj.pack_tasks(xs, ys)
    for t, (x, y) in enumerate(zip(xs, ys, strict=True)):
        np.testing.assert_array_equal(data.x[t, : len(x)], x)
        np.testing.assert_array_equal(data.y[t, : len(x)], y)
        assert (data.x[t, len(x) :] == 0).all()
        np.testing.assert_array_equal(data.weight[t], np.arange(data.x.shape[1]) < len(x))
    assert data.sizes.tolist() == [len(y) for y in ys]
    assert data.num_tasks == data.num_nodes == len(xs)
    assert not data.shared


def test_groups_are_the_same_as_lists():
    xs, ys = ragged()
    names = np.concatenate([[f"user{t}"] * len(y) for t, y in enumerate(ys)])
    shuffle = np.random.default_rng(0).permutation(len(names))
    shuffle = shuffle[np.argsort(names[shuffle], kind="stable")][::-1]  # groups interleaved and reversed
    data = mj.pack_tasks(np.concatenate(xs)[shuffle], np.concatenate(ys)[shuffle], names[shuffle])
    lists = mj.pack_tasks(xs, ys)
    assert data.sizes.tolist() == lists.sizes.tolist()
    for t in range(len(xs)):
        np.testing.assert_array_equal(np.sort(data.x[t], axis=0), np.sort(lists.x[t], axis=0))


def test_scalings():
    xs, ys = ragged()
    mean = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    np.testing.assert_allclose(mean.weight.sum(1), 1.0)
    shared = mj.pack_tasks(xs, ys, task=[0, 0, 1, 1, 1], loss_scaling="task_mean")
    np.testing.assert_allclose(shared.to_tasks(shared.weight.sum(1)), 1.0)  # per task, over its nodes
    pooled = mean.pooled()
    n = sum(map(len, ys))
    np.testing.assert_allclose(pooled.weight, np.where(mean.weight > 0, 1 / n, 0))
    assert (pooled.num_tasks, pooled.task.tolist()) == (1, [0] * 5)
    np.testing.assert_array_equal(mj.pack_tasks(xs, ys).pooled().weight, mj.pack_tasks(xs, ys).weight)


def test_weights_follow_the_scaling(key):
    xs, ys = ragged()
    added, mean = mj.pack_tasks(xs, ys), mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    importance = jax.random.uniform(key, added.weight.shape)
    for a, b in ((added, mean), (mean, added)):
        changed = a.replace(weight=a.weight * importance).replace(loss_scaling=b.loss_scaling)
        np.testing.assert_allclose(changed.weight, b.weight * importance, rtol=1e-12)


def test_importance_weights_survive_pooling_and_splitting(key):
    data = mj.pack_tasks(*ragged(), loss_scaling="task_mean")
    weighted = data.replace(weight=data.weight * 3.0)
    np.testing.assert_allclose(weighted.pooled().weight, 3 * data.pooled().weight)
    np.testing.assert_allclose(weighted.split(key, 0.5)[0].weight, 3 * data.split(key, 0.5)[0].weight)


def test_intercept_is_one_on_real_rows_only():
    data = mj.pack_tasks(*ragged(), intercept=True)
    np.testing.assert_array_equal(data.x[..., -1], data.weight)
    assert data.num_features == 5


@given(seed=st.integers(0, 10_000), fraction=st.floats(0.05, 0.95), classes=st.integers(1, 4))
@pytest.mark.slow
def test_split_is_a_stratified_partition(seed, fraction, classes):
    rng = np.random.default_rng(seed)
    sizes = rng.permutation(np.r_[29, rng.integers(1, 30, size=3)])  # the same shapes every time
    xs = [np.stack([np.full(n, float(t)), np.arange(n, dtype=float)], 1) for t, n in enumerate(sizes)]
    ys = [rng.integers(0, classes, size=n).astype(float) for n in sizes]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    train, test = data.split(jax.random.key(seed), fraction)
    for t, n in enumerate(sizes):
        rows = [np.asarray(p.x[t])[np.asarray(p.weight[t]) > 0][:, 1] for p in (train, test)]
        assert sorted(np.concatenate(rows)) == list(range(n))  # a partition
        assert all((np.diff(r) > 0).all() for r in rows)  # in the old order
        want = n if n == 1 else np.clip(round(fraction * n), 1, n - 1)
        assert len(rows[0]) == want
        for c in range(classes):
            have = sum(ys[t][int(i)] == c for i in rows[0])
            assert abs(have - fraction * (ys[t] == c).sum()) <= 1 + 1e-9 or n * min(fraction, 1 - fraction) < 1
    totals = np.asarray(test.weight.sum(1))
    assert np.all(np.isclose(totals, 1) | (totals == 0))


def test_split_does_not_depend_on_padding(key):
    data = mj.pack_tasks(*ragged())
    plain, padded = data.split(key, 0.6)[0], data.pad(nodes=8, rows=40).split(key, 0.6)[0]
    np.testing.assert_array_equal(plain.x, padded.x[:5])


@pytest.mark.parametrize("scaling", ["sum", "task_mean"])
def test_packed_with_room_is_packed_and_padded(scaling):
    xs, ys = ragged()
    padded = mj.pack_tasks(xs, ys, loss_scaling=scaling).pad(rows=40)
    roomy = mj.pack_tasks(xs, ys, loss_scaling=scaling, rows=40)
    jax.tree.map(np.testing.assert_array_equal, roomy, padded)
    with pytest.raises(ValueError, match=r"pack_tasks: rows must be an integer >= 1, got 0"):
        mj.pack_tasks(xs, ys, rows=0)


@pytest.mark.extended
def test_tasks_dealt_over_nodes_have_the_same_optimum_and_scores():
    xs, ys = ragged(low=2, high=30, regression=True)
    names = ["fir", "ash", "oak", "elm", "yew"]
    data = mj.pack_tasks(dict(zip(names, xs, strict=True)), dict(zip(names, ys, strict=True)),
                         rows=7, loss_scaling="task_mean", intercept=True, dtype=np.float64)  # fmt: skip
    parts = [-(-len(x) // 7) for x in xs]
    assert max(parts) > 2
    assert data.x.shape == (sum(parts), 7, 5)
    assert data.task.tolist() == np.repeat(np.arange(5), parts).tolist()
    assert data.names.tasks == tuple(names)
    x, y, real, task = (np.asarray(a) for a in (data.x, data.y, data.weight > 0, data.task))
    for t in range(5):
        np.testing.assert_array_equal(x[task == t][real[task == t]][:, :4], xs[t])
        np.testing.assert_array_equal(y[task == t][real[task == t]], ys[t])
    w = np.random.default_rng(0).normal(size=(5, 5))  # with the same objective everywhere, it is the same problem
    errors = [np.c_[x, np.ones(len(x))] @ own - y for own, x, y in zip(w, xs, ys, strict=True)]
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.3))
    want = sum(np.mean(error**2) / 2 for error in errors) + 0.3 * np.sum(w**2)
    assert float(mj.objective(problem, jnp.asarray(w))) == pytest.approx(want, rel=1e-12)
    rmse = [np.sqrt(np.mean(error**2)) for error in errors]
    np.testing.assert_allclose(mj.metrics.rmse(w, data, per_task=True), rmse)
    scaling = data.standardized("task").scaling
    assert scaling is not None
    np.testing.assert_allclose(scaling.mean, [x.mean(0) for x in xs])


def test_parts_of_what_is_like_other_data_or_has_tasks_of_its_own():
    xs, ys = ragged()
    owner = ["b", "a", "b", "a", "b"]
    data = mj.pack_tasks(xs, ys, task=owner, dtype=np.float64, rows=5)
    parts = [-(-len(x) // 5) for x in xs]
    assert data.names.tasks == ("a", "b")
    assert data.task.tolist() == np.repeat([1, 0, 1, 0, 1], parts).tolist()
    train = mj.pack_tasks({"p": xs[0], "q": xs[1], "r": xs[2]}, {"p": ys[0], "q": ys[1], "r": ys[2]}, dtype=np.float64)
    test = mj.pack_tasks({"r": xs[3]}, {"r": ys[3]}, like=train, rows=4)
    assert test.task.tolist() == [0, 1] + [2] * -(-len(xs[3]) // 4)
    weights = np.random.default_rng(0).normal(size=(3, 4))
    want = np.mean(np.sign(xs[3] @ weights[2]) != ys[3])
    assert float(mj.metrics.error_rate(weights, test)) == pytest.approx(want)
    with pytest.raises(ValueError, match="group 'a': a value overflows float16"):
        mj.pack_tasks(np.eye(4) * 1e6, np.ones(4), list("aaab"), dtype="float16", rows=1)


def test_padding_that_takes_much_memory_is_warned_of(monkeypatch):
    sizes = np.array([50_000] + [50] * 199)
    said = "4.8 MB of samples take 800 MB; with rows=300, which deals large tasks over several nodes, they take 8.78 MB"
    with pytest.warns(UserWarning, match=f"padded to the 50000 samples of the largest task, {said}"):
        pack._warn_of_padding(sizes, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack._warn_of_padding(np.array([50_000, 50]), 80)  # twice as much
        pack._warn_of_padding(sizes // 10, 80)  # 80 MB
        monkeypatch.setattr(pack, "_MUCH", 1000)
        xs = [np.ones((n, 3), "f") for n in [70] + [2] * 9]
        ys = [np.ones(len(x), "f") for x in xs]
        dealt = mj.pack_tasks(xs, ys, rows=9, dtype="float32")
    with pytest.warns(UserWarning, match="0.00106 MB of samples take 0.0084 MB; with rows=9") as found:
        mj.pack_tasks(xs, ys, dtype="float32")
    assert found[0].filename == __file__
    assert f"several nodes, they take {dealt.x.nbytes / 1e6:.3g} MB" in str(found[0].message)


def test_to_tasks_and_to_nodes_are_adjoint():
    data = mj.pack_tasks(*ragged(), task=[1, 0, 2, 1, 0]).pad(nodes=7)
    rng = np.random.default_rng(0)
    per_node = jnp.asarray(rng.normal(size=(7, 3))).at[5:].set(0.0)
    per_task = jnp.asarray(rng.normal(size=(3, 3)))
    np.testing.assert_allclose(jnp.sum(data.to_nodes(per_task) * per_node), jnp.sum(per_task * data.to_tasks(per_node)))
    assert data.nodes_per_task.tolist() == [2, 2, 1]


GOOD_X, GOOD_Y = np.ones((3, 2)), np.ones(3)
BAD_INPUT = {
    "no tasks": (lambda: mj.pack_tasks([], []), "no tasks"),
    "unequal lists": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y, GOOD_Y]), "1 arrays in xs but 2"),
    "nan": (lambda: mj.pack_tasks([GOOD_X, GOOD_X * [[1, np.nan]]], [GOOD_Y] * 2), "task 1: x is NaN or infinite in row 0"),
    "inf label": (lambda: mj.pack_tasks([GOOD_X], [np.array([1, np.inf, 1])]), "task 0: y is NaN or infinite in row 1"),
    "features differ": (lambda: mj.pack_tasks([GOOD_X, np.ones((2, 3))], [GOOD_Y, np.ones(2)]), "task 1: has 3 features"),
    "rows differ": (lambda: mj.pack_tasks([GOOD_X], [np.ones(2)]), r"task 0: y must be \[3\]"),
    "empty task": (lambda: mj.pack_tasks([GOOD_X, np.ones((0, 2))], [GOOD_Y, np.ones(0)]), "task 1: has no samples"),
    "one axis": (lambda: mj.pack_tasks([np.ones(3)], [GOOD_Y]), r"task 0: x must be \[n_t, d\]"),
    "strings": (lambda: mj.pack_tasks([np.array([["a", "b"]])], [np.ones(1)]), "task 0: x must be numbers"),
    "scaling": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y], loss_scaling="mean"), "'sum', 'task_mean'"),
    "intercept": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y], intercept=-2), "intercept must be finite and >= 0, got -2"),
    "no key": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).split(0, 0.5), "one JAX random key such as .*, got 0"),  # type: ignore[arg-type]
    "many keys": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).folds(jax.random.split(jax.random.key(0)), 2), r"got an array key<fry>\[2\]"),
    "integer dtype": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y], dtype="int32"), "must be a float type"),
    "overflow": (lambda: mj.pack_tasks([GOOD_X * 1e300], [GOOD_Y], dtype="float32"), "task 0: a value overflows float32"),
    "task gap": (lambda: mj.pack_tasks([GOOD_X] * 2, [GOOD_Y] * 2, task=[0, 2]), "every task from 0"),
    "groups": (lambda: mj.pack_tasks(GOOD_X, GOOD_Y, np.zeros(2)), r"groups \[N\]"),
    "fraction": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).split(jax.random.key(0), 1.0), r"in \(0, 1\)"),
    "shapes": (lambda: mj.TaskData(jnp.ones((2, 3, 4)), jnp.ones((2, 2)), jnp.ones((2, 3)), jnp.arange(2)), "y must be an array"),
    "no groups": (lambda: mj.pack_tasks(GOOD_X, GOOD_Y), "needs groups"),
    "nan in a group": (lambda: mj.pack_tasks(GOOD_X * [[1, 1], [1, np.nan], [1, 1]], GOOD_Y, ["a", "zoe", "a"]), "group 'zoe': x is NaN"),
    "nan group": (lambda: mj.pack_tasks(GOOD_X, GOOD_Y, [0.0, np.nan, 1.0]), "groups is NaN in row 1"),
    "no features": (lambda: mj.pack_tasks([np.ones((3, 0))], [GOOD_Y]), "task 0: has no features"),
    "negative weight": (lambda: mj.TaskData(jnp.ones((1, 3, 4)), jnp.ones((1, 3)), -jnp.ones((1, 3)), jnp.arange(1)), "node 0 has a negative"),
    "task out of range": (lambda: mj.TaskData(jnp.ones((1, 3, 4)), jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.array([2]), num_tasks=2), "integers from 0 to 1"),
    "shrink to nothing": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).pad(nodes=0), "cannot shrink 1 nodes x 3 rows to 0 x 3"),
    "shrink by a word": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).pad(rows=""), "rows must be an integer"),  # type: ignore[arg-type]
    "stratify": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).split(jax.random.key(0), 0.5, stratify="no"), "stratify must be True or False"),  # type: ignore[arg-type]
    "masked samples": (lambda: mj.pack_tasks([GOOD_X, np.ma.masked_greater(GOOD_X * [[1, 2]], 1)], [GOOD_Y] * 2), "task 1: x holds masked values"),
    "masked rows": (lambda: mj.pack_tasks([list(np.ma.masked_greater(GOOD_X * [[1, 2]], 1))], [GOOD_Y]), "task 0: x holds masked values"),
    "masked labels": (lambda: mj.pack_tasks([GOOD_X], [np.ma.masked_array(GOOD_Y, [False, True, False])]), "task 0: y holds masked values"),
    "masked at once": (lambda: mj.pack_tasks(np.ma.masked_less(GOOD_X, 2), GOOD_Y, ["a", "b", "a"]), "pack_tasks: xs holds masked values"),
    "masked groups": (lambda: mj.pack_tasks(GOOD_X, GOOD_Y, np.ma.masked_less([0, 1, 1], 1)), "groups holds masked values"),
    "masked record": (lambda: mj.TaskData(np.ma.masked_less(np.zeros((1, 3, 4)), 1), jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.arange(1)), "TaskData: x holds masked"),  # type: ignore[arg-type]
    "too many tasks": (lambda: mj.TaskData(jnp.ones((1, 3, 4)), jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.arange(1), num_tasks=10**9), "num_tasks must be at most the number of nodes, 1"),
    "shrink": (lambda: mj.pack_tasks([GOOD_X], [GOOD_Y]).pad(rows=1), "cannot shrink"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_clear_sentence(name):
    make, message = BAD_INPUT[name]
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_what_is_masked_nowhere_is_data():
    plain, masked = (
        mj.pack_tasks([GOOD_X], [GOOD_Y]),
        mj.pack_tasks([np.ma.masked_array(GOOD_X)], [np.ma.masked_array(GOOD_Y)]),
    )
    np.testing.assert_array_equal(plain.x, masked.x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_is_refused_wherever_it_comes_from(dtype):
    data = mj.pack_tasks(*ragged(), task=[0, 0, 1, 1, 2], dtype=dtype)
    sizes = np.asarray(data.sizes)
    for bad in (jnp.nan, jnp.inf):
        with pytest.raises(
            ValueError, match="TaskData: x is NaN or infinite in task 1, node 3, row 1; remove or impute it"
        ):
            data.replace(x=data.x.at[3, 1, 0].set(bad))
    with pytest.raises(ValueError, match="TaskData: y is NaN or infinite in task 0, node 1, row 0; remove"):
        data.replace(y=data.y.at[1, 0].set(jnp.nan))
    short = int(np.argmin(sizes))
    with pytest.raises(ValueError, match=f"node {short}, row {sizes[short]}; padding must be finite too, e.g. 0"):
        data.replace(x=data.x.at[short, sizes[short], 0].set(jnp.nan))
    # Large numbers are numbers, even where their sum is none; and what is traced cannot be looked at.
    assert data.replace(x=jnp.full_like(data.x, 3e38)).x.dtype == dtype
    assert jnp.isnan(jax.jit(lambda x: jnp.sum(data.replace(x=x).x))(data.x.at[0].set(jnp.nan)))
    # Whatever changes in an array of NumPy is seen.
    mine = data.replace(x=np.array(data.x))
    mine.x[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="x is NaN or infinite in task 0, node 0, row 0"):
        mine.replace(loss_scaling="task_mean")


def test_float64_without_x64_says_what_happens():
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="stored as float32"):
            data = mj.pack_tasks([GOOD_X], [GOOD_Y])
        assert data.x.dtype == jnp.float32
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mj.pack_tasks([GOOD_X], [GOOD_Y], dtype="float32")
        with pytest.raises(ValueError, match="jax_enable_x64"):
            mj.pack_tasks([GOOD_X], [GOOD_Y], dtype="float64")


def test_a_changed_task_takes_effect():
    data = mj.pack_tasks(*ragged())
    moved = data.replace(task=jnp.array([0, 0, 1, 1, 2]))
    assert (moved.num_tasks, moved.shared, moved.nodes_per_task.tolist()) == (3, True, [2, 2, 1])
    direct = mj.TaskData(data.x, data.y, data.weight, moved.task, num_tasks=3)
    assert direct.shared


def test_labels_of_a_margin_loss_must_be_signs():
    data = mj.pack_tasks([GOOD_X, GOOD_X], [GOOD_Y, np.array([1.0, 0.0, 1.0])])
    with pytest.raises(ValueError, match=r"task 1: has label 0, but Hinge needs labels -1 and \+1"):
        mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
