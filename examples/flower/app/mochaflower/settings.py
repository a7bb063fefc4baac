"""What nodes and server must agree on."""

import mocha_jax as mj

ALGORITHM = mj.Mocha()
LOSS = mj.losses.SmoothedHinge(0.5)  # only the nodes need it
REGULARIZER = mj.regularizers.Probabilistic(0.1)  # only the server needs it; it learns how the tasks are related
SCALING, INTERCEPT = "task_mean", 1.0
