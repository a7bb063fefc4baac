"""The form in which a vector travels: shorter, clipped or with noise."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from jax import Array

from mocha_jax._core.pytree import PyTree, Pytree, Tree


class Sending(Pytree):
    """Base class of forms in which vectors travel; pure functions of arrays with a leading axis of nodes."""

    # True: what travels says something only to a server that holds the vector which it refers to. A node that does not
    # know what is held then sends its vector as it is, and a server that holds another one refuses the answer.
    relative: ClassVar[bool] = False

    @abstractmethod
    def encode(self, round: Array, v: Array, held: Array) -> tuple[Tree, Array]:
        """Return the coded vectors, and the vectors that `decode` returns for them, bit for bit.

        Args:
          round: of the message ``[m]`` int32, for what is drawn.
          v: the vectors ``[m, d]``.
          held: those of the same nodes that the server holds; those of nodes that do not know them count nothing.
        """

    @abstractmethod
    def decode(self, code: PyTree, held: Array) -> Array:
        """Return the vectors ``[m, d]`` from the coded ones and those that the server holds."""


class Difference(Sending):
    r"""Base class of forms that send a part of the difference from what is held.

    The server makes $\hat v + C(v - \hat v)$ of its $\hat v$: error feedback as in EF21, with the memory at both ends.
    It converges where $\|C(x) - x\|^2 \le (1 - \delta)\|x\|^2$ for a $\delta > 0$, in the mean over what is drawn.

    References:
      - [Richtárik, Sokolov and Fatkhullin, EF21](https://arxiv.org/abs/2106.05203), 2021.
    """

    relative: ClassVar[bool] = True

    def encode(self, round: Array, v: Array, held: Array) -> tuple[Tree, Array]:
        code = self.compress(round, v - held)
        return code, self.decode(code, held)

    def decode(self, code: PyTree, held: Array) -> Array:
        return held + self.expand(code, held)

    @abstractmethod
    def compress(self, round: Array, x: Array) -> Tree:
        """Return the coded differences ``[m, d]``.

        Args:
          round: ``[m]`` int32, for what is drawn.
          x: the differences.
        """

    @abstractmethod
    def expand(self, code: PyTree, like: Array) -> Array:
        """Return the differences that the code says, like an array ``[m, d]``, bit for bit on every machine.

        So it may select, add in a given order, and multiply where the product is exact.
        """
