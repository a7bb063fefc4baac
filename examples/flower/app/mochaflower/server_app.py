"""The ServerApp."""

import mocha_jax as mj
from mocha_jax.flower import server_app
from mochaflower.settings import ALGORITHM, INTERCEPT, REGULARIZER, SCALING


def make_server(config):
    """Make the central node from the run-config: how many tasks there are, and how many features."""
    features = config["num-features"] + 1  # the intercept is one
    return mj.federated.Server(ALGORITHM, REGULARIZER, config["num-tasks"], features, loss_scaling=SCALING)


def make_model(weights):
    """Make a model that predicts, of the weights."""
    names = mj.Names(tasks=[f"node {t}" for t in range(len(weights))])
    return mj.LinearModel(weights[:, :-1], INTERCEPT * weights[:, -1], names, decides=("sign",) * len(weights))


app = server_app(make_server, make_model=make_model)
