"""Options of JAX under which people look for mistakes, switched on before anything was compiled."""

import warnings

import jax
import optax
import pytest

import mocha_jax as mj
from tests import zoo

HINGE, R, S = mj.losses.Hinge(), mj.regularizers, mj.systems
GIVEN = R.MeanRegularized(0.1, 0.02)
WORLD = S.Dropout(0.2) & S.PartialEpochs(0.2, 1.0) & S.Deadline(1.0, mj.costs.lte())


def problem(regularizer=GIVEN, loss=HINGE):
    regression = not loss.binary
    return mj.Problem(zoo.data(m=3, high=8, regression=regression), loss, regularizer)


def prediction():
    data = zoo.data(m=3, high=8)
    train, test = data.replace(y=(data.y > 0).astype(data.dtype)).split(jax.random.key(1), 0.6)
    return mj.Prediction(train, test=test)


def solved(problem, algorithm=None, **more):
    solution = mj.solve(problem, algorithm, **dict(tol=None, max_rounds=3) | more)
    assert solution.status == mj.Status.MAX_ROUNDS
    return solution


def resumed(folder):
    for rounds in (2, 4):
        solved(problem(), max_rounds=rounds, chunk=1, systems=WORLD, checkpoint=folder / "run.npz")


def predicted(algorithm):
    there = prediction()
    solution = solved(there, algorithm)
    algorithm.predict(solution.state, there, 0, there.data.x[0])
    repr((solution, solution.history.loss, algorithm.scores(solution.state, there)))


def examined():
    """What a solution can be asked."""
    there = problem(R.Probabilistic(0.1))
    solution = solved(there)
    repr((solution, solution.gap, solution.joint_gap, solution.omega, solution.correlation, solution.utilisation))
    mj.certificate(there, solution.state.beta)
    mj.objective(there, solution.weights)
    for metric in (mj.metrics.error_rate, mj.metrics.auc, mj.metrics.rmse):
        metric(solution.weights, there.data)


def divided():
    data = problem().data
    data.split(jax.random.key(0), 0.5)
    data.folds(jax.random.key(0), 3)
    data.append(data).pooled()


def chosen():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few rounds and samples
        mj.cross_validate(
            problem(), mj.grid(lambda lam: R.MeanRegularized(lam, 0.02), lam=[0.1, 1.0]), folds=2, max_rounds=5
        )


def tuned():
    train, held = zoo.data(m=3).split(jax.random.key(0), 0.5)
    mj.tune(problem().replace(data=train), held, steps=2, max_rounds=50)


ENTRIES = {
    "given": lambda _: solved(problem(), systems=WORLD, cost=mj.costs.lte(), watch=mj.Watch()),
    "learned": lambda _: solved(problem(R.Probabilistic(0.1)), systems=WORLD),
    "learned in turns": lambda _: solved(problem(R.Probabilistic(0.1)), mj.Mocha(server="dual", omega_every=2)),
    "clustered": lambda _: solved(problem(R.Clustered(2, 0.1, 0.1))),
    "sparse": lambda _: solved(problem(R.SparsePrecision(0.1, 0.1, 0.1, 0.1))),
    "independent": lambda _: solved(problem(R.Independent(0.1), mj.losses.Squared())),
    "cocoa": lambda _: solved(problem(), mj.Cocoa(0.5)),
    "mini-batch SDCA": lambda _: solved(problem(), mj.MiniBatchSdca(batch=2)),
    "mini-batch SGD": lambda _: solved(problem(), mj.MiniBatchSgd(batch=2)),
    "averaging": lambda _: predicted(mj.FedAvg(mj.networks.MLP(4, 2, (3,)), optax.adam(0.1), fraction=0.5)),
    "separate": lambda _: predicted(mj.Local(mj.networks.MLP(4, 2, (3,)), optax.sgd(0.1))),
    "virtual": lambda _: predicted(mj.Virtual(mj.networks.Lateral(4, 2, (3,)), optax.adam(0.01), samples=2)),
    "run": lambda _: mj.run(jax.random.key(0), mj.Mocha(), problem(), num_rounds=3, record_every=2, systems=WORLD),
    "resumed": resumed,
    "examined": lambda _: examined(),
    "divided": lambda _: divided(),
    "chosen": lambda _: chosen(),
    "tuned": lambda _: tuned(),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_debugging_nans_finds_none(name, tmp_path):
    with jax.debug_nans(True):
        ENTRIES[name](tmp_path)
