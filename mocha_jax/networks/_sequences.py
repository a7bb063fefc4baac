"""Networks for sequences."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import static, summary
from mocha_jax._numerics.recurrence import recurrence
from mocha_jax.networks._base import Layer, Network, dense


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
