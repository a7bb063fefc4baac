"""Networks of dense layers: one, and two joined by lateral connections, one shared and one every client's own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, static, summary
from mocha_jax.networks._base import Layer, Network, dense, dropped


class MLP(Network):
    """Dense layers with ReLU between them; without hidden layers the (multinomial) logistic model.

    Args:
      features: length d of a sample.
      outputs: how many, e.g. one for each class.
      hidden: widths of the hidden layers.
      dropout: share of the inputs of every layer that training leaves out.

    Examples:
      McMahan's "2NN" for MNIST is ``MLP(784, 10, (200, 200))``:

      >>> import jax, mocha_jax as mj
      >>> sum(a.size for a in jax.tree.leaves(mj.networks.MLP(784, 10, (200, 200)).init(jax.random.key(0))))
      199210
    """

    features: int = static()
    outputs: int = static()
    hidden: tuple[int, ...] = static(default=())
    dropout: float = static(default=0.0)

    def __post_init__(self) -> None:
        check.integer("MLP", 1, features=self.features, outputs=self.outputs)
        object.__setattr__(self, "hidden", check.widths("MLP", "hidden", self.hidden, "(200, 200)"))
        check.in_unit_interval("MLP", open_right=True, dropout=self.dropout)
        check.scalar("MLP", dropout=self.dropout)

    def init(self, key: Array) -> tuple[Layer, ...]:
        widths = self.features, *self.hidden, self.outputs
        keys = jax.random.split(key, len(widths) - 1)
        return tuple(dense(k, *shape) for k, shape in zip(keys, zip(widths, widths[1:], strict=False), strict=True))

    def apply(self, params: tuple[Layer, ...], x: Array, key: Array | None = None) -> Array:
        for i, layer in enumerate(params):
            x = dropped(x if i == 0 else jax.nn.relu(x), self.dropout, key, i) @ layer.w + layer.b
        return x


# The product of a layer with its weights, and its activation.
Stage = tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]

DENSE: Stage = (operator.matmul, jax.nn.relu)
LAST: Stage = (operator.matmul, lambda h: h)


class SplitParameters(NamedTuple):
    """Parameters of which one part is shared by all clients and the other is every client's own."""

    shared: PyTree  # a tree of arrays
    private: PyTree

    def __repr__(self) -> str:
        return summary(self, self._asdict())


class LateralLayer(NamedTuple):
    """A client's layer with its connection from the server's network."""

    w: Array  # [inputs, outputs] from the client's own layer below; of a convolution [height, width, inputs, outputs]
    u: Array  # the same, from the server's layer below
    gate: Array  # [outputs]
    b: Array  # [inputs]
    c: Array  # [outputs]

    def __repr__(self) -> str:
        return summary(self, self._asdict())

    @classmethod
    def of(cls, own: Layer, side: Layer) -> LateralLayer:
        """Make one of a layer from below and one from the server's network, with open gates."""
        inputs, outputs = own.w.shape[-2:]
        return cls(own.w, side.w, jnp.ones(outputs), jnp.zeros(inputs), own.b)


class Lateral(Network):
    r"""The network of VIRTUAL: a shared MLP whose layers feed a private one.

    Equation (4) of the paper,

    $$
    h^c_l = \sigma\big(\phi^w_l h^c_{l-1}
    + \phi^\alpha_l \odot \phi^u_l\,\sigma(h^s_{l-1} + \phi^b_l) + \phi^c_l\big), \qquad
    h^s_l = \sigma(\theta^w_l h^s_{l-1} + \theta^b_l),
    $$

    with $h^c_0 = h^s_0 = x$. The last layer has no $\sigma$; the server has hidden layers only, for nothing
    reads the output of another. Parameters are `SplitParameters`.

    Args:
      features: length d of a sample.
      outputs: how many.
      hidden: widths of the hidden layers, of both networks.
      dropout: share of the inputs of every layer that training leaves out.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> model = mj.networks.Lateral(5, 3, (4, 4))
      >>> params = model.init(jax.random.key(0))
      >>> len(params.shared), len(params.private), model.apply(params, jnp.ones((2, 5))).shape
      (2, 3, (2, 3))
    """

    features: int = static()
    outputs: int = static()
    hidden: tuple[int, ...] = static(default=(100, 100))
    dropout: float = static(default=0.0)

    def __post_init__(self) -> None:
        check.integer("Lateral", 1, features=self.features, outputs=self.outputs)
        object.__setattr__(self, "hidden", check.widths("Lateral", "hidden", self.hidden, "(100, 100)"))
        if not self.hidden:
            raise ValueError("Lateral: without hidden layers nothing is shared; use an MLP.")
        check.in_unit_interval("Lateral", open_right=True, dropout=self.dropout)
        check.scalar("Lateral", dropout=self.dropout)

    def init(self, key: Array) -> SplitParameters:
        below = self.features, *self.hidden
        shapes = tuple(zip(below, (*self.hidden, self.outputs), strict=True))
        keys = jax.random.split(key, 3 * len(shapes)).reshape(len(shapes), 3)
        shared = tuple(dense(k[0], *shape) for k, shape in zip(keys, shapes[:-1], strict=False))
        private = (
            LateralLayer.of(dense(k[1], *shape), dense(k[2], *shape)) for k, shape in zip(keys, shapes, strict=True)
        )
        return SplitParameters(shared, tuple(private))

    def apply(self, params: SplitParameters, x: Array, key: Array | None = None) -> Array:
        return lateral(params, x, (*[DENSE] * len(self.hidden), LAST), self.dropout, key)


def lateral(
    params: SplitParameters, x: Array, stages: Sequence[Stage], dropout: float = 0.0, key: Array | None = None
) -> Array:
    """Predict by equation (4), layer by layer."""
    server = client = x
    for i, ((times, activation), layer) in enumerate(zip(stages, params.private, strict=True)):
        side = dropped(jax.nn.relu(server + layer.b), dropout, key, 3 * i)
        own = times(dropped(client, dropout, key, 3 * i + 1), layer.w)
        client = activation(own + layer.gate * times(side, layer.u) + layer.c)
        if i < len(params.shared):
            theirs = params.shared[i]
            server = activation(times(dropped(server, dropout, key, 3 * i + 2), theirs.w) + theirs.b)
    return client
