r"""Products and sums in twice the working precision, with a bound on what rounding is left.

A number is kept as an unevaluated sum of two floats. The sum and the product of two floats are such pairs exactly
(Knuth's two-sum, Dekker's split product), so that the compensated inner product below is as good as one computed in
twice the precision and rounded once (Ogita, Rump and Oishi 2005): with u the unit of rounding,

$$
|\tilde s - \sum_j a_j b_j| \le u\,|\tilde s| + 2 (n u)^2 \sum_j |a_j b_j| ,
$$

and the first of the two errors is known.

That needs no wider float type: a GPU or TPU has none worth the name. On a CPU, products of float32 are exact in
float64, and their sum there needs a thirtieth of the operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import combine, times

Pair = tuple[Array, Array]  # a number, and what its rounding left out or may have

# Features that are read at a time: a cache line of samples.
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
    r"""$\sum_j a_j b_j$, term by term; many sums side by side."""

    high: Array  # [...]
    low: Array  # [...] what its rounding left out
    size: Array  # [...] about the sum of |a_j b_j|

    def add(self, a: Array, b: Array) -> Inner:
        """Add one more term; both broadcast to the shape of the sums."""
        *large, low = exact_products(*jnp.broadcast_arrays(a, b))
        high, info = self.high, jnp.finfo(self.high.dtype)
        for product in large:
            high, lost = two_sum(high, product)
            low = low + lost
        # The lower half of a number may be too small to be kept, and is then missing as often as it is multiplied.
        missing = 2.0 * info.tiny / info.eps**2 * (jnp.abs(a) + jnp.abs(b))
        return Inner(high, self.low + low, self.size + jnp.abs(large[0]) + missing)

    def plus(self, other: Inner) -> Inner:
        """Add the terms of another sum."""
        high, lost = two_sum(self.high, other.high)
        return Inner(high, self.low + (other.low + lost), self.size + other.size)

    def total(self, count: int) -> Pair:
        """The sum, rounded, and a bound on its error; of `count` additions of whatever kind one after the other."""
        info = jnp.finfo(self.high.dtype)
        total, rest = two_sum(self.high, self.low)
        # Twice what is proven of the second order, for the bound is rounded too; and each term may have underflowed.
        second = 2.0 * (count + 1.0) ** 2 * info.eps**2
        return total, (1.0 + 4.0 * info.eps) * jnp.abs(rest) + second * self.size + 8.0 * count**2 * info.tiny


@jax.custom_jvp
def times_with_error(x: Array, weights: Array) -> Pair:
    """Samples ``[m, n, d]`` times their nodes' weights ``[m, d]`` with a bound on the error, each ``[m, n]``."""
    return _by_machine(_times_in_pairs, _times_in_doubles, x, weights)


def _times_in_pairs(x: Array, weights: Array) -> Pair:
    like, d = jnp.zeros(x.shape[:2], weights.dtype), x.shape[2]

    def some(start: Array | int, count: int) -> Inner:
        features = lax.dynamic_slice_in_dim(x, start, count, axis=2).astype(weights.dtype)
        terms = jnp.moveaxis(features, 2, 0), lax.dynamic_slice_in_dim(weights, start, count, axis=1).T[:, :, None]
        return lax.scan(lambda sums, ab: (sums.add(*ab), None), Inner(like, like, like), terms)[0]

    return _in_blocks(some, Inner(like, like, like), d)


@jax.custom_jvp
def combine_with_error(x: Array, factors: Array, rests: Array) -> Pair:
    """Samples ``[m, n, d]`` combined by factors ``[m, n]`` and by what their rounding left out, each ``[m, d]``.

    Returns:
      The sums, and a bound on their error.
    """
    return _by_machine(_combine_in_pairs, _combine_in_doubles, x, factors, rests)


def _combine_in_pairs(x: Array, factors: Array, rests: Array) -> Pair:
    m, n, d = x.shape
    like = jnp.zeros((m, d), factors.dtype)

    def some(start: Array | int, count: int) -> Inner:
        def add(i: Array, sums: Inner) -> Inner:
            row, factor = (lax.dynamic_index_in_dim(a, start + i, axis=1, keepdims=False) for a in (x, factors))
            return sums.add(row.astype(factors.dtype), factor[:, None])

        return lax.fori_loop(0, count, add, Inner(like, like, like))

    sums, error = _in_blocks(some, Inner(like, like, like), n)
    sums, rest = two_sum(sums, combine(x, rests))
    return sums, error + jnp.abs(rest)


def _by_machine(in_pairs: Callable[..., Pair], in_doubles: Callable[..., Pair], x: Array, *factors: Array) -> Pair:
    if factors[0].dtype != jnp.float32:
        return in_pairs(x, *factors)
    return platform_dependent(x, *factors, default=in_pairs, cpu=in_doubles)


# The nodes of two arrays, in a product of matrices for each. `jnp.einsum` would ask for its dtype by name, which JAX
# takes for float32 where such a product is mapped and the wider types are off.
_NODES = (0,), (0,)


def _times_in_doubles(x: Array, weights: Array) -> Pair:
    with jax.enable_x64(True):
        a, b, lengths = _in_doubles(x, weights)
        # Of the sizes of a sum's products, Cauchy and Schwarz: the products themselves would be a second pass.
        size = lengths * jnp.sqrt(jnp.sum(b * b, axis=1, keepdims=True))
        factors = math.sqrt(x.shape[2]) * lengths + jnp.sum(jnp.abs(b), axis=1, keepdims=True)
        return _rounded(lax.dot_general(a, b, (((2,), (1,)), _NODES)), x.shape[2], size, factors)


def _combine_in_doubles(x: Array, factors: Array, rests: Array) -> Pair:
    with jax.enable_x64(True):
        a, b, lengths = _in_doubles(x, factors)
        b = b + lax.convert_element_type(rests, np.float64)
        size, both = (jnp.sum(each, axis=1, keepdims=True) for each in (lengths * jnp.abs(b), lengths + jnp.abs(b)))
        return _rounded(lax.dot_general(a, b, (((1,), (1,)), _NODES)), x.shape[1], size, both)


def _in_doubles(x: Array, factors: Array) -> tuple[Array, Array, Array]:
    """Samples and factors in float64, where products of float32 are exact; and the samples' lengths ``[m, n]``."""
    a, b = (lax.convert_element_type(each, np.float64) for each in (x, factors))
    return a, b, jnp.sqrt(lax.dot_general(a, a, (((2,), (2,)), ((0, 1), (0, 1)))))


def _rounded(exact: Array, count: int, size: Array, factors: Array) -> Pair:
    """Sums of so many products in float64 as float32, and a bound on the rounding of both.

    Args:
      exact: the sums.
      count: the products of each, of which none is rounded by more than one in float64.
      size: at least the sum of their sizes.
      factors: at least the sum of their factors' sizes: one too small to be kept is missing as often as it is
        multiplied.
    """
    info = np.finfo(np.float32)
    total = lax.convert_element_type(exact, np.float32)
    lost = jnp.abs(exact - lax.convert_element_type(total, np.float64))
    bound = lost + (count + 2.0) * float(np.finfo(np.float64).eps) * size + float(info.tiny) * (2.0 * factors + 8.0)
    return total, (1.0 + 4.0 * float(info.eps)) * lax.convert_element_type(bound, np.float32)


def _in_blocks(some: Callable[[Array | int, int], Inner], nothing: Inner, count: int) -> Pair:
    """A sum over blocks of sums: roundings of the second order add up over twice the root of the terms, not over all.

    Feature by feature a cache line of samples would be read once for every number in it.
    """
    size = _TOGETHER * max(round(math.sqrt(count) / _TOGETHER), 1)
    whole, rest = divmod(count, size)
    sums = nothing
    if whole:
        sums = lax.fori_loop(0, whole, lambda k, sums: sums.plus(some(k * size, size)), sums)
    if rest:
        sums = sums.plus(some(count - rest, rest))
    return sums.total(min(size, count) + whole + 1)


def added(a: Array, to_tasks: Callable[[Array], Array], to_nodes: Callable[[Array], Array]) -> Pair:
    """Sums ``[num_tasks, ...]`` of the entries ``[m, ...]`` of a task's nodes, and a bound on their error.

    The upper digits of all entries of a sum, cut off at one place, add up without rounding (Rump, Ogita and Oishi
    2008); the rest is small.
    """
    eps = jnp.finfo(a.dtype).eps
    unit = _power_of_two(4.0 * to_nodes(to_tasks(jnp.abs(a))))  # above every partial sum
    high = (unit + a) - unit
    low = a - high
    sums = to_tasks(jnp.stack([high, low, jnp.abs(low)], axis=-1))
    total, rest = two_sum(sums[..., 0], sums[..., 1])
    return total, jnp.abs(rest) + eps * len(a) * sums[..., 2]


@jax.custom_jvp
def product(a: Array, b: Array) -> Pair:
    """``a * b`` rounded, and what rounding left out, but for a rounding of that."""
    one = Inner(*(jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape), a.dtype) for _ in range(3))).add(a, b)
    return two_sum(one.high, one.low)


@times_with_error.defjvp
def _times_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(times_with_error, times, primals, tangents)


@combine_with_error.defjvp
def _combine_jvp(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(combine_with_error, combine, primals, tangents)


@product.defjvp
def _product_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Pair, Pair]:
    return _as_rounded(product, jnp.multiply, primals, tangents)


def _as_rounded(
    exact: Callable[..., Pair],
    plain: Callable[[Array, Array], Array],
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Pair, Pair]:
    """Halves of digits have no derivative; the product has that of the same one in floats, its error none."""
    rounded = exact(*primals)
    return rounded, (jax.jvp(plain, primals[:2], tangents[:2])[1], jnp.zeros_like(rounded[1]))


def total_by_halves(a: Array) -> Array:
    """The sum over the first axis by halves: its error is that of `halvings` additions, not of n."""
    while len(a) > 1:
        half = len(a) // 2
        a = jnp.concatenate([a[:half] + a[half : 2 * half], a[2 * half :]])
    return a[0]


def halvings(count: int) -> float:
    """Count the roundings of a term in `total_by_halves` of so many, at most."""
    return float(math.ceil(math.log2(max(count, 1))))


def additions(count: int) -> float:
    """Count the roundings of a term, at most, in `total_by_halves` and in `jnp.sum`, which adds up windows of 32."""
    return 32.0 * max(math.ceil(math.log(max(count, 1), 32)), 1)


def _halves(a: Array) -> Pair:
    """The upper half of the digits, rounded to the nearest, and the rest, exactly.

    Of float64's 53 digits the upper ones are 26; the others are 26 too, for they have a sign.
    """
    bits, integer = _bits(a)
    cut = (jnp.finfo(a.dtype).nmant + 2) // 2
    mask = np.array((1 << 8 * a.dtype.itemsize) - (1 << cut), integer)
    high = lax.bitcast_convert_type((bits + np.array(1 << (cut - 1), integer)) & mask, a.dtype)
    return high, a - high


def _power_of_two(a: Array) -> Array:
    """The largest one that is at most ``a >= 0``."""
    bits, integer = _bits(a)
    digits = np.array((1 << jnp.finfo(a.dtype).nmant) - 1, integer)
    return lax.bitcast_convert_type(bits & ~digits, a.dtype)


def _bits(a: Array) -> tuple[Array, np.dtype]:
    integer = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return lax.bitcast_convert_type(a, integer), integer
