"""Options of JAX under which people look for mistakes, switched on before anything was compiled."""

import warnings

import jax
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests import zoo

HINGE, R, S = mj.losses.Hinge(), mj.regularizers, mj.systems
GIVEN = R.MeanRegularized(0.1, 0.02)
WORLD = S.Dropout(0.2) & S.PartialEpochs(0.2, 1.0) & S.Deadline(1.0, mj.costs.lte())


KEY, DATA, REAL = jax.random.key(1), zoo.data(m=3, high=8), zoo.data(m=3, high=8, regression=True)
CLASSES = DATA.replace(y=(DATA.y > 0).astype(DATA.dtype))
X = np.asarray(DATA.x[0])


def problem(regularizer=GIVEN, loss=HINGE):
    return mj.Problem(DATA if loss.binary else REAL, loss, regularizer)


def solved(problem, algorithm=None, **more):
    solution = mj.solve(problem, algorithm, **dict(tol=None, max_rounds=3) | more)
    assert solution.status == mj.Status.MAX_ROUNDS
    return solution


def resumed(folder):
    for rounds in (2, 4):
        solved(problem(), max_rounds=rounds, chunk=1, systems=WORLD, checkpoint=folder / "run.npz")


def predicted(algorithm):
    train, test = CLASSES.split(KEY, 0.6)
    there = mj.Prediction(train, test=test)
    solution = solved(there, algorithm)
    algorithm.predict(solution.state, there, 0, X)
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
    DATA.split(KEY, 0.5)
    DATA.folds(KEY, 3)
    DATA.append(DATA).pooled().merged()
    mj.pack_tasks([X], [np.sign(X[:, 0])], loss_scaling="task_mean", intercept=True)
    first = solved(problem())
    mj.Mocha().add_tasks(first.state, first.problem.replace(data=DATA.append(DATA)))


def chosen():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few rounds and samples
        mj.cross_validate(
            problem(), mj.grid(lambda lam: R.MeanRegularized(lam, 0.02), lam=[0.1, 1.0]), folds=2, max_rounds=5
        )


def measured():
    there = problem()
    mj.theory.sigma(there)
    mj.theory.rate(problem(loss=mj.losses.SmoothedHinge()))
    mj.theory.theorem1(1.0, 1e-3, 0.1, 0.5)
    mj.theory.dual_bound(1.0, np.arange(3.0), 0.1, 0.5)
    mj.theory.corollary8(np.full((4, 3), 0.1))
    from_scalar = mj.losses.from_scalar(lambda z, y: (z - y) ** 2, smoothness=2.0)
    solved(problem(R.Independent(0.1), from_scalar.replace(labels_are_signs=True)))


def drawn():
    mj.datasets.federation(KEY, 6, 3)
    covariance = mj.datasets.clusters(6, 2)
    mj.coupling.correlation(covariance)
    mj.datasets.sample_weights(KEY, covariance, 3)
    mj.datasets.low_rank(KEY, 6, 2)
    mj.graphical_lasso(np.asarray(mj.datasets.sparse_graph(KEY, 6)[1]), 0.1)
    mj.one_vs_rest(CLASSES, lambda data: problem().replace(data=data), tol=1.0)


def tuned():
    mj.tune(problem(), folds=2, steps=2, max_rounds=50)


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
    "run": lambda _: mj.run(problem(), mj.Mocha(), KEY, num_rounds=3, record_every=2, systems=WORLD),
    "resumed": resumed,
    "examined": lambda _: examined(),
    "divided": lambda _: divided(),
    "chosen": lambda _: chosen(),
    "tuned": lambda _: tuned(),
    "measured": lambda _: measured(),
    "drawn": lambda _: drawn(),
}


# Of kinds of models and of what is recorded one is looked at every time.
SLOW = "examined", "tuned", "divided", "averaging", "measured", "clustered", "sparse"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ENTRIES]
)
@pytest.mark.slow
def test_debugging_nans_finds_none(name, tmp_path):
    with jax.debug_nans(True):
        ENTRIES[name](tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ENTRIES]
)
@pytest.mark.slow
def test_nothing_travels_to_the_device_but_on_purpose(name, tmp_path):
    with jax.transfer_guard("disallow"):
        ENTRIES[name](tmp_path)
