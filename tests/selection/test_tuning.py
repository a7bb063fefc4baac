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


@pytest.mark.slow
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
    clean = validation.keep(jnp.broadcast_to(jnp.arange(6)[:, None] > 0, validation.y.shape))

    def make(share):
        return problem.replace(data=spoilt.replace(weight=spoilt.weight * share[:, None]))

    tuned = mj.tune(problem, clean, make=make, start=jnp.ones(6), steps=10, tol=1e-5)
    assert tuned.value < tuned.history.value[0]
    assert float(tuned.hyperparameters[0]) < 0.5 * float(jnp.median(tuned.hyperparameters))


@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
@pytest.mark.slow
def test_trials_of_a_regression_differ(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid = mj.grid(mj.regularizers.Independent, lam=[10.0, 1.0])
    found = mj.cross_validate(problem, grid, key=key, trials=3, metric="rmse", refit=False)
    assert len(np.unique(found.scores[:, 0, 0])) == 3


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


@pytest.mark.extended
def test_every_step_is_one_program():
    train, validation = zoo.data(m=3, d=2, low=9, high=12, regression=True).split(jax.random.key(3), 0.6)
    traced: list[None] = []
    seen: list[int] = []

    def score(weights, data):
        traced.append(None)
        return mj.metrics.mean_loss(weights, data, mj.losses.Squared())

    problem = mj.Problem(train, mj.losses.Squared(), R.Independent(1.0))
    mj.tune(problem, validation, score=score, steps=2, tol=1e-3, callback=lambda *_: seen.append(len(traced)))
    assert seen[0] == seen[1] > 0
