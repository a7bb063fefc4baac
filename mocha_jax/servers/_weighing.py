r"""The best mixture of the points of every node: a quadratic program over all nodes, solved by splitting it.

With $U_k$ the vectors from where node k stands to its points, s their slopes, $\bar M$ the coupling and $\Delta$ the
weights that are not negative and sum to at most one,

$$
\min_{a_k\in\Delta}\; \sum_k \langle s_k, a_k\rangle + \tfrac12\langle Ua, \bar M\,Ua\rangle .
$$

The nodes' weights and their coupling are split (Douglas and Rachford): with stiffness $c_k$ and a vector $h_k$ a node,

$$
w = h - \bar M(\bar M + c)^{-1}h,\qquad
a_k = \arg\min_{\Delta}\; \langle s_k, a_k\rangle + \tfrac{c_k}{2}\|U_k a_k - (2w - h)_k\|^2,\qquad
h \leftarrow h + r\,(Ua - w).
$$

The coupling, however strong, is one product with an operator that is known beforehand, and every node has a quadratic
program of its own, of a few numbers (`mocha_jax.servers._programs`). Gradient steps on the whole took three to five
times as many: they see the coupling through its largest eigenvalue. What is found is scaled along the way from where
the nodes stand, so that the dual never gets worse.

Vectors are kept in units of $1/\sqrt c$: their squares are then objectives, and of a usual size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._core.devices import NodeSharding
from mocha_jax._core.pytree import Pytree, static
from mocha_jax._numerics.blocks import in_blocks, nodes_of
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.coupling import Coupling, Operator, Parts
from mocha_jax.servers._programs import (
    Numbers,
    against,
    along_from,
    answer,
    combine,
    left,
    programs,
)
from mocha_jax.servers._weighing_kernels import kernel_for, weigh

# The stiffness of the splitting in units of the mean curvature of a task.
_STIFFNESS = 1.0

# How far beyond the mean of both a step goes: 1 is the method of multipliers, 2 the end of what converges.
_RELAXATION = 1.8

# Steps of an accelerator, whose host should not wait for an answer; and at most where it tells when to stop: when what
# nodes and coupling disagree by is no more than that share of what the weights gain.
_STEPS, _MAX_STEPS, _TOLERANCE = 24, 48, 0.01

# Features of a node up to which the kernel for GPUs holds its vectors; rows of all nodes' that it goes through.
_LONGEST, _ROWS = 4096, 1024

# Nodes whose programs a CPU solves at once: their numbers stay in its cache.
_BLOCK = 16384


class Consensus(Pytree):
    r"""The part of a weighing that is known beforehand: $\bar M(\bar M + c)^{-1}$, and c ``[]``."""

    resolvent: Operator
    stiffness: Array


def consensus(coupling: Coupling) -> Consensus:
    """Factorise a coupling once for many steps of the splitting."""
    curvature = jnp.mean(coupling.diagonal())
    stiffness = jnp.maximum(_STIFFNESS * curvature, jnp.finfo(curvature.dtype).tiny ** 0.5)
    return Consensus(coupling.resolvent(1.0 / stiffness), stiffness)


class Tasks(Pytree):
    """The tasks of nodes, and what couples them."""

    coupling: Coupling
    consensus: Consensus
    task: Array | None  # [m] of every node, num_tasks where it has no data; None where node k is all of task k
    counts: Array  # [num_tasks] nodes of every task, at least one
    nodes: int = static()  # m; those beyond the tasks are inert where each node is a task of its own
    sharding: NodeSharding | None = static(default=None)  # of nodes and tasks alike; None: all are here

    def apply(self, u: Array) -> Array:
        r"""$\bar M u$ for a vector of every node ``[m, d]``."""
        return self._to_nodes(self.coupling.apply(self._to_tasks(u)))

    def settle(self, h: Array) -> Array:
        r"""$\bar M(\bar M + c_k)^{-1} h$ with $c_k = c$ times the nodes of its task: the resolvent of their mean."""
        mean = self._to_tasks(h) if self.task is None else self._to_tasks(h) / self.counts[:, None]
        return self._to_nodes(self.consensus.resolvent.apply(mean))

    def settled_parts(self, h: Array, sums: Array, d: int) -> Parts:
        """Take what `settle` returns apart, with no more rows in common than a kernel goes through by itself.

        Args:
          h: see `settle`; with as many features as a kernel needs.
          sums: some rows ``[k, ...]`` that add up to the sum of those of h.
          d: so many features there are.
        """
        parts = self.consensus.resolvent.parts(h) if self.task is None and self.nodes == len(self.counts) else None
        if parts is None:
            settled = jnp.pad(self.settle(h[:, :d]), ((0, 0), (0, h.shape[1] - d)))
            return Parts(jnp.zeros_like(h[:1, 0]), None, settled)
        scale, mix, rows = parts
        assert mix is not None
        rows = sums if mix.shape == (1, 1) and rows is h else rows
        if len(rows) <= _ROWS and (self.sharding is None or rows is not sums):
            return Parts(scale, mix, rows)
        if mix.shape == (1, 1):
            return Parts(scale, mix, jnp.sum(rows, axis=0, keepdims=True))
        return Parts(scale, None, matmul(mix, rows))

    @property
    def units(self) -> Array:
        """The stiffness of every node in units of c ``[m]``: 1 where it has a task to itself."""
        return self._to_nodes(self.counts[:, None])[:, 0]

    def _to_tasks(self, per_node: Array) -> Array:
        tasks = len(self.counts)
        return per_node[:tasks] if self.task is None else jax.ops.segment_sum(per_node, self.task, tasks)

    def _to_nodes(self, per_task: Array) -> Array:
        if self.task is None:
            return jnp.pad(per_task, ((0, self.nodes - len(per_task)), (0, 0)))
        return per_task.at[self.task].get(mode="fill", fill_value=0)


class Iterate(NamedTuple):
    """The variables of the splitting between two steps."""

    h: Array  # [m, d], or [d, m]
    a: tuple[Array, ...]  # p x [m] weights


def best_mixture(v: Sequence[Array], slope: Array, tasks: Tasks, free: Array, backend: str = "auto") -> Array:
    r"""The best weights ``[p, m]``, or as good as some steps make them.

    Args:
      v: the points' dual vectors, each ``[m, d]``; the first is where each node stands.
      slope: of the others, ``[p - 1, m]``.
      tasks: what couples the nodes.
      free: which nodes answered ``[m]``; the others stay where they are.
      backend: ``"xla"`` for no kernel.
    """
    stiffness = tasks.consensus.stiffness
    along = along_from(v, jnp.sqrt(stiffness))
    a, moved = _split(backend, tasks, along, slope, free.astype(slope.dtype))
    gain, bent = -jnp.sum(slope * a), jnp.sum(moved * tasks.apply(moved)) / stiffness
    a = a * jnp.clip(jnp.where(bent > 0, safe_ratio(gain, bent), jnp.sign(gain)), 0.0, 1.0)
    return jnp.concatenate([1.0 - jnp.sum(a, axis=0, keepdims=True), a])


Given = tuple[Tasks, Array, Array, Array]  # and vectors [m, p, d], slopes [p, m], who is free [m]
Weighed = tuple[Array, Array]  # weights [p, m], and the way that they go [m, d]


def _split(backend: str, tasks: Tasks, along: Array, slope: Array, free: Array) -> Weighed:
    other: dict[str, Callable[..., Weighed]] = dict.fromkeys(("cuda", "rocm", "tpu"), _in_some_steps)
    if backend != "xla" and along.dtype == jnp.float32 and along.shape[-1] <= _LONGEST:
        other |= {"cuda": _on_cuda, "rocm": _on_rocm}
    return platform_dependent(tasks, along, slope, free, default=_until_they_agree, **other)


def _step(
    answers: Callable[[Numbers, Numbers], tuple[Array, ...]],
    at: Iterate,
    pulled: Array,
    against: Callable[[Array], Array],
    combine: Callable[[Array], Array],
) -> tuple[Iterate, Numbers]:
    """Go one step; return also what the nodes were asked for.

    Args:
      answers: of all nodes, to what they are asked, from their last ones.
      at: where they are.
      pulled: what the coupling's resolvent makes of h, laid out as that is.
      against: c times products ``[p, m]`` of the points' vectors with one of every node.
      combine: the way that weights ``[p, m]`` go.
    """
    asked = tuple(against(at.h - 2.0 * pulled))
    a = answers(asked, at.a)
    return Iterate(at.h + _RELAXATION * (combine(jnp.stack(a)) - at.h + pulled), a), asked


def _in_some_steps(tasks: Tasks, along: Array, slope: Array, free: Array) -> Weighed:
    given = programs(along, slope, tasks.units, free)
    # Nodes come last: along the lanes of a TPU, which would pad a few points or features to as many.
    vectors = jnp.moveaxis(along, 0, -1)

    def asked(z: Array) -> Array:
        return tasks.units[None] * jnp.sum(vectors * z[None], axis=1)

    def way(a: Array) -> Array:
        return jnp.sum(a[:, None] * vectors, axis=0)

    def step(at: Iterate, _: None) -> tuple[Iterate, None]:
        return _step(partial(answer, given), at, tasks.settle(at.h.T).T, asked, way)[0], None

    start = Iterate(jnp.zeros_like(vectors[0]), tuple(jnp.zeros_like(slope)))
    a = jnp.stack(lax.scan(step, start, length=_STEPS)[0].a)
    return a, combine(along, a)


Look = tuple[Iterate, Array, Array, Array]  # where they are, steps, by what they disagree, whether that will do


def _until_they_agree(tasks: Tasks, along: Array, slope: Array, free: Array) -> Weighed:
    given = programs(along, slope, tasks.units, free)

    def asked(z: Array) -> Array:
        return tasks.units[None] * against(along, z)

    def answers(asked: Numbers, a: Numbers) -> tuple[Array, ...]:
        def some(first: Array | int, width: int) -> tuple[Array, ...]:
            return answer(*jax.tree.map(lambda each: nodes_of(each, first, width), (given, asked, a)))

        return in_blocks(some, len(free), 1, _BLOCK)

    def body(s: Look) -> Look:
        at, k, before, _ = s
        after, wanted = _step(answers, at, tasks.settle(at.h), asked, partial(combine, along))
        change = after.h - at.h
        apart = jnp.vdot(tasks.units[:, None] * change, change) + jnp.sum(left(given, wanted, after.a))
        # What the next step will leave of it, if that goes as this one went.
        left_then = apart * jnp.minimum(safe_ratio(apart, before), 1.0)
        return after, k + 1, apart, left_then <= _TOLERANCE * -jnp.sum(slope * jnp.stack(after.a))

    start = Iterate(jnp.zeros_like(along[:, 0]), tuple(jnp.zeros_like(slope)))
    begin = start, jnp.zeros((), jnp.int32), jnp.full((), jnp.finfo(slope.dtype).tiny), jnp.zeros((), bool)
    a = jnp.stack(lax.while_loop(lambda s: ~s[3] & (s[1] < _MAX_STEPS), body, begin)[0].a)
    return a, combine(along, a)


def _on_cuda(*given: *Given) -> Weighed:
    return _by_kernel("cuda", *given)


def _on_rocm(*given: *Given) -> Weighed:
    return _by_kernel("rocm", *given)


def _by_kernel(platform: str, *given: *Given, interpret: Any = False) -> Weighed:
    kernel = kernel_for(platform, interpret)
    if kernel is None:
        return _in_some_steps(*given)
    return weigh(kernel, _STEPS, _RELAXATION, interpret, *given)
