"""Servers: the central node's work between two rounds of a dual method.

==================  =============================================================================
server              what it does
==================  =============================================================================
`DualServer`        Algorithm 1: W follows V, Omega follows W every so many rounds
`AdaptiveServer`    the same, with nodes that take bolder steps and a server that weighs them
`ProximalServer`    W and Omega together, close to where they were
==================  =============================================================================

`Mocha` and `Cocoa` choose one by their argument `server`; ``custom_server=`` takes any other `Aggregator`.

It may import `_core`, `_numerics`, `_data`, `losses`, `systems`, `coupling`, `regularizers` and `_problem`.
"""

from mocha_jax.servers._adaptive import AdaptiveServer as AdaptiveServer
from mocha_jax.servers._adaptive import AdaptiveState as AdaptiveState
from mocha_jax.servers._base import Aggregator as Aggregator
from mocha_jax.servers._base import NodeUpdate as NodeUpdate
from mocha_jax.servers._base import ServerState as ServerState
from mocha_jax.servers._dual import DualServer as DualServer
from mocha_jax.servers._dual import DualState as DualState
from mocha_jax.servers._proximal import ProximalServer as ProximalServer
from mocha_jax.servers._proximal import ProximalState as ProximalState

__all__ = [
    "AdaptiveServer",
    "AdaptiveState",
    "DualServer",
    "DualState",
    "NodeUpdate",
    "ProximalServer",
    "ProximalState",
    "Aggregator",
    "ServerState",
]


def __dir__() -> list[str]:
    return __all__
