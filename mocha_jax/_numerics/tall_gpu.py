r"""Work that `mocha_jax._numerics.tall` has with matrices of the width of W, as one kernel on a GPU, by Mosaic.

By a library it is some hundred small kernels, and two calls that no graph of kernels can hold. One program of four
warps does it all: with G the Gram matrix $R^\top W^\top W R$ and J orthogonal, next to nothing but I where R is nearly
right, Jacobi's method makes $J^\top G J$ diagonal. The eigenvalues of a Gram matrix come out with all of its digits,
however far apart its diagonal numbers lie, as they do of its Cholesky factor (Demmel and Veselic 1992), and none of
noise can fail.

The method is one of columns only: with M = G J, what is to become 0 is $j_p^\top m_q$, and a rotation of two columns of
J is that of the same two of M. Columns lie in pairs; half of all pairs are rotated at once, each by some threads, and
change places. So, as numbers in a sort by odd and even transpositions, all of them meet once in as many steps as there
are columns, and a column never goes further than to the next pair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mocha_jax._core import mosaic
from mocha_jax._core.mosaic import THREADS, RegisterLayout, generation, load, store
from mocha_jax._core.pytree import Tree
from mocha_jax._numerics.tall import Basis, least_share

if TYPE_CHECKING:
    from jax import Ref

_OLDEST = 9  # generation of cards, Hopper
_VECTOR = 4  # numbers that a thread reads at once; rows in shared memory are that much longer, against bank conflicts
_WIDTHS = 2**4, 2**6  # columns: with more a thread's registers would not hold its part
_EXPONENT = 0x7F800000  # the bits of it in a float32
_STEEP = 2.0**60  # a slope whose square is in range, and that no number can tell from a larger one
_TWO_SWEEPS = 6  # at most so many times; two take a Gram matrix that is nearly diagonal to its last digit

Rule = Callable[..., Array]
Two = tuple[Array, ...]  # of M and of J every other column, each a row of a matrix; or the halves of a matrix
Change = Callable[[Two, Two, Array, Array], tuple[Two, Two, Array]]  # of pairs of columns


def fits(d: int, dtype: DTypeLike) -> bool:
    """Tell whether the kernel takes a matrix of so many columns, on the card lowered for."""
    return d <= _WIDTHS[1] and dtype == jnp.float32 and (generation() or 0) >= _OLDEST


def small_work(
    gram: Array, basis: Basis, least: float, rule: Rule | None = None, params: Tree = (), *, interpret: object = False
) -> list[Array]:
    """Find singular values and right singular vectors, and the matrix that makes W what it is to be.

    Args:
      gram: the Gram matrix ``[d, d]`` of W along the basis, over its size.
      basis: that basis.
      least: the least square of a singular value, over that of the size.
      rule: ``rule(s, params)``, what the singular values s are to become, by elementwise operations and sums over all.
      params: a pytree of numbers.
      interpret: how to interpret it on a CPU, where this version of JAX can.

    Returns:
      s ``[d]`` falling but for a rounding, V' ``[d, d]`` and the sizes of the next basis; with a rule its values
      ``[d]``, and ``V diag(values / s) V'``.
    """
    d, dtype = len(gram), gram.dtype
    n = max(pl.next_power_of_2(d), _WIDTHS[0])
    half, wide, more = n // 2, n + _VECTOR, (0, n - d)
    vectors = basis.vectors.T
    gram, vectors = (jnp.pad(a, (more, more)) for a in (gram, vectors))
    # As one array, which XLA makes where it adds up the Gram matrix: a basis that the kernel itself read, and the next
    # one it writes, would have to lie in two places, and be copied in a loop.
    size = jnp.full((1, n), basis.sizes[0])
    operand = jnp.concatenate([gram.reshape(half, 2, n).swapaxes(0, 1).reshape(n, n), vectors, size])
    numbers, structure = jax.tree.flatten((basis.usual, params))
    results = [(half, 2), (half, 2, n), (half, 2)] + ([(half, 2), (n, n)] if rule else [])
    scratch = [(half + 1, wide)] * 2 + [(n, wide)] * 2 + [(THREADS,)] * 2
    kernel_outputs = plgpu.kernel(
        partial(_kernel, d, rule, structure, least, least_share(d, dtype)),
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in results],
        scratch_types=[plgpu.SMEM(shape, dtype) for shape in scratch],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="small_work_on_gpu",
        **mosaic.interpreted(interpret),
    )(operand, *(jnp.asarray(a, dtype).reshape(1) for a in numbers))
    shapes = [(n,), (n, n), (n,), (n,), (n, n)]
    return [a.reshape(shape)[(slice(d),) * len(shape)] for a, shape in zip(kernel_outputs, shapes, strict=False)]


def _kernel(
    d: int, rule: Rule | None, structure: jax.tree_util.PyTreeDef, least: float, least_share: float, operand: Ref,
    *refs: Ref,
) -> None:  # fmt: skip
    """Decompose the matrix in one program."""
    *numbers, moving_m, moving_j, left, right, line, ratios = refs
    numbers, (s_out, vt_out, sizes_out, *more_out) = numbers[: structure.num_leaves], numbers[structure.num_leaves :]
    usual, params = jax.tree.unflatten(structure, [ref[0] for ref in numbers])
    n = operand.shape[1]
    half = n // 2
    lanes = THREADS // half  # of the latter layout columns need not be side by side in memory
    pairs, layout = (mosaic.layout(lanes, min(n // lanes, most)) for most in (_VECTOR, 1))
    flat = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    eps, one, zero = float(jnp.finfo(operand.dtype).eps), jnp.ones((), operand.dtype), jnp.zeros((), operand.dtype)
    parts, whole = (pl.ds(0, half), pl.ds(half, half)), pl.ds(0, n)
    last = plgpu.broadcasted_iota(jnp.int32, (half,), 0, layout=pairs.reduce(1)) == half - 1

    def along(numbers: Array, axis: int, layout: RegisterLayout) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(numbers, (half, n), (axis,)), layout)

    def eye(first: int, step: int, layout: RegisterLayout, begin: int = 0) -> Array:
        """Rows of the unit matrix, from some column on."""
        on_row, on_column = (plgpu.broadcasted_iota(jnp.int32, (half, n), axis, layout=layout) for axis in (0, 1))
        return jnp.where((step * on_row + first == on_column) & (on_column >= begin), one, zero)

    def dot(a: Array, b: Array) -> Array:
        return mosaic.total(a * b, 1, n // lanes)

    def over_all(numbers: Array) -> Array:
        """The largest of some numbers, one a row, that are at least 0."""
        store(line.at[parts[0]], numbers)
        return jnp.max(load(line, flat))

    def mixed(first: Two, second: Two, mix: Two) -> tuple[Two, Two]:
        p, q, r, t = (along(numbers, 0, pairs) for numbers in mix)
        both = [(p * a + q * b, r * a + t * b) for a, b in zip(first, second, strict=True)]
        return tuple(a for a, _ in both), tuple(b for _, b in both)

    def rotated(first: Two, second: Two, alone: Array, worst: Array) -> tuple[Two, Two, Array]:
        """Make columns orthogonal and exchange them, but for those that are alone."""
        (m, j), (other_m, other_j) = first, second
        a, b, g = dot(m, j), dot(other_m, other_j), dot(j, other_m)
        off = (g / jnp.maximum(jnp.abs(a), floor)) * (g / jnp.maximum(jnp.abs(b), floor))
        none = g == 0
        z = (b - a) / jnp.where(none, 1.0, 2.0 * g)
        steep = jnp.minimum(jnp.abs(z), _STEEP)
        squared = 1.0 + steep * steep
        size = 1.0 / (steep + squared * lax.rsqrt(squared))
        t = jnp.where(none, 0.0, jnp.where(z < 0, -size, size))
        c = lax.rsqrt(1.0 + t * t)
        s = t * c
        mix = jnp.where(alone, one, s), jnp.where(alone, zero, c), jnp.where(alone, zero, c), jnp.where(alone, one, -s)
        return *mixed(first, second, mix), jnp.maximum(worst, jnp.where(alone, zero, off))

    def sorted_(first: Two, second: Two, alone: Array, worst: Array) -> tuple[Two, Two, Array]:
        """Exchange columns whose eigenvalues rise."""
        rises = (dot(*first) < dot(*second)) & ~alone
        other = jnp.where(rises, one, zero)
        same = 1.0 - other
        return *mixed(first, second, (same, other, other, same)), jnp.maximum(worst, other)

    def two_steps(change: Change, first: Two, second: Two, worst: Array) -> tuple[Two, Two, Array]:
        """Change pairs of columns, those of the next pair's first column and the second, and go back."""
        first, second, worst = change(first, second, last & ~last, worst)
        first = passed(first, 0)
        second, first, worst = change(second, first, last, worst)
        return passed(first, 1), second, worst

    def passed(columns: Two, back: int) -> Two:
        """Give first columns to the pairs before, or after."""
        for ref, a in zip((moving_m, moving_j), columns, strict=True):
            store(ref.at[pl.ds(back, half), whole], a)
        return tuple(load(ref.at[pl.ds(1 - back, half), whole], pairs) for ref in (moving_m, moving_j))

    def product(of_rows: Callable[[Array], Two], of_columns: Callable[[Array], Array]) -> Two:
        """Add up n products of a column, in two halves, and a row."""

        def add(k: Array, halves: Two) -> Two:
            wide = along(of_columns(k), 1, layout)
            return tuple(part + along(some, 0, layout) * wide for part, some in zip(halves, of_rows(k), strict=True))

        nothing = plgpu.layout_cast(jnp.zeros((half, n), operand.dtype), layout)
        return lax.fori_loop(0, n, add, (nothing, nothing))

    def column_of(ref: Ref) -> Callable[[Array], Two]:
        return lambda k: tuple(load(ref.at[part, k], layout.reduce(1)) for part in parts)

    def keep(ref: Ref, halves: Two) -> None:
        for part, some in zip(parts, halves, strict=True):
            store(ref.at[part, whole], some)

    for ref in (line, ratios):
        store(ref, plgpu.layout_cast(jnp.zeros((THREADS,), operand.dtype), flat))
    for ref in (moving_m, moving_j):  # the last pair's place, where there is no next pair, and no number to be mixed
        store(ref.at[pl.ds(1, half), whole], plgpu.layout_cast(jnp.zeros((half, n), operand.dtype), pairs))
    first: Two
    second: Two
    first, second = ((load(operand.at[part], pairs), eye(k, 2, pairs)) for k, part in enumerate(parts))
    longest = over_all(jnp.maximum(dot(*first), dot(*second)))
    if n > d:  # columns that were added are last in the end, as no noise is so far below 0
        first, second = ((m - longest * eye(k, 2, pairs, d), j) for k, (m, j) in enumerate((first, second)))
    # Of columns of noise nothing has to be orthogonal: a rounding of the largest length, squared.
    floor = jnp.maximum(longest * eps**2, least)
    nothing = plgpu.layout_cast(jnp.zeros((half,), operand.dtype), pairs.reduce(1))

    def sweeps(carry: tuple[Two, Two, Array, Array]) -> tuple[Two, Two, Array, Array]:
        def steps(k: Array, carry: tuple[Two, Two, Array]) -> tuple[Two, Two, Array]:
            first, second, worst = carry
            return two_steps(rotated, first, second, jnp.where(k == half, zero, worst))  # of the second sweep

        first, second, _, count = carry
        first, second, worst = lax.fori_loop(0, n, steps, (first, second, nothing))
        return first, second, over_all(worst), count + 1

    def sorting(carry: tuple[Two, Two, Array]) -> tuple[Two, Two, Array]:
        first, second, worst = two_steps(sorted_, *carry[:2], nothing)
        return first, second, over_all(worst)

    # Convergence is quadratic: what was this near before a sweep is diagonal after it.
    start: tuple[Two, Two, Array, Array] = first, second, one, jnp.zeros((), jnp.int32)
    first, second, *_ = lax.while_loop(lambda c: (c[2] > eps) & (c[3] < _TWO_SWEEPS), sweeps, start)
    unsorted: tuple[Two, Two, Array] = first, second, one
    first, second, _ = lax.while_loop(lambda c: c[2] > 0, sorting, unsorted)
    squares = [jnp.maximum(dot(*columns), least) for columns in (first, second)]
    s = [operand[2 * n, 0] * square * lax.rsqrt(square) for square in squares]

    # V' = J'R', and orthogonal but for the last rounding after a step of Newton's method.
    keep(left, (first[1], second[1]))
    keep(right, tuple(load(operand.at[pl.ds(n + begin, half)], layout) for begin in (0, half)))
    turned = product(column_of(left), lambda k: load(right.at[k, whole], layout.reduce(0)))
    keep(right, turned)
    squared = product(column_of(right), lambda k: load(right.at[:, k], layout.reduce(0)))
    keep(left, tuple(1.5 * eye(begin, 1, layout) - 0.5 * a for begin, a in zip((0, half), squared, strict=True)))
    products = product(column_of(left), lambda k: load(right.at[k, whole], layout.reduce(0)))
    keep(right, products)
    for k, part in enumerate(parts):
        store(vt_out.at[:, k], products[k])
        store(s_out.at[:, k], s[k])
        store(line.at[part], s[k])
    empty = line[0] <= least_share * usual  # the first is the largest
    for k in (0, 1):
        store(sizes_out.at[:, k], _power_of_two(jnp.where(empty, usual, s[k])))
    if rule is None:
        return
    values_out, inner_out = more_out
    old = load(line, flat)
    values = rule(old, params)
    store(line, values)
    store(ratios, jnp.where(old > 0, values / jnp.where(old > 0, old, 1.0), 0.0))
    inner = product(
        lambda k: tuple(ratios[k] * load(right.at[k, part], layout.reduce(1)) for part in parts),
        lambda k: load(right.at[k, whole], layout.reduce(0)),
    )
    for k, part in enumerate(parts):
        store(values_out.at[:, k], load(line.at[part], layout.reduce(1)))
        store(inner_out.at[part], inner[k])


def _power_of_two(size: Array) -> Array:
    """The power of two that `mocha_jax._numerics.tall` takes, of float32."""
    exponent = lax.bitcast_convert_type(size, jnp.int32) & _EXPONENT
    power = 2.0 * lax.bitcast_convert_type(exponent, jnp.float32)
    info = jnp.finfo(jnp.float32)
    smallest, largest = (2.0 ** (bound * 4 // 5) for bound in (info.minexp, info.maxexp))
    return jnp.where(exponent == _EXPONENT, 1.0, jnp.clip(power, smallest, largest))
