"""Servers: what the central node does between two rounds of a dual method.

==================  =============================================================================
`DualServer`        Algorithm 1: W follows V, Omega follows W every so many rounds
`AdaptiveServer`    the same, with nodes that take bolder steps and a server that weighs them
`ProximalServer`    W and Omega together, close to where they were
==================  =============================================================================

`Mocha` and `Cocoa` choose one by their argument `server`; ``custom_server=`` takes any other `Server`.
"""

from mocha_jax._server.adaptive import AdaptiveServer as AdaptiveServer
from mocha_jax._server.adaptive import AdaptiveState as AdaptiveState
from mocha_jax._server.base import NodeUpdate as NodeUpdate
from mocha_jax._server.base import Server as Server
from mocha_jax._server.base import ServerState as ServerState
from mocha_jax._server.dual import DualServer as DualServer
from mocha_jax._server.dual import DualState as DualState
from mocha_jax._server.proximal import ProximalServer as ProximalServer
from mocha_jax._server.proximal import ProximalState as ProximalState

__all__ = [
    "AdaptiveServer",
    "AdaptiveState",
    "DualServer",
    "DualState",
    "NodeUpdate",
    "ProximalServer",
    "ProximalState",
    "Server",
    "ServerState",
]


def __dir__() -> list[str]:
    return __all__
