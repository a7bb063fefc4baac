"""What the tests of searches share."""

import numpy as np

import mocha_jax as mj

LAMS = [3.0, 0.3, 0.03, 0.003]


def regression(sizes=(20, 30, 25)):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in sizes]
    return mj.pack_tasks(xs, [x @ [1.0, 2.0, 3.0] + rng.normal(size=len(x)) for x in xs])
