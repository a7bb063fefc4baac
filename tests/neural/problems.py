"""Problems of prediction, and a network written here."""

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from tests import zoo

MODEL = mj.networks.MLP(4, 3, (6,))


def make_problem(m=5, seed=0, low=6, high=15, test=True, dtype=np.float64):
    """Three classes from real-valued labels."""
    xs, ys = zoo.ragged(seed=seed, m=m, low=low, high=high, regression=True, dtype=dtype)
    cuts = np.quantile(np.concatenate(ys), [1 / 3, 2 / 3])
    labels = [np.digitize(y, cuts) for y in ys]
    held = mj.pack_tasks([x[::2] for x in xs], [y[::2] for y in labels], dtype=dtype) if test else None
    return mj.Prediction(mj.pack_tasks(xs, labels, dtype=dtype), test=held)


def rows(data, k):
    real = np.asarray(data.weight[k]) > 0
    return np.asarray(data.x[k])[real], np.asarray(data.y[k])[real]


def mean_loss(params, x, y):
    logs = jax.nn.log_softmax(mlp(params, x))
    return -jnp.mean(logs[jnp.arange(len(y)), y.astype(int)])


def mlp(params, x):
    with jax.numpy_rank_promotion("allow"):
        (w1, b1), (w2, b2) = params
        return jnp.maximum(x @ w1 + b1, 0) @ w2 + b2
