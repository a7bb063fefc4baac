r"""Lasso problems that share one quadratic form, for the weights of (15) from V, and the graphical lasso.

One column of W, one feature of all tasks, is one problem in m unknowns; the d of them are solved side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree
from mocha_jax._core.warnings import warn
from mocha_jax._numerics.math import matmul

_MAX_SWEEPS = 1000


def soft_threshold(x: Array, by: Array) -> Array:
    """Numbers moved towards 0 by `by`, and no further than 0."""
    return x - jnp.clip(x, -by, by)


def lasso(a: Array, v: Array, lam1: Array, start: Array) -> Array:
    r"""Coordinate descent on d problems at once.

    $$
    \arg\min_W \tfrac12\mathrm{tr}(W^\top A W) - \langle V, W\rangle + \lambda_1\|W\|_1
    $$

    Args:
      a: positive definite ``[m, m]``.
      v: ``[m, d]``; every column is a problem of its own.
      lam1: penalty, a scalar.
      start: where to begin ``[m, d]``; where it is optimal already, it is returned.

    Sweeps until the subgradient of least length is as small as rounding lets it be.
    """
    diagonal = jnp.diagonal(a)
    tolerance = 20.0 * jnp.finfo(v.dtype).eps * jnp.max(jnp.abs(v))

    def update(j: Array, w: Array) -> Array:
        rest = v[j] - matmul(a[j], w) + diagonal[j] * w[j]
        return w.at[j].set(soft_threshold(rest, lam1) / diagonal[j])

    def unfinished(carry: tuple[Array, Array]) -> Array:
        sweep, w = carry
        r = v - matmul(a, w)
        residual = jnp.where(w == 0, jnp.abs(soft_threshold(r, lam1)), jnp.abs(r - lam1 * jnp.sign(w)))
        return (sweep < _MAX_SWEEPS) & (jnp.max(residual) > tolerance)

    def one_sweep(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sweep, w = carry
        return sweep + 1, lax.fori_loop(0, len(a), update, w)

    return lax.while_loop(unfinished, one_sweep, (jnp.zeros((), jnp.int32), start))[1]


_MAX_HALVINGS = 40


class GraphicalLasso(Pytree):
    """A sparse precision matrix, from `graphical_lasso`."""

    precision: Array  # [m, m] sparse, positive definite
    covariance: Array  # [m, m] its inverse
    residual: Array  # [] largest entry of the smallest subgradient, for variables of variance 1; 0 at the optimum
    iterations: Array  # [] int32
    solved: Array  # [] bool whether the residual is as small as was asked for


class _Iterate(Pytree):
    precision: Array
    covariance: Array
    step: Array
    iterations: Array


@on_purpose
def graphical_lasso(
    covariance: Array | np.ndarray,
    penalty: Array | np.ndarray | float,
    *,
    mask: Array | None = None,
    start: Array | None = None,
    tol: float | None = None,
    max_iterations: int = 10_000,
) -> GraphicalLasso:
    r"""The graphical lasso (Friedman et al. 2008).

    $$
    \min_{\Theta\succ0}\; -\log|\Theta| + \mathrm{tr}(S\Theta) + \sum_{ij} P_{ij}|\Theta_{ij}|,
    $$

    by proximal gradient steps of Barzilai-Borwein length (Rolfs et al. 2012): every iterate is positive definite and
    exactly sparse. Steps are taken in units in which every variable has variance 1, so that the scales of variables may
    differ by orders of magnitude. It compiles, and maps over `covariance` and `penalty`.

    Args:
      covariance: S ``[m, m]``, symmetric positive semi-definite; may be singular.
      penalty: P, a number for all entries *with* the diagonal, or a matrix ``[m, m]``. For a penalty on the
        other entries alone, as in scikit-learn, pass ``alpha * (1 - eye)``.
      mask: which variables exist ``[m]``; the others end with 1 on the diagonal, related to none.
      start: positive definite ``[m, m]`` to begin from, e.g. the previous solution.
      tol: residual to stop at, for variables of variance 1; default the 3/4 power of the rounding unit.
      max_iterations: bound on the steps. Where they do not suffice, or rounding does not allow so small a residual,
        ``solved`` is False, and outside of compiled code a warning says so.

    Examples:
      >>> import jax.numpy as jnp
      >>> s = jnp.array([[1.0, 0.5], [0.5, 1.0]])
      >>> graphical_lasso(s, 0.6).precision.round(3).tolist()
      [[0.625, 0.0], [0.0, 0.625]]
    """
    check.nonnegative("graphical_lasso", penalty=penalty)
    check.integer("graphical_lasso", 1, max_iterations=max_iterations)
    if tol is not None:
        check.scalar("graphical_lasso", tol=tol)
        check.nonnegative("graphical_lasso", tol=tol)
        tol = check.number("graphical_lasso", "tol", tol)
    max_iterations = int(max_iterations)
    s = check.square("graphical_lasso", "covariance", covariance)
    m = len(s)
    if np.shape(penalty) not in ((), (m, m)):
        raise ValueError(
            f"graphical_lasso: penalty must be a number or a matrix {[m, m]}, got shape {np.shape(penalty)}."
        )
    if start is not None:
        check.array("graphical_lasso", "start", start, (m, m))
        check.positive_semidefinite("graphical_lasso", "start", start)
        start = jnp.asarray(start, s.dtype)
    p = jnp.broadcast_to(jnp.asarray(check.number("graphical_lasso", "penalty", penalty), s.dtype), s.shape)
    eye = jnp.eye(m, dtype=s.dtype)
    if mask is not None:
        mask = check.marks("graphical_lasso", "mask", mask, (m,))
        pair = mask[:, None] & mask[None, :]
        s, p = jnp.where(pair, s, eye), jnp.where(pair, p, 0.0)
        start = None if start is None else jnp.where(pair, start, eye)
    check.positive_semidefinite("graphical_lasso", "covariance", s)
    # The solution has the variances S_ii + P_ii: in units in which they are 1 the problem is far better conditioned.
    variances = jnp.diagonal(s + p)
    units = jnp.sqrt(jnp.where(variances > 0, variances, 1.0))
    size = units[:, None] * units[None, :]
    first = eye if start is None else start * size
    least = jnp.asarray(jnp.finfo(s.dtype).eps ** 0.75 if tol is None else tol, s.dtype)
    iterate, left = _solve(s / size, p / size, first, least, jnp.asarray(max_iterations, jnp.int32))
    solved = left <= least
    if check.concrete(solved) is not None and not solved:
        warn(
            f"graphical_lasso: not solved: after {int(iterate.iterations)} iterations the residual is "
            f"{float(left):.1e}, above {float(least):.1e}; allow more max_iterations or a larger tol."
        )
    return GraphicalLasso(iterate.precision / size, iterate.covariance * size, left, iterate.iterations, solved)


@jax.jit
def _solve(s: Array, p: Array, first: Array, least: Array, max_iterations: Array) -> tuple[_Iterate, Array]:
    """Go from the first precision to one with that residual, and return the residual too."""
    eye = jnp.eye(len(s), dtype=s.dtype)

    def inverse(theta: Array) -> Array:
        half = jsl.solve_triangular(jnp.linalg.cholesky(theta), eye, lower=True)
        return matmul(half.T, half)

    def residual(state: _Iterate) -> Array:
        g = s - state.covariance
        free = jnp.abs(g + p * jnp.sign(state.precision))
        return jnp.max(jnp.where(state.precision == 0, jnp.maximum(jnp.abs(g) - p, 0.0), free))

    def unfinished(state: _Iterate) -> Array:
        return (state.iterations < max_iterations) & (residual(state) > least)

    def iterate(state: _Iterate) -> _Iterate:
        g = s - state.covariance

        def attempt(step: Array) -> tuple[Array, Array, Array]:
            theta = soft_threshold(state.precision - step * g, step * p)
            theta = 0.5 * (theta + theta.T)
            inv = inverse(theta)
            change = theta - state.precision
            bend = jnp.sum(change * (state.covariance - inv))  # <change, change of the gradient>
            # NaN where theta is not positive definite: not accepted either.
            return theta, inv, bend <= jnp.sum(change**2) / step

        def too_long(carry: tuple[Array, Array, tuple[Array, Array, Array]]) -> Array:
            halvings, _, (_, _, accepted) = carry
            return (halvings < _MAX_HALVINGS) & ~accepted

        def shorter(
            carry: tuple[Array, Array, tuple[Array, Array, Array]],
        ) -> tuple[Array, Array, tuple[Array, Array, Array]]:
            halvings, step, _ = carry
            return halvings + 1, 0.5 * step, attempt(0.5 * step)

        begin = jnp.zeros((), jnp.int32), state.step, attempt(state.step)
        _, step, (theta, inv, accepted) = lax.while_loop(too_long, shorter, begin)
        theta, inv = jnp.where(accepted, theta, state.precision), jnp.where(accepted, inv, state.covariance)
        change = theta - state.precision
        bend = jnp.sum(change * (state.covariance - inv))
        length = jnp.where(bend > 0, jnp.sum(change**2) / jnp.where(bend > 0, bend, 1.0), step)
        # No step was short enough: rounding rules, and nothing is to be gained.
        iterations = jnp.where(accepted, state.iterations + 1, max_iterations)
        return _Iterate(theta, inv, length, iterations)

    inv = inverse(first)
    safe_step = 1.0 / jnp.maximum(jnp.sum(inv**2), jnp.finfo(s.dtype).tiny)  # at most the least eigenvalue squared
    state = lax.while_loop(unfinished, iterate, _Iterate(first, inv, safe_step, jnp.zeros((), jnp.int32)))
    return state, residual(state)
