"""Standardised samples: scikit-learn's numbers, models in the units of the samples, no penalty on the intercept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

import mocha_jax as mj

SIZES, LEVELS = {"ash": 30, "elm": 21, "oak": 40}, {"ash": 5.0, "elm": -40.0, "oak": 300.0}


def table(seed=0):
    """Features of very different sizes and means, in three tasks of very different levels."""
    rng = np.random.default_rng(seed)
    who = np.repeat(list(SIZES), list(SIZES.values()))
    x = rng.normal(size=(len(who), 4)) * [1.0, 1e4, 1e-3, 1.0] + [0.0, 1e5, 7.0, -2.0]
    x[:, 3] = np.where(who == "elm", 1.0, x[:, 3])  # constant in one task
    y = x @ [1.0, 1e-4, 1e3, 0.5] + np.array([LEVELS[w] for w in who]) + 0.3 * rng.normal(size=len(x))
    return x, y, who


def packed(intercept=True, **options):
    return mj.pack_tasks(*table(), loss_scaling="task_mean", intercept=intercept, **options)


def by_task(data):
    real = np.asarray(data.weight) > 0
    return {name: np.asarray(data.x)[t][real[t]] for t, name in enumerate(data.names.tasks)}


def test_pooled_is_what_scikit_learn_does():
    x, y, who = table()
    data = packed().standardized(labels=True)
    expected = StandardScaler().fit_transform(x)
    for name, own in by_task(data).items():
        np.testing.assert_allclose(own[:, :4], expected[who == name], atol=1e-9)
        assert (own[:, 4] == 1.0).all()
    assert data.scaling.level == pytest.approx(y.mean())


def test_by_task_each_task_has_its_own():
    x, _, who = table()
    own = by_task(packed().standardized("task"))
    for name in ("ash", "oak"):
        np.testing.assert_allclose(own[name][:, :4], StandardScaler().fit_transform(x[who == name]), atol=1e-9)
    assert (own["elm"][:, 3] == 0.0).all()  # constant there: its scale is that of the others
    _, scale, _ = packed().standardized("task").scaling.moments
    assert scale[1, 3] == pytest.approx(packed().standardized("within").scaling.scale[0, 3])


def test_within_has_means_of_tasks_and_one_scale():
    x, _, who = table()
    centred = np.concatenate([x[who == name] - x[who == name].mean(0) for name in SIZES])
    scaling = packed().standardized("within").scaling
    np.testing.assert_allclose(scaling.mean, [x[who == name].mean(0) for name in SIZES])
    np.testing.assert_allclose(scaling.scale[0], centred.std(0), rtol=1e-9)


@pytest.mark.parametrize("by", ["pooled", "task", "within"])
@pytest.mark.slow
def test_the_model_is_in_the_units_of_the_samples(by):
    x, y, who = table()
    data = packed()
    standard = data.standardized(by, labels=True)
    problem = mj.Problem(standard, mj.losses.Squared(), mj.regularizers.Probabilistic(1e-3, 10.0))
    solution = mj.solve(problem, tol=1e-6)
    expected = np.concatenate([
        np.asarray(standard.x)[t, :n] @ np.asarray(solution.weights)[t] + np.broadcast_to(standard.scaling.level, 3)[t]
        for t, n in enumerate(SIZES.values())
    ])  # fmt: skip
    model = solution.model
    np.testing.assert_allclose(model.predict(x, who), expected, rtol=1e-9, atol=1e-8)
    assert model.trained["standardized"] == by
    # Metrics take the data as it was, in another order, and standardised.
    found = [mj.metrics.rmse(solution, d, per_task=True) for d in (data, standard)]
    own = [np.sqrt(np.mean((expected - y)[who == name] ** 2)) for name in SIZES]
    for each in found:
        np.testing.assert_allclose(each, own, rtol=1e-6)
    order = np.random.default_rng(1).permutation(len(x))
    again = mj.pack_tasks(x[order], y[order], who[order], like=standard)
    np.testing.assert_allclose(mj.metrics.rmse(solution.weights, again, per_task=True), own, rtol=1e-6)


@pytest.mark.slow
def test_a_model_without_intercept_finds_scaled_data(tmp_path):
    standard = packed(intercept=False).standardized("task", labels=True)
    problem = mj.Problem(standard, mj.losses.Squared(), mj.regularizers.Independent(1e-3))
    solution = mj.solve(problem, tol=1e-6)
    x, y, who = table()
    own = [np.sqrt(np.mean((solution.model.predict(x, who) - y)[who == name] ** 2)) for name in SIZES]
    np.testing.assert_allclose(mj.metrics.rmse(solution, standard, per_task=True), own, rtol=1e-6)
    solution.model.save(tmp_path / "m.npz")
    loaded = mj.load_model(tmp_path / "m.npz")
    assert (loaded.predict(x, who) == solution.model.predict(x, who)).all()
    with pytest.raises(ValueError, match="has an intercept, and the data was packed without one"):
        mj.metrics.rmse(solution, packed(intercept=False))


@pytest.mark.parametrize("by", ["task", "within"])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.thin(1)
def test_no_intercept_is_penalised_with_the_squared_loss(by, intercept):
    lam = 0.02
    standard = packed(intercept).standardized(by, labels=True)
    problem = mj.Problem(standard, mj.losses.Squared(), mj.regularizers.Independent(lam))
    solution = mj.solve(problem, tol=1e-10, max_rounds=3000)
    x, y, who = table()
    for t, name in enumerate(SIZES):
        own = who == name
        scale = np.broadcast_to(standard.scaling.scale, (3, 4))[t]
        # scikit-learn adds up squares, without a half, and its intercept is free.
        ridge = Ridge(alpha=2.0 * lam * own.sum(), solver="svd").fit(x[own] / scale, y[own])
        np.testing.assert_allclose(solution.model.weights[t] * scale, ridge.coef_, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(solution.model.predict(x[own], name), ridge.predict(x[own] / scale), rtol=1e-4)


@pytest.mark.slow
def test_weights_of_samples_count_in_the_means_of_tasks():
    x, y, _ = table()
    counts = np.tile([1.0, 3.0], 15)
    data = mj.pack_tasks([x[:30]], [y[:30]], intercept=True)
    data = data.replace(weight=jnp.asarray(counts[None] / counts.sum())).standardized("task", labels=True)
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(0.02))
    solution = mj.solve(problem, tol=1e-10, max_rounds=3000)
    assert data.scaling is not None
    scale = data.scaling.scale[0]
    ridge = Ridge(alpha=0.04 * counts.sum(), solver="svd").fit(x[:30] / scale, y[:30], sample_weight=counts)
    np.testing.assert_allclose(solution.model.predict(x[:30]), ridge.predict(x[:30] / scale), rtol=1e-6)


@pytest.mark.slow
def test_it_stays_with_the_data():
    data = packed().standardized("task")
    first, second = data.split(jax.random.key(0), 0.5)
    assert first.scaling == second.scaling == data.pad(nodes=5, rows=64).scaling == data.scaling
    assert hash(first.scaling) == hash(data.scaling)
    assert data.replace(x=data.x[..., :2]).scaling is None
    x, y, who = table()
    apart = [mj.pack_tasks(x[own], y[own], who[own], loss_scaling="task_mean", intercept=True).standardized("task")
             for own in (who == "ash", who != "ash")]  # fmt: skip
    both = apart[0].append(apart[1]).scaling
    assert both is not None
    np.testing.assert_allclose(both.mean, data.scaling.mean)
    with pytest.raises(ValueError, match="append before standardising"):
        apart[0].append(packed().replace(names=mj.Names()))


@pytest.mark.slow
def test_tasks_put_together_afterwards_have_no_model():
    pooled = packed().standardized("task").pooled()
    solution = mj.solve(mj.Problem(pooled, mj.losses.Squared(), mj.regularizers.Independent(1e-3)), tol=1e-3)
    with pytest.raises(ValueError, match="tasks were standardised each in its own way and then put together"):
        solution.model  # noqa: B018
    raw = mj.solve(mj.Problem(packed(), mj.losses.Squared(), mj.regularizers.Independent(1e-3)), tol=None, max_rounds=2)
    with pytest.raises(ValueError, match="standardised each in its own way and then put together"):
        mj.metrics.rmse(mj.LinearModel(raw.model.weights[:1], raw.model.intercept[:1]), pooled)
    fine = packed().pooled().standardized("task", labels=True)
    solution = mj.solve(mj.Problem(fine, mj.losses.Squared(), mj.regularizers.Independent(1e-3)), tol=1e-3)
    assert mj.metrics.rmse(solution, packed()).shape == ()


BAD = {
    "by": (lambda d: d.standardized("all"), "by must be 'pooled', 'task', 'within'|by must be one of"),
    "twice": (lambda d: d.standardized().standardized(), "standardised already, by 'pooled'"),
    "like": (lambda d: d.standardized(like=d), "like is not standardised"),
    "width": (
        lambda d: d.replace(x=d.x[..., :2]).standardized(like=d.standardized()), "have 2 features, those of like 4"
    ),
    "tasks": (
        lambda d: mj.pack_tasks({"ash": np.ones((3, 4))}, {"ash": np.ones(3)}).replace(names=mj.Names()).standardized(
            like=d.standardized("task")), "the data has 1 tasks, and like 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_named(case):
    call, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        call(packed())


@pytest.mark.extended
def test_uneven_features_are_named_where_a_solve_did_not_converge():
    problem = mj.Problem(packed(), mj.losses.Squared(), mj.regularizers.Independent(1e-3))
    solution = mj.solve(problem, mj.Mocha(), tol=1e-6, max_rounds=3)
    assert "standard deviations differ by a factor of 8e+06" in solution.message
    even = problem.replace(data=packed().standardized())
    assert "standard deviations" not in mj.solve(even, mj.Mocha(), tol=1e-12, max_rounds=3).message


@pytest.mark.extended
def test_a_solve_of_numpys_arrays_has_a_message_too():
    data = jax.tree.map(np.asarray, packed())
    assert isinstance(data.x, np.ndarray)
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1e-3))
    assert (
        "standard deviations differ by a factor of 8e+06"
        in mj.solve(problem, mj.Mocha(), tol=1e-6, max_rounds=3).message
    )
