"""A node of a federation: one device with samples of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._core import check
from mocha_jax._core.compiling import Program
from mocha_jax._core.transfers import on_purpose
from mocha_jax._data.pack import pack_tasks
from mocha_jax.federated._message import Down, Up, arrays_of, check_arrays, check_header
from mocha_jax.federated._sides import Header, NodeSide, sides_of


class Node:
    """A device with samples that do not leave it.

    Pure: what it keeps between rounds, `mine`, is handed in and out; `save` and `load` write it to a file.

    Args:
      x: samples ``[n, d]``.
      y: labels ``[n]``.
      loss: from `mocha_jax.losses`; of networks a likelihood from `mocha_jax.likelihoods`.
      algorithm: the same as the server's.
      loss_scaling: as in `pack_tasks`, the same as the server's.
      intercept: as in `pack_tasks`.
      dtype: as in `pack_tasks`.
      rows: pad to so many samples: nodes of one machine then share a compiled program.
      federation: the name of the federation; default: that of the messages that come.
    """

    def __init__(
        self, x: ArrayLike, y: ArrayLike, loss: Any, algorithm: Algorithm[Any], *, loss_scaling: str = "sum",
        intercept: bool | float = False, dtype: DTypeLike | None = None, rows: int | None = None,
        federation: str | None = None,
    ) -> None:  # fmt: skip
        check.instance("Node", "algorithm", algorithm, Algorithm, "Mocha()")
        sides = sides_of("Node", algorithm)
        data = pack_tasks(
            [np.asarray(x)], [np.asarray(y)], loss_scaling=loss_scaling, intercept=intercept, dtype=dtype, rows=rows
        )
        self.federation = federation
        self.num_features, self.num_samples = data.num_features, int(data.sizes[0])
        self._side: NodeSide = sides.node(algorithm, data, loss)
        self._like = self._side.like_down()

    def init(self) -> Any:
        """Return what the node keeps before the first round."""
        return self._side.init()

    @on_purpose
    def step(self, key: Array, mine: Any, down: Down) -> tuple[Any, Up]:
        """Answer a message of the server.

        Args:
          key: a JAX random key, the same in every round; with the one that nodes of a simulation have, the work is
            the same to rounding.
          mine: what the node kept.
          down: the message.

        Returns:
          What the node keeps now, and its answer.

        Raises:
          Refused: the message is none that a server of this federation sends; nothing is changed.
        """
        check.key("Node", key)
        check_header("Node", "the server", down, Down, self.federation)
        record = check_arrays("Node", "the server", down, self._like)
        header = Header(*(jnp.full((1,), int(n), jnp.int32) for n in (down.round, down.life, down.held, down.task)))
        mine, held, up = _work(key, self._side, mine, header, jax.tree.map(jnp.asarray, record))
        arrays = arrays_of(jax.device_get(up))
        return mine, Up(
            down.federation, down.task, down.round, down.life, int(held[0]), type(up).__name__, arrays
        )  # fmt: skip


def _numbers(key: Array, side: NodeSide, *_: Any) -> float:
    """Count the numbers of a node's samples."""
    return max((np.size(leaf) for leaf in jax.tree.leaves(side)), default=0)


def _step(key: Array, side: NodeSide, mine: Any, header: Header, down: Any) -> tuple[Any, Array, Any]:
    return side.work(key, mine, header, down)


_work = Program(_step, numbers=_numbers)
