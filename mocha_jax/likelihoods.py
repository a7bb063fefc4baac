r"""Likelihoods of labels given a network's outputs: $-\log p(y \mid f)$, the loss of networks."""

from __future__ import annotations

import math
from abc import abstractmethod

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
    "NextSymbol",
    "Positions",
    "Sequence",
]


def __dir__() -> list[str]:
    return __all__


class Likelihood(Pytree):
    """A distribution of labels ``[..., b]`` given outputs ``[..., b, c]``; methods return a number for every label.

    A likelihood of more than one label a sample (see `Positions`) says by `parts` where they are: the network then has
    outputs for each, and the methods return a number for every sample.
    """

    @property
    def classes(self) -> bool:
        """Tell whether `predictive` are probabilities of classes. Default: no."""
        return False

    def parts(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Divide samples ``[..., b, d]`` into what the network sees and labels. Default: x, and y ``[..., b]``."""
        return x, y

    def count(self, y: Array) -> Array:
        """Count the labels of every sample, ``[..., b]`` int32, which scores average over. Default: one."""
        return jnp.ones(y.shape, jnp.int32)

    def check_labels(self, owner: str, y: np.ndarray) -> None:
        """Raise if labels are invalid for this likelihood."""

    def check_outputs(self, owner: str, outputs: int, y: np.ndarray | None) -> None:
        """Raise if a model with this many outputs cannot predict such labels; traced labels are None."""

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

    @property
    def classes(self) -> bool:
        return True

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


class Positions(Likelihood):
    r"""Labels at the positions of a sample, each by a likelihood of one label: outputs are ``[b, T, c]``.

    Rows of the data hold inputs and labels, as a subclass has them. **Their y is their length**, how many of the
    positions are there; what lies beyond is padding, of any content. A class below 0 is no label: -1 masks a position.

    The loss of a sample is the mean over its labels $\mathcal{T}_i$,

    $$
    -\frac{1}{|\mathcal{T}_i|} \sum_{s \in \mathcal{T}_i} \log p(y_{is} \mid f_s(x_i)),
    $$

    and with a weight of 1 every sample counts alike, as in McMahan et al. 2017. Data whose weights are the numbers of
    labels, ``data.replace(weight=data.weight * data.y)``, make every label count alike. Held-out scores are means over
    labels whatever the weights.

    Args:
      each: the likelihood of a label.
    """

    each: Likelihood = Categorical()

    def __post_init__(self) -> None:
        check.instance(type(self).__name__, "each", self.each, Likelihood, "likelihoods.Categorical()")
        if isinstance(self.each, Positions):
            raise ValueError(f"{type(self).__name__}: each must be a likelihood of one label, got {self.each!r}.")

    @property
    def classes(self) -> bool:
        return self.each.classes

    @abstractmethod
    def columns(self, x: Array) -> tuple[Array, Array]:
        """Divide rows into inputs and the labels at their positions, both ``[..., b, T]``."""

    def parts(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Inputs ``[..., b, T]``, and labels ``[..., b, T]`` with NaN where there is none."""
        inputs, labels = self.columns(x)
        longest, labels = labels.shape[-1], labels.astype(y.dtype)
        length = jnp.where((y == jnp.round(y)) & (y <= longest), y, 0.0)[..., None]  # else of no sample: 0 is refused
        present = jnp.arange(longest, dtype=y.dtype).reshape((1,) * y.ndim + (-1,)) < length
        if self.classes:
            present &= labels >= 0
        return inputs, jnp.where(present, labels, jnp.nan)

    def count(self, y: Array) -> Array:
        return jnp.sum(~jnp.isnan(y), axis=-1, dtype=jnp.int32)

    def check_labels(self, owner: str, y: np.ndarray) -> None:
        present = ~np.isnan(y)
        if len(empty := np.flatnonzero(~present.any(-1))):
            raise ValueError(
                f"{owner}: {len(empty)} of {len(y)} sequences have no label; the y of each must be its length, an "
                f"integer from 1 to {y.shape[-1]}."
            )
        self.each.check_labels(owner, y[present])

    def check_outputs(self, owner: str, outputs: int, y: np.ndarray | None) -> None:
        self.each.check_outputs(owner, outputs, None if y is None else y[~np.isnan(y)])

    def loss(self, outputs: Array, y: Array) -> Array:
        return _mean(self.each.loss(outputs, _filled(y)), y)

    def error(self, outputs: Array, y: Array) -> Array:
        return _mean(self.each.error(outputs, _filled(y)), y)

    def predictive(self, outputs: Array) -> Array:
        return self.each.predictive(outputs)

    def mixed(self, predictive: Array, y: Array) -> tuple[Array, Array]:
        loss, error = self.each.mixed(predictive, _filled(y))
        return _mean(loss, y), _mean(error, y)


class Sequence(Positions):
    """A label at every position: a row of the data holds T inputs and after them their T labels.

    Its y is its length, and a class of -1 is no label, see `Positions`.

    Args:
      each: the likelihood of a label.

    Examples:
      Two samples of three positions, the second with a label at the first position only:

      >>> import jax.numpy as jnp
      >>> rows = jnp.array([[5.0, 6.0, 7.0, 0.0, 1.0, 0.0], [5.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
      >>> likelihood = Sequence()
      >>> inputs, labels = likelihood.parts(rows, jnp.array([3.0, 1.0]))
      >>> inputs.shape, labels.tolist(), likelihood.count(labels).tolist()
      ((2, 3), [[0.0, 1.0, 0.0], [1.0, nan, nan]], [3, 1])
      >>> outputs = jnp.array([0.0, 1.0]) * jnp.ones((2, 3, 2))  # class 1 is predicted everywhere
      >>> (3 * likelihood.error(outputs, labels)).tolist()
      [2.0, 0.0]
    """

    def columns(self, x: Array) -> tuple[Array, Array]:
        """Divide rows into inputs and the labels at their positions, both ``[..., b, T]``."""
        if x.shape[-1] % 2:
            raise ValueError(f"Sequence: a row holds T inputs and T labels, an even number; got {x.shape[-1]}.")
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


class NextSymbol(Positions):
    """The next symbol at every position: a row is a text of T + 1 symbols, its y how many of them are predicted.

    The network sees the first T symbols; the label of each is the one after it. For the rest see `Positions`.

    Args:
      each: the likelihood of a label.

    Examples:
      The text "abac" in three symbols, and "ab" padded:

      >>> import jax.numpy as jnp
      >>> inputs, labels = NextSymbol().parts(jnp.array([[0, 1, 0, 2], [0, 1, 0, 0]]), jnp.array([3.0, 1.0]))
      >>> inputs.tolist(), labels.tolist()
      ([[0, 1, 0], [0, 1, 0]], [[1.0, 0.0, 2.0], [1.0, nan, nan]])
    """

    def columns(self, x: Array) -> tuple[Array, Array]:
        if x.shape[-1] < 2:
            raise ValueError("NextSymbol: a row holds a symbol and the next one at least; got one column.")
        return x[..., :-1], x[..., 1:]


def _filled(y: Array) -> Array:
    """Labels of which those that are not there are 0, of which every likelihood is finite."""
    return jnp.where(jnp.isnan(y), 0.0, y)


def _mean(values: Array, y: Array) -> Array:
    """Average over the labels of a sample that are there, ``[..., b, T]`` to ``[..., b]``; 0 without any."""
    present = ~jnp.isnan(y)
    count = jnp.sum(present, axis=-1).astype(values.dtype)
    return jnp.sum(jnp.where(present, values, 0.0), axis=-1) / jnp.maximum(count, 1.0)


def _pick(rows: Array, y: Array) -> Array:
    index = jnp.broadcast_to(y.astype(jnp.int32)[..., None], (*rows.shape[:-1], 1))
    return jnp.take_along_axis(rows, index, axis=-1)[..., 0]
