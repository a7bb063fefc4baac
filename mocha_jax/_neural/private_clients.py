"""Privacy of whole clients: those of a round by chance, their changes cut to a length, noise on their sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, PyTree, Pytree, Tree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.client import Client
from mocha_jax._neural.composed import Composed, Sampling
from mocha_jax._neural.method import Answer, Beginning, Declared, Method, ServerParts, ServerRound
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.training_state import Heard, Sent, TrainingState
from mocha_jax._neural.trees import scaled
from mocha_jax._numerics.math import safe_ratio, uniform_bits
from mocha_jax.networks import Params
from mocha_jax.systems import System
from mocha_jax.systems._base import Info, Request, Work

# Folded into a round's key for the secret that its noise is drawn by.
_SECRET = np.uint32(2**32 - 7)

# Folded into a secret for the one after it.
_LATER = np.uint32(2**32 - 8)

# The generator of the noise, whatever the default one is, and the 32-bit words of its key.
_GENERATOR, _WORDS = "threefry2x32", 2


class QuantileClip(Pytree):
    r"""A length for clipping that follows a quantile of the lengths of the clients' changes.

    Every client says besides its change whether it is no longer than C. The server adds noise to the number of those,
    divides it by the number of clients that it expects, and moves

    $$
    C \leftarrow C \exp\bigl(-\eta(\tilde b - \gamma)\bigr).
    $$

    That costs no privacy: the noise z of `ClientLevel` is shared out between the changes and the
    numbers, $z^{-2} = z_\Delta^{-2} + (2\sigma_b)^{-2}$.

    Args:
      share: $\gamma$, the share of clients whose change is to stay uncut.
      first: C before the first round.
      rate: $\eta$.
      noise: standard deviation of $\tilde b$; $\sigma_b$ is at least z, with which $z_\Delta$ is 1.155 z at most.

    References:
      - [Andrew et al., Differentially Private Learning with Adaptive Clipping](https://arxiv.org/abs/1905.03871), 2021,
        Algorithm 1.
    """

    share: Hyperparameter = 0.5
    first: Hyperparameter = 0.1
    rate: Hyperparameter = 0.2
    noise: Hyperparameter = 0.05

    def __post_init__(self) -> None:
        check.in_unit_interval("QuantileClip", share=self.share)
        check.positive("QuantileClip", first=self.first, noise=self.noise)
        check.nonnegative("QuantileClip", rate=self.rate)
        check.scalar("QuantileClip", share=self.share, first=self.first, rate=self.rate, noise=self.noise)


class ClientLevel(Pytree):
    r"""Federated averaging with a bound on what the model says of any one client.

    In a round every client takes part with probability q, by itself. Its change $u_k$ is cut to length C, all clients
    count the same, and the server divides by the number of the m clients that it expects:

    $$
    g = \frac{1}{qm}\Bigl(\sum_k \min\bigl(1, C/\lVert u_k\rVert\bigr)\,u_k + \mathcal N(0, z^2C^2 I)\Bigr).
    $$

    One client more or less, with all its samples, changes the distribution of all models of a run as much
    as so many Poisson-sampled Gaussian mechanisms with noise z do, whatever the others do; m is taken to be public. The
    server is trusted: it sees every change. What a client keeps for itself, as a personal model, is not covered when
    it is shown to others. After so many rounds the server's model stays as it is.

    Args:
      noise: z.
      rounds: in which the server's model may change.
      clip: C, or a `QuantileClip`.

    References:
      - [McMahan et al., Learning Differentially Private Recurrent Language Models](https://arxiv.org/abs/1710.06963),
        2018, Algorithm 1, with all weights 1 and the fixed denominator.
    """

    noise: Hyperparameter
    rounds: int = static()
    clip: Hyperparameter | QuantileClip = 1.0

    def __post_init__(self) -> None:
        check.nonnegative("ClientLevel", noise=self.noise)
        check.scalar("ClientLevel", noise=self.noise)
        check.integer("ClientLevel", 0, rounds=self.rounds)
        if not isinstance(self.clip, QuantileClip):
            check.positive("ClientLevel", clip=self.clip)
            check.scalar("ClientLevel", clip=self.clip)

    @property
    def numbers(self) -> dict[str, Hyperparameter]:
        """The numbers of the method, by name."""
        clip = self.clip
        if not isinstance(clip, QuantileClip):
            return {"client_noise": self.noise, "first_clip": clip}
        of_quantile = {"quantile": clip.share, "quantile_rate": clip.rate, "quantile_noise": clip.noise}
        return {"client_noise": self.noise, "first_clip": clip.first, **of_quantile}


class PrivateClients(Sampling):
    """An algorithm that is private at the level of clients; the server's optimizer sees the noisy average alone."""

    algorithm: Sampling = dataclasses.field(kw_only=True)
    level: ClientLevel = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, algorithm: Sampling, level: ClientLevel) -> Self:
        """Make an algorithm private, with the settings that it has."""
        return cls(**algorithm.settings, algorithm=algorithm, level=level)

    def declared(self) -> Declared:
        plain = self.algorithm.declared()
        numbers = {**plain.numbers, **self.level.numbers, "fraction": self.fraction}
        method = _protected(plain.method, self.level.rounds)
        return plain._replace(method=method, numbers=numbers, optimizer=self.server_optimizer)

    def with_method(self, method: Method) -> Composed:
        raise ValueError(
            "privacy of clients rests on the sum of their changes: it cannot be compressed, nor combined by a rule."
        )

    def select_nodes(self, systems: System) -> System:
        if isinstance(self.fraction, int | float) and self.fraction == 1:
            return systems
        return systems & ByCoin(self.fraction)

    def step(self, key: Array, state: TrainingState, problem: Prediction, work: Work) -> tuple[TrainingState, Info]:
        # Every round has a secret of its own, here of the run's key.
        secret = jax.random.bits(jax.random.fold_in(key, _SECRET), (_WORDS,), jnp.uint32)
        steps = jnp.where(state.kept.used < self.level.rounds, work.steps, 0)
        return super().step(key, with_secret(state, secret), problem, work.exchange(steps=steps))

    def heard(self, state: TrainingState, heard: Heard, sent: Sent, weights: Array) -> TrainingState:
        # A round without any answer has its noise, too, and nothing is told of how many there were.
        one, none = jnp.ones_like(heard.weight), jnp.zeros_like(heard.diverged)
        return super().heard(state, heard._replace(weight=one, diverged=none), sent, weights)

    def exhausted(self, state: TrainingState, problem: Prediction) -> Array:
        some = jnp.sum(problem.data.sizes > 0, dtype=jnp.int32)
        return jnp.where(state.kept.used < self.level.rounds, super().exhausted(state, problem), some)

    def reported(self, loss: Array) -> Array:
        return jnp.full_like(loss, jnp.nan)

    def secret(self, state: TrainingState) -> Array:
        """The key of a state's secret, by which the clients of the next round are chosen where messages go."""
        return jax.random.wrap_key_data(state.kept.secret, impl=_GENERATOR)


def with_secret(state: TrainingState, secret: Array) -> TrainingState:
    """The state with another secret, ``[2]`` uint32."""
    return state.exchange(kept=state.kept._replace(secret=secret))


class ByCoin(System):
    """A system in which every node takes part with the same probability, by itself: perhaps none of them."""

    share: Hyperparameter

    def work(self, key: Array, data: TaskData, request: Request) -> Work:
        share = jnp.asarray(self.share, data.dtype)
        bits = uniform_bits(jax.random.fold_in(key, request.round), len(request.steps))
        # Rounded down: a client is not asked more often than the accountant believes.
        below = bits < jnp.floor(share * np.asarray(2.0**32, data.dtype)).astype(jnp.uint32)
        return Work(request.steps, below | (share >= 1))


class Limited(NamedTuple):
    """The message to clients: the trees of the method, and the length that a change may have."""

    model: PyTree
    clip: Array  # [] C


class Kept(NamedTuple):
    """The trees that stay at the server."""

    own: PyTree  # of the method
    secret: Array  # [2] uint32 key of the noise
    used: Array  # [] int32 rounds in which the model has changed


class Clipped(NamedTuple):
    """The answer of a client, which the server sums up."""

    change: PyTree
    within: Array  # [] 1/2 where the change is no longer than C, -1/2 where it was cut


def _protected(method: Method, rounds: int) -> Method:
    """The functions of a method, with clipped answers and noise."""
    personal, joins, ready = method.personal_model, method.joins, method.ready
    return method._replace(
        start=_Start(method), client=_ClippedClient(method), server=_NoisyServer(method, rounds),
        sends=_ClippedShapes(method), global_model=_LimitedGlobal(method.global_model),
        personal_model=None if personal is None else _LimitedPersonal(personal),
        joins=None if joins is None else _LimitedJoins(joins), ready=None if ready is None else _LimitedReady(ready),
    )  # fmt: skip


@dataclass(frozen=True)
class _Start:
    """The server's first trees."""

    method: Method

    def __call__(self, b: Beginning) -> ServerParts:
        plain = self.method.start(b)
        kept = Kept(plain.kept, jnp.zeros((_WORDS,), jnp.uint32), jnp.zeros((), jnp.int32))
        return ServerParts(Limited(plain.shared, b.numbers["first_clip"]), plain.rows, kept)


@dataclass(frozen=True)
class _ClippedClient:
    """A client's round."""

    method: Method

    def __call__(self, c: Client, own: Tree) -> tuple[PyTree, Answer]:
        kept, answer = self.method.client(c._replace(shared=c.shared.model), own)
        change = scaled(safe_ratio(jnp.ones_like(c.weight), c.weight), answer.total)
        length = jnp.sqrt(jnp.asarray(sum(jnp.sum(a**2) for a in jax.tree.leaves(change))))
        cut = jnp.minimum(1.0, safe_ratio(c.shared.clip, length))
        within = jnp.where(length <= c.shared.clip, 0.5, -0.5).astype(length.dtype)
        return kept, Answer(Clipped(scaled(cut, change), within), loss=answer.loss)


@dataclass(frozen=True)
class _ClippedShapes:
    """The shapes of such answers."""

    method: Method

    def __call__(self, shared: Limited, row: Tree) -> Answer:
        like = Answer(shared.model) if self.method.sends is None else self.method.sends(shared.model, row)
        shapes, sums = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (shared.model, like.total))
        if jax.tree.leaves((row, like.row)) or shapes != sums:
            raise ValueError("private_clients: the algorithm's server hears more than a sum of vectors like its own.")
        return Answer(Clipped(like.total, jnp.zeros_like(shared.clip)))


@dataclass(frozen=True)
class _NoisyServer:
    """The server's round, on a noisy sum; of the clients that answered it knows no more."""

    method: Method
    rounds: int

    def __call__(self, s: ServerRound) -> ServerParts:
        shared, kept = s.parts.shared, s.parts.kept
        real = (s.weights > 0).astype(s.weights.dtype)
        expected = s.numbers["fraction"] * jnp.sum(real)
        noise, count_noise = _shared_out(s, expected)
        key = jax.random.wrap_key_data(kept.secret, impl=_GENERATOR)

        def noisy(i: int, total: Array, deviation: Array) -> Array:
            return total + deviation * jax.random.normal(jax.random.fold_in(key, i), total.shape, total.dtype)

        leaves, form = jax.tree.flatten(s.total.change)
        total = jax.tree.unflatten(form, [noisy(i + 1, a, noise * shared.clip) for i, a in enumerate(leaves)])
        after = self.method.server(
            s._replace(parts=ServerParts(shared.model, s.parts.rows, kept.own), total=total, sent=(),
                       answered=real > 0, weight=expected, weights=real)
        )  # fmt: skip
        clip = shared.clip
        if "quantile" in s.numbers:
            within = 0.5 + safe_ratio(noisy(0, s.total.within, count_noise), expected)
            clip = clip * jnp.exp(-s.numbers["quantile_rate"] * (within - s.numbers["quantile"]))
        # Who reads the state later learns nothing of the noise up to now.
        later = jax.random.key_data(jax.random.fold_in(key, _LATER))
        parts = ServerParts(Limited(after.shared, clip), after.rows, Kept(after.kept, later, kept.used + 1))
        return jax.tree.map(partial(jnp.where, kept.used < self.rounds), parts, s.parts)


def _shared_out(s: ServerRound, expected: Array) -> tuple[Array, Array]:
    """The noise on the changes over C, and on the number of those within it: together as much as z on one alone."""
    noise = s.numbers["client_noise"]
    if "quantile" not in s.numbers:
        return noise, jnp.zeros_like(noise)
    of_count = jnp.maximum(s.numbers["quantile_noise"] * expected, noise)
    return noise / jnp.sqrt(1.0 - (0.5 * safe_ratio(noise, of_count)) ** 2), of_count


@dataclass(frozen=True)
class _LimitedJoins:
    """The trees of a client that comes later."""

    joins: Callable[[PyTree, PyTree, PyTree], PyTree]

    def __call__(self, shared: Limited, row: Tree, first: Tree) -> PyTree:
        return self.joins(shared.model, row, first)


@dataclass(frozen=True)
class _LimitedReady:
    """The trees that are made ready at a client."""

    ready: Callable[[Client, PyTree], PyTree]

    def __call__(self, c: Client, own: Tree) -> PyTree:
        return self.ready(c._replace(shared=c.shared.model), own)


@dataclass(frozen=True)
class _LimitedGlobal:
    """The parameters that predict for all clients."""

    model: Callable[[PyTree, PyTree], Params] | None

    def __call__(self, shared: Limited, kept: PyTree) -> Params:
        own = kept.own if isinstance(kept, Kept) else kept
        return shared.model if self.model is None else self.model(shared.model, own)


@dataclass(frozen=True)
class _LimitedPersonal:
    """The parameters that predict for one client."""

    model: Callable[[PyTree, PyTree, PyTree], Params]

    def __call__(self, shared: Limited, row: Tree, own: Tree) -> Params:
        return self.model(shared.model, row, own)
