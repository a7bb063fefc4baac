"""Federations of nodes and a server that exchange messages: what runs on the devices, without the transport.

A `Node` holds samples and answers messages; a `Server` makes them and takes any subset of the answers. Whatever carries
the messages, e.g. `mocha_jax.flower`, the run is the one that `mocha_jax.run` simulates.

It may import `_core`, `_numerics`, `_data`, `losses`, `systems`, `regularizers`, `_model`, `_problem`, `_node`,
`servers`, `_algorithms` and `_neural`.
"""

# These register algorithms.
import mocha_jax.federated._averaging  # noqa: F401
import mocha_jax.federated._dual_server  # noqa: F401
import mocha_jax.federated._virtual_server  # noqa: F401
from mocha_jax.federated._message import Down as Down
from mocha_jax.federated._message import Message as Message
from mocha_jax.federated._message import Refused as Refused
from mocha_jax.federated._message import Up as Up
from mocha_jax.federated._node import Node as Node
from mocha_jax.federated._server import Report as Report
from mocha_jax.federated._server import Server as Server
from mocha_jax.federated._server import ServerState as ServerState
from mocha_jax.federated._sides import Header as Header
from mocha_jax.federated._sides import Heard as Heard
from mocha_jax.federated._sides import NodeSide as NodeSide
from mocha_jax.federated._sides import ServerSide as ServerSide
from mocha_jax.federated._sides import Sides as Sides
from mocha_jax.federated._sides import register as register
from mocha_jax.federated._training import Training as Training
