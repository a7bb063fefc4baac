"""Networks for sequences, and the recurrence of their layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.pytree import static, summary
from mocha_jax.networks._base import Layer, Network, dense

Steps = tuple[Array, Array, Array, Array, Array, Array]  # h, c, i, f, g, o at all positions, [T, b, h]


@jax.custom_vjp
def recurrence(z: Array, u: Array) -> Array:
    r"""States h at all positions ``[T, b, h]`` of a layer of long short-term memory that begins with $h = c = 0$.

    $$
    (i, f, g, o)_s = z_s + h_{s-1} U, \quad
    c_s = \sigma(f_s) \odot c_{s-1} + \sigma(i_s) \odot \tanh(g_s), \quad
    h_s = \sigma(o_s) \odot \tanh(c_s)
    $$

    By autodiff of a scan every step adds an outer product to the derivative of the recurrent weights, as large as they
    are. Here the steps back leave their parts in a row, and one product at the end adds up all of them. There is no
    derivative in forward mode.

    Args:
      z: what the gates get from below ``[T, b, 4h]``, in the order i, f, g, o.
      u: the recurrent weights ``[h, 4h]``.
    """
    return _forward(z, u)[0]


def _forward(z: Array, u: Array) -> tuple[Array, tuple[Array, Steps]]:
    def step(carry: tuple[Array, Array], z: Array) -> tuple[tuple[Array, Array], Steps]:
        h, c = carry
        i, f, g, o = jnp.split(z + h @ u, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, i, f, g, o)

    zero = jnp.zeros((z.shape[1], u.shape[0]), z.dtype)
    _, steps = lax.scan(step, (zero, zero), z)
    return steps[0], (u, steps)


def _backward(kept: tuple[Array, Steps], slopes: Array) -> tuple[Array, Array]:
    u, (h, c, i, f, g, o) = kept
    before_h, before_c = (jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]]) for a in (h, c))
    back = u.T

    def step(carry: tuple[Array, Array], step_values: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        dh, dc = carry
        slope, c, before, i, f, g, o = step_values
        dh, out = dh + slope, jnp.tanh(c)
        dc = dc + dh * o * (1.0 - out * out)
        dz = jnp.concatenate(
            [dc * g * i * (1.0 - i), dc * before * f * (1.0 - f), dc * i * (1.0 - g * g), dh * out * o * (1.0 - o)], -1
        )
        return (dz @ back, dc * f), dz

    zero = jnp.zeros_like(h[0])
    _, dz = lax.scan(step, (zero, zero), (slopes, c, before_c, i, f, g, o), reverse=True)
    return dz, jnp.einsum("sbh,sbz->hz", before_h, dz)


recurrence.defvjp(_forward, _backward)


class LSTMLayer(NamedTuple):
    """A layer of long short-term memory; its 4 h columns are the input, forget, cell and output gates."""

    w: Array  # [inputs, 4 h] from below
    u: Array  # [h, 4 h] from the position before
    b: Array  # [4 h]

    def __repr__(self) -> str:
        return summary(self, self._asdict())


class LSTM(Network):
    r"""A stacked LSTM over symbols, with outputs at every position (the language model of McMahan et al. 2017).

    A sample is a row of T symbols $x_s$ in 0, ..., `vocabulary` - 1; any other has the embedding 0. Each is
    embedded and goes through layers of long short-term memory, whose states begin at 0 in every sample; with $e_s$ the
    embedding or the layer below,

    $$
    (i, f, g, o)_s = e_s W + h_{s-1} U + b, \quad
    c_s = \sigma(f_s) \odot c_{s-1} + \sigma(i_s) \odot \tanh(g_s), \quad
    h_s = \sigma(o_s) \odot \tanh(c_s),
    $$

    and the outputs at a position are an affine function of the last layer's $h_s$. Embeddings begin standard normal,
    weights with Glorot's uniform distribution, biases at 0, but for those of the forget gates, which are 1: to begin
    with, memory lasts.

    With `likelihoods.NextSymbol` it is a language model, with `likelihoods.Sequence` it labels positions. For one label
    a sample take the last position, ``Model(lstm.init, lambda params, x: lstm.apply(params, x)[:, -1])``.

    Args:
      vocabulary: how many symbols.
      embedding: numbers that a symbol is embedded in.
      hidden: h, width of the layers.
      layers: how many.
      outputs: at every position; default one for each symbol.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> model = mj.networks.LSTM(80, embedding=8, hidden=256, layers=2)
      >>> params = model.init(jax.random.key(0))
      >>> sum(a.size for a in jax.tree.leaves(params)), model.apply(params, jnp.zeros((3, 20))).shape
      (817872, (3, 20, 80))
    """

    vocabulary: int = static()
    embedding: int = static(default=8)
    hidden: int = static(default=256)
    layers: int = static(default=2)
    outputs: int | None = static(default=None)

    def __post_init__(self) -> None:
        check.integer("LSTM", 1, vocabulary=self.vocabulary, embedding=self.embedding, hidden=self.hidden,
                      layers=self.layers)  # fmt: skip
        if self.outputs is not None:
            check.integer("LSTM", 1, outputs=self.outputs)

    def init(self, key: Array) -> tuple[Array, tuple[LSTMLayer, ...], Layer]:
        """The embedding ``[vocabulary, embedding]``, the layers from below, and the layer of outputs."""
        keys = jax.random.split(key, 2 * self.layers + 2)
        widths = self.embedding, *(self.hidden,) * (self.layers - 1)
        remember = jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), self.hidden)
        layers = tuple(
            LSTMLayer(dense(a, width, 4 * self.hidden).w, dense(b, self.hidden, 4 * self.hidden).w, remember)
            for a, b, width in zip(keys[2::2], keys[3::2], widths, strict=True)
        )
        outputs = self.vocabulary if self.outputs is None else self.outputs
        embedding = jax.random.normal(keys[0], (self.vocabulary, self.embedding))  # of the size that Glorot's suit
        return embedding, layers, dense(keys[1], self.hidden, outputs)

    def apply(
        self, params: tuple[Array, tuple[LSTMLayer, ...], Layer], x: Array, key: Array | None = None
    ) -> Array:  # fmt: skip
        embedding, layers, out = params
        # Positions first, as a loop over them reads; the products with what is below take all positions at once.
        h = jax.nn.one_hot(x.T.astype(jnp.int32), self.vocabulary, dtype=out.b.dtype) @ embedding  # [T, b, embedding]
        for layer in layers:
            h = recurrence(h @ layer.w + layer.b, layer.u)  # [T, b, h]
        return jnp.swapaxes(h @ out.w + out.b, 0, 1)  # [b, T, outputs]
