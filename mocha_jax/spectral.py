r"""Functions of a matrix through its singular values, with derivatives that exist wherever the function's does.

The derivative of a singular vector is infinite where two singular values meet: at 0, at the identity, at rank one,
and for every matrix with a repeated value. The functions built here do not depend on which vectors are chosen, so
their own derivatives are finite there; the rules below state them by divided differences and never
divide by a gap between singular values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.typing import ArrayLike

from mocha_jax._core import check
from mocha_jax._core.pytree import summary
from mocha_jax._numerics import tall
from mocha_jax._numerics.math import matmul, safe_ratio

__all__ = [
    "left_spectral_map",
    "matrix_sqrt",
    "safe_sqrt",
    "singular_values",
    "spectral_map",
    "thin_svd",
    "water_fill",
]


Params = TypeVar("Params")  # a pytree


def __dir__() -> list[str]:
    return __all__


def safe_sqrt(x: Array) -> Array:
    """The square root; its derivative at 0 is taken as 0 rather than infinite."""
    x = jnp.asarray(check.number("safe_sqrt", "x", x))
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)


def thin_svd(w: Array) -> tuple[Array, Array, Array]:
    """U ``[m, r]``, s ``[r]`` falling, V' ``[r, d]`` with r = min(m, d)."""
    u, s, vt = jnp.linalg.svd(check.floats("thin_svd", "w", w, ("m", "d")), full_matrices=False)
    return u, s, vt


def singular_values(w: Array) -> Array:
    """Singular values of ``[m, d]``, falling, ``[min(m, d)]``.

    Their derivative is diag(U' dW V): exact for every symmetric function of them.
    """
    return _singular_values(_upright(check.floats("singular_values", "w", w, ("m", "d"))))


def _upright(w: Array) -> Array:
    """W, or its transpose where W has more columns than rows."""
    return w if w.shape[0] >= w.shape[1] else w.T


@jax.custom_jvp
def _singular_values(w: Array) -> Array:
    return tall.factors(w).s


@_singular_values.defjvp
def _singular_values_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    factors = tall.factors(primals[0])
    return factors.s, _diagonal(_core(factors, tangents[0]))


def _core(factors: tall.Factors, dw: Array) -> Array:
    """U' dW V."""
    return matmul(factors.against(dw), factors.vt.T)


# By masks, where `jnp.diagonal` is a gather, whose transpose is a loop on CPUs: each takes longer to compile.
def _diagonal(a: Array) -> Array:
    return jnp.sum(jnp.where(jnp.eye(len(a), dtype=bool), a, 0.0), axis=1)


def _with_diagonal(a: Array, diagonal: Array) -> Array:
    return jnp.where(jnp.eye(len(a), dtype=bool), diagonal[:, None], a)


def spectral_map(fn: Callable[[Array, Params], Array], w: Array | np.ndarray, params: Params) -> Array:
    r"""$U\,\mathrm{diag}(p(s))\,V^\top$ for $W = U\,\mathrm{diag}(s)\,V^\top$, ``[m, d]`` to ``[m, d]``.

    Args:
      fn: ``fn(s, params) -> p``, ``[r]`` to ``[r]``; permuting s permutes p, and p is 0 where s is 0.
        A module-level function: what it needs to be differentiated by comes through `params`.
      w: the matrix.
      params: any pytree.

    The derivative (of such a function: Lewis 1996, Noferini 2017) in the basis of the singular vectors is
    $\Gamma^-\circ\mathrm{sym} + \Gamma^+\circ\mathrm{skew}$ with
    $\Gamma^\mp_{ij} = (p_i \mp p_j)/(s_i \mp s_j)$.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> shrink = lambda s, t: jnp.maximum(s - t, 0.0)
      >>> spectral_map(shrink, jnp.diag(jnp.array([3.0, 1.0])), 0.5).round(3).tolist()
      [[2.5, 0.0], [0.0, 0.5]]
      >>> bool(jnp.isfinite(jax.grad(lambda w: spectral_map(shrink, w, 0.5).sum())(jnp.eye(3))).all())
      True
    """
    check.function("spectral_map", "fn", fn, "lambda s, params: ...")
    w, params = _checked("spectral_map", fn, w, params)
    mapped = _mapped(fn, _upright(w), params)
    return mapped if mapped.shape == w.shape else mapped.T


def _checked(owner: str, fn: Callable[[Array, Params], Array], w: ArrayLike, params: Params) -> tuple[Array, Params]:
    """Matrix and parameters as JAX takes them; the function of the singular values must fit."""
    params, w = check.leaves(owner, "params", params), check.floats(owner, "w", w, ("m", "d"))
    wanted = (min(w.shape),)
    mapped = jax.eval_shape(lambda s: fn(s, params), jax.ShapeDtypeStruct(wanted, w.dtype))
    if getattr(mapped, "shape", None) != wanted:
        raise ValueError(f"{owner}: fn(s, params) must be an array {list(wanted)} as s is, got {check.shown(mapped)}.")
    return w, params


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _spectral_map(fn: Callable[[Array, Params], Array], w: Array, params: Params) -> Array:
    factors = tall.factors(w)
    return factors.left(fn(factors.s, params)[:, None] * factors.vt)


def _spectral_map_jvp(
    fn: Callable[[Array, Params], Array], primals: tuple[Array, Params], tangents: tuple[Array, Params]
) -> tuple[Array, Array]:
    (w, params), (dw, dparams) = primals, tangents
    factors = tall.factors(w)
    s, dw = factors.s, _tangent(w, dw)
    p, minus, jacobian = _divided_differences(fn, s, params)
    own = _diagonal(jacobian)
    total = s[:, None] + s[None, :]
    plus = jnp.where(total > 0, safe_ratio(p[:, None] + p[None, :], total), own[:, None] - jacobian)
    slope = jnp.where(s > 0, safe_ratio(p, s), own)
    mapped = factors.left(p[:, None] * factors.vt)
    along = matmul(dw, factors.vt.T)
    core = factors.against(along)
    symmetric, skew = 0.5 * (minus + plus), 0.5 * (minus - plus)
    inner = _with_diagonal(symmetric * core + skew * core.T, _change(fn, s, params, jacobian, _diagonal(core), dparams))
    # The part of dW outside the span of U, along - U core, has the slope p / s.
    return mapped, matmul(factors.left(inner - core * slope[None, :]) + along * slope[None, :], factors.vt)


_spectral_map.defjvp(_spectral_map_jvp, symbolic_zeros=True)


class Contracted(NamedTuple):
    """The outcome of `contract`."""

    matrix: Array  # what `spectral_map` returns
    values: Array  # [r] its singular values
    of: Array  # [r] those of the matrix that it was made of, falling
    basis: tall.Basis  # for the next one

    def __repr__(self) -> str:
        return summary(self, self._asdict())


def contract(
    fn: Callable[[Array, Params], Array],
    w: Array,
    params: Params,
    basis: tall.Basis,
    by_sums: Callable[[Array, Params], Array] | None = None,
) -> Contracted:
    """`spectral_map` of a function with ``0 <= fn(s) <= s``, by means of what is known of a matrix nearby.

    It is W times a matrix of its width, and takes no left singular vectors. On the basis it does not depend but for
    rounding (see `mocha_jax._numerics.tall`, for `by_sums` too). Of what it returns the matrix alone has a derivative.
    """
    upright = _upright(w)
    contracted = _contracted(fn, by_sums, upright, params, jax.lax.stop_gradient(basis))
    return contracted if upright is w else contracted._replace(matrix=contracted.matrix.T)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _contract(
    fn: Callable[[Array, Params], Array],
    by_sums: Callable[[Array, Params], Array] | None,
    w: Array,
    params: Params,
    basis: tall.Basis,
) -> Contracted:
    contraction = tall.contraction(fn, by_sums, w, params, basis)
    return Contracted(matmul(w, contraction.inner), contraction.values, contraction.s, contraction.basis)


@_contract.defjvp
def _contract_jvp(
    fn: Callable[[Array, Params], Array],
    by_sums: Callable[[Array, Params], Array] | None,
    primals: tuple[Array, Params, tall.Basis],
    tangents: tuple[Array, Params, tall.Basis],
) -> tuple[Contracted, Contracted]:
    contracted = _contract(fn, by_sums, *primals)
    still = jax.tree.map(jnp.zeros_like, contracted)
    return contracted, still._replace(matrix=_spectral_map_jvp(fn, primals[:2], tangents[:2])[1])


def left_spectral_map(fn: Callable[[Array, Params], Array], w: Array, params: Params) -> Array:
    r"""$U\,\mathrm{diag}(p(s))\,U^\top$ for W of at most as many rows as columns, ``[m, d]`` to ``[m, m]``.

    A function of $(WW^\top)^{1/2}$ that does not square W on the way. Arguments as `spectral_map`. Where two
    singular values are 0, the derivative between their vectors is taken as 0.
    """
    check.function("left_spectral_map", "fn", fn, "lambda s, params: ...")
    w, params = _checked("left_spectral_map", fn, w, params)
    if w.shape[0] > w.shape[1]:
        raise ValueError(f"left_spectral_map: w must have at most as many rows as columns, got shape {w.shape}.")
    return _mapped_right(fn, w.T, params)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _right_spectral_map(fn: Callable[[Array, Params], Array], w: Array, params: Params) -> Array:
    factors = tall.factors(w)
    return matmul(factors.vt.T, fn(factors.s, params)[:, None] * factors.vt)


def _right_spectral_map_jvp(
    fn: Callable[[Array, Params], Array], primals: tuple[Array, Params], tangents: tuple[Array, Params]
) -> tuple[Array, Array]:
    (w, params), (dw, dparams) = primals, tangents
    factors = tall.factors(w)
    s, core = factors.s, _core(factors, _tangent(w, dw))
    p, minus, jacobian = _divided_differences(fn, s, params)
    # d(W'W) in this basis is core' S + S core, and (p_i - p_j) / (s_i^2 - s_j^2) multiplies it.
    gram = core.T * s[None, :] + s[:, None] * core
    inner = minus * safe_ratio(gram, s[:, None] + s[None, :])
    inner = _with_diagonal(inner, _change(fn, s, params, jacobian, _diagonal(core), dparams))
    return matmul(factors.vt.T, p[:, None] * factors.vt), matmul(matmul(factors.vt.T, inner), factors.vt)


_right_spectral_map.defjvp(_right_spectral_map_jvp, symbolic_zeros=True)


def _divided_differences(fn: Callable[[Array, Params], Array], s: Array, params: Params) -> tuple[Array, Array, Array]:
    """The values p, (p_i - p_j) / (s_i - s_j), and the Jacobian of p."""
    p, jacobian = fn(s, params), jax.jacfwd(fn)(s, params)
    limit = _diagonal(jacobian)[:, None] - jacobian
    total, apart = s[:, None] + s[None, :], s[:, None] - s[None, :]
    close = jnp.abs(apart) <= jnp.sqrt(jnp.finfo(s.dtype).eps) * total
    return p, jnp.where(close, limit, (p[:, None] - p[None, :]) / jnp.where(close, 1.0, apart)), jacobian


def _change(
    fn: Callable[[Array, Params], Array], s: Array, params: Params, jacobian: Array, ds: Array, dparams: Params
) -> Array:
    """The change of p with the singular values and the parameters."""
    change = matmul(jacobian, ds)
    if all(isinstance(d, SymbolicZero) for d in jax.tree.leaves(dparams)):
        return change
    return change + jax.jvp(lambda q: fn(s, q), (params,), (jax.tree.map(_tangent, params, dparams),))[1]


def _tangent(value: Array, tangent: Array | SymbolicZero) -> Array:
    return zero_from_primal(value) if isinstance(tangent, SymbolicZero) else tangent


def matrix_sqrt(a: Array) -> Array:
    r"""The square root of a symmetric positive semi-definite matrix ``[n, n]``.

    Its derivative solves $S\,dS + dS\,S = dA$: in the eigenbasis
    $dS_{ij} = dA_{ij}/(s_i + s_j)$, taken as 0 where both are 0. Negative eigenvalues count as 0.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> matrix_sqrt(jnp.diag(jnp.array([4.0, 9.0]))).round(4).tolist()
      [[2.0, 0.0], [0.0, 3.0]]
      >>> jax.grad(lambda a: matrix_sqrt(a).sum())(jnp.zeros((2, 2))).tolist()
      [[0.0, 0.0], [0.0, 0.0]]
    """
    return _matrix_sqrt(check.square("matrix_sqrt", "a", a))


@jax.custom_jvp
def _matrix_sqrt(a: Array) -> Array:
    s, vectors = _roots(a)
    return matmul(vectors * s[None, :], vectors.T)


@_matrix_sqrt.defjvp
def _matrix_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    s, vectors = _roots(primals[0])
    da = matmul(matmul(vectors.T, tangents[0]), vectors)
    ds = safe_ratio(0.5 * (da + da.T), s[:, None] + s[None, :])
    return matmul(vectors * s[None, :], vectors.T), matmul(matmul(vectors, ds), vectors.T)


def _roots(a: Array) -> tuple[Array, Array]:
    """Roots of the eigenvalues, and the eigenvectors."""
    values, vectors = jnp.linalg.eigh(a)
    # An eigenvalue of 0 comes out as a rounding error of the largest, whose root would not be small.
    floor = jnp.finfo(values.dtype).eps * len(values) * jnp.max(jnp.abs(values))
    return safe_sqrt(jnp.where(values > floor, values, 0.0)), vectors


def water_fill(s: Array, floor: Array, total: Array) -> Array:
    r"""$\omega_i = \mathrm{clip}(c\,s_i - \mathrm{floor}, 0, 1)$ with c such that they sum to `total`.

    It minimises $\sum_i s_i^2/(\mathrm{floor} + \omega_i)$ over $0 \le \omega \le 1$,
    $\sum\omega = \mathrm{total}$. Where fewer than `total` of the s ``[r]`` are positive, those get 1
    and the sum falls short.

    The level c is exact: on its piece the sum is linear in c, so c and its derivative are a ratio.

    Examples:
      >>> import jax.numpy as jnp
      >>> water_fill(jnp.array([4.0, 2.0, 1.0]), jnp.array(0.25), jnp.array(2.0)).tolist()
      [1.0, 0.75, 0.25]
    """
    s = check.floats("water_fill", "s", s, ("r",))
    check.scalar("water_fill", floor=floor, total=total)
    check.nonnegative("water_fill", floor=floor, total=total)
    floor, total = (jnp.asarray(check.number("water_fill", k, v)) for k, v in (("floor", floor), ("total", total)))
    largest = jnp.max(s)
    s = jnp.where(s > jnp.finfo(s.dtype).eps * largest, safe_ratio(s, largest), 0.0)  # only their ratios matter
    positive, safe = s > 0, jnp.where(s > 0, s, 1.0)
    starts = jnp.where(positive, floor / safe, jnp.inf)
    ends = jnp.where(positive, (1.0 + floor) / safe, jnp.inf)
    breaks = jax.lax.stop_gradient(jnp.sort(jnp.concatenate([starts, ends])))
    finite = jnp.isfinite(breaks)
    levels = jnp.where(finite, breaks, 0.0)
    filled = jnp.sum(jnp.clip(levels[:, None] * s[None, :] - floor, 0.0, 1.0), axis=1)
    reached = finite & (filled >= total)
    enough = jnp.any(reached)
    index = jnp.argmax(reached)  # the first break at or past the level
    middle = 0.5 * (levels[index] + jnp.where(index > 0, levels[index - 1], 0.0))
    full = positive & (middle >= ends)
    rising = positive & (middle > starts) & ~full
    span = jnp.sum(jnp.where(rising, s, 0.0))
    missing = total - jnp.sum(full, dtype=s.dtype) + floor * jnp.sum(rising, dtype=s.dtype)
    level = jnp.where(span > 0, safe_ratio(missing, span), levels[index])
    filling = jnp.where(full, 1.0, jnp.where(rising, jnp.clip(level * s - floor, 0.0, 1.0), 0.0))
    return jnp.where(enough, filling, jnp.where(positive, 1.0, 0.0))


# A program within a program is traced, and differentiated, once for the many places that call it.
_mapped, _mapped_right = (jax.jit(f, static_argnums=0) for f in (_spectral_map, _right_spectral_map))
_contracted = jax.jit(_contract, static_argnums=(0, 1))
