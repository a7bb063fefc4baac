r"""Models that are not linear: pairs of pure functions, ``init(key)`` and ``apply(params, x, key)``.

`MLP`, `CNN` and, for sequences, `LSTM` come with the library, `Lateral` and `LateralCNN` are the two-part networks of
VIRTUAL, and `Model` takes the functions of any other library. Of flax, for instance,

```python
net = flax.linen.Dense(10)
model = mj.networks.Model(lambda key: net.init(key, jnp.zeros((1, 784))), net.apply)
```

of equinox, whose models are pytrees with non-arrays in them,

```python
params, static = eqx.partition(eqx.nn.MLP(784, 10, 200, 2, key=key), eqx.is_array)
model = mj.networks.Model(
    lambda key: eqx.partition(eqx.nn.MLP(784, 10, 200, 2, key=key), eqx.is_array)[0],
    lambda params, x: jax.vmap(eqx.combine(params, static))(x),
)
```

and of haiku, ``net = hk.without_apply_rng(hk.transform(f))``,
``Model(lambda key: net.init(key, jnp.zeros((1, 784))), net.apply)``.

Weights multiply from the right, ``h @ w + b``, in all models here; a model that is written so can be trained with
noise for every row (see `Virtual`).
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._numerics.convolution import convolved, pooled
from mocha_jax._numerics.recurrence import recurrence

__all__ = [
    "CNN",
    "Lateral",
    "LateralCNN",
    "LateralLayer",
    "Layer",
    "LSTM",
    "LSTMLayer",
    "MLP",
    "Model",
    "Network",
    "Parts",
]


def __dir__() -> list[str]:
    return __all__


Params = Tree  # of arrays, as a model likes it


class Network(Pytree):
    """A model: how to begin, and how to predict. By the types of its methods it says what its parameters are."""

    @abstractmethod
    def init(self, key: Array) -> Params:
        """The parameters before training."""

    @abstractmethod
    def apply(self, params: Any, x: Array, key: Array | None = None) -> Array:
        """Outputs ``[b, c]`` for samples ``[b, d]``; with a key as in training, e.g. with dropout."""


class Model(Network):
    """The functions of another library.

    Both are compared by identity: keep one `Model` and use it again, or everything is compiled anew.

    Args:
      initialise: ``initialise(key)``, the parameters.
      predict: ``predict(params, x)``, or ``predict(params, x, key)`` where `stochastic`.
      stochastic: whether predictions in training take a key; outside of training it is None.

    Examples:
      >>> import jax, jax.numpy as jnp, mocha_jax as mj
      >>> model = mj.networks.Model(lambda key: jax.random.normal(key, (4, 2)), lambda w, x: x @ w)
      >>> model.apply(model.init(jax.random.key(0)), jnp.ones((3, 4))).shape
      (3, 2)
    """

    initialise: Callable[[Array], Params] = static()
    predict: Callable[..., Array] = static()
    stochastic: bool = static(default=False)

    def __post_init__(self) -> None:
        check.function("Model", "initialise", self.initialise, "lambda key: ...")
        check.function("Model", "predict", self.predict, "lambda params, x: ...")
        check.flag("Model", stochastic=self.stochastic)

    def init(self, key: Array) -> Params:
        return self.initialise(key)

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        return self.predict(params, x, key) if self.stochastic else self.predict(params, x)


class Layer(NamedTuple):
    """A dense layer, or a convolution."""

    w: Array  # [inputs, outputs]; of a convolution [height, width, inputs, outputs]
    b: Array  # [outputs]


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


class LSTMLayer(NamedTuple):
    """A layer of long short-term memory; its 4 h columns are the input, forget, cell and output gates."""

    w: Array  # [inputs, 4 h] from below
    u: Array  # [h, 4 h] from the position before
    b: Array  # [4 h]


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


class Parts(NamedTuple):
    """Parameters of which one part is shared by all clients and the other is every client's own."""

    shared: Any  # a tree of arrays
    private: Any


class LateralLayer(NamedTuple):
    """A client's layer with its connection from the server's network."""

    w: Array  # [inputs, outputs] from the client's own layer below; of a convolution [height, width, inputs, outputs]
    u: Array  # the same, from the server's layer below
    gate: Array  # [outputs]
    b: Array  # [inputs]
    c: Array  # [outputs]

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
    reads the output of another. Parameters are `Parts`.

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

    def init(self, key: Array) -> Parts:
        below = self.features, *self.hidden
        shapes = tuple(zip(below, (*self.hidden, self.outputs), strict=True))
        keys = jax.random.split(key, 3 * len(shapes)).reshape(len(shapes), 3)
        shared = tuple(dense(k[0], *shape) for k, shape in zip(keys, shapes[:-1], strict=False))
        private = (
            LateralLayer.of(dense(k[1], *shape), dense(k[2], *shape)) for k, shape in zip(keys, shapes, strict=True)
        )
        return Parts(shared, tuple(private))

    def apply(self, params: Parts, x: Array, key: Array | None = None) -> Array:
        return _lateral(params, x, (*[_DENSE] * len(self.hidden), _LAST), self.dropout, key)


class LateralCNN(_OfPictures):
    r"""The two-part network of VIRTUAL for pictures: a shared `CNN` whose layers feed a private one.

    Equation (4) of the paper with convolutions for products,

    $$
    h^c_l = \sigma\big(\phi^w_l * h^c_{l-1}
    + \phi^\alpha_l \odot \big(\phi^u_l * \mathrm{relu}(h^s_{l-1} + \phi^b_l)\big) + \phi^c_l\big),
    $$

    where a channel has one number of $\phi^\alpha, \phi^b$ and $\phi^c$, and $\sigma$ is 2 x 2 max-pooling and ReLU for
    the two convolutions, ReLU for the dense layer, and nothing for the outputs. The server's network has the
    convolutions and the dense layer. Parameters are `Parts`.

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

    def init(self, key: Array) -> Parts:
        shared, own, side = (self._layers(k) for k in jax.random.split(key, 3))
        return Parts(shared[:-1], tuple(map(LateralLayer.of, own, side)))

    def apply(self, params: Parts, x: Array, key: Array | None = None) -> Array:
        return _lateral(params, x.reshape(len(x), *self.shape), _PICTURES)


def _flat(h: Array) -> Array:
    return h.reshape(len(h), -1)


def _relu_pooled(h: Array) -> Array:
    return jax.nn.relu(pooled(h))


# How a layer multiplies by its weights, and what it makes of the sum.
Stage = tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]

_DENSE: Stage = (operator.matmul, jax.nn.relu)
_LAST: Stage = (operator.matmul, lambda h: h)
_PICTURES: tuple[Stage, ...] = (
    (convolved, _relu_pooled), (convolved, lambda h: _flat(_relu_pooled(h))), _DENSE, _LAST,
)  # fmt: skip


def _lateral(params: Parts, x: Array, stages: Sequence[Stage], dropout: float = 0.0, key: Array | None = None) -> Array:
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


def dense(key: Array, inputs: int, outputs: int) -> Layer:
    """Glorot's uniform weights and no bias."""
    return Layer(jax.nn.initializers.glorot_uniform()(key, (inputs, outputs)), jnp.zeros(outputs))


def convolution(key: Array, size: int, inputs: int, outputs: int) -> Layer:
    """Initialise a convolution."""
    return Layer(jax.nn.initializers.glorot_uniform()(key, (size, size, inputs, outputs)), jnp.zeros(outputs))


def dropped(x: Array, share: float, key: Array | None, place: int) -> Array:
    """Replace a share of the numbers by 0 and scale up the others; without a key change nothing."""
    if key is None or share == 0.0:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - share, x.shape)
    return jnp.where(kept, x / (1.0 - share), 0.0)
