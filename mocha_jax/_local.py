r"""The local solver: dual coordinate ascent on every node's subproblem at once.

Node k, on task t with :math:`q = \sigma'_t \bar M_{tt}`, improves its share of eq. (4),

.. math::
    \min_{\delta}\; \sum_i c_i\,\ell^*(-(\beta_i+\delta_i)) + \langle w, u\rangle
    + \tfrac{q}{2}\|u\|^2, \qquad u = \sum_i c_i\delta_i x_i ,

one coordinate after another, each exactly. Divided by c the coordinate problem is
`Loss.dual_step` with :math:`g = x^\top(w + q u)` and :math:`\kappa = q c \|x\|^2`.

Speed. All nodes visit their rows in one common random order, so a step takes row i of every
node: stored in that order it is one contiguous slice, and the whole step is two fused loops.
What a step needs to know of budgets is worked out before the loop, and the new duals leave the
loop as outputs; state carried through the loop costs more than the arithmetic. Many nodes
are taken in blocks whose weights stay in the cache from one step to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._data import TaskData
from mocha_jax._math import matmul, uniform_bits
from mocha_jax._pytree import Pytree
from mocha_jax.losses import Loss

# Numbers in one row of a block, b times d: large enough to keep two cores busy with one step, small
# enough that w, u and the row stay in their private caches (measured: 2**13 to 2**18 and no limit).
_BLOCK_NUMBERS = 2**16

# Floating-point operations of a coordinate step, per feature: the product with w + q u (4) and the addition to u (2).
STEP_FLOPS = 6.0


class Rows(Pytree):
    """The samples in the order the local solver reads them: row i of a block of nodes together."""

    x: Array  # [k, n, b, d] k blocks of b nodes, k b >= m
    y: Array  # [k, n, b]
    weight: Array  # [k, n, b]
    norm2: Array  # [k, n, b] squared length of each row


def time_major(data: TaskData) -> Rows:
    """Lay out the data for `ascend`: one transposition, done before the loops over rounds."""
    m, _, d = data.x.shape
    blocks = -(-m // max(_BLOCK_NUMBERS // d, 1))
    x, y, weight = (jnp.swapaxes(_into_blocks(a, blocks), 1, 2) for a in (data.x, data.y, data.weight))
    return Rows(x, y, weight, jnp.sum(x * x, axis=3))


def visiting_order(key: Array, count: int) -> Array:
    """A random permutation of ``0..count-1``; more padding does not reorder what was there."""
    return jnp.argsort(uniform_bits(key, count))


def ascend(
    key: Array, loss: Loss, rows: Rows, beta: Array, w: Array, q: Array, steps: Array, *, passes: int
) -> tuple[Array, Array, Array]:
    """Run up to `passes` passes over the rows; node k stops after ``steps[k]`` coordinate steps.

    Args:
      key: a JAX random key; the key is consumed.
      loss: gives the coordinate step.
      rows: the samples, from `time_major`.
      beta: dual variables ``[m, n]``.
      w: each node's weights at the start of the round ``[m, d]``.
      q: each node's curvature ``[m]``.
      steps: each node's budget ``[m]`` int32.
      passes: static bound on the passes over the rows.

    Returns:
      The new duals ``[m, n]``, the change of each node's dual vector u ``[m, d]``, and the
      steps each node did ``[m]``.
    """
    m, (blocks, count, width, d) = len(beta), rows.x.shape
    keys = jax.vmap(lambda p: jax.random.fold_in(key, p))(jnp.arange(passes))
    orders = jax.vmap(partial(visiting_order, count=count))(keys)
    step: Callable[..., tuple[Array, Array]] = jax.vmap(partial(_step_one_node, loss))

    def one_block(block: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        j, y, weight, norm2, beta, w, q, steps = block

        def one_pass(carry: tuple[Array, Array, Array], order: Array) -> tuple[tuple[Array, Array, Array], None]:
            beta, u, done = carry
            done, visit = lax.scan(lambda done, i: _spend(done, _row(weight, i), steps), done, order)

            def one_step(u: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
                i, visit = at
                # Straight from the whole array: a block of it would be a copy.
                x = lax.dynamic_slice(rows.x, (j, i, 0, 0), (1, 1, width, d))[0, 0]
                return step(x, *(_row(a, i) for a in (y, weight, norm2, beta)), visit, w, q, u)

            u, new = lax.scan(one_step, u, (order, visit))
            return (beta.at[order].set(new, unique_indices=True), u, done), None

        start = beta, jnp.zeros_like(w), jnp.zeros_like(steps)
        return lax.scan(one_pass, start, orders)[0]

    split = partial(_into_blocks, blocks=blocks)
    per_block = jnp.arange(blocks), rows.y, rows.weight, rows.norm2, jnp.swapaxes(split(beta), 1, 2)
    beta, u, done = lax.map(one_block, (*per_block, split(w), split(q), split(steps)))
    return _from_blocks(jnp.swapaxes(beta, 1, 2), m), _from_blocks(u, m), _from_blocks(done, m)


def _step_one_node(
    loss: Loss, x: Array, y: Array, weight: Array, norm2: Array, beta: Array, visit: Array, w: Array, q: Array, u: Array
) -> tuple[Array, Array]:
    """One coordinate of one node: x ``[d]``, w ``[d]``, u ``[d]``, the rest scalars."""
    # A product with ones is a vectorised sum; XLA's own reduction over the last axis is not.
    g = matmul(x * (w + q * u), jnp.ones_like(u))
    new = jnp.where(visit, loss.dual_step(beta, g, y, q * weight * norm2), beta)
    return u + (weight * (new - beta)) * x, new


def _spend(done: Array, weight: Array, steps: Array) -> tuple[Array, Array]:
    """Which nodes visit this row: real there, and with budget left."""
    visit = (weight > 0) & (done < steps)
    return done + visit.astype(done.dtype), visit


def _row(array: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(array, i, axis=0, keepdims=False)


def _into_blocks(array: Array, blocks: int) -> Array:
    """``[m, ...]`` to ``[blocks, b, ...]``, the last block filled up with zeros: inert nodes."""
    width = -(-len(array) // blocks)
    grow = [(0, blocks * width - len(array))] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, grow).reshape(blocks, width, *array.shape[1:])


def _from_blocks(array: Array, m: int) -> Array:
    return array.reshape(-1, *array.shape[2:])[:m]
