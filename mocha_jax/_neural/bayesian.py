"""Networks with Gaussians over their parameters: conversion of vectors to parameters, and predictions over draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import static
from mocha_jax._neural.gaussian import Gaussian, draw
from mocha_jax._neural.posterior import VirtualState
from mocha_jax._neural.prediction import Judge, Prediction
from mocha_jax._neural.refinement import Apart
from mocha_jax._neural.trainer import Trainer, known_client, samples
from mocha_jax._neural.uncertainty import Predicted
from mocha_jax.networks import Params, Parts
from mocha_jax.networks._base import outputs

# Folded into the key of the draws that predictions average over.
_PREDICTING = np.uint32(2**32 - 1)


class BayesianTrainer(Trainer):
    """A trainer whose state is a `VirtualState`: Gaussians over shared and private parameters, as vectors.

    Args:
      draws: networks that predictions average over.
    """

    carries = VirtualState

    draws: int = static(default=10, kw_only=True)

    def vectors(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """The first parameters, shared ``[p]`` and private ``[q]``."""
        shared, private = _parts(self.begin(dtype))
        return ravel_pytree(shared)[0].astype(dtype), ravel_pytree(private)[0].astype(dtype)

    def apart(self, dtype: DTypeLike) -> Apart:
        """Return functions from vectors to shared and private parameters, and from both to the model's."""
        shapes = jax.eval_shape(lambda: self.begin(dtype))
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        shared, private = (ravel_pytree(part)[1] for part in _parts(zeros))
        return shared, private, Parts if isinstance(shapes, Parts) else lambda shared, private: shared

    @on_purpose
    def predict(
        self, state: VirtualState, problem: Prediction, node: Array | int, x: Array, key: Array | None = None
    ) -> Predicted:
        """A client's predictions, averaged over draws of its network, and their uncertainty.

        Args:
          state: e.g. ``solution.state``.
          problem: of the solve.
          node: which client.
          x: samples ``[b, d]``, as the network sees them: of sequences the inputs ``[b, T]``.
          key: of the draws; default one that depends on `seed`.
        """
        self.expect_both(state, problem)
        if key is not None:
            check.key("Virtual", key)
        values = self._draws(state, problem, known_client(self, problem, node), samples(self, problem, x), key)
        return Predicted.of(problem.likelihood, values)

    def _draws(self, state: VirtualState, problem: Prediction, node: Array, x: Array, key: Array | None) -> Array:
        """Return the predictions of every draw that may be averaged, ``[draws, b, c]``."""
        labels = problem.seen(len(x))[1].shape
        if key is None:
            key = jax.random.fold_in(jax.random.key(jnp.asarray(self.seed, jnp.uint32)), _PREDICTING)
        own = _row(state.private, node)
        to_shared, to_private, join = self.apart(problem.data.dtype)

        def one(i: Array) -> Array:
            keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, i), node))
            shared = draw(keys[0], state.mean, state.posterior.scale, to_shared)
            params = join(shared, draw(keys[1], own.mean, own.scale, to_private))
            return problem.likelihood.predictive(outputs(self.model, params, x, labels))

        return jax.vmap(one)(jnp.arange(self.draws, dtype=jnp.uint32))

    def judge(self, state: VirtualState, problem: Prediction) -> Judge:
        def judged(client: Array, x: Array, y: Array) -> tuple[Array, Array]:
            return problem.likelihood.mixed(jnp.mean(self._draws(state, problem, client, x, None), axis=0), y)

        return judged

    def weights(self, state: VirtualState) -> Any:
        """The means as the model wants them, arrays of clients' own parts with a leading axis of clients, ``[m, ...]``.

        Of one client they are `parameters`.
        """
        to_shared, to_private, join = self.apart(state.first.dtype)
        return join(to_shared(state.mean), jax.vmap(to_private)(state.private.mean))

    def parameters(self, state: VirtualState, problem: Prediction, node: Array | int) -> Any:
        """The means as the model wants them, for one client."""
        to_shared, to_private, join = self.apart(problem.data.dtype)
        own = _row(state.private, known_client(self, problem, node))
        return join(to_shared(state.mean), to_private(own.mean))


def _row(gaussian: Gaussian, client: Array) -> Gaussian:
    return Gaussian(gaussian.precision[client], gaussian.shift[client])


def _parts(params: Params) -> Parts:
    return params if isinstance(params, Parts) else Parts(params, ())
