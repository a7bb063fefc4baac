"""Federations of nodes and a server that exchange messages: the code on the devices, without the transport.

A `Node` holds samples and answers messages; a `Server` makes them and takes any subset of the answers. Whatever carries
the messages, e.g. `mocha_jax.flower`, the run is the one that `mocha_jax.run` simulates.

It may import `_core`, `_numerics`, `likelihoods`, `_data`, `losses`, `systems`, `regularizers`, `_problem`,
`_node`, `servers`, `_algorithms`, `_driver` and `_neural`.
"""

# These register algorithms.
import mocha_jax.federated._adaptive_server  # noqa: F401
import mocha_jax.federated._averaging  # noqa: F401
import mocha_jax.federated._dual_server  # noqa: F401
import mocha_jax.federated._virtual_server  # noqa: F401
from mocha_jax.federated._inbox import ServerState as ServerState
from mocha_jax.federated._message import Down as Down
from mocha_jax.federated._message import Message as Message
from mocha_jax.federated._message import Refused as Refused
from mocha_jax.federated._message import Up as Up
from mocha_jax.federated._node import Node as Node
from mocha_jax.federated._over_channel import ChannelState as ChannelState
from mocha_jax.federated._over_channel import OverChannel as OverChannel
from mocha_jax.federated._quantized import Quantized as Quantized
from mocha_jax.federated._sending import Sending as Sending
from mocha_jax.federated._server import Report as Report
from mocha_jax.federated._server import Server as Server
from mocha_jax.federated._sides import Header as Header
from mocha_jax.federated._sides import Heard as Heard
from mocha_jax.federated._sides import NodeSide as NodeSide
from mocha_jax.federated._sides import ServerSide as ServerSide
from mocha_jax.federated._sides import Sides as Sides
from mocha_jax.federated._sides import register as register
from mocha_jax.federated._sizes import as_table as as_table
from mocha_jax.federated._sizes import message_numbers as message_numbers
from mocha_jax.federated._store import from_bytes as from_bytes
from mocha_jax.federated._store import load as load
from mocha_jax.federated._store import save as save
from mocha_jax.federated._store import to_bytes as to_bytes
from mocha_jax.federated._training import Training as Training

__all__ = [
    "as_table",
    "ChannelState",
    "Down",
    "from_bytes",
    "Header",
    "Heard",
    "load",
    "Message",
    "message_numbers",
    "Node",
    "NodeSide",
    "OverChannel",
    "Quantized",
    "Refused",
    "register",
    "Report",
    "save",
    "Sending",
    "Server",
    "ServerSide",
    "ServerState",
    "Sides",
    "to_bytes",
    "Training",
    "Up",
]


def __dir__() -> list[str]:
    return __all__
