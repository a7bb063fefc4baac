"""Networks of two convolutions, for pictures; convolutions, pooling and their slopes as a CPU does them quickly.

XLA hands a convolution of float32 to a product that packs its patches as it goes, at the speed of a large matrix
product, if it is written as one of pictures with weights. Slopes are convolutions of other forms, for which it has but
naive loops. Here they are written in that form: as a convolution of the outputs' slopes with the weights turned round,
and as one of the samples, for channels, with the outputs' slopes for weights. A step of `networks.CNN` on ten pictures
takes one core 9.0 ms so (measured; 7.2 ms for its operations alone), 16.8 ms by a product of patches that are written
out, and by XLA's slopes 139 ms. It does not gain by a second core, as that product does: clients should.

They have derivatives in reverse mode, and forward over reverse; not in forward mode alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from mocha_jax._core import check
from mocha_jax._core.pytree import static
from mocha_jax.networks._base import Layer, Network, convolution, dense
from mocha_jax.networks._dense_layers import DENSE, LAST, LateralLayer, SplitParameters, Stage, lateral

# Pictures, weights and outputs in the order that XLA has products for.
_LAYOUT = ("NHWC", "HWIO", "NHWC")

Margins = list[tuple[int, int]]  # zeros before and after, of height and width


def convolved(h: Array, w: Array) -> Array:
    """Pictures ``[b, height, width, c]`` convolved with ``w`` ``[down, across, c, c']``, of the same size.

    On a CPU in float32 with the slopes of this module, and in other precisions, for which XLA has naive loops there, as
    one product of patches.
    """
    if jax.default_backend() != "cpu":
        return lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=_LAYOUT)
    quick = h.dtype == w.dtype == jnp.float32
    return convolved_quickly(h, w) if quick else convolved_by_product(h, w)


@jax.custom_vjp
def convolved_quickly(h: Array, w: Array) -> Array:
    """Convolve in the form that XLA has a product for on a CPU; so are the slopes."""
    return _slid(_wider(h, _margins(w)), w)


def _forwards(h: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _slid(_wider(h, _margins(w)), w), (h, w)


def _backwards(kept: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    h, w = kept
    margins = _margins(w)
    turned = jnp.swapaxes(w[::-1, ::-1], 2, 3)
    of_h = _slid(_wider(slope, [(after, before) for before, after in margins]), turned)
    # Channels take the part of samples, and samples that of channels: [c, down, across, c'].
    of_w = _slid(_wider(h, margins).transpose(3, 1, 2, 0), slope.transpose(1, 2, 0, 3))
    return of_h, of_w.transpose(1, 2, 0, 3)


convolved_quickly.defvjp(_forwards, _backwards)


def convolved_by_product(h: Array, w: Array) -> Array:
    """Convolve as a product of every pixel's patch with the weights."""
    height, width = h.shape[1:3]
    down, across = w.shape[:2]
    padded = _wider(h, _margins(w))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(down) for j in range(across)]
    return jnp.concatenate(shifts, axis=-1) @ w.reshape(-1, w.shape[-1])


def pooled(h: Array) -> Array:
    """Largest of each 2 x 2 pixels, an odd last row or column left out.

    By comparisons, for the slope of XLA's windows is a loop over them on a CPU. Of equal pixels the slope goes to the
    first, row by row, as there.
    """
    rows, columns = (size // 2 * 2 for size in h.shape[1:3])
    h = h[:, :rows, :columns]
    h = _larger(h[:, :, ::2], h[:, :, 1::2])
    return _larger(h[:, ::2], h[:, 1::2])


def _larger(a: Array, b: Array) -> Array:
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


@custom_vmap
def _slid(h: Array, w: Array) -> Array:
    """Weights at every place of pictures that they fit into, without zeros around."""
    return lax.conv_general_dilated(h, w, (1, 1), "VALID", dimension_numbers=_LAYOUT)


@_slid.def_vmap
def _slid_many(size: int, mapped: list[bool], h: Array, w: Array) -> tuple[Array, bool]:
    """Convolve one after the other if weights differ; XLA would use a grouped convolution, by naive loops."""
    if mapped[1]:
        return lax.map(lambda i: _slid(h[i] if mapped[0] else h, w[i]), jnp.arange(size)), True
    out = _slid(h.reshape(-1, *h.shape[2:]), w)
    return out.reshape(size, -1, *out.shape[1:]), True


def _margins(w: Array) -> Margins:
    """Zeros around pictures that keep their size."""
    return [((size - 1) // 2, size // 2) for size in w.shape[:2]]


def _wider(h: Array, margins: Margins) -> Array:
    return jnp.pad(h, ((0, 0), *margins, (0, 0)))


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
