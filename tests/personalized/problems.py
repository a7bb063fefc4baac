"""A small federation of three classes, and a network with two parts that is written here."""

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from tests import zoo

K, D, CLASSES = 4, 3, 3
EVERYBODY = list(range(K))


def initialise(key):
    keys = jax.random.split(key)
    return {
        "body": 0.7 * jax.random.normal(keys[0], (D, 4)),
        "head": 0.7 * jax.random.normal(keys[1], (4, CLASSES)),
    }


def predict(w, x):
    return jnp.tanh(x @ w["body"]) @ w["head"]


MODEL = mj.networks.Model(initialise, predict)


def samples():
    xs, ys = zoo.ragged(seed=5, m=K, d=D, low=5, high=9, regression=True, dtype=np.float64)
    cuts = np.quantile(np.concatenate(ys), [1 / 3, 2 / 3])
    return xs, [np.digitize(y, cuts) for y in ys]


def make_problem(scaling="task_mean"):
    return mj.Prediction(mj.pack_tasks(*samples(), dtype=np.float64, loss_scaling=scaling))


class Oracle:
    """Losses and gradients of the clients, of their samples themselves."""

    def __init__(self):
        self.xs, self.ys = samples()
        self.weights = np.array([len(y) for y in self.ys], dtype=float)

    def sample_losses(self, k, w):
        logs = jax.nn.log_softmax(predict(w, self.xs[k]))
        return -logs[np.arange(len(self.ys[k])), self.ys[k]]

    def loss(self, k, w):
        return float(np.mean(self.sample_losses(k, w)))

    def grad(self, k, w):
        return jax.tree.map(np.asarray, jax.grad(lambda v: jnp.mean(self.sample_losses(k, v)))(w))

    def weighted_grad(self, k, w, q):
        return jax.tree.map(np.asarray, jax.grad(lambda v: jnp.mean(q * self.sample_losses(k, v)))(w))
