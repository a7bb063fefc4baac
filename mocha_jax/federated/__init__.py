"""Federations of nodes and a server that exchange messages: the code on the devices, without the transport.

A `Node` holds samples and answers messages; a `Server` makes them and takes any subset of the answers. Whatever carries
the messages, e.g. `mocha_jax.flower`, the run is the one that `mocha_jax.run` simulates.

It may import `_core`, `_files`, `_numerics`, `_data`, `losses`, `systems`, `regularizers`, `likelihoods`, `_problem`,
`_node`, `servers`, `_algorithms`, `_driver`, `_neural`, `compression` and `privacy`.
"""

# These register algorithms.
import mocha_jax.federated._adaptive_sides  # noqa: F401
import mocha_jax.federated._dual_sides  # noqa: F401
import mocha_jax.federated._private_dual_sides  # noqa: F401
import mocha_jax.federated._private_server  # noqa: F401
import mocha_jax.federated._training_sides  # noqa: F401
import mocha_jax.federated._virtual_sides  # noqa: F401
from mocha_jax.federated._archive import from_bytes as from_bytes
from mocha_jax.federated._archive import load as load
from mocha_jax.federated._archive import save as save
from mocha_jax.federated._archive import to_bytes as to_bytes
from mocha_jax.federated._inbox import FederationState as FederationState
from mocha_jax.federated._message import Down as Down
from mocha_jax.federated._message import Message as Message
from mocha_jax.federated._message import Refused as Refused
from mocha_jax.federated._message import Up as Up
from mocha_jax.federated._network_sides import Training as Training
from mocha_jax.federated._node import Node as Node
from mocha_jax.federated._over_channel import ChannelState as ChannelState
from mocha_jax.federated._over_channel import OverChannel as OverChannel
from mocha_jax.federated._server import Report as Report
from mocha_jax.federated._server import Server as Server
from mocha_jax.federated._server import as_table as as_table
from mocha_jax.federated._server import message_numbers as message_numbers
from mocha_jax.federated._sides import Header as Header
from mocha_jax.federated._sides import NodeSide as NodeSide
from mocha_jax.federated._sides import ReceivedAnswers as ReceivedAnswers
from mocha_jax.federated._sides import ServerSide as ServerSide
from mocha_jax.federated._sides import Sides as Sides
from mocha_jax.federated._sides import register as register

__all__ = [
    "as_table",
    "ChannelState",
    "Down",
    "FederationState",
    "from_bytes",
    "Header",
    "load",
    "Message",
    "message_numbers",
    "Node",
    "NodeSide",
    "OverChannel",
    "ReceivedAnswers",
    "Refused",
    "register",
    "Report",
    "save",
    "Server",
    "ServerSide",
    "Sides",
    "to_bytes",
    "Training",
    "Up",
]


def __dir__() -> list[str]:
    return __all__
