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

import math
from typing import NamedTuple

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array, lax
from jax.typing import DTypeLike

from mocha_jax._core.pytree import Pytree
from mocha_jax._numerics.math import matmul

# So many rows a column, below which LAPACK's decomposition of the whole is the quicker one.
_RATIO = 8

# By how much the cosines of the columns are made smaller, in units of their rounding times the root of their number:
# the first that leaves the Gram matrix definite. The first of all is enough but where columns are parallel and
# roundings all of one sign; the last one is always, and then the basis found is a better one to begin with.
_SHRINKAGES = (2.0, 64.0, 2048.0)
_ALWAYS = 0.1


class Basis(Pytree):
    """Knowledge of a matrix ``[m, d]``: about its right singular vectors, and how large it is."""

    vectors: Array  # [d, d] orthogonal
    sizes: Array  # [d] powers of two about the lengths along them; by the first one the matrix is divided
    usual: Array  # [] the same where the matrix is 0, and hence says nothing of the next one


class Right(NamedTuple):
    """The right singular vectors of W, and how to find the left ones."""

    s: Array  # [d] falling
    vt: Array  # [d, d] V'
    along: Array  # [m, d] W R over the size of W
    inner: tuple[Array, Array]  # DL, and the left singular vectors of L'DR'

    def after(self, basis: Basis) -> Basis:
        """The basis for a matrix nearby, after the one that these were found with."""
        empty = nothing(self.s, basis.usual)[0]
        return Basis(self.vt.T, _power_of_two(jnp.where(empty, basis.usual, self.s)), basis.usual)


class Factors(NamedTuple):
    r"""$W = U\,\mathrm{diag}(s)\,V^\top$ with $U = BN$, for W of at least as many rows as columns.

    Of a singular value that is 0, up to rounding, the column of U may be shorter than 1.
    """

    basis: Array  # [m, d] B
    inner: Array  # [d, d] N
    s: Array  # [d] falling
    vt: Array  # [d, d] V'

    def left(self, x: Array) -> Array:
        """U times a matrix ``[d, k]``, ``[m, k]``."""
        return matmul(self.basis, matmul(self.inner, x))

    def against(self, x: Array) -> Array:
        """U' times a matrix ``[m, k]``, ``[d, k]``."""
        return matmul(self.inner.T, matmul(self.basis.T, x))


def factors(w: Array) -> Factors:
    """The factors of ``[m, d]``, m >= d."""
    m, d = w.shape
    if m < _RATIO * d:
        u, s, vt = jnp.linalg.svd(w, full_matrices=False)
        return Factors(u, jnp.eye(d, dtype=w.dtype), s, vt)
    size, one = _power_of_two(jnp.max(jnp.abs(w))), jnp.ones((), w.dtype)
    w = w / size
    found = right(w, Basis(_vectors(w), jnp.ones_like(w[0]), one))
    root, q = found.inner
    s = jnp.where(nothing(found.s, one), 0.0, size * found.s)
    return Factors(found.along, jsl.solve_triangular(root.T, q, lower=False), s, found.vt)


def basis_of(w: Array, usual: Array) -> Basis:
    """The basis of ``[m, d]`` as its own Gram matrix tells it; of a usual size where it is 0."""
    largest = jnp.max(jnp.abs(w))
    size = _power_of_two(jnp.where(largest > 0, largest, usual))
    return Basis(_vectors(w / size), size * jnp.ones_like(w[0]), jnp.asarray(usual, w.dtype))


def _vectors(w: Array) -> Array:
    """The right singular vectors of a matrix whose size is about 1, as far as its Gram matrix tells them."""
    return _orthogonal(jnp.linalg.eigh(matmul(w.T, w))[1][:, ::-1])


def right(w: Array, basis: Basis) -> Right:
    """The right singular vectors of ``[m, d]``, m >= d, and its singular values, from a basis of a matrix nearby.

    In place of 0 there are values that are `nothing`.
    """
    size = basis.sizes[0]
    along = matmul(w / size, basis.vectors)
    root = _root(matmul(along.T, along))
    # LAPACK without vectors is another algorithm, which is off by thirty roundings now and then.
    q, s, vt = jnp.linalg.svd(matmul(size * root.T, basis.vectors.T), full_matrices=False)
    return Right(s, vt, along, (root, q))


def nothing(s: Array, size: Array) -> Array:
    """Tell which singular values that `right` found are those of nothing, beside a matrix of that size."""
    return s <= 2.0 * math.sqrt(len(s) * _least(s.dtype)) * size


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
