"""The node's side of the adaptive server: it remembers a few dual points, and mixes them as it is told.

The server knows of every point its dual vector and its slope, see `mocha_jax.servers._adaptive`; the points stay here.
What a node found in a round counts once the server has weighed it, which a later message says. Until then it starts
from where it stood, and keeps what it found in its last few answers: which of them arrived, and when, it cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mocha_jax._algorithms.mocha import Mocha
from mocha_jax._core.pytree import Pytree, Tree, static
from mocha_jax._data.task_data import TaskData
from mocha_jax._problem.certificate import DualTerms, dual_terms, gap_terms
from mocha_jax.federated._dual_node import NOBODY, REMEMBERED, DualDown, DualMine, DualNodes, DualUp, odd
from mocha_jax.federated._sides import Header, NodeSide
from mocha_jax.losses import Loss
from mocha_jax.servers._adaptive import mixed_duals, slopes


class AdaptiveDown(Pytree):
    """The message of the adaptive server."""

    start: Array  # [m, d] the weights from which the nodes start, which are those to be certified
    curvature: Array  # [m]
    steps: Array  # [m] int32 how many to do; below 0 those of a full round
    weights: Array  # [m, p] of the points: where a node stood, what it found in its last answer, what it remembers
    slot: Array  # [m] int32 which point it forgets for the one found; below 0: none


class AdaptiveUp(Pytree):
    """The answer of the adaptive server's nodes."""

    vector: Array  # [m, d] the dual vector of what was found; of a node that begins anew, of where it stands
    share: Array  # [m] of a full round's work
    gap: Array  # [m] data terms of the gap of the model, with the duals where the node stands
    value: Array  # [m] losses of the model
    slope: Array  # [m, p - 1] of all points but the first
    stands: DualTerms  # of the duals where it stands
    found: DualTerms  # of those that it found
    anew: Array  # [m] int32 1: it does not have the points that the server knows, and has none but where it stands
    samples: Array  # [m] int32


class Points(Pytree):
    """The dual points of nodes."""

    found: Array  # [m, k, n] in the last answers, which the server has not weighed as far as is known
    answer: Array  # [m, k] int32 the rounds of those answers; below 0: none
    memory: tuple[Array, ...]  # [m, n] older ones
    mixed: Array  # [m] int32 the round of the last answer that the server has weighed; 0 before the first


class AdaptiveMine(Pytree):
    """The state that nodes keep between rounds."""

    dual: DualMine  # where they stand
    points: Points

    @property
    def duals(self) -> Array:
        return self.dual.beta


class AdaptiveNodes(NodeSide):
    """Nodes of `Mocha` whose server may be adaptive, as it is unless Omega is learned."""

    nodes: DualNodes
    memory: int = static()

    @classmethod
    def of(cls, algorithm: Mocha, data: TaskData, loss: Loss) -> NodeSide:
        nodes = DualNodes.of(algorithm, data, loss)
        known = algorithm.server == "proximal" or algorithm.sigma_prime != "adaptive" or algorithm.custom_server
        return nodes if known else cls(nodes, algorithm.memory)

    def init(self) -> AdaptiveMine:
        dual = self.nodes.init()
        found = jnp.broadcast_to(dual.beta[:, None], (len(dual.beta), REMEMBERED, dual.beta.shape[1]))
        nobody = jnp.full(found.shape[:2], NOBODY, jnp.int32)
        return AdaptiveMine(dual, Points(found, nobody, (dual.beta,) * self.memory, jnp.zeros_like(dual.life)))

    def held_of(self, mine: AdaptiveMine, header: Header) -> tuple[Array, Array]:
        return self.nodes.held_of(mine.dual, header)

    def sent_as(self, mine: AdaptiveMine, header: Header, up: Any, v: Array) -> tuple[AdaptiveMine, DualUp]:
        dual, up = self.nodes.sent_as(mine.dual, header, up, v)
        return mine.replace(dual=dual), up

    def doubts(self, mine: AdaptiveMine, header: Header, down: AdaptiveDown | DualDown) -> str:
        if isinstance(down, DualDown):
            return self.nodes.doubts(mine.dual, header, down)
        weights = np.asarray(down.weights)
        if not ((weights >= 0).all() and abs(float(weights.sum()) - 1.0) < 1e-3):
            return "sent weights of points that are none: they must be >= 0 and add up to 1"
        return odd(mine.dual.life, mine.points.answer, header, down)

    def like_down(self) -> Mapping[str, Tree]:
        def some() -> AdaptiveDown:
            data = self.nodes.problem.data
            number, m = jnp.zeros((data.num_nodes,), data.dtype), data.num_nodes
            vector, weights = jnp.zeros((m, data.num_features), data.dtype), jnp.zeros((m, 2 + self.memory), data.dtype)
            whole = number.astype(jnp.int32)
            return AdaptiveDown(vector, number, whole, weights, whole)

        return {**self.nodes.like_down(), "AdaptiveDown": jax.eval_shape(some)}

    def weights(self, mine: AdaptiveMine, down: AdaptiveDown | DualDown) -> Array:
        return down.model if isinstance(down, DualDown) else down.start

    def work(
        self, key: Any, mine: AdaptiveMine, header: Header, down: AdaptiveDown | DualDown
    ) -> tuple[AdaptiveMine, Array, AdaptiveUp | DualUp]:
        if isinstance(down, DualDown):
            dual, held, answer = self.nodes.work(key, mine.dual, header, down)
            return mine.replace(dual=dual), held, answer
        problem, loss = self.nodes.problem, self.nodes.problem.node_loss
        data, (known, new, beta, memory) = problem.data, self._mixed(mine, header, down)
        found, share = self.nodes.improved(key, beta, down.start, down, known)
        found = jnp.where(known[:, None], found, beta)
        # A node has its weights by itself: its data has no other task.
        slope = slopes(problem, down.start, (beta, found, *memory)).T
        gap, value = gap_terms(data, loss, beta, down.start)
        stands, of_found = (dual_terms(data, loss, b) for b in (beta, found))
        anew = (~known).astype(jnp.int32)
        up = AdaptiveUp(data.node_vectors(found), share, gap, value, slope, stands, of_found, anew, data.sizes)
        # What was found from where a node stood before is of no use now.
        answers = jnp.where((known & ~new)[:, None], self._answers(mine, header), NOBODY)
        oldest = jnp.arange(REMEMBERED)[None, :] == jnp.argmin(answers, axis=1)[:, None]
        points = Points(
            jnp.where(oldest[:, :, None], found[:, None], mine.points.found),
            jnp.where(oldest, header.round[:, None], answers), memory, jnp.where(known, header.held, NOBODY),
        )  # fmt: skip
        dual = mine.dual.replace(beta=beta, life=header.life)
        return AdaptiveMine(dual, points), header.held, up

    def _mixed(
        self, mine: AdaptiveMine, header: Header, down: AdaptiveDown
    ) -> tuple[Array, Array, Array, tuple[Array, ...]]:
        """Mix the points with the server's weights.

        Returns:
          Which nodes have the points that the server knows, and which of them mix them now ``[m]``; where they stand
          now ``[m, n]``, and what they remember.
        """
        points, problem = mine.points, self.nodes.problem
        same = (header.life == mine.dual.life) | (mine.dual.life < 0)
        at = self._answers(mine, header) == header.held[:, None]
        new = jnp.any(at, axis=1)
        known = new | (same & (points.mixed == header.held))
        found = jnp.sum(jnp.where(at[:, :, None], points.found, 0.0), axis=1)
        found = jnp.where(new[:, None], found, mine.dual.beta)
        one = jnp.zeros_like(down.weights).at[:, 0].set(1.0)
        weights = jnp.where(new[:, None], down.weights, one)
        betas = mine.dual.beta, found, *points.memory
        data, loss = problem.data, problem.node_loss
        beta = data.map_rows(mixed_duals, loss, tuple(weights.T), *betas, data.y)
        put = [(new & (down.slot == j))[:, None] for j in range(self.memory)]
        memory = tuple(jnp.where(p, found, old) for p, old in zip(put, points.memory, strict=True))
        return known, new, beta, tuple(jnp.where(known[:, None], point, beta) for point in memory)

    def _answers(self, mine: AdaptiveMine, header: Header) -> Array:
        """Rounds of the answers that a server may hold ``[m, k]``: of this life of it, and before this round."""
        same = (header.life == mine.dual.life) | (mine.dual.life < 0)
        return jnp.where(same[:, None] & (mine.points.answer < header.round[:, None]), mine.points.answer, NOBODY)
