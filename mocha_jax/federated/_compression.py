"""The form in which a node's vector travels: shorter, clipped or with noise, and still certified.

A `Sending` stands between a node's answer and its message. It hands over two things: what travels, and the vector that
the server makes of it. The node remembers the latter as its answer, so that its next round goes on from what the server
has, and every error is made up for later. By how much the two vectors differ is part of the bound on the error that
comes with each answer: lower bounds hold whatever a `Sending` does, only not as tightly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.pytree import Pytree, Tree, tree
from mocha_jax.federated._sides import DownRecord, Header, NodeSide, State, where


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
    def decode(self, code: Any, held: Array) -> Array:
        """Return the vectors ``[m, d]`` from the coded ones and those that the server holds."""


class Coded(Pytree):
    """An answer in that form."""

    base: Array  # [m] int32 the round of the answer whose vector it refers to; below 0: to none
    code: Tree = tree()
    rest: Pytree = tree()  # the answer without its vector


class SendingNodeSide(NodeSide[State, DownRecord, Coded], Generic[State, DownRecord]):
    """Nodes that send their vectors in some form."""

    inner: NodeSide[State, DownRecord, Any]
    sending: Sending

    def init(self) -> State:
        return self.inner.init()

    def like_down(self) -> Mapping[str, Tree]:
        return self.inner.like_down()

    def reject_reason(self, state: State, header: Header, down: DownRecord) -> str:
        return self.inner.reject_reason(state, header, down)

    def weights(self, state: State, down: DownRecord) -> Tree:
        return self.inner.weights(state, down)

    def work(self, key: Any, state: State, header: Header, down: DownRecord) -> tuple[State, Array, Coded]:
        v_held, knows_held = self.inner.held_vectors(state, header)
        after, held, up = self.inner.work(key, state, header, down)
        code, v = self.sending.encode(header.round, up.v, v_held)
        base = header.held if self.sending.relative else jnp.zeros_like(header.held)
        base = jnp.where(knows_held | (not self.sending.relative), base, -1)
        after, up = self.inner.with_decoded(after, header, up, where(base >= 0, v, up.v))
        return after, held, Coded(base, code, up)

    def outgoing(self, up: Coded) -> Tree:
        return up.rest if up.base[0] < 0 else up.exchange(rest=up.rest.exchange(v=None))


def like_coded(sending: Sending, like: Any) -> Coded:
    """A record of the shapes and dtypes of coded answers.

    Args:
      sending: their form.
      like: the same of plain answers.
    """
    if not hasattr(like, "v"):
        raise ValueError(f"Server: receiving is for answers with one vector v, and a {type(like).__name__} is none.")
    base: Any = jax.ShapeDtypeStruct(like.v.shape[:1], np.dtype(np.int32))
    code, v = jax.eval_shape(sending.encode, base, like.v, like.v)
    if (v.shape, v.dtype) != (like.v.shape, like.v.dtype):
        raise ValueError(
            f"{type(sending).__name__}: encode must return vectors as it is given, {like.v.dtype}{list(like.v.shape)}, "
            f"got {v.dtype}{list(v.shape)}."
        )
    return Coded(base, code, like.exchange(v=None))


def decoded(sending: Sending, like: Coded, answers: Mapping[int, Pytree], held: Array) -> dict[int, Pytree]:
    """Plain answers, whatever form they came in.

    Args:
      sending: the form.
      like: of `like_coded`.
      answers: records of one node each, by task.
      held: the vectors that the server holds ``[m, d]``.
    """
    coded = {task: record for task, record in answers.items() if isinstance(record, Coded)}
    if not coded:
        return dict(answers)
    # For all tasks, whichever answer, so that there is one program.
    codes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like.code)
    for task, record in coded.items():
        jax.tree.map(lambda all, one, task=task: all.__setitem__(task, one[0]), codes, record.code)
    v = np.asarray(_decode(sending, codes, held))
    return {**answers, **{task: record.rest.exchange(v=v[task : task + 1]) for task, record in coded.items()}}


@jax.jit
def _decode(sending: Sending, codes: Tree, held: Array) -> Array:
    return sending.decode(codes, held)


_MOST = 127  # of an integer of 8 bits, either sign

# Powers of two that are normal numbers of float32, and so are that many times as large.
_EXPONENTS = -110, 110


class Code(Pytree):
    """Differences in multiples of a scale."""

    steps: Array  # [m, d] int8
    scale: Array  # [m] float32, a power of two


class Quantized(Sending):
    r"""A vector's difference from the one that is held, in 8 bits a number and one scale, with error feedback.

    What travels is the difference between the node's vector v and the one that the server holds of it, $\hat v$, in
    whole multiples of a scale. The server adds it to what it holds. The rest of the difference is not lost: the node's
    next round starts from $w + q\,(v - \hat v)$ and so makes up for it. Towards the end of a run differences shrink,
    and so do the steps: it converges to the same optimum.

    The scale is a power of two. So the multiples are exact, their sum with what is held is rounded once, and node and
    server have the same $\hat v$ to the last bit, on any machines.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> held, v = jnp.ones((1, 3)), jnp.array([[1.0, 1.3, -0.7]])
      >>> code, found = Quantized().encode(jnp.ones(1, "int32"), v, held)
      >>> code.steps.tolist(), code.scale.tolist()
      ([[0, 19, -109]], [0.015625])
      >>> float(jnp.max(jnp.abs(found - v))) <= float(code.scale[0]) / 2
      True
      >>> np.array_equal(Quantized().decode(code, held), found)
      True
    """

    relative: ClassVar[bool] = True

    def encode(self, round: Array, v: Array, held: Array) -> tuple[Code, Array]:
        difference = v - held
        largest = jnp.max(jnp.abs(difference), axis=1)
        exponent = jnp.clip(jnp.frexp(largest / _MOST)[1], *_EXPONENTS)
        scale = jnp.ldexp(jnp.ones_like(largest), exponent)
        steps = jnp.clip(jnp.round(difference / scale[:, None]), -_MOST, _MOST).astype(jnp.int8)
        code = Code(steps, scale.astype(jnp.float32))
        return code, self.decode(code, held)

    def decode(self, code: Code, held: Array) -> Array:
        return held + code.steps.astype(held.dtype) * code.scale.astype(held.dtype)[:, None]
