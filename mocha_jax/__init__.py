"""Federated multi-task learning as array programs.

What most programs need is here: data and problem, the drivers `run` and `solve`, the algorithms, the certificate. The
rest is in modules: `losses`, `regularizers`, `systems`, `costs`, `servers`, `coupling`, `metrics`, `datasets`,
`features`, `partition`, `networks`, `likelihoods`, `callbacks`, `spectral`, `theory`, `multiclass`; `federated`, nodes
and a server that exchange messages; `plotting`, which needs matplotlib, `sklearn`, estimators for scikit-learn, which
needs that, and `flower`, federations over Flower, which needs that.

Names are imported when they are first asked for; the file ``__init__.pyi`` lists them.
"""

from mocha_jax._core import lazy

__version__ = "0.2.0"

__getattr__, _names = lazy.attach(__name__)

# Of `import *` these are no part: they need what may be missing, and one would hide scikit-learn itself.
__all__ = [name for name in _names if name not in ("flower", "plotting", "sklearn")]


def __dir__() -> list[str]:
    return [*_names, "__version__"]
