r"""Mean-field Gaussians over vectors of parameters; their products are sums of two vectors each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._core.pytree import Pytree

Params = TypeVar("Params")  # a tree of arrays


class DiagonalGaussian(Pytree):
    r"""$\prod_d \exp(-\tfrac12 \tau_d \theta_d^2 + \eta_d \theta_d)$: a density where all $\tau_d > 0$."""

    precision: Array  # [..., p] tau
    shift: Array  # [..., p] eta = tau times the mean

    @classmethod
    def of(cls, mean: Array, precision: Array) -> DiagonalGaussian:
        """Make a Gaussian of the given mean and precision."""
        return cls(precision, precision * mean)

    @classmethod
    def around_zero(cls, scale: ArrayLike, like: Array) -> DiagonalGaussian:
        """Make a Gaussian around zero with one standard deviation for all parameters."""
        precision = jnp.full_like(like, jnp.asarray(scale, like.dtype) ** -2)
        return cls(precision, jnp.zeros_like(like))

    @property
    def mean(self) -> Array:
        """The mean of every parameter."""
        return self.shift / self.precision

    @property
    def scale(self) -> Array:
        """Standard deviation of every parameter."""
        return self.precision**-0.5

    @property
    def signal_to_noise(self) -> Array:
        """The mean of every parameter in standard deviations."""
        return jnp.abs(self.shift) * self.precision**-0.5

    def prominent(self, share: Array) -> Array:
        """Mark all but that share of the parameters, those of least signal to noise, ``[..., p]`` bool; ties all go."""
        ratio = self.signal_to_noise
        order = jnp.sort(ratio, axis=-1)
        gone = jnp.round(share * ratio.shape[-1]).astype(jnp.int32)
        last = jnp.take(order, jnp.maximum(gone - 1, 0), axis=-1)
        return (ratio > last[..., None]) | (gone == 0)

    def where(self, kept: Array) -> DiagonalGaussian:
        """The kept parameters; the others are 0 for certain."""
        return DiagonalGaussian(jnp.where(kept, self.precision, jnp.inf), jnp.where(kept, self.shift, 0.0))

    def __mul__(self, other: DiagonalGaussian) -> DiagonalGaussian:
        """The product of two densities, not normalised."""
        return DiagonalGaussian(self.precision + other.precision, self.shift + other.shift)

    def __truediv__(self, other: DiagonalGaussian) -> DiagonalGaussian:
        """The quotient; a density only where the difference of precisions is positive."""
        return DiagonalGaussian(self.precision - other.precision, self.shift - other.shift)

    def __pow__(self, power: Array | float) -> DiagonalGaussian:
        return DiagonalGaussian(power * self.precision, power * self.shift)


def divergence(q: DiagonalGaussian, p: DiagonalGaussian) -> Array:
    r"""The Kullback-Leibler divergence of q from p.

    $$
    \tfrac12 \sum_d \Big[\frac{\tau^p_d}{\tau^q_d} - 1 - \log\frac{\tau^p_d}{\tau^q_d}
    + \tau^p_d (\mu^q_d - \mu^p_d)^2\Big]
    $$
    """
    # u - 1 - log u cancels near u = 1; with u = 1 + v it is v - log1p(v), which cancels near u = 0.
    v = (p.precision - q.precision) / q.precision
    near = jnp.abs(v) < 0.5
    close = jnp.where(near, v, 0.0)
    apart = v - (jnp.log(p.precision) - jnp.log(q.precision))
    spread = jnp.where(near, close - jnp.log1p(close), apart)
    return 0.5 * jnp.sum(spread + p.precision * (q.mean - p.mean) ** 2, axis=-1)


def draw(key: Array, mean: Array, scale: Array, apart: Callable[[Array], Params], noise: str = "shared") -> Params:
    """Parameters at random, by the reparametrisation trick.

    Args:
      key: a JAX random key.
      mean: ``[p]``.
      scale: ``[p]`` standard deviations.
      apart: from a vector to what a model wants.
      noise: of matrices, one of `NOISES`; other parameters are the same for all rows of a batch.
    """
    if noise == "shared":
        return apart(mean + scale * _normal(key, mean.shape, mean.dtype))
    means, structure = jax.tree.flatten(apart(mean))
    leaves = []
    for i, (m, s) in enumerate(zip(means, jax.tree.leaves(apart(scale)), strict=True)):
        own = jax.random.fold_in(key, i)
        leaves.append(_MATRICES[noise](m, s, own) if m.ndim == 2 else m + s * _normal(own, m.shape, m.dtype))
    return jax.tree.unflatten(structure, leaves)


def _normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    # Numbers of double precision would be no better, and their generator is long to compile.
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


class Flipout:
    r"""A random matrix for every sample at the cost of two (flipout, Wen et al. 2018).

    ``x @ Flipout(mean, scale, key)`` is $x M + ((x \circ r)\,\Delta) \circ s$ with one draw of $\Delta$
    and random signs r, s for each row of x: rows see perturbations that are all distributed as $\Delta$, and
    uncorrelated.
    """

    def __init__(self, mean: Array, scale: Array, key: Array) -> None:
        self._mean, self._scale, self._key = mean, scale, key

    def __rmatmul__(self, x: Array) -> Array:
        r, s = (
            jax.random.rademacher(jax.random.fold_in(self._key, i), (*x.shape[:-1], size), x.dtype)
            for i, size in enumerate(self._mean.shape)
        )
        delta = self._scale * _normal(self._key, self._scale.shape, self._scale.dtype)
        return x @ self._mean + ((x * r) @ delta) * s


class LocalReparametrization:
    r"""A random matrix for every sample, of which only the products are drawn (Kingma et al. 2015).

    ``x @ LocalReparametrization(mean, scale, key)`` is $x M + \sqrt{x^2 \sigma^2} \circ \epsilon$: what a row
    times an independent draw of the matrix is distributed as. Rows are independent, and there are fewer numbers to draw
    than the matrix has; it must be multiplied by once.
    """

    def __init__(self, mean: Array, scale: Array, key: Array) -> None:
        self._mean, self._scale, self._key = mean, scale, key

    def __rmatmul__(self, x: Array) -> Array:
        variance = jnp.square(x) @ jnp.square(self._scale)
        # The root has no slope at 0, where a row is all zeros.
        some = variance > 0
        spread = jnp.where(some, jnp.sqrt(jnp.where(some, variance, 1.0)), 0.0)
        return x @ self._mean + spread * _normal(self._key, spread.shape, spread.dtype)


_MATRICES: dict[str, Callable[[Array, Array, Array], Flipout | LocalReparametrization]] = {
    "flipout": Flipout,
    "local": LocalReparametrization,
}

# Of matrices: one draw for all rows of a batch, or what `Flipout` and `LocalReparametrization` do.
NOISES = ("shared", *_MATRICES)
