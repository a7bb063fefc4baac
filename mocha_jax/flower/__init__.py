"""A federation over Flower: nodes and server of `mocha_jax.federated` as a ClientApp and a ServerApp.

It needs Flower 1.42 or newer: ``pip install mocha_jax[flower]``. Flower starts a new Python process for every message
to a node: `client_app` does without JAX, which each of them would import and compile with, and leaves the work to a
process that stays.

It may import `_core`, `_files`, `_model`, `_problem` and `federated`.
"""

from mocha_jax._core import lazy

try:
    import flwr.app as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("mocha_jax.flower: needs Flower (pip install 'mocha_jax[flower]').") from error

__getattr__, _ = lazy.attach(__name__)

__all__ = ["client_app", "serve", "Served", "server_app"]


def __dir__() -> list[str]:
    return __all__
