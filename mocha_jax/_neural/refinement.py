r"""One client's refinement in VIRTUAL: the trained vectors, and the Gaussians that they represent.

The optimizer sees the logarithm of the precision of $s_i^{new}$, to which that of $s / s_i$, a sum
of positive numbers, is added: every trained vector represents densities.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.clients import Batch, Schedule, train
from mocha_jax._neural.gaussian import DiagonalGaussian, divergence, draw
from mocha_jax._neural.trainer import all_finite, mean_loss
from mocha_jax.likelihoods import Likelihood
from mocha_jax.networks import Network, Params

# Functions from vectors to shared and private parameters, and from both to the model's.
Apart = tuple[Callable[[Array], Params], Callable[[Array], Params], Callable[[Params, Params], Params]]


class How(NamedTuple):
    """The settings of a refinement; static."""

    model: Network
    apart: Apart  # see `BayesianTrainer.apart`
    noise: str
    samples: int
    sent: float
    schedule: Schedule
    optimizer: optax.GradientTransformation


class RefinementInputs(NamedTuple):
    """The inputs of a client in a round."""

    key: Array
    posterior: DiagonalGaussian  # [p] s
    begin: Array  # [p] shared parameters to begin with
    likelihood: Likelihood
    prior: DiagonalGaussian  # [p] p_i, the client's share of the shared prior
    own_prior: DiagonalGaussian  # [q]
    damping: Array  # []
    first: Array  # [] precision of the factor to begin with
    temperature: Array  # []
    rate: Array  # []


class Own(NamedTuple):
    """The state of one client."""

    factor: DiagonalGaussian  # [p] s_i
    private: DiagonalGaussian  # [q] c_i
    loss: Array  # [] mean over its last training of the free energy for each sample; infinite before any


class RefinementAnswer(NamedTuple):
    """A refinement as the server counts it; it needs only the product of the changes, and sums, over clients."""

    change: DiagonalGaussian  # [p] s_i^new / s_i
    good: Array  # [] int32 1 where it was finite
    bad: Array  # [] int32 1 where it was not, and was left out


def no_answer(shared: Array) -> RefinementAnswer:
    """Return the neutral answer, for parameters such as these ``[p]``."""
    none = jnp.zeros((), jnp.int32)
    return RefinementAnswer(DiagonalGaussian(jnp.zeros_like(shared), jnp.zeros_like(shared)), none, none)


class TrainedVectors(NamedTuple):
    """The parameters that a client's optimizer sees."""

    mean: Array  # [p] of s
    log_precision: Array  # [p] of s_i, not of s
    own_mean: Array  # [q]
    own_log_precision: Array  # [q]


class Refinement(NamedTuple):
    """The quantities that stay fixed while a client trains."""

    rest: DiagonalGaussian  # [p] s / s_i, the factors of the others
    prior: DiagonalGaussian  # [p] p_i, the client's share of the shared prior
    own_prior: DiagonalGaussian  # [q]

    @classmethod
    def of(
        cls, posterior: DiagonalGaussian, factor: DiagonalGaussian, prior: DiagonalGaussian, own_prior: DiagonalGaussian
    ) -> Refinement:
        """Take the client's factor out; rounding must not take what is a sum of positive numbers below 0."""
        rest = posterior / factor
        return cls(rest.replace(precision=jnp.maximum(rest.precision, 0.0)), prior, own_prior)

    def begin(
        self, mean: Array, factor: DiagonalGaussian, own: DiagonalGaussian, first: Array, fresh: Array
    ) -> TrainedVectors:
        """Begin from the client's last answer, or where it is `fresh` with a first precision."""
        fresh = fresh | (factor.precision <= 0)
        logs = jnp.where(fresh, jnp.log(first), jnp.log(jnp.where(fresh, 1.0, factor.precision)))
        return TrainedVectors(mean, logs, own.mean, jnp.log(own.precision))

    def posterior(self, v: TrainedVectors) -> DiagonalGaussian:
        """Over the shared parameters, s."""
        return DiagonalGaussian.of(v.mean, jnp.exp(v.log_precision) + self.rest.precision)

    def own(self, v: TrainedVectors) -> DiagonalGaussian:
        """Over the client's own parameters, c_i."""
        return DiagonalGaussian.of(v.own_mean, jnp.exp(v.own_log_precision))

    def factor(self, v: TrainedVectors) -> DiagonalGaussian:
        """The client's factor, s_i."""
        return DiagonalGaussian(jnp.exp(v.log_precision), (self.posterior(v) / self.rest).shift)

    def divergences(self, v: TrainedVectors) -> Array:
        """Both divergences of the free energy (3)."""
        return divergence(self.posterior(v), self.prior * self.rest) + divergence(self.own(v), self.own_prior)


def refine(
    how: How,
    inputs: RefinementInputs,
    data: TaskData,
    place: Array,
    node: Array,
    budget: Array,
    own: Own,
    latest: DiagonalGaussian,
) -> tuple[Own, RefinementAnswer]:
    """One client's refinement.

    Args:
      how: settings.
      inputs: for this round.
      data: has the client's samples.
      place: [] int32 where.
      node: [] int32 the client's number among all.
      budget: [] int32 steps to do.
      own: with the factor that the posterior has in it.
      latest: the factor to begin with.
    """
    refinement = Refinement.of(inputs.posterior, own.factor, inputs.prior, inputs.own_prior)
    to_shared, to_private, join = how.apart
    total = jnp.sum(data.weight[place])

    def loss(v: TrainedVectors, batch: Batch, key: Array) -> Array:
        scale, own_scale = refinement.posterior(v).scale, refinement.own(v).scale

        def one(key: Array) -> Array:
            keys = jax.random.split(key, 3)
            params = join(
                draw(keys[0], v.mean, scale, to_shared, how.noise),
                draw(keys[1], v.own_mean, own_scale, to_private, how.noise),
            )
            return mean_loss(how.model, inputs.likelihood, params, batch, keys[2])

        expected = jnp.mean(jax.vmap(one)(jax.random.split(key, how.samples)))
        return expected + inputs.temperature * refinement.divergences(v) / total

    start = refinement.begin(inputs.begin, latest, own.private, inputs.first, jnp.isinf(own.loss))
    done = train(jax.random.fold_in(inputs.key, node), data, place, data.weight[place], budget, how.schedule,
                 how.optimizer, jax.value_and_grad(loss), start, how.optimizer.init(start), inputs.rate)  # fmt: skip
    factor = own.factor ** (1.0 - inputs.damping) * refinement.factor(done.params) ** inputs.damping
    if how.sent < 1.0:
        factor = most_of(how.sent, own.factor, factor, inputs.posterior)
    new = Own(factor, refinement.own(done.params), done.loss)
    finite = all_finite(new)
    new = jax.tree.map(partial(jnp.where, finite), new, own)
    return new, RefinementAnswer(new.factor / own.factor, finite.astype(jnp.int32), (~finite).astype(jnp.int32))


def most_of(
    share: float, old: DiagonalGaussian, new: DiagonalGaussian, posterior: DiagonalGaussian
) -> DiagonalGaussian:
    """The new factor where the posterior moves by most of its standard deviations, the old one elsewhere."""
    moved = posterior * (new / old)
    size = jnp.abs(moved.mean - posterior.mean) * jnp.sqrt(posterior.precision)
    choice = size >= jnp.quantile(size, 1.0 - share)
    return jax.tree.map(partial(jnp.where, choice), new, old)
