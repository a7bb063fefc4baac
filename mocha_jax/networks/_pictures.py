"""Networks of two convolutions, for pictures."""

from __future__ import annotations

import jax
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import static
from mocha_jax._numerics.convolution import convolved, pooled
from mocha_jax.networks._base import Layer, Network, convolution, dense
from mocha_jax.networks._dense_layers import DENSE, LAST, LateralLayer, SplitParameters, Stage, lateral


class _OfPictures(Network):
    """Settings and first layers that networks of two convolutions, a dense layer and outputs share."""

    shape: tuple[int, int, int] = static(default=(28, 28, 1))
    outputs: int = static(default=10)
    channels: tuple[int, int] = static(default=(32, 64))
    hidden: int = static(default=512)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check.integer(owner, 1, outputs=self.outputs, hidden=self.hidden)
        for name, example in (("shape", "(28, 28, 1)"), ("channels", "(32, 64)")):
            object.__setattr__(self, name, check.widths(owner, name, getattr(self, name), example))
        if len(self.shape) != 3 or min(self.shape[:2]) < 4:
            raise ValueError(f"{owner}: shape must be height, width (4 or more) and channels, got {self.shape}.")
        if len(self.channels) != 2:
            raise ValueError(f"{owner}: channels must be those of two convolutions, got {self.channels}.")

    def _layers(self, key: Array) -> tuple[Layer, ...]:
        height, width, depth = self.shape
        first, second = self.channels
        keys = jax.random.split(key, 4)
        inputs = (height // 2 // 2) * (width // 2 // 2) * second
        return (
            convolution(keys[0], 5, depth, first), convolution(keys[1], 5, first, second),
            dense(keys[2], inputs, self.hidden), dense(keys[3], self.hidden, self.outputs),
        )  # fmt: skip


class CNN(_OfPictures):
    """Two 5 x 5 convolutions with 2 x 2 max-pooling, a dense layer with ReLU, and the outputs (McMahan et al. 2017).

    Args:
      shape: height, width and channels of the picture that a sample is, row by row.
      outputs: how many.
      channels: of the convolutions.
      hidden: width of the dense layer.

    Examples:
      >>> import jax, mocha_jax as mj
      >>> sum(a.size for a in jax.tree.leaves(mj.networks.CNN().init(jax.random.key(0))))
      1663370
    """

    def init(self, key: Array) -> tuple[Layer, ...]:
        return self._layers(key)

    def apply(self, params: tuple[Layer, ...], x: Array, key: Array | None = None) -> Array:
        h = x.reshape(len(x), *self.shape)
        for (times, activation), layer in zip(_PICTURES, params, strict=True):
            h = activation(times(h, layer.w) + layer.b)
        return h


class LateralCNN(_OfPictures):
    r"""The two-part network of VIRTUAL for pictures: a shared `CNN` whose layers feed a private one.

    Equation (4) of the paper with convolutions for products,

    $$
    h^c_l = \sigma\big(\phi^w_l * h^c_{l-1}
    + \phi^\alpha_l \odot \big(\phi^u_l * \mathrm{relu}(h^s_{l-1} + \phi^b_l)\big) + \phi^c_l\big),
    $$

    where a channel has one number of $\phi^\alpha, \phi^b$ and $\phi^c$, and $\sigma$ is 2 x 2 max-pooling and ReLU for
    the two convolutions, ReLU for the dense layer, and nothing for the outputs. The server's network has the
    convolutions and the dense layer. Parameters are `SplitParameters`.

    Args:
      shape: height, width and channels of the picture that a sample is, row by row.
      outputs: how many.
      channels: of the convolutions, of both networks.
      hidden: width of the dense layer, of both networks.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> model = mj.networks.LateralCNN((8, 8, 1), 3, (2, 4), 5)
      >>> params = model.init(jax.random.key(0))
      >>> len(params.shared), len(params.private), model.apply(params, jnp.ones((2, 64))).shape
      (3, 4, (2, 3))
    """

    def init(self, key: Array) -> SplitParameters:
        shared, own, side = (self._layers(k) for k in jax.random.split(key, 3))
        return SplitParameters(shared[:-1], tuple(map(LateralLayer.of, own, side)))

    def apply(self, params: SplitParameters, x: Array, key: Array | None = None) -> Array:
        return lateral(params, x.reshape(len(x), *self.shape), _PICTURES)


def _flat(h: Array) -> Array:
    return h.reshape(len(h), -1)


def _relu_pooled(h: Array) -> Array:
    return jax.nn.relu(pooled(h))


_PICTURES: tuple[Stage, ...] = (
    (convolved, _relu_pooled), (convolved, lambda h: _flat(_relu_pooled(h))), DENSE, LAST,
)  # fmt: skip
