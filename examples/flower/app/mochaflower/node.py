"""The node, which reads its own table. Only its worker imports this."""

import numpy as np

from mocha_jax.federated import Node
from mochaflower.settings import ALGORITHM, INTERCEPT, LOSS, SCALING


def make_node(config):
    """Make the node from the table that its node-config names: features, and the label -1 or 1 in the last column."""
    table = np.loadtxt(config["data"], delimiter=",", skiprows=1, dtype=np.float32)
    return Node(table[:, :-1], table[:, -1], LOSS, ALGORITHM, loss_scaling=SCALING, intercept=INTERCEPT)
