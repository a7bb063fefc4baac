r"""Singular values and vectors of a matrix of many rows, from products with it and problems of its width.

With an orthogonal R whose columns are nearly the right singular vectors the columns of $WR$ are nearly orthogonal, each
as exact as is its own length D. With these lengths taken out,

$$
R^\top W^\top W R = D L L^\top D,\qquad WRD^{-1}L^{-\top}\ \text{has orthonormal columns},\qquad
W = (WRD^{-1}L^{-\top})\,(L^\top D R^\top),
$$

a Gram matrix that is well conditioned but for columns of noise, and the singular value decomposition of the small
$L^\top D R^\top$ gives that of W with all of its digits. Nothing of many rows is ever factorised: where rows are spread
over devices, the Gram matrix is a sum over them, and everything else is done by every device for itself. No step waits
for what another one finds, so that none has to ask the host.

R may come from the Gram matrix of W itself, whose eigenvectors are the right singular vectors as far as half of the
digits tell (`basis_of`), or be that of a matrix nearby. The further away it is, the more of the smallest singular
values cannot be told from 0: those below the root of a rounding, times the angle that R is off by.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array, lax
from jax.typing import DTypeLike

from mocha_jax._core.compiling import platform_dependent
from mocha_jax._core.pytree import PyTree, Pytree, Tree
from mocha_jax._numerics.math import matmul, safe_ratio

# So many rows a column, below which LAPACK's decomposition of the whole is the quicker one.
_RATIO = 8

# By how much the cosines of the columns are made smaller, in units of their rounding times the root of their number:
# the first that leaves the Gram matrix definite. The first of all is enough but where columns are parallel and
# roundings all of one sign; the last one is always, and then the basis found is a better one to begin with.
_SHRINKAGES = (2.0, 64.0, 2048.0)
_ALWAYS = 0.1

Fn = Callable[[Array, PyTree], Array]  # of singular values and a pytree


class Basis(Pytree):
    """Knowledge of a matrix ``[m, d]``: about its right singular vectors, and how large it is."""

    vectors: Array  # [d, d] orthogonal
    sizes: Array  # [d] powers of two about the lengths along them; by the first one the matrix is divided
    usual: Array  # [] the same where the matrix is 0, and hence says nothing of the next one


class Right(NamedTuple):
    """The right singular vectors of W, and how to find the left ones."""

    s: Array  # [d] falling
    vt: Array  # [d, d] V'
    inner: tuple[Array, Array]  # DL, and the left singular vectors of L'DR'


class Contraction(NamedTuple):
    """A matrix of the width of W that W is to be multiplied with."""

    s: Array  # [d] singular values of W, falling
    values: Array  # [d] what they become
    inner: Array  # [d, d] V diag(values / s) V'
    basis: Basis  # for a matrix nearby


class Factors(NamedTuple):
    r"""$W = U\,\mathrm{diag}(s)\,V^\top$ with $U = BN$, for W of at least as many rows as columns.

    Of a singular value that is 0, up to rounding, the column of U may be shorter than 1.
    """

    basis: Array  # [m, d] B
    inner: Array | None  # [d, d] N; None where it is the identity
    s: Array  # [d] falling
    vt: Array  # [d, d] V'

    def left(self, x: Array) -> Array:
        """U times a matrix ``[d, k]``, ``[m, k]``."""
        return matmul(self.basis, x if self.inner is None else matmul(self.inner, x))

    def against(self, x: Array) -> Array:
        """U' times a matrix ``[m, k]``, ``[d, k]``."""
        along = matmul(self.basis.T, x)
        return along if self.inner is None else matmul(self.inner.T, along)


def factors(w: Array) -> Factors:
    """The factors of ``[m, d]``, m >= d."""
    m, d = w.shape
    if m < _RATIO * d:
        u, s, vt = jnp.linalg.svd(w, full_matrices=False)
        return Factors(u, None, s, vt)
    size, one = _power_of_two(jnp.max(jnp.abs(w))), jnp.ones((), w.dtype)
    w = w / size
    basis = Basis(_vectors(w), jnp.ones_like(w[0]), one)
    along = _along(w, basis)
    right = _right(_gram(along), basis)
    root, q = right.inner
    s = jnp.where(nothing(right.s, one), 0.0, size * right.s)
    return Factors(along, jsl.solve_triangular(root.T, q, lower=False), s, right.vt)


def basis_of(w: Array, usual: Array) -> Basis:
    """The basis of ``[m, d]`` as its own Gram matrix tells it; of a usual size where it is 0."""
    largest = jnp.max(jnp.abs(w))
    size = _power_of_two(jnp.where(largest > 0, largest, usual))
    return Basis(_vectors(w / size), size * jnp.ones_like(w[0]), jnp.asarray(usual, w.dtype))


def _vectors(w: Array) -> Array:
    """The right singular vectors of a matrix whose size is about 1, as far as its Gram matrix tells them."""
    return _orthogonal(jnp.linalg.eigh(matmul(w.T, w))[1][:, ::-1])


def contraction(fn: Fn, by_sums: Fn | None, w: Array, params: Tree, basis: Basis) -> Contraction:
    """Make of the singular values s of ``[m, d]``, m >= d, ``fn(s, params)``, from a basis of a matrix nearby.

    `by_sums` is the same function by elementwise operations and sums over all alone, of s in any order with zeros
    added; None: it is not to be had so. It has no derivative.
    """
    gram = _gram(_along(w, basis))
    return platform_dependent(gram, basis, params, default=_ByLibrary(fn), cuda=_ByKernel(fn, by_sums))


@dataclasses.dataclass(frozen=True)
class _ByLibrary:
    """Use LAPACK, or cuSOLVER."""

    fn: Fn

    def __call__(self, gram: Array, basis: Basis, params: Tree) -> Contraction:
        s, vt, _ = _right(gram, basis)
        empty = nothing(s, basis.usual)[0]
        after = Basis(_orthogonal(vt.T), _power_of_two(jnp.where(empty, basis.usual, s)), basis.usual)
        return _contraction(self.fn, s, after, params)


@dataclasses.dataclass(frozen=True)
class _ByKernel:
    """Use one kernel, if there is one for such a matrix and the card that is lowered for."""

    fn: Fn
    by_sums: Fn | None

    def __call__(self, gram: Array, basis: Basis, params: Tree) -> Contraction:
        kernel = _kernel()
        if kernel is None or not kernel.fits(gram.shape[0], gram.dtype):
            return _ByLibrary(self.fn)(gram, basis, params)
        s, vt, sizes, *more = kernel.small_work(gram, basis, _least(gram.dtype), self.by_sums, params)
        after = Basis(vt.T, sizes, basis.usual)
        if not more:
            return _contraction(self.fn, s, after, params)
        values, inner = more
        return Contraction(s, values, inner, after)


def _contraction(fn: Fn, s: Array, basis: Basis, params: Tree) -> Contraction:
    values = fn(s, params)
    return Contraction(s, values, matmul(basis.vectors, safe_ratio(values, s)[:, None] * basis.vectors.T), basis)


def _kernel() -> ModuleType | None:
    """The module of the kernel, if this version of JAX supports it."""
    try:
        return importlib.import_module("mocha_jax._numerics.tall_gpu")
    except ImportError as error:
        if (error.name or "").startswith("mocha_jax"):
            raise
        return None


def _along(w: Array, basis: Basis) -> Array:
    """W R over the size of W."""
    return matmul(w / basis.sizes[0], basis.vectors)


def _gram(along: Array) -> Array:
    return matmul(along.T, along)


def _right(gram: Array, basis: Basis) -> Right:
    """The right singular vectors of a matrix, and its singular values, from the Gram matrix along a basis.

    In place of 0 there are values that are `nothing`.
    """
    root = _root(gram)
    # LAPACK without vectors is another algorithm, which is off by thirty roundings now and then.
    q, s, vt = jnp.linalg.svd(matmul(basis.sizes[0] * root.T, basis.vectors.T), full_matrices=False)
    return Right(s, vt, (root, q))


def nothing(s: Array, size: Array) -> Array:
    """Tell which singular values found along a basis are those of nothing, beside a matrix of that size."""
    return s <= least_share(len(s), s.dtype) * size


def least_share(d: int, dtype: DTypeLike) -> float:
    """The largest singular value of nothing, beside a size of 1."""
    return 2.0 * math.sqrt(d * _least(dtype))


def _least(dtype: DTypeLike) -> float:
    """The least square that has all of its digits, after a matrix was divided by its size."""
    return float(jnp.finfo(dtype).tiny / jnp.finfo(dtype).eps ** 2)


def _orthogonal(a: Array) -> Array:
    """A matrix that is orthogonal but for some roundings, without most of these: a step of Newton's method."""
    return a + 0.5 * matmul(a, jnp.eye(len(a), dtype=a.dtype) - matmul(a.T, a))


def _root(gram: Array) -> Array:
    """The Cholesky factor LD of a Gram matrix, whose digits are those of L: the lengths D take no part in them."""
    d, eps = len(gram), jnp.finfo(gram.dtype).eps
    kept = 1.0 - jnp.asarray([math.sqrt(d) * eps * by for by in _SHRINKAGES] + [_ALWAYS], gram.dtype)
    diagonal, others = jnp.maximum(gram, _least(gram.dtype)), kept[:, None, None] * gram[None]
    candidates = jnp.where(jnp.eye(d, dtype=bool)[None], diagonal[None], others)
    roots = lax.linalg.cholesky(candidates, symmetrize_input=False)
    root = roots[-1]
    for other in roots[-2::-1]:  # where one fails its last number is none
        root = jnp.where(jnp.isfinite(other[-1, -1]), other, root)
    return root


def _power_of_two(size: Array) -> Array:
    """A power of two near a size, over which squares of singular values and of their noise are in range."""
    info = jnp.finfo(size.dtype)
    exponent = jnp.where((size > 0) & jnp.isfinite(size), jnp.frexp(size)[1], 0)
    return jnp.ldexp(jnp.ones((), size.dtype), jnp.clip(exponent, info.minexp * 4 // 5, info.maxexp * 4 // 5))
