"""A coupling stored as a matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.coupling._base import Coupling, Curvature, Parts, by_conjugate_gradients


class Dense(Coupling):
    """Any relationship, stored as a matrix. O(m^2 d)."""

    matrix: Array  # [m, m]

    dense = True

    def __post_init__(self) -> None:
        check.array("Dense", "matrix", self.matrix, ("m", "m"))
        if self.matrix.shape[0] != self.matrix.shape[1]:
            raise ValueError(f"Dense: matrix must be square, [m, m], got shape {self.matrix.shape}.")

    def apply(self, v: Array) -> Array:
        return matmul(self.matrix, v)

    def parts(self, v: Array) -> Parts:
        return Parts(jnp.zeros((1,), v.dtype), self.matrix, v)

    def diagonal(self) -> Array:
        return jnp.diagonal(self.matrix)

    def gradient(self, w: Array) -> Array:
        return jnp.linalg.solve(self.matrix, w)

    def conjugate_bound(self, v: Array, precision: Array) -> Array:
        r"""An upper bound on $\tfrac12\langle V, A^{-1}V\rangle$ if the matrix is only nearly the inverse of A.

        With $E = I - A\bar M$, $A^{-1} = \bar M(I - E)^{-1}$ differs from the matrix by at most
        $\|\bar M\|\,\|E\|/(1 - \|E\|)$. Infinite where nothing can be said.
        """
        m, size = len(v), jnp.abs(self.matrix)
        off = jnp.abs(jnp.eye(m, dtype=v.dtype) - matmul(precision, self.matrix))
        unit = 0.5 * jnp.finfo(v.dtype).eps
        lost = jnp.max(jnp.sum(off + (m + 4.0) * unit * matmul(jnp.abs(precision), size), axis=1))
        seen = jnp.sum(v * matmul(self.matrix, v) + (m + 64.0) * unit * jnp.abs(v) * matmul(size, jnp.abs(v)))
        unseen = jnp.max(jnp.sum(size, axis=1)) * jnp.sum(v**2) * lost / (1.0 - lost)
        return jnp.where(lost < 1.0, 0.5 * (jnp.maximum(seen, 0.0) + unseen), jnp.inf)

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        precision = jnp.linalg.inv(self.matrix)
        precision = 0.5 * (precision + precision.T)
        return by_conjugate_gradients(partial(matmul, precision), jnp.diagonal(precision), curvature)

    def prox(self, y: Array, rho: Array) -> Array:
        pull = rho * self.matrix
        return jnp.linalg.solve(jnp.eye(len(y), dtype=y.dtype) + pull, matmul(pull, y))

    def resolvent(self, rho: Array) -> Dense:
        return Dense(self.prox(jnp.eye(len(self.matrix), dtype=self.matrix.dtype), rho))

    def row_sums(self, nodes: Array) -> Array:
        return matmul(jnp.abs(self.matrix), nodes)

    def spectral_bound(self, nodes: Array) -> Array:
        # Nodes of one task have equal rows, so the eigenvalue over nodes is one over tasks.
        scale = jnp.sqrt(safe_ratio(nodes, self.diagonal()))
        return jnp.linalg.eigvalsh(scale[:, None] * self.matrix * scale[None, :])[-1]
