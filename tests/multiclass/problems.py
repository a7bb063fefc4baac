"""What the tests of several classes share."""

import numpy as np

import mocha_jax as mj
from tests.data.test_names import Frame

R, L = mj.regularizers, mj.losses
NAMES, CLASSES, FEATURES = ("fir", "ash", "oak"), ("high", "low", "mid", "none"), ("a", "b", "c", "d", "e")


class Table(Frame):
    """A data frame whose rows can be chosen too."""

    def __len__(self):
        return len(next(iter(self.data.values())))

    def __getitem__(self, what):
        if isinstance(what, str):
            return self.data[what]
        columns = what if isinstance(what, list) else self.columns
        rows = slice(None) if isinstance(what, list) else what
        return Table({each: self.data[each][rows] for each in columns})


def ragged(m=3, classes=4, noise=0.0, least=30):
    """Tasks of unequal size whose labels come of their own linear models."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 5)) for n in rng.integers(least, least + 20, m)]
    z = [x @ rng.normal(size=(5, classes)) + noise * rng.normal(size=(len(x), classes)) for x in xs]
    return xs, [each.argmax(1) for each in z]


def packed(noise=0.5, intercept=False):
    xs, ys = ragged(noise=noise)
    return mj.pack_tasks(xs, ys, loss_scaling="task_mean", intercept=intercept)


def named():
    """The same with names of tasks, features and classes, and an intercept."""
    xs, ys = ragged(noise=0.5)
    table = Table(dict(zip(FEATURES, np.concatenate(xs).T, strict=True)))
    labels = np.array(CLASSES)[np.concatenate(ys)]
    groups = np.repeat(NAMES, [len(x) for x in xs])
    return mj.pack_tasks(table, labels, groups, loss_scaling="task_mean", intercept=True), table, labels, groups


def hinge(data):
    return mj.Problem(data, L.Hinge(), R.Independent(0.02))


def logistic(data):
    return mj.Problem(data, L.Logistic(), R.Independent(0.02))
