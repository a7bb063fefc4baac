"""What users touch is known to a type checker: mypy reads this file too, and fails where a type is lost."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array

import mocha_jax as mj
from mocha_jax._core.pytree import Relation

Number = Array | float


@pytest.fixture(scope="module")
def problem() -> mj.Problem:
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(20, 3)) for _ in range(4)]
    data = assert_type(mj.pack_tasks(xs, [np.sign(x[:, 0]) for x in xs], loss_scaling="task_mean"), mj.TaskData)
    return assert_type(mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Probabilistic(0.1)), mj.Problem)


@pytest.fixture(scope="module")
def solution(problem: mj.Problem) -> mj.Solution[mj.Problem]:
    return assert_type(mj.solve(problem, max_rounds=20), mj.Solution[mj.Problem])


@pytest.mark.slow
def test_a_solution_is_of_arrays_numbers_and_records(solution: mj.Solution[mj.Problem]) -> None:
    assert isinstance(assert_type(solution.weights, Array), Array)
    assert isinstance(assert_type(solution.omega, Array), Array)
    assert isinstance(assert_type(solution.correlation, Array), Array)
    assert isinstance(assert_type(solution.task_gaps, Array), Array)
    assert isinstance(assert_type(solution.gap, Number), float)
    assert isinstance(assert_type(solution.relative_gap, Number), float)
    assert isinstance(assert_type(solution.joint_gap, Number | None), float)
    assert isinstance(assert_type(solution.status, mj.Status), mj.Status)
    assert isinstance(assert_type(solution.message, str), str)
    assert isinstance(assert_type(solution.problem, mj.Problem), mj.Problem)
    assert isinstance(assert_type(solution.quality, mj.Quality), mj.Certificate)
    assert isinstance(assert_type(solution.certificate, mj.Certificate), mj.Certificate)
    assert isinstance(assert_type(solution.certificate.primal, Array), Array)
    assert isinstance(assert_type(solution.relation, Relation), mj.coupling.LowRank)


@pytest.mark.slow
def test_a_history_is_of_arrays(solution: mj.Solution[mj.Problem]) -> None:
    history = assert_type(solution.history, mj.History)
    of_solve = assert_type((history.round, history.relative_gap, history.simulated_time, history.bytes_up),
                           tuple[Array, Array, Array, Array])  # fmt: skip
    assert {len(a) for a in of_solve} == {len(history.round)}
    assert isinstance(assert_type(history.quality, mj.Quality), mj.Certificate)


@pytest.mark.slow
def test_a_run_returns_a_history(problem: mj.Problem) -> None:
    _, history = mj.run(problem, mj.Mocha(), jax.random.key(0), num_rounds=2)
    assert isinstance(assert_type(history, mj.History), mj.History)
    assert isinstance(assert_type(history.gap, Array), Array)


def test_a_problem_is_of_arrays(problem: mj.Problem) -> None:
    data = assert_type(problem.data, mj.TaskData)
    assert isinstance(assert_type(data.x, Array), Array)
    assert isinstance(assert_type(data.dtype, np.dtype[Any]), np.dtype)
    train, test = assert_type(data.split(jax.random.key(0), 0.5), tuple[mj.TaskData, mj.TaskData])
    assert train.num_tasks == test.num_tasks == assert_type(data.num_tasks, int)
    regularizer = assert_type(problem.regularizer, mj.regularizers.Regularizer)
    assert assert_type(regularizer.value(jnp.ones((4, 3))), Array).shape == ()


@pytest.mark.slow
def test_searches_return_records(problem: mj.Problem) -> None:
    candidates = assert_type(mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1]), mj.regularizers.Independent)
    path = assert_type(mj.lambda_path(problem, candidates, max_rounds=5), mj.Path)
    assert isinstance(assert_type(path.weights, Array), Array)
    assert isinstance(assert_type(path.certificate, mj.Certificate), mj.Certificate)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_a_cross_validation_returns_the_solution_of_a_problem(problem: mj.Problem) -> None:
    candidates = mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1])
    found = assert_type(
        mj.cross_validate(problem, candidates, folds=2, tol=1.0), mj.CrossValidation[mj.Solution[mj.Problem]]
    )
    assert isinstance(assert_type(found.solution, mj.Solution[mj.Problem] | None), mj.Solution)
    assert isinstance(assert_type(found.mean, np.ndarray), np.ndarray)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate")
def test_searches_of_several_classes_return_their_models(problem: mj.Problem) -> None:
    def make(data: mj.TaskData) -> mj.Problem:
        return problem.replace(data=data)

    data = problem.data.replace(y=jnp.where(problem.data.y > 0, 1.0, 0.0))
    candidates = mj.grid(mj.regularizers.Independent, lam=[1.0, 0.1])
    path = assert_type(mj.multiclass.lambda_path(data, make, candidates, tol=1.0), list[mj.OneVsRest])
    assert isinstance(assert_type(path[0].weights, Array), Array)
    found = assert_type(
        mj.multiclass.cross_validate(data, make, candidates, folds=2, tol=1.0), mj.CrossValidation[mj.OneVsRest]
    )
    assert isinstance(assert_type(found.solution, mj.OneVsRest | None), mj.OneVsRest)


def test_an_algorithm_of_another_kind_of_problem_is_refused(problem: mj.Problem) -> None:
    model = mj.networks.MLP(3, 2)
    assert isinstance(assert_type(model.init(jax.random.key(0)), tuple[mj.networks.Layer, ...]), tuple)
    with pytest.raises(ValueError, match="FedAvg solves a Prediction"):
        mj.solve(problem, mj.FedAvg(model, optax.sgd(0.1)))  # type: ignore[misc]  # as the checker says too
