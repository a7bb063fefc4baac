"""A node of a federation: one device with samples of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import PyTree, Tree
from mocha_jax._data.pack import pack_tasks
from mocha_jax.compression import Sending
from mocha_jax.federated._coded_answers import SendingNodeSide
from mocha_jax.federated._message import Down, Refused, Up, arrays_of, check_arrays, check_header
from mocha_jax.federated._sides import Header, NodeSide, sides_of
from mocha_jax.likelihoods import Likelihood
from mocha_jax.losses import Loss


class Node:
    """A device with samples that do not leave it.

    Pure: its state between rounds is handed in and out; `save` and `load` write it to a file.

    Args:
      x: samples ``[n, d]``.
      y: labels ``[n]``.
      loss: from `mocha_jax.losses`; for networks a likelihood from `mocha_jax.likelihoods`.
      algorithm: the same as the server's.
      loss_scaling: as in `pack_tasks`, the same as the server's.
      intercept: as in `pack_tasks`.
      dtype: as in `pack_tasks`.
      rows: pad to so many samples: nodes of one machine then share a compiled program.
      federation: the name of the federation; default: that of the received messages.
      sending: the form in which its vector travels, e.g. ``compression.Quantized()``; the server's `receiving`.
        Default: as it is.
    """

    def __init__(
        self, x: ArrayLike, y: ArrayLike, loss: Loss | Likelihood, algorithm: Algorithm, *, loss_scaling: str = "sum",
        intercept: bool | float = False, dtype: DTypeLike | None = None, rows: int | None = None,
        federation: str | None = None, sending: Sending | None = None,
    ) -> None:  # fmt: skip
        check.instance("Node", "algorithm", algorithm, Algorithm, "Mocha()")
        sides = sides_of("Node", algorithm)
        # Labels must be numbers: texts would be numbered by every node differently.
        check.array("Node", "x", x, ("n", "d"))
        check.array("Node", "y", y, ("n",))
        if rows is not None:
            check.integer("Node", np.shape(x)[0], rows=rows)
        data = pack_tasks([x], [y], loss_scaling=loss_scaling, intercept=intercept, dtype=dtype, rows=rows)
        if federation is not None and not isinstance(federation, str):
            raise ValueError(f"Node: federation must be a text, got {check.shown(federation)}.")
        self.federation = federation
        self.num_features, self.num_samples = data.num_features, int(data.sizes[0])
        self._side: NodeSide = sides.node(algorithm, data, loss)
        if sending is not None:
            check.instance("Node", "sending", sending, Sending, "compression.Quantized()")
            self._side = SendingNodeSide(self._side, sending)
        self._like = self._side.like_down()

    def init(self) -> Tree:
        """Return the state of the node before the first round."""
        return self._side.init()

    @on_purpose
    def step(self, key: Array, state: Tree, down: Down) -> tuple[Tree, Up]:
        """Answer a message of the server.

        Args:
          key: a JAX random key, the same in every round; with the key of a simulation, the work is
            the same up to rounding.
          state: the node's state.
          down: the message.

        Returns:
          The node's new state, and its answer.

        Raises:
          Refused: the message is not from a server of this federation; nothing is changed.
        """
        check.key("Node", key)
        record = self._read(down)
        numbers = down.round, down.incarnation, down.held, down.task
        header = Header(*jax.tree.map(lambda number: np.full((1,), int(number), np.int32), numbers))
        if why := _invalid_header(down) or self._side.reject_reason(state, header, record):
            raise Refused(f"Node: the server {why}.")
        header, record = jax.tree.map(jnp.asarray, (header, record))
        after, held, up = _work(self._side.own_key(key), self._side, state, header, record)
        outgoing = self._side.outgoing(jax.device_get(up))
        arrays = arrays_of(outgoing)
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise Refused("Node: the server sent numbers with which the work overflows.")
        return after, Up(
            down.federation, down.task, down.round, down.incarnation, int(held[0]), type(outgoing).__name__, arrays
        )  # fmt: skip

    @on_purpose
    def weights(self, state: Tree, down: Down) -> PyTree:
        """Return this node's model as a message has it: ``[d]``, or a network's parameters.

        With `Virtual` they are the means of the posterior, the shared ones from the message and the private ones, which
        never leave the node.

        Args:
          state: the node's state.
          down: a message of the server.

        Raises:
          Refused: the message is not from a server of this federation.
        """
        record = jax.tree.map(jnp.asarray, self._read(down))
        return jax.tree.map(lambda leaf: leaf[0], self._side.weights(state, record))

    def _read(self, down: Down) -> Tree:
        """The record in a message whose form is right."""
        check_header("Node", "the server", down, Down, self.federation)
        return check_arrays("Node", "the server", down, self._like)


def _invalid_header(down: Down) -> str:
    """Say what is wrong with the numbers of a header; empty: nothing."""
    if down.task < 0 or down.incarnation < 0:
        return f"sent a message to task {down.task} in its incarnation {down.incarnation}, and neither may be below 0"
    if not 0 <= down.held < down.round:
        return f"sent round {down.round} and says that it holds the answer to round {down.held}"
    return ""


def _numbers(key: Array, side: NodeSide, *_: object) -> float:
    """Count the numbers of a node's samples."""
    return max((np.size(leaf) for leaf in jax.tree.leaves(side)), default=0)


def _step(key: Array, side: NodeSide, state: Tree, header: Header, down: Tree) -> tuple[Tree, Array, Tree]:
    # Simulations count the rounds done before.
    return side.work(jax.random.fold_in(jax.random.fold_in(key, header.round[0] - 1), 1), state, header, down)


_work = Program(_step, numbers=_numbers)
