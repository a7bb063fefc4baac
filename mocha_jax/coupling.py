r"""Couplings of tasks: the operator $\bar M$ of a regularizer.

For a given $\Omega$ the convex models' regularizers are quadratic in the tasks,
$R(W) = \tfrac12 \mathrm{tr}(W^\top A W)$ with the task axis first, W ``[m, d]``. Then
$R^*(V) = \tfrac12\langle V, \bar M V\rangle$ with $\bar M = A^{-1}$ and
$W = \nabla R^*(V) = \bar M V$. A solver needs no more of a regularizer than this operator.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from mocha_jax._core import check
from mocha_jax._core.pytree import Hyperparameter, Pytree, static
from mocha_jax._core.transfers import on_purpose
from mocha_jax._numerics.math import matmul, safe_ratio
from mocha_jax.spectral import singular_values, spectral_map

__all__ = [
    "as_matrix",
    "correlation",
    "Coupling",
    "Dense",
    "Diagonal",
    "Exchangeable",
    "LowRank",
    "Operator",
    "Parts",
    "SIGMA_PRIME_RULES",
]


def __dir__() -> list[str]:
    return __all__


SIGMA_PRIME_RULES = ("lemma9", "per_task", "spectral")

# Up to so many tasks the row sums of a low-rank coupling are exact, a few rows at a time; beyond, bounded.
_EXACT_ROWS, _ROWS_AT_ONCE = 4096, 64

# In units of the largest one's rounding, the singular values of F whose left vectors may be shorter than 1.
_NOISE = 128.0


class Operator(Pytree):
    """A linear operator on the task axis, or nearly one."""

    @abstractmethod
    def apply(self, v: Array) -> Array:
        """Apply it to the rows of all tasks, ``[m, d]`` to ``[m, d]``."""

    def parts(self, v: Array) -> Parts | None:
        """Take the result apart, if it is of that form. Default: None."""
        return None


class Parts(NamedTuple):
    """The result of an operator, taken apart: ``scale * v + mix @ rows``.

    Whoever puts them together can do so on the way to something else.
    """

    scale: Array  # [m] or [1]
    mix: Array | None  # [m, b]; [1, 1]: so much of the sum of all rows; None: each row is its task's
    rows: Array  # [b, d]

    def together(self, v: Array) -> Array:
        own = self.scale[:, None] * v
        if self.mix is None:
            return own + self.rows
        if self.mix.shape == (1, 1):
            return own + self.mix * jnp.sum(self.rows, axis=0, keepdims=True)
        return own + matmul(self.mix, self.rows)


class Coupling(Operator):
    r"""A symmetric positive semi-definite operator on the task axis: `apply` is $W = \bar M V$."""

    dense: ClassVar[bool] = False  # whether it needs all tasks' rows at once, as a full matrix does

    @abstractmethod
    def diagonal(self) -> Array:
        r"""$\bar M_{tt}$, each task's own curvature, ``[m]``."""

    @abstractmethod
    def row_sums(self, nodes: Array) -> Array:
        r"""$\sum_{t'} n_{t'} |\bar M_{tt'}|$ with `nodes` the counts n, ``[m]``."""

    @abstractmethod
    def spectral_bound(self, nodes: Array) -> Array:
        r"""At least $\lambda_{\max}(D^{-1/2}\bar M D^{-1/2})$ over nodes, D the diagonal; a scalar."""

    @abstractmethod
    def prox(self, y: Array, rho: Array) -> Array:
        r"""$\arg\min_W R(W) + \tfrac{\rho}{2}\|W - Y\|_F^2 = \rho\bar M(I + \rho\bar M)^{-1} Y$."""

    def resolvent(self, rho: Array) -> Operator:
        r"""$\rho\bar M(I + \rho\bar M)^{-1}$, factorised once: the operator that `prox` applies."""
        return _Proximal(self, rho)

    @abstractmethod
    def gradient(self, w: Array) -> Array:
        r"""A subgradient of R at W: $AW$ with $A = \bar M^{-1}$, on the range of $\bar M$."""

    def quadratic_majorizer(self) -> Coupling:
        r"""A linear one, B, with $R^*(V + U) \le R^*(V) + \langle W, U\rangle + \tfrac12\langle U, BU\rangle$."""
        return self

    def project_to_range(self, w: Array) -> Array:
        r"""W moved to the nearest weights of finite R: the range of $\bar M$."""
        return w

    def conjugate(self, v: Array) -> Array:
        r"""$R^*(V) = \tfrac12 \langle V, \bar M V \rangle$, a scalar."""
        return 0.5 * jnp.sum(v * self.apply(v))

    def value(self, v: Array, w: Array) -> Array:
        r"""$R(W)$ at W = apply(V)."""
        return 0.5 * jnp.sum(v * w)

    def slack(self, v: Array, w: Array) -> Array | float:
        r"""$R(W) + R^*(V) - \langle V, W\rangle \ge 0$ at W = apply(V): what `apply` leaves open."""
        return 0.0

    def sigma_prime(self, rule: str, gamma: Hyperparameter = 1.0, nodes: Array | None = None) -> Array:
        r"""A safe scaling per task, eq. (28): $\gamma \bar M \preceq \mathrm{diag}(\sigma'_t \bar M_{tt})$.

        Args:
          rule: ``"lemma9"``, the largest row sum (29) for all tasks; ``"per_task"``, each
            task's own row sum (Remark 5); ``"spectral"``, one number from the largest
            eigenvalue, never above Lemma 9's.
          gamma: aggregation parameter in (0, 1].
          nodes: how many nodes share each task, ``[m]``; default one. The condition is
            over nodes, so three nodes on one task make it three times as hard.

        Examples:
          >>> import jax.numpy as jnp
          >>> m = jnp.array([[2.0, 1.0], [1.0, 4.0]])
          >>> Dense(m).sigma_prime("per_task").tolist()
          [1.5, 1.25]
          >>> Dense(m).sigma_prime("lemma9").tolist()
          [1.5, 1.5]
        """
        check.one_of("sigma_prime", "rule", rule, SIGMA_PRIME_RULES)
        check.in_unit_interval("sigma_prime", open_left=True, gamma=gamma)
        check.scalar("sigma_prime", gamma=gamma)
        diagonal = self.diagonal()
        if nodes is not None:
            check.array("sigma_prime", "nodes", nodes, diagonal.shape)
            check.nonnegative("sigma_prime", nodes=nodes)
        nodes = jnp.ones_like(diagonal) if nodes is None else jnp.maximum(jnp.asarray(nodes, diagonal.dtype), 1.0)
        if rule == "spectral":
            sigma = jnp.broadcast_to(self.spectral_bound(nodes), diagonal.shape)
        else:
            sigma = safe_ratio(self.row_sums(nodes), diagonal)
            if rule == "lemma9":
                sigma = jnp.broadcast_to(jnp.max(sigma), diagonal.shape)
        # A task is at least as curved as itself; this only matters where the diagonal is 0.
        return jnp.asarray(check.number("sigma_prime", "gamma", gamma)) * jnp.maximum(sigma, 1.0)


class _Proximal(Operator):
    """The resolvent of a coupling that says no more of it."""

    coupling: Coupling
    rho: Array  # []

    def apply(self, v: Array) -> Array:
        return self.coupling.prox(v, self.rho)


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

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> Diagonal:
        pull = rho * self.scale
        return Diagonal(pull / (1.0 + pull))

    def row_sums(self, nodes: Array) -> Array:
        return nodes * self.scale

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

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> Exchangeable:
        within, common = (rho * scale / (1.0 + rho * scale) for scale in (self.within, self.common))
        return Exchangeable(within, common, self.num_tasks)

    def row_sums(self, nodes: Array) -> Array:
        return nodes * self.within + jnp.sum(nodes) * self._off

    def spectral_bound(self, nodes: Array) -> Array:
        # Exact with equally many nodes per task, an upper bound otherwise.
        return (jnp.max(nodes) * self.within + jnp.sum(nodes) * self._off) / (self.within + self._off)


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
        r"""At least $\tfrac12\langle V, A^{-1}V\rangle$ where the matrix is but nearly the inverse of A.

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


class LowRank(Coupling):
    r"""$\bar M = b I + F F^\top$ with F of few columns: O(m r) numbers, O(m r d) work, never m x m."""

    base: Array  # [] b >= 0
    factor: Array  # [m, r] F

    def __post_init__(self) -> None:
        check.number("LowRank", "base", self.base)
        check.array("LowRank", "factor", self.factor, ("m", "r"))
        check.number("LowRank", "factor", self.factor)

    def apply(self, v: Array) -> Array:
        return self.parts(v).together(v)

    def parts(self, v: Array) -> Parts:
        return Parts(jnp.reshape(self.base, 1), self.factor, matmul(self.factor.T, v))

    def diagonal(self) -> Array:
        return self.base + jnp.sum(self.factor**2, axis=1)

    def gradient(self, w: Array) -> Array:
        inverse, rest = spectral_map(_inverse_roots, self.factor, self.base), w - self._inside(w)
        return matmul(inverse, matmul(inverse.T, w)) + jnp.where(self.base > 0, safe_ratio(rest, self.base), 0.0)

    def project_to_range(self, w: Array) -> Array:
        return jnp.where(self.base > 0, w, self._inside(w))

    def energy(self, w: Array) -> Array:
        r"""$\tfrac12\mathrm{tr}(W^\top\bar M^{-1}W)$, a scalar; infinite where W leaves the range of $\bar M$."""
        eps, largest = jnp.finfo(w.dtype).eps, self.base + singular_values(self.factor)[0] ** 2
        along = jnp.sum(matmul(spectral_map(_inverse_roots, self.factor, self.base).T, w) ** 2)
        rest = jnp.sum((w - self._inside(w)) ** 2)
        nothing, free = rest <= eps * jnp.sum(w**2), self.base <= eps * largest
        aside = jnp.where(free, jnp.where(nothing, 0.0, jnp.inf), rest / jnp.where(free, 1.0, self.base))
        return 0.5 * (along + aside)

    def _inside(self, w: Array) -> Array:
        """The part of W along the columns of F, but for those that are noise."""
        along = spectral_map(_told_apart, self.factor, self.base)
        return matmul(along, matmul(along.T, w))

    def prox(self, y: Array, rho: Array) -> Array:
        return self.resolvent(rho).apply(y)

    def resolvent(self, rho: Array) -> LowRank:
        # Woodbury, with c = 1 + rho b: 1 - (c + rho F F')^-1 = rho b / c + (rho / c) F (c + rho F'F)^-1 F'.
        c, f = 1.0 + rho * self.base, self.factor
        root = jnp.linalg.cholesky(c * jnp.eye(f.shape[1], dtype=f.dtype) + rho * matmul(f.T, f))
        factor = jnp.sqrt(rho / c) * solve_triangular(root, f.T, lower=True).T
        return LowRank(rho * self.base / c, factor)

    def row_sums(self, nodes: Array) -> Array:
        f, m = self.factor, len(self.factor)
        if m > _EXACT_ROWS:  # m^2 work would rule: |F F'| <= |F| |F|' entry by entry
            return nodes * self.base + matmul(jnp.abs(f), matmul(jnp.abs(f).T, nodes))
        rows = jnp.pad(f, ((0, -m % _ROWS_AT_ONCE), (0, 0))).reshape(-1, _ROWS_AT_ONCE, f.shape[1])
        across = lax.map(lambda some: matmul(jnp.abs(matmul(some, f.T)), nodes), rows)
        return nodes * self.base + across.reshape(-1)[:m]

    def spectral_bound(self, nodes: Array) -> Array:
        # The largest eigenvalue of a sum is at most the sum of the largest; the second is one of r x r.
        scale = safe_ratio(nodes, self.diagonal())
        inner = matmul(self.factor.T, scale[:, None] * self.factor)
        return jnp.max(scale) * self.base + jnp.linalg.eigvalsh(inner)[-1]


def _inverse_roots(f: Array, base: Array) -> Array:
    """Inverse roots of the eigenvalues of the operator in the directions of these singular values."""
    kept = _told_apart(f, base) > 0
    return jnp.where(kept, 1.0 / jnp.sqrt(jnp.where(kept, base + f**2, 1.0)), 0.0)


def _told_apart(f: Array, base: Array) -> Array:
    """1 for directions told apart from those outside of F, which the base is for, 0 for noise."""
    eps, curvature = jnp.finfo(f.dtype).eps, base + f**2
    told = (f > _NOISE * eps * jnp.max(f)) & (curvature > eps * jnp.max(curvature))
    return jnp.where(told, 1.0, 0.0).astype(f.dtype)


def as_matrix(coupling: Coupling) -> Array:
    """The operator written out, ``[m, m]``; for inspection and tests of small problems."""
    check.instance("as_matrix", "coupling", coupling, Coupling, "coupling.Dense(matrix)")
    diagonal = coupling.diagonal()
    return coupling.apply(jnp.eye(diagonal.shape[0], dtype=diagonal.dtype))


@on_purpose
def correlation(covariance: Array) -> Array:
    """A covariance scaled to unit diagonal; a variable without variance is related to none.

    Examples:
      >>> import jax.numpy as jnp
      >>> correlation(jnp.array([[4.0, 1.0], [1.0, 1.0]])).tolist()
      [[1.0, 0.5], [0.5, 1.0]]
    """
    covariance = check.square("correlation", "covariance", covariance)
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), 0.0))
    related = safe_ratio(covariance, scale[:, None] * scale[None, :])
    return jnp.where(jnp.eye(len(covariance), dtype=bool), 1.0, jnp.clip(related, -1.0, 1.0))
