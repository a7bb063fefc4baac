"""Tuning by derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests import zoo
from tests.selection.problems import regression

R = mj.regularizers


def one_part(data, key=3, count=3):
    """One validation part: a third of the samples are held out, the others always train."""
    return np.where(np.asarray(data.folds(jax.random.key(key), count)) == 0, 0, -1)


def small(**kwargs):
    return zoo.data(m=4, d=3, low=20, high=30, regression=True, **kwargs)


def with_lam(problem, lam):
    return problem.replace(regularizer=R.Independent(lam))


@pytest.mark.slow
def test_tuning_finds_the_best_ridge():
    # Against a fine grid of closed forms.
    data = small()
    parts = one_part(data)
    train, validation = data.keep(parts < 0), data.keep(parts == 0)
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(5.0))
    adam = optax.adam(optax.cosine_decay_schedule(0.7, 50))
    tuned = mj.tune(problem, folds=parts, stopping=0, optimizer=adam, steps=50, tol=1e-9)

    def loss(lam):
        def one(x, y, c):
            return jnp.linalg.solve((x.T * c[None]) @ x + 2 * lam * jnp.eye(3), (x.T * c[None]) @ y)

        return mj.metrics.mean_loss(jax.vmap(one)(train.x, train.y, train.weight), validation, mj.losses.Squared())

    grid = np.geomspace(1e-3, 10.0, 400)
    values = np.asarray(jax.lax.map(loss, jnp.asarray(grid)))
    assert tuned.value <= values.min() * (1 + 1e-4)
    assert float(tuned.hyperparameters["lam"]) == pytest.approx(grid[values.argmin()], rel=0.15)
    assert tuned.value == pytest.approx(tuned.history.value.min())
    assert tuned.history.residual.max() < 1e-6
    # The solution is one of all samples.
    again = mj.solve(problem.replace(regularizer=R.Independent(tuned.hyperparameters["lam"])), tol=1e-9)
    np.testing.assert_allclose(tuned.solution.weights, again.weights, atol=1e-6)
    plotting = pytest.importorskip("mocha_jax.plotting")
    figure = plotting.tuning(tuned)
    assert figure.axes[1].get_yscale() == "log"
    assert len(figure.axes[0].lines[0].get_xdata()) == len(tuned.history.value)


@pytest.mark.extended
def test_folds_prior_and_score_are_what_the_docstring_says():
    data = small()
    problem = mj.Problem(data, mj.losses.Squared(), R.Independent(0.1))
    key, start = jax.random.key(5), jnp.asarray([0.05, 0.1, 0.2, 0.3])

    def score(problem, solution, lam):
        return mj.metrics.mean_loss(solution.weights, problem.data, problem.loss) * (1.0 + jnp.sum(lam))

    def objective(logs, unit=None):
        """Mean loss of the first two folds by separate solves; that of the start; and all losses."""
        losses = []
        for fold in range(3):
            there = with_lam(problem.replace(data=data.keep(parts != fold)), jnp.exp(logs))
            weights = mj.solve(there, tol=1e-13).weights
            held_out = mj.metrics.mean_loss(weights, data.keep(parts == fold), problem.loss)
            losses.append(float(held_out) * (1.0 + float(jnp.exp(logs).sum())))
        mean = float(np.mean(losses[:2]))
        aside = logs - logs.mean()
        unit = mean if unit is None else unit
        count = int(((data.weight > 0) & (parts < 2)).sum())
        return mean + unit / count * float((aside**2).sum()) / (2 * 0.5**2), mean, losses

    parts = data.folds(jax.random.fold_in(key, 0), 3)
    tuned = mj.tune(
        problem, make=with_lam, start=start, score=score, folds=3, prior=0.5, steps=2, key=key, tol=1e-12
    )  # fmt: skip
    logs = jnp.log(start)
    value, unit, losses = objective(logs)
    np.testing.assert_allclose(tuned.history.losses[0], losses, rtol=1e-8)
    assert tuned.history.value[0] == pytest.approx(losses[2], rel=1e-8)
    assert tuned.history.descended[0] == pytest.approx(value, rel=1e-8)
    for i, step in enumerate(1e-4 * np.eye(4)):
        slope = (objective(logs + step, unit)[0] - objective(logs - step, unit)[0]) / 2e-4
        assert tuned.history.gradient[0][i] == pytest.approx(slope, rel=1e-5)
    # The second step starts from where the first one led, and the folds given are those that were drawn.
    moved = jnp.log(jnp.asarray(tuned.history.hyperparameters[1]))
    assert tuned.history.descended[1] == pytest.approx(objective(moved, unit)[0], rel=1e-7)
    again = mj.tune(
        problem, make=with_lam, start=start, score=score, folds=parts, prior=0.5, steps=2, key=key, tol=1e-12
    )  # fmt: skip
    np.testing.assert_array_equal(again.history.losses, tuned.history.losses)


@pytest.mark.slow
def test_sample_weights_of_a_spoilt_task_are_tuned_away():
    # Task 0's labels are noise; it pulls the others by their common mean.
    covariance = jnp.ones((6, 6)) + 0.01 * jnp.eye(6)
    data = mj.datasets.federation(jax.random.key(0), 6, 4, covariance=covariance, smallest=40, largest=40).data
    noise = jnp.sign(jax.random.normal(jax.random.key(2), data.y.shape, data.dtype))
    first = jnp.arange(6)[:, None] == 0
    spoilt = data.replace(y=jnp.where(first, noise, data.y))
    problem = mj.Problem(spoilt, mj.losses.Logistic(), R.MeanRegularized(1.0, 0.05))
    parts = np.where(first, -1, one_part(spoilt, 1, 2))

    def make(problem, share):
        return problem.replace(data=problem.data.replace(weight=problem.data.weight * share[:, None]))

    tuned = mj.tune(problem, make=make, start=jnp.ones(6), folds=parts, stopping=0, prior=np.inf, tol=1e-5)
    assert tuned.value < tuned.history.value[0]
    assert float(tuned.hyperparameters[0]) < 0.5 * float(jnp.median(tuned.hyperparameters))


@pytest.mark.slow
def test_lambdas_of_features_without_a_signal_grow():
    # Of ten features the first three count; chosen on a fold that descent has not seen.
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(12, 10)) * (np.arange(10) < 3)
    xs = [rng.normal(size=(25, 10)) for _ in truth]
    ys = [x @ w + rng.normal(size=25) for x, w in zip(xs, truth, strict=True)]
    data = mj.pack_tasks(xs, ys, loss_scaling="task_mean")
    penalty = R.PerFeature(R.Independent(0.1), np.ones(10))
    tuned = mj.tune(mj.Problem(data, mj.losses.Squared(), penalty), steps=30)
    factor = np.asarray(tuned.hyperparameters["factor"])
    assert factor[3:].min() > 3.0 * factor[:3].max()
    assert set(tuned.hyperparameters) == {"factor", "regularizer"}
    assert tuned.value < 0.9 * tuned.history.value[0]
    regularizer: Any = tuned.problem.regularizer
    np.testing.assert_allclose(regularizer.factor, factor)


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
@pytest.mark.slow
def test_trials_of_a_regression_differ(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    found = mj.cross_validate(problem, grid, key=key, trials=3, metric="rmse", refit=False)
    assert len(np.unique(found.scores[:, 0, 0])) == 3


@pytest.mark.slow
def test_descent_without_a_gradient_ends():
    problem = mj.Problem(regression((40, 30)), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    # A rate so large that the second step leads nowhere.
    with pytest.warns(UserWarning, match="stopped after 1 steps: there is no gradient at"):
        tuned = mj.tune(problem, steps=4, optimizer=optax.sgd(1e7), tol=1e-8)
    assert len(tuned.history.value) < 4
    assert np.isfinite(tuned.solution.weights).all()
    learned = problem.replace(regularizer=R.Probabilistic(0.1))
    with pytest.warns(UserWarning, match="stopped at max_rounds"):
        short = mj.tune(learned, folds=2, steps=3, max_rounds=4)
    assert short.history.gap.min() > 1e-2
    assert short.history.distance.max() < 1e-8  # the gradients are those of the optimum all the same
    with pytest.raises(ValueError, match="no gradient at the start.* distance from the optimum"):
        mj.tune(problem.replace(regularizer=R.Probabilistic(0.01)), folds=2, steps=3, max_rounds=4)


@pytest.mark.extended
def test_every_step_and_every_call_is_one_program():
    traced: list[None] = []
    seen: list[int] = []

    def score(problem, solution, hyperparameters):
        traced.append(None)
        return mj.metrics.mean_loss(solution.weights, problem.data, problem.loss)

    problem: Any = mj.Problem(small(), mj.losses.Squared(), R.Independent(jnp.ones(4)))
    for scale in (1.0, 2.0):
        there = problem.replace(regularizer=R.Independent(scale * jnp.ones(4)))
        mj.tune(there, score=score, folds=2, steps=2, tol=1e-3, callback=lambda *_: seen.append(len(traced)))
    assert seen[0] > 0
    assert set(seen) == {seen[0]}


def test_mistakes_are_named():
    problem = mj.Problem(small(), mj.losses.Squared(), R.Independent(1.0))
    for options, match in (
        (dict(start=1.0), "make and start belong together"),
        (dict(make=with_lam, start=-1.0), "positive and finite"),
        (dict(folds=3, stopping=3), "stopping must leave a fold"),
        (dict(folds=np.zeros(3, int)), "folds must be a number or integers"),
        (dict(folds=np.full(problem.data.y.shape, 1)), "fold 0 has none"),
        (dict(folds=np.full(problem.data.y.shape, -1)), "fold 0 has none"),
        (dict(prior=0.0), "prior must be"),
    ):
        with pytest.raises(ValueError, match=match):
            mj.tune(problem, **options)
