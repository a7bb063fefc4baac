r"""Likelihoods of labels given a network's outputs: $-\log p(y \mid f)$, the loss of networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree

__all__ = [
    "Categorical",
    "Gaussian",
    "Likelihood",
]


def __dir__() -> list[str]:
    return __all__


class Likelihood(Pytree):
    """A distribution of labels given outputs ``[..., b, c]``; methods return a number for every sample ``[..., b]``."""

    classes: ClassVar[bool] = False  # whether `predictive` are probabilities of classes

    def check_labels(self, owner: str, y: np.ndarray) -> None:
        """Raise where labels cannot be what they are taken for."""

    def check_outputs(self, owner: str, outputs: int, y: np.ndarray | None) -> None:
        """Raise where a model with so many outputs cannot predict such labels; they are None where traced."""

    @abstractmethod
    def loss(self, outputs: Array, y: Array) -> Array:
        """Minus the logarithm of the probability (density) of the labels."""

    @abstractmethod
    def error(self, outputs: Array, y: Array) -> Array:
        """Return the error that scores average: 1 for a wrong class, the squared error of a number."""

    @abstractmethod
    def predictive(self, outputs: Array) -> Array:
        """Return predictions that may be averaged over draws of a model: probabilities ``[..., b, c]``, or means."""

    @abstractmethod
    def mixed(self, predictive: Array, y: Array) -> tuple[Array, Array]:
        """Loss and error of an average of `predictive`."""


class Categorical(Likelihood):
    """Classes 0, 1, ..., c - 1 by softmax: outputs are logits ``[b, c]``.

    Examples:
      >>> import jax.numpy as jnp
      >>> float(Categorical().error(jnp.array([[2.0, 1.0]]), jnp.array([0.0]))[0])
      0.0
    """

    classes: ClassVar[bool] = True

    def check_labels(self, owner: str, y: np.ndarray) -> None:
        wrong = y[(y != np.round(y)) | (y < 0)]
        if len(wrong):
            raise ValueError(
                f"{owner}: Categorical needs labels 0, 1, ..., but there is a {wrong[0]:g}; map yours with "
                f"np.unique(y, return_inverse=True)[1]."
            )

    def check_outputs(self, owner: str, outputs: int, y: np.ndarray | None) -> None:
        if y is not None and len(y) and y.max() >= outputs:
            raise ValueError(f"{owner}: there is a label {y.max():g}, but the model has outputs for {outputs} classes.")

    def loss(self, outputs: Array, y: Array) -> Array:
        logs = jax.nn.log_softmax(outputs, axis=-1)
        return -_pick(logs, y)

    def error(self, outputs: Array, y: Array) -> Array:
        wrong = jnp.argmax(outputs, axis=-1).astype(jnp.int32) != y.astype(jnp.int32)
        return (wrong | jnp.any(jnp.isnan(outputs), axis=-1)).astype(outputs.dtype)

    def predictive(self, outputs: Array) -> Array:
        return jax.nn.softmax(outputs, axis=-1)

    def mixed(self, predictive: Array, y: Array) -> tuple[Array, Array]:
        tiny = jnp.finfo(predictive.dtype).tiny
        return -jnp.log(jnp.maximum(_pick(predictive, y), tiny)), self.error(predictive, y)


class Gaussian(Likelihood):
    """Real labels with normal noise: outputs are means ``[b, 1]``.

    Args:
      noise: its standard deviation, > 0.
    """

    noise: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        check.scalar("Gaussian", noise=self.noise)
        check.positive("Gaussian", noise=self.noise)

    def check_outputs(self, owner: str, outputs: int, y: np.ndarray | None) -> None:
        if outputs != 1:
            raise ValueError(f"{owner}: Gaussian needs a model with one output, not {outputs}.")

    def loss(self, outputs: Array, y: Array) -> Array:
        constant = 0.5 * math.log(2.0 * math.pi) + jnp.log(jnp.asarray(self.noise, outputs.dtype))
        return 0.5 * self.error(outputs, y) / self.noise**2 + constant

    def error(self, outputs: Array, y: Array) -> Array:
        return (outputs[..., 0] - y) ** 2

    def predictive(self, outputs: Array) -> Array:
        return outputs

    def mixed(self, predictive: Array, y: Array) -> tuple[Array, Array]:
        return self.loss(predictive, y), self.error(predictive, y)


def _pick(rows: Array, y: Array) -> Array:
    index = jnp.broadcast_to(y.astype(jnp.int32)[..., None], (*rows.shape[:-1], 1))
    return jnp.take_along_axis(rows, index, axis=-1)[..., 0]
