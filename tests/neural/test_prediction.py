"""What a network is judged by: every task by the model of its own, the same wherever it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests import zoo
from tests.neural.problems import MODEL, make_problem, mean_loss, mlp, rows


@pytest.mark.slow
def test_the_global_model_is_judged_task_by_task(key):
    problem = make_problem()
    algorithm = mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    merged = problem.merged()
    assert merged.data.num_nodes == 1
    assert merged.data.sizes.tolist() == [int(problem.data.sizes.sum())]
    state, history = mj.run(merged, algorithm, key, num_rounds=3)
    errors = []
    for k in range(5):
        x, y = rows(problem.test, k)
        errors.append((np.asarray(mlp(jax.tree.map(lambda a: a[0], state.own[0]), x)).argmax(1) != y).mean())
    np.testing.assert_allclose(history.error[-1], np.mean(errors))
    np.testing.assert_allclose(algorithm.scores(state, merged).error, errors)


def test_errors_are_means_over_tasks_and_over_samples():
    problem = make_problem(low=4, high=40)
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.1))
    state, history = mj.run(problem, algorithm, jax.random.key(0), num_rounds=1)
    wrong = []
    for k in range(5):
        x, y = rows(problem.test, k)
        wrong.append(np.asarray(mlp(state.shared, x)).argmax(1) != y)
    columns = history.to_dict()
    np.testing.assert_allclose(columns["error"], [np.mean([w.mean() for w in wrong])], rtol=1e-12)
    np.testing.assert_allclose(columns["sample_error"], [np.concatenate(wrong).mean()], rtol=1e-12)
    assert abs(columns["error"] - columns["sample_error"]) > 1e-3


def test_many_samples_are_judged_in_parts(key):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1300, 4)), rng.integers(0, 3, 1300)
    problem = mj.Prediction(make_problem().data, test=mj.pack_tasks([x], [y]))
    algorithm = mj.FedAvg(MODEL, optax.sgd(0.1))
    scores = algorithm.scores(algorithm.init(problem), problem)
    z = np.asarray(mlp(algorithm.init(problem).shared, x))
    np.testing.assert_allclose(scores.error, [(z.argmax(1) != y).mean()], rtol=1e-12)
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    np.testing.assert_allclose(scores.loss, [-logs[np.arange(1300), y].mean()], rtol=1e-10)


def fresh(problem):
    """Untrained clients beyond those with data."""
    return problem.data.pad(nodes=7)


@pytest.mark.parametrize("where", ["merged and padded", pytest.param("merged and sharded", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_global_model_judges_every_task_wherever_it_lies(where, key):
    problem = make_problem()
    algorithm, merged = mj.Local(MODEL, optax.adam(0.05), batch_size=8), problem.merged()
    other = {
        "merged and padded": merged.replace(data=fresh(merged)), "merged and sharded": mj.shard(merged),
    }[where]  # fmt: skip
    ours, theirs = (mj.solve(p, algorithm, key=key, tol=None, max_rounds=4).history.error for p in (merged, other))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.slow
def test_a_test_set_of_one_task_is_judged_by_all_clients(key):
    problem = make_problem(m=4, test=False)
    x, y = rows(problem.data, 2)
    held = mj.pack_tasks([x], [y])
    algorithm = mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    one = problem.replace(test=held)
    each = [
        (np.asarray(mlp(jax.tree.map(lambda a, k=k: a[k], state.own[0]), x)).argmax(1) != y).mean() for k in range(4)
    ]
    np.testing.assert_allclose(algorithm.scores(state, one).error, [np.mean(each)])
    fed = mj.FedAvg(MODEL, optax.sgd(0.1))
    assert fed.scores(fed.init(one), one).error.shape == (1,)


@pytest.mark.slow
def test_held_out_samples_of_other_tasks_are_refused(key):
    problem = make_problem(m=4)
    algorithm = mj.Local(MODEL, optax.adam(0.05))
    assert problem.test is not None
    fewer = problem.replace(test=problem.test.replace(task=jnp.array([0, 0, 1, 1])))
    with pytest.raises(ValueError, match="test has 2 tasks, and 4 clients work on 4"):
        mj.run(fewer, algorithm, key, num_rounds=1)
    shared = problem.replace(data=problem.data.replace(task=jnp.array([0, 0, 1, 1])))
    with pytest.raises(ValueError, match="several clients share a task"):
        mj.run(shared, algorithm, key, num_rounds=1)
    assert mj.run(shared.replace(test=None), algorithm, key, num_rounds=1)[1].error.shape == (1,)


def test_labels_and_outputs_have_to_fit(key):
    xs, ys = zoo.ragged(m=3)
    with pytest.raises(ValueError, match="needs labels 0, 1, ..., but there is a -1"):
        mj.Prediction(mj.pack_tasks(xs, ys))
    data = mj.pack_tasks(xs, [np.full(len(y), 3) for y in ys])
    with pytest.raises(ValueError, match="a label 3, but the model has outputs for 3 classes"):
        mj.run(mj.Prediction(data), mj.FedAvg(MODEL, optax.sgd(0.1)), key, num_rounds=1)
    flat = mj.networks.Model(lambda key: jnp.zeros(4), lambda w, x: x @ w)
    with pytest.raises(ValueError, match=r"must be \[2, c\], got \(2,\)"):
        mj.run(mj.Prediction(data), mj.FedAvg(flat, optax.sgd(0.1)), key, num_rounds=1)
    with pytest.raises(ValueError, match="one output, not 3"):
        mj.run(mj.Prediction(data, mj.likelihoods.Gaussian()), mj.Local(MODEL, optax.sgd(0.1)), key, num_rounds=1)


@pytest.mark.extended
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_some_nodes_at_a_time_are_judged_as_all_are(own, key, monkeypatch):
    """Five nodes in three blocks: the last block begins earlier, and no node counts twice."""
    problem = make_problem()
    algorithm = mj.Local(MODEL, optax.sgd(0.1)) if own else mj.FedAvg(MODEL, optax.sgd(0.1))
    state, _ = mj.run(problem, algorithm, key, num_rounds=2)
    together = algorithm.scores(state, problem)
    monkeypatch.setattr("mocha_jax._neural.prediction._AT_ONCE", 2 * problem.judged_on.y.shape[1])
    jax.clear_caches()
    apart = algorithm.scores(state, problem)
    np.testing.assert_array_equal(apart.samples, together.samples)
    np.testing.assert_allclose(apart.loss, together.loss, rtol=1e-12)
    np.testing.assert_allclose(apart.error, together.error, rtol=1e-12)


@pytest.mark.slow
def test_every_task_is_judged_by_the_network_of_its_own_client(key):
    problem, algorithm = make_problem(m=4), mj.Local(MODEL, optax.adam(0.05), batch_size=8)
    assert problem.test is not None
    state, _ = mj.run(problem, algorithm, key, num_rounds=3)
    scores = algorithm.scores(state, problem)
    for k in range(4):
        x, y = rows(problem.test, k)
        own = jax.tree.map(lambda a, k=k: a[k], state.own[0])
        np.testing.assert_allclose(scores.error[k], (np.asarray(mlp(own, x)).argmax(1) != y).mean())
        np.testing.assert_allclose(scores.loss[k], mean_loss(own, x, y), rtol=1e-10)


@pytest.mark.slow
def test_models_never_see_rows_of_padding(key):
    """One that divides by the norm of a sample, on clients of different sizes and short batches."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 4)) for n in (4, 9, 7)]
    problem = mj.Prediction(mj.pack_tasks(xs, [(x[:, 0] > 0).astype(int) for x in xs]))
    normed = mj.networks.Model(
        lambda key: 0.1 * jax.random.normal(key, (4, 2)),
        lambda w, x: (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w,
    )
    for batch_size in (None, 4):
        for kind in (mj.FedAvg, mj.Local):
            algorithm = kind(normed, optax.sgd(0.5), batch_size=batch_size)
            _, history = mj.run(problem, algorithm, key, num_rounds=4)
            assert history.diverged.tolist() == [0, 0, 0, 0]
            assert history.loss[-1] < history.loss[0]


def test_a_problem_without_samples_is_refused():
    one = mj.pack_tasks([np.ones((1, 4))] * 3, [[0], [1], [0]])
    train, test = one.split(jax.random.key(0), 0.75)
    assert int(test.sizes.sum()) == 0
    with pytest.raises(ValueError, match="test has no samples"):
        mj.Prediction(train, test=test)
    with pytest.raises(ValueError, match="data has no samples"):
        mj.Prediction(test)
    scores = mj.FedAvg(MODEL, optax.sgd(0.1)).scores
    problem = mj.Prediction(one)
    state = mj.FedAvg(MODEL, optax.sgd(0.1)).init(problem)

    def error(weight):  # where nobody can look
        found = scores(state, problem.replace(data=one.replace(weight=weight)))
        return found.mean(found.error)

    assert np.isnan(jax.jit(error)(jnp.zeros_like(one.weight)))


def test_outputs_that_are_not_numbers_are_wrong():
    outputs = jnp.full((3, 2), jnp.nan).at[1].set(jnp.array([0.0, 1.0]))
    assert mj.likelihoods.Categorical().error(outputs, jnp.array([0.0, 1.0, 1.0])).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.slow
def test_a_client_predicts(key):
    problem = make_problem()
    x = problem.data.x[1]
    shared, own = mj.FedAvg(MODEL, optax.sgd(0.3)), mj.Local(MODEL, optax.sgd(0.3))
    for algorithm in (shared, own):
        state, _ = mj.run(problem, algorithm, key, num_rounds=3)
        found = algorithm.predict(state, problem, 1, x)
        with jax.numpy_rank_promotion("allow"):
            logits = MODEL.apply(algorithm.parameters(state, problem, 1), x)
        np.testing.assert_allclose(found.mean, jax.nn.softmax(logits), rtol=1e-12)
        assert (np.asarray(found.std) == 0).all()
        np.testing.assert_allclose(found.mutual_information, 0.0, atol=1e-12)
        with pytest.raises(ValueError, match=r"x must be an array \[b, 4\], got shape \(4,\)"):
            algorithm.predict(state, problem, 1, x[0])
        with pytest.raises(ValueError, match="there is no client"):
            algorithm.predict(state, problem, problem.data.num_nodes, x)
