"""The light part of `mocha_jax.flower`, for processes that live for one message.

Flower starts a new Python process for every message to a node. This package imports neither JAX nor `mocha_jax`, which
would be most of such a process's time; the work is done by a process that stays, see `client_app`.
"""

try:
    import flwr.app as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("mocha_jax_client: needs Flower (pip install 'mocha_jax[flower]').") from error

from mocha_jax_client._app import client_app as client_app

__all__ = ["client_app"]


def __dir__() -> list[str]:
    return __all__
