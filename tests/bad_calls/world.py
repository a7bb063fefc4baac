"""Small right values for every argument, made once."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.io

import mocha_jax as mj

M, N, D = 3, 4, 2


@functools.cache
def key():
    return jax.random.key(7)


@functools.cache
def xs():
    rng = np.random.default_rng(0)
    return [rng.integers(-8, 9, size=(N, D)) / 8.0 for _ in range(M)]


@functools.cache
def ys():
    return [np.array([1.0, -1.0, 1.0, -1.0]) for _ in range(M)]


@functools.cache
def data():
    return mj.pack_tasks(xs(), ys(), dtype="float32")


@functools.cache
def named():
    """The same with names of tasks."""
    return data().replace(names=mj.Names(tasks=("a", "b", "c")))


@functools.cache
def classes():
    """The same with labels 0 and 1."""
    return data().replace(y=(data().y > 0).astype(jnp.float32))


@functools.cache
def weights():
    return np.arange(M * D).reshape(M, D) / 8.0


@functools.cache
def problem():
    return mj.Problem(data(), mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.5, 0.25))


@functools.cache
def with_intercept():
    shifted = mj.pack_tasks([x[:, :1] for x in xs()], ys(), intercept=2.0, dtype="float32")
    return mj.Problem(shifted, mj.losses.SmoothedHinge(0.5), mj.regularizers.MeanRegularized(0.5, 0.25))


@functools.cache
def learned():
    return mj.Problem(data(), mj.losses.Hinge(), mj.regularizers.Probabilistic(0.5))


@functools.cache
def prediction():
    return mj.Prediction(classes())


@functools.cache
def safe():
    return mj.Mocha(server="dual", sigma_prime="per_task")


@functools.cache
def solution():
    return mj.solve(problem(), max_rounds=3, tol=None)


@functools.cache
def model():
    """Of a loss that has probabilities."""
    weights = np.ones((M, D), np.float32)
    return mj.LinearModel(weights, np.zeros(M, np.float32), logistic=True)


@functools.cache
def class_model():
    """Of two classes, with probabilities."""
    return mj.MulticlassModel(np.ones((2, M, D), np.float32), np.zeros((2, M), np.float32), logistic=True)


@functools.cache
def network_model():
    """A network for every task, with probabilities."""
    return mj.NetworkModel(network(), parameters(M), D)


@functools.cache
def parameters(*rows):
    """Those of the network, of so many tasks."""
    return jax.tree.map(lambda a: np.broadcast_to(a, rows + a.shape), network().init(key()))


@functools.cache
def rest():
    return mj.one_vs_rest(classes(), make_problem, tol=0.1)


@functools.cache
def paired():
    """A solution of lifted samples."""
    return mj.solve(make_problem(mj.multiclass.by_pair(classes(), 2)), max_rounds=2, tol=None)


@functools.cache
def saved():
    path = Path(tempfile.mkdtemp()) / "model.npz"
    model().save(path)
    return path


@functools.cache
def checkpoint():
    path = Path(tempfile.mkdtemp()) / "run.npz"
    mj.solve(problem(), max_rounds=2, tol=None, checkpoint=path)
    return path


class Writer:
    """Takes what is written for TensorBoard."""

    def add_scalar(self, tag, value, step):
        pass


@functools.cache
def histories():
    return {"one": solution().history}


@functools.cache
def before():
    """A state of the dual server."""
    return safe().init(problem())


@functools.cache
def after():
    """The same after a round."""
    work = mj.systems.Full().work(key(), data(), safe().request(problem()))
    return safe().step(key(), before(), problem(), work)[0]


@functools.cache
def request():
    return safe().request(problem())


@functools.cache
def candidates():
    return mj.grid(mj.regularizers.Independent, lam=[1.0, 0.5])


@functools.cache
def leaf():
    """A folder with a file as LEAF's."""
    folder = Path(tempfile.mkdtemp())
    user = {"x": [[0.0, 1.0], [1.0, 0.0]], "y": [0, 1]}
    content = {"users": ["A", "B"], "num_samples": [2, 2], "user_data": {"A": user, "B": user}}
    (folder / "part.json").write_text(json.dumps(content))
    return folder


@functools.cache
def mat():
    """A file of cells, as the MOCHA authors' code has."""
    path = Path(tempfile.mkdtemp()) / "cells.mat"
    scipy.io.savemat(path, {"X": _cells(xs()), "Y": _cells([y[:, None] for y in ys()])})
    return path


def _cells(arrays):
    row = np.empty((1, len(arrays)), object)
    for t, array in enumerate(arrays):
        row[0, t] = array
    return row


@functools.cache
def table():
    """A CSV file."""
    path = Path(tempfile.mkdtemp()) / "school.csv"
    path.write_text("school,hours,town,score\nA,1.5,Oslo,3\nB,2,Bergen,4\nA,0,Oslo,1\n")
    return path


@functools.cache
def columns():
    """What is in it."""
    return mj.datasets.read_table(table(), texts=["school"])


@functools.cache
def clicks():
    """A file of svmlight."""
    path = Path(tempfile.mkdtemp()) / "clicks.txt"
    path.write_text("1 qid:7 1:0.5 2:2\n-1 qid:7 2:1\n1 qid:9 1:1\n")
    return path


@functools.cache
def parts():
    return list(zip(xs(), ys(), strict=True))


@functools.cache
def har():
    """A folder as UCI's."""
    folder = Path(tempfile.mkdtemp())
    for part in ("train", "test"):
        for name, table in {"X": np.eye(3), "y": np.array([1, 4, 6]), "subject": np.array([1, 1, 2])}.items():
            np.savetxt(folder / f"{name}_{part}.txt", table)
    return folder


@functools.cache
def vehicle():
    """A folder as the vehicle sensors' with a run of either kind."""
    folder = Path(tempfile.mkdtemp())
    for run in ("aav3", "dw3"):
        (folder / run / "n1").mkdir(parents=True)
        for kind in (1, 2):
            np.savetxt(folder / run / "n1" / f"{run}evfeat1_1_{kind}.txt", np.ones((2, 53)))
    return folder


@functools.cache
def network():
    return mj.networks.MLP(D, 2, (3,))


@functools.cache
def fedavg():
    return mj.FedAvg(network(), optax.sgd(0.5))


@functools.cache
def trained():
    return fedavg().init(prediction())


@functools.cache
def virtual():
    return mj.Virtual(mj.networks.Lateral(D, 2, (3,)), optax.sgd(0.5), samples=1)


@functools.cache
def refined():
    return virtual().init(prediction())


@functools.cache
def tuned():
    with_numbers = mj.Problem(data(), mj.losses.SmoothedHinge(0.5), mj.regularizers.Independent(0.5))
    return mj.tune(with_numbers, folds=2, steps=1, max_rounds=30, tol=1e-2)


def make_problem(data):
    return mj.Problem(data, mj.losses.Hinge(), mj.regularizers.Independent(0.5))


def add(weights):
    return (weights**2).sum()


def fair(z, y):
    return jnp.abs(z - y) - jnp.log1p(jnp.abs(z - y))


def shrink(s, t):
    return jnp.maximum(s - t, 0.0)
