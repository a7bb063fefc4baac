r"""Singular values and vectors of a matrix of many rows, from products with it and problems of its width.

The eigenvectors R of the Gram matrix $W^\top W$ are the right singular vectors as far as half of the digits tell, so
that the columns of $WR$ are nearly orthogonal, each as exact as is its own length D. With these lengths taken out,

$$
D^{-1}R^\top W^\top W R D^{-1} = L L^\top,\qquad WRD^{-1}L^{-\top}\ \text{has orthonormal columns},\qquad
W R = (WRD^{-1}L^{-\top})\,(L^\top D),
$$

a Gram matrix that is well conditioned but for columns of noise, and the singular value decomposition of the small
$L^\top D$ gives that of W with all of its digits. Nothing of many rows is ever factorised: where rows are spread over
devices, each of the two Gram matrices is a sum over them, as is the size of the largest entry, and everything else is
done by every device for itself. No step waits for what another one finds, so that none has to ask the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import Array

from mocha_jax._numerics.math import matmul, safe_ratio

# So many rows a column, below which LAPACK's decomposition of the whole is the quicker one.
_RATIO = 8

# What is added to the diagonal of a Gram matrix of unit columns, in units of its rounding: the first that leaves it
# definite. The first of all is enough but where columns of noise are parallel, or roundings all of one sign.
_SHIFTS = (1.0, 32.0, 1024.0)


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
    eps, scale = jnp.finfo(w.dtype).eps, _scale(w)
    w = w / scale
    rotation = _orthogonal(jnp.linalg.eigh(matmul(w.T, w))[1][:, ::-1])
    basis = matmul(w, rotation)
    gram = matmul(basis.T, basis)
    lengths = jnp.sqrt(jnp.diagonal(gram))
    lengths = jnp.where(lengths < 0.01 * eps * jnp.max(lengths), 0.0, lengths)  # nothing but noise
    inverse = safe_ratio(jnp.ones_like(lengths), lengths)[:, None]
    root = _root(inverse * gram * inverse.T, lengths)
    # LAPACK without vectors is another algorithm, which is off by thirty roundings now and then.
    q, s, vt = jnp.linalg.svd(root.T * lengths[None, :], full_matrices=False)
    inner = inverse * jsl.solve_triangular(root.T, q, lower=False)
    return Factors(basis, inner, scale * s, matmul(vt, rotation.T))


def _orthogonal(a: Array) -> Array:
    """A matrix that is orthogonal but for some roundings, without most of these: a step of Newton's method."""
    return a + 0.5 * matmul(a, jnp.eye(len(a), dtype=a.dtype) - matmul(a.T, a))


def _root(cosines: Array, lengths: Array) -> Array:
    """The Cholesky factor of the cosines of columns of these lengths, all but the shortest of them orthogonal."""
    d, eps = len(lengths), jnp.finfo(lengths.dtype).eps
    # Columns longer than this are orthogonal up to a quarter, for all that the rough Gram matrix and its vectors lack.
    # Shorter ones may be parallel. What is added to their squares is less than a rounding of the longest.
    clear = jnp.sqrt(16.0 * math.sqrt(d) * eps) * jnp.max(lengths)
    doubtful = jnp.where(lengths > clear, safe_ratio(clear, lengths) ** 2, 1.0)
    shifts = 2.0 * math.sqrt(d) * eps * jnp.asarray(_SHIFTS, lengths.dtype)
    shifted = 1.0 + shifts[:, None, None] * doubtful[None, None, :]
    roots = jnp.linalg.cholesky(jnp.where(jnp.eye(d, dtype=bool)[None], shifted, cosines[None]))
    return roots[jnp.argmax(jnp.all(jnp.isfinite(roots), axis=(1, 2)))]


def _scale(w: Array) -> Array:
    """A power of two, such that of W over it the squares of singular values and of their noise are in range."""
    info = jnp.finfo(w.dtype)
    largest = jnp.max(jnp.abs(w))
    exponent = jnp.where((largest > 0) & jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
    return jnp.ldexp(jnp.ones((), w.dtype), jnp.clip(exponent, info.minexp * 4 // 5, info.maxexp * 4 // 5))
