"""Pictures of solves, of tasks, and of methods side by side. Needs matplotlib: ``pip install mocha_jax[plots]``.

It may import `_core`, `_data`, `_driver`, `_problem`, `_selection` and `metrics`.
"""

from mocha_jax.plotting._methods import compare as compare
from mocha_jax.plotting._solutions import COLOURS as COLOURS
from mocha_jax.plotting._solutions import cluster_order as cluster_order
from mocha_jax.plotting._solutions import convergence as convergence
from mocha_jax.plotting._solutions import label_distribution as label_distribution
from mocha_jax.plotting._solutions import overview as overview
from mocha_jax.plotting._solutions import relationship as relationship
from mocha_jax.plotting._solutions import similarity as similarity
from mocha_jax.plotting._solutions import tuning as tuning

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
