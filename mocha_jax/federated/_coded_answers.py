"""Nodes whose vectors travel in some form, and are still certified.

A `Sending` stands between a node's answer and its message. It hands over two things: what travels, and the vector that
the server makes of it. The node remembers the latter as its answer, so that its next round goes on from what the server
has, and every error is made up for later. By how much the two vectors differ is part of the bound on the error that
comes with each answer: lower bounds hold whatever a `Sending` does, only not as tightly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.base import Drawn
from mocha_jax._core.pytree import PyTree, Pytree, Tree, tree
from mocha_jax.compression import Sending
from mocha_jax.federated._sides import DownRecord, Header, NodeSide, State, where


class Coded(Pytree):
    """An answer in that form."""

    base: Array  # [m] int32 the round of the answer whose vector it refers to; below 0: to none
    code: Tree = tree()
    rest: Pytree = tree()  # the answer without its vector


class SendingNodeSide(NodeSide[State, DownRecord, Coded], Generic[State, DownRecord]):
    """Nodes that send their vectors in some form."""

    inner: NodeSide[State, DownRecord, PyTree]
    sending: Sending

    def init(self) -> State:
        return self.inner.init()

    def like_down(self) -> Mapping[str, Tree]:
        return self.inner.like_down()

    def reject_reason(self, state: State, header: Header, down: DownRecord) -> str:
        return self.inner.reject_reason(state, header, down)

    def weights(self, state: State, down: DownRecord) -> Tree:
        return self.inner.weights(state, down)

    def work(self, key: Drawn, state: State, header: Header, down: DownRecord) -> tuple[State, Array, Coded]:
        v_held, knows_held = self.inner.held_vectors(state, header)
        after, held, up = self.inner.work(key, state, header, down)
        code, v = self.sending.encode(header.round, up.v, v_held)
        base = header.held if self.sending.relative else jnp.zeros_like(header.held)
        base = jnp.where(knows_held | (not self.sending.relative), base, -1)
        after, up = self.inner.with_decoded(after, header, up, where(base >= 0, v, up.v))
        return after, held, Coded(base, code, up)

    def outgoing(self, up: Coded) -> Tree:
        return up.rest if up.base[0] < 0 else up.exchange(rest=up.rest.exchange(v=None))


def like_coded(sending: Sending, like: PyTree) -> Coded:
    """A record of the shapes and dtypes of coded answers.

    Args:
      sending: their form.
      like: the same of plain answers.
    """
    if not hasattr(like, "v"):
        raise ValueError(f"Server: receiving is for answers with one vector v, and a {type(like).__name__} is none.")
    base = jax.eval_shape(lambda: jnp.zeros(like.v.shape[:1], jnp.int32))
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
