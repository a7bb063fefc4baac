"""A federation over Flower: nodes and server of `mocha_jax.federated` as a ClientApp and a ServerApp.

It needs Flower 1.42 or newer: ``pip install mocha_jax[flower]``. The file of a ClientApp takes `client_app` from
`mocha_jax_client`, where it is the same function and comes without JAX.

It may import `_core`, `_model` and `federated`.
"""

from mocha_jax_client import client_app as client_app  # says so without Flower

# isort: split
from mocha_jax.flower._serve import Served as Served
from mocha_jax.flower._serve import serve as serve
from mocha_jax.flower._server_app import server_app as server_app

__all__ = ["client_app", "serve", "Served", "server_app"]


def __dir__() -> list[str]:
    return __all__
