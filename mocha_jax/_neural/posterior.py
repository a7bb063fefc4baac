"""The state of VIRTUAL: Gaussians over the shared parameters and over each client's private ones."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from mocha_jax._algorithms.base import State
from mocha_jax._core import check
from mocha_jax._neural.gaussian import Gaussian
from mocha_jax._neural.refinement import Answer, Own
from mocha_jax._neural.trainer import failures, mean_of_known

# Rounds after which the posterior is multiplied up afresh from its factors, against the drift of sums and differences.
_REFRESH_EVERY = 64


class VirtualState(State):
    """The state of VIRTUAL between rounds; parameters are vectors, p shared ones and q private ones of each client."""

    posterior: Gaussian  # [p] s over the shared parameters
    factors: Gaussian  # [m, p] s_i of every client
    private: Gaussian  # [m, q] c_i over every client's own parameters
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

    def heard(self, own: Own, total: Answer) -> VirtualState:
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
        now = Gaussian.of(self.mean, self.posterior.precision)
        kept = now.prominent(share)
        posterior, private = now.where(kept), self.private.where(self.private.prominent(share))
        return self.replace(posterior=posterior, private=private, first=jnp.where(kept, self.first, 0.0))


def each_of(real: Array, dtype: DTypeLike) -> Array:
    """One over the number of clients with data, which ``[m]`` marks, []."""
    return each_of_count(jnp.sum(real, dtype=jnp.int32), dtype)


def each_of_count(clients: Array, dtype: DTypeLike) -> Array:
    """One over numbers of clients."""
    return 1.0 / jnp.maximum(clients.astype(dtype), 1.0)


def product(factors: Gaussian) -> Gaussian:
    """The product of the factors of all clients, ``[m, p]`` to ``[p]``."""
    return Gaussian(jnp.sum(factors.precision, axis=0), jnp.sum(factors.shift, axis=0))
