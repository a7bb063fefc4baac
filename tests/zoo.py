"""The problems that tests share. Everything has a fixed seed."""

import numpy as np

import mocha_jax as mj

CLASSIFICATION_LOSSES = {
    "hinge": mj.losses.Hinge(),
    "smoothed_hinge": mj.losses.SmoothedHinge(0.5),
    "squared_hinge": mj.losses.SquaredHinge(),
    "logistic": mj.losses.Logistic(),
}
REGRESSION_LOSSES = {
    "squared": mj.losses.Squared(),
    "absolute": mj.losses.Absolute(),
    "epsilon_insensitive": mj.losses.EpsilonInsensitive(0.2),
    "huber": mj.losses.Huber(0.7),
    "quantile": mj.losses.Quantile(0.3),
}
LOSSES = CLASSIFICATION_LOSSES | REGRESSION_LOSSES


def ragged(seed=0, m=5, d=4, low=6, high=15, regression=False, dtype=np.float64):
    """Ragged related tasks as lists of NumPy arrays."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=d)
    xs, ys = [], []
    for _ in range(m):
        n = int(rng.integers(low, high + 1))
        x = rng.normal(size=(n, d)) / np.sqrt(d)
        z = x @ (shared + 0.5 * rng.normal(size=d)) + 0.3 * rng.normal(size=n)
        xs.append(x.astype(dtype))
        ys.append((z if regression else np.where(z > 0, 1.0, -1.0)).astype(dtype))
    return xs, ys


def data(loss_scaling="sum", intercept=False, **kwargs):
    xs, ys = ragged(**kwargs)
    return mj.pack_tasks(xs, ys, loss_scaling=loss_scaling, intercept=intercept, dtype=xs[0].dtype)


def laplacian(m, seed=0):
    """The Laplacian of a random connected graph."""
    rng = np.random.default_rng(seed)
    a = np.triu(rng.random((m, m)) < 0.4, 1).astype(float) + np.diag(np.ones(m - 1), 1)
    a = np.minimum(a + a.T, 1.0)
    return np.diag(a.sum(1)) - a


def random_spd(m, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(m, m + 2))
    return a @ a.T / m


def regularizers(m):
    return {
        "independent": mj.regularizers.Independent(0.05),
        "independent_per_task": mj.regularizers.Independent(np.linspace(0.02, 0.2, m)),
        "mean": mj.regularizers.MeanRegularized(0.2, 0.05),
        "graph": mj.regularizers.Graph(laplacian(m), 0.2, 0.05),
        "graph_dense": mj.regularizers.Graph(random_spd(m), 0.1, 0.02),
    }
