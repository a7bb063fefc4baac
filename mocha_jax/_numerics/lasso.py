r"""Lasso problems that share one quadratic form, for the weights of (15) from V, and the graphical lasso.

One column of W, one feature of all tasks, is one problem in m unknowns; the d of them are solved side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import Array, lax
from jax.scipy.sparse.linalg import cg

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import Pytree
from mocha_jax._core.warnings import warn
from mocha_jax._numerics.math import matmul

_MAX_SWEEPS = 1000
_SWEEPS = 8  # at least, between two steps


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

    Sweeps, which change signs, take turns with Newton's step on the entries that are not 0, which ends the work once
    the signs are right. It goes on until the subgradient of least length is as small as rounding lets it be.
    """
    m = len(a)
    diagonal = jnp.diagonal(a)
    tolerance = 20.0 * jnp.finfo(v.dtype).eps * jnp.max(jnp.abs(v))
    at_once = max(_SWEEPS, m // _SWEEPS)  # about as long as a step

    def residual(w: Array) -> Array:
        """Minus the subgradient of least length."""
        r = v - matmul(a, w)
        return jnp.where(w == 0, soft_threshold(r, lam1), r - lam1 * jnp.sign(w))

    def size(w: Array) -> Array:
        return jnp.max(jnp.abs(residual(w)))

    def update(j: Array, w: Array) -> Array:
        rest = v[j] - matmul(a[j], w) + diagonal[j] * w[j]
        return w.at[j].set(soft_threshold(rest, lam1) / diagonal[j])

    def unswept(carry: tuple[Array, Array]) -> Array:
        return (carry[0] < at_once) & (size(carry[1]) > tolerance)

    def sweep(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] + 1, lax.fori_loop(0, m, update, carry[1])

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        idle, sweeps, w = carry
        return (idle < 2) & (sweeps < _MAX_SWEEPS) & (size(w) > tolerance)

    def sweeps_and_step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        idle, sweeps, before = carry
        count, swept = lax.while_loop(unswept, sweep, (jnp.zeros((), jnp.int32), before))
        w = lax.cond(count < at_once, lambda w: w, lambda w: _newton(a, w, residual(w)), swept)
        moves = jnp.any((jnp.sign(swept) != jnp.sign(before)) | (jnp.sign(w) != jnp.sign(swept)))
        # Where no sign changes in two turns, and a step is of no use, rounding rules.
        idle = jnp.where(moves | (size(w) < 0.5 * size(before)), 0, idle + 1)
        return idle, sweeps + count, w

    none = jnp.zeros((), jnp.int32)
    return lax.while_loop(unfinished, sweeps_and_step, (none, none, start))[2]


def _newton(a: Array, w: Array, residual: Array) -> Array:
    """Go towards the least value with the signs of w: as far as they allow, or all the way with 0 for what crosses 0.

    Of both points that with the smaller value is taken, in every column of w ``[m, d]``.
    """

    def direction(support: Array, r: Array) -> Array:
        own = jnp.where(support[:, None] & support[None, :], a, jnp.eye(len(a), dtype=a.dtype))
        return jsl.cho_solve(jsl.cho_factor(own), jnp.where(support, r, 0.0))

    change = jax.vmap(direction, in_axes=1, out_axes=1)(w != 0, residual)
    change = jnp.where(jnp.all(jnp.isfinite(change), axis=0, keepdims=True), change, 0.0)
    crosses, until = _crossings(w, change)
    share = jnp.min(until, axis=0, keepdims=True)
    allowed = jnp.where(crosses & (until <= share), -w, share * change)
    whole = jnp.where(crosses, -w, change)

    def gain(step: Array) -> Array:  # while no sign changes the objective is quadratic
        return jnp.sum(step * (residual - 0.5 * matmul(a, step)), axis=0, keepdims=True)

    return w + jnp.where(gain(whole) > gain(allowed), whole, allowed)


def _crossings(x: Array, change: Array) -> tuple[Array, Array]:
    """Tell which entries a change takes across 0, and after which share of it each is there; 1 for the others."""
    crosses = jnp.sign(x) * (x + change) < 0
    return crosses, jnp.where(crosses, jnp.abs(x) / jnp.where(crosses, jnp.abs(change), 1.0), 1.0)


_MAX_HALVINGS = 40
_MAX_CG, _CG_ACCURACY = 100, 1e-3  # of a step of Newton's


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

    by proximal gradient steps of Barzilai-Borwein length (Rolfs et al. 2012) and, after every eight of them, a Newton
    step on the entries that are not 0, by conjugate gradients (Olsen et al. 2012): every iterate is positive definite
    and exactly sparse. Steps are taken in units in which every variable has variance 1, so that the scales of
    variables may differ by orders of magnitude. It compiles, and maps over `covariance` and `penalty`.

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

    def iterate(state: _Iterate) -> tuple[Array, _Iterate]:
        """Make a proximal gradient step, if one is short enough."""
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
        change = theta - state.precision
        bend = jnp.sum(change * (state.covariance - inv))
        length = jnp.where(bend > 0, jnp.sum(change**2) / jnp.where(bend > 0, bend, 1.0), step)
        return accepted, _Iterate(theta, inv, length, state.iterations + 1)

    def newton(state: _Iterate) -> _Iterate:
        """Go towards the least value with the signs of Theta, as `_newton` does."""
        theta, covariance = state.precision, state.covariance
        free, signs = theta != 0, jnp.sign(theta)
        slope = jnp.where(free, s - covariance + p * signs, 0.0)
        curvature = jnp.diagonal(covariance)[:, None] * jnp.diagonal(covariance)[None, :] + covariance**2

        def curved(change: Array) -> Array:
            return jnp.where(free, matmul(covariance, matmul(change, covariance)), 0.0)

        change, _ = cg(curved, -slope, tol=_CG_ACCURACY, maxiter=_MAX_CG, M=lambda r: r / curvature)
        change = 0.5 * (change + change.T)
        # Where -log det is quadratic up to this decrement, a step of that share lowers it (self-concordance).
        decrement = jnp.sqrt(jnp.maximum(jnp.sum(change * curved(change)), 0.0))
        damped = jnp.where(decrement > 0.25, 1.0 / (1.0 + decrement), 1.0)
        crosses, until = _crossings(theta, change)
        share = jnp.minimum(damped, jnp.min(until))
        near = jnp.where(crosses & (until <= share), 0.0, theta + share * change)
        far = jnp.where(crosses, 0.0, theta + change)

        def better(other: Array, than: _Iterate) -> _Iterate:
            """Take a matrix where the objective still falls there, or hardly rises, on the way from Theta."""
            inv, way = inverse(other), other - theta
            end = jnp.sum(jnp.where(free, s - inv + p * signs, 0.0) * way)  # NaN if not positive definite
            taken = end <= -0.25 * jnp.sum(slope * way)
            return jax.tree.map(
                lambda a, b: jnp.where(taken, a, b), than.replace(precision=other, covariance=inv), than
            )

        found = better(far, better(near, state))
        return found.replace(iterations=state.iterations + 1)

    def unstepped(carry: tuple[Array, Array, _Iterate]) -> Array:
        count, accepted, state = carry
        return accepted & (count < _SWEEPS) & (state.iterations < max_iterations) & (residual(state) > least)

    def step(carry: tuple[Array, Array, _Iterate]) -> tuple[Array, Array, _Iterate]:
        count, _, before = carry
        accepted, after = iterate(before)
        kept = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), after, before)
        return count + 1, accepted, kept.replace(iterations=after.iterations)

    def unfinished(carry: tuple[Array, _Iterate]) -> Array:
        idle, state = carry
        return (idle < 2) & (state.iterations < max_iterations) & (residual(state) > least)

    def turn(carry: tuple[Array, _Iterate]) -> tuple[Array, _Iterate]:
        idle, before = carry
        _, _, stepped = lax.while_loop(unstepped, step, (none, jnp.asarray(True), before))
        done = (residual(stepped) <= least) | (stepped.iterations >= max_iterations)
        state = lax.cond(done, lambda state: state, newton, stepped)
        signs = (jnp.sign(a.precision) for a in (before, stepped, state))
        moves = jnp.any(next(signs) != (middle := next(signs))) | jnp.any(middle != next(signs))
        return jnp.where(moves | (residual(state) < 0.5 * residual(before)), 0, idle + 1), state

    none = jnp.zeros((), jnp.int32)
    inv = inverse(first)
    safe_step = 1.0 / jnp.maximum(jnp.sum(inv**2), jnp.finfo(s.dtype).tiny)  # at most the least eigenvalue squared
    state = lax.while_loop(unfinished, turn, (none, _Iterate(first, inv, safe_step, none)))[1]
    return state, residual(state)
