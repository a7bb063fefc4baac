"""Paths of lambda: each solution as if alone, and a good start for the next."""

import jax
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo
from tests.selection.problems import LAMS, regression

R = mj.regularizers


@pytest.mark.parametrize(
    "make",
    [
        R.Probabilistic,
        pytest.param(R.Independent, marks=pytest.mark.slow),
        pytest.param(lambda lam: R.MeanRegularized(lam, 0.1 * lam), marks=pytest.mark.slow),
    ],
)
@pytest.mark.extended
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
@pytest.mark.slow
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


@pytest.mark.slow
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
@pytest.mark.slow
def test_methods_without_duals_have_paths(key):
    problem = mj.Problem(regression(), mj.losses.Squared(), mj.regularizers.Independent(1.0))
    grid, sgd = mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1]), mj.MiniBatchSgd(4, step_size=0.1)
    path = mj.lambda_path(problem, grid, sgd, max_rounds=20)
    alone = mj.solve(problem.replace(regularizer=path[0].regularizer), sgd, max_rounds=20, record_every=5)
    np.testing.assert_allclose(path.weights[0], alone.weights, rtol=1e-9)
    with pytest.warns(UserWarning, match="did not reach tol=0.001 in max_rounds=20 rounds"):
        found = mj.cross_validate(problem, grid, sgd, key=key, metric="rmse", folds=3, max_rounds=20)
    assert np.isfinite(found.mean).all()
