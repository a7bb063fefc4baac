"""The contract of couplings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.sparse.linalg import cg

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Hyperparameter, Pytree, summary
from mocha_jax._numerics.math import matmul, safe_ratio


class Curvature(Pytree):
    r"""Second derivatives of the losses of all tasks, $H_t = \sum_i b_{ti} x_{ti} x_{ti}^\top$."""

    @abstractmethod
    def times(self, w: Array) -> Array:
        r"""$H_tw_t$ of every task, ``[m, d]``."""

    @abstractmethod
    def sums(self, slopes: Array) -> Array:
        r"""$\sum_i \rho_{ti} x_{ti}$ of a number for every sample, ``[m, d]``."""

    @abstractmethod
    def left(self, w: Array, slopes: Array) -> Array:
        r"""$\rho_{ti} - b_{ti}x_{ti}^\top w_t$ of every sample."""

    @abstractmethod
    def scaled(self, scale: Array) -> Curvature:
        """Return the second derivatives for samples whose feature j is multiplied by ``scale[j]``."""

    @abstractmethod
    def own(self, scale: Array) -> OwnSystems:
        """Each task's system by itself, of its number of ``[m]``, or one ``[1]`` for all."""


class OwnSystems(Pytree):
    r"""The systems $I + s_tH_t$, factorised."""

    @abstractmethod
    def apply(self, right: Array) -> Array:
        r"""$(I + s_tH_t)^{-1}C_t$ of every task, ``[m, d]``, up to rounding of the systems: for a preconditioner."""

    @abstractmethod
    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        r"""Solve $(I + s_tH_t)D_t = C_t + s_t\sum_i\rho_{ti}x_{ti}$.

        Args:
          right: C ``[m, d]``.
          slopes: $\rho$, a number for every sample.

        Returns:
          D ``[m, d]``, and what `Curvature.left` says of it.
        """

    @abstractmethod
    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        r"""$\sum_t (I + s_tH_t)^{-1}H_t$, ``[d, d]``, and what applies each task's to its row and adds up."""


SIGMA_PRIME_RULES = ("lemma9", "per_task", "spectral")

# Of a Newton step by conjugate gradients: the residual at which it ends, a power of the rounding unit; and at most so
# many products.
_CG_POWER, _CG_STEPS = 0.75, 200


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

    The caller can fuse the sum with further work.
    """

    scale: Array  # [m] or [1]
    mix: Array | None  # [m, b]; [1, 1]: so much of the sum of all rows; None: each row is its task's
    rows: Array  # [b, d]

    def __repr__(self) -> str:
        return summary(self, self._asdict())

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
        r"""An upper bound on $\lambda_{\max}(D^{-1/2}\bar M D^{-1/2})$ over nodes, D the diagonal; a scalar."""

    @abstractmethod
    def prox(self, y: Array, rho: Array) -> Array:
        r"""$\arg\min_W R(W) + \tfrac{\rho}{2}\|W - Y\|_F^2 = \rho\bar M(I + \rho\bar M)^{-1} Y$."""

    def resolvent(self, rho: Array) -> Operator:
        r"""$\rho\bar M(I + \rho\bar M)^{-1}$, factorised once: the operator that `prox` applies."""
        return _Proximal(self, rho)

    @abstractmethod
    def gradient(self, w: Array) -> Array:
        r"""A subgradient of R at W: $AW$ with $A = \bar M^{-1}$, on the range of $\bar M$."""

    def newton_system(self, curvature: Curvature) -> Callable[[Array, Array], tuple[Array, Array]]:
        r"""Return what solves $(I + \bar M H)D = C + \bar M X^\top\rho$ for D: where losses as curved as H balance R.

        Default: conjugate gradients on $(H + \bar M^{-1})D = \bar M^{-1}C + X^\top\rho$, each task's own part solved
        exactly.

        Args:
          curvature: H of every task's losses.

        Returns:
          A function of C ``[m, d]``, in the range of $\bar M$, and of $\rho$, a number for every sample, to D and
          $\rho - bXD$ of every sample. What is factorised serves all calls.
        """
        return by_conjugate_gradients(self.gradient, 1.0 / self.diagonal(), curvature)

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
          >>> from mocha_jax.coupling import Dense
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
    """The default resolvent of a coupling."""

    coupling: Coupling
    rho: Array  # []

    def apply(self, v: Array) -> Array:
        return self.coupling.prox(v, self.rho)


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
    return _correlation(check.square("correlation", "covariance", covariance))


@jax.jit
def _correlation(covariance: Array) -> Array:
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), 0.0))
    related = safe_ratio(covariance, scale[:, None] * scale[None, :])
    return jnp.where(jnp.eye(len(covariance), dtype=bool), 1.0, jnp.clip(related, -1.0, 1.0))


def by_conjugate_gradients(
    gradient: Callable[[Array], Array], near: Array, curvature: Curvature
) -> Callable[[Array, Array], tuple[Array, Array]]:
    r"""Solve $(H + A)D = AC + X^\top\rho$, from `gradient`, which applies A, and numbers near its diagonal ``[m]``."""
    own = curvature.own(1.0 / near)

    def curved(w: Array) -> Array:
        return curvature.times(w) + gradient(w)

    def step(right: Array, slopes: Array) -> tuple[Array, Array]:
        eps = float(jnp.finfo(right.dtype).eps)

        def nearly(w: Array) -> Array:
            return own.apply(w / near[:, None])

        force = gradient(right) + curvature.sums(slopes)
        solution = cg(curved, force, M=nearly, tol=eps**_CG_POWER, maxiter=_CG_STEPS)[0]
        return solution, curvature.left(solution, slopes)

    return step
