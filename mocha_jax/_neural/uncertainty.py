"""Averages over draws of a network, and their uncertainty."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._core.pytree import Pytree
from mocha_jax.likelihoods import Likelihood


class Predicted(Pytree):
    """An average over draws of the networks, and how far they disagree."""

    mean: Array  # [b, c] probabilities of classes, or means of real labels
    std: Array  # [b, c] their standard deviation over draws: what more data would settle
    entropy: Array  # [b] of the averaged probabilities: the total uncertainty; NaN for real labels
    mutual_information: Array  # [b] the part of it that the networks' disagreement makes, >= 0; NaN for real labels

    @classmethod
    def of(cls, likelihood: Likelihood, values: Array) -> Predicted:
        """Summarise what every draw predicts, ``[draws, b, c]``."""
        mean, std = jnp.mean(values, axis=0), jnp.std(values, axis=0)
        if not likelihood.classes:
            nothing = jnp.full(mean.shape[:-1], jnp.nan, mean.dtype)
            return cls(mean, std, nothing, nothing)
        entropy = _entropy(mean)
        return cls(mean, std, entropy, jnp.maximum(entropy - jnp.mean(_entropy(values), axis=0), 0.0))


def _entropy(probabilities: Array) -> Array:
    return -jnp.sum(
        jnp.where(probabilities > 0, probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), 0.0), axis=-1
    )
