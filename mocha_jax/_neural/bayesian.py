"""Networks with Gaussians over their parameters: conversion of vectors to parameters, and predictions over draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._algorithms.base import State
from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import PyTree, static
from mocha_jax._neural.gaussian import DiagonalGaussian, draw
from mocha_jax._neural.prediction import Judge, Predicted, Prediction
from mocha_jax._neural.refinement import Apart, Own, RefinementAnswer
from mocha_jax._neural.trainer import Trainer, failures, known_client, mean_of_known, samples
from mocha_jax.networks import Params, SplitParameters
from mocha_jax.networks._base import outputs

# Rounds after which the posterior is multiplied up afresh from its factors, against the drift of sums and differences.
_REFRESH_EVERY = 64


class VirtualState(State):
    """The state of VIRTUAL between rounds; parameters are vectors, p shared ones and q private ones of each client."""

    posterior: DiagonalGaussian  # [p] s over the shared parameters
    factors: DiagonalGaussian  # [m, p] s_i of every client
    private: DiagonalGaussian  # [m, q] c_i over every client's own parameters
    first: Array  # [p] shared parameters to begin with before any client has learned
    losses: Array  # [m] mean over its last training of the free energy for each sample; infinite before any
    diverged: Array  # [] int32 refinements left out so far because they were not finite
    failed: Array  # [] int32 of them in a row, up to now

    @property
    def loss(self) -> Array:
        """Mean over the clients that have been refined."""
        return mean_of_known(self.losses)

    @property
    def mean(self) -> Array:
        """The mean of the posterior; before any answer, where training begins."""
        return jnp.where(self.posterior.shift == 0, self.first, self.posterior.mean)

    def heard(self, own: Own, total: RefinementAnswer) -> VirtualState:
        """The server's part of a round: the state after it.

        Args:
          own: of every client, ``[m, ...]``.
          total: of all answers.
        """
        round = self.round + 1
        posterior = lax.cond(
            round % _REFRESH_EVERY == 0, lambda: product(own.factor), lambda: self.posterior * total.change
        )
        return VirtualState(
            round, posterior, own.factor, own.private, self.first, own.loss, self.diverged + total.bad,
            failures(self.failed, total.good, total.bad),
        )  # fmt: skip

    def pruned(self, share: ArrayLike) -> VirtualState:
        r"""The state without the parameters that are least sure not to be 0, to predict with.

        Of the shared parameters, and of every client's own, those with the least ratio of signal to noise,
        $|\mu_d| / \sigma_d$ (Blundell et al. 2015), become exactly 0: their precision is infinite. They stay 0, and a
        refinement that begins so is not finite and is left out.

        Args:
          share: of the parameters to leave out, in [0, 1); an array leaf, may be traced and mapped over.

        Examples:
          >>> import jax, numpy as np, optax, mocha_jax as mj
          >>> xs = np.random.default_rng(0).normal(size=(4, 30, 5))
          >>> problem = mj.Prediction(mj.pack_tasks(list(xs), [x[:, 0] > 0 for x in xs], dtype="float32"))
          >>> virtual = mj.Virtual(mj.networks.Lateral(5, 2, (8,)), optax.adam(1e-2), samples=2)
          >>> state, _ = mj.run(problem, virtual, jax.random.key(0), num_rounds=4)
          >>> sparse = state.pruned(0.75)
          >>> float((sparse.mean == 0).mean()), virtual.predict(sparse, problem, 0, problem.data.x[0]).mean.shape
          (0.75, (30, 2))
        """
        check.scalar("VirtualState.pruned", share=share)
        check.in_unit_interval("VirtualState.pruned", open_right=True, share=share)
        share = jnp.asarray(share, self.first.dtype)
        now = DiagonalGaussian.of(self.mean, self.posterior.precision)
        kept = now.prominent(share)
        posterior, private = now.where(kept), self.private.where(self.private.prominent(share))
        return self.replace(posterior=posterior, private=private, first=jnp.where(kept, self.first, 0.0))


def each_of(real: Array, dtype: DTypeLike) -> Array:
    """One over the number of clients with data, which ``[m]`` marks, []."""
    return each_of_count(jnp.sum(real, dtype=jnp.int32), dtype)


def each_of_count(clients: Array, dtype: DTypeLike) -> Array:
    """One over numbers of clients."""
    return 1.0 / jnp.maximum(clients.astype(dtype), 1.0)


def product(factors: DiagonalGaussian) -> DiagonalGaussian:
    """The product of the factors of all clients, ``[m, p]`` to ``[p]``."""
    return DiagonalGaussian(jnp.sum(factors.precision, axis=0), jnp.sum(factors.shift, axis=0))


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
        return (
            shared,
            private,
            SplitParameters if isinstance(shapes, SplitParameters) else lambda shared, private: shared,
        )

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

    def weights(self, state: VirtualState) -> PyTree:
        """The means as the model wants them, arrays of clients' own parts with a leading axis of clients, ``[m, ...]``.

        Of one client they are `parameters`.
        """
        to_shared, to_private, join = self.apart(state.first.dtype)
        return join(to_shared(state.mean), jax.vmap(to_private)(state.private.mean))

    def parameters(self, state: VirtualState, problem: Prediction, node: Array | int) -> PyTree:
        """The means as the model wants them, for one client."""
        to_shared, to_private, join = self.apart(problem.data.dtype)
        own = _row(state.private, known_client(self, problem, node))
        return join(to_shared(state.mean), to_private(own.mean))


def _row(gaussian: DiagonalGaussian, client: Array) -> DiagonalGaussian:
    return DiagonalGaussian(gaussian.precision[client], gaussian.shift[client])


def _parts(params: Params) -> SplitParameters:
    return params if isinstance(params, SplitParameters) else SplitParameters(params, ())
