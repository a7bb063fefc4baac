"""The interface of networks, functions of other libraries, and the initialisation of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import PyTree, Pytree, Tree, static, summary

Params = Tree  # of arrays, as a model likes it


class Network(Pytree):
    """A model: how to begin, and how to predict. The types of its methods declare the type of its parameters."""

    @abstractmethod
    def init(self, key: Array) -> Params:
        """The parameters before training."""

    @abstractmethod
    def apply(self, params: PyTree, x: Array, key: Array | None = None) -> Array:
        """Outputs ``[b, c]`` for samples ``[b, d]``; with a key as in training, e.g. with dropout."""


def outputs(network: Network, params: Params, x: Array, labels: tuple[int, ...], key: Array | None = None) -> Array:
    """Return the model's outputs for labels of that shape, one row ``[c]`` for each.

    With JAX's usual promotion, which models of other libraries take for granted.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        predicted = network.apply(params, x, key)
    shape = getattr(predicted, "shape", f"a {type(predicted).__name__}")
    if not isinstance(shape, tuple) or not shape or shape[:-1] != labels:
        wanted = ", ".join(map(str, (*labels, "c")))
        raise ValueError(f"outputs of {type(network).__name__} for samples {x.shape} must be [{wanted}], got {shape}.")
    return predicted


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

    def __repr__(self) -> str:
        return summary(self, self._asdict())


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
