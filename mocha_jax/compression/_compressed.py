"""An algorithm whose clients send their changes in a form of few bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, Pytree, Tree, tree
from mocha_jax._neural.client import Client
from mocha_jax._neural.composed import Composed, Sampling
from mocha_jax._neural.method import Answer, Beginning, Method, ServerParts, ServerRound
from mocha_jax._neural.trees import as_tree, as_vector, first_row, zeros_like
from mocha_jax._numerics.math import safe_ratio
from mocha_jax.compression._sending import Sending
from mocha_jax.networks import Params


def compressed(algorithm: Sampling, form: Sending) -> Composed:
    r"""Let an algorithm's clients send their changes in a form of few bytes, with error feedback.

    A client that wants to send a vector $u_k$ sends $C(u_k + e_k)$ and keeps the rest for its next message,
    $e_k \leftarrow u_k + e_k - C(u_k + e_k)$. The memory is at the client alone, so a server of many clients holds
    none of it. An answer that does not arrive leaves the client's memory as it was.

    The vector has the arrays that the server sums up for those of its own; a few other numbers, as the weights of
    clusters, go as they are. What comes down is not compressed. A model of costs is told of fewer numbers: an
    integer of 8 bits counts as a quarter of one.

    Args:
      algorithm: `FedAvg`, or one of `mocha_jax.personalized` whose server sums up.
      form: e.g. ``compression.TopK(0.01)``, ``compression.Rotated(compression.Quantized(1))``.

    Examples:
      >>> import jax, optax, mocha_jax as mj
      >>> data = mj.datasets.federation(jax.random.key(0), 6, 5).data
      >>> problem = mj.Prediction(data.replace(y=(data.y > 0).astype(data.dtype)))
      >>> algorithm = mj.FedAvg(mj.networks.MLP(5, 2, (16,)), optax.sgd(0.1))
      >>> few = mj.compression.compressed(algorithm, mj.compression.TopK(0.05))
      >>> algorithm.message(problem)[1], few.message(problem)[1]
      (130.0, 10.5)
      >>> solution = mj.solve(problem, few, tol=None, max_rounds=10)
      >>> bool(solution.history.loss[-1] < solution.history.loss[0])
      True

    References:
      - [Seide et al., 1-Bit Stochastic Gradient Descent](https://doi.org/10.21437/Interspeech.2014-274), 2014.
      - [Karimireddy et al., Error Feedback Fixes SignSGD](https://arxiv.org/abs/1901.09847), 2019.
    """
    check.instance("compressed", "algorithm", algorithm, Sampling, "FedAvg(model, optax.sgd(0.1))")
    check.instance("compressed", "form", form, Sending, "compression.TopK(0.01)")
    method = algorithm.declared().method
    if jax.tree.leaves(form):
        raise ValueError(f"compressed: {type(form).__name__} has arrays or numbers that are not static fields.")
    how = _Form(form)
    wrapped = {
        name: wrap(function)
        for name, wrap in {"joins": _Joins, "ready": _Ready, "personal_model": _PersonalModel}.items()
        if (function := getattr(method, name)) is not None
    }
    changed = method._replace(
        client=_CodingClient(method, how),
        sends=_CodeShapes(method, how),
        server=_DecodingServer(method, how),
        own=_OwnWithMemory(method),
        decodes=_Decodes(how),
        name=f"compressed {algorithm.name}",
        **wrapped,
    )
    return algorithm.with_method(changed)


class WithMemory(Pytree):
    """The trees of a client, and what its messages have left out."""

    own: Tree = tree()
    left_out: Array  # [p]


@dataclass(frozen=True, eq=False)
class _Form:
    """A form that equals others of the same class and static fields."""

    form: Sending

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)

    @property
    def structure(self) -> jax.tree_util.PyTreeDef:
        return jax.tree.structure(self.form)

    def vector(self, code: PyTree, like: Array) -> Array:
        return self.form.decode(code, jnp.zeros_like(like)[None])[0]


def _answer_like(method: Method, shared: Tree, row: Tree) -> Answer:
    """The shapes of answers as the method has them; their sums begin with arrays like the server's."""
    like = Answer(shared) if method.sends is None else method.sends(shared, row)
    shapes, sums = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (shared, like.total))
    if not shapes or sums[: len(shapes)] != shapes:
        raise ValueError("compressed: the algorithm's server sums up no vectors like its own.")
    return like


def _parted(total: Tree, shared: Tree) -> tuple[list[Array], list[Array]]:
    """The arrays of a sum that are compressed, and those after them, which are not."""
    leaves, count = jax.tree.leaves(total), len(jax.tree.leaves(shared))
    return leaves[:count], leaves[count:]


@dataclass(frozen=True)
class _CodingClient:
    """A client's round, with a code in place of its part of a sum."""

    method: Method
    how: _Form

    def __call__(self, c: Client, own: WithMemory) -> tuple[WithMemory, Answer]:
        kept, answer = self.method.client(c, own.own)
        vectors, rest = _parted(answer.total, c.shared)
        vector = safe_ratio(as_vector(vectors), c.weight) + own.left_out
        # Numbers of its own for every round's draws.
        round = (jax.random.bits(c.key, (1,), jnp.uint32) >> np.uint32(1)).astype(jnp.int32)
        code, found = self.how.form.encode(round, vector[None], jnp.zeros_like(vector)[None])
        return WithMemory(kept, vector - found[0]), Answer(rest, (code, answer.row), answer.loss)


@dataclass(frozen=True)
class _CodeShapes:
    """The shapes of such answers."""

    method: Method
    how: _Form

    def __call__(self, shared: Tree, row: Tree) -> Answer:
        like, vector = _answer_like(self.method, shared, row), as_vector(shared)[None]
        code, _ = self.how.form.encode(jnp.zeros((1,), jnp.int32), vector, vector)
        return Answer(_parted(like.total, shared)[1], (code, like.row))


@dataclass(frozen=True)
class _DecodingServer:
    """The server's round, on what it decodes."""

    method: Method
    how: _Form

    def __call__(self, s: ServerRound) -> ServerParts:
        shared, row = s.parts.shared, jax.tree.map(first_row, s.parts.rows)
        codes, rows = s.sent

        def add(total: Array, one: tuple[PyTree, Array]) -> tuple[Array, None]:
            code, weight = one
            return total + jnp.where(weight > 0, weight * self.how.vector(code, total), 0.0), None

        weights = jnp.where(s.answered, s.weights, 0.0)
        # One client after the other: decoded, all of them would fill the memory.
        found, _ = lax.scan(add, jnp.zeros_like(as_vector(shared)), (codes, weights))
        form = jax.tree.structure(_answer_like(self.method, shared, row).total)
        total = jax.tree.unflatten(form, [*jax.tree.leaves(as_tree(found, shared)), *s.total])
        return self.method.server(s._replace(total=total, sent=rows))


@dataclass(frozen=True)
class _Decodes:
    """The vector of a client's code, and its row."""

    how: _Form

    def __call__(self, shared: Tree, row: Tree, sent: PyTree) -> PyTree:
        code, own = sent
        return self.how.vector(code, as_vector(shared)), own


@dataclass(frozen=True)
class _OwnWithMemory:
    """The trees of a client before its first round, and an empty memory."""

    method: Method

    def __call__(self, b: Beginning, node: Array) -> WithMemory:
        def memory() -> Array:
            parts = self.method.start(b)
            _answer_like(self.method, parts.shared, jax.tree.map(first_row, parts.rows))
            return as_vector(parts.shared)

        own = () if self.method.own is None else self.method.own(b, node)
        return WithMemory(own, zeros_like(jax.eval_shape(memory)))


@dataclass(frozen=True)
class _Joins:
    """The trees of a client that comes later, and its empty memory."""

    joins: Callable[[PyTree, PyTree, PyTree], PyTree]

    def __call__(self, shared: Tree, row: Tree, first: WithMemory) -> WithMemory:
        return first.exchange(own=self.joins(shared, row, first.own))


@dataclass(frozen=True)
class _Ready:
    """The trees that are made ready at a client; a model needs no memory."""

    ready: Callable[[Client, PyTree], PyTree]

    def __call__(self, c: Client, own: WithMemory) -> WithMemory:
        return WithMemory(self.ready(c, own.own), own.left_out[:0])


@dataclass(frozen=True)
class _PersonalModel:
    """The parameters that predict for a client."""

    personal_model: Callable[[PyTree, PyTree, PyTree], Params]

    def __call__(self, shared: Tree, row: Tree, own: WithMemory) -> Params:
        return self.personal_model(shared, row, own.own)
