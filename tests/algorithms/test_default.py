"""What `solve` chooses where no algorithm is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests import zoo

R = mj.regularizers


def problem(loss, regularizer=None, m=3, n=10, d=4):
    x = jnp.zeros((m, n, d)) if d > 4 else jnp.asarray(np.random.default_rng(0).normal(size=(m, n, d)))
    data = mj.TaskData(x, jnp.ones((m, n)), jnp.ones((m, n)), jnp.arange(m, dtype=jnp.int32), num_tasks=m)
    return mj.Problem(data, loss, R.MeanRegularized(0.1, 0.1) if regularizer is None else regularizer)


def chosen(*args, **kwargs):
    return type(mj.default_algorithm(problem(*args, **kwargs)))


@pytest.mark.parametrize("name", zoo.LOSSES)
def test_the_loss_decides_and_a_learned_relationship_does(name):
    loss = zoo.LOSSES[name]
    second = mj.Newton if loss.smoothness is not None else mj.InteriorPoint if loss.piecewise_linear else mj.Mocha
    assert chosen(loss) is second
    assert chosen(loss, R.Graph(np.eye(3), 0.1, 0.1)) is second
    assert chosen(loss, R.Probabilistic(0.1)) is mj.Mocha


def test_shapes_decide():
    squared, logistic, hinge = mj.losses.Squared(), mj.losses.Logistic(), mj.losses.Hinge()
    assert chosen(squared, n=40, d=128) is mj.Newton
    assert chosen(squared, n=400, d=129) is mj.Mocha
    assert chosen(logistic, n=400, d=64) is mj.Newton
    assert chosen(logistic, n=400, d=65) is mj.Mocha
    assert chosen(hinge, n=400, d=128) is mj.InteriorPoint
    assert chosen(hinge, n=400, d=129) is mj.Mocha
    # 2,000 nodes are many: their second derivatives are more than a million numbers.
    assert [chosen(logistic, m=2000, n=n, d=32) for n in (31, 32)] == [mj.Mocha, mj.Newton]
    assert chosen(hinge, m=2000, n=7, d=32) is mj.InteriorPoint
    assert chosen(squared, m=2000, n=7, d=32) is mj.Newton


def test_few_samples_do_where_tasks_have_nothing_in_common():
    logistic, alone = mj.losses.Logistic(), R.Independent(0.1)
    assert [chosen(logistic, alone, n=n, d=500) for n in (64, 65)] == [mj.Newton, mj.Mocha]
    assert chosen(logistic, alone, m=2000, n=7, d=32) is mj.Newton
    assert [chosen(mj.losses.Hinge(), alone, n=n, d=600) for n in (512, 513)] == [mj.InteriorPoint, mj.Mocha]
    two = problem(logistic, alone, m=4, n=64, d=500).data.replace(task=jnp.asarray([0, 0, 1, 1]), num_tasks=2)
    assert two.shared
    assert type(mj.default_algorithm(mj.Problem(two, logistic, alone))) is mj.Mocha


def test_a_federation_and_a_state_decide(key):
    p = problem(mj.losses.Logistic())
    assert type(mj.default_algorithm(p, federation=True)) is mj.Mocha
    mocha = mj.Mocha().init(p)
    assert type(mj.default_algorithm(p, mj.Newton().init(p))) is mj.Newton
    assert type(mj.default_algorithm(p, mocha)) is mj.Mocha
    hinge = problem(mj.losses.Hinge())
    assert type(mj.default_algorithm(hinge, mj.InteriorPoint().init(hinge))) is mj.InteriorPoint
    assert type(mj.default_algorithm(hinge, federation=True)) is mj.Mocha
    with pytest.raises(ValueError, match="default_algorithm: problem"):
        mj.default_algorithm(3)  # type: ignore[arg-type]


@pytest.mark.extended
def test_a_state_is_continued_by_its_algorithm():
    p = problem(mj.losses.Logistic())
    mocha = mj.solve(p, tol=1e-3, systems=mj.systems.Dropout(0.1))
    assert type(mj.default_algorithm(p, mocha.state)) is mj.Mocha
    assert mj.solve(p, state=mocha.state, tol=1e-3).rounds >= 0


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:cross_validate. the best candidate", "ignore:cross_validate. in 1 of 4 tasks")
def test_searches_choose_alike():
    """Candidates of a regularizer that is given, though the problem's own is learned."""
    data = zoo.data(m=4, d=3, loss_scaling="task_mean")
    p = mj.Problem(data, mj.losses.Logistic(), R.Probabilistic(0.1))
    path = mj.lambda_path(p, mj.grid(R.Independent, lam=[1.0, 0.1]), tol=1e-6)
    assert (path.rounds <= 10).all()
    found = mj.cross_validate(p, mj.grid(R.Independent, lam=[1.0, 0.1, 0.01]), folds=3, key=jax.random.key(0))
    assert found.solution is not None
    assert type(found.solution.state).__name__ == "NewtonState"
