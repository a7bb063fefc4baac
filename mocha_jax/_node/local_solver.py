r"""The nodes' subproblems (4), and the local solver: dual coordinate ascent on all of them at once.

Node k, on task t with $q = \sigma'_t \bar M_{tt}$, improves its share of eq. (4),

$$
\min_{\delta}\; \sum_i c_i\,\ell^*(-(\beta_i+\delta_i)) + \langle w, u\rangle
+ \tfrac{q}{2}\|u\|^2, \qquad u = \sum_i c_i\delta_i x_i ,
$$

one coordinate after another, each exactly. Divided by c the coordinate problem is
`Loss.dual_step` with $g = x^\top(w + q u)$ and $\kappa = q c \|x\|^2$.

Speed. All nodes visit their rows in one common random order, so a step takes row i of every
node: stored in that order (`mocha_jax._node.buckets`) it is one contiguous slice, and the whole step is two
fused loops. What a step needs to know of budgets is worked out before the loop, and the new duals
leave the loop as outputs; state carried through the loop costs more than the arithmetic. On an
accelerator a pass is one kernel (`mocha_jax._node.kernel`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._core.devices import each_device
from mocha_jax._core.pytree import Pytree
from mocha_jax._data.task_data import TaskData
from mocha_jax._node.buckets import TimeMajor
from mocha_jax._node.row_products import row_of
from mocha_jax._numerics.math import in_blocks, matmul, nodes_of, uniform_bits
from mocha_jax._problem.gap import conjugates
from mocha_jax.losses import Loss

Result = tuple[Array, Array, Array]  # duals, change of the dual vectors, steps done

# Floating-point operations of a coordinate step, per feature: the product with w + q u (4) and the addition to u (2).
STEP_FLOPS = 6.0

# Numbers in one row of a block of nodes: large enough to keep two cores busy with one step, small
# enough that w, u and the row stay in their private caches (measured: 2**13 to 2**20).
_BLOCK_NUMBERS = 2**16

# Rows that the loops take between two looks of an accelerator's host at their end.
_ROWS_AT_ONCE = 4

# An improvement below so many roundings of its terms cannot be told from none.
_ROUNDING = 16.0


class Subproblems(Pytree):
    """The subproblems of all nodes in one round."""

    data: TaskData  # laid out for `ascend`
    loss: Loss
    beta: Array  # [m, n] the duals at the start of the round
    w: Array  # [m, d] each node's weights
    q: Array  # [m] each node's curvature

    def predictions(self, u: Array) -> Array:
        """Z = X(w + q u), ``[m, n]``."""
        return self.data.node_predictions(self.w + self.q[:, None] * u)

    def fenchel_young(self, z: Array, beta: Array) -> Array:
        """Each node's sum of c F(z, beta), ``[m]``."""
        return jnp.sum(self.data.weighted(self.loss.fenchel_young(z, beta, self.data.y)), axis=1)

    def noise(self, z: Array, beta: Array) -> Array:
        """Bound the rounding of a sum of Fenchel-Young terms, ``[m]``."""
        terms = self.data.weighted(jnp.abs(z * beta) + jnp.abs(self.loss.value(z, self.data.y)))
        return _ROUNDING * jnp.finfo(z.dtype).eps * jnp.sum(terms, axis=1)

    def distance(self, u: Array) -> Array:
        """The quadratic term, q |u|^2 / 2, ``[m]``."""
        return 0.5 * self.q * jnp.sum(u**2, axis=1)

    def value(self, beta: Array) -> Array:
        r"""$G(\beta)$ of every node, ``[m]``."""
        u = self.data.node_vectors(beta - self.beta)
        return conjugates(self.data, self.loss, beta) + jnp.sum(self.w * u, axis=1) + self.distance(u)


def visiting_order(key: Array, count: int) -> Array:
    """A random permutation of ``0..count-1``; more padding does not reorder what was there."""
    bits = uniform_bits(key, count)
    if count > 2**16:
        return jnp.argsort(bits)
    # Numbers sort several times faster than pairs of them, so a row's place is the lower half of its number. The few
    # rows that tie in the upper half are visited in their order.
    place = jnp.arange(count, dtype=bits.dtype)
    return (jnp.sort(bits >> 16 << 16 | place) & 0xFFFF).astype(int)


def visiting_orders(key: Array, data: TaskData, passes: int) -> tuple[Array, ...]:
    """Orders of the rows of every bucket, one for each pass, ``[passes, n]``; the key is consumed."""
    keys = jax.vmap(lambda p: jax.random.fold_in(key, p))(jnp.arange(passes))
    buckets = cast(TimeMajor, data.layout).buckets
    return tuple(jax.vmap(partial(visiting_order, count=bucket.rows))(keys) for bucket in buckets)


def ascend(
    orders: tuple[Array, ...],
    loss: Loss,
    data: TaskData,
    beta: Array,
    w: Array,
    q: Array,
    steps: Array,
    *,
    share: Array | float = 1.0,
) -> Result:
    """Run passes over the rows, one for each order; node k stops after ``steps[k]`` coordinate steps.

    Args:
      orders: of each bucket's rows, from `visiting_orders`.
      loss: gives the coordinate step; what differs between nodes is an array ``[m, 1]``.
      data: the samples, laid out by `time_major`.
      beta: dual variables ``[m, n]``.
      w: each node's weights at the start of the round ``[m, d]``.
      q: each node's curvature ``[m]``.
      steps: each node's budget ``[m]`` int32.
      share: how far to go from the old duals to what was found, in (0, 1].

    Returns:
      The new duals ``[m, n]``, the change of each node's dual vector u ``[m, d]``, and the
      steps each node did ``[m]``.
    """
    rows, shared = cast(TimeMajor, data.layout), (orders, jnp.asarray(share, w.dtype))
    return each_device(rows.sharding, _ascend, shared, loss, rows, beta, w, q, steps)


def _ascend(
    shared: tuple[tuple[Array, ...], Array],
    loss: Loss,
    rows: TimeMajor,
    beta: Array,
    w: Array,
    q: Array,
    steps: Array,
) -> Result:
    """Work on all nodes of a device."""
    orders, share = shared
    new, u, done = beta, jnp.zeros_like(w), jnp.zeros_like(steps)
    for bucket, order in zip(rows.buckets, orders, strict=True):
        y = bucket.y[0]
        samples = bucket.samples, y, bucket.weight[0], bucket.norm2[0]
        # From the new duals: to read them from the old ones, which others overwrite, were a copy.
        (old,), rest = bucket.take_rows(new), map(bucket.take, (w, q, steps))
        bucket_loss = bucket.take_numbers(loss)
        numbers = jax.tree.map(lambda a: a[:, 0] if jnp.ndim(a) else a, bucket_loss)
        reached, change, spent = _passes(rows.backend, order, numbers, *samples, old, *rest)
        between = part_way(bucket_loss, share, old, reached, y.T)
        new, u, done = bucket.put(new, between), bucket.put(u, share * change), bucket.put(done, spent)
    return new, u, done


def part_way(loss: Loss, share: Array, old: Array, new: Array, y: Array) -> Array:
    """Duals a share of the way from old to new ones, feasible to the last bit."""
    return loss.project(old + share * (new - old), y)


# Orders, loss of numbers and arrays ``[c]``, samples of a bucket (x, y, weight, norm2), duals ``[c, n]``, weights,
# curvatures and steps of its nodes.
PassArguments = tuple[Array, Loss, Array, Array, Array, Array, Array, Array, Array, Array]


def _passes(backend: str, *arguments: *PassArguments) -> Result:
    """Dispatch on the backend."""
    loss, beta = arguments[1], arguments[6]
    precise = backend == "auto" and beta.dtype != jnp.float32
    return _passes_by_machine("xla" if precise or not loss.in_kernel else backend, *arguments)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _passes_by_machine(backend: str, *arguments: *PassArguments) -> Result:
    """Dispatch on the machine that the program is lowered for: its kernel, else loops or an interpreted kernel."""
    other = _interpreted if backend == "pallas" else _in_blocks
    branches = dict(cuda=_on_cuda, rocm=_on_rocm, tpu=_on_tpu)
    if backend == "xla":
        branches = dict.fromkeys(branches, _at_once)
    return platform_dependent(*arguments, default=other, **branches)


@_passes_by_machine.defjvp
def _derivative(backend: str, primals: PassArguments, tangents: PassArguments) -> tuple[Result, Result]:
    """A kernel has no derivative of its own; that of the loops is that of the same function."""
    del backend
    return jax.jvp(_in_blocks, primals, tangents)


def _in_blocks(
    orders: Array, loss: Loss, x: Array, y: Array, weight: Array, norm2: Array,
    beta: Array, w: Array, q: Array, steps: Array,
) -> Result:  # fmt: skip
    """Run passes as loops over the rows, one block of nodes after the other: their weights stay in a CPU's cache."""

    def block(first: Array | int, width: int) -> Result:
        row, some = (partial(of, first=first, width=width) for of in (partial(row_of, x), nodes_of))
        by_row = (some(a, axis=1) for a in (y, weight, norm2))
        block_loss = jax.tree.map(lambda a: some(a) if jnp.ndim(a) else a, loss)
        return _loops(orders, block_loss, row, *by_row, *map(some, (beta, w, q, steps)))

    count, d = w.shape
    return in_blocks(block, count, d, _BLOCK_NUMBERS)


def _at_once(orders: Array, loss: Loss, x: Array, *rest: Array) -> Result:
    """Run passes as loops over the rows of all nodes: an accelerator has no use for blocks."""
    return _loops(orders, loss, lambda i: _row(x, i), *rest, unroll=_ROWS_AT_ONCE)


def _loops(
    orders: Array, loss: Loss, row: Callable[[Array], Array], y: Array, weight: Array, norm2: Array,
    beta: Array, w: Array, q: Array, steps: Array, *, unroll: int = 1,
) -> Result:  # fmt: skip
    of_loss = jax.tree.map(lambda a: 0 if jnp.ndim(a) else None, loss)
    step: Callable[..., tuple[Array, Array]] = jax.vmap(_step_one_node, in_axes=(of_loss, *[0] * 9))

    def one_pass(carry: Result, order: Array) -> tuple[Result, None]:
        beta, u, done = carry
        done, visit = lax.scan(lambda done, i: _spend(done, _row(weight, i), steps), done, order)

        def one_step(u: Array, row_and_visit: tuple[Array, Array]) -> tuple[Array, Array]:
            i, visit = row_and_visit
            return step(loss, row(i), *(_row(a, i) for a in (y, weight, norm2, beta)), visit, w, q, u)

        u, new = lax.scan(one_step, u, (order, visit), unroll=unroll)
        return (beta.at[order].set(new, unique_indices=True), u, done), None

    def next_pass(carry: Result, order: Array) -> tuple[Result, None]:
        return lax.cond(jnp.any(carry[2] < steps), one_pass, lambda carry, _: (carry, None), carry, order)

    carry, _ = one_pass((beta.T, jnp.zeros_like(w), jnp.zeros_like(steps)), orders[0])
    if len(orders) > 1:
        carry, _ = lax.scan(next_pass, carry, orders[1:])
    beta, u, done = carry
    return beta.T, u, done


# Triton is deprecated since JAX 0.11, with which Mosaic takes all that it took on NVIDIA's cards, and it has no other
# for ROCm.
_TRITON = ("triton",) if jax.__version_info__ < (0, 11) else ()


def _on_cuda(*arguments: *PassArguments) -> Result:
    return _by_kernel(("gpu", *_TRITON), *arguments)


def _on_rocm(*arguments: *PassArguments) -> Result:
    return _by_kernel(_TRITON, *arguments)


def _on_tpu(*arguments: *PassArguments) -> Result:
    return _by_kernel(("tpu",), *arguments)


def _interpreted(*arguments: *PassArguments) -> Result:
    return _by_kernel(("tpu",), *arguments, interpret=True)


def _kernels(names: tuple[str, ...]) -> Iterator[ModuleType]:
    """Import those of the named kernels that this version of JAX supports."""
    for name in names:
        try:
            yield importlib.import_module(f"mocha_jax._node.kernel_{name}")
        except ImportError as error:
            if (error.name or "").startswith("mocha_jax"):
                raise


def _by_kernel(
    names: tuple[str, ...], orders: Array, loss: Loss, x: Array, y: Array, weight: Array, norm2: Array,
    beta: Array, w: Array, q: Array, steps: Array, *, interpret: bool = False,
) -> Result:  # fmt: skip
    """Run a kernel a pass, the first of these that exists and takes such rows; the loops where none does."""
    kernel = next((k for k in _kernels(names) if k.fits(x.shape, x.dtype)), None)
    if kernel is None:
        return _at_once(orders, loss, x, y, weight, norm2, beta, w, q, steps)

    def one_pass(order: Array, beta: Array, *earlier: Array) -> Result:
        arrays = x, y, weight, norm2, beta, w, q, steps, order, *earlier
        return kernel.epoch(loss, *arrays, interpret=interpret)

    orders = orders.astype(jnp.int32)
    carry = one_pass(orders[0], beta.T)
    if len(orders) > 1:  # even if no node has steps left: an open-ended loop would need the host
        carry = lax.scan(lambda carry, order: (one_pass(order, *carry), None), carry, orders[1:])[0]
    beta, u, done = carry
    return beta.T, u, done


def _step_one_node(
    loss: Loss, x: Array, y: Array, weight: Array, norm2: Array, beta: Array, visit: Array, w: Array, q: Array, u: Array
) -> tuple[Array, Array]:
    """One coordinate of one node: x ``[d]``, w ``[d]``, u ``[d]``, the rest scalars."""
    x = x.astype(u.dtype)
    # A product with ones is a vectorised sum; XLA's own reduction over the last axis is not.
    g = matmul(x * (w + q * u), jnp.ones_like(u))
    new = jnp.where(visit, loss.dual_step(beta, g, y, q * weight * norm2), beta)
    return u + (weight * (new - beta)) * x, new


def _spend(done: Array, weight: Array, steps: Array) -> tuple[Array, Array]:
    """Tell which nodes visit this row: real there, and with budget left."""
    visit = (weight > 0) & (done < steps)
    return done + visit.astype(done.dtype), visit


def _row(array: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(array, i, axis=0, keepdims=False)
