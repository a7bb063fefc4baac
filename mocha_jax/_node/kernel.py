r"""One pass of the local solver as one kernel, for accelerators.

The kernel does what `mocha_jax._node.local_solver.ascend` does in one pass over the rows: every node visits its rows in
one common order and moves one coordinate after another,

$$
g = \langle x_i, w + q u\rangle, \qquad
\beta_i^+ = \arg\min_b\; \ell^*(-b) + (b - \beta_i)\,g + \tfrac{q c_i\|x_i\|^2}{2}(b - \beta_i)^2, \qquad
u^+ = u + c_i(\beta_i^+ - \beta_i)\,x_i .
$$

Compiled by XLA each of the n steps is a kernel or more of its own, which reads w and u from memory and
writes u back. Here a program owns some nodes for the whole pass: their w and u stay on the chip, and a row
is read once.

The arithmetic is one function, `step`; the ways to feed it suit kinds of machines. A GPU
(`mocha_jax._node.kernel_gpu`) runs many programs, each a loop over the rows of some nodes that asks for a row long
before it is needed. A TPU (`mocha_jax._node.kernel_tpu`) runs one large program: the rows are the inner axis of its
grid, whose pipeline fetches the next block of rows while this one is at work. With JAX 0.10, whose Mosaic does not
support all GPUs and row lengths, a Triton kernel covers the remaining cases (`mocha_jax._node.kernel_triton`).

Each has a function ``epoch(loss, x, y, weight, norm2, beta, w, q, steps, order, *earlier)`` that works under `jit`,
`scan`, `vmap` (over all but `order` in one kernel) and `shard_map` (with ``check_vma=False``). It has no derivative,
and the automatic partitioner cannot split it over devices. Its arguments:

- loss: gives the coordinate step; its hyperparameters are scalars or arrays ``[m]``, traced or not.
- x: row i of all nodes together ``[n, m, d]``; stored in any floating dtype, computed with in that of `w`.
- y: labels ``[n, m]``.
- weight: ``[n, m]``; zero marks padding, which is not visited.
- norm2: squared length of each row ``[n, m]``.
- beta: dual variables ``[n, m]``.
- w: each node's weights at the start of the round ``[m, d]``.
- q: each node's curvature ``[m]``.
- steps: each node's budget ``[m]`` int32.
- order: a permutation of the rows ``[n]`` int32.
- earlier: nothing in the first pass; then the change of each node's dual vector in earlier passes ``[m, d]``, and the
  steps each node did in them ``[m]`` int32.

It returns the new duals ``[n, m]``, u ``[m, d]`` and the steps done ``[m]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax.losses import Loss

Result = tuple[Array, Array, Array]  # beta, u, done
Matrix = TypeVar("Matrix", Array, tuple[Array, ...])


def step(
    loss: Loss,
    total: Callable[[Matrix], Array],
    wide: Callable[[Array], Array],
    x: Matrix,
    y: Array,
    weight: Array,
    norm2: Array,
    beta: Array,
    w: Matrix,
    q: Array,
    u: Matrix,
    done: Array,
    steps: Array,
) -> tuple[Array, Matrix, Array]:
    """One coordinate of each node of a block.

    x, w and u are matrices of nodes and features, or tuples of pieces of them, the rest are numbers of the nodes;
    `total` makes these of a matrix, a sum over features, and `wide` makes them fit one.
    """
    x = jax.tree.map(lambda x, w: x.astype(w.dtype), x, w)
    visit, curvature = (weight > 0) & (done < steps), wide(q)
    g = total(jax.tree.map(lambda x, w, u: x * (w + curvature * u), x, w, u))
    new = jnp.where(visit, loss.dual_step(beta, g, y, q * weight * norm2), beta)
    change = wide(weight * (new - beta))
    return new, jax.tree.map(lambda x, u: u + change * x, x, u), done + visit.astype(done.dtype)


def per_node(loss: Loss, w: Array) -> list[Array]:
    """The loss's hyperparameters as numbers of the nodes ``[m]``: one kind of input, batched or not, on any device."""
    return [jnp.broadcast_to(jnp.asarray(leaf, w.dtype), w.shape[:1]) for leaf in jax.tree.leaves(loss)]
