"""Problems whose Omega is learned."""

from typing import Any

import numpy as np

import mocha_jax as mj
from tests import oracles, zoo

R = mj.regularizers


MODELS: dict[str, Any] = {
    "probabilistic": (R.Probabilistic(0.02, 5.0), lambda: oracles.squared_nuclear_norm(0.02, 5.0)),
    "no ridge": (R.Probabilistic(0.02), lambda: oracles.squared_nuclear_norm(0.02, np.inf)),
    "clustered": (R.Clustered(0.05, 0.1, 2), lambda: oracles.clustered(0.05, 0.1, 2)),
    "sharp clusters": (R.Clustered(0.05, 0.01, 1), lambda: oracles.clustered(0.05, 0.01, 1)),
}


def joint_primal(solution):
    return float(solution.certificate.joint_primal)


def make(model="probabilistic", loss="hinge", **kwargs):
    loss = zoo.LOSSES[loss]
    data = zoo.data(regression=not loss.binary, loss_scaling="task_mean", **kwargs)
    return mj.Problem(data, loss, MODELS[model][0] if isinstance(model, str) else model)
