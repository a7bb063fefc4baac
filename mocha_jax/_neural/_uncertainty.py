"""What an average over draws of a network says, and how sure it is."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mocha_jax._pytree import Pytree
from mocha_jax.likelihoods import Likelihood


class Predicted(Pytree):
    """An average over draws of the networks, and how far they disagree."""

    mean: Array  # [b, c] probabilities of classes, or means of real labels
    spread: Array  # [b, c] their standard deviation over draws: what more data would settle
    entropy: Array  # [b] of the averaged probabilities: all that is not known; NaN for real labels
    information: Array  # [b] the part of it that the networks' disagreement makes, >= 0; NaN for real labels

    @classmethod
    def of(cls, likelihood: Likelihood, values: Array) -> Predicted:
        """From what every draw predicts, ``[draws, b, c]``."""
        mean, spread = jnp.mean(values, axis=0), jnp.std(values, axis=0)
        if not likelihood.classes:
            nothing = jnp.full(mean.shape[:-1], jnp.nan, mean.dtype)
            return cls(mean, spread, nothing, nothing)
        entropy = _entropy(mean)
        return cls(mean, spread, entropy, jnp.maximum(entropy - jnp.mean(_entropy(values), axis=0), 0.0))


def _entropy(probabilities: Array) -> Array:
    return -jnp.sum(
        jnp.where(probabilities > 0, probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), 0.0), axis=-1
    )
