"""The graphical lasso: a sparse precision matrix of few samples."""

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
from mocha_jax._numerics.lasso import BETWEEN, ROUNDINGS, Patience, crossings, least_subgradient, soft_threshold
from mocha_jax._numerics.math import matmul

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
    start: Array | np.ndarray | None = None,
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
        check.positive_definite("graphical_lasso", "start", start)
        start = jnp.asarray(start, s.dtype)
    p = jnp.broadcast_to(jnp.asarray(check.number("graphical_lasso", "penalty", penalty), s.dtype), s.shape)
    p = 0.5 * (p + p.T)  # which is the same penalty of a symmetric matrix
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
            f"{float(left):.1e}, above {float(least):.1e}; "
            + (
                "allow more max_iterations or a larger tol."
                if int(iterate.iterations) >= max_iterations
                else "rounding allows no smaller one: pass a larger tol, or float64."
            )
        )
    return GraphicalLasso(iterate.precision / size, iterate.covariance * size, left, iterate.iterations, solved)


@jax.jit
def _solve(s: Array, p: Array, first: Array, least: Array, max_iterations: Array) -> tuple[_Iterate, Array]:
    """Go from the first precision to one with that residual, and return the residual too."""
    eye = jnp.eye(len(s), dtype=s.dtype)

    def inverse(theta: Array) -> tuple[Array, Array]:
        """The inverse, and the objective; NaN where the matrix is not positive definite."""
        factor = jnp.linalg.cholesky(theta)
        half = jsl.solve_triangular(factor, eye, lower=True)
        value = jnp.sum(s * theta + p * jnp.abs(theta)) - 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor)))
        return matmul(half.T, half), value

    def residual(state: _Iterate) -> Array:
        return jnp.max(jnp.abs(least_subgradient(s - state.covariance, state.precision, p)))

    def iterate(state: _Iterate) -> tuple[Array, _Iterate]:
        """Make a proximal gradient step, if one is short enough."""
        g = s - state.covariance

        def attempt(step: Array) -> tuple[Array, Array, Array]:
            theta = soft_threshold(state.precision - step * g, step * p)
            theta = 0.5 * (theta + theta.T)
            inv, _ = inverse(theta)
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
        """Go towards the least value with the signs of Theta, as the step of the lasso does."""
        theta, covariance = state.precision, state.covariance
        free, signs = theta != 0, jnp.sign(theta)
        slope = jnp.where(free, s - covariance + p * signs, 0.0)
        variances = jnp.diagonal(covariance)
        curvature = variances[:, None] * variances[None, :] + jnp.where(eye == 1, 0.0, covariance**2)

        def curved(change: Array) -> Array:
            return jnp.where(free, matmul(covariance, matmul(change, covariance)), 0.0)

        change, _ = cg(curved, -slope, tol=_CG_ACCURACY, maxiter=_MAX_CG, M=lambda r: r / curvature)
        change = 0.5 * (change + change.T)
        # -log det is self-concordant: with the decrement e, a share 1 / (1 + e) of the step lowers the objective, and
        # for a small e all of it does.
        decrement = jnp.sqrt(jnp.maximum(jnp.sum(change * curved(change)), 0.0))
        damped = jnp.where(decrement > 0.25, 1.0 / (1.0 + decrement), 1.0)
        crosses, until = crossings(theta, change)
        share = jnp.minimum(damped, jnp.min(until))
        near = jnp.where(crosses & (until <= share), 0.0, theta + share * change)
        far = jnp.where(crosses, 0.0, theta + change)

        def better(other: Array, than: tuple[Array, _Iterate]) -> tuple[Array, _Iterate]:
            """Take a matrix with a smaller objective, or where rounding hides which is, if the slope there is small."""
            (inv, value), way = inverse(other), other - theta
            end = jnp.sum(jnp.where(free, s - inv + p * signs, 0.0) * way)
            taken = (end <= -0.25 * jnp.sum(slope * way)) & (value <= than[0] + rounding)  # neither holds of NaN
            new = value, than[1].replace(precision=other, covariance=inv)
            return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, than)

        _, value = inverse(theta)
        rounding = ROUNDINGS * jnp.finfo(s.dtype).eps * (len(s) + jnp.sum(jnp.abs(s * theta) + p * jnp.abs(theta)))
        _, found = better(far, better(near, (value, state)))
        return found.replace(iterations=state.iterations + 1)

    def unstepped(carry: tuple[Array, Array, _Iterate]) -> Array:
        count, accepted, state = carry
        return accepted & (count < BETWEEN) & (state.iterations < max_iterations) & (residual(state) > least)

    def step(carry: tuple[Array, Array, _Iterate]) -> tuple[Array, Array, _Iterate]:
        count, _, before = carry
        accepted, after = iterate(before)
        kept = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), after, before)
        return count + 1, accepted, kept.replace(iterations=after.iterations)

    def unfinished(carry: tuple[Patience, _Iterate]) -> Array:
        patience, state = carry
        return patience.goes_on() & (state.iterations < max_iterations) & (residual(state) > least)

    def turn(carry: tuple[Patience, _Iterate]) -> tuple[Patience, _Iterate]:
        patience, before = carry
        _, _, stepped = lax.while_loop(unstepped, step, (zero, jnp.asarray(True), before))
        done = (residual(stepped) <= least) | (stepped.iterations >= max_iterations)
        state = lax.cond(done, lambda state: state, newton, stepped)
        states = before.precision, stepped.precision, state.precision
        return patience.after(residual(state), *states), state

    zero = jnp.zeros((), jnp.int32)
    inv, _ = inverse(first)
    safe_step = 1.0 / jnp.maximum(jnp.sum(inv**2), jnp.finfo(s.dtype).tiny)  # at most the least eigenvalue squared
    begin = _Iterate(first, inv, safe_step, zero)
    _, state = lax.while_loop(unfinished, turn, (Patience(zero, residual(begin)), begin))
    return state, residual(state)
