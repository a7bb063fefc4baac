"""Networks of dense layers."""

from __future__ import annotations

import jax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import static
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
