r"""The node's side of VIRTUAL.

What comes down is the posterior s over the shared parameters. A node takes the factor out of it that the server holds
of it, $s_i^{held}$, refines its factor and its private parameters against the rest, and sends the **whole** new
factor: it replaces whatever the server holds, so that the posterior is the product of factors at all times, and an
answer that was lost leaves nothing behind in it. The private parameters stay here.

Which of its answers the server holds, a node learns with the next message: it remembers the factors of the last few.
Taking out any other one would leave a part of its own evidence in the rest, and count it twice. What was lost is not
dropped all the same: training begins from the node's latest factor, from the mean of $s\,s_i / s_i^{held}$, and from
its latest private parameters. So the work of a lost answer is not lost. Where it begins decides nothing about where a
refinement leads. Damping begins at the factor held, though: however many answers were lost, the posterior moves by
no more than it may.

Of a node that has not been heard, the server holds a power of the first density, and says which. That is known
whatever the node has done. A node that does not know the factor held, for it began from nothing or the server went
back further than it remembers, answers once with its factor and no work, and is whole from its next turn on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._core.pytree import Pytree, Tree
from mocha_jax._data.task_data import TaskData
from mocha_jax._neural.bayesian import each_of_count
from mocha_jax._neural.clients import at_once, over_clients
from mocha_jax._neural.gaussian import DiagonalGaussian
from mocha_jax._neural.prediction import Prediction
from mocha_jax._neural.refinement import Own
from mocha_jax._neural.virtual import Virtual
from mocha_jax.federated._dual_node import NOBODY, known_answers, misnumbered, place_of_next
from mocha_jax.federated._sides import Header, NodeSide, where
from mocha_jax.federated._training import problem_of, row_of, steps_of

# Answers whose factors a node keeps, the one held among them: at most so many less one may be under way at a time.
REMEMBERED = 4


class VirtualDown(Pytree):
    """The message of the server."""

    posterior: DiagonalGaussian  # [m, p] s
    clients: Array  # [m] int32 K, those with samples
    first: Array  # [m] power of the first density that stands for a node which has not been heard
    steps: Array  # [m] int32 how many to do; below 0 those of a full round


class VirtualUp(Pytree):
    """The answer of nodes."""

    factor: DiagonalGaussian  # [m, p] s_i, all of it
    loss: Array  # [m] mean over the training of the free energy for each sample; 0 without any
    refined: Array  # [m] int32 1 where it is the factor of a refinement that was finite
    diverged: Array  # [m] int32 1 where the refinement was not, and the factor is the one before it
    samples: Array  # [m] int32


class SentFactors(Pytree):
    """The answers that nodes have sent."""

    round: Array  # [m, k] int32; below 0: none
    factor: DiagonalGaussian  # [m, k, p]


class VirtualMine(Pytree):
    """The state that nodes keep between rounds."""

    factor: DiagonalGaussian  # [m, p] the latest; of a node that no message has reached anything
    private: DiagonalGaussian  # [m, q] c_i
    loss: Array  # [m] of the last training; infinite before any
    life: Array  # [m] int32 of the server that sent the last message; below 0: none has
    sent: SentFactors


class VirtualNodes(NodeSide):
    """Nodes that refine their factors and private parameters."""

    algorithm: Virtual
    problem: Prediction

    @classmethod
    def of(cls, algorithm: Virtual, data: TaskData, likelihood: object) -> VirtualNodes:
        whole_factors("Node", algorithm)
        return cls(algorithm, problem_of(algorithm, data, likelihood))

    def init(self) -> VirtualMine:
        m, dtype, k = self.problem.data.num_nodes, self.problem.data.dtype, REMEMBERED
        shared, own = self.algorithm.vectors(dtype)
        private = self.algorithm.first_state(jnp.ones((m,), bool), shared, own).private
        none, nobody = jnp.zeros((m, k, shared.size), dtype), jnp.full((m, k), NOBODY, jnp.int32)
        factor = DiagonalGaussian(none[:, 0], none[:, 0])
        return VirtualMine(
            factor,
            private,
            jnp.full((m,), jnp.inf, dtype),
            nobody[:, 0],
            SentFactors(nobody, DiagonalGaussian(none, none)),
        )

    def doubts(self, mine: VirtualMine, header: Header, down: VirtualDown) -> str:
        if why := misnumbered(mine.life, mine.sent.round, header):
            return why
        if down.clients < 1 or not 0 <= down.first <= 1:
            return f"sent {int(down.clients[0])} clients and a power of {float(down.first[0]):g} for those not heard"
        return "sent a posterior with a precision below 0" if np.min(down.posterior.precision) < 0 else ""

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> VirtualDown:
            m, dtype = self.problem.data.num_nodes, self.problem.data.dtype
            none = jnp.zeros((m, self.algorithm.vectors(dtype)[0].size), dtype)
            number = jnp.zeros((m,), jnp.int32)
            return VirtualDown(DiagonalGaussian(none, none), number, number.astype(dtype), number)

        return {"VirtualDown": jax.eval_shape(some)}

    def weights(self, mine: VirtualMine, down: VirtualDown) -> Any:
        to_shared, to_private, join = self.algorithm.apart(self.problem.data.dtype)
        return join(jax.vmap(to_shared)(down.posterior.mean), jax.vmap(to_private)(mine.private.mean))

    def work(
        self, key: Any, mine: VirtualMine, header: Header, down: VirtualDown
    ) -> tuple[VirtualMine, Array, VirtualUp]:
        data = self.problem.data
        shared, _ = self.algorithm.vectors(data.dtype)
        whole, each = self.algorithm.whole(shared), each_of_count(down.clients, data.dtype)
        rounds = known_answers(mine, header)
        silent = header.held == 0
        at = (rounds == header.held[:, None]) & ~silent[:, None]
        known = silent | jnp.any(at, axis=1)
        held = chosen(silent, powers(whole, down.first), picked(at, mine.sent.factor))
        # A node that no message has reached has no factor: it is what stands for it at the server.
        begun = chosen(known, held, powers(whole, each))
        latest = chosen(mine.life < 0, begun, mine.factor)
        own, refined, diverged = self._refined(key, mine, header, down, each, known, held, latest)
        same = jnp.all((latest.precision == held.precision) & (latest.shift == held.shift), axis=1)
        # Where it is not known, the server has nothing of what was remembered.
        sent = mine.sent.replace(round=jnp.where(known[:, None], rounds, NOBODY))
        sent = added(sent, at, header.round, own.factor)
        up = VirtualUp(own.factor, jnp.where(refined > 0, own.loss, 0.0), refined, diverged, data.sizes)
        since = jnp.where(known & same, header.held, NOBODY)
        return VirtualMine(own.factor, own.private, own.loss, header.life, sent), since, up

    def _refined(
        self, key: Any, mine: VirtualMine, header: Header, down: VirtualDown, each: Array, known: Array,
        held: DiagonalGaussian, latest: DiagonalGaussian,
    ) -> tuple[Own, Array, Array]:  # fmt: skip
        """Refine: all that is the nodes' own then, which refinements were finite ``[m]`` and which were not."""
        algorithm, problem, data = self.algorithm, self.problem, self.problem.data
        shared, own_like = algorithm.vectors(data.dtype)
        here = down.posterior * (latest / held)
        here = here.replace(precision=jnp.maximum(here.precision, latest.precision))  # but for rounding it is more
        begin = jnp.where(here.shift == 0, shared[None, :], here.mean)
        full = algorithm.full_work(problem)
        budget = jnp.where(known, steps_of(down.steps, full), 0)

        def client(
            key: Array, data: TaskData, place: Array, node: Array, budget: Array, row: tuple[Own, Array, Array]
        ) -> tuple[tuple[Own, Array, Array], tuple[()]]:
            own, _, _ = row
            posterior, factor = row_of(down.posterior, node), row_of(held, node)
            given = algorithm.inputs(key, posterior, begin[node], own_like, problem.likelihood, each[node])
            before = Own(factor, own.private, own.loss)
            new, answer = algorithm.refine(given, data, place, header.task[node], budget, before, own.factor)
            factor = jax.tree.map(lambda a, b: jnp.where(answer.good > 0, a, b), new.factor, own.factor)
            return (Own(factor, new.private, new.loss), answer.good, answer.bad), ()

        none = jnp.zeros((data.num_nodes,), jnp.int32)
        row = Own(latest, mine.private, mine.loss), none, none
        return over_clients(
            data, budget, at_once(algorithm.at_once), client, key, row, ()
        )[0]  # fmt: skip


def whole_factors(owner: str, algorithm: Virtual) -> None:
    """Raise where clients are to send parts of their factors."""
    if algorithm.sent != 1.0:
        raise ValueError(
            f"{owner}: nodes send the whole factor, so that an answer makes up for those that were lost; use Virtual "
            f"with sent=1.0, got {algorithm.sent:g}."
        )


def powers(gaussian: DiagonalGaussian, power: Array) -> DiagonalGaussian:
    """One Gaussian ``[p]`` to the powers of all nodes ``[m]``, ``[m, p]``."""
    return DiagonalGaussian(power[:, None] * gaussian.precision[None, :], power[:, None] * gaussian.shift[None, :])


def chosen(mask: Array, new: DiagonalGaussian, old: DiagonalGaussian) -> DiagonalGaussian:
    """The new ones of some nodes, and the old ones of the others."""
    return DiagonalGaussian(where(mask, new.precision, old.precision), where(mask, new.shift, old.shift))


def picked(at: Array, factors: DiagonalGaussian) -> DiagonalGaussian:
    """Pick the factors that are marked ``[m, k]``, at most one of each node; 0 where none is."""
    return jax.tree.map(lambda a: jnp.sum(jnp.where(at[:, :, None], a, 0.0), axis=1), factors)


def added(sent: SentFactors, held: Array, round: Array, factor: DiagonalGaussian) -> SentFactors:
    """Put another answer in place of the oldest, but not of the one that the server holds, marked ``[m, k]``."""
    here = place_of_next(sent.round, held)
    factors = jax.tree.map(lambda a, new: jnp.where(here[:, :, None], new[:, None, :], a), sent.factor, factor)
    return SentFactors(jnp.where(here, round[:, None], sent.round), factors)
