"""Any convex loss, from its scalar function alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mocha_jax._core import check
from mocha_jax._core.devices import on_purpose
from mocha_jax._core.pytree import static
from mocha_jax.losses._base import Loss

# Predictions beyond this size are not told apart from infinity when the conjugate is sought.
_FAR = 2.0**20


class FromScalar(Loss):
    r"""A loss given by a convex scalar function; see `from_scalar`."""

    fn: Callable[[Array, Array], Array] = static()
    smooth: float | None = static(default=None)
    bound: float | None = static(default=None)
    labels_are_signs: bool = static(default=False)

    @property
    def binary(self) -> bool:  # type: ignore[override]
        return self.labels_are_signs

    @property
    def smoothness(self) -> float | None:
        return self.smooth

    @property
    def lipschitz(self) -> float | None:
        return self.bound

    def value(self, z: Array, y: Array) -> Array:
        return jnp.vectorize(self.fn)(z, y)

    def derivative(self, z: Array, y: Array) -> Array:
        return jnp.vectorize(jax.grad(self.fn))(z, y)

    def conjugate(self, beta: Array, y: Array) -> Array:
        z = self._maximiser(beta, y)
        low, high = self.dual_bounds(y)
        inside = (beta >= low) & (beta <= high)
        return jnp.where(inside, -beta * z - self.value(z, y), jnp.inf)

    def conjugate_bound(self, beta: Array, y: Array) -> Array:
        return super().conjugate_bound(beta, y) + jnp.finfo(beta.dtype).eps * self._conjugate_rounding(beta, y)

    def dual_bounds(self, y: Array) -> tuple[Array, Array]:
        far = jnp.full_like(y, _FAR)
        return -self.derivative(far, y), -self.derivative(-far, y)

    def dual_step(self, beta: Array, g: Array, y: Array, kappa: Array) -> Array:
        # Optimality is b = -l'(g + kappa (b - beta)); by Moreau g + kappa (b - beta) is the
        # prox of kappa*l at g - kappa*beta. Solved for b itself, so kappa = 0 needs no care:
        # F(b) = b + l'(g + kappa (b - beta)) has slope >= 1.
        slope = jax.grad(self.fn)
        curve = jax.grad(slope)

        def one(beta: Array, g: Array, y: Array, kappa: Array) -> Array:
            def residual(b: Array) -> tuple[Array, Array]:
                z = g + kappa * (b - beta)
                return b + slope(z, y), 1.0 + kappa * curve(z, y)

            root = lax.stop_gradient(_increasing_root(residual, beta))
            # The root by its equation, for derivatives: bisection has none. Where fn has a kink, the root is where the
            # prediction meets the kink, and the equation holds for some slope between those on its sides.
            value, slope_there = residual(root)
            pull = g + kappa * (root - beta)
            tolerance = jnp.sqrt(jnp.finfo(root.dtype).eps) * (1.0 + jnp.abs(root))
            moved = value / lax.stop_gradient(slope_there)
            at_kink = (jnp.abs(value) > tolerance) & (kappa > 0)
            moved = jnp.where(at_kink, pull / lax.stop_gradient(jnp.where(kappa > 0, kappa, 1.0)), moved)
            return root - (moved - lax.stop_gradient(moved))

        return self.project(jnp.vectorize(one)(beta, g, y, kappa), y)

    def fenchel_young(self, z: Array, beta: Array, y: Array) -> Array:
        # The Bregman divergence between z and the point whose slope is -beta.
        maximiser = self._maximiser(beta, y)
        return jnp.maximum(self.value(z, y) - self.value(maximiser, y) + beta * (z - maximiser), 0.0)

    def _fenchel_young_rounding(self, z: Array, beta: Array, y: Array) -> Array:
        at_z = 8.0 * (jnp.abs(self.value(z, y)) + jnp.abs(beta) * jnp.abs(z))
        return at_z + self._conjugate_rounding(beta, y)

    def _conjugate_rounding(self, beta: Array, y: Array) -> Array:
        """A bound on how much larger the conjugate may be because of rounding."""
        maximiser = self._maximiser(beta, y)
        # The supremum is of a concave function, and at a point within this of `at`; beyond it rises by its slope.
        distance = _FAR * 2.0 ** -_steps(beta) + jnp.finfo(beta.dtype).eps * jnp.abs(maximiser)
        rise = jnp.abs(beta + self.derivative(maximiser, y)) * distance / jnp.finfo(beta.dtype).eps
        return rise + 8.0 * (jnp.abs(self.value(maximiser, y)) + jnp.abs(beta) * jnp.abs(maximiser))

    def _maximiser(self, beta: Array, y: Array) -> Array:
        """The point of least size that attains the supremum of -beta z - l(z)."""
        return jnp.vectorize(partial(_slope_point, jax.grad(self.fn)))(beta, y)


@on_purpose
def from_scalar(
    fn: Callable[[Array, Array], Array],
    *,
    smoothness: float | None = None,
    lipschitz: float | None = None,
    binary: bool = False,
) -> FromScalar:
    r"""A loss for any convex function ``fn(z, y)`` of a scalar prediction and label.

    Its coordinate step is a scalar root, found by Newton's method with bisection as its
    safeguard; its conjugate is found by bisection. Prefer the built-in losses where one
    fits: they have closed forms and are many times faster. Name a function of a module
    rather than a lambda: `jit` compiles anew for every new function. Labels and predictions
    should stay below 2^20 in size; beyond it `fn` is taken to be straight.

    Args:
      fn: convex in its first argument; once differentiable almost everywhere.
      smoothness: the Lipschitz constant of its derivative, where you know it.
      lipschitz: its own Lipschitz constant, where you know it.
      binary: whether labels must be -1 and +1.

    Returns:
      The loss.

    Examples:
      >>> import jax.numpy as jnp
      >>> def fair(z, y):
      ...     return jnp.abs(z - y) - jnp.log1p(jnp.abs(z - y))
      >>> loss = from_scalar(fair, smoothness=1.0, lipschitz=1.0)
      >>> step = loss.dual_step(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), jnp.ones(1))
      >>> round(float(step[0]), 4)  # the root of b + (b - 1) / (1 + |b - 1|)
      0.382
    """
    check.function("from_scalar", "fn", fn, "lambda z, y: (z - y) ** 2")
    for name, bound in (("smoothness", smoothness), ("lipschitz", lipschitz)):
        if bound is not None:
            check.scalar("from_scalar", **{name: bound})
            check.positive("from_scalar", **{name: bound})
    check.flag("from_scalar", binary=binary)
    for z in (-_FAR, _FAR):
        if not np.isfinite(fn(jnp.asarray(z), jnp.asarray(1.0))) or np.isnan(
            jax.grad(fn)(jnp.asarray(z), jnp.asarray(1.0))
        ):
            raise ValueError(
                f"from_scalar: fn or its slope is not a number at z = {z:g}; write it so that it does not "
                f"overflow, e.g. with jax.nn.softplus or jnp.logaddexp instead of a logarithm of an exponential."
            )
    for label in (-1.0, 1.0) if binary else (0.0, 1.0):
        _check_slopes(fn, label, smoothness, lipschitz)
    return FromScalar(fn=fn, smooth=smoothness, bound=lipschitz, labels_are_signs=binary)


def _check_slopes(
    fn: Callable[[Array, Array], Array], label: float, smoothness: float | None, lipschitz: float | None
) -> None:
    """Compare what was said of a loss with its slopes for one label: near 0, and further and further away."""
    far = 2.0 ** np.arange(3, 21)
    z = np.concatenate([-far[::-1], np.linspace(-4.0, 4.0, 65), far])
    points = jnp.asarray(z, jnp.result_type(float))
    slopes = np.asarray(jax.vmap(jax.grad(fn), (0, None))(points, jnp.asarray(label, points.dtype)), np.float64)
    size, rise, run = np.abs(slopes), np.diff(slopes), np.diff(z)
    slack = float(jnp.finfo(points.dtype).eps) ** 0.5 * np.maximum(size[1:], size[:-1])
    if (falls := rise < -slack).any():
        i = int(np.argmax(falls))
        raise ValueError(
            f"from_scalar: fn must be convex in z, but its slope falls from {slopes[i]:.3g} at z = {z[i]:g} to "
            f"{slopes[i + 1]:.3g} at z = {z[i + 1]:g} for y = {label:g}."
        )
    if smoothness is not None and (steep := rise - slack > smoothness * run).any():
        i = int(np.argmax(steep))
        raise ValueError(
            f"from_scalar: smoothness must bound how fast fn's slope changes, by {rise[i] / run[i]:.3g} per unit of z "
            f"between z = {z[i]:g} and {z[i + 1]:g} for y = {label:g}; got {smoothness:g}."
        )
    if lipschitz is not None and (steep := size > lipschitz * 1.001).any():
        i = int(np.argmax(steep))
        raise ValueError(
            f"from_scalar: lipschitz must bound the slopes of fn, one of which is {slopes[i]:.3g}, at z = {z[i]:g} "
            f"for y = {label:g}; got {lipschitz:g}."
        )


def _increasing_root(residual: Callable[[Array], tuple[Array, Array]], start: Array) -> Array:
    """The root of an increasing scalar function with slope >= 1 (jumps allowed).

    Slope >= 1 brackets the root between a point and that point minus its value. Each
    iteration halves the bracket and tries one Newton step inside the rest.
    """
    value, _ = residual(start)
    low, high = start - jnp.maximum(value, 0.0), start - jnp.minimum(value, 0.0)

    def shrink(low: Array, high: Array, b: Array) -> tuple[Array, Array, Array]:
        value, slope = residual(b)
        newton = b - value / slope
        return jnp.where(value <= 0, b, low), jnp.where(value >= 0, b, high), newton

    def body(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high, newton = shrink(*bracket, 0.5 * (bracket[0] + bracket[1]))
        return shrink(low, high, jnp.clip(newton, low, high))[:2]

    low, high = lax.fori_loop(0, jnp.finfo(start.dtype).nmant + 4, body, (low, high))
    return 0.5 * (low + high)


def _slope_point(slope: Callable[[Array, Array], Array], beta: Array, y: Array) -> Array:
    """The z of least size with ``slope(z) = -beta``, by bisection away from 0."""
    sign = -jnp.sign(slope(jnp.zeros_like(beta), y) + beta)

    def body(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        beyond = sign * (slope(sign * middle, y) + beta) >= 0
        return jnp.where(beyond, low, middle), jnp.where(beyond, middle, high)

    start = jnp.zeros_like(beta), jnp.full_like(beta, _FAR)
    return sign * lax.fori_loop(0, _steps(beta), body, start)[1]


def _steps(beta: Array) -> int:
    """Count how often the bracket of a slope is halved."""
    return 20 + int(jnp.finfo(beta.dtype).nmant)
