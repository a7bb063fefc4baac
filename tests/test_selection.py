"""Folds, paths, cross-validation and tuning."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

import mocha_jax as mj
from mocha_jax._data.splits import class_sizes
from mocha_jax._selection import caveats
from tests import zoo

R = mj.regularizers
LAMS = [3.0, 0.3, 0.03, 0.003]


@given(sizes=st.lists(st.integers(1, 17), min_size=3, max_size=3), count=st.integers(2, 5), seed=st.integers(0, 9))
def test_folds_deal_every_sample_once_and_evenly(sizes, count, seed):
    rng = np.random.default_rng(seed)
    data = mj.pack_tasks([rng.normal(size=(n, 2)) for n in sizes], [np.sign(rng.normal(size=n)) for n in sizes])
    data = data.pad(rows=17)
    part = np.asarray(data.folds(jax.random.key(seed), count))
    real = np.asarray(data.weight) > 0
    assert (part[~real] == -1).all()
    assert ((part[real] >= 0) & (part[real] < count)).all()
    for t in range(3):
        held = np.bincount(part[t, real[t]], minlength=count)
        assert held.max() - held.min() <= 1
        for label in (-1.0, 1.0):  # each class as evenly as whole samples allow
            of_class = np.bincount(part[t, real[t] & (np.asarray(data.y[t]) == label)], minlength=count)
            assert of_class.max() - of_class.min() <= 1
    more = data.pad(rows=20)
    np.testing.assert_array_equal(more.folds(jax.random.key(seed), count)[:, : real.shape[1]], part)


def test_groups_stay_together_and_are_dealt_evenly(key):
    data = zoo.data(m=3, low=20, high=20)
    groups = np.arange(20)[None] // 4 + np.zeros((3, 1), int)
    part = np.asarray(data.folds(key, 5, groups))
    for t in range(3):
        assert sorted(part[t, ::4].tolist()) == [0, 1, 2, 3, 4]
        assert (part[t].reshape(5, 4) == part[t, ::4][:, None]).all()
    assert (part != np.asarray(data.folds(jax.random.key(1), 5, groups))).any()
    with pytest.raises(ValueError, match=r"groups must be integers \[m, n\]"):
        data.folds(key, 5, np.zeros(3, int))
    with pytest.raises(ValueError, match="count"):
        data.folds(key, 1)


def test_kept_rows_are_the_problem_of_those_rows(key):
    # The weights follow task means; other weights stay in proportion; padding changes nothing.
    for scaling in ("sum", "task_mean"):
        data = zoo.data(m=3, d=2, low=8, high=12, loss_scaling=scaling)
        part = data.folds(key, 4)
        kept = data.keep(part != 1)
        rows = [np.asarray(part[t] != 1) & (np.asarray(data.weight[t]) > 0) for t in range(3)]
        packed = mj.pack_tasks([data.x[t][r] for t, r in enumerate(rows)], [data.y[t][r] for t, r in enumerate(rows)],
                               loss_scaling=scaling)  # fmt: skip
        problems = (mj.Problem(d, mj.losses.Hinge(), R.MeanRegularized(0.1, 0.1)) for d in (kept, packed))
        a, b = (mj.solve(p, tol=1e-9) for p in problems)
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-4)
        assert a.primal == pytest.approx(b.primal, rel=1e-8)
    double = data.replace(weight=data.weight * 2.0).keep(part != 1)
    np.testing.assert_allclose(double.weight, 2.0 * kept.weight)


def test_unstratified_splits_ignore_labels(key):
    data = mj.pack_tasks([np.ones((40, 1))], [np.repeat([-1.0, 1.0], 20)])
    counts = {int((data.split(jax.random.key(s), 0.5, stratify=False)[0].y > 0).sum()) for s in range(8)}
    assert len(counts) > 1
    assert data.split(key, 0.5, stratify=False)[0].sizes.tolist() == [20]


@pytest.mark.parametrize(
    "make",
    [
        R.Probabilistic,
        pytest.param(R.Independent, marks=pytest.mark.slow),
        pytest.param(lambda lam: R.MeanRegularized(lam, 0.1 * lam), marks=pytest.mark.slow),
    ],
)
def test_a_path_is_the_same_as_separate_solves(make):
    problem = mj.Problem(
        zoo.data(m=5, d=4, low=15, high=30, loss_scaling="task_mean"), mj.losses.Hinge(), R.Independent(1.0)
    )
    path = mj.lambda_path(problem, mj.grid(make, lam=LAMS), tol=1e-6, max_rounds=3000)
    alone = [
        mj.solve(problem.replace(regularizer=make(lam)), tol=1e-6, max_rounds=3000, record_every=5) for lam in LAMS
    ]
    for i, one in enumerate(alone):
        assert path.certificate.residual[i] <= 1e-6
        assert float(path[i].certificate.joint_primal) == pytest.approx(float(one.certificate.joint_primal), rel=3e-6)


@pytest.mark.parametrize(
    "make",
    [
        R.Probabilistic,
        R.Independent,
        pytest.param(lambda lam: R.SparsePrecision(lam, 1.0, 0.01, lam), marks=pytest.mark.slow),
    ],
)
def test_what_is_carried_over_is_better_than_all_and_than_nothing(make):
    data = zoo.data(m=4, d=3, loss_scaling="task_mean")
    algorithm = mj.Mocha(sigma_prime="per_task")
    strong, weak = (mj.Problem(data, mj.losses.Hinge(), make(lam)) for lam in (3.0, 0.03))
    state = mj.solve(strong, algorithm, tol=1e-3).state

    def dual(state):
        c = algorithm.certify(state, weak)
        return float(c.joint_dual if weak.regularizer.jointly_convex and weak.regularizer.learned else c.dual)

    carried, whole = dual(algorithm.warm_start(state, weak)), dual(algorithm.resume(state, weak))
    assert carried >= whole - 1e-9
    assert carried > dual(algorithm.init(weak))


def test_cross_validation_of_ridge_equals_scikit_learn(key):
    data = zoo.data(m=3, d=3, low=20, high=25, regression=True)
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(1.0))
    found = mj.cross_validate(problem, mj.grid(R.Independent, lam=LAMS), key=key, folds=4, trials=2,
                              tol=1e-12, max_rounds=2000, chunk=3)  # fmt: skip
    assert found.metric == "rmse"
    assert found.task_scores.shape == (2, 4, 4, 3)
    for trial in range(2):
        part = np.asarray(data.folds(jax.random.fold_in(key, trial), 4))
        for fold in range(4):
            for i, lam in enumerate(LAMS):
                for t in range(3):
                    real = np.asarray(data.weight[t]) > 0
                    x, y = np.asarray(data.x[t]), np.asarray(data.y[t])
                    fit, held = real & (part[t] != fold), real & (part[t] == fold)
                    ridge = Ridge(alpha=2.0 * lam, fit_intercept=False).fit(x[fit], y[fit])
                    want = np.sqrt(np.mean((ridge.predict(x[held]) - y[held]) ** 2))
                    assert found.task_scores[trial, fold, i, t] == pytest.approx(want, rel=1e-5)
    assert found.best == int(np.argmin(found.mean))
    chosen: Any = found.regularizer
    assert chosen.lam == LAMS[found.best]
    assert found.solution is not None
    assert found.solution.relative_gap <= 1e-12
    again = mj.cross_validate(problem, mj.grid(R.Independent, lam=LAMS), key=key, folds=4, trials=2, metric="rmse",
                              tol=1e-12, max_rounds=2000, chunk=1, refit=False)  # fmt: skip
    # A gap of 1e-12 leaves the weights, by strong convexity, about its root apart.
    np.testing.assert_allclose(again.task_scores, found.task_scores, rtol=1e-5)
    assert again.solution is None
    assert "CrossValidation(best=" in repr(again)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate", "ignore:.*did not reach")
def test_models_are_compared_on_the_same_folds_and_tasks(key):
    data = zoo.data(m=4, d=3, low=12, high=20, loss_scaling="task_mean")
    shape = (1, 3, 2, 4)
    local = mj.Problem(data, mj.losses.Hinge(), R.Independent(1.0))
    pooled = mj.Problem(data.pooled(), mj.losses.Hinge(), R.Independent(1.0))
    grid, options = mj.grid(R.Independent, lam=[1.0, 0.1]), dict(key=key, folds=3, refit=False, max_rounds=50)
    assert mj.cross_validate(local, grid, **options).task_scores.shape == shape
    assert mj.cross_validate(pooled, grid, scored_as=data, **options).task_scores.shape == shape
    # AUC is maximised, and a function of one's own may be as well.
    by_name = mj.cross_validate(local, grid, metric="auc", **options)
    assert by_name.best == int(np.nanargmax(by_name.mean))
    mine = mj.cross_validate(local, grid, metric=mj.metrics.auc, maximise=True, **options)
    np.testing.assert_array_equal(mine.task_scores, by_name.task_scores)
    assert by_name.standard_error.shape == (2,)


def test_a_search_names_what_is_wrong():
    problem = mj.Problem(zoo.data(), mj.losses.Hinge(), R.Independent(1.0))
    with pytest.raises(ValueError, match="one leading axis"):
        mj.lambda_path(problem, R.Independent(1.0))
    with pytest.raises(ValueError, match=r"lambda_path: candidate 1: lam must be from 2.2e-308 to"):
        mj.lambda_path(problem, mj.grid(R.Independent, lam=[1.0, 5e-324]))
    with pytest.raises(ValueError, match="metric"):
        mj.cross_validate(problem, mj.grid(R.Independent, lam=[1.0]), metric="accuracy")
    with pytest.raises(ValueError, match="scored_as must have the rows"):
        mj.cross_validate(problem, mj.grid(R.Independent, lam=[1.0]), scored_as=zoo.data(m=2))
    with pytest.raises(ValueError, match="make and start belong together"):
        mj.tune(problem, problem.data, start=1.0)
    with pytest.raises(ValueError, match="positive and finite"):
        mj.tune(problem, problem.data, make=lambda h: problem, start=-1.0)


def test_tuning_finds_the_best_ridge():
    # Against a fine grid of closed forms.
    train, validation = zoo.data(m=4, d=3, low=20, high=30, regression=True).split(jax.random.key(3), 0.6)
    problem = mj.Problem(train, mj.losses.Squared(), R.Independent(5.0))
    tuned = mj.tune(problem, validation, tol=1e-9, max_rounds=300)

    def loss(lam):
        def one(x, y, c):
            return jnp.linalg.solve((x.T * c[None]) @ x + 2 * lam * jnp.eye(3), (x.T * c[None]) @ y)

        return mj.metrics.mean_loss(jax.vmap(one)(train.x, train.y, train.weight), validation, mj.losses.Squared())

    grid = np.geomspace(1e-3, 10.0, 400)
    values = np.asarray(jax.lax.map(loss, jnp.asarray(grid)))
    assert tuned.value <= values.min() * (1 + 1e-4)
    assert float(tuned.hyperparameters["lam"]) == pytest.approx(grid[values.argmin()], rel=0.15)
    assert tuned.value == pytest.approx(tuned.history.value.min())
    regularizer: Any = tuned.solution.problem.regularizer
    np.testing.assert_allclose(regularizer.lam, tuned.hyperparameters["lam"])
    assert tuned.history.residual.max() < 1e-6
    plotting = pytest.importorskip("mocha_jax.plotting")
    figure = plotting.tuning(tuned)
    assert figure.axes[1].get_yscale() == "log"
    assert len(figure.axes[0].lines[0].get_xdata()) == len(tuned.history.value)


@pytest.mark.slow
def test_sample_weights_of_a_spoilt_task_are_tuned_away():
    # Task 0's labels are noise; it pulls the others by their common mean.
    covariance = jnp.ones((6, 6)) + 0.01 * jnp.eye(6)
    truth = mj.datasets.federation(jax.random.key(0), 6, 4, covariance=covariance, smallest=40, largest=40)
    train, validation = truth.data.split(jax.random.key(1), 0.5)
    noise = jnp.sign(jax.random.normal(jax.random.key(2), train.y.shape, train.dtype))
    spoilt = train.replace(y=jnp.where(jnp.arange(6)[:, None] == 0, noise, train.y))
    problem = mj.Problem(spoilt, mj.losses.Logistic(), R.MeanRegularized(1.0, 0.05))
    clean = validation.keep(jnp.arange(6)[:, None] > 0)

    def make(share):
        return problem.replace(data=spoilt.replace(weight=spoilt.weight * share[:, None]))

    tuned = mj.tune(problem, clean, make=make, start=jnp.ones(6), steps=10, tol=1e-5)
    assert tuned.value < tuned.history.value[0]
    assert float(tuned.hyperparameters[0]) < 0.5 * float(jnp.median(tuned.hyperparameters))


def regression(sizes=(20, 30, 25)):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in sizes]
    return mj.pack_tasks(xs, [x @ [1.0, 2.0, 3.0] + rng.normal(size=len(x)) for x in xs])


def test_folds_of_real_labels_are_random(key):
    data = regression()
    parts = [np.asarray(data.folds(jax.random.fold_in(key, i), 5)) for i in range(30)]
    real = np.asarray(data.weight) > 0
    # Two samples are together in a fold as often as chance has it, whether their labels are close or not.
    together = np.mean([p[:, :, None] == p[:, None, :] for p in parts], axis=0)
    for k in range(3):
        order = np.argsort(np.asarray(data.y[k])[real[k]])
        t = together[k][real[k]][:, real[k]][order][:, order]
        n = len(t)
        chance = (n / 5 - 1) / (n - 1)
        np.testing.assert_allclose(np.diag(t, 1).mean(), chance, atol=0.06)
        np.testing.assert_allclose(np.diag(t, 5).mean(), chance, atol=0.06)
    for p in parts:
        counts = [np.bincount(p[k][real[k]], minlength=5) for k in range(3)]
        assert all(c.max() - c.min() <= 1 for c in counts)


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_trials_of_a_regression_differ(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    found = mj.cross_validate(problem, grid, key=key, trials=3, metric="rmse", refit=False)
    assert len(np.unique(found.scores[:, 0, 0])) == 3


def test_a_path_is_a_sequence():
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    path = mj.lambda_path(problem, mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0, 0.1]), max_rounds=5)
    assert len(path) == 3

    def leaf(path):
        return float(jax.tree.leaves(path.regularizer)[0])

    assert [leaf(p) for p in path] == pytest.approx([10.0, 1.0, 0.1])
    assert leaf(path[-1]) == pytest.approx(0.1)
    assert [leaf(p) for p in path[1:]] == pytest.approx([1.0, 0.1])
    with pytest.raises(IndexError, match="none with number 3"):
        path[3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate", "ignore:.*did not reach")
def test_a_candidate_that_fails_does_not_spoil_those_after_it(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[1.0, 2.3e-308, 0.1])
    path = mj.lambda_path(problem, grid, tol=1e-10)
    assert not np.isfinite(path.weights[1]).all()
    alone = mj.solve(problem.replace(regularizer=mj.regularizers.Independent(0.1)), tol=1e-10)
    np.testing.assert_allclose(path.weights[2], alone.weights, rtol=1e-3)
    for metric in ("rmse", "auc"):
        with pytest.warns(UserWarning, match=r"candidates \[1\] lack scores"):
            found = mj.cross_validate(problem, grid, key=key, metric=metric, folds=3)
        assert np.isnan(found.mean).tolist() == [False, True, False]
        assert np.isnan(found.standard_error).tolist() == [False, True, False]
        assert found.best != 1


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_methods_without_duals_have_paths(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid, sgd = mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1]), mj.MiniBatchSgd(4, step_size=0.1)
    path = mj.lambda_path(problem, grid, sgd, max_rounds=20)
    alone = mj.solve(problem.replace(regularizer=path[0].regularizer), sgd, max_rounds=20, record_every=5)
    np.testing.assert_allclose(path.weights[0], alone.weights, rtol=1e-9)
    with pytest.warns(UserWarning, match="did not reach tol=0.001 in max_rounds=20 rounds"):
        found = mj.cross_validate(problem, grid, sgd, key=key, metric="rmse", folds=3, max_rounds=20)
    assert np.isfinite(found.mean).all()


def test_candidates_are_ranked_on_what_all_of_them_have(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))

    def picky(weights, data, per_task):
        """Defined for weak candidates only in the first two tasks."""
        scores = mj.metrics.rmse(weights, data, per_task=True)
        weak = jnp.abs(weights).max() > 1.0
        return jnp.where(weak & (jnp.arange(3) == 2), jnp.nan, scores)

    grid = mj.grid(mj.regularizers.Independent, lam=[1e4, 1.0])
    with pytest.warns(UserWarning, match=r"candidates \[1\] lack scores"):
        found = mj.cross_validate(problem, grid, key=key, metric=picky, refit=False)
    assert found.best == 0


def test_what_cannot_be_scored_is_said_before_anything_is_fitted(key):
    data = regression()
    problem = mj.Problem(data, mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    with pytest.raises(ValueError, match=r"an array \[3\]; got"):
        mj.cross_validate(problem, grid, metric=lambda w, data, per_task: mj.metrics.rmse(w, data))
    ones = problem.replace(data=data.replace(y=jnp.ones_like(data.y)), loss=mj.losses.Hinge())
    with pytest.raises(ValueError, match="no candidate has a score"):
        mj.cross_validate(ones, grid, metric="auc", max_rounds=2)
    with pytest.raises(ValueError, match="this one has 2"):
        mj.cross_validate(
            problem.replace(data=data.replace(task=jnp.array([0, 0, 1]))), grid, metric="rmse", scored_as=data
        )
    with pytest.raises(ValueError, match="k "):
        mj.lambda_path(problem, mj.grid(lambda k: mj.regularizers.Clustered(1.0, 0.1, k), k=[1.0, 7.0]))


@pytest.mark.filterwarnings("ignore:cross_validate")
def test_the_area_under_a_curve_is_maximised_by_any_name(key):
    data = zoo.data(m=4, low=20, high=30)
    problem = mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1e-3])
    best = [mj.cross_validate(problem, grid, key=key, metric=m, refit=False).best for m in ("auc", mj.metrics.auc)]
    assert best[0] == best[1]


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_a_fold_without_samples_leaves_a_standard_error(key):
    problem = mj.Problem(regression((3,)), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    found = mj.cross_validate(problem, grid, key=key, metric="rmse", refit=False)
    flat = found.scores[0]
    assert np.isnan(flat).any(1).sum() == 2
    np.testing.assert_allclose(found.standard_error, np.nanstd(flat, 0, ddof=1) / np.sqrt(3))


@pytest.mark.slow
def test_any_regularizer_can_be_a_candidate():
    omega = zoo.laplacian(3)
    graphs = mj.grid(lambda lam1: mj.regularizers.Graph(omega, lam1, 0.1), lam1=[1.0, 0.1])
    assert np.shape(graphs.omega) == (2, 3, 3)
    means = mj.grid(lambda lam1: mj.regularizers.MeanRegularized(lam1, 0.1 * lam1), lam1=[1.0, 0.1, 0.01])
    assert [np.shape(leaf) for leaf in jax.tree.leaves(means)] == [(3,), (3,)]
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    assert mj.lambda_path(problem, graphs, tol=1e-3).weights.shape == (2, 3, 3)


@pytest.mark.slow
def test_the_tuned_solution_is_that_of_the_value(key):
    train, held = regression((40, 30)).split(key, 0.6)
    problem = mj.Problem(train, mj.losses.Squared(), mj.regularizers.Independent(1.0))
    # A rate so large that the second step leads nowhere.
    with pytest.warns(UserWarning, match="stopped after 1 steps: there is no gradient at"):
        tuned = mj.tune(problem, held, steps=4, optimizer=optax.sgd(1e7), tol=1e-8)
    assert len(tuned.history.value) < 4
    assert np.isfinite(tuned.solution.weights).all()
    np.testing.assert_allclose(tuned.value, mj.metrics.mean_loss(tuned.solution.weights, held, problem.loss))
    with pytest.warns(UserWarning, match="stopped at max_rounds=4 with a relative gap"):
        short = mj.tune(problem.replace(regularizer=R.Probabilistic(0.1)), held, steps=3, max_rounds=4)
    assert short.history.gap.min() > 1e-2
    assert short.history.distance.max() < 1e-8  # the gradients are those of the optimum all the same
    with pytest.raises(ValueError, match="no gradient at the start.* distance from the optimum 1"):
        mj.tune(problem.replace(regularizer=R.Probabilistic(0.01)), held, steps=3, max_rounds=4)
    np.testing.assert_allclose(short.value, mj.metrics.mean_loss(short.solution.weights, held, problem.loss))
    assert "trained to a gap of" in repr(short)


def test_scores_are_what_the_loss_is_scored_by(key):
    data, none = regression(), mj.grid(R.Independent, lam=[1e6])
    y, real = np.asarray(data.y), np.asarray(data.weight) > 0
    names = {
        "hinge": "error_rate",
        "logistic": "error_rate",
        "squared": "rmse",
        "quantile": "mean_loss",
        "huber": "mean_loss",
    }
    assert {name: zoo.LOSSES[name].scored_by for name in names} == names
    problem = mj.Problem(data, mj.losses.Quantile(0.3), R.Independent(1.0))
    found = mj.cross_validate(problem, none, key=key, folds=3, refit=False)
    part = np.asarray(data.folds(jax.random.fold_in(key, 0), 3))
    for fold in range(3):
        for t in range(3):
            held = y[t][real[t] & (part[t] == fold)]
            want = np.mean(np.maximum(0.3 * held, -0.7 * held))  # all weights are as good as 0
            assert found.task_scores[0, fold, 0, t] == pytest.approx(want, rel=1e-4)
    assert found.metric == "mean_loss"
    by_name = mj.cross_validate(problem, none, key=key, folds=3, refit=False, metric=mj.metrics.mean_loss)
    np.testing.assert_array_equal(by_name.task_scores, found.task_scores)


def test_what_speaks_against_a_choice_is_said_once_each(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), R.Independent(1.0))
    with pytest.warns(UserWarning, match="cross_validate") as said:
        mj.cross_validate(
            problem, mj.grid(R.Independent, lam=[1e3, 1.0]), key=key, folds=3, tol=1e-14, max_rounds=1, refit=False
        )
    assert len(said) == 2
    assert all(w.filename == __file__ for w in said)
    assert re.match(
        r"cross_validate: candidates (0 \(.+\), )?1 \(.+\) did not reach tol=1e-14 in max_rounds=1 rounds, .* raise max_rounds",
        str(said[0].message),
    )
    assert "the best candidate, 1, is at the edge of the grid: lam=1 is the smallest tried, add smaller" in str(
        said[1].message
    )


def test_candidates_that_did_not_converge_are_named_with_how_far_they_got():
    residuals, rounds = np.full((2, 3, 9), 1e-6), np.full((2, 3, 9), 200)
    assert caveats.unfinished(residuals, rounds, 1e-3, 200) is None
    residuals[1, 2, 4], residuals[0, 0, 7] = 0.02, np.inf  # of the latter nothing is known
    said = str(caveats.unfinished(residuals, rounds, 1e-3, 200))
    assert said.startswith("candidates 4 (2.0e-02) did not reach tol=0.001")
    assert said.endswith("as far as they got; raise max_rounds.")
    rounds[1, 2, 4] = 15  # where no more rounds were done, more of them do not help
    assert "floats certify no more" in str(caveats.unfinished(residuals, rounds, 1e-3, 200))
    many = str(caveats.unfinished(np.full((1, 1, 9), 0.01), np.full((1, 1, 9), 200), 1e-3, 200))
    assert "(1.0e-02) and 4 more did not reach" in many


SIGMAS, THREE = [np.inf, 1.0, 0.1], [10.0, 1.0, 0.1]
EDGES = {
    "inside": (mj.grid(R.Independent, lam=THREE), [3.0, 1.0, 2.0], False, None),
    "smallest": (mj.grid(R.Independent, lam=THREE), [3.0, 2.0, 1.0], False, "lam=0.1 is the smallest tried, add smaller"),
    "largest": (mj.grid(R.Independent, lam=THREE), [1.0, 2.0, 3.0], False, "lam=10 is the largest tried, add larger"),
    "of a gain": (mj.grid(R.Independent, lam=THREE), [1.0, 2.0, 3.0], True, "lam=0.1 is the smallest"),
    "as good inside": (mj.grid(R.Independent, lam=THREE), [1.0, 1.0, 3.0], False, None),
    "nothing else": (mj.grid(R.Independent, lam=[1.0]), [1.0], False, None),
    "unknown inside": (mj.grid(R.Independent, lam=THREE), [1.0, np.nan, np.nan], False, None),
    "infinity is an end": (mj.grid(R.Probabilistic, lam=[1.0], sigma2=SIGMAS), [1.0, 2.0, 3.0], False, None),
    "a finite end": (mj.grid(R.Probabilistic, lam=[1.0], sigma2=SIGMAS), [3.0, 2.0, 1.0], False, "sigma2=0.1 is the smallest"),
    "0 is an end": (mj.grid(R.MeanRegularized, lam1=[0.0, 1.0, 2.0], lam2=[1.0]), [1.0, 2.0, 3.0], False, None),
    "counts are no strengths": (mj.grid(lambda k: R.Clustered(1.0, 1.0, k), k=[1.0, 2.0]), [1.0, 2.0], False, None),
    "two axes": (
        mj.grid(R.MeanRegularized, lam1=[1.0, 2.0], lam2=[3.0, 4.0]), [4.0, 3.0, 2.0, 1.0], False,
        "lam1=2 is the largest tried, add larger ones; lam2=4 is the largest",
    ),
    "many numbers a candidate": (mj.grid(lambda a: R.Independent(a * np.ones(3)), a=[1.0, 2.0]), [1.0, 2.0], False, None),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_a_best_value_with_nothing_beyond_it_is_named(name):
    candidates, mean, more_is_better, message = EDGES[name]
    best = int(np.nanargmax(mean) if more_is_better else np.nanargmin(mean))
    said = caveats.at_the_edge(candidates, np.asarray(mean), best, more_is_better)
    assert said is None if message is None else message in str(said)


def test_classes_are_counted_by_task_and_group():
    y = np.array([[1.0, -1, -1, 1], [1, -1, 1, 1], [-1, -1, -1, -1]])
    real, task = np.array([[True] * 4, [True] * 3 + [False], [True] * 4]), np.array([0, 0, 1])
    assert class_sizes(y, real, task, 3, None).tolist() == [[3, 4], [4, 0], [0, 0]]
    groups = np.array([[5, 5, 5, 9], [5, 5, 5, 9], [1, 2, 1, 2]])
    assert class_sizes(y, real, task, 3, groups).tolist() == [[2, 3], [2, 0], [0, 0]]


def wearers(seed, counts, m=12, d=20, kinds=7):
    """So many samples of every kind from every wearer, who has ways of his own; kind 0 is to be found."""
    rng = np.random.default_rng(seed)
    ways = (rng.normal(size=(kinds, d)) + 0.8 * rng.normal(size=(m, kinds, d))) / np.sqrt(d)
    for count in counts:
        kind = np.repeat(np.arange(kinds), count)
        xs = [way[kind] + 0.15 * rng.normal(size=(len(kind), d)) / np.sqrt(d) for way in ways]
        yield mj.pack_tasks(xs, [np.where(kind == 0, 1.0, -1.0)] * m, loss_scaling="task_mean", intercept=True)


def test_a_class_of_one_sample_a_task_does_not_make_the_trivial_model_best():
    # Were it held out, it would belong to a task trained without any: the more a model learns, the worse it would do.
    train, test = wearers(0, (1, 10))
    problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
    grid = mj.grid(R.Probabilistic, lam=[1.0, 0.1, 0.01, 0.001])
    options: Any = dict(key=jax.random.key(0), folds=3, tol=1e-2)
    few = r"in 12 of 12 tasks a class has fewer samples or groups than folds=3 \(task 0: 1 of label \+1\)"
    with pytest.warns(UserWarning, match=f"{few}.*; 12 of 84 samples are alone in their class and stay in training"):
        found: Any = mj.cross_validate(problem, grid, **options)
    assert mj.metrics.error_rate(found.solution.weights, test) < 0.01  # of a trivial model 1 / 7
    with pytest.warns(UserWarning, match="say little of it; take fewer folds"):
        plain = mj.cross_validate(problem, grid, refit=False, keep_rare=False, **options)
    assert plain.best == 0  # the trivial one


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate")
def test_recognising_walks_of_wearers_with_one_sample_of_each_kind(real_data):
    # Human activities: 15.5 % of test samples wrong with the trivial model, about 2 % with the better half of the path.
    har, rng = real_data("har"), np.random.default_rng(0)
    taught, asked = [], []
    for wearer in np.unique(har["subject"])[:20]:
        rows = [rng.permutation(np.flatnonzero((har["subject"] == wearer) & (har["y"] == k))) for k in range(1, 7)]
        taught.append([r[0] for r in rows])
        asked.append(np.concatenate([r[1:16] for r in rows]))
    train, test = (
        mj.pack_tasks([har["X"][r] for r in rows], [np.where(har["y"][r] == 2, 1.0, -1.0) for r in rows],
                      loss_scaling="task_mean", intercept=True, dtype="float32")
        for rows in (taught, asked)
    )  # fmt: skip
    problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
    grid = mj.grid(R.Probabilistic, lam=[10.0, 1.0, 0.1, 0.01])
    found: Any = mj.cross_validate(problem, grid, folds=3, tol=1e-2)
    assert mj.metrics.error_rate(found.solution.weights, test) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate")
def test_unrelated_tasks_need_sigma2_among_what_is_tuned():
    # The default, infinity, ties tasks together that have nothing in common; see `Probabilistic`.
    lams, errors = [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=(12, 20))
        xs = [[rng.normal(size=(n, 20)) for _ in truth] for n in (15, 500)]
        train, test = (
            mj.pack_tasks(x, [np.sign(a @ w) for a, w in zip(x, truth, strict=True)], loss_scaling="task_mean")
            for x in xs
        )
        problem = mj.Problem(train, mj.losses.Hinge(), R.Independent(1.0))
        grids = (
            mj.grid(R.Independent, lam=lams),
            mj.grid(R.Probabilistic, lam=lams),
            mj.grid(R.Probabilistic, sigma2=[np.inf, 1.0, 0.1, 0.01], lam=lams),
        )
        found: list[Any] = [mj.cross_validate(problem, grid, key=jax.random.key(seed)) for grid in grids]
        errors.append([float(mj.metrics.error_rate(f.solution.weights, test)) for f in found])
    local, default, tuned = np.mean(errors, axis=0)
    assert default > local + 0.01
    assert tuned < local + 0.01
