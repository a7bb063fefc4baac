"""Pictures of solves, of tasks, and of methods side by side. Needs matplotlib: ``pip install mocha_jax[plots]``.

It may import `_core`, `_data`, `_driver`, `_problem`, `_selection` and `metrics`.
"""

from mocha_jax.plotting._convergence import convergence as convergence
from mocha_jax.plotting._convergence import overview as overview
from mocha_jax.plotting._convergence import tuning as tuning
from mocha_jax.plotting._methods import compare as compare
from mocha_jax.plotting._tasks import COLOURS as COLOURS
from mocha_jax.plotting._tasks import cluster_order as cluster_order
from mocha_jax.plotting._tasks import label_distribution as label_distribution
from mocha_jax.plotting._tasks import relationship as relationship
from mocha_jax.plotting._tasks import similarity as similarity

__all__ = [
    "cluster_order",
    "COLOURS",
    "compare",
    "convergence",
    "label_distribution",
    "overview",
    "relationship",
    "similarity",
    "tuning",
]


def __dir__() -> list[str]:
    return __all__
