"""Couplings of a few numbers: none, by features, of tasks that are all alike, and of scaled features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from mocha_jax._core import check
from mocha_jax._core.pytree import static
from mocha_jax._numerics.cholesky import inverse_factor, with_rounding
from mocha_jax._numerics.linear_systems import twice
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.coupling._base import Coupling, Curvature, Parts, by_conjugate_gradients


class Diagonal(Coupling):
    """Tasks that do not touch each other: one number per task. O(m d)."""

    scale: Array  # [m]

    def __post_init__(self) -> None:
        check.array("Diagonal", "scale", self.scale, ("m",))

    def apply(self, v: Array) -> Array:
        return self.scale[:, None] * v

    def parts(self, v: Array) -> Parts:
        return Parts(self.scale, jnp.zeros((1, 1), v.dtype), v[:1])

    def diagonal(self) -> Array:
        return self.scale

    def gradient(self, w: Array) -> Array:
        return w / self.scale[:, None]

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        return curvature.own(self.scale).solve

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> Diagonal:
        pull = rho * self.scale
        return Diagonal(pull / (1.0 + pull))

    def row_sums(self, nodes: Array) -> Array:
        return nodes * self.scale

    def spectral_bound(self, nodes: Array) -> Array:
        return jnp.max(nodes)


class FeatureDiagonal(Coupling):
    r"""Tasks that share no weights but the scale of every feature: one number per column of V. O(m d)."""

    scale: Array  # [d], or [1] for all
    num_tasks: int = static()

    def __post_init__(self) -> None:
        check.array("FeatureDiagonal", "scale", self.scale, ("d",))
        check.integer("FeatureDiagonal", 1, num_tasks=self.num_tasks)

    def apply(self, v: Array) -> Array:
        return self.scale[None, :] * v

    def diagonal(self) -> Array:
        # Of every feature's number the largest: that one is safe for all.
        return jnp.broadcast_to(jnp.max(self.scale), (self.num_tasks,))

    def gradient(self, w: Array) -> Array:
        return safe_ratio(w, self.scale[None, :])

    def project_to_range(self, w: Array) -> Array:
        return jnp.where(self.scale[None, :] > 0, w, 0.0)

    def energy(self, w: Array) -> Array:
        r"""$\tfrac12\mathrm{tr}(W^\top\bar M^{-1}W)$, a scalar; infinite where W leaves the range of $\bar M$."""
        squares = jnp.sum(w**2, axis=0)
        outside = jnp.where(squares > 0, jnp.inf, 0.0)
        return 0.5 * jnp.sum(jnp.where(self.scale > 0, safe_ratio(squares, self.scale), outside))

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> FeatureDiagonal:
        pull = rho * self.scale
        return FeatureDiagonal(pull / (1.0 + pull), self.num_tasks)

    def row_sums(self, nodes: Array) -> Array:
        return nodes * jnp.max(self.scale)

    def spectral_bound(self, nodes: Array) -> Array:
        return jnp.max(nodes)


class Exchangeable(Coupling):
    r"""All tasks alike: $\bar M = a(I - J) + b J$ with $J = 11^\top/m$, b >= a. O(m d)."""

    within: Array  # [] a, on deviations from the mean
    common: Array  # [] b, on the mean
    num_tasks: int = static()

    def __post_init__(self) -> None:
        for name, value in (("within", self.within), ("common", self.common)):
            check.number("Exchangeable", name, value)
        check.integer("Exchangeable", 1, num_tasks=self.num_tasks)

    @property
    def _off(self) -> Array:
        return (self.common - self.within) / self.num_tasks

    def apply(self, v: Array) -> Array:
        return self.parts(v).together(v)

    def parts(self, v: Array) -> Parts:
        return Parts(jnp.reshape(self.within, 1), jnp.reshape(self._off, (1, 1)), v)

    def diagonal(self) -> Array:
        return jnp.broadcast_to(self.within + self._off, (self.num_tasks,))

    def gradient(self, w: Array) -> Array:
        return w / self.within + (1.0 / self.common - 1.0 / self.within) * jnp.mean(w, axis=0, keepdims=True)

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        r"""One system for what all tasks share.

        With $K_t = (I + aH_t)^{-1}$ and o the number off the diagonal, $D_t = K_t(C_t + aX_t^\top\rho_t + c)$, where
        $(I + o\sum_t K_tH_t)\,c = o\sum_t (X_t^\top\rho_t - K_tH_t(C_t + aX_t^\top\rho_t))$.
        """
        own = curvature.own(jnp.reshape(self.within, 1))
        bent, applied = own.bent()
        unit = jnp.eye(len(bent), dtype=bent.dtype)
        factor = inverse_factor(unit[None] + with_rounding(self._off * bent[None]))[0]

        def step(right: Array, slopes: Array) -> tuple[Array, Array]:
            # Rounding of the products makes the common system inexact; a second solution makes up for it.
            def corrected(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                solution, left, slopes = carry
                rest, sums = right + self.apply(curvature.sums(left)) - solution, curvature.sums(slopes)
                aside = jnp.sum(sums, axis=0) - applied(rest + self.within * sums)
                common = matmul(factor.T, matmul(factor, self._off * aside))
                more, less = own.solve(rest + common[None], slopes)
                return solution + more, left + less, jnp.zeros_like(slopes)

            nothing = jnp.zeros_like(right), jnp.zeros_like(slopes), slopes
            return twice(corrected, nothing)[:2]

        return step

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> Exchangeable:
        of_deviations, common = (rho * scale / (1.0 + rho * scale) for scale in (self.within, self.common))
        return Exchangeable(of_deviations, common, self.num_tasks)

    def row_sums(self, nodes: Array) -> Array:
        return nodes * self.within + jnp.sum(nodes) * self._off

    def spectral_bound(self, nodes: Array) -> Array:
        # Exact with equally many nodes per task, an upper bound otherwise.
        return (jnp.max(nodes) * self.within + jnp.sum(nodes) * self._off) / (self.within + self._off)


class Scaled(Coupling):
    r"""$V \mapsto \bar M(V S) S$ of another coupling $\bar M$ and $S = \mathrm{diag}(s)$."""

    of: Coupling
    scale: Array  # [d] s

    def __post_init__(self) -> None:
        check.instance("Scaled", "of", self.of, Coupling, "coupling.Dense(matrix)")
        check.array("Scaled", "scale", self.scale, ("d",))

    @property
    def dense(self) -> bool:  # type: ignore[override]
        return self.of.dense

    @property
    def _most(self) -> Array:
        """The largest number for any feature: that one is safe for all."""
        return jnp.max(self.scale**2)

    def apply(self, v: Array) -> Array:
        return self.scale[None, :] * self.of.apply(self.scale[None, :] * v)

    def diagonal(self) -> Array:
        return self._most * self.of.diagonal()

    def row_sums(self, nodes: Array) -> Array:
        return self._most * self.of.row_sums(nodes)

    def spectral_bound(self, nodes: Array) -> Array:
        return self.of.spectral_bound(nodes)

    def gradient(self, w: Array) -> Array:
        return self.of.gradient(w / self.scale[None, :]) / self.scale[None, :]

    def project_to_range(self, w: Array) -> Array:
        return self.scale[None, :] * self.of.project_to_range(w / self.scale[None, :])

    def prox(self, y: Array, rho: Array) -> Array:
        # Of u = w / s the minimiser of R(u) + rho s^2 |u - y / s|^2 / 2, each feature by itself.
        def one(column: Array, s: Array) -> Array:
            return s * self.of.prox(column[:, None] / s, rho * s**2)[:, 0]

        return jax.vmap(one, (1, 0), 1)(y, self.scale)

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        # (I + M S H S) D / s = C / s + M S X' rho: the system of scaled features.
        system = self.of.newton_system(curvature.scaled(self.scale))

        def step(right: Array, slopes: Array) -> tuple[Array, Array]:
            solution, left = system(right / self.scale[None, :], slopes)
            return self.scale[None, :] * solution, left

        return step


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
