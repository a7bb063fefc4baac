r"""Products and sums in twice the working precision, with a bound on what rounding is left.

A number is kept as an unevaluated sum of two floats. The sum and the product of two floats are such pairs exactly
(Knuth's two-sum, Dekker's split product), so that the compensated inner product below is as good as one computed in
twice the precision and rounded once (Ogita, Rump and Oishi 2005): with u the unit of rounding,

.. math:: |\tilde s - \sum_j a_j b_j| \le u\,|\tilde s| + 2 (n u)^2 \sum_j |a_j b_j| ,

and the first of the two errors is known.

No wider float type is needed: a GPU or TPU has none worth the name, and JAX hides float64 unless asked for it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax import _products
from mocha_jax._pytree import Pytree

Pair = tuple[Array, Array]  # a number, and what its rounding left out or may have

# Features that are read at a time.
_TOGETHER = 16


def two_sum(a: Array, b: Array) -> Pair:
    """``a + b`` and its rounding error, exactly."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def exact_products(a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """Four products that no rounding touches (but for underflow) and that add up to ``a * b``, the largest first.

    A compiler may fuse a product with the addition that follows, and then rounds once where the program rounds twice.
    Of an exact product that makes no difference.
    """
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return a_high * b_high, a_high * b_low, a_low * b_high, a_low * b_low


class Inner(Pytree):
    r""":math:`\sum_j a_j b_j`, term by term; many sums side by side."""

    high: Array  # [...]
    low: Array  # [...] what its rounding left out
    size: Array  # [...] about the sum of |a_j b_j|

    def add(self, a: Array, b: Array) -> Inner:
        """With one more term; both broadcast to the shape of the sums."""
        *large, low = exact_products(*jnp.broadcast_arrays(a, b))
        high = self.high
        for product in large:
            high, lost = two_sum(high, product)
            low = low + lost
        return Inner(high, self.low + low, self.size + jnp.abs(large[0]))

    def total(self, count: int) -> Pair:
        """The sum of `count` terms, rounded, and a bound on its error."""
        info = jnp.finfo(self.high.dtype)
        total, rest = two_sum(self.high, self.low)
        # Twice what is proven of the second order, for the bound is rounded too; and each term may have underflowed.
        return total, jnp.abs(rest) + 2.0 * (count + 1.0) ** 2 * info.eps**2 * self.size + 4.0 * count * info.tiny


@jax.custom_jvp
def times(x: Array, weights: Array) -> Pair:
    """Samples ``[m, n, d]`` times their nodes' weights ``[m, d]`` with a bound on the error, each ``[m, n]``."""
    like, d = jnp.zeros(x.shape[:2], weights.dtype), x.shape[2]

    def some(sums: Inner, start: Array | int, count: int) -> Inner:
        features = lax.dynamic_slice_in_dim(x, start, count, axis=2).astype(weights.dtype)
        at = jnp.moveaxis(features, 2, 0), lax.dynamic_slice_in_dim(weights, start, count, axis=1).T[:, :, None]
        return lax.scan(lambda sums, ab: (sums.add(*ab), None), sums, at)[0]

    # A cache line of samples at a time: feature by feature each line would be read once for every number in it.
    sums, whole = Inner(like, like, like), d // _TOGETHER
    if whole:
        sums = lax.fori_loop(0, whole, lambda k, sums: some(sums, k * _TOGETHER, _TOGETHER), sums)
    if rest := d - whole * _TOGETHER:
        sums = some(sums, d - rest, rest)
    return sums.total(d)


@jax.custom_jvp
def combine(x: Array, factors: Array) -> Pair:
    """Samples ``[m, n, d]`` combined by ``[m, n]`` with a bound on the error, each ``[m, d]``."""
    m, n, d = x.shape
    like = jnp.zeros((m, d), factors.dtype)

    def add(i: Array, sums: Inner) -> Inner:
        row, factor = (lax.dynamic_index_in_dim(a, i, axis=1, keepdims=False) for a in (x, factors))
        return sums.add(row.astype(factors.dtype), factor[:, None])

    return lax.fori_loop(0, n, add, Inner(like, like, like)).total(n)


@jax.custom_jvp
def product(a: Array, b: Array) -> Pair:
    """``a * b`` rounded, and what rounding left out."""
    one = Inner(*(jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape), a.dtype) for _ in range(3))).add(a, b)
    return two_sum(one.high, one.low)


@times.defjvp
def _times_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(times, _products.times, primals, tangents)


@combine.defjvp
def _combine_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(combine, _products.combine, primals, tangents)


@product.defjvp
def _product_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(product, jnp.multiply, primals, tangents)


def _as_rounded(exact: Any, plain: Any, primals: Any, tangents: Any) -> tuple[Pair, Pair]:
    """Halves of digits have no derivative; the product has that of the same one in floats, its error none."""
    found = exact(*primals)
    return found, (jax.jvp(plain, primals, tangents)[1], jnp.zeros_like(found[1]))


def total(a: Array) -> Array:
    """The sum of all entries by halves: its error is that of log2(n) additions, not of n."""
    a = a.ravel()
    while len(a) > 1:
        half = len(a) // 2
        a = jnp.concatenate([a[:half] + a[half : 2 * half], a[2 * half :]])
    return a[0]


def additions(count: int) -> float:
    """How many roundings `total` puts on a term at most, and `jnp.sum`, which adds up windows of 32 of such windows."""
    return 32.0 * max(math.ceil(math.log(max(count, 1), 32)), 1)


def _halves(a: Array) -> Pair:
    """The upper half of the digits and the rest, exactly."""
    integer = {4: jnp.uint32, 8: jnp.uint64}[a.dtype.itemsize]
    cut = (jnp.finfo(a.dtype).nmant + 1) // 2
    mask = np.array((1 << 8 * a.dtype.itemsize) - (1 << cut), integer)
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(a, integer) & mask, a.dtype)
    return high, a - high
